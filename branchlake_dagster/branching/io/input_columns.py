"""The columns that an asset asks for of an input: `AssetIn(metadata={"columns": […]})`, as Dagster has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from branchlake_dagster.branching.table.spec import plain
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.wording import named

INPUT_COLUMNS = "columns"
"""Key in the metadata of an input."""


def input_columns(metadata: Mapping[str, Any], existing: Sequence[str], *, table: str) -> list[str] | None:
    """The columns that an input's metadata names, in its order; None if it names none, which means all.

    `existing` are the columns of the table. Raises ConfigurationError for a column that the table does not
    have, and for what is not a list of different names.
    """
    columns = plain(metadata.get(INPUT_COLUMNS))
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise ConfigurationError(
            f"The input's columns are {columns!r}.",
            table=table,
            hint='Write a list of names: AssetIn(metadata={"columns": ["day", "price"]}).',
        )
    if missing := [str(column) for column in columns if column not in existing]:
        raise ConfigurationError(
            f"The input names {named('column', missing)}, which the table does not have.",
            table=table,
            hint=f"It has {', '.join(existing)}.",
        )
    if len({*columns}) < len(columns):
        raise ConfigurationError(
            f"The input names a column twice: {', '.join(columns)}.", table=table, hint="Name it once."
        )
    return list(columns)


def delivered_columns(columns: Sequence[str], existing: Sequence[str], frame: Sequence[str]) -> list[str]:
    """The columns of a frame of changes: those asked for, and those that describe the change.

    `existing` are the columns of the table, `frame` those of the frame.
    """
    return [*columns, *(name for name in frame if name not in existing)]
