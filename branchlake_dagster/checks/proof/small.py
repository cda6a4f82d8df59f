"""Promises held against rows that are read in this process, where they are few: no Spark, no query plan.

It answers as Spark would or not at all: comparisons keep to what `prove` knows to be the same in both, and
what is left (patterns, rules of one's own, keys with floating point numbers) is Spark's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as ice

from branchlake_dagster.changes.facts import Facts
from branchlake_dagster.checks.constraints.promises import (
    Among,
    Compared,
    EndsWith,
    Length,
    NotAmong,
    Promise,
)
from branchlake_dagster.checks.proof.prove import proves

MOST_VALUES = 1_000
"""Of more different values Spark decides whether they are in a list."""

_AS_NUMBERS: dict[type[ice.IcebergType], pa.DataType] = {
    ice.DateType: pa.int32(),
    ice.TimestamptzType: pa.int64(),
}
_KEYS = (
    ice.BooleanType,
    ice.IntegerType,
    ice.LongType,
    ice.DateType,
    ice.TimestamptzType,
    ice.TimestampType,
    ice.StringType,
    ice.DecimalType,
)
"""Types whose equal values are those with equal bytes, in both engines: not so 0.0, -0.0 and NaN."""


def keeps(values: pa.ChunkedArray, promise: Promise, kind: ice.IcebergType) -> bool:
    """Whether all of a column's values keep the promise; False where that is Spark's to say."""
    if isinstance(promise, EndsWith | Length):
        return isinstance(kind, ice.StringType) and _text_keeps(values, promise)
    one_by_one = isinstance(promise, Among | NotAmong) or (
        isinstance(promise, Compared) and promise.sign == "!="
    )
    if not one_by_one:
        return proves(_facts(values, kind), promise, kind)
    different = pc.unique(values)
    if len(different) > MOST_VALUES:
        return False
    return all(
        proves(_facts(pa.chunked_array([different[index : index + 1]]), kind), promise, kind)
        for index in range(len(different))
    )


def unique(rows: pa.Table, columns: Sequence[str], kinds: Sequence[ice.IcebergType]) -> bool:
    """Whether no two rows agree on `columns`, nulls being equal; False where that is Spark's to say."""
    if not all(isinstance(kind, _KEYS) for kind in kinds):
        return False
    return bool(rows.group_by(list(columns)).aggregate([]).num_rows == rows.num_rows)


def _facts(values: pa.ChunkedArray, kind: ice.IcebergType) -> Facts:
    """Exact facts on the values; those that are no numbers or texts to compare have no bounds."""
    nulls = values.null_count
    present = values.drop_null()
    nan = 0
    if pa.types.is_floating(values.type):
        marks = pc.is_nan(present)
        nan = pc.sum(marks).as_py() or 0
        present = present.filter(pc.invert(marks))
    low, high = _ends(present, kind) if len(present) else (None, None)
    return Facts(no_null=nulls == 0, all_null=nulls == len(values), no_nan=nan == 0, low=low, high=high)


def _ends(present: pa.ChunkedArray, kind: ice.IcebergType) -> tuple[Any, Any]:
    numbers = _AS_NUMBERS.get(type(kind))
    if numbers is not None:
        if pa.types.is_timestamp(present.type) and present.type.unit != "us":
            return None, None
        present = present.cast(numbers)
    try:
        ends = pc.min_max(present).as_py()
    except pa.ArrowNotImplementedError:  # of a type that nothing is promised about but to be there
        return None, None
    return ends["min"], ends["max"]


def _text_keeps(values: pa.ChunkedArray, promise: EndsWith | Length) -> bool:
    present = values.drop_null()
    if not len(present):
        return True
    if isinstance(promise, EndsWith):
        return bool(pc.all(pc.ends_with(present, promise.suffix)).as_py())
    # Characters are code points in both.
    ends = pc.min_max(pc.utf8_length(present)).as_py()
    return (promise.low is None or ends["min"] >= promise.low) and (
        promise.high is None or ends["max"] <= promise.high
    )
