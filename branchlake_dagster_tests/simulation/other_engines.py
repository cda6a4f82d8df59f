"""Somebody who changes run branches that are not theirs, a Nessie that is restored, and a disk that loses files."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from branchlake_dagster.nessie.errors import NessieError
from branchlake_dagster.nessie.model import IcebergTable, Namespace, Operation, Put
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.simulation.changes import Change, Kind
from branchlake_dagster_tests.simulation.runs import NAMESPACE, TABLES, table_key
from branchlake_dagster_tests.simulation.tables import State, table_content

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World


@dataclass
class Stranger:
    """One act at some time of a schedule. `touched` are the runs whose branches it changed."""

    random: Random
    touched: set[str] = field(default_factory=set)
    restored_branches: set[str] = field(default_factory=set)
    """The branches that the copy brought back."""

    def act(self, world: World) -> None:
        """Once."""
        acts: list[Callable[[World], None]] = [
            self._append,
            self._set_back,
            self._delete,
            self._restore,
            self._lose_file,
        ]
        act = self.random.choice(acts)
        for _ in range(self.random.randint(0, 12)):
            world.network.sleep(1.0)
        act(world)

    def _wait(self, world: World, happened: Callable[[], bool]) -> None:
        for _ in range(20):
            if happened():
                return
            world.network.sleep(1.0)

    def _choose(self, world: World) -> str | None:
        """A run of ours that has a branch."""
        references = world.server.history.references
        runs = [
            one.run_id
            for one in world.plans.values()
            if not one.foreign and run_branch_name(one.run_id) in references
        ]
        chosen = self.random.choice(runs) if runs else None
        if chosen is not None:
            self.touched.add(chosen)
        return chosen

    def _append(self, world: World) -> None:
        run_id, client = self._choose(world), world.direct()
        if run_id is None:
            return
        change = Change(
            "stranger", self.random.choice(TABLES), Kind.APPEND, "p1", "u1", f"stranger in {run_id}"
        )
        key = table_key(change.table)
        seen = client.contents_at(run_branch_name(run_id), [key, NAMESPACE])
        content, warehouse = seen.contents.get(key), world.warehouse
        before = warehouse.state(content) if isinstance(content, IcebergTable) else State()
        after = change.on_files(before, warehouse, "")
        assert after is not None
        content_id = content.content_id if content else None
        operations: list[Operation] = [Put(key, table_content(content_id, warehouse.store(after), after))]
        if NAMESPACE not in seen.contents:
            operations.insert(0, Put(NAMESPACE, Namespace(None, NAMESPACE.elements)))
        at = seen.reference.hash
        try:
            client.commit(
                run_branch_name(run_id), expected_hash=at, operations=operations, message="a stranger's"
            )
        except NessieError as error:
            world.network.note("a stranger could not append", str(error))
        world.network.note("a stranger appended", run_id)

    def _set_back(self, world: World) -> None:
        run_id = self._choose(world)
        if run_id is None or not world.at(run_id).knows(run_id):
            return
        base = world.at(run_id).look(run_id).tags.get(RunTag.BASE_HASH)
        if base:
            world.server.history.references[run_branch_name(run_id)].hash = base
            world.network.note("a stranger set a branch back", run_id)

    def _delete(self, world: World) -> None:
        run_id = self._choose(world)
        if run_id is not None:
            del world.server.history.references[run_branch_name(run_id)]
            world.network.note("a stranger deleted a branch", run_id)

    def _restore(self, world: World) -> None:
        """All references are as they were some seconds ago."""
        history = world.server.history
        # A copy that is taken while runs wait, and restored after a publication, is the one that matters.
        self._wait(
            world, lambda: any(run_branch_name(run_id) in history.references for run_id in world.plans)
        )
        older = {name: copy(pointer) for name, pointer in history.references.items()}
        self._wait(world, lambda: history.references["main"].hash != older["main"].hash)
        # As an operator does: Dagster's services are stopped before Nessie is.
        self._wait(world, lambda: not world.passes_at_work)
        if world.passes_at_work:
            return
        held = {commit.hash for commit in history.first_parents(older["main"].hash)}
        world.hands.undone |= {
            commit.hash for commit in history.first_parents(history.references["main"].hash)
        } - held
        self.touched |= world.plans.keys()
        self.restored_branches |= older.keys()
        history.references.clear()
        history.references |= older
        world.network.note("Nessie was restored")

    def _lose_file(self, world: World) -> None:
        """A file of a run's own tables is gone, as after a power cut."""
        self._wait(world, lambda: not world.passes_at_work)
        # A merge that is under way was decided when the file could be read.
        if world.passes_at_work or world.network.is_busy:
            return
        run_id, warehouse = self._choose(world), world.warehouse
        if run_id is None:
            return
        elsewhere = {
            file
            for name, pointer in world.server.history.references.items()
            for commit in world.server.history.first_parents(pointer.hash)
            if name != run_branch_name(run_id)
            for file in self._needed(world, commit.hash)
        }
        own = sorted(self._needed(world, run_branch_name(run_id)) - elsewhere - warehouse.deleted)
        if own:
            warehouse.deleted.add(self.random.choice(own))
            world.network.note("a file was lost", run_id)

    def _needed(self, world: World, at: str) -> set[str]:
        """The files of all tables at a branch or commit."""
        ref = at if at in world.server.history.references else f"@{at}"
        found = world.direct().contents(ref, [table_key(name) for name in TABLES])
        return {
            file
            for content in found.values()
            if isinstance(content, IcebergTable)
            for file in world.warehouse.needed(content.metadata_location)
        }
