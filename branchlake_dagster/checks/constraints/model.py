"""The values that pass between the compiler, the evaluators and Dagster: constraints and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from branchlake_dagster.checks.constraints.promises import Promise
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.wording import counted

if TYPE_CHECKING:
    from pandera.api.pyspark.container import DataFrameSchema
    from pyspark.sql import Column, DataFrame

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
    when it may read any); `text` says the promise to a reader; `warn` is True when a breach publishes
    with a warning; `optional` is True when the promise is void while the column is absent.
    """

    name: str
    columns: tuple[str, ...]
    text: str
    warn: bool = False
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class SchemaConstraint(Constraint):
    """Columns and types, judged from the frame's schema without reading a row."""

    schema: DataFrameSchema


@dataclass(frozen=True, kw_only=True)
class RowConstraint(Constraint):
    """A condition on each row by itself.

    `holds` builds the Spark condition that a good row satisfies. A null condition counts as satisfied,
    as in SQL `CHECK` and in pandera's PySpark backend. `typed` is True when the condition only makes
    sense while its columns have the contract's types. `promise` says the same about its one column where it
    has a form that file metadata can be held against.
    """

    holds: Callable[[DataFrame], Column]
    typed: bool = True
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

    by: Literal["metadata", "rows"]
    files: int
    rows: int


@dataclass(frozen=True)
class FailingPartitions:
    """The partitions that failing rows belong to, with the number of failing rows, the largest first.

    `more` counts the partitions that are not listed; `more_at_least` is True if there may be further ones.
    """

    rows_by_partition: Mapping[str, int]
    more: int = 0
    more_at_least: bool = False

    @property
    def text(self) -> str:
        """For a sentence: `2026-11-02 (12 rows), 2026-11-05 (3 rows) and 4 more`."""
        listed = ", ".join(
            f"{name} ({counted(rows, 'row')})" for name, rows in self.rows_by_partition.items()
        )
        return f"{listed} and {'at least ' * self.more_at_least}{self.more} more" if self.more else listed


@dataclass(frozen=True, kw_only=True)
class Outcome:
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
