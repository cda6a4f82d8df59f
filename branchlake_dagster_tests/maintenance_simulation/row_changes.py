"""What a commit does to the rows of a table: as Iceberg files, and as anybody would expect."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pyiceberg.exceptions import TableAlreadyExistsError
from pyiceberg.expressions import EqualTo

from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables import upserts
from branchlake_dagster.tables.replaced_rows import ReplacedRows, StringSet, to_json
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster_tests.publication.workbench import Run, frame

Row = tuple[str, int]
"""(day, id). The tables are partitioned by day."""
Rows = tuple[Row, ...]
TableRows = Mapping[str, Rows]
"""The rows of the tables that exist, by name, sorted."""
DAYS = ("a", "b")


class NeedsSpark(Exception):  # noqa: N818 - it is the outcome of a plan
    """Only Spark can write this upsert, for example into a table with delete files."""


class ChangeKind(StrEnum):
    """Kinds of changes. The last four are made by other writers than runs."""

    CREATE = "create"
    APPEND = "append"
    REPLACE = "replace partition"
    UPSERT = "upsert"
    DELETE = "delete partition"
    REPLACE_TABLE = "replace table"
    DELETE_POSITIONS = "delete by position"
    DROP = "drop"
    RESTORE = "restore"
    NOTHING = "no rows"


RUN_KINDS = (
    ChangeKind.APPEND,
    ChangeKind.APPEND,
    ChangeKind.APPEND,
    ChangeKind.REPLACE,
    ChangeKind.UPSERT,
    ChangeKind.UPSERT,
    ChangeKind.DELETE,
    ChangeKind.REPLACE_TABLE,
)


@dataclass(frozen=True)
class RowChange:
    """One change of one table. `day` is the partition that is replaced or deleted."""

    table: str
    kind: ChangeKind
    rows: Rows = ()
    day: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.table}/{self.day} {list(self.rows)}"

    def apply(self, tables: TableRows) -> TableRows:
        """Return the rows of all tables after the change."""
        rows = tables.get(self.table)
        if self.kind is ChangeKind.DROP:
            return {name: kept for name, kept in tables.items() if name != self.table}
        if self.kind is ChangeKind.RESTORE:
            return {**tables, self.table: tuple(sorted(self.rows))}
        if self.kind is ChangeKind.CREATE:
            return {self.table: (), **tables}
        if rows is None:
            return tables
        return {**tables, self.table: tuple(sorted(self._apply_to_rows(rows)))}

    def _apply_to_rows(self, rows: Rows) -> Sequence[Row]:
        match self.kind:
            case ChangeKind.APPEND:
                return (*rows, *self.rows)
            case ChangeKind.REPLACE:
                return (*(row for row in rows if row[0] != self.day), *self.rows)
            case ChangeKind.DELETE:
                return [row for row in rows if row[0] != self.day]
            case ChangeKind.UPSERT:
                keys = {row[1] for row in self.rows}
                return (*(row for row in rows if row[1] not in keys), *self.rows)
            case ChangeKind.REPLACE_TABLE:
                return self.rows
            case ChangeKind.DELETE_POSITIONS:
                kept = list(rows)
                for row in self.rows:
                    if row in kept:
                        kept.remove(row)
                return kept
        return rows

    def write(self, run: Run) -> None:
        """Write the change to the run's branch, as the IO manager does."""
        match self.kind:
            case ChangeKind.CREATE:
                try:
                    run.create(self.table)
                except TableAlreadyExistsError:
                    return
            case ChangeKind.APPEND:
                run.append(self.rows, self.table)
            case ChangeKind.REPLACE:
                self._replace_day(run)
            case ChangeKind.UPSERT:
                self._upsert(run)
            case ChangeKind.DELETE:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it may match nothing
                    properties = run.properties(None)
                    run.table(self.table).delete(EqualTo("day", self.day), snapshot_properties=properties)
            case ChangeKind.REPLACE_TABLE:
                run.replace_table(self.rows, self.table)
            case _:
                raise NotImplementedError(self.kind)

    def _upsert(self, run: Run) -> None:
        properties = run.properties("upsert", "id")
        spec = TableSpec(identifier=(run.bench.namespace, self.table), write_mode="upsert", keys=("id",))
        plan = upserts.plan_upsert(frame(self.rows), run.table(self.table), spec, None)
        if not isinstance(plan, upserts.UpsertPlan):
            raise NeedsSpark(plan)
        upserts.write_upsert(plan, properties)

    def _replace_day(self, run: Run) -> None:
        """Replace a partition, with its name and its predicate in the snapshot's summary."""
        table = run.table(self.table)
        day_id = table.schema().find_field("day").field_id
        predicate = ReplacedRows(((StringSet(day_id, frozenset({self.day})),),))
        properties = run.properties("replace_partitions")
        properties |= {LakeProperty.PARTITION: self.day, LakeProperty.REPLACED: to_json(predicate)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table.overwrite(
                frame(self.rows), overwrite_filter=EqualTo("day", self.day), snapshot_properties=properties
            )
