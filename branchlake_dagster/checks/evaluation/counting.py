"""How many rows fail, for all constraints and SQL checks of an asset in one Spark job.

Counting alone reads the columns that are judged, once, and makes a plan of a third of the time that
one with examples takes (ADR 23). Examples are fetched afterwards, for what failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.constraints.compiler import quoted
from branchlake_dagster.checks.constraints.model import RowConstraint, SqlConstraint, UniqueConstraint
from branchlake_dagster.checks.evaluation.returned import query_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

Collect = Callable[["DataFrame"], "list[Row]"]
Countable = RowConstraint | UniqueConstraint | SqlConstraint

_ADAPTIVE = "spark.sql.adaptive.enabled"
_COUNT = "branchlake_count"


@dataclass(frozen=True)
class Count:
    """Rows that fail; `total` is None where the rows judged are not those of the frame."""

    failing: int
    total: int | None


def collect_rows(frame: DataFrame) -> list[Row]:
    """Fetch `frame` as one Spark job: the only place where an evaluation makes Spark work.

    Adaptive execution is off meanwhile. It would submit each shuffle of the query as a job of its own
    (counted: 3 jobs, more with a uniqueness constraint, instead of 1) to replan what ends in a few rows.
    """
    conf = frame.sparkSession.conf
    before = conf.get(_ADAPTIVE) or "true"
    conf.set(_ADAPTIVE, "false")
    try:
        return frame.collect()
    finally:
        conf.set(_ADAPTIVE, before)


def count(
    rows: DataFrame, constraints: Sequence[Countable], *, view: str, collect: Collect = collect_rows
) -> dict[str, Count]:
    """The counts of each of `constraints` by name, with exactly one call of `collect`.

    All columns of the constraints must exist in `rows`, and `view` must be what SQL checks call `{this}`.
    """
    rules = [one for one in constraints if isinstance(one, RowConstraint)]
    parts = [_rules(rows, rules)] if rules else []
    others = [one for one in constraints if not isinstance(one, RowConstraint)]
    for number, one in enumerate(others, start=1):
        counted = _repeated(rows, one) if isinstance(one, UniqueConstraint) else _returned(rows, one, view)
        parts.append(_part(counted, number))
    query = parts[0]
    for part in parts[1:]:
        query = query.unionByName(part)
    found = {row["part"]: row for row in collect(query)}
    counts: dict[str, Count] = {}
    for index, rule in enumerate(rules):
        counts[rule.name] = Count(int(found[0]["failing"][index]), int(found[0]["total"]))
    for number, one in enumerate(others, start=1):
        total = found[number]["total"]
        counts[one.name] = Count(int(found[number]["failing"][0]), None if total is None else int(total))
    return counts


def fails(rows: DataFrame, rule: RowConstraint) -> Column:
    """1 for a row that breaks `rule`, else 0."""
    # A null condition is not a failure: ~null is null, and null counts as satisfied. Through `bit_count`,
    # which Spark offers to no data source: its translation of some conditions for them fails with an
    # internal error (4.1: a float column against 0.1, a time stamp in an empty range).
    return F.bit_count(F.coalesce(~rule.holds(rows), F.lit(False)))


def _rules(rows: DataFrame, rules: Sequence[RowConstraint]) -> DataFrame:
    return rows.agg(
        F.lit(0).alias("part"),
        F.count(F.lit(1)).alias("total"),
        F.array(*[F.coalesce(F.sum(fails(rows, rule)), F.lit(0)) for rule in rules])
        .cast("array<bigint>")
        .alias("failing"),
    )


def _repeated(rows: DataFrame, key: UniqueConstraint) -> DataFrame:
    groups = rows.groupBy(*[quoted(column) for column in key.columns]).agg(F.count(F.lit(1)).alias(_COUNT))
    size = F.col(_COUNT)
    return groups.agg(
        F.coalesce(F.sum(size), F.lit(0)).alias("total"),
        F.coalesce(F.sum(F.when(size > 1, size)), F.lit(0)).alias("failing"),
    )


def _returned(rows: DataFrame, check: SqlConstraint, view: str) -> DataFrame:
    frame = rows.sparkSession.sql(f"SELECT count(*) AS failing {query_of(check, view)}")
    return frame.select(F.lit(None).cast("bigint").alias("total"), "failing")


def _part(counted: DataFrame, number: int) -> DataFrame:
    return counted.select(
        F.lit(number).alias("part"), "total", F.array("failing").cast("array<bigint>").alias("failing")
    )
