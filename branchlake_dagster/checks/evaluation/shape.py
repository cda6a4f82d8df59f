"""Columns and types of a frame against a contract, from the schema alone: no row is read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pandera.api.pyspark.container import DataFrameSchema
from pandera.engines.pyspark_engine import Engine
from pyspark.sql.types import DataType, StructType

from branchlake_dagster.checks.constraints.model import Outcome


def schema_outcome(schema: DataFrameSchema, actual: StructType) -> Outcome:
    """Passed when `actual` has the contract's columns in the contract's types; the note lists breaches.

    Covers what pandera calls column presence, dtype, `strict`, `ordered` and `unique_column_names`.
    """
    problems = [*_presence(schema, actual.names), *wrong_types(schema, actual).values()]
    return Outcome(passed=not problems, note="; ".join(problems) or None)


def wrong_types(schema: DataFrameSchema, actual: StructType) -> dict[str, str]:
    """By column name, what is wrong with the type of each present column."""
    wrong = {}
    for name, column in schema.columns.items():
        expected = schema.dtype or column.dtype
        if expected is None or column.regex or name not in actual.names:
            continue
        found = actual[name].dataType
        if not _same_type(expected, found):
            promised = expected.type.simpleString()
            wrong[name] = f"column {name} has type {found.simpleString()}, the contract says {promised}"
    return wrong


def _same_type(expected: object, found: DataType) -> bool:
    try:
        return bool(expected.check(Engine.dtype(found)))  # type: ignore[attr-defined]
    except TypeError:  # a type pandera has no word for: equal only to itself
        return getattr(expected, "type", None) == found


def _presence(schema: DataFrameSchema, names: Sequence[str]) -> list[str]:
    plain = [name for name, column in schema.columns.items() if not column.regex]
    patterns = [re.compile(name) for name, column in schema.columns.items() if column.regex]
    problems = [
        f"column {name} is missing" for name in plain if schema.columns[name].required and name not in names
    ]
    if schema.strict:
        problems += [
            f"column {name} is not in the contract"
            for name in names
            if name not in plain and not any(pattern.match(name) for pattern in patterns)
        ]
    if schema.ordered and [name for name in names if name in plain] != [
        name for name in plain if name in names
    ]:
        problems.append(f"columns are not in the contract's order: {', '.join(names)}")
    if schema.unique_column_names and len(set(names)) < len(names):
        problems.append("a column name occurs twice")
    return problems
