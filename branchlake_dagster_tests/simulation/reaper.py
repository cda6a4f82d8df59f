"""The real reaper and sweeper on the simulation's Nessie, Dagster instance and heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from branchlake_dagster.cleanup.jobs import DagsterRuns
from branchlake_dagster.cleanup.reaper import Reaper
from branchlake_dagster.cleanup.reaper_rules import Limits
from branchlake_dagster.cleanup.sweeper import Sweeper
from branchlake_dagster.publication.ledger import MainLog
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster_tests.simulation.files import SimulatedTableFiles

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World

GRACE = timedelta(seconds=40)
"""For how long a discarded state waits for a retry: short, so that sweeps and retries meet."""

LIMITS = Limits(max_age=timedelta(hours=6), orphan_grace=timedelta(hours=1))


def reap(world: World, home: str) -> Iterator[str]:
    """One pass of a Dagster instance; what was decided on each branch."""
    reaper = Reaper(
        world.client(),
        DagsterRuns(cast(Any, world.instances[home])),
        LIMITS,
        heartbeats=world.hearts,
        now=world.clock.now,
        monotonic=world.clock.monotonic,
        sleep=world.network.sleep,
        is_on_main=lambda commit: MainLog().contains_commit(world.client(), commit),
        instance=home,
    )
    return map(str, reaper.run())


def sweep(world: World, home: str) -> Iterator[str]:
    """One pass of a Dagster instance; what became of each discarded state."""
    files = cast(TableFiles, SimulatedTableFiles(world.warehouse, world.swept))
    runs = DagsterRuns(cast(Any, world.instances[home]))
    sweeper = Sweeper(world.client(), files, runs.owners, grace=GRACE, now=world.clock.now, instance=home)
    return map(str, sweeper.run())
