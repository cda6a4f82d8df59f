"""What cannot be compiled is judged by pandera's own PySpark backend: same verdict, no counts.

One Spark job or more per constraint (0.5-2 s each on a small table), which is why it is the fallback.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pandera.config import ValidationDepth, config_context
from pandera.errors import SchemaError, SchemaErrors
from pyspark.errors import PySparkException

from branchlake_dagster.checks.constraints.model import Outcome, PanderaConstraint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NOTE_CHARS = 500


def validate(rows: DataFrame, constraint: PanderaConstraint) -> Outcome:
    """Pandera's verdict on `constraint` alone, without counts or examples.

    A check that raises is a failed check, as pandera has it for most exceptions; its words are the note.
    """
    # PANDERA_VALIDATION_ENABLED=False makes pandera return at once with no errors. That would read as
    # "passed", so the answer may not depend on the environment.
    with config_context(
        validation_enabled=True, validation_depth=ValidationDepth.SCHEMA_AND_DATA, cache_dataframe=False
    ):
        try:
            checked = constraint.schema.validate(rows, lazy=True)
            errors = list(_messages(checked.pandera.errors or {}))
        except (SchemaError, SchemaErrors, PySparkException, TypeError, ValueError) as error:
            errors = [f"{type(error).__name__}: {error}"]
    return Outcome(passed=not errors, note="; ".join(errors)[:_NOTE_CHARS] or None)


def _messages(errors: Mapping[str, Any]) -> Iterator[str]:
    """The texts in pandera's report: category to reason to a list of records with `error`."""
    for reasons in errors.values():
        for records in reasons.values():
            for record in records:
                yield str(record.get("error") or record)
