"""What each commit of `main` must have done to the rows, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.maintenance_simulation.players import CHANGE_PROPERTY, Players
from branchlake_dagster_tests.maintenance_simulation.row_changes import ChangeKind, RowChange, TableRows
from branchlake_dagster_tests.maintenance_simulation.stored_states import table_locations
from branchlake_dagster_tests.maintenance_simulation.world import NAMESPACE, World
from branchlake_dagster_tests.simulation.history import Commit


@dataclass(frozen=True)
class Effect:
    """What one commit did to the rows. `run_id` names the publication; empty if others made it."""

    run_id: str
    changes: tuple[RowChange, ...]


class MainHistory:
    """Compares the rows of `main` after each commit with those of a history without undone publications."""

    def __init__(self, world: World, players: Players) -> None:
        self._world = world
        self._players = players
        self._checked_commits: set[str] = set()
        history = world.server.history
        head = history.commits[history.references["main"].hash]
        self._first = head.hash
        self._first_rows = self._read_rows(head)

    def check(self) -> None:
        """Require that each new commit of `main` has the expected rows."""
        history = self._world.server.history
        commits = list(history.first_parents(history.references["main"].hash))[::-1]
        first = next(number for number, commit in enumerate(commits) if commit.hash == self._first)
        effects: list[Effect] = []
        undone: set[str] = set()
        for commit in commits[first + 1 :]:
            effects += self._effects_of(commit, effects)
            undone |= set(filter(None, commit.properties.get(LakeProperty.UNDONE_RUNS, "").split(",")))
            if commit.hash not in self._checked_commits:
                self._checked_commits.add(commit.hash)
                self._check_commit(commit, effects, undone)

    def _effects_of(self, commit: Commit, earlier: Sequence[Effect]) -> list[Effect]:
        properties = commit.properties
        if LakeProperty.PUBLICATION_ID in properties:
            run_ids = properties[LakeProperty.RUN_ID].split(",")
            published = {effect.run_id for effect in earlier}
            for run_id in run_ids:
                self._world.require(run_id not in published, f"run {run_id} was published twice")
            works = self._players.works
            return [Effect(run_id, tuple(works[run_id].done_changes)) for run_id in run_ids]
        if CHANGE_PROPERTY in properties:
            return [Effect("", (self._players.other_changes[properties[CHANGE_PROPERTY]],))]
        if commit.message.startswith("Restore the table "):
            name = commit.message.rpartition(".")[2]
            location = table_locations(commit.contents)[NAMESPACE, name]
            rows = self._world.states.rows(location)
            return [Effect("", (RowChange(name, ChangeKind.RESTORE, rows),))]
        if commit.message.startswith("Drop the table "):
            name = commit.message.split(" ")[3].rstrip(",").rpartition(".")[2]
            return [Effect("", (RowChange(name, ChangeKind.DROP),))]
        return []

    def _check_commit(self, commit: Commit, effects: Sequence[Effect], undone: set[str]) -> None:
        changes = [change for effect in effects if effect.run_id not in undone for change in effect.changes]
        start: TableRows = self._first_rows
        expected = reduce(lambda tables, change: change.apply(tables), changes, start)
        actual = self._read_rows(commit)
        for name in sorted({*expected, *actual}):
            # A table that several runs created stays without rows when all of them are undone one by one.
            if (actual.get(name) or ()) != (expected.get(name) or ()):
                self._world.require(
                    False,
                    f"after {commit.message!r} ({commit.hash[:8]}), {name} has {actual.get(name)}"
                    f" instead of {expected.get(name)}",
                )

    def _read_rows(self, commit: Commit) -> TableRows:
        return {
            key[-1]: self._world.states.rows(location)
            for key, location in table_locations(commit.contents).items()
            if key[0] == NAMESPACE
        }
