"""All constraints of a contract against one frame: what needs no rows, the one job, the fallback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException

from branchlake_dagster.checks.constraints.model import (
    Constraint,
    Outcome,
    PanderaConstraint,
    RowConstraint,
    SchemaConstraint,
    UniqueConstraint,
)
from branchlake_dagster.checks.evaluation.evaluate import Collect, collect_rows, evaluate
from branchlake_dagster.checks.evaluation.fallback import validate
from branchlake_dagster.checks.evaluation.shape import schema_outcome, wrong_types

if TYPE_CHECKING:
    from pandera.api.pyspark.container import DataFrameSchema
    from pyspark.sql import DataFrame


def judge(
    rows: DataFrame,
    schema: DataFrameSchema,
    constraints: Sequence[Constraint],
    *,
    examples: int,
    collect: Collect = collect_rows,
) -> dict[str, Outcome]:
    """The outcome of each of `constraints`, compiled from `schema`, by name.

    One call of `collect` for all that compile (none when nothing is left to read), then pandera for the
    rest. A constraint on a missing or wrongly typed column fails and says so, instead of taking the
    verdicts of all others with it.
    """
    actual = rows.schema
    wrong = wrong_types(schema, actual)
    outcomes: dict[str, Outcome] = {}
    compiled: list[RowConstraint | UniqueConstraint] = []
    for constraint in constraints:
        if isinstance(constraint, SchemaConstraint):
            outcomes[constraint.name] = schema_outcome(constraint.schema, actual)
        elif isinstance(constraint, RowConstraint | UniqueConstraint):
            early = _without_reading(rows, constraint, actual.names, wrong)
            if early is None:
                compiled.append(constraint)
            else:
                outcomes[constraint.name] = early
    if compiled:
        outcomes |= evaluate(rows, compiled, examples=examples, collect=collect)
    for constraint in constraints:
        if isinstance(constraint, PanderaConstraint):
            outcomes[constraint.name] = validate(rows, constraint)
    return outcomes


def _without_reading(
    rows: DataFrame,
    constraint: RowConstraint | UniqueConstraint,
    names: Sequence[str],
    wrong: Mapping[str, str],
) -> Outcome | None:
    """The outcome when it can be told from the schema, else None."""
    missing = [column for column in constraint.columns if column not in names]
    if missing and constraint.optional:
        return Outcome(passed=True, note=f"optional column {', '.join(missing)} is absent")
    if missing:
        return _not_evaluated(f"column {', '.join(missing)} is missing")
    twice = [column for column in constraint.columns if list(names).count(column) > 1]
    if twice:
        return _not_evaluated(f"column {', '.join(twice)} occurs twice")
    if not isinstance(constraint, RowConstraint):
        return None
    mistyped = [wrong[column] for column in constraint.columns if column in wrong]
    if constraint.typed and mistyped:
        return _not_evaluated("; ".join(mistyped))
    if not constraint.columns:
        # Nobody knows which columns a rule on whole rows reads. Its analysis (some ms, no job) tells
        # whether it can run, before it fails the one job for every other constraint.
        try:
            _ = rows.select(constraint.holds(rows)).schema
        except AnalysisException as error:
            return _not_evaluated(str(error).partition("\n")[0])
    return None


def _not_evaluated(why: str) -> Outcome:
    return Outcome(passed=False, note=f"not evaluated: {why}")
