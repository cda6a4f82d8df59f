"""What a run does to a table, twice: to its files, and to the rows as anybody would expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from branchlake_dagster.publication.table_change import ChangeMode, DeleteFile, File, SnapshotChange
from branchlake_dagster_tests.simulation.tables import NOTE, Row, State, Warehouse, replacing


class Kind(StrEnum):
    """Kinds of changes."""

    APPEND = "append"
    REPLACE = "replace partition"
    CLEAR = "replace partition by nothing"
    UPSERT = "upsert"
    DELETE = "delete"
    REPLACE_TABLE = "replace table"
    COMPACT = "compact"
    ROW_DELETE = "delete, merge-on-read"
    DESCRIBE = "change metadata"


_MODES = {
    Kind.APPEND: ChangeMode.APPEND,
    Kind.REPLACE: ChangeMode.REPLACE_PARTITIONS,
    Kind.CLEAR: ChangeMode.REPLACE_PARTITIONS,
    Kind.UPSERT: ChangeMode.UPSERT,
    Kind.DELETE: ChangeMode.REWRITE,
    Kind.REPLACE_TABLE: ChangeMode.REPLACE_TABLE,
    Kind.COMPACT: ChangeMode.COMPACT,
    Kind.ROW_DELETE: ChangeMode.ROW_DELETES,
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
        if self.kind is Kind.DESCRIBE:
            return NOTE, "", self.token
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
            case Kind.CLEAR:
                return [row for row in rows if row[0] != self.part]
            case Kind.REPLACE_TABLE:
                return [*(row for row in rows if row[0] == NOTE), self.row]
            case Kind.DESCRIBE:
                return [*(row for row in rows if row[0] != NOTE), self.row]
            case Kind.UPSERT:
                return [*(row for row in rows if row[:2] != (self.part, self.key)), self.row]
            case Kind.DELETE:
                return [row for row in rows if row[:2] != (self.part, self.key)]
            case Kind.ROW_DELETE:
                return [row for row in rows if not self._dooms(row)]
        return list(rows)

    def _dooms(self, row: Row) -> bool:
        """Whether a delete file takes the row out: one key, or the partition for a key that nobody has."""
        return row[0] == self.part and self.key in (row[1], "u3")

    # -- what is written -------------------------------------------------------------------------------

    def on_files(self, state: State, warehouse: Warehouse, run_id: str) -> State | None:
        """The state after it, by rewriting the files it must; None when there is nothing to do."""
        if self.kind is Kind.DESCRIBE:
            # Only of a table that was there before all runs: two that create one would have to agree on it.
            old = state.steps and state.steps[0].run_id is None
            return replace(state, note=self.row) if old else None
        inside = [file for file in state.files if file.partition.startswith(f"part={self.part}/")]
        same = (self.part, self.key)
        hit = [file for file in inside if any(row[:2] == same for row in warehouse.rows_in(state, file))]
        removed: list[File] = []
        added: list[File] = []
        deletes: list[DeleteFile] = []
        match self.kind:
            case Kind.REPLACE | Kind.CLEAR | Kind.COMPACT:
                removed = inside
            case Kind.REPLACE_TABLE:
                removed = list(state.files)
            case Kind.UPSERT | Kind.DELETE:
                removed = hit
            case Kind.ROW_DELETE:
                doomed = [[r for r in warehouse.rows_in(state, one) if self._dooms(r)] for one in inside]
                deletes = [
                    warehouse.delete_file(one, rows) for one, rows in zip(inside, doomed, strict=True) if rows
                ]
        if self.kind in (Kind.UPSERT, Kind.DELETE, Kind.COMPACT):
            kept = [
                row
                for file in removed
                for row in warehouse.rows_in(state, file)
                if self.kind is Kind.COMPACT or row[:2] != same
            ]
            added = warehouse.data_files(kept)
        if self.kind in (Kind.APPEND, Kind.REPLACE, Kind.UPSERT, Kind.REPLACE_TABLE):
            added.append(warehouse.data_file([self.row]))
        if not removed and not added and not deletes and self.kind is not Kind.CLEAR:
            return None
        step = SnapshotChange(
            snapshot_id=warehouse.number(),
            mode=_MODES[self.kind],
            added=tuple(added),
            removed=tuple(removed),
            key_columns=("part", "key") if self.kind is Kind.UPSERT else (),
            run_id=run_id,
            deletes=tuple(deletes),
            recorded_predicate=replacing(self.part) if self.kind in (Kind.REPLACE, Kind.CLEAR) else None,
            partition_names=(self.part,),
        )
        return warehouse.stepped(state, step)
