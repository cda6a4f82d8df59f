"""Count failing rows in one Spark job, and load examples and partitions of failing rows.

Counting: one Spark job counts the failing rows of all constraints and SQL checks of an asset. It reads only
the columns of the constraints, once. A query without examples is planned in a third of the time (ADR 23), so
examples are loaded afterwards, for failed constraints only.

Examples: one Spark job with two branches under a `UNION ALL`. An aggregation finds one failing row for each
constraint, and a sample of failing rows is cut off by `LIMIT`. Each uniqueness constraint adds a grouping.
Memory is bounded: the aggregation holds one row per constraint, the sample `examples` rows per constraint.
The obvious alternatives are worse (1,000,000 rows, 20 constraints, 2 cores, 2026-11-21): `collect_list`
keeps every failing row of a bad table in memory, `max_by(x, y, k)` does not exist in Spark 4.1, and five
minima per constraint took 11-14 s instead of 3-5 s when all rows failed.

Partitions: after a failure, if a check reads several partitions, one Spark job counts the failing rows by
the partition columns. Timestamps are counted by minutes or quarters of an hour, because every partition
window starts at one. Python then finds the partition of each. Memory is bounded by `MAX_GROUPS`.
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
"""The placeholder for the checked rows in the text of a SQL check."""


def failures_from_clause(check: SqlConstraint, view: str) -> str:
    """Return the FROM clause of a query for the rows that a SQL check returns.

    `view` is the name of the view of the checked rows, which replaces `{this}`. The text becomes a subquery,
    so it can only be a query: Spark's grammar allows no INSERT or DROP there.
    """
    return f"FROM (\n{check.sql.strip().rstrip(';').replace(ROWS_PLACEHOLDER, view)}\n) AS failures"


def select_failures(rows: DataFrame, check: SqlConstraint, view: str) -> DataFrame:
    """Return the rows that the query of `check` returns, as a lazy frame.

    Repeated column names get a number. `view` is the name of the view of the checked rows.
    """
    frame = rows.sparkSession.sql(f"SELECT * {failures_from_clause(check, view)}")
    return frame.toDF(*_number_duplicates(frame.columns))


def _number_duplicates(columns: Sequence[str]) -> list[str]:
    """Return unique column names: the second column `a` becomes `a_2`. `SELECT a.*, b.*` repeats names."""
    names: list[str] = []
    used_names: set[str] = set()
    for column in columns:
        name, count = column, 1
        while name.lower() in used_names:  # Spark ignores the case of names
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
    """The number of failing rows, and the number of checked rows; `total` is None for a SQL check.

    For a uniqueness constraint, all rows with a repeated key fail.
    """

    failing: int
    total: int | None


def collect_rows(frame: DataFrame) -> list[Row]:
    """Collect `frame` in one Spark job. Every counting query runs through this function.

    Adaptive execution is switched off meanwhile. It would submit each shuffle as a separate job (3 jobs
    instead of 1, and more with a uniqueness constraint), only to replan a query that returns a few rows.
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
    """Return the counts of each constraint by name, with exactly one call of `collect`.

    All columns of the constraints must exist in `rows`. `view` must be a view of `rows` if a SQL check uses
    `{this}`.
    """
    rules = [constraint for constraint in constraints if isinstance(constraint, RowConstraint)]
    parts = [_count_rule_failures(rows, rules)] if rules else []
    others = [constraint for constraint in constraints if not isinstance(constraint, RowConstraint)]
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
    """Return a column that is 1 for a row that violates `rule`, else 0. A null condition gives 0."""
    # A null condition counts as satisfied: ~null is null. `bit_count` keeps Spark from pushing the condition
    # down to the data source: Spark 4.1 fails with an internal error when it translates some conditions (a
    # float column against 0.1, a timestamp in an empty range).
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
"""The longest value in an example row, in characters. Longer values are truncated."""

EXAMPLE_COLUMNS = 32
"""The largest number of columns in an example row. Columns of the constraints come first."""

_FLAG = "branchlake_flag_"
_CELLS = "branchlake_cells"
_WEIGHT = "branchlake_weight"

ANY_ROW = RowConstraint(
    name="returned", columns=(), description="", build_condition=lambda _: F.lit(False), needs_types=False
)
"""A constraint that every row violates, to load examples of rows that a SQL check returned."""


def collect_examples(
    rows: DataFrame,
    constraints: Sequence[RowConstraint | UniqueConstraint],
    *,
    examples: int,
    collect: Collect = collect_rows,
) -> dict[str, tuple[Example, ...]]:
    """Return at most `examples` failing rows of each constraint, with exactly one call of `collect`.

    Each failed constraint gets at least one row. An example of a uniqueness constraint is a key with its
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
            *(column for column in shown_columns if column in rule.columns),
            *(column for column in shown_columns if column not in rule.columns),
        ]
        cells = [first_examples[0][index]] if first_examples[0][index] is not None else []
        cells += [row["cells"] for row in result_rows if row["flags"] is not None and row["flags"][index]]
        examples_by_name[rule.name] = tuple(_label_examples(cells, shown_columns, column_order)[:examples])
    for number, key in enumerate(keys, start=1):
        labels = [*key.columns, "rows"]
        cells = [example for example in first_examples[number] if example is not None]
        examples_by_name[key.name] = tuple(_label_examples(cells, labels, labels))
    return examples_by_name


def _example_columns(rows: DataFrame, rules: Sequence[RowConstraint]) -> list[str]:
    rule_columns = dict.fromkeys(column for rule in rules for column in rule.columns)
    # If a frame has two columns of the same name, neither can be addressed, so neither is shown.
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
    """Return a frame with one boolean column per rule, and the printed values of failing rows.

    A flag is True if the row violates the rule. The printed values are null for a row that violates no rule.
    """
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
    """Return a frame of one row, as `_failing_examples` does, with up to `examples` repeated keys.

    These keys are the smallest of each of `examples` hash buckets. So memory is bounded, the result is the
    same every time, and the grouping, which shuffles the key columns, runs once. `part` is the value of the
    column `part`, by which the caller recognizes the constraint.
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
    """Return two frames of `(part, first, flags, cells)`, to be united with those of other constraints.

    The first frame has one row, whose `first` is one failing row per rule. The second is a sample of failing
    rows, with the flags of the rules that each violates. `flagged` has the rows with one flag column for each
    of `rules` rules. The sample has at most `examples` rows per rule.
    """
    flags = [F.col(f"{_FLAG}{index}") for index in range(rules)]
    first = flagged.agg(
        F.lit(0).alias("part"),
        # The smallest failing row: each failed rule has an example, and the same one every time.
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
    """Return distinct rows of `cells` as mappings from label to value, with the labels in `order`.

    Rows may repeat, because the sample may contain the smallest failing row.
    """
    records = [dict(zip(labels, values, strict=True)) for values in dict.fromkeys(map(tuple, cells))]
    return [{name: record[name] for name in order} for record in records]


MAX_LISTED = 5
"""The largest number of failing partitions that a check lists."""
MAX_GROUPS = 10_000
"""The largest number of groups of failing rows that Spark returns for one check."""

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
    """Return the partitions of the failing rows of each constraint by name, with at most one `collect`.

    At most `MAX_LISTED` partitions are listed for each constraint. A constraint is omitted if `rows` do not
    have each partition column once, or if none of its failing rows belongs to a partition.
    """
    dimensions = _partition_dimensions(partitions)
    if not constraints or any(rows.columns.count(dimension.column) != 1 for dimension in dimensions):
        return {}
    buckets = F.array(*[_bucket_column(rows, dimension) for dimension in dimensions])
    bucketed_rows = rows.withColumn(_BUCKETS, buckets)
    parts = [
        _count_by_buckets(rows, bucketed_rows, constraint).select(
            F.lit(number).alias("part"), _BUCKETS, _ROWS
        )
        for number, constraint in enumerate(constraints)
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
    """Return the value of the partition column as text; for a timestamp, the start of its interval.

    The start is in seconds since 1970. The result is null if the column is null.
    """
    column, data_type = quote_column(dimension.column), rows.schema[dimension.column].dataType
    if not isinstance(data_type, pst.TimestampType | pst.TimestampNTZType):
        return column.cast("string")
    is_local = isinstance(data_type, pst.TimestampNTZType)  # a wall clock time in UTC
    epoch = F.expr("TIMESTAMP_NTZ '1970-01-01'" if is_local else "TIMESTAMP '1970-01-01T00:00:00Z'")
    seconds = _interval_s(dimension.definition)
    intervals = F.timestamp_diff("MICROSECOND", epoch, column) / F.lit(seconds * 1_000_000)
    return (F.floor(intervals) * F.lit(seconds)).cast("bigint").cast("string")


def _interval_s(definition: PartitionsDefinition[str]) -> int:
    """Return the length in seconds of intervals that never cross the border of a partition window.

    Time zones differ from UTC by multiples of a quarter of an hour.
    """
    if not isinstance(definition, TimeWindowPartitionsDefinition):
        return _MINUTE_S
    minutes: list[Any] = croniter.expand(definition.cron_schedule)[0][0]
    regular = all(minute != "*" and int(minute) % 15 == 0 for minute in minutes)
    return _QUARTER_S if regular else _MINUTE_S


def _count_by_buckets(
    rows: DataFrame, bucketed_rows: DataFrame, constraint: RowConstraint | UniqueConstraint
) -> DataFrame:
    """Return a frame `(buckets, rows)`: the number of failing rows in each bucket, the largest first.

    It has at most `MAX_GROUPS` rows.
    """
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
    """Return the partition key of a bucket.

    None if a column is null or not a time, or if the time is before the first window.
    """
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
        return None  # the column has another type, in a table that another writer created
    if timestamp < definition.start.timestamp():
        return None
    return definition.get_partition_key_for_timestamp(timestamp)


def _to_timestamp(value: str, timezone: str) -> float:
    """Return the POSIX time in seconds of a bucket of `_bucket_column`, to find its partition window.

    `value` is the start of an interval in seconds since 1970, as text, or a date in ISO format. A date
    becomes its noon in `timezone`, because windows of dates are whole days. Raises ValueError for other text.
    """
    if value.lstrip("-").isdigit():
        return float(value)
    return datetime.fromisoformat(value).replace(hour=_NOON, tzinfo=ZoneInfo(timezone)).timestamp()
