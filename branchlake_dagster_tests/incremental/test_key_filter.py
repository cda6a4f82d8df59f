"""The filter by which files without changed keys are skipped."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.expressions import AlwaysFalse, IsNaN, IsNull
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, NestedField

from branchlake_dagster.incremental.inputs import key_prefilter

SCHEMA = Schema(NestedField(1, "k", DoubleType()))


@pytest.mark.parametrize(
    "keys",
    [
        [math.nan],
        [math.nan, 1.5],
        [None, math.nan],
        [math.nan, None, 1.5],
        [math.nan, *map(float, range(2_000))],
    ],
    ids=["NaN", "NaN and a number", "NaN and null", "all three", "many"],
)
def test_keys_may_be_nan(keys: list[Any]) -> None:
    condition = key_prefilter(pa.table({"k": pa.array(keys, pa.float64(), from_pandas=False)}))
    assert ("IsNaN" in repr(condition), "IsNull" in repr(condition)) == (True, None in keys)
    rows = pa.table({"k": pa.array([*keys[:3], -7.0], pa.float64(), from_pandas=False)})
    found = rows.filter(expression_to_pyarrow(bind(SCHEMA, condition, case_sensitive=True)))
    assert found.num_rows == rows.num_rows - 1


def test_numbers_alone_need_no_test_for_nan() -> None:
    condition = repr(key_prefilter(pa.table({"k": [1.5, 2.5]})))
    assert not {IsNaN.__name__, IsNull.__name__} & {name for name in ("IsNaN", "IsNull") if name in condition}
    assert key_prefilter(pa.table({"k": pa.array([], pa.float64())})) == AlwaysFalse()
