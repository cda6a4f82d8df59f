"""Whether facts on a column, or a few rows that are read here, prove a promise. False means unknown.

Whether facts on a column prove a promise. False means that it is not known.

A promise is meant as Spark evaluates it: null satisfies every one but `NotNull`, NaN is greater than any
number, and both sides are brought to a common type. A bound of a type for which that could round or depend
on the session (a text against a date, a naive time stamp, a float against a decimal) proves nothing.

Promises held against rows that are read in this process, where they are few: no Spark, no query plan.

It answers as Spark would or not at all: comparisons keep to what `prove` knows to be the same in both, and
what is left (patterns, rules of one's own, keys with floating point numbers) is Spark's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as ice

from branchlake_dagster.checks.constraints import (
    Among,
    Both,
    Compared,
    EndsWith,
    Length,
    NotAmong,
    NotNull,
    Promise,
    StartsWith,
)
from branchlake_dagster.history.file_facts import Facts

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONG = 2**63
_EXACT = {ice.FloatType: 2**24, ice.DoubleType: 2**53}
"""Up to here every integer is a number of the type: no rounding, whichever side is cast."""
_DECIMAL_SCALE = 18
_DECIMAL_DIGITS = 20
"""Spark compares with a literal as decimal(38, 18); more digits than these would be rounded or overflow."""


def proves(facts: Facts, promise: Promise, kind: ice.IcebergType) -> bool:
    """Whether every row of a file with these facts, in a column of type `kind`, keeps the promise."""
    if isinstance(promise, NotNull):
        return facts.no_null
    if isinstance(promise, Both):
        return _compared(facts, promise.low, kind) and _compared(facts, promise.high, kind)
    if isinstance(promise, Compared):
        return _compared(facts, promise, kind)
    if isinstance(promise, Among):
        return _among(facts, promise, kind)
    if isinstance(promise, NotAmong):
        # Spark's answer for an empty list depends on a setting.
        return bool(promise.values) and all(
            _compared(facts, Compared("!=", value), kind) for value in promise.values
        )
    if not isinstance(kind, ice.StringType):
        return False
    if isinstance(promise, StartsWith):
        return _starts_with(facts, promise)
    return _constant_text(facts, promise)


def _compared(facts: Facts, promise: Compared, kind: ice.IcebergType) -> bool:
    bound = _comparable(promise.bound, kind)
    if bound is None:
        return False
    if facts.all_null:
        return True
    limit, of = bound
    low = None if facts.low is None else of(facts.low)
    high = None if facts.high is None else of(facts.high)
    if promise.sign == ">=":
        return low is not None and bool(low >= limit)
    if promise.sign == ">":
        return low is not None and bool(low > limit)
    if promise.sign == "<=":
        return facts.no_nan and high is not None and bool(high <= limit)
    if promise.sign == "<":
        return facts.no_nan and high is not None and bool(high < limit)
    if promise.sign == "=":
        return facts.no_nan and low is not None and bool(low == limit == high)
    return (low is not None and bool(limit < low)) or (high is not None and bool(limit > high))


def _among(facts: Facts, promise: Among, kind: ice.IcebergType) -> bool:
    values = promise.values
    # Spark brings a list to one type: values of several are its own affair.
    if not values or len({type(value) for value in values}) > 1:
        return False
    if any(_comparable(value, kind) is None for value in values):
        return False
    if facts.all_null:
        return True
    # In a long list Spark tells 0.0 and -0.0 apart.
    if isinstance(facts.low, float) and facts.low == 0.0:
        return False
    return any(_compared(facts, Compared("=", value), kind) for value in values)


def _starts_with(facts: Facts, promise: StartsWith) -> bool:
    """What begins with a text is an unbroken piece of the order, so both ends tell about all between."""
    if facts.all_null:
        return True
    ends = (facts.low, facts.high)
    return all(isinstance(end, str) and end.startswith(promise.prefix) for end in ends)


def _constant_text(facts: Facts, promise: EndsWith | Length) -> bool:
    """Of the middle of a text nothing is known, unless there is only one."""
    if facts.all_null:
        return True
    if facts.low is None or facts.low != facts.high:
        return False
    if isinstance(promise, EndsWith):
        return str(facts.low).endswith(promise.suffix)
    size = len(facts.low)
    return (promise.low is None or size >= promise.low) and (promise.high is None or size <= promise.high)


Limit = tuple[Any, Callable[[Any], Any]]
"""A contract's value, and how to bring a fact's to the same type. The latter keeps the order."""


def _comparable(value: Any, kind: ice.IcebergType) -> Limit | None:
    """`value` for comparison with facts on a column of type `kind`; None when that is Spark's own affair."""
    found = _COMPARABLE.get(type(kind))
    return None if found is None else found(value, kind)


def _same(value: Any) -> Any:
    return value


def _with_integers(value: Any, _: Any) -> Limit | None:
    if type(value) is int and -_LONG <= value < _LONG:
        return value, _same
    # Spark casts the column to double here: rounded, and in the same order.
    return (value, float) if type(value) is float and not math.isnan(value) else None


def _with_floats(value: Any, kind: ice.IcebergType) -> Limit | None:
    if type(value) is int and abs(value) <= _EXACT[type(kind)]:  # type: ignore[index]
        return float(value), _same
    return (value, _same) if type(value) is float and not math.isnan(value) else None


def _with_decimals(value: Any, kind: ice.IcebergType) -> Limit | None:
    assert isinstance(kind, ice.DecimalType)  # noqa: S101 - the table below
    if kind.scale > _DECIMAL_SCALE or kind.precision - kind.scale > _DECIMAL_DIGITS:
        return None
    if type(value) is int and -_LONG <= value < _LONG:
        return Decimal(value), _same
    if type(value) is not Decimal or not value.is_finite():
        return None
    exponent = value.as_tuple().exponent
    exact = isinstance(exponent, int) and exponent >= -_DECIMAL_SCALE and value.adjusted() < _DECIMAL_DIGITS
    return (value, _same) if exact else None


def _with_booleans(value: Any, _: Any) -> Limit | None:
    return (value, _same) if type(value) is bool else None


def _with_texts(value: Any, _: Any) -> Limit | None:
    # Python orders text by code points, which is the order of its bytes in UTF-8.
    return (value, _same) if type(value) is str else None


def _with_dates(value: Any, _: Any) -> Limit | None:
    return ((value - _EPOCH.date()).days, _same) if type(value) is date else None


def _with_instants(value: Any, _: Any) -> Limit | None:
    if type(value) is not datetime or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1), _same


_COMPARABLE: dict[type[ice.IcebergType], Callable[[Any, Any], Limit | None]] = {
    ice.BooleanType: _with_booleans,
    ice.IntegerType: _with_integers,
    ice.LongType: _with_integers,
    ice.FloatType: _with_floats,
    ice.DoubleType: _with_floats,
    ice.DecimalType: _with_decimals,
    ice.StringType: _with_texts,
    ice.DateType: _with_dates,
    ice.TimestamptzType: _with_instants,
}


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
