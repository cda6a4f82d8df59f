"""Playing histories by their seeds."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dagster import partition_loading_context

from branchlake_dagster_tests.incremental.world import Violated, World

_NOW = datetime(2026, 2, 1, tzinfo=UTC)
"""Later than all partitions of the model."""


@dataclass(frozen=True)
class Played:
    """One history. `failure` tells what is wrong with the whole story; None: nothing."""

    seed: int
    failure: str | None = None
    seen: Counter[str] = field(default_factory=Counter)


def play(seed: int) -> Played:
    """One history, from its start until every consumer has caught up."""
    world, failure = World(seed), None
    try:
        # At one time, so that Dagster computes first and last partition once and not for each question.
        with partition_loading_context(effective_dt=_NOW):
            world.play()
    except Exception as error:  # noqa: BLE001 - whatever escapes is a finding
        where = "" if isinstance(error, Violated) else "".join(traceback.format_exception(error)[-4:])
        failure = f"seed {seed}\n{world.story()}\n{where}{type(error).__name__}: {error}"
    return Played(seed, failure, world.seen)


def failures(seeds: Iterable[int]) -> Iterator[Played]:
    """The histories of these seeds in which something is wrong."""
    return (played for played in map(play, seeds) if played.failure)
