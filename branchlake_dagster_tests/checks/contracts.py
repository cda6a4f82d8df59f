"""One contract with a promise of every kind, and random rows that keep or break each of them."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pandera.pyspark as pa
import pyspark.sql.types as pst
from pandera.pyspark import DataFrameModel, Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from branchlake_dagster.checks import row_predicate

DDL = "n bigint, x double, s string, day date, at timestamp, ok boolean, code int"


class EveryKind(DataFrameModel):
    n: pst.LongType = Field(ge=1, lt=40, notin=[13])
    x: pst.DoubleType = Field(
        in_range={"min_value": 0, "max_value": 360, "include_max": False}, nullable=True
    )
    s: pst.StringType = Field(
        nullable=True,
        isin=["ab", "abc", "b"],
        str_matches="a|b",
        str_contains="b",
        str_startswith="a",
        str_endswith="b",
        str_length={"min_value": 2, "max_value": 3},
    )
    day: pst.DateType = Field(nullable=True)
    at: pst.TimestampType = Field(nullable=True)
    ok: pst.BooleanType = Field(nullable=True, eq=True)
    code: pst.IntegerType = Field(gt=0, le=9, ne=5, raise_warning=True)

    @pa.check("n")
    @classmethod
    def mostly_even(cls, rows: DataFrame) -> bool:
        return rows.filter(F.col("n") % 2 == 1).count() <= 3

    @pa.check("n")
    @classmethod
    @row_predicate
    def below_code(cls, rows: DataFrame) -> Any:
        return F.col("n") <= F.col("code") * 10

    @pa.dataframe_check
    @classmethod
    @row_predicate
    def day_is_days_start(cls, rows: DataFrame) -> Any:
        return F.col("at") >= F.col("day").cast("timestamp")

    @pa.dataframe_check
    @classmethod
    def not_empty(cls, rows: DataFrame) -> bool:
        return not rows.isEmpty()

    class Config:
        unique = ["n", "s"]  # noqa: RUF012 - pandera's way
        strict = True


PANDERA_NAMES = {
    "greater_than_or_equal_to": "ge",
    "less_than_or_equal_to": "le",
    "greater_than": "gt",
    "less_than": "lt",
    "equal_to": "eq",
    "not_equal_to": "ne",
}


def random_rows(seed: int, size: int) -> list[tuple[Any, ...]]:
    """Rows for `DDL`; the seed decides which promises are broken at all, and how often."""
    # A string seed: small integers give first draws that resemble each other.
    rng = random.Random(f"rows {seed}")
    spoil = {column: rng.choice([0.0, 0.3, 0.3]) for column in "nxsdc"}

    def pick(column: str, good: list[Any], bad: list[Any]) -> Any:
        return rng.choice(bad if rng.random() < spoil[column] else good)

    day = dt.date(2026, 8, 8)
    noon = dt.datetime(2026, 8, 8, 12, tzinfo=dt.UTC)
    return [
        (
            pick("n", list(range(2, 12, 2)), [0, -1, 13, 13, 41, 43, None]),
            pick("x", [0.0, 1.5, 359.9, None], [360.0, -1.0, float("nan"), float("inf")]),
            pick("s", ["ab", None], ["b", "abc", "", "xab", "abcd"]),
            day,
            pick("d", [noon, None], [noon - dt.timedelta(days=2)]),
            pick("d", [True, None], [False]),
            pick("c", [2, 4, 9], [0, 5, 10, -3, None]),
        )
        for _ in range(size)
    ]
