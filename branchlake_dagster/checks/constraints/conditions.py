"""pandera's built-in checks as Spark conditions.

Each builder answers with the condition a good value satisfies, in the semantics of pandera's PySpark
backend (pandera 0.35, `pandera.backends.pyspark.builtin_checks`): a null value satisfies every one, NaN
compares as Spark compares it (equal to itself, greater than any number), `str_matches` anchors at the
start and `str_contains` does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pyspark.sql.types as pst
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.constraints.model import ContractError
from branchlake_dagster.checks.constraints.promises import (
    Among,
    Both,
    Compared,
    EndsWith,
    Length,
    NotAmong,
    Promise,
    Sign,
    StartsWith,
)

_ORDERED = (pst.NumericType, pst.DateType, pst.TimestampType, pst.TimestampNTZType)
_LISTED = (*_ORDERED, pst.StringType, pst.BinaryType)
_EQUAL = (*_LISTED, pst.BooleanType)
_TEXT = (pst.StringType,)

Arguments = Mapping[str, Any]
Condition = Callable[[Column], Column]
Built = tuple[str, Condition, Promise | None]
"""The text, the Spark condition, and what it promises where that has a form of its own."""


def _in_range(args: Arguments) -> Built:
    low, high = args["min_value"], args["max_value"]
    include_low, include_high = args.get("include_min", True), args.get("include_max", True)

    def condition(value: Column) -> Column:
        above: Column = value >= low if include_low else value > low
        below: Column = value <= high if include_high else value < high
        return above & below

    text = f"in {'[' if include_low else '('}{low}, {high}{']' if include_high else ')'}"
    ends = Compared(">=" if include_low else ">", low), Compared("<=" if include_high else "<", high)
    return text, condition, Both(*ends)


def _members(values: Any) -> list[Any]:
    # pandera keeps a frozenset; sorted, the text and the query plan are the same in every process.
    return sorted(values, key=lambda value: (type(value).__name__, str(value)))


def _isin(args: Arguments) -> Built:
    allowed = _members(args["allowed_values"])
    return f"in {allowed}", lambda value: value.isin(allowed), Among(tuple(allowed))


def _notin(args: Arguments) -> Built:
    forbidden = _members(args["forbidden_values"])
    return f"not in {forbidden}", lambda value: ~value.isin(forbidden), NotAmong(tuple(forbidden))


def _pattern(args: Arguments) -> str:
    pattern = args["pattern"]
    return pattern.pattern if isinstance(pattern, re.Pattern) else str(pattern)


def _str_matches(args: Arguments) -> Built:
    pattern = _pattern(args)
    anchored = pattern if pattern.startswith("^") else f"^{pattern}"
    return f"matches {anchored!r}", lambda value: value.rlike(anchored), None


def _str_contains(args: Arguments) -> Built:
    pattern = _pattern(args)
    return f"contains {pattern!r}", lambda value: value.rlike(pattern), None


def _str_length(args: Arguments) -> Built:
    exact: int | None = args.get("exact_value")
    low: int | None = args.get("min_value")
    high: int | None = args.get("max_value")
    if exact is not None:
        return f"has length {exact}", lambda value: F.length(value) == exact, Length(exact, exact)
    if low is not None and high is not None:
        return (
            f"has length {low} to {high}",
            lambda value: F.length(value).between(low, high),
            Length(low, high),
        )
    if low is not None:
        return f"has length at least {low}", lambda value: F.length(value) >= low, Length(low, None)
    if high is not None:
        return f"has length at most {high}", lambda value: F.length(value) <= high, Length(None, high)
    raise ContractError("str_length needs min_value, max_value or exact_value.")


def _compare(
    sign: Sign, argument: str, condition: Callable[[Column, Any], Column]
) -> Callable[[Arguments], Built]:
    def build(args: Arguments) -> Built:
        bound = args[argument]
        return f"{sign} {bound}", lambda value: condition(value, bound), Compared(sign, bound)

    return build


def _str_startswith(args: Arguments) -> Built:
    prefix = args["string"]
    return f"starts with {prefix}", lambda value: value.startswith(prefix), StartsWith(prefix)


def _str_endswith(args: Arguments) -> Built:
    suffix = args["string"]
    return f"ends with {suffix}", lambda value: value.endswith(suffix), EndsWith(suffix)


_BUILDERS: dict[str, tuple[str, tuple[type[pst.DataType], ...], Callable[[Arguments], Built]]] = {
    "equal_to": ("eq", _EQUAL, _compare("=", "value", lambda value, bound: value == bound)),
    "not_equal_to": ("ne", _EQUAL, _compare("!=", "value", lambda value, bound: value != bound)),
    "greater_than": ("gt", _ORDERED, _compare(">", "min_value", lambda value, bound: value > bound)),
    "greater_than_or_equal_to": (
        "ge",
        _ORDERED,
        _compare(">=", "min_value", lambda value, bound: value >= bound),
    ),
    "less_than": ("lt", _ORDERED, _compare("<", "max_value", lambda value, bound: value < bound)),
    "less_than_or_equal_to": (
        "le",
        _ORDERED,
        _compare("<=", "max_value", lambda value, bound: value <= bound),
    ),
    "in_range": ("in_range", _ORDERED, _in_range),
    "isin": ("isin", _LISTED, _isin),
    "notin": ("notin", _LISTED, _notin),
    "str_matches": ("str_matches", _TEXT, _str_matches),
    "str_contains": ("str_contains", _TEXT, _str_contains),
    "str_startswith": ("str_startswith", _TEXT, _str_startswith),
    "str_endswith": ("str_endswith", _TEXT, _str_endswith),
    "str_length": ("str_length", _TEXT, _str_length),
}


def builtin_condition(
    check: str, arguments: Arguments, column: str, dtype: pst.DataType | None
) -> tuple[str, Built] | None:
    """Short name, text, condition and promise of pandera's built-in `check` on `column`; None for others.

    `dtype` is the contract's type of the column, None when it names no type. Raises `ContractError` when
    the check means nothing for that type: pandera raises a bare TypeError at run time instead, which
    costs a run to find.
    """
    if check not in _BUILDERS:
        return None
    short, types, build = _BUILDERS[check]
    if dtype is not None and not isinstance(dtype, types):
        raise ContractError(
            f"Check {short} on column {column!r} cannot apply to type {dtype.simpleString()}.",
            hint="Use a check for this type, or write the rule with @row_predicate.",
            reason="check_on_type",
            subject=column,
        )
    text, condition, promise = build(arguments)
    return short, (f"{column} {text}", condition, promise)
