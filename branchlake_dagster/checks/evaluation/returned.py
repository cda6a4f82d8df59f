"""The rows that a SQL check returns: each is a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from branchlake_dagster.checks.constraints.model import SqlConstraint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

THIS = "{this}"
"""Stands for the checked rows in the text of a SQL check."""


def query_of(check: SqlConstraint, view: str) -> str:
    """The FROM clause of the rows that `check` returns, `view` standing for the checked rows.

    As a subquery the text can only be a query: Spark's grammar has no INSERT or DROP there.
    """
    return f"FROM (\n{check.sql.strip().rstrip(';').replace(THIS, view)}\n) AS failures"


def returned(rows: DataFrame, check: SqlConstraint, view: str) -> DataFrame:
    """The rows that `check` returns; columns of one name are numbered."""
    frame = rows.sparkSession.sql(f"SELECT * {query_of(check, view)}")
    return frame.toDF(*_apart(frame.columns))


def _apart(columns: Sequence[str]) -> list[str]:
    """The column names, numbered where one repeats: `a.*, b.*` is a natural way to show a failure."""
    names: list[str] = []
    taken: set[str] = set()
    for column in columns:
        name, count = column, 1
        while name.lower() in taken:  # Spark resolves names without regard to case
            count += 1
            name = f"{column}_{count}"
        taken.add(name.lower())
        names.append(name)
    return names
