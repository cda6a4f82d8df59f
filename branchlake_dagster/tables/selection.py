"""The rows of a table that belong to a run's partitions, as predicates for both engines.

A selection is a disjunction of slices, a slice a conjunction of conditions. `None` instead of a selection
means the whole table. What a time window means to a column is the column type's matter (ADR 11): a zoned
timestamp is an instant, a timestamp without zone the wall clock of UTC, a date the calendar of the
partitions' own time zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from dagster import (
    MultiPartitionKey,
    MultiPartitionsDefinition,
    PartitionsDefinition,
    TimeWindow,
    TimeWindowPartitionsDefinition,
)
from pyiceberg.expressions import (
    AlwaysFalse,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    LessThan,
    Or,
)
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, IcebergType, StringType, TimestampType, TimestamptzType

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.spark.session import quoted, text_literal
from branchlake_dagster.tables.errors import SchemaMismatch


@dataclass(frozen=True)
class TimeRange:
    """start <= column < end; both aware."""

    column: str
    start: datetime
    end: datetime


@dataclass(frozen=True)
class DateRange:
    """start <= column < end on a column of calendar dates."""

    column: str
    start: date
    end: date


@dataclass(frozen=True)
class Values:
    """column is one of values."""

    column: str
    values: tuple[str, ...]


Condition = TimeRange | DateRange | Values
Slice = tuple[Condition, ...]


@dataclass(frozen=True)
class Selection:
    """A union of slices; without slices it holds no row."""

    slices: tuple[Slice, ...]

    def columns(self) -> tuple[str, ...]:
        """The columns it looks at."""
        return tuple(dict.fromkeys(c.column for part in self.slices for c in part))


def select(
    keys: Iterable[str],
    definition: PartitionsDefinition[str],
    columns: Mapping[str, str],
    *,
    schema: Schema,
    table: str,
    window: Callable[[TimeWindowPartitionsDefinition, TimeWindow], TimeWindow] | None = None,
    all_dimensions: bool = True,
) -> Selection:
    """The selection of partition `keys` in a table of `schema`; neighbouring windows become one range.

    `window` gives the window that is selected for the window of a key. (default: the same) Without
    `all_dimensions` one that has no column selects nothing away.

    Raises ConfigurationError when a dimension has no column or its windows do not fit the column, and
    SchemaMismatch when the column is missing or of a type that cannot hold the dimension.
    """
    slices: dict[Slice, list[str]] = {}
    last: str | None = None
    for key in keys:
        conditions, rest = _conditions(key, definition, columns, schema, table, window, all_dimensions)
        if rest is None:
            slices.setdefault(conditions, [])
        else:
            last = rest[0]
            slices.setdefault(conditions, []).append(rest[1])
    found = [
        (*part, Values(last, tuple(sorted(set(values))))) if last else part for part, values in slices.items()
    ]
    return Selection(tuple(_join_neighbours(found)))


def _conditions(
    key: str,
    definition: PartitionsDefinition[str],
    columns: Mapping[str, str],
    schema: Schema,
    table: str,
    selected: Callable[[TimeWindowPartitionsDefinition, TimeWindow], TimeWindow] | None,
    all_dimensions: bool,
) -> tuple[Slice, tuple[str, str] | None]:
    """The conditions of one key, apart from its last string dimension, so that those can be gathered."""
    dimensions: Sequence[tuple[str, str, PartitionsDefinition[str]]]
    if isinstance(definition, MultiPartitionsDefinition):
        parts = key if isinstance(key, MultiPartitionKey) else definition.get_partition_key_from_str(key)
        dimensions = [
            (d.name, parts.keys_by_dimension[d.name], d.partitions_def) for d in definition.partitions_defs
        ]
    else:
        dimensions = [("", key, definition)]
    windows: list[Condition] = []
    strings: list[tuple[str, str]] = []
    for name, value, dimension in dimensions:
        column = columns.get(name)
        if column is None and not all_dimensions:
            continue
        if column is None:
            raise ConfigurationError(
                f"Partition dimension {name!r} has no column." if name else "The partitions have no column.",
                table=table,
                hint="Name it with table_metadata(partition_by=…).",
                reason="dimension_without_column",
                subject=name,
            )
        kind = _kind(column, schema, table)
        if isinstance(dimension, TimeWindowPartitionsDefinition):
            window = dimension.time_window_for_partition_key(value)
            window = selected(dimension, window) if selected is not None else window
            windows.append(_window(column, kind, window.start, window.end, dimension, value, table))
        elif isinstance(kind, StringType):
            strings.append((column, value))
        else:
            raise SchemaMismatch(
                f"Partition column {column} is {kind}, but the partition keys are strings.",
                table=table,
                hint="Store the partition key itself in a string column and name that in partition_by.",
                reason="column_type",
                subject=column,
            )
    others = [Values(column, (value,)) for column, value in strings[:-1]]
    return (*windows, *others), strings[-1] if strings else None


def _kind(column: str, schema: Schema, table: str) -> IcebergType:
    try:
        return schema.find_type(column)
    except ValueError as error:
        raise SchemaMismatch(
            f"Partition column {column} is missing from the table.",
            table=table,
            hint=f"Its columns are {', '.join(field.name for field in schema.fields)}.",
            reason="column_missing",
            subject=column,
        ) from error


def _window(
    column: str,
    kind: IcebergType,
    start: datetime,
    end: datetime,
    definition: TimeWindowPartitionsDefinition,
    key: str,
    table: str,
) -> Condition:
    if isinstance(kind, TimestampType | TimestamptzType):
        return TimeRange(column, start.astimezone(UTC), end.astimezone(UTC))
    if not isinstance(kind, DateType):
        raise SchemaMismatch(
            f"Column {column} is {kind}, but time-window partitions need a timestamp or date.",
            table=table,
            hint="Name a timestamp column in partition_by.",
            reason="column_type",
            subject=column,
        )
    if not (_begins_a_day(start) and _begins_a_day(end)):
        raise ConfigurationError(
            f"The window {start.isoformat()} to {end.isoformat()} of the partitions"
            f" ({definition.cron_schedule!r} in {definition.timezone}) is not made of whole days, but column"
            f" {column} holds dates.",
            table=table,
            partitions=(key,),
            hint="Partition by a timestamp column, or let the windows begin at midnight.",
            reason="dates_for_hours",
            subject=column,
        )
    return DateRange(column, start.date(), end.date())


def _begins_a_day(moment: datetime) -> bool:
    """Whether a calendar day begins here: at midnight, or where the clock jumps over midnight."""
    if moment.hour == moment.minute == moment.second == moment.microsecond == 0:
        return True
    before = (moment.astimezone(UTC) - timedelta(microseconds=1)).astimezone(moment.tzinfo)
    return before.date() < moment.date()


def _join_neighbours(slices: list[Slice]) -> list[Slice]:
    """Merge slices that differ only in ranges that touch."""
    done: list[Slice] = []
    for part in sorted(slices, key=_order):
        joined = _joined(done[-1][0], part[0]) if done and done[-1][1:] == part[1:] else None
        if joined is None:
            done.append(part)
        else:
            done[-1] = (joined, *part[1:])
    return done


def _joined(before: Condition, after: Condition) -> Condition | None:
    """One range for two of the same column that touch."""
    if isinstance(before, TimeRange) and isinstance(after, TimeRange):
        if (before.column, before.end) == (after.column, after.start):
            return TimeRange(before.column, before.start, after.end)
    elif (
        isinstance(before, DateRange)
        and isinstance(after, DateRange)
        and (before.column, before.end) == (after.column, after.start)
    ):
        return DateRange(before.column, before.start, after.end)
    return None


def _order(part: Slice) -> tuple[str, str, str]:
    head = part[0]
    # ISO 8601 of one zone sorts by time.
    begins = head.start.isoformat() if isinstance(head, TimeRange | DateRange) else ""
    return repr(part[1:]), head.column, begins


def _bounds(condition: TimeRange | DateRange, kind: IcebergType) -> tuple[str, str]:
    """The range's ends as literals of a column of type `kind`."""
    if isinstance(condition, DateRange) and isinstance(kind, DateType):
        return condition.start.isoformat(), condition.end.isoformat()
    if isinstance(condition, TimeRange) and isinstance(kind, TimestamptzType):
        return condition.start.isoformat(), condition.end.isoformat()
    if isinstance(condition, TimeRange) and isinstance(kind, TimestampType):
        return _utc_wall(condition.start).isoformat(), _utc_wall(condition.end).isoformat()
    raise SchemaMismatch(
        f"Column {condition.column} is {kind}, but its partitions are"
        f" {'dates' if isinstance(condition, DateRange) else 'moments'}.",
        hint="Name a timestamp or date column in partition_by.",
        reason="column_type",
        subject=condition.column,
    )


def _utc_wall(moment: datetime) -> datetime:
    """What a timestamp without zone holds: the wall clock of UTC, the only one that never jumps."""
    return moment.astimezone(UTC).replace(tzinfo=None)


def to_iceberg(selection: Selection, schema: Schema) -> BooleanExpression:
    """The selection as a PyIceberg row filter."""

    def one(condition: Condition) -> BooleanExpression:
        if isinstance(condition, Values):
            return In(condition.column, condition.values)
        start, end = _bounds(condition, schema.find_type(condition.column))
        return And(GreaterThanOrEqual(condition.column, start), LessThan(condition.column, end))

    slices = [reduce(And, map(one, part)) for part in selection.slices]
    return reduce(Or, slices) if slices else AlwaysFalse()


def to_sql(selection: Selection, schema: Schema, *, of: str = "") -> str:
    """The selection as a Spark SQL predicate, whatever the session's time zone.

    `of` is the quoted name of the table whose columns are meant, where the query has several.
    """
    words: dict[type[IcebergType], str] = {DateType: "DATE", TimestampType: "TIMESTAMP_NTZ"}

    def one(condition: Condition) -> str:
        name = f"{of}." * bool(of) + quoted(condition.column)
        kind = schema.find_type(condition.column)
        if isinstance(condition, Values):
            if not isinstance(kind, StringType):
                raise SchemaMismatch(f"Partition column {condition.column} is not a string.")
            return f"{name} IN ({', '.join(map(text_literal, condition.values))})"
        # A moment's literal carries its offset: without it, it would be read in the session's time zone.
        word = words.get(type(kind), "TIMESTAMP")
        start, end = _bounds(condition, kind)
        return f"({name} >= {word} '{start}' AND {name} < {word} '{end}')"

    slices = [" AND ".join(map(one, part)) for part in selection.slices]
    return " OR ".join(f"({text})" for text in slices) if slices else "false"


def rows_outside(selection: Selection, frame: pa.Table) -> int:
    """How many rows of an Arrow table the selection does not hold (null partition values included)."""
    return int(frame.num_rows - (pc.sum(inside(selection, frame)).as_py() or 0))


def inside(selection: Selection, frame: pa.Table) -> pa.ChunkedArray:
    """For each row of an Arrow table whether the selection holds it."""

    def one(condition: Condition) -> pa.ChunkedArray:
        column = frame.column(condition.column)
        if isinstance(condition, Values):
            return pc.is_in(column, value_set=pa.array(condition.values, type=column.type))
        start, end = ends(condition, column.type)
        return pc.and_kleene(pc.greater_equal(column, start), pc.less(column, end))

    if not selection.slices:
        return pa.chunked_array([pa.repeat(pa.scalar(False), frame.num_rows)])
    found = reduce(pc.or_kleene, (reduce(pc.and_kleene, map(one, part)) for part in selection.slices))
    return pc.fill_null(found, False)


def ends(condition: TimeRange | DateRange, kind: pa.DataType) -> tuple[pa.Scalar, pa.Scalar]:
    """The range's ends as values of an Arrow column of type `kind`."""
    found: tuple[Any, Any] = (condition.start, condition.end)
    if isinstance(condition, TimeRange) and getattr(kind, "tz", None) is None:
        found = (_utc_wall(condition.start), _utc_wall(condition.end))
    return pa.scalar(found[0], type=kind), pa.scalar(found[1], type=kind)
