"""Prove constraints from facts on a column, or from rows that were read without Spark.

Each function returns True only if the constraint is proved; False means that only Spark can decide.

A constraint has Spark's meaning: null satisfies all but `NotNull`, NaN is greater than any number, and
both sides of a comparison are cast to a common type. A bound proves nothing if this cast could round or could
depend on the session: a text against a date, a naive timestamp, a float against a decimal.

Rows that were read in this process are compared by the same rules, without Spark and without a query plan.
Patterns, users' own rules and keys with floating point numbers are always left to Spark.
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
from branchlake_dagster.history.manifests import ColumnFacts

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONG = 2**63
_EXACT_UP_TO = {ice.FloatType: 2**24, ice.DoubleType: 2**53}
"""Up to this value the type represents every integer exactly, so no cast rounds."""
_DECIMAL_SCALE = 18
_DECIMAL_DIGITS = 20
"""Spark casts a decimal literal to decimal(38, 18). More digits would be rounded or overflow."""


def can_prove(facts: ColumnFacts, promise: Promise, kind: ice.IcebergType) -> bool:
    """Return whether facts on a file's column prove that all its values satisfy the constraint `promise`.

    `kind` is the type of the column. False means unknown: some value may violate the constraint.
    """
    if isinstance(promise, NotNull):
        return facts.no_null
    if isinstance(promise, Both):
        return _can_prove_comparison(facts, promise.low, kind) and _can_prove_comparison(
            facts, promise.high, kind
        )
    if isinstance(promise, Compared):
        return _can_prove_comparison(facts, promise, kind)
    if isinstance(promise, Among):
        return _can_prove_one_of(facts, promise, kind)
    if isinstance(promise, NotAmong):
        # Spark's result for an empty list depends on a setting.
        return bool(promise.values) and all(
            _can_prove_comparison(facts, Compared("!=", value), kind) for value in promise.values
        )
    if not isinstance(kind, ice.StringType):
        return False
    if isinstance(promise, StartsWith):
        return _can_prove_prefix(facts, promise)
    return _can_prove_constant_text(facts, promise)


def _can_prove_comparison(facts: ColumnFacts, promise: Compared, kind: ice.IcebergType) -> bool:
    bound = _find_limit(promise.bound, kind)
    if bound is None:
        return False
    if facts.all_null:
        return True
    limit, convert = bound
    low = None if facts.low is None else convert(facts.low)
    high = None if facts.high is None else convert(facts.high)
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


def _can_prove_one_of(facts: ColumnFacts, promise: Among, kind: ice.IcebergType) -> bool:
    values = promise.values
    # Spark casts a list to one type. Lists of several types are left to Spark.
    if not values or len({type(value) for value in values}) > 1:
        return False
    if any(_find_limit(value, kind) is None for value in values):
        return False
    if facts.all_null:
        return True
    # In a long list Spark distinguishes 0.0 and -0.0.
    if isinstance(facts.low, float) and facts.low == 0.0:
        return False
    return any(_can_prove_comparison(facts, Compared("=", value), kind) for value in values)


def _can_prove_prefix(facts: ColumnFacts, promise: StartsWith) -> bool:
    """Return whether both bounds start with the prefix.

    Texts with the same prefix are contiguous in sorted order, so all values between the bounds have it, too.
    """
    if facts.all_null:
        return True
    ends = (facts.low, facts.high)
    return all(isinstance(end, str) and end.startswith(promise.prefix) for end in ends)


def _can_prove_constant_text(facts: ColumnFacts, promise: EndsWith | Length) -> bool:
    """Return whether facts on a text column prove its length or suffix.

    That is only possible if all values are null, or if all values are equal, so that `facts.low` and
    `facts.high` are the same text. False means unknown.
    """
    if facts.all_null:
        return True
    if facts.low is None or facts.low != facts.high:
        return False
    if isinstance(promise, EndsWith):
        return str(facts.low).endswith(promise.suffix)
    size = len(facts.low)
    return (promise.low is None or size >= promise.low) and (promise.high is None or size <= promise.high)


Limit = tuple[Any, Callable[[Any], Any]]
"""A converted value of a contract, and a function that converts a bound of the column to the same type.

The conversion keeps the order of the bounds.
"""


def _find_limit(value: Any, kind: ice.IcebergType) -> Limit | None:
    """Return `value` as a `Limit` for comparisons with bounds of a column of type `kind`.

    None if the comparison must be left to Spark, because the cast could round or depend on the session.
    """
    build_limit = _LIMIT_BUILDERS.get(type(kind))
    return None if build_limit is None else build_limit(value, kind)


def _unchanged_value(value: Any) -> Any:
    return value


def _integer_limit(value: Any, _: Any) -> Limit | None:
    if type(value) is int and -_LONG <= value < _LONG:
        return value, _unchanged_value
    # Spark casts the column to double here, which rounds but keeps the order.
    return (value, float) if type(value) is float and not math.isnan(value) else None


def _float_limit(value: Any, kind: ice.IcebergType) -> Limit | None:
    if type(value) is int and abs(value) <= _EXACT_UP_TO[type(kind)]:  # type: ignore[index]
        return float(value), _unchanged_value
    return (value, _unchanged_value) if type(value) is float and not math.isnan(value) else None


def _decimal_limit(value: Any, kind: ice.IcebergType) -> Limit | None:
    assert isinstance(kind, ice.DecimalType)  # noqa: S101 - only called for decimals
    if kind.scale > _DECIMAL_SCALE or kind.precision - kind.scale > _DECIMAL_DIGITS:
        return None
    if type(value) is int and -_LONG <= value < _LONG:
        return Decimal(value), _unchanged_value
    if type(value) is not Decimal or not value.is_finite():
        return None
    exponent = value.as_tuple().exponent
    exact = isinstance(exponent, int) and exponent >= -_DECIMAL_SCALE and value.adjusted() < _DECIMAL_DIGITS
    return (value, _unchanged_value) if exact else None


def _boolean_limit(value: Any, _: Any) -> Limit | None:
    return (value, _unchanged_value) if type(value) is bool else None


def _text_limit(value: Any, _: Any) -> Limit | None:
    # Python orders text by code points, which is the order of its bytes in UTF-8.
    return (value, _unchanged_value) if type(value) is str else None


def _date_limit(value: Any, _: Any) -> Limit | None:
    return ((value - _EPOCH.date()).days, _unchanged_value) if type(value) is date else None


def _instant_limit(value: Any, _: Any) -> Limit | None:
    if type(value) is not datetime or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1), _unchanged_value


_LIMIT_BUILDERS: dict[type[ice.IcebergType], Callable[[Any, Any], Limit | None]] = {
    ice.BooleanType: _boolean_limit,
    ice.IntegerType: _integer_limit,
    ice.LongType: _integer_limit,
    ice.FloatType: _float_limit,
    ice.DoubleType: _float_limit,
    ice.DecimalType: _decimal_limit,
    ice.StringType: _text_limit,
    ice.DateType: _date_limit,
    ice.TimestamptzType: _instant_limit,
}


MAX_VALUES = 1_000
"""The largest number of distinct values that are compared one by one. Above it, Spark compares them."""

_AS_NUMBERS: dict[type[ice.IcebergType], pa.DataType] = {
    ice.DateType: pa.int32(),
    ice.TimestamptzType: pa.int64(),
}
_KEY_TYPES = (
    ice.BooleanType,
    ice.IntegerType,
    ice.LongType,
    ice.DateType,
    ice.TimestamptzType,
    ice.TimestampType,
    ice.StringType,
    ice.DecimalType,
)
"""Types whose values are equal exactly if their bytes are, in Arrow and in Spark. Floating point types are
omitted because of 0.0, -0.0 and NaN."""


def values_keep_promise(values: pa.ChunkedArray, promise: Promise, kind: ice.IcebergType) -> bool:
    """Return whether all values satisfy the constraint `promise`. False also if only Spark can decide.

    `kind` is the column's Iceberg type. A comparison with a list, or by `!=`, is left to Spark if the column
    has more than `MAX_VALUES` distinct values.
    """
    if isinstance(promise, EndsWith | Length):
        return isinstance(kind, ice.StringType) and _texts_keep_promise(values, promise)
    is_value_by_value = isinstance(promise, Among | NotAmong) or (
        isinstance(promise, Compared) and promise.sign == "!="
    )
    if not is_value_by_value:
        return can_prove(_compute_facts(values, kind), promise, kind)
    distinct_values = pc.unique(values)
    if len(distinct_values) > MAX_VALUES:
        return False
    return all(
        can_prove(_compute_facts(pa.chunked_array([distinct_values[index : index + 1]]), kind), promise, kind)
        for index in range(len(distinct_values))
    )


def has_unique_keys(rows: pa.Table, columns: Sequence[str], kinds: Sequence[ice.IcebergType]) -> bool:
    """Return whether no two rows have the same values in `columns`. Null equals null.

    False also if only Spark can decide, because a column has a floating point or nested type.
    """
    if not all(isinstance(kind, _KEY_TYPES) for kind in kinds):
        return False
    return bool(rows.group_by(list(columns)).aggregate([]).num_rows == rows.num_rows)


def _compute_facts(values: pa.ChunkedArray, kind: ice.IcebergType) -> ColumnFacts:
    """Compute exact facts on the values of a column, whose Iceberg type is `kind`.

    The bounds `low` and `high` are None if all values are null or NaN, or if the type has no order.
    """
    null_count = values.null_count
    present_values = values.drop_null()
    nan_count = 0
    if pa.types.is_floating(values.type):
        nan_marks = pc.is_nan(present_values)
        nan_count = pc.sum(nan_marks).as_py() or 0
        present_values = present_values.filter(pc.invert(nan_marks))
    low, high = _find_bounds(present_values, kind) if len(present_values) else (None, None)
    return ColumnFacts(
        no_null=null_count == 0, all_null=null_count == len(values), no_nan=nan_count == 0, low=low, high=high
    )


def _find_bounds(present_values: pa.ChunkedArray, kind: ice.IcebergType) -> tuple[Any, Any]:
    number_type = _AS_NUMBERS.get(type(kind))
    if number_type is not None:
        if pa.types.is_timestamp(present_values.type) and present_values.type.unit != "us":
            return None, None
        present_values = present_values.cast(number_type)
    try:
        bounds = pc.min_max(present_values).as_py()
    except pa.ArrowNotImplementedError:  # a type without an order; only NotNull applies to it
        return None, None
    return bounds["min"], bounds["max"]


def _texts_keep_promise(values: pa.ChunkedArray, promise: EndsWith | Length) -> bool:
    present_values = values.drop_null()
    if not len(present_values):
        return True
    if isinstance(promise, EndsWith):
        return bool(pc.all(pc.ends_with(present_values, promise.suffix)).as_py())
    # Characters are code points in Arrow and in Spark.
    lengths = pc.min_max(pc.utf8_length(present_values)).as_py()
    return (promise.low is None or lengths["min"] >= promise.low) and (
        promise.high is None or lengths["max"] <= promise.high
    )
