"""The runs of a schedule: what each one is going to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from uuid import UUID

from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster_tests.simulation.changes import Change, Kind
from branchlake_dagster_tests.simulation.tables import Row

TABLES = ("a", "b", "c")
NAMESPACE = ContentKey(["lake"])

_KINDS = (
    *[Kind.APPEND] * 8,
    *[Kind.REPLACE] * 4,
    *[Kind.CLEAR] * 2,
    *[Kind.UPSERT] * 4,
    Kind.DELETE,
    Kind.ROW_DELETE,
    Kind.COMPACT,
    Kind.REPLACE_TABLE,
    Kind.DESCRIBE,
)
_PHYSICAL = (
    *[Kind.APPEND] * 2,
    *[Kind.COMPACT] * 4,
    *[Kind.ROW_DELETE] * 3,
    *[Kind.UPSERT] * 2,
    Kind.DELETE,
    Kind.CLEAR,
)
"""A lake with maintenance: the same rows in other files, and rows taken out without touching those."""


HERE, THERE = "here", "there"
"""Two Dagster instances on one lake, each with publishers and reapers of its own."""


class End(StrEnum):
    """How the process of a run ends."""

    SUCCESS = "succeeds"
    FAILURE = "fails"
    DEATH = "dies"


@dataclass
class Plan:
    """What a run is going to do, and what it has seen of itself."""

    run_id: str
    changes: list[Change]
    reads: tuple[str, ...] | None = None
    """The tables a serializable run reads; None: isolation snapshot."""
    passes: bool = True
    """Whether its checks pass."""
    skips_checks: bool = False
    """Whether it re-executes selected steps of its parent, and the steps of the checks are not among them."""
    whole: bool = False
    """Whether its checks see all rows of its tables."""
    end: End = End.SUCCESS
    late: Change | None = None
    """Written by a process that was taken for dead, after the run's end."""
    publishes_itself: bool = False
    paused: tuple[int, float] | None = None
    """Before which of its changes the process stands still, heart and all, and for how many seconds."""
    restores: str | None = None
    """A table of which it first gives an earlier state another name, and appends to that."""
    forgotten: bool = False
    """A foreign run that ours had made: its record was deleted while it works on."""
    home: str = HERE
    """The Dagster instance that runs it."""
    foreign: bool = False
    """Of another Dagster instance, without heartbeats: ours does not know it."""
    parent: str | None = None
    """The run that it executes again."""
    sick: int = 0
    """How often looking at it breaks, by an error that nobody has declared."""
    retries: bool = False
    """Only what failed of its parent, on its parent's branch; otherwise all of it, from the start."""
    seen: dict[str, list[Row]] = field(default_factory=dict)
    """The rows of each table it read, at its base."""
    written: list[str] = field(default_factory=list)
    """The ids of the changes that it knows to be on its branch."""
    recorded_heads: set[str] = field(default_factory=set)
    """The hashes of its branch that it recorded after its writes."""
    heads: set[str] = field(default_factory=set)
    """The hashes of its branch that a publisher wanted to publish."""
    fenced: str | None = None
    """How it lost its branch, when it should not have."""

    def __str__(self) -> str:
        told = [f"{self.run_id} {self.end}:", "; ".join(map(str, self.changes))]
        if self.reads is not None:
            told.append(f"| reads {', '.join(self.reads)}")
        if self.late:
            told.append(f"| late {self.late}")
        if self.parent:
            told.append(f"| {'retries' if self.retries else 're-executes'} {self.parent}")
        if self.sick:
            told.append(f"| breaks whoever looks at it {self.sick} times")
        if self.paused:
            told.append(f"| stands still for {self.paused[1]:g} s before change {self.paused[0]}")
        if self.restores:
            told.append(f"| restores {self.restores}")
        flags = {
            f"runs {self.home}": self.home != HERE,
            "foreign": self.foreign,
            "forgotten": self.forgotten,
            "blocked": not self.passes,
            "skips checks": self.skips_checks,
            "whole": self.whole,
            "publishes itself": self.publishes_itself,
        }
        return " ".join([*told, *(f"| {name}" for name, is_set in flags.items() if is_set)])


@dataclass(frozen=True)
class Mood:
    """What the runs of one schedule have in common: how many read, fail, and check whole tables; what they do.

    Rare things meet each other only where they are frequent.
    """

    strict: float
    trouble: float
    whole: float
    kinds: tuple[Kind, ...]

    @classmethod
    def draw(cls, random: Random) -> Mood:
        """A mood by chance."""
        return cls(
            strict=random.choice((0.0, 0.1, 0.2, 0.9)),
            trouble=random.choice((0.0, 1.0, 1.0, 2.0)),
            whole=random.choice((0.0, 0.0, 0.2, 0.6)),
            kinds=random.choice((_KINDS, _KINDS, _KINDS, _PHYSICAL)),
        )


def unchecked_tables(plans: Sequence[Plan]) -> set[str]:
    """The tables that a run which skips checks is the last to change, of runs on one branch, oldest first."""
    last = {change.table: plan.skips_checks for plan in plans for change in plan.changes}
    return {table for table, skips_checks in last.items() if skips_checks}


def table_key(name: str) -> ContentKey:
    """Where a table of the simulation lives."""
    return ContentKey([*NAMESPACE, name])


def draw(random: Random, mood: Mood, earlier: dict[str, Plan]) -> Plan:
    """One more run by chance."""
    run_id = str(UUID(int=len(earlier), version=4))
    count = 1 if random.random() < 0.6 else random.randint(1, len(TABLES))
    chosen = random.sample(TABLES, k=count)
    changes = [_change(random, mood, run_id, i, table) for i, table in enumerate(chosen)]
    if random.random() < 0.15:
        changes.append(_change(random, mood, run_id, len(changes), chosen[0]))
    luck = (1 - random.random()) / mood.trouble if mood.trouble else 1.0
    plan = Plan(
        run_id,
        changes,
        reads=tuple(random.sample(TABLES, k=1)) if random.random() < mood.strict else None,
        passes=random.random() >= 0.1 * mood.trouble,
        whole=random.random() < mood.whole,
        end=End.DEATH if luck < 0.08 else End.FAILURE if luck < 0.15 else End.SUCCESS,
        late=_change(random, mood, run_id, 9, chosen[-1]) if random.random() < 0.15 * mood.trouble else None,
        publishes_itself=random.random() < 0.1,
        sick=random.randint(1, 2) if random.random() < 0.04 * mood.trouble else 0,
    )
    if random.random() < 0.1 * mood.trouble:
        plan.paused = random.randrange(len(changes)), random.choice((20.0, 120.0))
    if random.random() < 0.08 * mood.trouble:
        plan.foreign, plan.end, plan.late, plan.publishes_itself = True, End.FAILURE, None, False
        plan.changes += [_change(random, mood, run_id, 5 + i, chosen[0]) for i in range(2)]
        plan.paused = 1, 2 * 3600.0
        plan.forgotten = random.random() < 0.6
        return plan
    if not plan.passes and plan.end is End.SUCCESS and random.random() < 0.7:
        # Only such as nobody publishes or retries: what they restored is discarded and swept.
        plan.restores, plan.late, plan.publishes_itself = random.choice(TABLES), None, False
        return plan
    ended_badly = [one.run_id for one in earlier.values() if one.end is not End.SUCCESS and not one.foreign]
    if ended_badly and random.random() < 0.6:
        plan.parent, plan.retries = random.choice(ended_badly), random.random() < 0.7
        plan.skips_checks = plan.retries and random.random() < 0.3
    return plan


def _change(random: Random, mood: Mood, run_id: str, number: int, table: str) -> Change:
    part = random.choice(("p1", "p2", "p3"))
    key = random.choice(("u1", "u2", "u3"))
    name = f"{run_id}.{number}"
    return Change(name, table, random.choice(mood.kinds), part, key, name)
