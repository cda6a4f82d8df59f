"""What is being computed already: a second run of it would be refused."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    PartitionKeyRange,
    PartitionsDefinition,
    RunsFilter,
    partition_loading_context,
)

from branchlake_dagster.automation.launch_decision import RunUnderWay
from branchlake_dagster.internals.dagster import PARTITION_TAG, RANGE_END_TAG, RANGE_START_TAG, planned_assets
from branchlake_dagster.publication.conditions import FORGOTTEN_AFTER
from branchlake_dagster.runs.run_tags import PENDING
from branchlake_dagster.stored_names import RunTag

_UNFINISHED = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


def computed_partitions(
    run: DagsterRun, definition: PartitionsDefinition[str] | None, instance: DagsterInstance
) -> tuple[str | None, ...]:
    """The partitions that a run computes: one, or all of a range.

    (None,) stands for a run without partitions. A range is empty if one of its ends is no partition any more.
    """
    start, end = run.tags.get(RANGE_START_TAG), run.tags.get(RANGE_END_TAG)
    if definition is None or start is None or end is None:
        return (run.tags.get(PARTITION_TAG),)
    with partition_loading_context(dynamic_partitions_store=instance):
        if not (definition.has_partition_key(start) and definition.has_partition_key(end)):
            return ()
        return (*definition.get_partition_keys_in_range(PartitionKeyRange(start, end)),)


class InFlight:
    """The runs that are not finished or not judged, as they were at `now`."""

    def __init__(self, instance: DagsterInstance, now: datetime) -> None:
        waiting = RunsFilter(tags={RunTag.VERDICT: PENDING}, updated_after=now - FORGOTTEN_AFTER)
        found = [*instance.get_runs(RunsFilter(statuses=_UNFINISHED)), *instance.get_runs(waiting)]
        self._instance = instance
        self._runs: Collection[DagsterRun] = {run.run_id: run for run in found}.values()
        self._planned: dict[str, Collection[AssetKey]] = {}

    def whole(self, key: AssetKey) -> bool:
        """Whether a run computes an asset that has no partitions, or a range of its partitions."""
        return self.run_of_whole(key) is not None

    def partitions(self, key: AssetKey) -> set[str]:
        """The single partitions of an asset that runs compute."""
        return {*self.runs_by_partition(key)}

    def run_of_whole(self, key: AssetKey) -> RunUnderWay | None:
        """The run that computes an asset without partitions, or a range of an asset's partitions."""
        for run in self._runs:
            whole = PARTITION_TAG not in run.tags or RANGE_START_TAG in run.tags
            if whole and self._computes(run, key):
                return RunUnderWay(run.run_id, finished=run.is_finished)
        return None

    def runs_by_partition(self, key: AssetKey) -> dict[str, RunUnderWay]:
        """The runs that compute single partitions of an asset, by partition; one of each."""
        return {
            run.tags[PARTITION_TAG]: RunUnderWay(run.run_id, finished=run.is_finished)
            for run in self._runs
            if PARTITION_TAG in run.tags and self._computes(run, key)
        }

    def computed(self, key: AssetKey, definition: PartitionsDefinition[str] | None) -> set[str | None]:
        """The partitions of an asset that runs compute, with those of ranges; None for runs without any."""
        return {
            partition
            for run in self._runs
            if self._computes(run, key)
            for partition in computed_partitions(run, definition, self._instance)
        }

    def _computes(self, run: DagsterRun, key: AssetKey) -> bool:
        if run.asset_selection:
            return key in run.asset_selection
        # All of a job: what that is stands in its log, from its creation on.
        if run.run_id not in self._planned:
            self._planned[run.run_id] = planned_assets(self._instance, run.run_id)
        return key in self._planned[run.run_id]
