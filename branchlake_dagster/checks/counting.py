"""Failing rows: counted in one Spark job, with examples and the partitions they are in.

How many rows fail, for all constraints and SQL checks of an asset in one Spark job.

Counting alone reads the columns that are judged, once, and makes a plan of a third of the time that
one with examples takes (ADR 23). Examples are fetched afterwards, for what failed.

A few failing rows of each constraint that is known to fail, in one Spark job.

Two one-pass branches under one `UNION ALL`: one failing row per constraint by an aggregation, and a sample
of failing rows cut off by `LIMIT`. Keys that repeat add a grouping to the same query. Memory is bounded
everywhere: the aggregation holds one row per constraint, the sample `examples` rows per constraint.

Why not the obvious forms (1,000,000 rows, 20 constraints, 2 cores, 2026-11-21): `collect_list` keeps every
failing row of a bad table in memory; `max_by(x, y, k)` is not in Spark 4.1; five minima per constraint
instead of one took 11-14 s where this takes 3-5 s, when all rows fail.

The partitions of failing rows, for checks that read several partitions: one Spark job after a failure.

Spark counts failing rows by the partition columns. Time stamps are counted by minutes or quarters of an hour,
in which every window of the partitions begins, and Python finds the partition of each. Memory is bounded by
`MAX_GROUPS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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

from branchlake_dagster.checks.compiler import quote_column
from branchlake_dagster.checks.constraints import (
    Example,
    FailingPartitions,
    RowConstraint,
    SqlConstraint,
    UniqueConstraint,
    require_examples,
)

if TYPE_CHECKING:
    from dagster import PartitionsDefinition
    from pyspark.sql import Column, DataFrame, Row

    from branchlake_dagster.io_manager.loading import RowPartitions

ROWS_PLACEHOLDER = "{this}"
"""Stands for the checked rows in the text of a SQL check."""


def failures_from_clause(check: SqlConstraint, view: str) -> str:
    """The FROM clause of the rows that `check` returns, `view` standing for the checked rows.

    As a subquery the text can only be a query: Spark's grammar has no INSERT or DROP there.
    """
    return f"FROM (\n{check.sql.strip().rstrip(';').replace(ROWS_PLACEHOLDER, view)}\n) AS failures"


def select_failures(rows: DataFrame, check: SqlConstraint, view: str) -> DataFrame:
    """The rows that `check` returns; columns of one name are numbered."""
    frame = rows.sparkSession.sql(f"SELECT * {failures_from_clause(check, view)}")
    return frame.toDF(*_number_duplicates(frame.columns))


def _number_duplicates(columns: Sequence[str]) -> list[str]:
    """The column names, numbered where one repeats: `a.*, b.*` is a natural way to show a failure."""
    names: list[str] = []
    used_names: set[str] = set()
    for column in columns:
        name, count = column, 1
        while name.lower() in used_names:  # Spark resolves names without regard to case
            count += 1
            name = f"{column}_{count}"
        used_names.add(name.lower())
        names.append(name)
    return names


Collect = Callable[["DataFrame"], "list[Row]"]
Countable = RowConstraint | UniqueConstraint | SqlConstraint

_ADAPTIVE = "spark.sql.adaptive.enabled"
_COUNT = "branchlake_count"


@dataclass(frozen=True)
class FailureCount:
    """Rows that fail; `total` is None where the rows judged are not those of the frame."""

    failing: int
    total: int | None


def collect_rows(frame: DataFrame) -> list[Row]:
    """Fetch `frame` as one Spark job: the only place where an evaluation makes Spark work.

    Adaptive execution is off meanwhile. It would submit each shuffle of the query as a job of its own
    (counted: 3 jobs, more with a uniqueness constraint, instead of 1) to replan what ends in a few rows.
    """
    conf = frame.sparkSession.conf
    previous = conf.get(_ADAPTIVE) or "true"
    conf.set(_ADAPTIVE, "false")
    try:
        return frame.collect()
    finally:
        conf.set(_ADAPTIVE, previous)


def count_failures(
    rows: DataFrame, constraints: Sequence[Countable], *, view: str, collect: Collect = collect_rows
) -> dict[str, FailureCount]:
    """The counts of each of `constraints` by name, with exactly one call of `collect`.

    All columns of the constraints must exist in `rows`, and `view` must be what SQL checks call `{this}`.
    """
    rules = [one for one in constraints if isinstance(one, RowConstraint)]
    parts = [_count_rule_failures(rows, rules)] if rules else []
    others = [one for one in constraints if not isinstance(one, RowConstraint)]
    for number, constraint in enumerate(others, start=1):
        count_frame = (
            _count_repeated_keys(rows, constraint)
            if isinstance(constraint, UniqueConstraint)
            else _count_returned_rows(rows, constraint, view)
        )
        parts.append(_number_part(count_frame, number))
    query = parts[0]
    for part in parts[1:]:
        query = query.unionByName(part)
    row_by_part = {row["part"]: row for row in collect(query)}
    counts: dict[str, FailureCount] = {}
    for index, rule in enumerate(rules):
        counts[rule.name] = FailureCount(int(row_by_part[0]["failing"][index]), int(row_by_part[0]["total"]))
    for number, constraint in enumerate(others, start=1):
        total = row_by_part[number]["total"]
        counts[constraint.name] = FailureCount(
            int(row_by_part[number]["failing"][0]), None if total is None else int(total)
        )
    return counts


def failure_flag(rows: DataFrame, rule: RowConstraint) -> Column:
    """1 for a row that breaks `rule`, else 0."""
    # A null condition is not a failure: ~null is null, and null counts as satisfied. Through `bit_count`,
    # which Spark offers to no data source: its translation of some conditions for them fails with an
    # internal error (4.1: a float column against 0.1, a time stamp in an empty range).
    return F.bit_count(F.coalesce(~rule.build_condition(rows), F.lit(False)))


def _count_rule_failures(rows: DataFrame, rules: Sequence[RowConstraint]) -> DataFrame:
    return rows.agg(
        F.lit(0).alias("part"),
        F.count(F.lit(1)).alias("total"),
        F.array(*[F.coalesce(F.sum(failure_flag(rows, rule)), F.lit(0)) for rule in rules])
        .cast("array<bigint>")
        .alias("failing"),
    )


def _count_repeated_keys(rows: DataFrame, key: UniqueConstraint) -> DataFrame:
    groups = rows.groupBy(*[quote_column(column) for column in key.columns]).agg(
        F.count(F.lit(1)).alias(_COUNT)
    )
    size = F.col(_COUNT)
    return groups.agg(
        F.coalesce(F.sum(size), F.lit(0)).alias("total"),
        F.coalesce(F.sum(F.when(size > 1, size)), F.lit(0)).alias("failing"),
    )


def _count_returned_rows(rows: DataFrame, check: SqlConstraint, view: str) -> DataFrame:
    frame = rows.sparkSession.sql(f"SELECT count(*) AS failing {failures_from_clause(check, view)}")
    return frame.select(F.lit(None).cast("bigint").alias("total"), "failing")


def _number_part(count_frame: DataFrame, number: int) -> DataFrame:
    return count_frame.select(
        F.lit(number).alias("part"), "total", F.array("failing").cast("array<bigint>").alias("failing")
    )


VALUE_CHARS = 80
"""Longest printed value in an example row, in characters; longer ones are cut."""

EXAMPLE_COLUMNS = 32
"""Most columns carried per example row: those the contract speaks of first."""

_FLAG = "branchlake_flag_"
_CELLS = "branchlake_cells"
_WEIGHT = "branchlake_weight"

ANY_ROW = RowConstraint(
    name="returned", columns=(), description="", build_condition=lambda _: F.lit(False), needs_types=False
)
"""What every row fails: for rows that are failures already."""


def collect_examples(
    rows: DataFrame,
    constraints: Sequence[RowConstraint | UniqueConstraint],
    *,
    examples: int,
    collect: Collect = collect_rows,
) -> dict[str, tuple[Example, ...]]:
    """Failing rows of each constraint by name, at most `examples`, with exactly one call of `collect`.

    At least one row for each that any row fails. For a uniqueness constraint an example is a key with its
    number of rows.
    """
    require_examples(examples)
    rules = [constraint for constraint in constraints if isinstance(constraint, RowConstraint)]
    keys = [constraint for constraint in constraints if isinstance(constraint, UniqueConstraint)]
    shown_columns = _example_columns(rows, rules)
    parts = (
        _failing_examples(_flag_failures(rows, rules, shown_columns), len(rules), examples) if rules else []
    )
    parts += [
        _repeated_key_examples(rows, key, examples, part=part) for part, key in enumerate(keys, start=1)
    ]
    query = parts[0]
    for part in parts[1:]:
        query = query.unionByName(part)
    result_rows = collect(query)
    first_examples = {row["part"]: row["first"] for row in result_rows if row["first"] is not None}
    examples_by_name: dict[str, tuple[Example, ...]] = {}
    for index, rule in enumerate(rules):
        column_order = [
            *(c for c in shown_columns if c in rule.columns),
            *(c for c in shown_columns if c not in rule.columns),
        ]
        cells = [first_examples[0][index]] if first_examples[0][index] is not None else []
        cells += [row["cells"] for row in result_rows if row["flags"] is not None and row["flags"][index]]
        examples_by_name[rule.name] = tuple(_label_examples(cells, shown_columns, column_order)[:examples])
    for number, key in enumerate(keys, start=1):
        labels = [*key.columns, "rows"]
        cells = [one for one in first_examples[number] if one is not None]
        examples_by_name[key.name] = tuple(_label_examples(cells, labels, labels))
    return examples_by_name


def _example_columns(rows: DataFrame, rules: Sequence[RowConstraint]) -> list[str]:
    rule_columns = dict.fromkeys(column for rule in rules for column in rule.columns)
    # A frame may have two columns of one name; neither can be addressed, so neither is shown.
    occurrences = Counter(name.lower() for name in rows.columns)
    unique_names = [name for name in rows.columns if occurrences[name.lower()] == 1]
    return [*rule_columns, *(name for name in unique_names if name not in rule_columns)][:EXAMPLE_COLUMNS]


def _format_cell(column: str, dtype: pst.DataType) -> Column:
    if isinstance(dtype, pst.BinaryType):
        return F.hex(F.substring(quote_column(column), 1, VALUE_CHARS // 2))
    return F.left(quote_column(column).cast("string"), F.lit(VALUE_CHARS))


def _flag_failures(
    rows: DataFrame, rules: Sequence[RowConstraint], shown_columns: Sequence[str]
) -> DataFrame:
    """One boolean per rule (True: the row fails it), and the row's printed values if it fails any."""
    flags = [failure_flag(rows, rule) == 1 for rule in rules]
    any_fails = F.lit(False)
    for flag in flags:
        any_fails = any_fails | flag
    schema = rows.schema
    cells = F.array(*[_format_cell(column, schema[column].dataType) for column in shown_columns])
    return rows.select(
        *[flag.alias(f"{_FLAG}{index}") for index, flag in enumerate(flags)],
        F.when(any_fails, cells.cast("array<string>")).alias(_CELLS),
    )


def _repeated_key_examples(rows: DataFrame, key: UniqueConstraint, examples: int, *, part: int) -> DataFrame:
    """One row in the form of `_failing_examples`: up to `examples` keys that repeat.

    They are the smallest of each of `examples` hash buckets: bounded, the same every time, and the
    grouping, which costs a shuffle of the key columns, is read once.
    """
    schema = rows.schema
    groups = rows.groupBy(*[quote_column(column) for column in key.columns]).agg(
        F.count(F.lit(1)).alias(_WEIGHT)
    )
    cells = [_format_cell(column, schema[column].dataType) for column in key.columns]
    keys = groups.where(F.col(_WEIGHT) > 1).select(
        F.array(*cells, F.col(_WEIGHT).cast("string")).alias(_CELLS)
    )
    bucket = F.pmod(F.xxhash64(_CELLS), F.lit(examples))
    return keys.agg(
        F.lit(part).alias("part"),
        F.array(*[F.min(F.when(bucket == index, F.col(_CELLS))) for index in range(examples)]).alias("first"),
        F.lit(None).cast("array<boolean>").alias("flags"),
        F.lit(None).cast("array<string>").alias("cells"),
    )


def _failing_examples(flagged: DataFrame, rules: int, examples: int) -> list[DataFrame]:
    """Rows `(part, first, flags, cells)`: one with a failing row per rule, then the sample."""
    flags = [F.col(f"{_FLAG}{index}") for index in range(rules)]
    first = flagged.agg(
        F.lit(0).alias("part"),
        # The smallest failing row: one is certain to be shown, and it is the same one every time.
        F.array(*[F.min(F.when(flag, F.col(_CELLS))) for flag in flags])
        .cast("array<array<string>>")
        .alias("first"),
        F.lit(None).cast("array<boolean>").alias("flags"),
        F.lit(None).cast("array<string>").alias("cells"),
    )
    sample = flagged.where(F.col(_CELLS).isNotNull()).limit(examples * rules)
    return [
        first,
        sample.select(
            F.lit(0).alias("part"),
            F.lit(None).cast("array<array<string>>").alias("first"),
            F.array(*flags).alias("flags"),
            F.col(_CELLS).alias("cells"),
        ),
    ]


def _label_examples(
    cells: Sequence[Sequence[str | None]], labels: Sequence[str], order: Sequence[str]
) -> list[Example]:
    """Each of `cells` once, under its labels: the smallest failing row is often in the sample too."""
    records = [dict(zip(labels, values, strict=True)) for values in dict.fromkeys(map(tuple, cells))]
    return [{name: record[name] for name in order} for record in records]


MAX_LISTED = 5
"""Partitions of one check that are named."""
MAX_GROUPS = 10_000
"""Most groups of failing rows of one check that Spark returns."""

_QUARTER_S, _MINUTE_S = 900, 60
_NOON = 12
_ROWS = "branchlake_rows"
_BUCKETS = "branchlake_place"


@dataclass(frozen=True)
class _PartitionDimension:
    name: str
    column: str
    definition: PartitionsDefinition[str]


def find_failing_partitions(
    rows: DataFrame,
    constraints: Sequence[RowConstraint | UniqueConstraint],
    partitions: RowPartitions,
    *,
    collect: Collect = collect_rows,
) -> dict[str, FailingPartitions]:
    """The partitions of the rows that fail each of `constraints`, by name, with one call of `collect`.

    At most `MAX_LISTED` are named for each. A constraint is left out if `rows` lack a partition column, or
    if none of its failing rows belongs to a partition.
    """
    dimensions = _partition_dimensions(partitions)
    if not constraints or any(rows.columns.count(one.column) != 1 for one in dimensions):
        return {}
    bucketed_rows = rows.withColumn(_BUCKETS, F.array(*[_bucket_column(rows, one) for one in dimensions]))
    parts = [
        _count_by_buckets(rows, bucketed_rows, one).select(F.lit(number).alias("part"), _BUCKETS, _ROWS)
        for number, one in enumerate(constraints)
    ]
    group_rows = collect(reduce(lambda left, right: left.unionByName(right), parts))
    partitions_by_name: dict[str, FailingPartitions] = {}
    for number, constraint in enumerate(constraints):
        groups = [(row[_BUCKETS], int(row[_ROWS])) for row in group_rows if row["part"] == number]
        if listing := _list_partitions(groups, dimensions, partitions.definition):
            partitions_by_name[constraint.name] = listing
    return partitions_by_name


def _partition_dimensions(partitions: RowPartitions) -> list[_PartitionDimension]:
    definition, columns = partitions.definition, partitions.columns_by_dimension
    if isinstance(definition, MultiPartitionsDefinition):
        return [
            _PartitionDimension(dimension.name, columns[dimension.name], dimension.partitions_def)
            for dimension in definition.partitions_defs
            if dimension.name in columns
        ]
    return [_PartitionDimension("", column, definition) for column in columns.values()]


def _bucket_column(rows: DataFrame, dimension: _PartitionDimension) -> Column:
    """Which value or interval of the partition column a row has, as text; null if the column is null."""
    column, data_type = quote_column(dimension.column), rows.schema[dimension.column].dataType
    if not isinstance(data_type, pst.TimestampType | pst.TimestampNTZType):
        return column.cast("string")
    is_local = isinstance(data_type, pst.TimestampNTZType)  # the wall clock of UTC
    epoch = F.expr("TIMESTAMP_NTZ '1970-01-01'" if is_local else "TIMESTAMP '1970-01-01T00:00:00Z'")
    seconds = _interval_s(dimension.definition)
    intervals = F.timestamp_diff("MICROSECOND", epoch, column) / F.lit(seconds * 1_000_000)
    return (F.floor(intervals) * F.lit(seconds)).cast("bigint").cast("string")


def _interval_s(definition: PartitionsDefinition[str]) -> int:
    """Seconds of an interval that lies in one window: zones differ from UTC by quarters of an hour."""
    if not isinstance(definition, TimeWindowPartitionsDefinition):
        return _MINUTE_S
    minutes: list[Any] = croniter.expand(definition.cron_schedule)[0][0]
    regular = all(minute != "*" and int(minute) % 15 == 0 for minute in minutes)
    return _QUARTER_S if regular else _MINUTE_S


def _count_by_buckets(
    rows: DataFrame, bucketed_rows: DataFrame, constraint: RowConstraint | UniqueConstraint
) -> DataFrame:
    """Rows `(place, rows)`: how many rows of a place fail, the largest first."""
    if isinstance(constraint, RowConstraint):
        bucket_counts = (
            bucketed_rows.where(failure_flag(rows, constraint) == 1)
            .groupBy(_BUCKETS)
            .agg(F.count(F.lit(1)).alias(_ROWS))
        )
    else:
        key = [quote_column(column) for column in constraint.columns]
        by_key = bucketed_rows.groupBy(*key, _BUCKETS).agg(F.count(F.lit(1)).alias(_ROWS))
        of_key = F.sum(_ROWS).over(Window.partitionBy(*key))
        repeated_keys = by_key.withColumn("branchlake_of_key", of_key).where(F.col("branchlake_of_key") > 1)
        bucket_counts = repeated_keys.groupBy(_BUCKETS).agg(F.sum(_ROWS).alias(_ROWS))
    return bucket_counts.orderBy(F.col(_ROWS).desc(), F.col(_BUCKETS)).limit(MAX_GROUPS)


def _list_partitions(
    groups: Sequence[tuple[Sequence[str | None], int]],
    dimensions: Sequence[_PartitionDimension],
    definition: PartitionsDefinition[str],
) -> FailingPartitions | None:
    rows: Counter[str] = Counter()
    for buckets, count in groups:
        key = _find_partition_key(buckets, dimensions, definition)
        if key is not None:
            rows[key] += count
    largest_first = sorted(rows.items(), key=lambda entry: (-entry[1], entry[0]))
    if not largest_first:
        return None
    return FailingPartitions(
        dict(largest_first[:MAX_LISTED]), max(0, len(largest_first) - MAX_LISTED), len(groups) == MAX_GROUPS
    )


def _find_partition_key(
    buckets: Sequence[str | None],
    dimensions: Sequence[_PartitionDimension],
    definition: PartitionsDefinition[str],
) -> str | None:
    """The partition of a place; None if a column is null, before the first window, or no time at all."""
    keys: dict[str, str] = {}
    for value, dimension in zip(buckets, dimensions, strict=True):
        key = value if value is None else _find_dimension_key(value, dimension.definition)
        if key is None:
            return None
        keys[dimension.name] = key
    if isinstance(definition, MultiPartitionsDefinition):
        return str(MultiPartitionKey(keys)) if len(keys) == len(definition.partitions_defs) else None
    return keys[""]


def _find_dimension_key(value: str, definition: PartitionsDefinition[str]) -> str | None:
    if not isinstance(definition, TimeWindowPartitionsDefinition):
        return value
    try:
        timestamp = _to_timestamp(value, definition.timezone)
    except ValueError:
        return None  # a column of another type, in a table that another writer made
    if timestamp < definition.start.timestamp():
        return None
    return definition.get_partition_key_for_timestamp(timestamp)


def _to_timestamp(value: str, timezone: str) -> float:
    """A POSIX time stamp of an interval's begin, or of a date's noon: windows of dates are whole days."""
    if value.lstrip("-").isdigit():
        return float(value)
    return datetime.fromisoformat(value).replace(hour=_NOON, tzinfo=ZoneInfo(timezone)).timestamp()
