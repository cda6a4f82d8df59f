"""The real reaper on the simulation's Nessie, Dagster instance and heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from branchlake_dagster.branching.reaper import Reaper
from branchlake_dagster.branching.reaping_rules import Limits
from branchlake_dagster.publication.reaping import DagsterRuns

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World

LIMITS = Limits(max_age=timedelta(hours=6), orphan_grace=timedelta(hours=1))


def reap(world: World) -> Iterator[str]:
    """One pass; what was decided on each branch."""
    reaper = Reaper(
        world.client(),
        DagsterRuns(cast(Any, world.instance)),
        LIMITS,
        heartbeats=world.hearts,
        now=world.clock.now,
        monotonic=world.clock.monotonic,
        sleep=world.network.sleep,
    )
    return map(str, reaper.run())
