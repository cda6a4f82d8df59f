"""`main`, the branches of runs, and what publication does with them, as far as consumers depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.history.capture import ancestors_after
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.incremental.iceberg import Snapshot, Table
from branchlake_dagster_tests.incremental.writing import Writer

Tables = Mapping[str, Table]


@dataclass(frozen=True)
class Catalog:
    tables: Tables

    def load_table(self, identifier: tuple[str, ...]) -> Table:
        found = self.tables.get(identifier[-1])
        if found is None:
            raise NoSuchTableError(identifier[-1])
        return found


@dataclass(frozen=True)
class Change:
    """What one run did to a consumer's table: what it replaced (None: all there was), and what is new."""

    replaced: frozenset[Any] | None
    new: Mapping[Any, Any]
    appended: bool = False

    def on(self, kept: Mapping[Any, Any]) -> dict[Any, Any]:
        if self.appended:
            return {**kept, **{key: kept.get(key, ()) + value for key, value in self.new.items()}}
        gone = kept.keys() if self.replaced is None else self.replaced
        return {**{key: value for key, value in kept.items() if key not in gone}, **self.new}

    def meets(self, other: Change) -> bool:
        """Whether both cannot have happened beside each other."""
        if self.appended:
            return False
        if self.replaced is None or other.replaced is None:
            return True
        return bool(self.replaced & (other.replaced | other.new.keys()))


class Refused(Exception):  # noqa: N818 - named like the outcome
    """A run's changes and what was published meanwhile do not go together."""


@dataclass
class Lake:
    """`main` as a list of states; a state's number is its hash."""

    writer: Writer
    states: list[dict[str, Table]] = field(default_factory=lambda: [{}])
    changes: list[dict[str, Change]] = field(default_factory=lambda: [{}])
    """By state, what its publication did to consumers' tables."""
    parents: list[int] = field(default_factory=lambda: [-1])
    """By state the one before it in the history of `main`, which may have been set back in between."""
    same: dict[int, int] = field(default_factory=dict)
    """The states that `main` has come to again, by the state that stands for it since then."""

    @property
    def main(self) -> dict[str, Table]:
        return self.states[-1]

    def assign(self, state: int) -> None:
        """`main` is set to a state that it had, as Nessie's `assign` does."""
        self.states.append(self.states[state])
        self.changes.append(self.changes[state])
        self.parents.append(self.parents[state])
        self.same[len(self.states) - 1] = self.same.get(state, state)

    def holds(self, state: int) -> bool:
        """Whether a state is in the history of `main` as it is now."""
        now, wanted = len(self.states) - 1, self.same.get(state, state)
        while now >= 0:
            if self.same.get(now, now) == wanted:
                return True
            now = self.parents[now]
        return False

    def put(self, tables: Mapping[str, Table | None], changes: Mapping[str, Change] | None = None) -> None:
        """A commit on `main`; None drops a table."""
        now = {**self.main, **tables}
        self.states.append({name: table for name, table in now.items() if table is not None})
        self.changes.append(dict(changes or {}))
        self.parents.append(len(self.states) - 2)

    # -- what a LakehouseResource has ------------------------------------------------------------------

    run_branch = None
    """It is asked outside a run."""

    @property
    def lakehouse(self) -> Lake:
        return self

    def own_catalog(self) -> Catalog:
        return Catalog(self.main)

    def catalog(self, ref: str) -> Catalog:
        _, _, number = ref.partition("@")
        return Catalog(self.states[int(number)] if number else self.main)


@dataclass
class Run:
    """A run and its branch: `tables` are those that it changed."""

    lake: Lake
    run_id: str
    base: int
    tables: dict[str, Table] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)

    @property
    def view(self) -> Tables:
        return {**self.lake.states[self.base], **self.tables}

    # As a LakehouseResource.

    @property
    def lakehouse(self) -> Lake:
        return self.lake

    @property
    def run_branch(self) -> Any:
        place = SimpleNamespace(base_hash=str(self.base))
        return SimpleNamespace(run_id=self.run_id, open=lambda: place)

    def open_branch(self) -> str:
        return f"run-{self.run_id}"

    def own_catalog(self) -> Catalog:
        return Catalog(self.view)

    # -- its publication -------------------------------------------------------------------------------

    def publish(self) -> None:
        """All its tables in one commit. Raises Refused."""
        base, now = self.lake.states[self.base], self.lake.main
        if not self.lake.holds(self.base):
            raise Refused("main: it was set back to before the run began")
        found = {name: self._onto(name, base.get(name), now.get(name)) for name in self.tables}
        self.lake.put(found, self.changes)

    def _onto(self, name: str, base: Table | None, now: Table | None) -> Table:
        after = self.tables[name]
        if now is base:
            return after
        if now is None:
            raise Refused(f"{name} was dropped")
        if base is not None and base.metadata.table_uuid != now.metadata.table_uuid:
            raise Refused(f"{name} was dropped and created again")
        made = self._with_properties(name, base, after, now)
        if name in self.changes:
            since = [one[name] for one in self.lake.changes[self.base + 1 :] if name in one]
            if any(self.changes[name].meets(one) for one in since):
                raise Refused(f"{name}: the same rows were replaced meanwhile")
            head = base.metadata.current_snapshot_id if base else None
            if not ancestors_after(now.metadata, head)[1]:
                raise Refused(f"{name} was rolled back")
            kept = self.changes[name].on(now.kept)
            return self.lake.writer.store(made, kept, replayed=after.metadata.current_snapshot_id)
        steps, complete = ancestors_after(after.metadata, base.metadata.current_snapshot_id if base else None)
        if not complete:
            raise Refused(f"{name} was rolled back on the branch")
        for step in steps:
            self._require_apart(step, base, now)
            made = self.lake.writer.replay(made, step)
        return made

    def _require_apart(self, step: Snapshot, base: Table | None, now: Table) -> None:
        if step.summary.operation is Operation.APPEND:
            return
        theirs, complete = ancestors_after(now.metadata, base.metadata.current_snapshot_id if base else None)
        touched = {str(file.partition) for one in theirs for file in (*one.added, *one.removed)}
        mine = {str(file.partition) for file in (*step.added, *step.removed)}
        if not complete or mine & touched or any(file.names for file in step.added):
            raise Refused("both sides changed the same rows")

    @staticmethod
    def _with_properties(name: str, base: Table | None, after: Table, now: Table) -> Table:
        was = base.metadata.properties if base else {}
        sides = []
        for told in (after.metadata.properties, now.metadata.properties):
            new = {key: value for key, value in told.items() if was.get(key) != value}
            sides.append(new | dict.fromkeys(was.keys() - told.keys(), ""))
        mine, theirs = sides
        for key in mine.keys() & theirs.keys():
            if mine[key] != theirs[key] and key.startswith(LakeProperty.CONSUMED):
                raise Refused(f"{name}: another run of this consumer was published first")
        together = {**now.metadata.properties, **mine}
        return now.changed(properties={key: value for key, value in together.items() if value})
