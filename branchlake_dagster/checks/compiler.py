"""From a pandera PySpark schema to constraints, and its built-in checks as Spark conditions.

Pure: no session, no rows.

Names are built from what is promised and where (`not_null__norad_id`, `in_range__ra_deg`,
`unique__norad_id__epoch`), never from positions, so that adding a promise renames no other and the
history of a check in Dagster stays one history.

pandera's built-in checks as Spark conditions.

Each builder answers with the condition a good value satisfies, in the semantics of pandera's PySpark
backend (pandera 0.35, `pandera.backends.pyspark.builtin_checks`): a null value satisfies every one, NaN
compares as Spark compares it (equal to itself, greater than any number), `str_matches` anchors at the
start and `str_contains` does not.
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
    predicate_of,
)
from branchlake_dagster.internals.pandera import builtin_of

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


if TYPE_CHECKING:
    from pyspark.sql import Column


def compile_schema(schema: DataFrameSchema) -> tuple[Constraint, ...]:
    """All promises of `schema` as constraints, the schema's shape first, then column by column.

    Raises `ContractError` for a contract that would change rows (`coerce`, `strict="filter"`), and for a
    check that means nothing for its column's type.
    """
    _refuse_parsing(schema)
    constraints: list[Constraint] = [_shape(schema)]
    for name, column in schema.columns.items():
        if column.regex:
            constraints.append(_through_pandera(f"matching__{name}", column, f"columns matching {name!r}"))
            continue
        if not column.nullable:
            constraints.append(_not_null(name, optional=not column.required))
        constraints.extend(_column_check(schema, name, column, check) for check in column.checks)
    if schema.unique:
        keys = (schema.unique,) if isinstance(schema.unique, str) else tuple(schema.unique)
        constraints.append(
            UniqueConstraint(
                name="unique__" + "__".join(keys),
                columns=keys,
                text=f"no two rows agree on {', '.join(keys)}",
            )
        )
    constraints.extend(_frame_check(check) for check in schema.checks)
    return tuple(_named_apart(constraints))


def quoted(column: str) -> Column:
    """The column called exactly `column`, whatever characters it has."""
    return F.col("`" + column.replace("`", "``") + "`")


def _refuse_parsing(schema: DataFrameSchema) -> None:
    coerced = [name for name, column in schema.columns.items() if column.coerce]
    if schema.coerce or coerced:
        which = ", ".join(coerced) or "all columns"
        raise ContractError(
            f"Contract {schema.name} coerces {which}; a check reads stored rows and changes none.",
            hint="Cast in the asset and drop coerce from the contract.",
            reason="coerce",
            subject=which,
        )
    if schema.strict == "filter":
        raise ContractError(
            f"Contract {schema.name} filters columns; a check reads stored rows.",
            hint="Drop the columns in the asset, or say strict=True to refuse them.",
            reason="filter",
        )


def _shape(schema: DataFrameSchema) -> SchemaConstraint:
    parts = []
    for name, column in schema.columns.items():
        dtype = schema.dtype or column.dtype
        type_name = dtype.type.simpleString() if dtype else "of any type"
        parts.append(f"{name} {type_name}" + ("" if column.required else " (optional)"))
    text = f"columns {', '.join(parts)}" + (" and no others" if schema.strict else "")
    return SchemaConstraint(name="schema", columns=(), text=text, schema=schema)


def _not_null(column: str, *, optional: bool) -> RowConstraint:
    return RowConstraint(
        name=f"not_null__{column}",
        columns=(column,),
        text=f"{column} is not null",
        optional=optional,
        holds=lambda _: quoted(column).isNotNull(),
        typed=False,
        promise=NotNull(),
    )


def _on_column(column: str, condition: Condition) -> Any:
    return lambda _: condition(quoted(column))


def _column_check(schema: DataFrameSchema, name: str, column: ColumnSchema, check: Check) -> Constraint:
    own = predicate_of(check)
    if own is not None:
        return RowConstraint(
            name=f"{check.name}__{name}",
            columns=(name,),
            text=_text(check, name),
            warn=check.raise_warning,
            optional=not column.required,
            holds=own,
        )
    dtype = schema.dtype or column.dtype
    builtin = builtin_of(check)
    built = builtin_condition(*builtin, name, getattr(dtype, "type", None)) if builtin else None
    if built is None:
        alone = ColumnSchema(
            dtype=dtype, checks=[_quiet(check)], nullable=True, required=column.required, name=name
        )
        return _through_pandera(
            f"{check.name}__{name}", alone, _text(check, name), warn=check.raise_warning, columns=(name,)
        )
    short, (text, condition, promise) = built
    return RowConstraint(
        name=f"{short}__{name}",
        columns=(name,),
        text=text,
        warn=check.raise_warning,
        optional=not column.required,
        holds=_on_column(name, condition),
        promise=promise,
    )


def _frame_check(check: Check) -> Constraint:
    own = predicate_of(check)
    name, text = str(check.name), _text(check, "rows")
    if own is not None:
        return RowConstraint(name=name, columns=(), text=text, warn=check.raise_warning, holds=own)
    return PanderaConstraint(
        name=name,
        columns=(),
        text=text,
        warn=check.raise_warning,
        schema=DataFrameSchema(checks=[_quiet(check)], name=name),
    )


def _through_pandera(
    name: str, column: ColumnSchema, text: str, *, warn: bool = False, columns: tuple[str, ...] = ()
) -> PanderaConstraint:
    alone = copy.copy(column)
    alone.checks = [_quiet(check) for check in column.checks]
    return PanderaConstraint(
        name=name,
        columns=columns,
        text=text,
        warn=warn,
        optional=not column.required,
        schema=DataFrameSchema({str(column.name): alone}, name=name),
    )


def _quiet(check: Check) -> Check:
    # With raise_warning pandera reports a breach as passed; the severity is ours to tell.
    alone = copy.copy(check)
    alone.raise_warning = False
    return alone


def _text(check: Check, where: str) -> str:
    words = check.error or check.description or f"{check.name} holds"
    return f"{where}: {' '.join(str(words).split())}"


def _named_apart(constraints: list[Constraint]) -> Iterator[Constraint]:
    """The constraints with names that Dagster accepts (letters, digits, `_`), each name once."""
    taken: set[str] = set()
    for constraint in constraints:
        base = name = re.sub(r"\W", "_", constraint.name, flags=re.ASCII)
        count = 1
        while name in taken:
            count += 1
            name = f"{base}__{count}"
        taken.add(name)
        yield replace(constraint, name=name)
