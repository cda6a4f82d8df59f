"""The data files of a table that may hold one of an upsert's keys, from manifests alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as ice
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, In, LessThanOrEqual
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table

from branchlake_dagster.branching.frames.arrow_frames import comparable
from branchlake_dagster.changes.facts import facts

_MOST_LISTED = 200
"""Values in a predicate: PyIceberg compares a longer list with no bounds and no partition."""
_COUNTED: dict[type[ice.IcebergType], pa.DataType] = {
    ice.DateType: pa.int32(),
    ice.TimeType: pa.int64(),
    ice.TimestampType: pa.int64(),
    ice.TimestamptzType: pa.int64(),
}
"""Types whose bounds are whole numbers, and Arrow's type for those."""
_BOUNDED = (ice.IntegerType, ice.LongType, ice.DecimalType, ice.StringType, ice.BinaryType, ice.UUIDType)
"""Other types whose bounds are compared with keys."""


def candidate_files(table: Table, keys: pa.Table) -> list[FileScanTask]:
    """The data files in the current snapshot of `table` that may hold one of `keys`.

    `keys` has the key columns only, in the table's types, without nulls and with at least one row. A file
    that is left out holds none of them: its partition, or the bounds of a key column, prove it. Cost: the
    manifests whose partitions may hold one of the keys.
    """
    row_filter: BooleanExpression = AlwaysTrue()
    distinct = {name: pc.unique(comparable(keys[name])) for name in keys.column_names}
    for name in keys.column_names:
        row_filter = And(row_filter, _condition(name, keys[name], len(distinct[name])))
    columns = [_SortedKeys(table, name, values) for name, values in distinct.items()]
    tasks = table.scan(row_filter=row_filter).plan_files()
    return [task for task in tasks if all(column.may_be_in(task.file) for column in columns)]


def _condition(name: str, values: pa.ChunkedArray, distinct: int) -> BooleanExpression:
    """A predicate that every row with one of the values meets."""
    if distinct <= _MOST_LISTED:
        return In(name, set(values.to_pylist()))
    if isinstance(values.type, pa.BaseExtensionType) or pa.types.is_fixed_size_binary(values.type):
        return AlwaysTrue()
    ends = pc.min_max(values)
    return And(GreaterThanOrEqual(name, ends["min"].as_py()), LessThanOrEqual(name, ends["max"].as_py()))


class _SortedKeys:
    """The distinct values of one key column, in order, to compare with the bounds of files."""

    def __init__(self, table: Table, name: str, values: pa.Array) -> None:
        self._specs = table.specs()
        self._field = table.schema().find_field(name)
        kind = self._field.field_type
        self._values: _Ordered | None = None
        if type(kind) in _COUNTED:
            self._values = _Ordered(values.cast(_COUNTED[type(kind)]))
        elif isinstance(kind, _BOUNDED):
            self._values = _Ordered(values)

    def may_be_in(self, file: DataFile) -> bool:
        """Whether the file may hold one of the values. False is a proof, True is not."""
        known = facts(file, self._field, self._specs[file.spec_id])
        if known.all_null:
            return False
        if self._values is None:
            return True
        place = 0 if known.low is None else bisect_left(self._values, known.low)
        return place < len(self._values) and (known.high is None or self._values[place] <= known.high)


class _Ordered(Sequence[Any]):
    """Values in ascending order. One becomes a Python object when it is asked for: a search needs few."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values.take(pc.array_sort_indices(values))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: Any) -> Any:
        return self._values[place].as_py()


def live_files(table: Table) -> tuple[int, bool]:
    """How many data files the current snapshot has, and whether it has delete files.

    Cost: one file, the manifest list.
    """
    data, deletes = 0, False
    for count, deleting in _manifests(table):
        data += 0 if deleting else count
        deletes = deletes or (deleting and count > 0)
    return data, deletes


def _manifests(table: Table) -> Iterator[tuple[int, bool]]:
    snapshot = table.current_snapshot()
    for manifest in snapshot.manifests(table.io) if snapshot is not None else ():
        counts = (manifest.added_files_count, manifest.existing_files_count)
        # Version 1 of the format does not require the counts: then there may be files.
        yield sum(1 if count is None else count for count in counts), manifest.content.name == "DELETES"
