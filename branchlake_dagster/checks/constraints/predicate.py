"""Row-wise rules of one's own that pandera can run and that our compiler can see through.

A `@pandera.pyspark.check` or `@dataframe_check` method answers with True or False for a whole frame, so
all that can be done with it is to call it: one Spark job each, no counts. Under `@row_predicate` the
method answers with a Spark condition instead. pandera still gets the boolean it wants; the compiler takes
the condition and puts it into the contract's one job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pandera.api.checks import Check
from pyspark.sql import Column, DataFrame

from branchlake_dagster.internals.pandera import method_of

Predicate = Callable[[Any, DataFrame], Column]


def row_predicate(method: Predicate) -> Callable[[Any, Any], bool]:
    """Let a pandera check method return the Spark condition that every good row satisfies.

    It goes below pandera's decorator and `@classmethod`. The condition is evaluated in the contract's one
    Spark job, with counts and examples; pandera itself would call the method in a job of its own.

    Args:
        method (Callable[[type, DataFrame], Column]): Gets the model and the whole frame, and answers with a
            condition; null counts as satisfied. It is the whole frame under `@check("a")` as well: pandera
            0.35 hands a column check without arguments the frame and not, as its documents say, an object
            with the column's name.

    Returns:
        Callable[[type, DataFrame], bool]: What pandera wants: whether all rows satisfy it.

    Examples:
        .. code-block:: python

            import pandera.pyspark as pa
            from pyspark.sql import functions as F

            from branchlake_dagster import row_predicate

            class Windows(pa.DataFrameModel):
                @pa.dataframe_check
                @classmethod
                @row_predicate
                def ends_after_start(cls, rows):
                    return F.col("window_end") > F.col("window_start")
    """

    @functools.wraps(method)
    def whole_frame(model: Any, checked: Any) -> bool:
        rows: DataFrame = checked if isinstance(checked, DataFrame) else checked.dataframe
        return rows.filter(~method(model, rows)).isEmpty()

    whole_frame.__dict__["row_predicate"] = method
    return whole_frame


def predicate_of(check: Check) -> Callable[[DataFrame], Column] | None:
    """The condition builder behind `check` when its method is a `row_predicate`, else None."""
    found = method_of(check)
    if found is None:
        return None
    method, model = found
    condition: Callable[[Any, DataFrame], Column] | None = getattr(method, "row_predicate", None)
    return None if condition is None else lambda rows: condition(model, rows)
