"""Playing schedules by their seeds."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from branchlake_dagster_tests.simulation.faults import Fault
from branchlake_dagster_tests.simulation.invariants import Violated, check
from branchlake_dagster_tests.simulation.world import World


@dataclass(frozen=True)
class Played:
    """One schedule. `failure` tells what is wrong with the whole story; None: nothing.

    `seen` counts what happened in it: a schedule in which nothing happens proves nothing.
    """

    seed: int
    failure: str | None = None
    seen: Counter[str] = field(default_factory=Counter)


def play(seed: int) -> Played:
    """One schedule, from its start to the check of its invariants."""
    world = World(seed)
    failure = None
    try:
        world.play()
        check(world)
    except Exception as error:  # noqa: BLE001 - whatever escapes is a finding
        where = "" if isinstance(error, Violated) else "".join(traceback.format_exception(error)[-3:])
        failure = f"{world.story()}\n{where}{type(error).__name__}: {error}"
    return Played(seed, failure, Counter(_happened(world)))


def failures(seeds: Iterable[int]) -> Iterator[Played]:
    """The schedules of these seeds that violate an invariant."""
    return (played for played in map(play, seeds) if played.failure)


def _happened(world: World) -> Iterator[str]:
    for _, what, how in world.network.trace:
        if how.startswith(_FAULTS):
            yield next(fault for fault in _FAULTS if how.startswith(fault))
        if what == "outcome":
            action = how.split(": ", 1)[-1].split(",")[0]
            yield action if action in _ACTIONS else "other outcome"
            if "rebased" in how:
                yield "rebased"
        elif what == "swept" and ": swept" in how:
            yield "swept"
            if " files" in how:
                yield "files swept"
        elif what in BY_OTHERS:
            yield what
        elif what == "pass failed" and "database is locked" in how:
            yield "database is locked"
        elif what.startswith(("late: ", "late write failed")):
            yield what.split(": ")[0]
    for commit in world.server.history.commits.values():
        if " from runs " in commit.message:
            yield "group commit"
    for plan in world.plans.values():
        if plan.retries and world.at(plan.run_id).knows(plan.run_id):
            yield "retry"


BY_OTHERS = (
    "merged by hand",
    "set main back",
    "a stranger appended",
    "a stranger set a branch back",
    "a stranger deleted a branch",
    "Nessie was restored",
    "a file was lost",
    "a publisher stands still",
)
_FAULTS = tuple(fault.value for fault in Fault if fault is not Fault.NONE)
_ACTIONS = (
    "published",
    "refused",
    "blocked",
    "discarded",
    "checking",
    "waiting",
    "try again",
    "deleted",
    "kept",
)
