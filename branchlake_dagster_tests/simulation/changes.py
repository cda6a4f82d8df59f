"""What a run does to a table, twice: to its files, and to the rows as anybody would expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from branchlake_dagster.publication.changes import File, Mode, Step
from branchlake_dagster_tests.simulation.tables import Row, State, Warehouse


class Kind(StrEnum):
    """Kinds of changes."""

    APPEND = "append"
    REPLACE = "replace partition"
    UPSERT = "upsert"
    DELETE = "delete"
    REPLACE_TABLE = "replace table"
    COMPACT = "compact"


_MODES = {
    Kind.APPEND: Mode.APPEND,
    Kind.REPLACE: Mode.REPLACE_PARTITIONS,
    Kind.UPSERT: Mode.UPSERT,
    Kind.DELETE: Mode.REWRITE,
    Kind.REPLACE_TABLE: Mode.REPLACE_TABLE,
    Kind.COMPACT: Mode.COMPACT,
}


@dataclass(frozen=True)
class Change:
    """One change to one table. `key` is what an upsert or a delete is about; `token` is unique."""

    id: str
    table: str
    kind: Kind
    part: str
    key: str
    token: str

    @property
    def row(self) -> Row:
        """The row it adds."""
        return self.part, self.key if self.kind is Kind.UPSERT else f"t-{self.token}", self.token

    def __str__(self) -> str:
        return f"{self.kind} {self.table}/{self.part}/{self.key} {self.token}"

    # -- what is expected ------------------------------------------------------------------------------

    def on_rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rows after it."""
        match self.kind:
            case Kind.APPEND:
                return [*rows, self.row]
            case Kind.REPLACE:
                return [*(row for row in rows if row[0] != self.part), self.row]
            case Kind.REPLACE_TABLE:
                return [self.row]
            case Kind.UPSERT:
                return [*(row for row in rows if row[:2] != (self.part, self.key)), self.row]
            case Kind.DELETE:
                return [row for row in rows if row[:2] != (self.part, self.key)]
        return list(rows)

    # -- what is written -------------------------------------------------------------------------------

    def on_files(self, state: State, warehouse: Warehouse, run_id: str) -> State | None:
        """The state after it, by rewriting the files it must; None when there is nothing to do."""
        inside = [file for file in state.files if file.partition == f"part={self.part}"]
        removed: list[File] = []
        added: list[File] = []
        if self.kind in (Kind.REPLACE, Kind.COMPACT):
            removed = inside
        elif self.kind is Kind.REPLACE_TABLE:
            removed = list(state.files)
        elif self.kind in (Kind.UPSERT, Kind.DELETE):
            same = (self.part, self.key)
            removed = [file for file in inside if any(row[:2] == same for row in warehouse.rows[file.path])]
        if self.kind in (Kind.UPSERT, Kind.DELETE, Kind.COMPACT):
            kept = [
                row
                for file in removed
                for row in warehouse.rows[file.path]
                if self.kind is Kind.COMPACT or row[:2] != (self.part, self.key)
            ]
            added = [warehouse.data_file(kept)] if kept else []
        if self.kind not in (Kind.DELETE, Kind.COMPACT):
            added.append(warehouse.data_file([self.row]))
        if not removed and not added:
            return None
        step = Step(
            snapshot_id=warehouse.number(),
            mode=_MODES[self.kind],
            added=tuple(added),
            removed=tuple(removed),
            keys=("part", "key") if self.kind is Kind.UPSERT else (),
            run_id=run_id,
        )
        return warehouse.stepped(state, step)
