"""A few failing rows of each constraint that is known to fail, in one Spark job.

Two one-pass branches under one `UNION ALL`: one failing row per constraint by an aggregation, and a sample
of failing rows cut off by `LIMIT`. Keys that repeat add a grouping to the same query. Memory is bounded
everywhere: the aggregation holds one row per constraint, the sample `examples` rows per constraint.

Why not the obvious forms (1,000,000 rows, 20 constraints, 2 cores, 2026-11-21): `collect_list` keeps every
failing row of a bad table in memory; `max_by(x, y, k)` is not in Spark 4.1; five minima per constraint
instead of one took 11-14 s where this takes 3-5 s, when all rows fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyspark.sql.types as pst
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.constraints.compiler import quoted
from branchlake_dagster.checks.constraints.model import (
    Example,
    RowConstraint,
    UniqueConstraint,
    require_examples,
)
from branchlake_dagster.checks.evaluation.counting import Collect, collect_rows, fails

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

VALUE_CHARS = 80
"""Longest printed value in an example row, in characters; longer ones are cut."""

EXAMPLE_COLUMNS = 32
"""Most columns carried per example row: those the contract speaks of first."""

_FLAG = "branchlake_flag_"
_CELLS = "branchlake_cells"
_WEIGHT = "branchlake_weight"

ANY_ROW = RowConstraint(name="returned", columns=(), text="", holds=lambda _: F.lit(False), typed=False)
"""What every row fails: for rows that are failures already."""


def examples_of(
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
    shown = _example_columns(rows, rules)
    parts = _failing(_flagged(rows, rules, shown), len(rules), examples) if rules else []
    parts += [_repeated(rows, key, examples, part=part) for part, key in enumerate(keys, start=1)]
    query = parts[0]
    for part in parts[1:]:
        query = query.unionByName(part)
    found = collect(query)
    firsts = {row["part"]: row["first"] for row in found if row["first"] is not None}
    shows: dict[str, tuple[Example, ...]] = {}
    for index, rule in enumerate(rules):
        order = [*(c for c in shown if c in rule.columns), *(c for c in shown if c not in rule.columns)]
        cells = [firsts[0][index]] if firsts[0][index] is not None else []
        cells += [row["cells"] for row in found if row["flags"] is not None and row["flags"][index]]
        shows[rule.name] = tuple(_records(cells, shown, order)[:examples])
    for number, key in enumerate(keys, start=1):
        labels = [*key.columns, "rows"]
        cells = [one for one in firsts[number] if one is not None]
        shows[key.name] = tuple(_records(cells, labels, labels))
    return shows


def _example_columns(rows: DataFrame, rules: Sequence[RowConstraint]) -> list[str]:
    spoken = dict.fromkeys(column for rule in rules for column in rule.columns)
    # A frame may have two columns of one name; neither can be addressed, so neither is shown.
    occurs = Counter(name.lower() for name in rows.columns)
    named = [name for name in rows.columns if occurs[name.lower()] == 1]
    return [*spoken, *(name for name in named if name not in spoken)][:EXAMPLE_COLUMNS]


def _printed(column: str, dtype: pst.DataType) -> Column:
    if isinstance(dtype, pst.BinaryType):
        return F.hex(F.substring(quoted(column), 1, VALUE_CHARS // 2))
    return F.left(quoted(column).cast("string"), F.lit(VALUE_CHARS))


def _flagged(rows: DataFrame, rules: Sequence[RowConstraint], shown: Sequence[str]) -> DataFrame:
    """One boolean per rule (True: the row fails it), and the row's printed values if it fails any."""
    flags = [fails(rows, rule) == 1 for rule in rules]
    any_fails = F.lit(False)
    for flag in flags:
        any_fails = any_fails | flag
    schema = rows.schema
    cells = F.array(*[_printed(column, schema[column].dataType) for column in shown])
    return rows.select(
        *[flag.alias(f"{_FLAG}{index}") for index, flag in enumerate(flags)],
        F.when(any_fails, cells.cast("array<string>")).alias(_CELLS),
    )


def _repeated(rows: DataFrame, key: UniqueConstraint, examples: int, *, part: int) -> DataFrame:
    """One row in the form of `_failing`: up to `examples` keys that repeat.

    They are the smallest of each of `examples` hash buckets: bounded, the same every time, and the
    grouping, which costs a shuffle of the key columns, is read once.
    """
    schema = rows.schema
    groups = rows.groupBy(*[quoted(column) for column in key.columns]).agg(F.count(F.lit(1)).alias(_WEIGHT))
    printed = [_printed(column, schema[column].dataType) for column in key.columns]
    keys = groups.where(F.col(_WEIGHT) > 1).select(
        F.array(*printed, F.col(_WEIGHT).cast("string")).alias(_CELLS)
    )
    bucket = F.pmod(F.xxhash64(_CELLS), F.lit(examples))
    return keys.agg(
        F.lit(part).alias("part"),
        F.array(*[F.min(F.when(bucket == index, F.col(_CELLS))) for index in range(examples)]).alias("first"),
        F.lit(None).cast("array<boolean>").alias("flags"),
        F.lit(None).cast("array<string>").alias("cells"),
    )


def _failing(flagged: DataFrame, rules: int, examples: int) -> list[DataFrame]:
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


def _records(
    cells: Sequence[Sequence[str | None]], labels: Sequence[str], order: Sequence[str]
) -> list[Example]:
    """Each of `cells` once, under its labels: the smallest failing row is often in the sample too."""
    records = [dict(zip(labels, values, strict=True)) for values in dict.fromkeys(map(tuple, cells))]
    return [{name: record[name] for name in order} for record in records]
