"""Somebody with Nessie's own tools: merges a run's branch into `main`, or sets `main` back."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from branchlake_dagster.nessie.errors import NessieConflict
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.simulation.history import Pointer

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World

_TABLES_AND_FIRST = 2
"""The first commits of `main`, which nobody takes back."""


@dataclass
class Hands:
    """What was done by hand. `merged`: commits on `main` with the run and the hash they took."""

    random: Random
    merged: dict[str, tuple[str, str]] = field(default_factory=dict)
    undone: set[str] = field(default_factory=set)
    """Commits that `main` had and has no more."""

    def meddle(self, world: World) -> None:
        """Once or twice, some time."""
        for _ in range(self.random.randint(1, 2)):
            for _ in range(self.random.randint(0, 12)):
                world.network.sleep(1.0)
            if self.random.random() < 0.5:
                self._merge(world)
            else:
                self._set_back(world)

    def _merge(self, world: World) -> None:
        history = world.server.history
        line = {commit.hash for commit in history.first_parents(history.references["main"].hash)}
        ended = [
            plan.run_id
            for plan in world.plans.values()
            if not plan.foreign
            and run_branch_name(plan.run_id) in history.references
            and world.at(plan.run_id).knows(plan.run_id)
            and world.at(plan.run_id).look(plan.run_id).is_success
            # Else it would bring back what was set back, which is what the person then wants.
            and world.at(plan.run_id).look(plan.run_id).tags.get(RunTag.BASE_HASH) in line
        ]
        if not ended:
            return
        run_id, client = self.random.choice(ended), world.direct()
        head = client.reference(run_branch_name(run_id)).hash
        try:
            done = client.merge(
                from_name=run_branch_name(run_id),
                from_hash=head,
                into="main",
                expected_hash=client.reference("main").hash,
                message="merged by hand",
            )
        except NessieConflict as conflict:
            world.network.note("could not merge by hand", str(conflict))
            return
        if done.applied:
            world.network.note("merged by hand", run_id)
            self.merged[done.target_hash] = run_id, head

    def _set_back(self, world: World) -> None:
        history = world.server.history
        for _ in range(20):
            world.network.sleep(1.0)
            line = [commit.hash for commit in history.first_parents(history.references["main"].hash)]
            choices = line[1 : len(line) - _TABLES_AND_FIRST + 1][:3]
            bases = self._bases(world, line)
            # To before the commit that a run started from is the one that matters.
            if any(base < len(choices) for base in bases):
                break
        if not choices:
            return
        to = self.random.choice(choices)
        self.undone |= set(line[: line.index(to)])
        history.references["main"] = Pointer("BRANCH", to)
        world.network.note("set main back", f"to {to[:8]}, {line.index(to)} commits")

    def _bases(self, world: World, line: list[str]) -> set[int]:
        """How many commits of `main` are newer than those that the run branches started from."""
        history = world.server.history
        found = set()
        for name, pointer in history.references.items():
            if name != "main":
                commits = (commit.hash for commit in history.first_parents(pointer.hash))
                found |= {line.index(one) for one in islice((c for c in commits if c in line), 1)}
        return found
