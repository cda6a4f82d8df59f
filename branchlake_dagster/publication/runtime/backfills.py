"""Backfills whose runs were not published must not read as successes.

Dagster counts a partition of an asset backfill as done once a run of the backfill has materialised it. When
it has closed the backfill, what was not published is put where it belongs: among what failed, so that
"re-execute from failure" takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from dagster import DagsterInstance, RunsFilter

from branchlake_dagster.branching.branch.run_tags import STATUS_TAG, Status
from branchlake_dagster.branching.fencing.taken_back import materialised, newest_run
from branchlake_dagster.internals.dagster import (
    BACKFILL_ID_TAG,
    AssetGraph,
    PartitionBackfill,
    fail_backfill,
    succeeded_backfills,
)
from branchlake_dagster.publication.reconcile.trouble import said
from branchlake_dagster.wording import agree, counted

_EVERY = timedelta(seconds=30)
_LONGEST = timedelta(days=14)
_NEWEST = 20
_UNPUBLISHED = [
    str(one)
    for one in (
        Status.BLOCKED,
        Status.REFUSED,
        Status.FAILED,
        Status.CANCELED,
        Status.INTERRUPTED,
        Status.DISCARDED,
    )
]


class BackfillWatch:
    """Looks at the newest closed backfills, every 30 s: each is read whole. `now` is the wall clock."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._looked = datetime.min.replace(tzinfo=UTC)

    def look(self, instance: DagsterInstance, graph: AssetGraph) -> Iterator[str]:
        """A sentence for each backfill that is shown as failed from now on."""
        if self._now() - self._looked < _EVERY:
            return
        self._looked = self._now()
        for backfill in succeeded_backfills(instance, after=self._looked - _LONGEST, limit=_NEWEST):
            try:
                told = _fail_unpublished(instance, graph, backfill)
            except Exception as error:  # noqa: BLE001 - it concerns this backfill, not the publications
                told = f"Backfill {backfill.backfill_id} could not be looked at: {said(error)}"
            if told:
                yield told


def _fail_unpublished(
    instance: DagsterInstance, graph: AssetGraph, backfill: PartitionBackfill
) -> str | None:
    """None: all that the backfill has materialised is published."""
    wanted = {BACKFILL_ID_TAG: backfill.backfill_id, STATUS_TAG: _UNPUBLISHED}
    runs = instance.get_runs(RunsFilter(tags=wanted))
    missing = {
        (key, partition)
        for run in runs
        for key, partition, _ in materialised(instance, run.run_id)
        if graph.has(key) and newest_run(instance, key, partition) == run.run_id
    }
    if not missing:
        return None
    fail_backfill(instance, backfill, graph, missing)
    parts = f"{counted(len(missing), 'partition')} of it {agree(len(missing), 'is', 'are')}"
    return f"Backfill {backfill.backfill_id}: {parts} not on main, so it is shown as failed."
