"""Compile a pandera PySpark schema to constraints, and pandera's built-in checks to Spark conditions.

Pure: this module needs no session and reads no rows.

A constraint's name consists of its kind and its columns (`not_null__norad_id`, `in_range__ra_deg`,
`unique__norad_id__epoch`), never of a position. So a new constraint does not rename others, and the history
of each check in Dagster continues.

Each builder of a built-in check returns the condition that a good value satisfies. Its semantics are those of
pandera's PySpark backend (pandera 0.35, `pandera.backends.pyspark.builtin_checks`). A null value satisfies
every condition. NaN compares as in Spark: equal to itself and greater than any number. `str_matches` matches
from the start of the text, `str_contains` anywhere.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyspark.sql.types as pst
from pandera.api.checks import Check
from pandera.api.pyspark.components import Column as ColumnSchema
from pandera.api.pyspark.container import DataFrameSchema
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.constraints import (
    Among,
    Both,
    Compared,
    Constraint,
    ContractError,
    EndsWith,
    Length,
    NotAmong,
    NotNull,
    PanderaConstraint,
    Promise,
    RowConstraint,
    SchemaConstraint,
    Sign,
    StartsWith,
    UniqueConstraint,
    find_predicate,
)
from branchlake_dagster.internals.pandera import get_builtin_check

_ORDERED_TYPES = (pst.NumericType, pst.DateType, pst.TimestampType, pst.TimestampNTZType)
_LISTABLE_TYPES = (*_ORDERED_TYPES, pst.StringType, pst.BinaryType)
_EQUATABLE_TYPES = (*_LISTABLE_TYPES, pst.BooleanType)
_TEXT_TYPES = (pst.StringType,)

Arguments = Mapping[str, Any]
ColumnCondition = Callable[[Column], Column]
BuiltCondition = tuple[str, ColumnCondition, Promise | None]
"""The description, the Spark condition, and the `Promise` that file metadata can prove, or None."""


def _build_in_range(args: Arguments) -> BuiltCondition:
    low, high = args["min_value"], args["max_value"]
    include_low, include_high = args.get("include_min", True), args.get("include_max", True)

    def condition(value: Column) -> Column:
        above_low: Column = value >= low if include_low else value > low
        below_high: Column = value <= high if include_high else value < high
        return above_low & below_high

    description = f"in {'[' if include_low else '('}{low}, {high}{']' if include_high else ')'}"
    ends = Compared(">=" if include_low else ">", low), Compared("<=" if include_high else "<", high)
    return description, condition, Both(*ends)


def _sort_members(values: Any) -> list[Any]:
    # pandera keeps a frozenset. Sorting makes the text and the query plan equal in every process.
    return sorted(values, key=lambda value: (type(value).__name__, str(value)))


def _build_isin(args: Arguments) -> BuiltCondition:
    allowed_values = _sort_members(args["allowed_values"])
    return f"in {allowed_values}", lambda value: value.isin(allowed_values), Among(tuple(allowed_values))


def _build_notin(args: Arguments) -> BuiltCondition:
    forbidden_values = _sort_members(args["forbidden_values"])
    return (
        f"not in {forbidden_values}",
        lambda value: ~value.isin(forbidden_values),
        NotAmong(tuple(forbidden_values)),
    )


def _pattern_source(args: Arguments) -> str:
    pattern = args["pattern"]
    return pattern.pattern if isinstance(pattern, re.Pattern) else str(pattern)


def _build_str_matches(args: Arguments) -> BuiltCondition:
    pattern = _pattern_source(args)
    anchored_pattern = pattern if pattern.startswith("^") else f"^{pattern}"
    return f"matches {anchored_pattern!r}", lambda value: value.rlike(anchored_pattern), None


def _build_str_contains(args: Arguments) -> BuiltCondition:
    pattern = _pattern_source(args)
    return f"contains {pattern!r}", lambda value: value.rlike(pattern), None


def _build_str_length(args: Arguments) -> BuiltCondition:
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


def _comparison_builder(
    sign: Sign, argument: str, condition: Callable[[Column, Any], Column]
) -> Callable[[Arguments], BuiltCondition]:
    def build(args: Arguments) -> BuiltCondition:
        bound = args[argument]
        return f"{sign} {bound}", lambda value: condition(value, bound), Compared(sign, bound)

    return build


def _build_str_startswith(args: Arguments) -> BuiltCondition:
    prefix = args["string"]
    return f"starts with {prefix}", lambda value: value.startswith(prefix), StartsWith(prefix)


def _build_str_endswith(args: Arguments) -> BuiltCondition:
    suffix = args["string"]
    return f"ends with {suffix}", lambda value: value.endswith(suffix), EndsWith(suffix)


_BUILDERS: dict[str, tuple[str, tuple[type[pst.DataType], ...], Callable[[Arguments], BuiltCondition]]] = {
    "equal_to": (
        "eq",
        _EQUATABLE_TYPES,
        _comparison_builder("=", "value", lambda value, bound: value == bound),
    ),
    "not_equal_to": (
        "ne",
        _EQUATABLE_TYPES,
        _comparison_builder("!=", "value", lambda value, bound: value != bound),
    ),
    "greater_than": (
        "gt",
        _ORDERED_TYPES,
        _comparison_builder(">", "min_value", lambda value, bound: value > bound),
    ),
    "greater_than_or_equal_to": (
        "ge",
        _ORDERED_TYPES,
        _comparison_builder(">=", "min_value", lambda value, bound: value >= bound),
    ),
    "less_than": (
        "lt",
        _ORDERED_TYPES,
        _comparison_builder("<", "max_value", lambda value, bound: value < bound),
    ),
    "less_than_or_equal_to": (
        "le",
        _ORDERED_TYPES,
        _comparison_builder("<=", "max_value", lambda value, bound: value <= bound),
    ),
    "in_range": ("in_range", _ORDERED_TYPES, _build_in_range),
    "isin": ("isin", _LISTABLE_TYPES, _build_isin),
    "notin": ("notin", _LISTABLE_TYPES, _build_notin),
    "str_matches": ("str_matches", _TEXT_TYPES, _build_str_matches),
    "str_contains": ("str_contains", _TEXT_TYPES, _build_str_contains),
    "str_startswith": ("str_startswith", _TEXT_TYPES, _build_str_startswith),
    "str_endswith": ("str_endswith", _TEXT_TYPES, _build_str_endswith),
    "str_length": ("str_length", _TEXT_TYPES, _build_str_length),
}


def build_builtin_condition(
    check: str, arguments: Arguments, column: str, dtype: pst.DataType | None
) -> tuple[str, BuiltCondition] | None:
    """Return the short name and the condition of pandera's built-in `check` on `column`; None for others.

    `dtype` is the column's type in the contract, None if the contract names no type. Raises ContractError if
    the check cannot apply to this type. pandera itself would raise a TypeError only in the run.
    """
    if check not in _BUILDERS:
        return None
    short_name, types, build = _BUILDERS[check]
    if dtype is not None and not isinstance(dtype, types):
        raise ContractError(
            f"Check {short_name} on column {column!r} cannot apply to type {dtype.simpleString()}.",
            hint="Use a check for this type, or write the rule with @row_predicate.",
            reason="check_on_type",
            subject=column,
        )
    description, condition, promise = build(arguments)
    return short_name, (f"{column} {description}", condition, promise)


if TYPE_CHECKING:
    from pyspark.sql import Column


def compile_schema(schema: DataFrameSchema) -> tuple[Constraint, ...]:
    """Return all constraints of `schema`: first the one on columns and types, then column by column.

    Uniqueness and checks on whole rows come last. Raises ContractError for a contract that would change rows
    (`coerce`, `strict="filter"`), and for a check that cannot apply to its column's type.
    """
    _refuse_parsing(schema)
    constraints: list[Constraint] = [_schema_constraint(schema)]
    for name, column in schema.columns.items():
        if column.regex:
            constraints.append(_pandera_constraint(f"matching__{name}", column, f"columns matching {name!r}"))
            continue
        if not column.nullable:
            constraints.append(_not_null_constraint(name, optional=not column.required))
        constraints.extend(_column_constraint(schema, name, column, check) for check in column.checks)
    if schema.unique:
        keys = (schema.unique,) if isinstance(schema.unique, str) else tuple(schema.unique)
        constraints.append(
            UniqueConstraint(
                name="unique__" + "__".join(keys),
                columns=keys,
                description=f"no two rows agree on {', '.join(keys)}",
            )
        )
    constraints.extend(_frame_constraint(check) for check in schema.checks)
    return tuple(_with_unique_names(constraints))


def quote_column(column: str) -> Column:
    """Return a Spark column with exactly this name, whatever characters the name contains."""
    return F.col("`" + column.replace("`", "``") + "`")


def _refuse_parsing(schema: DataFrameSchema) -> None:
    coerced_columns = [name for name, column in schema.columns.items() if column.coerce]
    if schema.coerce or coerced_columns:
        column_list = ", ".join(coerced_columns) or "all columns"
        raise ContractError(
            f"Contract {schema.name} coerces {column_list}, but a check cannot change stored rows.",
            hint="Cast the columns in the asset and remove coerce from the contract.",
            reason="coerce",
            subject=column_list,
        )
    if schema.strict == "filter":
        raise ContractError(
            f"Contract {schema.name} filters columns, but a check cannot change stored rows.",
            hint="Drop the columns in the asset, or use strict=True to refuse them.",
            reason="filter",
        )


def _schema_constraint(schema: DataFrameSchema) -> SchemaConstraint:
    parts = []
    for name, column in schema.columns.items():
        dtype = schema.dtype or column.dtype
        type_name = dtype.type.simpleString() if dtype else "of any type"
        parts.append(f"{name} {type_name}" + ("" if column.required else " (optional)"))
    description = f"columns {', '.join(parts)}" + (" and no others" if schema.strict else "")
    return SchemaConstraint(name="schema", columns=(), description=description, schema=schema)


def _not_null_constraint(column: str, *, optional: bool) -> RowConstraint:
    return RowConstraint(
        name=f"not_null__{column}",
        columns=(column,),
        description=f"{column} is not null",
        optional=optional,
        build_condition=lambda _: quote_column(column).isNotNull(),
        needs_types=False,
        promise=NotNull(),
    )


def _bind_column(column: str, condition: ColumnCondition) -> Any:
    return lambda _: condition(quote_column(column))


def _column_constraint(schema: DataFrameSchema, name: str, column: ColumnSchema, check: Check) -> Constraint:
    predicate = find_predicate(check)
    if predicate is not None:
        return RowConstraint(
            name=f"{check.name}__{name}",
            columns=(name,),
            description=_format_check(check, name),
            warn=check.raise_warning,
            optional=not column.required,
            build_condition=predicate,
        )
    dtype = schema.dtype or column.dtype
    builtin = get_builtin_check(check)
    built_condition = (
        build_builtin_condition(*builtin, name, getattr(dtype, "type", None)) if builtin else None
    )
    if built_condition is None:
        column_schema = ColumnSchema(
            dtype=dtype, checks=[_without_warning(check)], nullable=True, required=column.required, name=name
        )
        return _pandera_constraint(
            f"{check.name}__{name}",
            column_schema,
            _format_check(check, name),
            warn=check.raise_warning,
            columns=(name,),
        )
    short_name, (description, condition, promise) = built_condition
    return RowConstraint(
        name=f"{short_name}__{name}",
        columns=(name,),
        description=description,
        warn=check.raise_warning,
        optional=not column.required,
        build_condition=_bind_column(name, condition),
        promise=promise,
    )


def _frame_constraint(check: Check) -> Constraint:
    predicate = find_predicate(check)
    name, description = str(check.name), _format_check(check, "rows")
    if predicate is not None:
        return RowConstraint(
            name=name,
            columns=(),
            description=description,
            warn=check.raise_warning,
            build_condition=predicate,
        )
    return PanderaConstraint(
        name=name,
        columns=(),
        description=description,
        warn=check.raise_warning,
        schema=DataFrameSchema(checks=[_without_warning(check)], name=name),
    )


def _pandera_constraint(
    name: str, column: ColumnSchema, description: str, *, warn: bool = False, columns: tuple[str, ...] = ()
) -> PanderaConstraint:
    column_schema = copy.copy(column)
    column_schema.checks = [_without_warning(check) for check in column.checks]
    return PanderaConstraint(
        name=name,
        columns=columns,
        description=description,
        warn=warn,
        optional=not column.required,
        schema=DataFrameSchema({str(column.name): column_schema}, name=name),
    )


def _without_warning(check: Check) -> Check:
    # With raise_warning pandera reports a failure as passed. The severity is set in this package.
    check_copy = copy.copy(check)
    check_copy.raise_warning = False
    return check_copy


def _format_check(check: Check, subject: str) -> str:
    description = check.error or check.description or f"{check.name} holds"
    return f"{subject}: {' '.join(str(description).split())}"


def _with_unique_names(constraints: list[Constraint]) -> Iterator[Constraint]:
    """Yield the constraints with unique names that Dagster accepts (letters, digits, `_`)."""
    used_names: set[str] = set()
    for constraint in constraints:
        base = name = re.sub(r"\W", "_", constraint.name, flags=re.ASCII)
        count = 1
        while name in used_names:
            count += 1
            name = f"{base}__{count}"
        used_names.add(name)
        yield replace(constraint, name=name)
