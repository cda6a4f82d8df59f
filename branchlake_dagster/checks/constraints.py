"""Constraints of contracts, their outcomes, and row predicates.

A `Promise` describes the condition of a row constraint as a value, for example `Compared(">=", 0)`. Only such
conditions can be proved from file metadata, without reading rows. The Spark condition stays authoritative:
every value that satisfies the `Promise` satisfies the Spark condition.

A `@pandera.pyspark.check` or `@dataframe_check` method returns True or False for a whole frame. It can only
be called, which costs one Spark job and gives no counts. With `@row_predicate` the method returns a Spark
condition instead. pandera still gets a boolean, and the compiler puts the condition into the contract's one
Spark job.
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
    """The value is not null."""


@dataclass(frozen=True)
class Compared:
    """The value compares to `bound` by `sign`, for example `value >= bound`."""

    sign: Sign
    bound: Any


@dataclass(frozen=True)
class Both:
    """The value satisfies both comparisons: a range."""

    low: Compared
    high: Compared


@dataclass(frozen=True)
class Among:
    """The value is one of `values`."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class NotAmong:
    """The value is none of `values`."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class StartsWith:
    """The text starts with `prefix`."""

    prefix: str


@dataclass(frozen=True)
class EndsWith:
    """The text ends with `suffix`."""

    suffix: str


@dataclass(frozen=True)
class Length:
    """The text has `low` to `high` characters; None means no limit."""

    low: int | None
    high: int | None


Promise = NotNull | Compared | Both | Among | NotAmong | StartsWith | EndsWith | Length
"""A condition on one column as a value, which file metadata or read values can prove."""


Predicate = Callable[[Any, DataFrame], Column]
"""Takes the pandera model and the frame, and returns the Spark condition that a good row satisfies."""


def row_predicate(method: Predicate) -> Callable[[Any, Any], bool]:
    """Let a pandera check method return the Spark condition that every good row satisfies.

    Put this decorator below pandera's decorator and `@classmethod`. The condition is evaluated in the
    contract's one Spark job, with counts and examples. pandera itself would call the method in its own job.

    Args:
        method (Callable[[type, DataFrame], Column]): Takes the model and the whole frame and returns a
            condition; null counts as satisfied. With `@check("a")` the argument is also the whole frame:
            pandera 0.35 passes the frame to a column check without arguments, although its documentation
            describes an object with the column's name.

    Returns:
        Callable[[type, DataFrame], bool]: A method for pandera that returns whether all rows satisfy the
            condition.

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
    """Return a function that builds the condition of `check` for a frame.

    None if the method of `check` is not a `row_predicate`.
    """
    check_method = find_check_method(check)
    if check_method is None:
        return None
    method, model = check_method
    condition: Callable[[Any, DataFrame], Column] | None = getattr(method, "row_predicate", None)
    return None if condition is None else lambda rows: condition(model, rows)


MAX_EXAMPLES = 100
"""The largest number of example rows per check. Dagster's event log stores them; it must stay small."""


class ContractError(BranchlakeError, Terminal):
    """A contract or check cannot be declared as written. The message names the part and a correction."""


class CheckFailedToRun(BranchlakeError, Terminal):  # noqa: N818 - named like the other errors
    """A check could not be evaluated. It has no verdict, so the gate blocks the publication."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """One constraint of a contract, which is one asset check in Dagster's UI.

    `name` is stable and unique within the contract. `columns` are the table columns of the constraint; empty
    if it may read any column. `description` is the constraint for people. `warn` is True if a run is
    published with a warning when the constraint fails. `optional` is True if the constraint is satisfied
    while one of its columns does not exist.
    """

    name: str
    columns: tuple[str, ...]
    description: str
    warn: bool = False
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class SchemaConstraint(Constraint):
    """A constraint on columns and types, judged from the table's schema without reading a row."""

    schema: DataFrameSchema


@dataclass(frozen=True, kw_only=True)
class RowConstraint(Constraint):
    """A constraint on each single row.

    `build_condition` returns the Spark condition that a good row satisfies. A null condition counts as
    satisfied, as in SQL `CHECK` and in pandera's PySpark backend. `needs_types` is True if the condition can
    only be evaluated while its columns have the contract's types. `promise` is the same condition on its one
    column as a value that file metadata can prove; None if there is no such value.
    """

    build_condition: Callable[[DataFrame], Column]
    needs_types: bool = True
    promise: Promise | None = None


@dataclass(frozen=True, kw_only=True)
class UniqueConstraint(Constraint):
    """The constraint that no two rows have the same values in `columns`.

    Null equals null, as in pandera and GROUP BY.
    """


@dataclass(frozen=True, kw_only=True)
class PanderaConstraint(Constraint):
    """A constraint that only pandera can judge. `schema` is a pandera schema with only this constraint."""

    schema: DataFrameSchema


@dataclass(frozen=True, kw_only=True)
class SqlConstraint(Constraint):
    """The constraint that the query `sql` returns no row. In the query, `{this}` means the checked rows."""

    sql: str


Example = Mapping[str, str | None]
"""A failing row: a mapping from column name to the value as text; None is null."""


@dataclass(frozen=True)
class Proof:
    """How a constraint was proved without Spark, and from how many data files and rows.

    With source `metadata`, `rows` counts all rows of the files, which may include rows outside the selection
    and deleted rows. With source `rows`, it counts the rows of the selection, which were read.
    """

    source: Literal["metadata", "rows"]
    files: int
    rows: int


@dataclass(frozen=True)
class FailingPartitions:
    """The partitions with failing rows and their numbers of failing rows, the largest number first.

    `more_count` is the number of partitions that are not listed. `more_at_least` is True if `more_count` is a
    lower bound.
    """

    rows_by_partition: Mapping[str, int]
    more_count: int = 0
    more_at_least: bool = False

    @property
    def summary(self) -> str:
        """The partitions as a part of a sentence: `2026-11-02 (12 rows), 2026-11-05 (3 rows) and 4 more`."""
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
    """The result of the evaluation of one constraint.

    `failing` is the number of failing rows and `total` the number of checked rows; each is None if unknown.
    `examples` are failing rows. `note` explains the result, for example why there are no counts. `proof` is
    set if Spark was not needed. `partitions` are the partitions of the failing rows, None if the check read
    one partition or their partitions are unknown.
    """

    passed: bool
    failing: int | None = None
    total: int | None = None
    examples: tuple[Example, ...] = ()
    note: str | None = None
    proof: Proof | None = None
    partitions: FailingPartitions | None = None


def require_examples(examples: int) -> int:
    """Return `examples`. Raises `ContractError` unless it is between 1 and MAX_EXAMPLES."""
    if not 1 <= examples <= MAX_EXAMPLES:
        raise ContractError(f"examples={examples} is not between 1 and {MAX_EXAMPLES}.", reason="examples")
    return examples
