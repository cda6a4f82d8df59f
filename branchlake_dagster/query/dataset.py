"""Provides an Iceberg table as a PyArrow dataset for DuckDB, which reads only the needed columns and files.

DuckDB passes the columns and the filter of a query to any `pyarrow.dataset.Dataset`. PyIceberg reads the
files, because it handles row-level deletes, renamed columns and promoted types.

The filter is a PyArrow expression, which only PyArrow can evaluate. So each file becomes a fragment of a
PyArrow dataset with its bounds from the manifests as a guarantee. PyArrow skips fragments whose guarantee
contradicts the filter. No file is opened for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import (
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
)

from branchlake_dagster.catalog.damaged_files import name_damaged_file
from branchlake_dagster.catalog.stored_files import StoredFileDamaged
from branchlake_dagster.history.manifests import column_facts
from branchlake_dagster.query.reference import QueryFailed

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask

_BOUNDED = (IntegerType, LongType, DateType, DecimalType, StringType, TimestampType, TimestamptzType)
"""The types of the columns whose bounds are used to skip files.

Floats are not among them: their bounds leave out NaN, which DuckDB sorts above all numbers.
"""


def select_tasks(
    tasks: Sequence[FileScanTask], metadata: TableMetadata, arrow_schema: pa.Schema, condition: ds.Expression
) -> list[FileScanTask]:
    """Return the tasks whose file may contain a row for which `condition` is true. Opens no data file.

    `arrow_schema` are the table's columns as Arrow types.
    """
    specs = metadata.specs()
    fields = [
        (field, schema_to_pyarrow(Schema(field)).types[0])
        for field in metadata.schema().fields
        if isinstance(field.field_type, _BOUNDED)
    ]
    parquet, file_system = ds.ParquetFileFormat(), LocalFileSystem()
    fragments = [
        parquet.make_fragment(
            str(number),
            file_system,
            partition_expression=_build_guarantee(task.file, specs[task.file.spec_id], fields),
        )
        for number, task in enumerate(tasks)
    ]
    dataset = ds.FileSystemDataset(fragments, arrow_schema, parquet, file_system)
    return [tasks[int(fragment.path)] for fragment in dataset.get_fragments(filter=condition)]


def _build_guarantee(
    file: DataFile, spec: PartitionSpec, fields: Iterable[tuple[NestedField, pa.DataType]]
) -> ds.Expression:
    """Return an expression that is true for every row of the file, by its bounds and null counts.

    `fields` are the columns to use, with their Arrow types.
    """
    guarantee = pa.compute.scalar(True)
    for field, arrow_type in fields:
        file_facts, column = column_facts(file, field, spec), ds.field(field.name)
        if file_facts.all_null:
            guarantee = guarantee & column.is_null()
        elif file_facts.low is not None and file_facts.high is not None:
            is_within_bounds = (column >= _to_scalar(file_facts.low, arrow_type)) & (
                column <= _to_scalar(file_facts.high, arrow_type)
            )
            guarantee = guarantee & (
                is_within_bounds if file_facts.no_null else is_within_bounds | column.is_null()
            )
    return guarantee


def _to_scalar(value: Any, arrow_type: pa.DataType) -> pa.Scalar:
    # Iceberg stores dates as days and timestamps as microseconds.
    if isinstance(value, int):
        return pa.scalar(value, pa.int32() if pa.types.is_date(arrow_type) else pa.int64()).cast(arrow_type)
    return pa.scalar(value, arrow_type)


_GROUP_BYTES = 64 << 20
"""Files up to this total size in bytes are read together. A larger file is read alone to limit memory."""


class IcebergDataset(ds.Dataset):  # type: ignore[misc]  # PyArrow has no types
    """The current snapshot of `table`. Data files are read only when a scanner's reader is read."""

    def __init__(self, table: Table) -> None:
        # PyArrow's own constructor always raises. DuckDB uses only the two members below.
        self._table = table
        self._arrow_schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
        self._tasks: list[FileScanTask] | None = None
        self.damaged: StoredFileDamaged | None = None
        """The error of a damaged file that a reader has met. DuckDB raises an error of its own."""

    @property
    def schema(self) -> pa.Schema:
        """The table's columns as Arrow types."""
        return self._arrow_schema

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: ds.Expression | None = None,  # noqa: A002
        **_: Any,
    ) -> IcebergScanner:
        """Return a scanner of `columns` for the rows for which `filter` is true.

        With None, all columns or all rows are returned.
        """
        column_names = list(self.schema.names if columns is None else columns)
        return IcebergScanner(self, column_names, filter)

    def read(self, column_names: Sequence[str], condition: ds.Expression | None) -> pa.RecordBatchReader:
        """Return a stream of exactly the rows for which the condition is true, reading a few files at a time.

        With None as condition, all rows are returned. Raises QueryFailed if PyIceberg cannot read the table.
        """
        tasks = self.plan_files()
        if condition is not None:
            tasks = select_tasks(tasks, self._table.metadata, self.schema, condition)
        scan_columns = [
            *column_names,
            *(_condition_columns(self.schema, column_names, condition) if condition is not None else ()),
        ]
        # A query such as count(*) may need zero columns, which PyIceberg cannot read.
        scan_schema = self._table.schema().select(*(scan_columns or self.schema.names[:1]))
        arrow_schema = schema_to_pyarrow(scan_schema, include_field_ids=False)
        scan = ArrowScan(self._table.metadata, self._table.io, scan_schema, AlwaysTrue())

        return pa.RecordBatchReader.from_batches(
            arrow_schema.empty_table().select(list(column_names)).schema,
            self._iter_batches(scan, tasks, arrow_schema, column_names, condition),
        )

    def _iter_batches(
        self,
        scan: ArrowScan,
        tasks: Sequence[FileScanTask],
        arrow_schema: pa.Schema,
        column_names: Sequence[str],
        condition: ds.Expression | None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches on demand.

        Does not use a PyArrow scanner: its threads read ahead, and a reader that stops early (LIMIT) waits
        for them forever, because they need the interpreter lock that the reader holds.
        """
        try:
            for batch in self._iter_stored_batches(scan, tasks):
                # Batches of different files may differ in large_ types, such as string and large_string.
                rows = pa.Table.from_batches([batch]).cast(arrow_schema)
                if condition is not None:
                    rows = rows.filter(condition)
                yield from rows.select(list(column_names)).to_batches()
        except StoredFileDamaged as damaged:
            self.damaged = damaged
            raise

    def _iter_stored_batches(
        self, scan: ArrowScan, tasks: Sequence[FileScanTask]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the files. Raises StoredFileDamaged as `name_damaged_file`."""
        with name_damaged_file(self._table.io, lambda: tasks):
            for group in _group_tasks(tasks):
                yield from scan.to_record_batches(group)

    def plan_files(self) -> list[FileScanTask]:
        """Return the data files of the snapshot with their delete files, from the manifests; cached.

        Raises QueryFailed if PyIceberg cannot read the table, for example because of equality deletes.
        """
        if self._tasks is None:
            try:
                self._tasks = list(self._table.scan().plan_files())
            except ValueError as error:  # PyIceberg cannot read, for example, equality deletes
                raise QueryFailed(
                    f"PyIceberg cannot read the table: {str(error).rstrip('.')}.",
                    table=".".join(self._table.name()),
                    hint="Read the table with Spark or Trino, or compact it.",
                    reason="not_readable",
                ) from error
        return self._tasks


class IcebergScanner:
    """The scanner that DuckDB requests from a dataset for one scan of a query."""

    def __init__(
        self, dataset: IcebergDataset, columns: Sequence[str], condition: ds.Expression | None
    ) -> None:
        self._dataset = dataset
        self._columns = columns
        self._condition = condition

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows for which the condition is true, as a stream. Files are read when it is read."""
        return self._dataset.read(self._columns, self._condition)


def _group_tasks(tasks: Sequence[FileScanTask]) -> Iterator[list[FileScanTask]]:
    group: list[FileScanTask] = []
    size = 0
    for task in tasks:
        if group and size + task.file.file_size_in_bytes > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(task)
        size += task.file.file_size_in_bytes
    if group:
        yield group


def _condition_columns(schema: pa.Schema, column_names: Sequence[str], condition: ds.Expression) -> list[str]:
    """Return the columns that the condition uses and that are not among `column_names`.

    The condition cannot be bound without them.
    """
    return [
        name for name in schema.names if name not in column_names and _uses_column(condition, schema, name)
    ]


def _uses_column(condition: ds.Expression, schema: pa.Schema, name: str) -> bool:
    other_columns = schema.remove(schema.get_field_index(name)).empty_table()
    try:
        ds.dataset(other_columns).scanner(columns=[], filter=condition)
    except pa.ArrowInvalid:
        return True
    return False
