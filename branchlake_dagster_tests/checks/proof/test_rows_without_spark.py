"""Promises on rows read without Spark: what is answered here, and what is left to Spark."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg import types as ice

from branchlake_dagster.checks.constraints import (
    Among,
    Compared,
    EndsWith,
    Length,
    NotAmong,
    NotNull,
    Promise,
    StartsWith,
)
from branchlake_dagster.checks.proof import MAX_VALUES, has_unique_keys, values_keep_promise

NAN = float("nan")
NOON = dt.datetime(2026, 8, 8, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("values", "kind", "promise", "kept"),
    [
        ([1, None], ice.LongType(), NotNull(), False),
        ([1, None], ice.LongType(), Compared(">=", 1), True),
        ([1, 2], ice.LongType(), Compared("<", 2), False),
        ([1, 3], ice.LongType(), NotAmong((2,)), True),  # between the bounds, and none of them
        ([1, 3], ice.LongType(), Compared("!=", 2), True),
        ([1, 2, 3], ice.LongType(), NotAmong((2,)), False),
        ([1.0, NAN], ice.DoubleType(), Compared(">", 0), True),
        ([1.0, NAN], ice.DoubleType(), Compared("<=", 9), False),
        ([NAN, NAN], ice.DoubleType(), Compared("=", 1.0), False),
        ([NAN, None], ice.DoubleType(), NotNull(), False),
        (["a", "c"], ice.StringType(), Among(("a", "b", "c")), True),
        (["a", "x"], ice.StringType(), Among(("a", "b", "c")), False),
        (["ab", None], ice.StringType(), EndsWith("b"), True),
        (["ab", "ba"], ice.StringType(), EndsWith("b"), False),
        (["\U0001f6f0é", None], ice.StringType(), Length(2, 2), True),
        (["abc", ""], ice.StringType(), Length(None, 2), False),
        (["x" * 99 + "1", "x" * 99 + "2"], ice.StringType(), StartsWith("x" * 99), True),
        ([None, None], ice.StringType(), Length(1, 1), True),
        ([], ice.StringType(), NotNull(), True),
        ([NOON], ice.TimestamptzType(), Compared(">=", NOON), True),
        ([NOON], ice.TimestamptzType(), Compared(">", NOON), False),
        ([NOON], ice.TimestamptzType(), Compared(">=", NOON.replace(tzinfo=None)), False),  # Spark's zone
        ([NOON.date()], ice.DateType(), Compared("=", NOON.date()), True),
        ([Decimal("1.50")], ice.DecimalType(9, 2), Compared("<=", Decimal("1.5")), True),
        ([True, None], ice.BooleanType(), Compared("=", True), True),
    ],
)
def test_values_are_held_against_promises(
    values: list[Any], kind: ice.PrimitiveType, promise: Promise, kept: bool
) -> None:
    types = {ice.TimestamptzType: pa.timestamp("us", tz="UTC"), ice.DecimalType: pa.decimal128(9, 2)}
    types |= {ice.DoubleType: pa.float64(), ice.LongType: pa.int64(), ice.BooleanType: pa.bool_()}
    column = pa.chunked_array([pa.array(values, type=types.get(type(kind), pa.array(values).type))])
    assert values_keep_promise(column, promise, kind) is kept


def test_many_different_values_are_left_to_spark() -> None:
    column = pa.chunked_array([pa.array(range(MAX_VALUES + 1))])
    assert not values_keep_promise(column, NotAmong((-1,)), ice.LongType())
    assert values_keep_promise(column.slice(1), NotAmong((-1,)), ice.LongType())


def test_keys_with_null_are_equal_and_floats_are_left_to_spark() -> None:
    rows = pa.table({"a": [1, 1, None, None], "b": ["x", "y", "x", "x"], "c": [0.5, 1.5, 2.5, 3.5]})
    long, text, double = ice.LongType(), ice.StringType(), ice.DoubleType()
    assert not has_unique_keys(rows, ["a", "b"], [long, text])
    assert has_unique_keys(rows.slice(0, 3), ["a", "b"], [long, text])
    assert not has_unique_keys(rows, ["c"], [double])
