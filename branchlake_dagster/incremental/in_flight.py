"""What is being computed already: a second run of it would be refused."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from dagster import AssetKey, DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.branching.branch.run_tags import PENDING, VERDICT_TAG
from branchlake_dagster.library_internals.dagster import PARTITION_TAG, RANGE_START_TAG
from branchlake_dagster.publication.automation.conditions import FORGOTTEN_AFTER

_UNFINISHED = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


class InFlight:
    """The runs that are not finished or not judged, as they were at `now`."""

    def __init__(self, instance: DagsterInstance, now: datetime) -> None:
        waiting = RunsFilter(tags={VERDICT_TAG: PENDING}, updated_after=now - FORGOTTEN_AFTER)
        found = [*instance.get_runs(RunsFilter(statuses=_UNFINISHED)), *instance.get_runs(waiting)]
        self._runs: Collection[DagsterRun] = {run.run_id: run for run in found}.values()

    def whole(self, key: AssetKey) -> bool:
        """Whether a run computes an asset that has no partitions, or a range of its partitions."""
        return any(
            PARTITION_TAG not in run.tags or RANGE_START_TAG in run.tags
            for run in self._runs
            if _selects(run, key)
        )

    def partitions(self, key: AssetKey) -> set[str]:
        """The single partitions of an asset that runs compute."""
        return {
            run.tags[PARTITION_TAG] for run in self._runs if _selects(run, key) and PARTITION_TAG in run.tags
        }


def _selects(run: DagsterRun, key: AssetKey) -> bool:
    return not run.asset_selection or key in run.asset_selection
