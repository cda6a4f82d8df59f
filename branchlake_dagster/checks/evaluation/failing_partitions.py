"""The partitions of failing rows, for checks that read several partitions: one Spark job after a failure.

Spark counts failing rows by the partition columns. Time stamps are counted by minutes or quarters of an hour,
in which every window of the partitions begins, and Python finds the partition of each. Memory is bounded by
`MOST_GROUPS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pyspark.sql.types as pst
from croniter import croniter
from dagster import MultiPartitionKey, MultiPartitionsDefinition, TimeWindowPartitionsDefinition
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.constraints.compiler import quoted
from branchlake_dagster.checks.constraints.model import FailingPartitions, RowConstraint, UniqueConstraint
from branchlake_dagster.checks.evaluation.counting import Collect, collect_rows, fails

if TYPE_CHECKING:
    from dagster import PartitionsDefinition
    from pyspark.sql import Column, DataFrame

    from branchlake_dagster.branching.io.stored_rows import RowPartitions

MOST_LISTED = 5
"""Partitions of one check that are named."""
MOST_GROUPS = 10_000
"""Most groups of failing rows of one check that Spark returns."""

_QUARTER_S, _MINUTE_S = 900, 60
_NOON = 12
_ROWS = "branchlake_rows"
_PLACE = "branchlake_place"


@dataclass(frozen=True)
class _Dimension:
    name: str
    column: str
    definition: PartitionsDefinition[str]


def failing_partitions(
    rows: DataFrame,
    constraints: Sequence[RowConstraint | UniqueConstraint],
    partitions: RowPartitions,
    *,
    collect: Collect = collect_rows,
) -> dict[str, FailingPartitions]:
    """The partitions of the rows that fail each of `constraints`, by name, with one call of `collect`.

    At most `MOST_LISTED` are named for each. A constraint is left out if `rows` lack a partition column, or
    if none of its failing rows belongs to a partition.
    """
    dimensions = _dimensions(partitions)
    if not constraints or any(rows.columns.count(one.column) != 1 for one in dimensions):
        return {}
    placed = rows.withColumn(_PLACE, F.array(*[_place(rows, one) for one in dimensions]))
    parts = [
        _groups(rows, placed, one).select(F.lit(number).alias("part"), _PLACE, _ROWS)
        for number, one in enumerate(constraints)
    ]
    found = collect(reduce(lambda left, right: left.unionByName(right), parts))
    listed: dict[str, FailingPartitions] = {}
    for number, one in enumerate(constraints):
        groups = [(row[_PLACE], int(row[_ROWS])) for row in found if row["part"] == number]
        if listing := _listing(groups, dimensions, partitions.definition):
            listed[one.name] = listing
    return listed


def _dimensions(partitions: RowPartitions) -> list[_Dimension]:
    definition, columns = partitions.definition, partitions.columns_by_dimension
    if isinstance(definition, MultiPartitionsDefinition):
        return [
            _Dimension(one.name, columns[one.name], one.partitions_def)
            for one in definition.partitions_defs
            if one.name in columns
        ]
    return [_Dimension("", column, definition) for column in columns.values()]


def _place(rows: DataFrame, dimension: _Dimension) -> Column:
    """Which value or interval of the partition column a row has, as text; null if the column is null."""
    column, kind = quoted(dimension.column), rows.schema[dimension.column].dataType
    if not isinstance(kind, pst.TimestampType | pst.TimestampNTZType):
        return column.cast("string")
    local = isinstance(kind, pst.TimestampNTZType)  # the wall clock of UTC
    epoch = F.expr("TIMESTAMP_NTZ '1970-01-01'" if local else "TIMESTAMP '1970-01-01T00:00:00Z'")
    seconds = _interval_s(dimension.definition)
    past = F.timestamp_diff("MICROSECOND", epoch, column) / F.lit(seconds * 1_000_000)
    return (F.floor(past) * F.lit(seconds)).cast("bigint").cast("string")


def _interval_s(definition: PartitionsDefinition[str]) -> int:
    """Seconds of an interval that lies in one window: zones differ from UTC by quarters of an hour."""
    if not isinstance(definition, TimeWindowPartitionsDefinition):
        return _MINUTE_S
    minutes: list[Any] = croniter.expand(definition.cron_schedule)[0][0]
    regular = all(minute != "*" and int(minute) % 15 == 0 for minute in minutes)
    return _QUARTER_S if regular else _MINUTE_S


def _groups(rows: DataFrame, placed: DataFrame, constraint: RowConstraint | UniqueConstraint) -> DataFrame:
    """Rows `(place, rows)`: how many rows of a place fail, the largest first."""
    if isinstance(constraint, RowConstraint):
        counted = (
            placed.where(fails(rows, constraint) == 1).groupBy(_PLACE).agg(F.count(F.lit(1)).alias(_ROWS))
        )
    else:
        key = [quoted(column) for column in constraint.columns]
        by_key = placed.groupBy(*key, _PLACE).agg(F.count(F.lit(1)).alias(_ROWS))
        of_key = F.sum(_ROWS).over(Window.partitionBy(*key))
        repeated = by_key.withColumn("branchlake_of_key", of_key).where(F.col("branchlake_of_key") > 1)
        counted = repeated.groupBy(_PLACE).agg(F.sum(_ROWS).alias(_ROWS))
    return counted.orderBy(F.col(_ROWS).desc(), F.col(_PLACE)).limit(MOST_GROUPS)


def _listing(
    groups: Sequence[tuple[Sequence[str | None], int]],
    dimensions: Sequence[_Dimension],
    definition: PartitionsDefinition[str],
) -> FailingPartitions | None:
    rows: Counter[str] = Counter()
    for place, count in groups:
        key = _partition_key(place, dimensions, definition)
        if key is not None:
            rows[key] += count
    ordered = sorted(rows.items(), key=lambda entry: (-entry[1], entry[0]))
    if not ordered:
        return None
    return FailingPartitions(
        dict(ordered[:MOST_LISTED]), max(0, len(ordered) - MOST_LISTED), len(groups) == MOST_GROUPS
    )


def _partition_key(
    place: Sequence[str | None], dimensions: Sequence[_Dimension], definition: PartitionsDefinition[str]
) -> str | None:
    """The partition of a place; None if a column is null, before the first window, or no time at all."""
    keys: dict[str, str] = {}
    for value, one in zip(place, dimensions, strict=True):
        key = value if value is None else _dimension_key(value, one.definition)
        if key is None:
            return None
        keys[one.name] = key
    if isinstance(definition, MultiPartitionsDefinition):
        return str(MultiPartitionKey(keys)) if len(keys) == len(definition.partitions_defs) else None
    return keys[""]


def _dimension_key(value: str, definition: PartitionsDefinition[str]) -> str | None:
    if not isinstance(definition, TimeWindowPartitionsDefinition):
        return value
    try:
        at = _moment(value, definition.timezone)
    except ValueError:
        return None  # a column of another type, in a table that another writer made
    if at < definition.start.timestamp():
        return None
    return definition.get_partition_key_for_timestamp(at)


def _moment(value: str, timezone: str) -> float:
    """A POSIX time stamp of an interval's begin, or of a date's noon: windows of dates are whole days."""
    if value.lstrip("-").isdigit():
        return float(value)
    return datetime.fromisoformat(value).replace(hour=_NOON, tzinfo=ZoneInfo(timezone)).timestamp()
