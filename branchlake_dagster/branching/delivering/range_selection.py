"""Change ranges as a selection of rows, for both engines."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from pyiceberg.schema import Schema
from pyiceberg.types import DateType, TimestampType, TimestamptzType

from branchlake_dagster.branching.errors import SchemaMismatch
from branchlake_dagster.branching.table.selection import DateRange, Selection, TimeRange
from branchlake_dagster.changes.ranges import Range, Ranges, joined

_DAY = timedelta(days=1)
_TICK = timedelta(microseconds=1)


def by_days(ranges: Ranges) -> Ranges:
    """The same widened to whole days, of UTC where they are time stamps."""
    return Ranges(joined([Range(_day(part.low), _day(part.high)) for part in ranges.parts]))


def selection(ranges: Ranges, column: str, schema: Schema, *, table: str) -> Selection:
    """The rows whose column lies in the ranges: dates on a column of time stamps are whole days of UTC.

    Raises SchemaMismatch for a column that is neither a date nor a time stamp.
    """
    try:
        kind = schema.find_type(column)
    except ValueError as error:
        raise SchemaMismatch(
            f"Change ranges are about {column}, which is missing from the table.",
            table=table,
            hint=f"Its columns are {', '.join(field.name for field in schema.fields)}.",
        ) from error
    if isinstance(kind, DateType):
        days = by_days(ranges)
        return Selection(tuple((DateRange(column, part.low, part.high + _DAY),) for part in days.parts))
    if not isinstance(kind, TimestampType | TimestamptzType):
        raise SchemaMismatch(
            f"Column {column} is {kind}, and only ranges of dates and time stamps can be replaced.",
            table=table,
            hint="Name a date or time stamp column, or use the pattern `keys`.",
        )
    return Selection(tuple((TimeRange(column, start, end),) for start, end in _moments(ranges)))


def _moments(ranges: Ranges) -> Iterable[tuple[datetime, datetime]]:
    for part in ranges.parts:
        if isinstance(part.low, datetime):
            yield _aware(part.low), _aware(part.high) + _TICK
        else:
            yield _midnight(part.low), _midnight(part.high) + _DAY


def _day(value: Any) -> date:
    return value.date() if isinstance(value, datetime) else value


def _aware(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _midnight(value: date) -> datetime:
    return datetime(value.year, value.month, value.day, tzinfo=UTC)
