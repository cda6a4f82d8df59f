"""What is being computed already: a second run of it would be refused."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from dagster import AssetKey, DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from branchlake_dagster.branching.branch.run_tags import PENDING, VERDICT_TAG
from branchlake_dagster.library_internals.dagster import PARTITION_TAG, RANGE_START_TAG, planned_assets
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
        self._instance = instance
        self._runs: Collection[DagsterRun] = {run.run_id: run for run in found}.values()
        self._planned: dict[str, Collection[AssetKey]] = {}

    def whole(self, key: AssetKey) -> bool:
        """Whether a run computes an asset that has no partitions, or a range of its partitions."""
        return any(
            PARTITION_TAG not in run.tags or RANGE_START_TAG in run.tags
            for run in self._runs
            if self._computes(run, key)
        )

    def partitions(self, key: AssetKey) -> set[str]:
        """The single partitions of an asset that runs compute."""
        return {
            run.tags[PARTITION_TAG]
            for run in self._runs
            if PARTITION_TAG in run.tags and self._computes(run, key)
        }

    def _computes(self, run: DagsterRun, key: AssetKey) -> bool:
        if run.asset_selection:
            return key in run.asset_selection
        # All of a job: what that is stands in its log, from its creation on.
        if run.run_id not in self._planned:
            self._planned[run.run_id] = planned_assets(self._instance, run.run_id)
        return key in self._planned[run.run_id]
