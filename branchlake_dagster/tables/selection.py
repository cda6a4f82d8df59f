"""Describe the rows of a run's partitions, and express them as predicates of PyIceberg, Spark and Arrow.

A selection is a disjunction of slices; a slice is a conjunction of conditions. `None` instead of a selection
means the whole table. The column's type decides how a time window applies to it (ADR 11). A zoned timestamp
is an instant. A timestamp without zone is the wall clock of UTC. A date belongs to the calendar of the
partitions' time zone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_string
from branchlake_dagster.tables.errors import SchemaMismatch


@dataclass(frozen=True)
class TimeRange:
    """The condition start <= column < end. Both bounds have a time zone."""

    column: str
    start: datetime
    end: datetime


@dataclass(frozen=True)
class DateRange:
    """The condition start <= column < end on a column of calendar dates."""

    column: str
    start: date
    end: date


@dataclass(frozen=True)
class Values:
    """The condition that the column has one of the values."""

    column: str
    values: tuple[str, ...]


Condition = TimeRange | DateRange | Values
Slice = tuple[Condition, ...]


@dataclass(frozen=True)
class Selection:
    """A union of slices; each slice is a conjunction of conditions. Without slices it selects no row."""

    slices: tuple[Slice, ...]

    def column_names(self) -> tuple[str, ...]:
        """Return the columns that the conditions use."""
        return tuple(dict.fromkeys(c.column for part in self.slices for c in part))

    def limited_to(self, column_names: Collection[str]) -> Selection | None:
        """Return the selection without conditions on other columns; None if it then selects all rows.

        It selects each row that has the same values in `column_names` as a row of this selection.
        """
        slices = [tuple(c for c in part if c.column in column_names) for part in self.slices]
        return Selection(tuple(dict.fromkeys(slices))) if all(slices) else None


def select_partitions(
    partition_keys: Iterable[str],
    definition: PartitionsDefinition[str],
    columns_by_dimension: Mapping[str, str],
    *,
    schema: Schema,
    table_name: str,
    map_window: Callable[[TimeWindowPartitionsDefinition, TimeWindow], TimeWindow] | None = None,
    all_dimensions: bool = True,
) -> Selection:
    """Return the selection of `partition_keys` in a table of `schema`. Adjacent windows become one range.

    `columns_by_dimension` maps a partition dimension to its column. `map_window` converts the window of a key
    to the window to select. (default: the same window) If `all_dimensions` is false, dimensions without a
    column are ignored.

    Raises ConfigurationError if a dimension has no column or its windows do not fit the column. Raises
    SchemaMismatch if the column is missing or its type does not fit the dimension.
    """
    values_by_slice: dict[Slice, list[str]] = {}
    string_column: str | None = None
    for key in partition_keys:
        conditions, string_value = _key_conditions(
            key, definition, columns_by_dimension, schema, table_name, map_window, all_dimensions
        )
        if string_value is None:
            values_by_slice.setdefault(conditions, [])
        else:
            string_column = string_value[0]
            values_by_slice.setdefault(conditions, []).append(string_value[1])
    slices = [
        (*part, Values(string_column, tuple(sorted(set(values))))) if string_column else part
        for part, values in values_by_slice.items()
    ]
    return Selection(tuple(_join_adjacent_slices(slices)))


def _key_conditions(
    partition_key: str,
    definition: PartitionsDefinition[str],
    columns_by_dimension: Mapping[str, str],
    schema: Schema,
    table_name: str,
    map_window: Callable[[TimeWindowPartitionsDefinition, TimeWindow], TimeWindow] | None,
    all_dimensions: bool,
) -> tuple[Slice, tuple[str, str] | None]:
    """Return the conditions of one partition key, and (column, value) of its last string dimension, or None.

    The string is separate so that the caller can collect the values of many keys in one condition.
    """
    dimensions: Sequence[tuple[str, str, PartitionsDefinition[str]]]
    if isinstance(definition, MultiPartitionsDefinition):
        key_parts = (
            partition_key
            if isinstance(partition_key, MultiPartitionKey)
            else definition.get_partition_key_from_str(partition_key)
        )
        dimensions = [
            (d.name, key_parts.keys_by_dimension[d.name], d.partitions_def)
            for d in definition.partitions_defs
        ]
    else:
        dimensions = [("", partition_key, definition)]
    window_conditions: list[Condition] = []
    string_values: list[tuple[str, str]] = []
    for name, value, dimension in dimensions:
        column = columns_by_dimension.get(name)
        if column is None and not all_dimensions:
            continue
        if column is None:
            raise ConfigurationError(
                f"Partition dimension {name!r} has no column." if name else "The partitions have no column.",
                table=table_name,
                hint="Name the column with table_metadata(partition_by=…).",
                reason="dimension_without_column",
                subject=name,
            )
        column_type = _column_type(column, schema, table_name)
        if isinstance(dimension, TimeWindowPartitionsDefinition):
            window = dimension.time_window_for_partition_key(value)
            window = map_window(dimension, window) if map_window is not None else window
            window_conditions.append(
                _window_condition(column, column_type, window.start, window.end, dimension, value, table_name)
            )
        elif isinstance(column_type, StringType):
            string_values.append((column, value))
        else:
            raise SchemaMismatch(
                f"Partition column {column} is {column_type}, but the partition keys are strings.",
                table=table_name,
                hint="Store the partition key in a string column and name that column in partition_by.",
                reason="column_type",
                subject=column,
            )
    string_conditions = [Values(column, (value,)) for column, value in string_values[:-1]]
    return (*window_conditions, *string_conditions), string_values[-1] if string_values else None


def _column_type(column_name: str, schema: Schema, table_name: str) -> IcebergType:
    try:
        return schema.find_type(column_name)
    except ValueError as error:
        raise SchemaMismatch(
            f"Partition column {column_name} is missing from the table.",
            table=table_name,
            hint=f"Its columns are {', '.join(field.name for field in schema.fields)}.",
            reason="column_missing",
            subject=column_name,
        ) from error


def _window_condition(
    column_name: str,
    column_type: IcebergType,
    start: datetime,
    end: datetime,
    definition: TimeWindowPartitionsDefinition,
    partition_key: str,
    table_name: str,
) -> Condition:
    if isinstance(column_type, TimestampType | TimestamptzType):
        return TimeRange(column_name, start.astimezone(UTC), end.astimezone(UTC))
    if not isinstance(column_type, DateType):
        raise SchemaMismatch(
            f"Column {column_name} is {column_type}, but time-window partitions need a timestamp or date.",
            table=table_name,
            hint="Name a timestamp column in partition_by.",
            reason="column_type",
            subject=column_name,
        )
    if not (_is_day_start(start) and _is_day_start(end)):
        raise ConfigurationError(
            f"The window {start.isoformat()} to {end.isoformat()} of the partitions"
            f" ({definition.cron_schedule!r} in {definition.timezone}) is not made of whole days, but column"
            f" {column_name} holds dates.",
            table=table_name,
            partitions=(partition_key,),
            hint="Partition by a timestamp column, or start the windows at midnight.",
            reason="dates_for_hours",
            subject=column_name,
        )
    return DateRange(column_name, start.date(), end.date())


def _is_day_start(moment: datetime) -> bool:
    """Return whether a calendar day starts at `moment`: at midnight, or where the clock skips midnight.

    `moment` has the time zone whose days are meant.
    """
    if moment.hour == moment.minute == moment.second == moment.microsecond == 0:
        return True
    moment_before = (moment.astimezone(UTC) - timedelta(microseconds=1)).astimezone(moment.tzinfo)
    return moment_before.date() < moment.date()


def _join_adjacent_slices(slices: list[Slice]) -> list[Slice]:
    """Merge slices that differ only in ranges that touch."""
    joined_slices: list[Slice] = []
    for part in sorted(slices, key=_slice_sort_key):
        joined_range = (
            _join_ranges(joined_slices[-1][0], part[0])
            if joined_slices and joined_slices[-1][1:] == part[1:]
            else None
        )
        if joined_range is None:
            joined_slices.append(part)
        else:
            joined_slices[-1] = (joined_range, *part[1:])
    return joined_slices


def _join_ranges(earlier: Condition, later: Condition) -> Condition | None:
    """Return one range for two ranges of the same column that touch: `later` starts where `earlier` ends.

    Returns None for other ranges, and for conditions that are not ranges of one kind.
    """
    if isinstance(earlier, TimeRange) and isinstance(later, TimeRange):
        if (earlier.column, earlier.end) == (later.column, later.start):
            return TimeRange(earlier.column, earlier.start, later.end)
    elif (
        isinstance(earlier, DateRange)
        and isinstance(later, DateRange)
        and (earlier.column, earlier.end) == (later.column, later.start)
    ):
        return DateRange(earlier.column, earlier.start, later.end)
    return None


def _slice_sort_key(part: Slice) -> tuple[str, str, str]:
    head = part[0]
    # ISO 8601 strings of one zone sort by time.
    start = head.start.isoformat() if isinstance(head, TimeRange | DateRange) else ""
    return repr(part[1:]), head.column, start


def _bound_literals(condition: TimeRange | DateRange, column_type: IcebergType) -> tuple[str, str]:
    """Return start and end of a range as ISO 8601 text, for comparisons with a column of type `column_type`.

    For a timestamp without time zone, it is the wall clock time in UTC. Raises SchemaMismatch if the column
    is not a date for a range of dates, or not a timestamp for a range of times.
    """
    if isinstance(condition, DateRange) and isinstance(column_type, DateType):
        return condition.start.isoformat(), condition.end.isoformat()
    if isinstance(condition, TimeRange) and isinstance(column_type, TimestamptzType):
        return condition.start.isoformat(), condition.end.isoformat()
    if isinstance(condition, TimeRange) and isinstance(column_type, TimestampType):
        return _to_utc_wall_clock(condition.start).isoformat(), _to_utc_wall_clock(condition.end).isoformat()
    raise SchemaMismatch(
        f"Column {condition.column} is {column_type}, but its partitions are"
        f" {'dates' if isinstance(condition, DateRange) else 'moments'}.",
        hint="Name a timestamp or date column in partition_by.",
        reason="column_type",
        subject=condition.column,
    )


def _to_utc_wall_clock(moment: datetime) -> datetime:
    """Return the moment as a naive datetime in UTC, as timestamps without time zone are stored.

    UTC is used because its wall clock never jumps.
    """
    return moment.astimezone(UTC).replace(tzinfo=None)


def to_iceberg_filter(selection: Selection, schema: Schema) -> BooleanExpression:
    """Convert the selection to a PyIceberg row filter for a table of `schema`; always false without slices.

    Raises SchemaMismatch if the column of a range is neither a timestamp nor a date as the range needs.
    """

    def condition_filter(condition: Condition) -> BooleanExpression:
        if isinstance(condition, Values):
            return In(condition.column, condition.values)
        start, end = _bound_literals(condition, schema.find_type(condition.column))
        return And(GreaterThanOrEqual(condition.column, start), LessThan(condition.column, end))

    slices = [reduce(And, map(condition_filter, part)) for part in selection.slices]
    return match_any(slices)


def match_any(conditions: Iterable[BooleanExpression]) -> BooleanExpression:
    """Join conditions by OR; always false without conditions.

    PyIceberg builds a balanced tree from three or more operands. A chain of a thousand conditions would
    exceed Python's limit of recursion. The two false operands have no effect on the result.
    """
    return Or(AlwaysFalse(), AlwaysFalse(), *conditions)


def to_sql_predicate(selection: Selection, schema: Schema, *, table_alias: str = "") -> str:
    """Convert the selection to a Spark SQL predicate that does not depend on the session's time zone.

    `table_alias` is the quoted name of the table that owns the columns. A query of several tables needs it.
    """
    literal_types: dict[type[IcebergType], str] = {DateType: "DATE", TimestampType: "TIMESTAMP_NTZ"}

    def condition_sql(condition: Condition) -> str:
        column_sql = f"{table_alias}." * bool(table_alias) + quote_spark_name(condition.column)
        column_type = schema.find_type(condition.column)
        if isinstance(condition, Values):
            if not isinstance(column_type, StringType):
                raise SchemaMismatch(f"Partition column {condition.column} is not a string.")
            return f"{column_sql} IN ({', '.join(map(quote_spark_string, condition.values))})"
        # The literal includes the UTC offset. Without it, Spark would use the session's time zone.
        literal_type = literal_types.get(type(column_type), "TIMESTAMP")
        start, end = _bound_literals(condition, column_type)
        return f"({column_sql} >= {literal_type} '{start}' AND {column_sql} < {literal_type} '{end}')"

    slices = [" AND ".join(map(condition_sql, part)) for part in selection.slices]
    return " OR ".join(f"({slice_sql})" for slice_sql in slices) if slices else "false"


def count_rows_outside(selection: Selection, frame: pa.Table) -> int:
    """Return how many rows of an Arrow table are outside the selection.

    Rows with a null in a partition column are outside.
    """
    return int(frame.num_rows - (pc.sum(selection_mask(selection, frame)).as_py() or 0))


def selection_mask(selection: Selection, frame: pa.Table) -> pa.ChunkedArray:
    """Return, for each row of an Arrow table, True if it is inside the selection; never null."""

    def condition_mask(condition: Condition) -> pa.ChunkedArray:
        column = frame.column(condition.column)
        if isinstance(condition, Values):
            return pc.is_in(column, value_set=pa.array(condition.values, type=column.type))
        start, end = range_bounds(condition, column.type)
        return pc.and_kleene(pc.greater_equal(column, start), pc.less(column, end))

    if not selection.slices:
        return pa.chunked_array([pa.repeat(pa.scalar(False), frame.num_rows)])
    mask = reduce(
        pc.or_kleene, (reduce(pc.and_kleene, map(condition_mask, part)) for part in selection.slices)
    )
    return pc.fill_null(mask, False)


def range_bounds(condition: TimeRange | DateRange, column_type: pa.DataType) -> tuple[pa.Scalar, pa.Scalar]:
    """Return start and end of a range as Arrow scalars of type `column_type`, to compare with a column.

    The start is included in the range, the end is not. Times for a column without time zone are converted to
    UTC.
    """
    bounds: tuple[Any, Any] = (condition.start, condition.end)
    if isinstance(condition, TimeRange) and getattr(column_type, "tz", None) is None:
        bounds = (_to_utc_wall_clock(condition.start), _to_utc_wall_clock(condition.end))
    return pa.scalar(bounds[0], type=column_type), pa.scalar(bounds[1], type=column_type)
