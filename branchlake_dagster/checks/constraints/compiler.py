"""From a pandera PySpark schema to constraints: pure, no session, no rows.

Names are built from what is promised and where (`not_null__norad_id`, `in_range__ra_deg`,
`unique__norad_id__epoch`), never from positions, so that adding a promise renames no other and the
history of a check in Dagster stays one history.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pandera.api.checks import Check
from pandera.api.pyspark.components import Column as ColumnSchema
from pandera.api.pyspark.container import DataFrameSchema
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.constraints.conditions import builtin_condition
from branchlake_dagster.checks.constraints.model import (
    Constraint,
    ContractError,
    PanderaConstraint,
    RowConstraint,
    SchemaConstraint,
    UniqueConstraint,
)
from branchlake_dagster.checks.constraints.predicate import predicate_of
from branchlake_dagster.checks.constraints.promises import NotNull
from branchlake_dagster.internals.pandera import builtin_of

if TYPE_CHECKING:
    from pyspark.sql import Column

    from branchlake_dagster.checks.constraints.conditions import Condition


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
