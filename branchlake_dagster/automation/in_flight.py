"""Find the partitions that unfinished or unjudged runs compute. A second run would be refused."""

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
from branchlake_dagster.internals.dagster import (
    PARTITION_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    load_planned_assets,
)
from branchlake_dagster.publication.conditions import ABANDONED_AFTER
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
    """Return the partitions that a run computes: one partition, or all of a range.

    Returns (None,) for a run without partitions, and () for a range if one of its ends no longer exists.
    """
    start, end = run.tags.get(RANGE_START_TAG), run.tags.get(RANGE_END_TAG)
    if definition is None or start is None or end is None:
        return (run.tags.get(PARTITION_TAG),)
    with partition_loading_context(dynamic_partitions_store=instance):
        if not (definition.has_partition_key(start) and definition.has_partition_key(end)):
            return ()
        return (*definition.get_partition_keys_in_range(PartitionKeyRange(start, end)),)


class InFlightRuns:
    """The runs of a Dagster instance that are not finished or not judged at `now`."""

    def __init__(self, instance: DagsterInstance, now: datetime) -> None:
        verdict_filter = RunsFilter(tags={RunTag.VERDICT: PENDING}, updated_after=now - ABANDONED_AFTER)
        unfinished_runs = [
            *instance.get_runs(RunsFilter(statuses=_UNFINISHED)),
            *instance.get_runs(verdict_filter),
        ]
        self._instance = instance
        self._runs: Collection[DagsterRun] = {run.run_id: run for run in unfinished_runs}.values()
        self._assets_by_run: dict[str, Collection[AssetKey]] = {}

    def has_whole_run(self, key: AssetKey) -> bool:
        """Return whether a run computes the whole asset, or a range of its partitions."""
        return self.find_whole_run(key) is not None

    def single_partitions(self, key: AssetKey) -> set[str]:
        """Return the partitions of an asset that runs of one partition compute."""
        return {*self.runs_by_partition(key)}

    def find_whole_run(self, key: AssetKey) -> RunUnderWay | None:
        """Return a run that computes the whole asset or a range of its partitions, or None."""
        for run in self._runs:
            is_whole = PARTITION_TAG not in run.tags or RANGE_START_TAG in run.tags
            if is_whole and self._computes(run, key):
                return RunUnderWay(run.run_id, is_finished=run.is_finished)
        return None

    def runs_by_partition(self, key: AssetKey) -> dict[str, RunUnderWay]:
        """Return one run for each partition of an asset that a run of one partition computes."""
        return {
            run.tags[PARTITION_TAG]: RunUnderWay(run.run_id, is_finished=run.is_finished)
            for run in self._runs
            if PARTITION_TAG in run.tags and self._computes(run, key)
        }

    def partitions_in_flight(
        self, key: AssetKey, definition: PartitionsDefinition[str] | None
    ) -> set[str | None]:
        """Return all partitions of an asset that runs compute, ranges included.

        The set contains None if a run without partitions computes the asset.
        """
        return {
            partition
            for run in self._runs
            if self._computes(run, key)
            for partition in computed_partitions(run, definition, self._instance)
        }

    def _computes(self, run: DagsterRun, key: AssetKey) -> bool:
        if run.asset_selection:
            return key in run.asset_selection
        # A run without a selection computes all assets of its job. Its event log lists them from the start.
        if run.run_id not in self._assets_by_run:
            self._assets_by_run[run.run_id] = load_planned_assets(self._instance, run.run_id)
        return key in self._assets_by_run[run.run_id]
