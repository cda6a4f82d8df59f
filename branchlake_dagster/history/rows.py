"""Reads the changed rows of a change as Arrow tables, from only the files of the change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, ManifestEntryStatus
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table

from branchlake_dagster.catalog.damaged_files import name_damaged_file
from branchlake_dagster.history.capture import ancestors_after, files_gone_error
from branchlake_dagster.history.change import ChangedFile, ChangeKind, ChangeSet, RowsUnreadable
from branchlake_dagster.history.manifests import read_entries, read_live_files
from branchlake_dagster.internals.column_metrics import data_paths
from branchlake_dagster.internals.pyiceberg import read_deleted_positions

CHANGE_TYPE = "_change_type"
ORDINAL = "_change_ordinal"
SNAPSHOT = "_commit_snapshot_id"
"""The column names that Iceberg's own changelog views use."""
COMMIT = "_commit_hash"
"""The column with the commit on `main` that published the snapshot."""
INSERT, DELETE = "INSERT", "DELETE"


@dataclass(frozen=True)
class ChangedRows:
    """The added and the removed rows of a change. Rows that occur several times are in them several times."""

    added: pa.Table
    removed: pa.Table

    def with_change_types(self) -> pa.Table:
        """Return all rows in one table, with INSERT or DELETE in the column `_change_type`."""
        sides = [_add_change_type(self.added, INSERT), _add_change_type(self.removed, DELETE)]
        return pa.concat_tables(sides, promote_options="permissive")


class RowReader:
    """Reads the rows of one change of `table`.

    `columns` limits the rows to these columns, in the table's order. `commits` adds the columns
    `_change_ordinal` and `_commit_snapshot_id`. The constructor raises RowsUnreadable if the change has
    equality deletes.
    """

    def __init__(
        self, table: Table, change: ChangeSet, *, columns: Sequence[str] | None = None, commits: bool = False
    ) -> None:
        self._table = table
        self._change = change
        self._commits = commits
        schema = table.schema()
        self._schema = schema if columns is None else schema.select(*columns)
        if change.has_equality_deletes:
            raise self._equality_delete_error()

    def _equality_delete_error(self) -> RowsUnreadable:
        return RowsUnreadable(
            "Another engine deleted rows by value (equality deletes). Only a table scan can find them.",
            table=self._change.table,
            hint="Consume the input by the pattern `range`, or compute everything anew with the run tag"
            " branchlake/rebuild=true.",
        )

    def read(self) -> ChangedRows:
        """Read the added and the removed rows.

        Unchanged rows of rewritten files are in both; `drop_unchanged_rows` removes them. Raises
        RowsUnreadable as `read_removed`, ChangeLost if a file of the change was deleted, and
        StoredFileDamaged, which names the file.
        """
        try:
            return ChangedRows(self.read_added(), self.read_removed())
        except FileNotFoundError as error:
            raise files_gone_error(self._change.table) from error

    def read_added(self) -> pa.Table:
        """Read the rows of the added files, without those that delete files of the change have deleted."""
        deletes = [file.file for file in self._change.deletes]
        return self._read_files(self._change.added, deletes)

    def read_removed(self) -> pa.Table:
        """Read the rows of removed files, and the rows that delete files delete in other files.

        The rows of removed files are read as they were at the start position. If the change is the whole
        table, no rows are removed: a delete file of a removed data file may remain in the table. Raises
        RowsUnreadable if equality deletes applied at the start position.
        """
        change = self._change
        if change.whole or change.only_appends:
            return self._empty_rows()
        earlier_deletes = self._deletes_before()
        removed_rows = self._read_files(change.removed, earlier_deletes)
        return self._concat_rows([removed_rows, *self._iter_deleted_rows(earlier_deletes)])

    def has_whole_files(self) -> bool:
        """Whether the changed rows are all rows of the changed files: no delete file applies."""
        if self._change.deletes:
            return False
        earlier_deletes = self._deletes_before() if self._change.removed else []
        return not any(_applicable_deletes(file.file, earlier_deletes) for file in self._change.removed)

    # -- files ---------------------------------------------------------------------------------------

    def _read_files(self, files: Sequence[ChangedFile], deletes: Sequence[DataFile]) -> pa.Table:
        parts: list[pa.Table] = []
        ordered = sorted(files, key=_step_key)
        for (ordinal, snapshot_id), group in groupby(ordered, key=_step_key):
            tasks = [
                FileScanTask(file.file, delete_files=_applicable_deletes(file.file, deletes))
                for file in group
            ]
            parts.append(self._add_commit_columns(self._scan(tasks), ordinal, snapshot_id))
        return self._concat_rows(parts)

    def _concat_rows(self, parts: Sequence[pa.Table]) -> pa.Table:
        """Concatenate tables, without those that have no rows.

        Scans differ in how they store text, and the schema of a table without rows is not reliable.
        """
        non_empty = [part for part in parts if part.num_rows]
        return pa.concat_tables(non_empty, promote_options="permissive") if non_empty else self._empty_rows()

    def _scan(self, tasks: Sequence[FileScanTask]) -> pa.Table:
        with name_damaged_file(self._table.io, lambda: tasks):
            return ArrowScan(self._table.metadata, self._table.io, self._schema, AlwaysTrue()).to_table(tasks)

    def _empty_rows(self) -> pa.Table:
        return self._add_commit_columns(arrow_schema(self._schema).empty_table(), 0, 0)

    def _add_commit_columns(self, rows: pa.Table, ordinal: int, snapshot_id: int) -> pa.Table:
        if not self._commits:
            return rows
        count = rows.num_rows
        rows = rows.append_column(ORDINAL, pa.repeat(pa.scalar(ordinal, pa.int32()), count))
        return rows.append_column(SNAPSHOT, pa.repeat(pa.scalar(snapshot_id, pa.int64()), count))

    # -- row-level deletes ---------------------------------------------------------------------------

    def _deletes_before(self) -> list[DataFile]:
        """Return the delete files that applied to the table at the start position of the change.

        The snapshot of the position may have expired. Therefore the delete files are found in the first
        snapshot after it: those that it kept and those that it removed. Delete files that the consumer's own
        run added on its branch are included, although they reached `main` after the position's snapshot.
        Returns an empty list if the change is the whole table. Raises RowsUnreadable if one of the files has
        equality deletes.
        """
        since, metadata = self._change.since, self._table.metadata
        if since is None:
            return []
        ancestors, _ = ancestors_after(metadata, since.snapshot_id)
        step_ids = {step.snapshot_id for step in self._change.steps}
        delete_files: list[DataFile] = []
        for number, snapshot in enumerate(ancestors):
            if number and snapshot.snapshot_id in step_ids:
                continue
            for entry in read_entries(self._table.io, snapshot, ManifestContent.DELETES):
                own = entry.snapshot_id == snapshot.snapshot_id
                if entry.status == ManifestEntryStatus.DELETED:
                    is_in_force = own and not number
                elif own and entry.status == ManifestEntryStatus.ADDED:
                    is_in_force = snapshot.snapshot_id not in step_ids
                else:
                    is_in_force = not number
                if is_in_force:
                    delete_files.append(entry.data_file)
        if any(file.content == DataFileContent.EQUALITY_DELETES for file in delete_files):
            raise self._equality_delete_error()
        return delete_files

    def _iter_deleted_rows(self, earlier_deletes: Sequence[DataFile]) -> Iterator[pa.Table]:
        """Yield the rows that delete files delete in files outside this change, each row once.

        Rows that earlier delete files had deleted are left out: a delete file may repeat the entries of an
        older one that it replaces.
        """
        change = self._change
        # All rows of a removed file count as removed already. A file that was only compacted is not excluded:
        # its rows stay, except those that these delete files deleted. Nor is a file that was restored since.
        changed_paths: set[str] = set()
        for step in change.steps:
            if step.kind is not ChangeKind.COMPACT:
                changed_paths |= {changed.path for changed in step.removed}
                changed_paths -= {changed.path for changed in step.added}
        changed_paths |= {changed.path for changed in change.added}
        seen_positions: dict[str, pa.Array] = {}
        for delete_file in change.deletes:
            positions_by_path = self._read_positions(delete_file.file)
            for file in self._iter_live_files(
                positions_by_path.keys() - changed_paths, delete_file.snapshot_id
            ):
                path = file.file_path
                if path not in seen_positions:
                    seen_positions[path] = self._deleted_positions(file, earlier_deletes)
                new_positions = pc.unique(positions_by_path[path].cast(pa.int64()))
                new_positions = new_positions.filter(pc.invert(pc.is_in(new_positions, seen_positions[path])))
                seen_positions[path] = pa.concat_arrays([seen_positions[path], new_positions])
                if len(new_positions):
                    deleted_rows = self._scan([FileScanTask(file)]).take(new_positions.sort())
                    yield self._add_commit_columns(deleted_rows, delete_file.ordinal, delete_file.snapshot_id)

    def _deleted_positions(self, file: DataFile, deletes: Sequence[DataFile]) -> pa.Array:
        positions = [pa.array([], pa.int64())]
        for delete_file in _applicable_deletes(file, deletes):
            file_positions = self._read_positions(delete_file).get(file.file_path)
            positions += (
                [] if file_positions is None else [part.cast(pa.int64()) for part in file_positions.chunks]
            )
        return pa.concat_arrays(positions)

    def _read_positions(self, delete_file: DataFile) -> dict[str, pa.ChunkedArray]:
        with name_damaged_file(self._table.io, lambda: [FileScanTask(delete_file)]):
            return read_deleted_positions(self._table.io, delete_file)

    def _iter_live_files(self, file_paths: AbstractSet[str], snapshot_id: int) -> Iterator[DataFile]:
        """Yield the data files with these paths in a snapshot; none if the metadata lacks the snapshot."""
        snapshot, paths = self._table.metadata.snapshot_by_id(snapshot_id), set(file_paths)
        for file in read_live_files(self._table.io, snapshot, ManifestContent.DATA) if paths else ():
            if file.file_path in paths:
                paths.discard(file.file_path)
                yield file
                if not paths:
                    return


def _step_key(file: ChangedFile) -> tuple[int, int]:
    return file.ordinal, file.snapshot_id


def _applicable_deletes(file: DataFile, deletes: Sequence[DataFile]) -> set[DataFile]:
    """Return the position delete files that may delete rows of a data file."""
    positions = (
        delete_file for delete_file in deletes if delete_file.content == DataFileContent.POSITION_DELETES
    )
    return {
        delete_file
        for delete_file in positions
        if (paths := data_paths(delete_file)) is None or paths.may_name(file.file_path)
    }


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema that a scan of the columns in `schema` has."""
    return schema_to_pyarrow(schema, include_field_ids=False)


def _add_change_type(rows: pa.Table, kind: str) -> pa.Table:
    return rows.append_column(CHANGE_TYPE, pa.repeat(pa.scalar(kind), rows.num_rows))


def drop_unchanged_rows(rows: ChangedRows) -> ChangedRows:
    """Drop the rows that are both added and removed: unchanged rows of rewritten files.

    Whole rows are compared, and null equals null. A row that was added twice and removed once remains added
    once. With commit columns, rows of different commits are compared by their other columns, and the newest
    ones remain. If a column has a type that cannot be compared, all rows are returned.
    """
    if not rows.added.num_rows or not rows.removed.num_rows:
        return rows
    columns = [name for name in rows.added.column_names if name not in (ORDINAL, SNAPSHOT)]
    try:
        sides = [
            pl.DataFrame(pl.from_arrow(side)).with_columns(pl.lit(sign, pl.Int64).alias(_COUNT))
            for side, sign in ((rows.added, 1), (rows.removed, -1))
        ]
        schema = rows.added.schema
        if len(columns) < len(schema):
            return _drop_unchanged_of_commits(pl.concat(sides), columns, schema)
        net_counts = pl.concat(sides).group_by(columns).agg(pl.col(_COUNT).sum())
        return ChangedRows(
            _repeat_by_count(net_counts.filter(pl.col(_COUNT) > 0), schema),
            _repeat_by_count(net_counts.filter(pl.col(_COUNT) < 0), schema),
        )
    except (pl.exceptions.PolarsError, pa.ArrowException):  # a map column, or a type that Polars cannot read
        return rows


def _drop_unchanged_of_commits(sides: pl.DataFrame, columns: Sequence[str], schema: pa.Schema) -> ChangedRows:
    """Do the work of `drop_unchanged_rows` for rows with commit columns.

    `sides` has the added and the removed rows; its column `_COUNT` is 1 for an added row and -1 for a removed
    one. Rows are compared by `columns`, which are all but the commit columns and `_COUNT`. The result has the
    types of `schema`.
    """
    ordered = sides.sort(ORDINAL, descending=True, maintain_order=True)
    net_count = pl.col(_COUNT).sum().over(columns)
    number = pl.int_range(pl.len()).over([*columns, _COUNT])
    remaining = ordered.filter((net_count.sign() == pl.col(_COUNT)) & (number < net_count.abs()))
    added, removed = (
        remaining.filter(pl.col(_COUNT) == sign).drop(_COUNT).to_arrow().cast(schema) for sign in (1, -1)
    )
    return ChangedRows(added, removed)


_COUNT = "branchlake_count"


def _repeat_by_count(rows: pl.DataFrame, schema: pa.Schema) -> pa.Table:
    """Return each row as often as the absolute value of its count, in the types of `schema`."""
    times = rows[_COUNT].abs().to_numpy()
    return rows.drop(_COUNT).to_arrow().cast(schema).take(pa.array(np.repeat(np.arange(len(times)), times)))
