"""Which runs are launched, drawn by the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from branchlake_dagster_tests.lossy.project import BROKEN, KIND, PARTITIONS, SPOILT

TABLES: Mapping[str, tuple[str, ...]] = {
    "append": ("shared", "beside"),
    "inside": ("shared", "beside"),
    "replace": ("parts",),
    "watch": ("watched",),
    "strict": ("strict",),
    "count": ("counted",),
}
"""The tables that a run of each job writes."""

_WEIGHTS = {"append": 28, "inside": 17, "replace": 20, "watch": 8, "strict": 8, "count": 9}
_BAD = {"spoilt": 5, "broken": 5}
_BAD_TAGS = {"spoilt": SPOILT, "broken": BROKEN}
REFUSABLE = frozenset({"replace", "strict"})
"""Kinds that may overlap with others; all others never stand in each other's way."""


@dataclass(frozen=True)
class Planned:
    """A run to launch. `kind` is its job, or why it is not to be published."""

    kind: str
    job: str
    tags: Mapping[str, str] = field(default_factory=dict)


def plan(seed: int, count: int) -> Iterator[Planned]:
    """`count` runs; each kind once before chance decides, as far as `count` goes."""
    chance = random.Random(f"plan {seed}")
    weights = {**_WEIGHTS, **_BAD}
    first = ["watch", *(kind for kind in weights if kind != "watch")]
    rest = chance.choices(list(weights), list(weights.values()), k=max(0, count - len(first)))
    for kind in (*first, *rest)[:count]:
        # One that publishes itself may be spoilt or broken too.
        job = chance.choice(("append", "inside")) if kind in _BAD else kind
        tags = {KIND: kind}
        if kind in _BAD:
            tags[_BAD_TAGS[kind]] = "true"
        if job == "replace":
            tags["dagster/partition"] = chance.choice(PARTITIONS)
        yield Planned(kind, job, tags)
