"""Constraints and their outcomes as values, what file metadata can promise, and row predicates of users.

What a condition promises, as a value: what file metadata can be held against.

Only what is said here can be proved without reading. The Spark condition remains the meaning; a promise
is never wider than it.

Row-wise rules of one's own that pandera can run and that our compiler can see through.

A `@pandera.pyspark.check` or `@dataframe_check` method answers with True or False for a whole frame, so
all that can be done with it is to call it: one Spark job each, no counts. Under `@row_predicate` the
method answers with a Spark condition instead. pandera still gets the boolean it wants; the compiler takes
the condition and puts it into the contract's one job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pandera.api.checks import Check
from pyspark.sql import Column, DataFrame

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.internals.pandera import find_check_method
from branchlake_dagster.wording import format_count

if TYPE_CHECKING:
    from pandera.api.pyspark.container import DataFrameSchema

Sign = Literal["=", "!=", ">", ">=", "<", "<="]


@dataclass(frozen=True)
class NotNull:
    """The value is there."""


@dataclass(frozen=True)
class Compared:
    """`value sign bound`."""

    sign: Sign
    bound: Any


@dataclass(frozen=True)
class Both:
    """Two comparisons, both of which hold: a range."""

    low: Compared
    high: Compared


@dataclass(frozen=True)
class Among:
    """The value is one of these."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class NotAmong:
    """The value is none of these."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class StartsWith:
    """The text starts with this one."""

    prefix: str


@dataclass(frozen=True)
class EndsWith:
    """The text ends with this one."""

    suffix: str


@dataclass(frozen=True)
class Length:
    """The text has `low` to `high` characters; None: no limit."""

    low: int | None
    high: int | None


Promise = NotNull | Compared | Both | Among | NotAmong | StartsWith | EndsWith | Length


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


def find_predicate(check: Check) -> Callable[[DataFrame], Column] | None:
    """The condition builder behind `check` when its method is a `row_predicate`, else None."""
    check_method = find_check_method(check)
    if check_method is None:
        return None
    method, model = check_method
    condition: Callable[[Any, DataFrame], Column] | None = getattr(method, "row_predicate", None)
    return None if condition is None else lambda rows: condition(model, rows)


MAX_EXAMPLES = 100
"""Most example rows a check may show; they are kept in Dagster's event log, which is not a table store."""


class ContractError(BranchlakeError, Terminal):
    """A contract or check cannot be declared as written; the text says which part and what would do."""


class CheckFailedToRun(BranchlakeError, Terminal):  # noqa: N818 - worded as the errors of the package are
    """A check could not be evaluated at all: there is no verdict, and the gate blocks for want of one."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """One promise of a contract, and one asset check in the UI.

    `name` is unique within the contract and stable; `columns` are the table columns it speaks of (empty
    when it may read any); `description` says the promise to a reader; `warn` is True when a breach publishes
    with a warning; `optional` is True when the promise is void while the column is absent.
    """

    name: str
    columns: tuple[str, ...]
    description: str
    warn: bool = False
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class SchemaConstraint(Constraint):
    """Columns and types, judged from the frame's schema without reading a row."""

    schema: DataFrameSchema


@dataclass(frozen=True, kw_only=True)
class RowConstraint(Constraint):
    """A condition on each row by itself.

    `build_condition` builds the Spark condition that a good row satisfies. A null condition counts as
    satisfied,
    as in SQL `CHECK` and in pandera's PySpark backend. `needs_types` is True when the condition only makes
    sense while its columns have the contract's types. `promise` says the same about its one column where it
    has a form that file metadata can be held against.
    """

    build_condition: Callable[[DataFrame], Column]
    needs_types: bool = True
    promise: Promise | None = None


@dataclass(frozen=True, kw_only=True)
class UniqueConstraint(Constraint):
    """No two rows agree on `columns`; nulls are equal to each other here, as in pandera and GROUP BY."""


@dataclass(frozen=True, kw_only=True)
class PanderaConstraint(Constraint):
    """A promise only pandera can judge; `schema` holds nothing but this one promise."""

    schema: DataFrameSchema


@dataclass(frozen=True, kw_only=True)
class SqlConstraint(Constraint):
    """No row comes back from `sql`, a query in which `{this}` stands for the rows under judgement."""

    sql: str


Example = Mapping[str, str | None]
"""A failing row: column name to printed value; None is null."""


@dataclass(frozen=True)
class Proof:
    """What was looked at without Spark: data files, and rows.

    By `metadata`: the rows that the files hold, those of the selection among them, others and deleted ones
    perhaps too. By `rows`: those of the selection, which were read.
    """

    source: Literal["metadata", "rows"]
    files: int
    rows: int


@dataclass(frozen=True)
class FailingPartitions:
    """The partitions that failing rows belong to, with the number of failing rows, the largest first.

    `more_count` counts the partitions that are not listed; `more_at_least` is True if there may be further
    ones.
    """

    rows_by_partition: Mapping[str, int]
    more_count: int = 0
    more_at_least: bool = False

    @property
    def summary(self) -> str:
        """For a sentence: `2026-11-02 (12 rows), 2026-11-05 (3 rows) and 4 more`."""
        partition_list = ", ".join(
            f"{name} ({format_count(rows, 'row')})" for name, rows in self.rows_by_partition.items()
        )
        return (
            f"{partition_list} and {'at least ' * self.more_at_least}{self.more_count} more"
            if self.more_count
            else partition_list
        )


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """What the evaluation of one constraint found.

    `failing` and `total` are row counts, None where they are not known; `examples` are failing rows;
    `note` says what a count cannot; `proof` says that Spark was not needed; `partitions` are those of the
    failing rows, None if the rows belong to one partition or theirs are not known.
    """

    passed: bool
    failing: int | None = None
    total: int | None = None
    examples: tuple[Example, ...] = ()
    note: str | None = None
    proof: Proof | None = None
    partitions: FailingPartitions | None = None


def require_examples(examples: int) -> int:
    """`examples` when it is within 1..MAX_EXAMPLES; raises `ContractError` otherwise."""
    if not 1 <= examples <= MAX_EXAMPLES:
        raise ContractError(f"examples={examples} is outside 1..{MAX_EXAMPLES}.", reason="examples")
    return examples
