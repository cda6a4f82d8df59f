"""Rows of a table in the lake: what its manifests prove of them; Spark is opened only for the rest."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.manifest import DataFile
from pyiceberg.types import NestedField

from branchlake_dagster.branching.table.selection import DateRange, TimeRange, Values, to_iceberg
from branchlake_dagster.checks.constraints.model import (
    Constraint,
    Outcome,
    Proof,
    RowConstraint,
    UniqueConstraint,
)
from branchlake_dagster.checks.constraints.promises import Among, Both, Compared, Promise
from branchlake_dagster.checks.proof.facts import Facts, facts
from branchlake_dagster.checks.proof.prove import proves
from branchlake_dagster.checks.proof.schema import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from branchlake_dagster.branching.io.stored_rows import StoredRows
    from branchlake_dagster.branching.table.selection import Condition

MOST_FILES = 10_000
"""Of more data files Spark counts the rows sooner than their metadata is gone through here."""

_log = logging.getLogger(__name__)


class TableRows:
    """The rows of one selection of a table, as `Rows`.

    The files looked at hold every row of the selection, and may hold others, and rows that delete files take
    out: what is true of all their rows is true of those.
    """

    def __init__(self, stored: StoredRows) -> None:
        self._stored = stored
        self._facts: dict[int, list[Facts]] = {}

    @cached_property
    def schema(self) -> StructType:
        """From the table's schema; asked of Spark where that has a type that Spark may show otherwise."""
        return spark_schema(self._stored.table.schema()) or self.frame.schema

    @cached_property
    def frame(self) -> DataFrame:
        """The rows in the run's Spark session."""
        return self._stored.frame()

    def proved(self, constraint: Constraint) -> Outcome | None:
        """Passed, when the files' metadata proves `constraint`; its one column exists and has its type."""
        if self._files is None:
            return None
        if isinstance(constraint, UniqueConstraint):
            holds = self._held <= 1
        elif isinstance(constraint, RowConstraint) and constraint.promise is not None:
            holds = self._all_keep(constraint.columns[0], constraint.promise)
        else:
            holds = False
        if not holds:
            return None
        proof = Proof(files=len(self._files), rows=self._held)
        return Outcome(passed=True, failing=0, total=self._total, proof=proof)

    @cached_property
    def _files(self) -> list[DataFile] | None:
        """The data files that may hold rows of the selection; None when that cannot be told here."""
        table, selection = self._stored.table, self._stored.selection
        row_filter: BooleanExpression = AlwaysTrue()
        try:
            if selection is not None:
                row_filter = to_iceberg(selection, table.schema())
            tasks = list(table.scan(row_filter=row_filter).plan_files())
        except Exception as error:  # noqa: BLE001 - what is wrong is said when the rows are read
            _log.info("Nothing is proved from metadata: %s: %s", type(error).__name__, error)
            return None
        self._deletes = any(task.delete_files for task in tasks)
        return [task.file for task in tasks] if len(tasks) <= MOST_FILES else None

    @cached_property
    def _held(self) -> int:
        """The rows of the files, deleted ones and those of other partitions included."""
        return sum(file.record_count for file in self._files or ())

    @cached_property
    def _total(self) -> int | None:
        """The rows of the selection; None when some of the files' may be deleted or of other partitions."""
        whole = all(self._within(index) for index in range(len(self._files or ())))
        return self._held if whole and not self._deletes else None

    def _all_keep(self, column: str, promise: Promise) -> bool:
        field = self._stored.table.schema().find_field(column)
        return all(proves(found, promise, field.field_type) for found in self._facts_on(field))

    def _facts_on(self, field: NestedField) -> list[Facts]:
        if field.field_id not in self._facts:
            specs = self._stored.table.specs()
            self._facts[field.field_id] = [
                facts(file, field, specs[file.spec_id]) for file in self._files or ()
            ]
        return self._facts[field.field_id]

    def _within(self, index: int) -> bool:
        """Whether all rows of a file are of the selection."""
        selection = self._stored.selection
        return selection is None or any(
            all(self._keeps(index, condition) for condition in part) for part in selection.slices
        )

    def _keeps(self, index: int, condition: Condition) -> bool:
        field = self._stored.table.schema().find_field(condition.column)
        found = self._facts_on(field)[index]
        return found.no_null and proves(found, _promise(condition), field.field_type)


def _promise(condition: Condition) -> Promise:
    if isinstance(condition, Values):
        return Among(condition.values)
    assert isinstance(condition, TimeRange | DateRange)  # noqa: S101 - there is no other
    return Both(Compared(">=", condition.start), Compared("<", condition.end))
