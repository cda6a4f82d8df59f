"""Between which values of a field a change lies, by the manifests' bounds: wider at times, never wrong."""

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
from branchlake_dagster.history.file_facts import column_facts

_EPOCH = datetime(1970, 1, 1)
"""The wall clock that plain time stamps and dates count from."""
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
    """low <= value <= high, as values of the field's type: int, float, Decimal, str, date or datetime.

    A time stamp with zone is an aware datetime in UTC, one without a naive one.
    """

    low: Any
    high: Any


@dataclass(frozen=True)
class Ranges:
    """The values that a field has in changed rows: in one of `parts`, null, or anything at all.

    `parts` are sorted and do not touch each other. `anything`: a file did not tell, so every value counts.
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
        """From the lowest to the highest value; None: there is none, or it is not known."""
        return None if self.anything or not self.parts else Range(self.parts[0].low, self.parts[-1].high)

    def __or__(self, other: Ranges) -> Ranges:
        anything = self.anything or other.anything
        parts = () if anything else merge_ranges([*self.parts, *other.parts])
        return Ranges(parts, self.nulls or other.nulls, anything)

    def overlaps(self, low: Any, high: Any) -> bool:
        """Whether a value of low <= value < high may be in it."""
        return self.anything or any(part.low < high and low <= part.high for part in self.parts)

    def label(self) -> str:
        """For people."""
        if self.anything:
            return "any value"
        labels = [
            str(part.low) if part.low == part.high else f"{part.low} to {part.high}" for part in self.parts
        ]
        return ", ".join([*labels, *(["null"] if self.nulls else [])]) or "none"


NOTHING = Ranges()


def union_ranges(ranges: Iterable[Ranges]) -> Ranges:
    """All of them together; of several inputs' changes, say. Their fields must be of one type."""
    return reduce(lambda first, other: first | other, ranges, NOTHING)


def unify_types(ranges_by_table: Mapping[str, Ranges], columns: Mapping[str, str]) -> list[Ranges]:
    """The values of a column of each of several tables, by table, as values of one type.

    Where dates meet time stamps a date is a whole day of UTC, as Iceberg and Spark promote it; a time stamp
    without zone is the wall clock of UTC. Numbers of any type are compared as they are. Raises
    ConfigurationError for other types that differ.
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
            f"Change ranges are asked for, and the types of the columns cannot be compared: {types}.",
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
    """Dates and time stamps as time stamps in UTC."""
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
    """The same values in as few ranges as possible."""
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
    """The values of a top-level field in all rows of a change, from the bounds and partitions of its files.

    Raises ConfigurationError for a field that the table lacks or whose type has no order.
    """
    bounds = ColumnRanges(metadata, field, table=change.table)
    # Each file by itself, also two of one path: the deletion vectors of several partitions lie in one file.
    return union_ranges(bounds.ranges_of(file) for file in change.files())


class ColumnRanges:
    """Tells of single files between which values a field lies. Everything unknown widens to anything."""

    def __init__(self, metadata: TableMetadata, field: str, *, table: str) -> None:
        schema = metadata.schema()
        self._field = _require_ordered_field(schema, field, table)
        self._specs: Mapping[int, PartitionSpec] = metadata.specs()

    def ranges_of(self, changed_file: ChangedFile) -> Ranges:
        """The values of a file's rows; for a delete file, of the rows that it may hit."""
        try:
            return self._ranges_of_file(changed_file.file, self._specs[changed_file.file.spec_id])
        except OverflowError:  # a day in the year 40000, from somebody's broken clock
            return Ranges(anything=True, nulls=True)

    def _ranges_of_file(self, file: DataFile, spec: PartitionSpec) -> Ranges:
        partition_ranges = self._ranges_from_partition(file, spec)
        if file.content is DataFileContent.POSITION_DELETES:
            return self._ranges_from_bounds(file, spec) if self._is_constant(spec) else partition_ranges
        if file.content is DataFileContent.EQUALITY_DELETES:
            has_bounds = self._is_constant(spec) or self._field.field_id in (file.equality_ids or [])
            return _intersect_ranges(
                self._ranges_from_bounds(file, spec) if has_bounds else Ranges(anything=True),
                partition_ranges,
            )
        return _intersect_ranges(self._ranges_from_bounds(file, spec), partition_ranges)

    def _is_constant(self, spec: PartitionSpec) -> bool:
        """Whether each partition has one value of the field."""
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
        """What the partition says of the field, where it is partitioned by it in some way."""
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
    """What both allow; each is true of the file."""
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
    # Bounds that contradict the partition are somebody's mistake; the bounds are of the rows themselves.
    return Ranges(merge_ranges(parts) or left.parts, nulls)


def _require_ordered_field(schema: Schema, name: str, table: str) -> ice.NestedField:
    for field in schema.fields:
        if field.name == name:
            if isinstance(field.field_type, _ORDERED):
                return field
            raise ConfigurationError(
                f"Change ranges of {name} are asked for, and a {field.field_type} has no order.",
                table=table,
                hint="Name a number, text, date or time stamp column.",
            )
    raise ConfigurationError(
        f"Change ranges of {name} are asked for, and there is no such column.",
        table=table,
        hint=f"Its columns are {', '.join(field.name for field in schema.fields)}.",
    )


def _decode_value(stored: Any, kind: ice.IcebergType) -> Any:
    """A bound as Iceberg counts it, as a value of its type."""
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
