"""How far beyond its own window of time a partition reads its inputs, and which partitions a row affects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any

from dagster import PartitionMapping, TimeWindow, TimeWindowPartitionMapping, TimeWindowPartitionsDefinition

from branchlake_dagster.changes.ranges import Range, Ranges, joined

_NONE = timedelta()
_DAY = timedelta(days=1)
LAST_DAY = date(9999, 12, 30)
"""The day after it is a date too, which those who compare with `<` need."""


@dataclass(frozen=True)
class Reach:
    """By how much a window is longer for the rows of an input than for the results.

    `before` and `after` are lengths of time, not negative. The offsets count windows of the partition
    definition, as those of Dagster's TimeWindowPartitionMapping do.
    """

    before: timedelta = _NONE
    after: timedelta = _NONE
    start_offset: int = 0
    end_offset: int = 0

    @property
    def nothing(self) -> bool:
        """Whether results depend on the rows of their own window alone."""
        return self == Reach()

    def of_window(self, definition: TimeWindowPartitionsDefinition, own: TimeWindow) -> TimeWindow:
        """The window of the rows that the results of a window depend on; it may begin before the first."""
        start = _border(definition, own.start, self.start_offset)
        end = _border(definition, own.end, self.end_offset)
        return TimeWindow(start - self.before, end + self.after)

    def affected(
        self, definition: TimeWindowPartitionsDefinition, start: datetime, end: datetime
    ) -> TimeWindow:
        """An interval that holds every window whose results depend on a row of `start` to `end`.

        It may hold others too, which `of_window` sorts out.
        """
        low = _outer(definition, start - self.after, -1)
        high = _outer(definition, end + self.before, 1)
        return TimeWindow(
            _border(definition, low, -self.end_offset), _border(definition, high, -self.start_offset)
        )

    def complete_before(
        self, definition: TimeWindowPartitionsDefinition | None, through: datetime
    ) -> datetime:
        """The time before which no result depends on rows of `through` or later, at most `through`."""
        if definition is None or self.end_offset <= 0:
            return through - self.after
        return min(
            _border(definition, _outer(definition, through - self.after, -1), -self.end_offset), through
        )

    def around(self, ranges: Ranges, *, rows: bool) -> Ranges:
        """The values whose results a change of these values affects; `rows`: that results of these need.

        Dates are moved by whole days.
        """
        back, ahead = (self.before, self.after) if rows else (self.after, self.before)
        if ranges.anything or self.nothing:
            return ranges
        parts = [Range(_moved(one.low, -back), _moved(one.high, ahead)) for one in ranges.parts]
        return Ranges(joined(parts), ranges.nulls)


def mapped(mapping: PartitionMapping | None, widen: tuple[timedelta, timedelta]) -> Reach:
    """The reach that a partition mapping and a `widen` give together."""
    if isinstance(mapping, TimeWindowPartitionMapping):
        return Reach(*widen, start_offset=mapping.start_offset, end_offset=mapping.end_offset)
    return Reach(*widen)


def _border(definition: TimeWindowPartitionsDefinition, border: datetime, count: int) -> datetime:
    """The border between two windows that is so many windows later; earlier with a negative count."""
    for _ in range(abs(count)):
        if count > 0:
            following = definition.get_next_partition_window(border, respect_bounds=False)
            border = following.end if following is not None else border
        else:
            previous = definition.get_prev_partition_window(border, respect_bounds=False)
            border = previous.start if previous is not None else border
    return border


def _outer(definition: TimeWindowPartitionsDefinition, moment: datetime, direction: int) -> datetime:
    """The nearest border between two windows that is not after a moment; with direction 1: not before it."""
    if direction > 0:
        following = definition.get_next_partition_window(moment, respect_bounds=False)
        return following.start if following is not None else moment
    previous = definition.get_prev_partition_window(moment, respect_bounds=False)
    return previous.end if previous is not None else moment


def _moved(value: Any, by: timedelta) -> Any:
    """A date or time stamp moved, dates by whole days; at most to the ends of the calendar."""
    try:
        if isinstance(value, datetime):
            return value + by
        return value + _DAY * (-(abs(by) // -_DAY)) * (1 if by >= _NONE else -1)
    except OverflowError:
        day = LAST_DAY if by >= _NONE else date.min
        at = time.max if by >= _NONE else time.min
        return datetime.combine(day, at, value.tzinfo) if isinstance(value, datetime) else day
