"""Upsert rows with PyIceberg: find the data files that may have one of the keys, and rewrite them."""

from __future__ import annotations

import itertools
import uuid
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as ice
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, In, LessThanOrEqual
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table

from branchlake_dagster.catalog.damaged_files import name_damaged_file
from branchlake_dagster.history.manifests import column_facts, read_manifests
from branchlake_dagster.internals.pyiceberg import commit_files, write_data_files
from branchlake_dagster.tables.arrow_frames import (
    key_columns,
    require_rows_inside,
    require_unique_keys,
    to_comparable_column,
)
from branchlake_dagster.tables.selection import Selection
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.tables.upsert_engine import (
    CandidateFacts,
    SparkReason,
    TableFacts,
    find_candidate_reason,
    find_table_reason,
    has_required_fields,
)

_MAX_LISTED_VALUES = 200
"""The most values in an `In` predicate.

PyIceberg does not compare longer lists with bounds and partitions.
"""
_INTEGER_BOUND_TYPES: dict[type[ice.IcebergType], pa.DataType] = {
    ice.DateType: pa.int32(),
    ice.TimeType: pa.int64(),
    ice.TimestampType: pa.int64(),
    ice.TimestamptzType: pa.int64(),
}
"""Types whose bounds are integers, and the Arrow type of those integers."""
_COMPARABLE_TYPES = (
    ice.IntegerType,
    ice.LongType,
    ice.DecimalType,
    ice.StringType,
    ice.BinaryType,
    ice.UUIDType,
)
"""Further types whose bounds can be compared with keys; their bounds are not converted."""


def find_candidate_files(table: Table, keys: pa.Table) -> list[FileScanTask]:
    """Find the data files in the current snapshot of `table` that may contain a row with one of `keys`.

    `keys` has only the key columns, in the table's types, without nulls and with at least one row. An omitted
    file certainly has none of the keys: its partition, or the bounds of a key column, prove it. Cost: reads
    the manifests whose partitions may have one of the keys.
    """
    row_filter: BooleanExpression = AlwaysTrue()
    distinct_values = {name: pc.unique(to_comparable_column(keys[name])) for name in keys.column_names}
    for name in keys.column_names:
        row_filter = And(row_filter, _key_filter(name, keys[name], len(distinct_values[name])))
    columns = [_SortedKeys(table, name, values) for name, values in distinct_values.items()]
    tasks = table.scan(row_filter=row_filter).plan_files()
    return [task for task in tasks if all(column.may_be_in(task.file) for column in columns)]


def _key_filter(name: str, values: pa.ChunkedArray, distinct_count: int) -> BooleanExpression:
    """Return a predicate on the key column `name` that is true for every row with one of `values`.

    It may also be true for other rows: above `_MAX_LISTED_VALUES` distinct values, it is a range, or always
    true for types without bounds. `distinct_count` is the number of distinct values.
    """
    if distinct_count <= _MAX_LISTED_VALUES:
        return In(name, set(values.to_pylist()))
    if isinstance(values.type, pa.BaseExtensionType) or pa.types.is_fixed_size_binary(values.type):
        return AlwaysTrue()
    bounds = pc.min_max(values)
    return And(GreaterThanOrEqual(name, bounds["min"].as_py()), LessThanOrEqual(name, bounds["max"].as_py()))


class _SortedKeys:
    """The distinct values of one key column in order, for comparisons with the bounds of files."""

    def __init__(self, table: Table, name: str, values: pa.Array) -> None:
        self._specs = table.specs()
        self._field = table.schema().find_field(name)
        kind = self._field.field_type
        self._values: _SortedValues | None = None
        if type(kind) in _INTEGER_BOUND_TYPES:
            self._values = _SortedValues(values.cast(_INTEGER_BOUND_TYPES[type(kind)]))
        elif isinstance(kind, _COMPARABLE_TYPES):
            self._values = _SortedValues(values)

    def may_be_in(self, file: DataFile) -> bool:
        """Return whether the file may contain one of the values. False is certain; True is not."""
        file_facts = column_facts(file, self._field, self._specs[file.spec_id])
        if file_facts.all_null:
            return False
        if self._values is None:
            return True
        index = 0 if file_facts.low is None else bisect_left(self._values, file_facts.low)
        return index < len(self._values) and (
            file_facts.high is None or self._values[index] <= file_facts.high
        )


class _SortedValues(Sequence[Any]):
    """Values in ascending order.

    A value becomes a Python object only on access, because a search needs few values.
    """

    def __init__(self, values: pa.Array) -> None:
        self._values = values.take(pc.array_sort_indices(values))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index].as_py()


def count_live_files(table: Table) -> tuple[int, bool]:
    """Return the number of data files of the current snapshot, and whether it has delete files.

    Cost: reads one file, the manifest list.
    """
    data_count, has_deletes = 0, False
    for count, is_delete in _iter_file_counts(table):
        data_count += 0 if is_delete else count
        has_deletes = has_deletes or (is_delete and count > 0)
    return data_count, has_deletes


def _iter_file_counts(table: Table) -> Iterator[tuple[int, bool]]:
    for manifest in read_manifests(table.io, table.current_snapshot()):
        counts = (manifest.added_files_count, manifest.existing_files_count)
        # Format version 1 does not require the counts. A missing count means that files may exist.
        yield (
            sum(1 if count is None else count for count in counts),
            manifest.content == ManifestContent.DELETES,
        )


_READERS = 8
_ROW_COLUMN = "__branchlake_row"


@dataclass(frozen=True)
class UpsertPlan:
    """A planned upsert that PyIceberg writes.

    `frame` has the rows to add; if rows with existing keys are dropped, only those with new keys.
    `matched_files` are the data files of `table` that contain a row with one of the frame's keys.
    `other_rows` are the rows of these files with other keys, one Arrow table per file.
    """

    frame: pa.Table
    table: Table
    matched_files: tuple[FileScanTask, ...] = ()
    other_rows: tuple[pa.Table, ...] = ()


def plan_upsert(
    frame: pa.Table, table: Table, spec: TableSpec, selection: Selection | None
) -> UpsertPlan | SparkReason:
    """Decide which engine upserts `frame`, and for PyIceberg which files are rewritten.

    Writes nothing. Rows are matched in the whole table, as MERGE does, not only in the run's partitions.
    Cost: reads the manifests, the key columns of the files whose bounds admit one of the keys, and the
    matched files. All rows of the matched files are held in memory.

    Args:
        frame (pa.Table): At least one row, with the table's columns in the table's types.
        table (Table): The table on the run's branch. It may have rows.
        spec (TableSpec): Its `keys` are the columns to match on.
        selection (Optional[Selection]): The rows that the run may write. None: any row.

    Returns:
        UpsertPlan | SparkReason: The plan for `write_upsert`, or the reason why Spark has to write.

    Raises:
        UpsertKeyInvalid: A key is null or occurs twice in the frame.
        PartitionMismatch: The frame has rows outside `selection`.
    """
    if reason := find_table_reason(_table_facts(frame, table, spec)):
        return reason
    require_unique_keys(frame, spec)
    require_rows_inside(frame, table.schema(), spec, selection)
    candidates = find_candidate_files(table, frame.select(list(spec.keys)))
    if reason := find_candidate_reason(_candidate_facts(candidates, columns=frame.num_columns)):
        return reason
    if not candidates:
        return UpsertPlan(frame, table)
    try:
        return _plan_from_candidates(frame, table, spec, candidates)
    except (ValueError, TypeError, NotImplementedError, pa.ArrowException):
        # Other writers may produce such files, for example without field ids. Spark reports unreadable ones.
        return SparkReason.UNREADABLE


def _plan_from_candidates(
    frame: pa.Table, table: Table, spec: TableSpec, candidates: Sequence[FileScanTask]
) -> UpsertPlan | SparkReason:
    parts = _read_files(table, table.schema().select(*spec.keys), candidates)
    rows = _match_rows(_concat_parts(parts), frame, spec)
    if spec.keeps_matched:
        has_new_keys = np.ones(frame.num_rows, dtype=np.bool_)
        has_new_keys[rows.drop_nulls().to_numpy()] = False
        return UpsertPlan(frame.filter(pa.array(has_new_keys)), table)
    if rows.drop_nulls().is_duplicated().any():
        return SparkReason.SHARED_KEYS
    end_rows = np.cumsum([part.num_rows for part in parts])
    matched_numbers = np.unique(
        np.searchsorted(end_rows, rows.is_not_null().arg_true().to_numpy(), side="right")
    )
    matched_files = tuple(candidates[number] for number in matched_numbers)
    return UpsertPlan(frame, table, matched_files, _read_other_rows(frame, table, spec, matched_files))


def _read_other_rows(
    frame: pa.Table, table: Table, spec: TableSpec, matched_files: Sequence[FileScanTask]
) -> tuple[pa.Table, ...]:
    """Return the rows of each file whose keys are not in the frame, in the frame's types.

    The result has one table for each file. The tables are in the order of `matched_files`. All these rows are
    in memory.
    """
    if not matched_files:
        return ()
    parts = _read_files(table, table.schema(), matched_files)
    keys = _concat_parts([part.select(list(spec.keys)) for part in parts])
    is_other = _match_rows(keys, frame, spec).is_null().to_arrow()
    start = 0
    for number, part in enumerate(parts):  # in place: only one file is in memory twice
        other_rows = part.filter(is_other.slice(start, part.num_rows))
        parts[number] = pa.table(
            [other_rows[column.name].cast(column.type) for column in frame.schema], schema=frame.schema
        )
        start += part.num_rows
    return tuple(parts)


def write_upsert(upsert: UpsertPlan, properties: Mapping[str, str]) -> Table:
    """Write a planned upsert in one commit, and return the table with its new state.

    Without rows to write, the table is returned unchanged. `properties` are the properties of the snapshot's
    summary.

    Atomic: all rows are written, or none. The matched files are removed. Their other rows are written again
    together with the frame's rows, in one file per partition, or more above the table's target file size.

    Raises CommitFailedException if the table has changed since the plan. The commit is not repeated, because
    rows with the same keys may have been added.
    """
    table = upsert.table
    if not upsert.frame.num_rows:
        return table
    rows = pa.concat_tables([upsert.frame, *upsert.other_rows])
    files = write_data_files(table.metadata, rows, table.io, commit=uuid.uuid4(), numbers=itertools.count())
    removed_files = [task.file for task in upsert.matched_files]
    return commit_files(table, added=files, removed=removed_files, properties=properties)


def _concat_parts(parts: Sequence[pa.Table]) -> pa.Table:
    """Concatenate Arrow tables with the same columns.

    The types of text columns may differ, such as text and large text, because scans return both.
    """
    return pa.concat_tables(parts, promote_options="permissive")


def _table_facts(frame: pa.Table, table: Table, spec: TableSpec) -> TableFacts:
    schema, metadata = table.schema(), table.metadata
    files, delete_files = count_live_files(table)
    return TableFacts(
        frame_rows=frame.num_rows,
        keys=tuple(schema.find_type(key) for key in spec.keys),
        format_version=metadata.format_version,
        partition_specs=len(metadata.partition_specs),
        partitioned_by=tuple(
            (part.transform, schema.find_type(part.source_id)) for part in metadata.spec().fields
        ),
        sorted=not table.sort_order().is_unsorted,
        required=has_required_fields(schema.fields),
        delete_files=delete_files,
        data_files=files,
        properties=metadata.properties,
    )


def _candidate_facts(candidates: Sequence[FileScanTask], *, columns: int) -> CandidateFacts:
    files = [task.file for task in candidates]
    return CandidateFacts(
        formats=frozenset(file.file_format.name for file in files),
        size_bytes=sum(file.file_size_in_bytes for file in files),
        value_count=sum(file.record_count for file in files) * columns,
        partition_count=len({file.partition for file in files}),
    )


def _read_files(table: Table, columns: Schema, tasks: Sequence[FileScanTask]) -> list[pa.Table]:
    """Read the given columns of each file, in the order of `tasks`, without the rows that are deleted."""

    def read_file(task: FileScanTask) -> pa.Table:
        with name_damaged_file(table.io, lambda: [task]):
            return ArrowScan(table.metadata, table.io, columns, AlwaysTrue()).to_table([task])

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read_file, tasks))


def _match_rows(rows: pa.Table, frame: pa.Table, spec: TableSpec) -> pl.Series:
    """Return, for each of `rows`, the index of the frame's row with the same key; null if there is none.

    `spec.keys` are the key columns, which must be unique in `frame`. Null keys match nothing.
    """
    keys = key_columns(frame, spec).with_row_index(_ROW_COLUMN)
    return key_columns(rows, spec).join(keys, on=list(spec.keys), how="left", maintain_order="left")[
        _ROW_COLUMN
    ]
