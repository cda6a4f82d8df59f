"""Finds the partitions of an asset that a change affects, also if results depend on rows of other windows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from itertools import product
from typing import Any
from zoneinfo import ZoneInfo

from dagster import (
    DagsterInstance,
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionMapping,
    PartitionsDefinition,
    TimeWindow,
    TimeWindowPartitionMapping,
    TimeWindowPartitionsDefinition,
)

from branchlake_dagster.history.ranges import Range, Ranges, merge_ranges

_ZERO = timedelta()
_DAY = timedelta(days=1)
_WITHOUT = " without "
_CALENDAR_END = datetime.max.replace(tzinfo=UTC)
LAST_DAY = date(9999, 12, 30)
"""The last day whose next day is a date too. Half-open ranges need that next day."""


@dataclass(frozen=True)
class Reach:
    """How far the input rows that a result depends on may be outside the result's own window.

    `before` and `after` are lengths of time and not negative. The offsets count windows of the partition
    definition, as in Dagster's TimeWindowPartitionMapping.
    """

    before: timedelta = _ZERO
    after: timedelta = _ZERO
    start_offset: int = 0
    end_offset: int = 0

    @property
    def is_own_window(self) -> bool:
        """Whether results depend only on rows of their own window."""
        return self == Reach()

    def required_window(self, definition: TimeWindowPartitionsDefinition, own: TimeWindow) -> TimeWindow:
        """Return the window of the rows that the results of the window `own` depend on.

        It may begin before the first partition.
        """
        start = _shift_window_border(definition, own.start, self.start_offset)
        end = _shift_window_border(definition, own.end, self.end_offset)
        return TimeWindow(start - self.before, end + self.after)

    def affected_interval(
        self, definition: TimeWindowPartitionsDefinition, start: datetime, end: datetime
    ) -> TimeWindow:
        """Return an interval that contains every window whose results depend on a row from `start` to `end`.

        The interval may contain other windows too; compare `required_window` of each to exclude them.
        """
        low = _nearest_window_border(definition, start - self.after, -1)
        high = _nearest_window_border(definition, end + self.before, 1)
        return TimeWindow(
            _shift_window_border(definition, low, -self.end_offset),
            _shift_window_border(definition, high, -self.start_offset),
        )

    def complete_before(
        self, definition: TimeWindowPartitionsDefinition | None, through: datetime
    ) -> datetime:
        """Return the time before which all results are complete, if all input rows before `through` exist.

        It is at most `through`, and earlier if results depend on rows after their own window.
        """
        if definition is None or self.end_offset <= 0:
            return through - self.after
        return min(
            _shift_window_border(
                definition, _nearest_window_border(definition, through - self.after, -1), -self.end_offset
            ),
            through,
        )

    def widen_ranges(self, ranges: Ranges, *, to_required_rows: bool) -> Ranges:
        """Return the values whose results are affected by a change of the values in `ranges`.

        With `to_required_rows`, return instead the values of the rows that the results of `ranges` depend on.
        Dates are moved by whole days.
        """
        back, ahead = (self.before, self.after) if to_required_rows else (self.after, self.before)
        if ranges.anything or self.is_own_window:
            return ranges
        parts = [
            Range(_shift_value(part.low, -back), _shift_value(part.high, ahead)) for part in ranges.parts
        ]
        return Ranges(merge_ranges(parts), ranges.nulls)


def build_reach(mapping: PartitionMapping | None, widen: tuple[timedelta, timedelta]) -> Reach:
    """Combine a partition mapping and the argument `widen` of `consumes` into a reach."""
    if isinstance(mapping, TimeWindowPartitionMapping):
        return Reach(*widen, start_offset=mapping.start_offset, end_offset=mapping.end_offset)
    return Reach(*widen)


def _shift_window_border(
    definition: TimeWindowPartitionsDefinition, border: datetime, count: int
) -> datetime:
    """Return the window border that is `count` windows later, or earlier if `count` is negative.

    `border` is a start or an end of one of the windows of `definition`. The windows continue before the first
    and after the last partition.
    """
    for _ in range(abs(count)):
        if count > 0:
            following = definition.get_next_partition_window(border, respect_bounds=False)
            border = following.end if following is not None else border
        else:
            previous = definition.get_prev_partition_window(border, respect_bounds=False)
            border = previous.start if previous is not None else border
    return border


def _nearest_window_border(
    definition: TimeWindowPartitionsDefinition, moment: datetime, direction: int
) -> datetime:
    """Return the last window border up to `moment`; with direction 1, the first border at or after it.

    A border is a start or an end of a window of `definition`. For the last border, `direction` is -1. The
    windows continue before the first and after the last partition.
    """
    if direction > 0:
        following = definition.get_next_partition_window(moment, respect_bounds=False)
        return following.start if following is not None else moment
    previous = definition.get_prev_partition_window(moment, respect_bounds=False)
    return previous.end if previous is not None else moment


def _shift_value(value: Any, by: timedelta) -> Any:
    """Shift a date or a time stamp by `by`, backward if it is negative.

    A date is shifted by whole days: a part of a day counts as a day. The result stays within Python's
    calendar.
    """
    try:
        if isinstance(value, datetime):
            return value + by
        return value + _DAY * (-(abs(by) // -_DAY)) * (1 if by >= _ZERO else -1)
    except OverflowError:
        day = LAST_DAY if by >= _ZERO else date.min
        at = time.max if by >= _ZERO else time.min
        return datetime.combine(day, at, value.tzinfo) if isinstance(value, datetime) else day


_ANYTHING = Ranges(anything=True)
_OWN_ROWS = Reach()
_TICK = timedelta(microseconds=1)


def dimension_definitions(definition: PartitionsDefinition[str]) -> dict[str, PartitionsDefinition[str]]:
    """Return the partition definition of each dimension by name.

    A definition without dimensions has the empty string as its only name.
    """
    if isinstance(definition, MultiPartitionsDefinition):
        return {dimension.name: dimension.partitions_def for dimension in definition.partitions_defs}
    return {"": definition}


def affected_partition_keys(
    definition: PartitionsDefinition[str],
    changed_ranges: Mapping[str, Ranges],
    *,
    reach: Reach = _OWN_ROWS,
    instance: DagsterInstance | None = None,
) -> set[str]:
    """Return the keys of the partitions whose results may depend on rows of a change.

    `changed_ranges` has the changed values by partition dimension; a dimension without an entry counts as any
    value. `reach` defines how far results depend on rows outside their own window. A date is a day in the
    time zone of the partitions, and a time stamp without time zone is in UTC. Null belongs to no partition.
    """
    if any(ranges.empty for ranges in changed_ranges.values()):
        return set()
    if not isinstance(definition, MultiPartitionsDefinition):
        return _keys_in_dimension(definition, changed_ranges.get("", _ANYTHING), reach, instance)
    parts = dimension_definitions(definition)
    dimension_keys = [
        _keys_in_dimension(part, changed_ranges.get(name, _ANYTHING), reach, instance)
        for name, part in parts.items()
    ]
    return {
        str(MultiPartitionKey(dict(zip(parts, combined, strict=True))))
        for combined in product(*dimension_keys)
    }


def time_dimension(
    definition: PartitionsDefinition[str] | None,
) -> tuple[str, TimeWindowPartitionsDefinition] | None:
    """Return the name and definition of the only dimension of time windows; None if there is not exactly one.

    The name is empty for a definition without dimensions.
    """
    parts = dimension_definitions(definition) if definition is not None else {}
    time_dimensions = [
        (name, part) for name, part in parts.items() if isinstance(part, TimeWindowPartitionsDefinition)
    ]
    return time_dimensions[0] if len(time_dimensions) == 1 else None


class PartitionFinder:
    """Finds which of the given partitions depend on changed rows, like `affected_partition_keys`.

    Use it for many files: the windows of the partitions are computed once, so that each call costs a binary
    search.
    """

    def __init__(
        self, definition: PartitionsDefinition[str], keys: Iterable[str], *, reach: Reach = _OWN_ROWS
    ) -> None:
        self._values_by_key: dict[str, Mapping[str, str]] = {}
        for key in keys:
            if isinstance(definition, MultiPartitionsDefinition):
                self._values_by_key[key] = definition.get_partition_key_from_str(key).keys_by_dimension
            else:
                self._values_by_key[key] = {"": key}
        self._by_dimension = {
            name: _DimensionFinder(part, {values[name] for values in self._values_by_key.values()}, reach)
            for name, part in dimension_definitions(definition).items()
        }

    def affected_keys(self, changed_ranges: Mapping[str, Ranges]) -> set[str]:
        """Return the keys of the affected partitions.

        `changed_ranges` has the changed values by partition dimension, as for `affected_partition_keys`.
        """
        if any(ranges.empty for ranges in changed_ranges.values()):
            return set()
        keys_by_dimension = {
            name: finder.affected_keys(changed_ranges.get(name, _ANYTHING))
            for name, finder in self._by_dimension.items()
        }
        if len(keys_by_dimension) == 1:
            ((name, keys),) = keys_by_dimension.items()
            return (
                keys
                if name == ""
                else {key for key, values in self._values_by_key.items() if values[name] in keys}
            )
        return {
            key
            for key, values in self._values_by_key.items()
            if all(values[name] in keys for name, keys in keys_by_dimension.items())
        }


class _DimensionFinder:
    """Finds the affected partition keys of one dimension."""

    def __init__(self, definition: PartitionsDefinition[str], keys: set[str], reach: Reach) -> None:
        self._all_keys = keys
        self._zone: tzinfo | None = None
        if isinstance(definition, TimeWindowPartitionsDefinition):
            self._zone = ZoneInfo(definition.timezone)
            windows = [
                (reach.required_window(definition, definition.time_window_for_partition_key(key)), key)
                for key in keys
            ]
            windows.sort(key=lambda window_and_key: window_and_key[0].start)
            self._starts = [window.start for window, _ in windows]
            self._ends = [window.end for window, _ in windows]
            self._window_keys = [key for _, key in windows]

    def affected_keys(self, changed_ranges: Ranges) -> set[str]:
        if changed_ranges.anything:
            return set(self._all_keys)
        if self._zone is None:
            return {
                key
                for key in self._all_keys
                if any(part.low <= key <= part.high for part in changed_ranges.parts)
            }
        return {key for part in changed_ranges.parts for key in self._iter_overlapping_keys(part, self._zone)}

    def _iter_overlapping_keys(self, part: Range, zone: tzinfo) -> Iterable[str]:
        start, end = _to_datetime(part.low, zone), _exclusive_end(part.high, zone)
        first = bisect_right(self._ends, start)
        for index in range(first, len(self._window_keys)):
            if self._starts[index] >= end:
                return
            yield self._window_keys[index]


def partition_coverage(
    definition: PartitionsDefinition[str], *, instance: DagsterInstance | None = None
) -> dict[str, Any]:
    """Describe the partitions that exist now, by dimension.

    For a dimension of time windows, the description is the text `start/end` in UTC, or the empty text if no
    window exists yet. Exclusions of the definition are appended, after ` without `. For any other dimension,
    it is the sorted list of its keys.
    """
    by_dimension: dict[str, Any] = {}
    for name, part in dimension_definitions(definition).items():
        if isinstance(part, TimeWindowPartitionsDefinition):
            first, last = part.get_first_partition_window(), part.get_last_partition_window()
            ends = (first.start, last.end) if first and last else ()
            extent = "/".join(end.astimezone(UTC).isoformat() for end in ends)
            by_dimension[name] = extent + _format_exclusions(part) if extent else ""
        else:
            by_dimension[name] = sorted(part.get_partition_keys(dynamic_partitions_store=instance))
    return by_dimension


def _format_exclusions(definition: TimeWindowPartitionsDefinition) -> str:
    """Return the exclusions of a definition as a suffix that starts with ` without `; empty without them."""
    exclusions = sorted(map(str, definition.exclusions or ()))
    return f"{_WITHOUT}{'; '.join(exclusions)}" if exclusions else ""


def is_covered_partition(
    coverage: Mapping[str, Any], definition: PartitionsDefinition[str], key: str
) -> bool:
    """Whether a partition is among those that `partition_coverage` described in `coverage`.

    False if the definition has other exclusions than at that time.
    """
    if isinstance(definition, MultiPartitionsDefinition):
        values: Mapping[str, str] = definition.get_partition_key_from_str(key).keys_by_dimension
    else:
        values = {"": key}
    return all(
        _is_covered_key(coverage.get(name), part, values[name])
        for name, part in dimension_definitions(definition).items()
    )


def _is_covered_key(coverage: Any, definition: PartitionsDefinition[str], key: str) -> bool:
    if isinstance(definition, TimeWindowPartitionsDefinition):
        if not isinstance(coverage, str):
            return False
        extent, separator, exclusions = coverage.partition(_WITHOUT)
        if separator and _WITHOUT + exclusions != _format_exclusions(definition):
            return False  # windows that were excluded then may exist now, so every partition counts as new
        if extent.count("/") != 1:
            return False  # no window existed, or the text has another format: the partition counts as new
        window = definition.time_window_for_partition_key(key)
        start, end = map(datetime.fromisoformat, extent.split("/"))
        return start <= window.start and window.end <= end
    return isinstance(coverage, list) and key in coverage


def _keys_in_dimension(
    definition: PartitionsDefinition[str],
    changed_ranges: Ranges,
    reach: Reach,
    instance: DagsterInstance | None,
) -> set[str]:
    if isinstance(definition, TimeWindowPartitionsDefinition) and not changed_ranges.anything:
        return {
            key for part in changed_ranges.parts for key in _affected_window_keys(definition, part, reach)
        }
    all_keys = definition.get_partition_keys(dynamic_partitions_store=instance)
    if changed_ranges.anything:
        return set(all_keys)
    # These values are texts: only text columns can contain partition keys.
    return {key for key in all_keys if any(part.low <= key <= part.high for part in changed_ranges.parts)}


def _affected_window_keys(
    definition: TimeWindowPartitionsDefinition, part: Range, reach: Reach
) -> Iterable[str]:
    """Return the keys of the existing windows whose results depend on rows in the range `part`.

    The range is of dates or time stamps, both ends included. `reach` defines how far results depend on rows
    outside of their own window.
    """
    first, last = definition.get_first_partition_window(), definition.get_last_partition_window()
    zone = ZoneInfo(definition.timezone)
    start, end = _to_datetime(part.low, zone), _exclusive_end(part.high, zone)
    if first is None or last is None:
        return []
    if reach != _OWN_ROWS:
        # Other rows affect no window. A row of the year 9999, a usual mark for an open end, would lead the
        # search for window borders out of the calendar.
        start = max(start, reach.required_window(definition, first).start)
        end = min(end, reach.required_window(definition, last).end)
        if start >= end:
            return []
        interval = reach.affected_interval(definition, start, end)
        candidate_keys = _overlapping_window_keys(definition, first, last, interval.start, interval.end)
        windows = {key: definition.time_window_for_partition_key(key) for key in candidate_keys}
        required_windows = {key: reach.required_window(definition, window) for key, window in windows.items()}
        return [key for key, window in required_windows.items() if window.start < end and start < window.end]
    return _overlapping_window_keys(definition, first, last, start, end)


def _overlapping_window_keys(
    definition: TimeWindowPartitionsDefinition,
    first: TimeWindow,
    last: TimeWindow,
    start: datetime,
    end: datetime,
) -> Sequence[str]:
    """Return the keys of the windows, from `first` to `last` (both included), that overlap an interval.

    The interval is from `start`, included, to `end`, excluded.
    """
    if end <= first.start or start >= last.end:
        return []
    # Dagster returns windows that begin in the interval, but the first wanted window may begin before it.
    previous = definition.get_prev_partition_window(max(start, first.start))
    begin = previous.end if previous is not None else first.start
    return definition.get_partition_keys_in_time_window(TimeWindow(begin, min(end, last.end)))


def _to_datetime(value: Any, zone: tzinfo) -> datetime:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value
    return datetime(value.year, value.month, value.day, tzinfo=zone)


def _exclusive_end(value: Any, zone: tzinfo) -> datetime:
    """Return the first moment after a day or a time stamp; at most the end of Python's calendar.

    A day is in the time zone `zone`. A time stamp without time zone is in UTC.
    """
    try:
        if isinstance(value, datetime):
            return _to_datetime(value, zone) + _TICK
        return _to_datetime(value + _DAY, zone)
    except OverflowError:
        return _CALENDAR_END
