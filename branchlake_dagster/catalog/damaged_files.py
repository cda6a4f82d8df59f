"""Finds the damaged data file after a read has failed, because Arrow's errors do not name it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import BooleanExpression
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.table import (
    ALWAYS_TRUE,
    DataScan,
    FileScanTask,
    IncrementalAppendScan,
    Table,
    Transaction,
    UpsertResult,
)
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.upsert_util import create_match_filter
from pyiceberg.typedef import EMPTY_DICT, Properties

from branchlake_dagster.catalog.stored_files import StoredFileDamaged, read_content, wrap_parse_errors
from branchlake_dagster.internals.pyiceberg import CachingTransaction


class StoredTable(Table):
    """A table of the catalog. Its scans and writes raise StoredFileDamaged, which names a damaged file."""

    def transaction(self) -> Transaction:
        """Return a transaction, which `delete`, `overwrite` and `upsert` of the table use too."""
        return StoredTransaction(self)

    def scan(
        self,
        row_filter: str | BooleanExpression = ALWAYS_TRUE,
        selected_fields: tuple[str, ...] = ("*",),
        case_sensitive: bool = True,
        snapshot_id: int | None = None,
        options: Properties = EMPTY_DICT,
        limit: int | None = None,
    ) -> DataScan:
        """Return a scan of the table's current metadata, as PyIceberg's `Table.scan`."""
        return StoredScan(
            self.metadata,
            self.io,
            row_filter=row_filter,
            selected_fields=selected_fields,
            case_sensitive=case_sensitive,
            snapshot_id=snapshot_id,
            options=options,
            limit=limit,
            catalog=self.catalog,
            table_identifier=self.name(),
        )

    def incremental_append_scan(
        self,
        *,
        from_snapshot_id_exclusive: int | None = None,
        to_snapshot_id_inclusive: int | None = None,
        row_filter: str | BooleanExpression = ALWAYS_TRUE,
        selected_fields: tuple[str, ...] = ("*",),
        case_sensitive: bool = True,
        options: Properties = EMPTY_DICT,
        limit: int | None = None,
    ) -> IncrementalAppendScan:
        """Return a scan of the appended rows, as PyIceberg's `Table.incremental_append_scan`."""
        return StoredAppendScan(
            self.metadata,
            self.io,
            row_filter=row_filter,
            selected_fields=selected_fields,
            case_sensitive=case_sensitive,
            from_snapshot_id=from_snapshot_id_exclusive,
            to_snapshot_id=to_snapshot_id_inclusive,
            options=options,
            limit=limit,
        )


class StoredTransaction(CachingTransaction):
    """A transaction that raises StoredFileDamaged if it reads a damaged file, as `name_damaged_file`.

    Deletes, overwrites and upserts read the files in which some rows stay and others do not. After other
    errors, such as those of a commit, no file is read.
    """

    def __init__(self, table: Table, autocommit: bool = False) -> None:
        super().__init__(table, autocommit)
        self._io = table.io

    def delete(  # type: ignore[override]  # `_isolation_operation` is in `options`
        self,
        delete_filter: str | BooleanExpression,
        snapshot_properties: dict[str, str] = EMPTY_DICT,
        case_sensitive: bool = True,
        branch: str | None = MAIN_BRANCH,
        **options: Any,
    ) -> None:
        """Delete rows, as PyIceberg's `Transaction.delete`. Overwrites use it too."""
        self.reads_data = False
        with name_damaged_file(self._io, lambda: self._list_tasks(delete_filter, case_sensitive, branch)):
            super().delete(delete_filter, snapshot_properties, case_sensitive, branch, **options)

    def upsert(
        self,
        df: pa.Table,
        join_cols: list[str] | None = None,
        when_matched_update_all: bool = True,
        when_not_matched_insert_all: bool = True,
        case_sensitive: bool = True,
        branch: str | None = MAIN_BRANCH,
        snapshot_properties: dict[str, str] = EMPTY_DICT,
    ) -> UpsertResult:
        """Insert or update rows, as PyIceberg's `Transaction.upsert`."""

        def list_tasks() -> Iterable[FileScanTask]:
            keys = join_cols or [*self.table_metadata.schema().identifier_field_names()]
            return self._list_tasks(create_match_filter(df, keys), case_sensitive, branch)

        self.reads_data = True
        with name_damaged_file(self._io, list_tasks):
            return super().upsert(
                df,
                join_cols,
                when_matched_update_all,
                when_not_matched_insert_all,
                case_sensitive,
                branch,
                snapshot_properties,
            )

    def _list_tasks(
        self, row_filter: str | BooleanExpression, case_sensitive: bool, branch: str | None
    ) -> Iterable[FileScanTask]:
        """Return the files with matching rows that the transaction reads at present.

        A delete has removed the files of which all rows match before it reads the others.
        """
        if not self.reads_data:
            return ()
        metadata = self.table_metadata
        scan = DataScan(metadata, self._io, row_filter=row_filter, case_sensitive=case_sensitive)
        return (scan.use_ref(branch) if branch is not None and branch in metadata.refs else scan).plan_files()


class StoredScan(DataScan):
    """A scan that raises StoredFileDamaged for a damaged file, as `name_damaged_file`."""

    def to_arrow(self, *arguments: Any, **options: Any) -> pa.Table:
        """Read all rows."""
        with name_damaged_file(self.io, self.plan_files):
            return super().to_arrow(*arguments, **options)

    def to_arrow_batch_reader(self, *arguments: Any, **options: Any) -> pa.RecordBatchReader:
        """Return the rows as a stream of batches. Its errors are raised while it is read."""
        with name_damaged_file(self.io, self.plan_files):
            reader = super().to_arrow_batch_reader(*arguments, **options)
        return _wrap_reader(self, reader)

    def count(self) -> int:
        """Count the rows. Reads the files that have other rows, or deleted rows."""
        with name_damaged_file(self.io, self.plan_files):
            return super().count()


class StoredAppendScan(IncrementalAppendScan):
    """A scan of appended rows that raises StoredFileDamaged for a damaged file, as `name_damaged_file`."""

    def to_arrow(self) -> pa.Table:
        """Read all rows."""
        with name_damaged_file(self.io, self.plan_files):
            return super().to_arrow()

    def to_arrow_batch_reader(self) -> pa.RecordBatchReader:
        """Return the rows as a stream of batches. Its errors are raised while it is read."""
        with name_damaged_file(self.io, self.plan_files):
            reader = super().to_arrow_batch_reader()
        return _wrap_reader(self, reader)


def _wrap_reader(
    scan: DataScan | IncrementalAppendScan, reader: pa.RecordBatchReader
) -> pa.RecordBatchReader:
    def iter_batches() -> Iterator[pa.RecordBatch]:
        with name_damaged_file(scan.io, scan.plan_files):
            yield from reader

    return pa.RecordBatchReader.from_batches(reader.schema, iter_batches())


@contextmanager
def name_damaged_file(io: FileIO, list_tasks: Callable[[], Iterable[FileScanTask]]) -> Iterator[None]:
    """Raise StoredFileDamaged if the block fails because it reads a damaged Parquet file.

    `list_tasks` returns what the block reads. If all files can be parsed, or the storage does not answer, the
    error is raised as it is.

    Cost: after an error of Arrow, the footers of the files are read again. Their rows are read too if Arrow
    could not read a page, one file after the other, until one cannot be parsed.
    """
    try:
        yield
    except pa.ArrowInvalid as error:
        if damaged := _find_damaged(io, list_tasks, reads_rows=False):
            raise damaged from error
        raise
    except OSError as error:
        # The storage's own errors have an error number and name the file. Arrow's errors of pages have none.
        if error.errno is None and (damaged := _find_damaged(io, list_tasks, reads_rows=True)):
            raise damaged from error
        raise


def _find_damaged(
    io: FileIO, list_tasks: Callable[[], Iterable[FileScanTask]], *, reads_rows: bool
) -> StoredFileDamaged | None:
    """Return the error of the first file that cannot be parsed; None if there is none or it is not known."""
    try:
        for task in list_tasks():
            for file in (task.file, *task.delete_files):
                if file.file_format == FileFormat.PARQUET and (reads_rows or not _has_footer(io, file)):
                    _parse(read_content(io, file.file_path), file.file_path)
    except StoredFileDamaged as damaged:
        return damaged
    except OSError:
        return None
    return None


def _has_footer(io: FileIO, file: DataFile) -> bool:
    try:
        with io.new_input(file.file_path).open() as stream:
            pq.ParquetFile(stream)
    except (pa.ArrowInvalid, OSError):
        return False  # the file may be damaged, or the storage may not answer
    return True


def _parse(content: bytes, location: str) -> None:
    with wrap_parse_errors(location):
        parquet = pq.ParquetFile(pa.BufferReader(content))
        for number in range(parquet.num_row_groups):
            parquet.read_row_group(number)
