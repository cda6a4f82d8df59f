"""Ranges of values that a field has in changed rows, from the bounds in manifests.

A range may be wider than the values, but never narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from functools import reduce
from typing import Any

from pyiceberg import types as ice
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import (
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    YearTransform,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import ChangedFile, ChangeSet
from branchlake_dagster.history.manifests import column_facts

_EPOCH = datetime(1970, 1, 1)
"""The origin of dates and of time stamps without time zone."""
_ORDERED = (
    ice.IntegerType,
    ice.LongType,
    ice.DateType,
    ice.TimestampType,
    ice.TimestamptzType,
    ice.StringType,
    ice.DecimalType,
    ice.FloatType,
    ice.DoubleType,
)


@dataclass(frozen=True, order=True)
class Range:
    """All values from `low` to `high`, both included.

    The values have the field's type: int, float, Decimal, str, date or datetime. A time stamp with time zone
    is an aware datetime in UTC; a time stamp without time zone is a naive datetime.
    """

    low: Any
    high: Any


@dataclass(frozen=True)
class Ranges:
    """The values that a field may have in changed rows: values in one of `parts`, null, or any value.

    `parts` are sorted and do not overlap or touch. `nulls` is true if null is possible. `anything` is true if
    a file has no bounds, so any value is possible.
    """

    parts: tuple[Range, ...] = ()
    nulls: bool = False
    anything: bool = False

    @property
    def empty(self) -> bool:
        """Whether no row can have changed."""
        return not (self.parts or self.nulls or self.anything)

    @property
    def span(self) -> Range | None:
        """The range from the lowest to the highest value.

        None if `parts` is empty, or if any value is possible.
        """
        return None if self.anything or not self.parts else Range(self.parts[0].low, self.parts[-1].high)

    def __or__(self, other: Ranges) -> Ranges:
        anything = self.anything or other.anything
        parts = () if anything else merge_ranges([*self.parts, *other.parts])
        return Ranges(parts, self.nulls or other.nulls, anything)

    def overlaps(self, low: Any, high: Any) -> bool:
        """Whether the ranges may contain a value with low <= value < high. Null does not count."""
        return self.anything or any(part.low < high and low <= part.high for part in self.parts)

    def label(self) -> str:
        """Return the ranges as a short text, such as `2026-11-02 to 2026-11-05, null`."""
        if self.anything:
            return "any value"
        labels = [
            str(part.low) if part.low == part.high else f"{part.low} to {part.high}" for part in self.parts
        ]
        return ", ".join([*labels, *(["null"] if self.nulls else [])]) or "none"


NOTHING = Ranges()


def union_ranges(ranges: Iterable[Ranges]) -> Ranges:
    """Return the union of ranges; empty for none. The values of all ranges must have one type."""
    return reduce(lambda first, other: first | other, ranges, NOTHING)


def unify_types(ranges_by_table: Mapping[str, Ranges], columns: Mapping[str, str]) -> list[Ranges]:
    """Return the ranges of columns of several tables, converted to one type for comparisons, as a list.

    `ranges_by_table` has the ranges of one column per table; `columns` has the names of these columns. If
    dates meet time stamps, a date becomes a whole day in UTC, as Iceberg and Spark promote it. A time stamp
    without time zone is taken as UTC. Numbers of different types are not converted. Raises ConfigurationError
    for other types that differ.
    """
    kinds = {name: _value_kinds(ranges) for name, ranges in ranges_by_table.items()}
    all_kinds = set().union(*kinds.values())
    if all_kinds <= {"date", "naive", "aware"}:
        return [
            _to_timestamps(ranges) if len(all_kinds) > 1 else ranges for ranges in ranges_by_table.values()
        ]
    if len(all_kinds) > 1:
        types = "; ".join(
            f"{name}.{columns[name]}: {', '.join(sorted(kinds[name])) or 'no value'}"
            for name in ranges_by_table
        )
        raise ConfigurationError(
            f"Change ranges cannot be computed: the types of these columns cannot be compared: {types}.",
            hint="Name a column that has the same type in all inputs, or consume them by keys.",
        )
    return [*ranges_by_table.values()]


def _value_kinds(ranges: Ranges) -> set[str]:
    return {_value_kind(value) for part in ranges.parts for value in (part.low, part.high)}


def _value_kind(value: Any) -> str:
    if isinstance(value, datetime):
        return "naive" if value.tzinfo is None else "aware"
    if isinstance(value, date):
        return "date"
    return "text" if isinstance(value, str) else "number"


def _to_timestamps(ranges: Ranges) -> Ranges:
    """Convert ranges of dates or time stamps to ranges of time stamps with a time zone.

    A range of dates begins at midnight UTC of its first day, and ends with the last microsecond of its last
    day. A time stamp without time zone is taken as UTC.
    """
    return replace(
        ranges,
        parts=merge_ranges(
            [Range(_to_timestamp(part.low), _to_timestamp(part.high, last=True)) for part in ranges.parts]
        ),
    )


def _to_timestamp(value: date | datetime, *, last: bool = False) -> datetime:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value
    return datetime.combine(value, time.max if last else time.min, UTC)


def merge_ranges(parts: Sequence[Range]) -> tuple[Range, ...]:
    """Return the same values in as few ranges as possible, sorted.

    Ranges that overlap or touch are joined.
    """
    result: list[Range] = []
    for part in sorted(parts):
        if result and _is_adjacent(result[-1].high, part.low):
            result[-1] = Range(result[-1].low, max(result[-1].high, part.high))
        else:
            result.append(part)
    return tuple(result)


def _is_adjacent(end: Any, start: Any) -> bool:
    if start <= end:
        return True
    is_discrete = type(end) is int or type(end) is date
    step: Any = timedelta(days=1) if type(end) is date else 1
    return is_discrete and bool(start == end + step)


def changed_ranges(change: ChangeSet, field: str, metadata: TableMetadata) -> Ranges:
    """Return ranges that contain the values of a top-level field in all rows of a change.

    Reads only the bounds and partitions of the change's files. Raises ConfigurationError if the table lacks
    the field, or if the field's type has no order.
    """
    bounds = ColumnRanges(metadata, field, table=change.table)
    # Two entries may have one path: a file can hold the deletion vectors of several partitions.
    return union_ranges(bounds.ranges_of(file) for file in change.files())


class ColumnRanges:
    """Finds the values that a field may have in single files, from bounds and partition values.

    If they are unknown, the result is `Ranges(anything=True)`.
    """

    def __init__(self, metadata: TableMetadata, field: str, *, table: str) -> None:
        schema = metadata.schema()
        self._field = _require_ordered_field(schema, field, table)
        self._specs: Mapping[int, PartitionSpec] = metadata.specs()

    def ranges_of(self, changed_file: ChangedFile) -> Ranges:
        """Return ranges that contain the field's values in a file's rows.

        For a delete file, these are the values in the rows that it may delete.
        """
        try:
            return self._ranges_of_file(changed_file.file, self._specs[changed_file.file.spec_id])
        except (OverflowError, ValueError):  # outside Python's calendar: a broken clock, or the year 10000
            return Ranges(anything=True, nulls=True)

    def _ranges_of_file(self, file: DataFile, spec: PartitionSpec) -> Ranges:
        partition_ranges = self._ranges_from_partition(file, spec)
        if file.content == DataFileContent.POSITION_DELETES:
            return self._ranges_from_bounds(file, spec) if self._is_constant(spec) else partition_ranges
        if file.content == DataFileContent.EQUALITY_DELETES:
            has_bounds = self._is_constant(spec) or self._field.field_id in (file.equality_ids or [])
            return _intersect_ranges(
                self._ranges_from_bounds(file, spec) if has_bounds else Ranges(anything=True),
                partition_ranges,
            )
        return _intersect_ranges(self._ranges_from_bounds(file, spec), partition_ranges)

    def _is_constant(self, spec: PartitionSpec) -> bool:
        """Return whether `spec` partitions by the field itself (identity transform).

        Then all rows of a partition have the same value.
        """
        return any(
            part.source_id == self._field.field_id and isinstance(part.transform, IdentityTransform)
            for part in spec.fields
        )

    def _ranges_from_bounds(self, file: DataFile, spec: PartitionSpec) -> Ranges:
        file_facts = column_facts(file, self._field, spec)
        if file_facts.all_null:
            return Ranges(nulls=True)
        kind = self._field.field_type
        if file_facts.low is None or file_facts.high is None or not file_facts.no_nan:
            return Ranges(anything=True, nulls=not file_facts.no_null)
        part = Range(_decode_value(file_facts.low, kind), _decode_value(file_facts.high, kind))
        return Ranges((part,), nulls=not file_facts.no_null)

    def _ranges_from_partition(self, file: DataFile, spec: PartitionSpec) -> Ranges:
        """Return the values that the file's partition allows.

        Any value is allowed if the table is not partitioned by year, month, day or hour of the field.
        """
        ranges = Ranges(anything=True, nulls=True)
        for index, part in enumerate(spec.fields):
            window = _WINDOWS.get(type(part.transform))
            if part.source_id != self._field.field_id or window is None:
                continue
            value = file.partition[index]
            if value is None:
                return Ranges(nulls=True)
            if isinstance(value, int):
                window_range = window(value, self._field.field_type)
                ranges = _intersect_ranges(ranges, Ranges((window_range,))) if window_range else ranges
        return ranges


def _intersect_ranges(left: Ranges, right: Ranges) -> Ranges:
    """Return the values that both ranges allow, for two descriptions of the same file.

    If no value is in both, the values of `left` are returned.
    """
    nulls = left.nulls and right.nulls
    if left.anything or right.anything:
        known_ranges = right if left.anything else left
        return Ranges(known_ranges.parts, nulls, known_ranges.anything)
    parts = [
        Range(max(a.low, b.low), min(a.high, b.high))
        for a in left.parts
        for b in right.parts
        if max(a.low, b.low) <= min(a.high, b.high)
    ]
    # If bounds contradict the partition, a writer made a mistake. Trust the bounds: they describe the rows.
    return Ranges(merge_ranges(parts) or left.parts, nulls)


def _require_ordered_field(schema: Schema, name: str, table: str) -> ice.NestedField:
    for field in schema.fields:
        if field.name == name:
            if isinstance(field.field_type, _ORDERED):
                return field
            raise ConfigurationError(
                f"Change ranges of column {name} cannot be computed: type {field.field_type} has no order.",
                table=table,
                hint="Name a column of numbers, text, dates or time stamps.",
            )
    raise ConfigurationError(
        f"Change ranges of column {name} cannot be computed: the table has no such column.",
        table=table,
        hint=f"Its columns are {', '.join(field.name for field in schema.fields)}.",
    )


def _decode_value(stored: Any, kind: ice.IcebergType) -> Any:
    """Convert a decoded bound to a value of the field's type.

    Days and microseconds since 1970 become dates and datetimes; other values are returned unchanged.
    """
    if isinstance(kind, ice.DateType) and type(stored) is int:
        return _EPOCH.date() + timedelta(days=stored)
    if isinstance(kind, ice.TimestampType):
        return _EPOCH + timedelta(microseconds=stored)
    if isinstance(kind, ice.TimestamptzType):
        return _EPOCH.replace(tzinfo=UTC) + timedelta(microseconds=stored)
    return stored


def _day_range(value: int, kind: ice.IcebergType) -> Range | None:
    return _range_between(_EPOCH + timedelta(days=value), _EPOCH + timedelta(days=value + 1), kind)


def _hour_range(value: int, kind: ice.IcebergType) -> Range | None:
    return _range_between(_EPOCH + timedelta(hours=value), _EPOCH + timedelta(hours=value + 1), kind)


def _month_range(value: int, kind: ice.IcebergType) -> Range | None:
    return _range_between(_month_start(value), _month_start(value + 1), kind)


def _year_range(value: int, kind: ice.IcebergType) -> Range | None:
    return _range_between(_month_start(value * 12), _month_start(value * 12 + 12), kind)


def _month_start(number: int) -> datetime:
    return _EPOCH.replace(year=1970 + number // 12, month=number % 12 + 1)


def _range_between(start: datetime, end: datetime, kind: ice.IcebergType) -> Range | None:
    if isinstance(kind, ice.DateType):
        return Range(start.date(), (end - timedelta(days=1)).date())
    last = end - timedelta(microseconds=1)
    if isinstance(kind, ice.TimestampType):
        return Range(start, last)
    if isinstance(kind, ice.TimestamptzType):
        return Range(start.replace(tzinfo=UTC), last.replace(tzinfo=UTC))
    return None


_WINDOWS: dict[type[Transform[Any, Any]], Callable[[int, ice.IcebergType], Range | None]] = {
    DayTransform: _day_range,
    HourTransform: _hour_range,
    MonthTransform: _month_range,
    YearTransform: _year_range,
}
