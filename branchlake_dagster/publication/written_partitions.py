"""The asset partitions on a run's branch, from the materializations that Dagster recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from itertools import islice

from dagster import AssetKey, DagsterEventType, DagsterInstance, DagsterRun, RunsFilter

from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import find_run_location

_CHUNK = 500
"""Values in one query; SQLite takes at most 999."""

PartitionsByAsset = Mapping[AssetKey, Set[str | None]]
"""Partition keys by asset; None stands for an asset without partitions."""


def load_branch_partitions(instance: DagsterInstance, branch: str) -> PartitionsByAsset:
    """Load the partitions on a branch, written by the run that opened it and by its retries.

    The result is empty if this instance does not have the run: another Dagster may write to the lake.
    """
    return _load_partitions(instance, load_runs_on_branch(instance, branch))


def load_run_partitions(instance: DagsterInstance, run: DagsterRun) -> PartitionsByAsset:
    """Load the partitions on the branch of this run."""
    branch_name = _continued_branch(run)
    return load_branch_partitions(instance, branch_name) if branch_name else _load_partitions(instance, [run])


def load_asset_partitions(
    instance: DagsterInstance, branches: Iterable[str], key: AssetKey
) -> Mapping[str, Set[str | None]]:
    """Load the partitions of asset `key` on each branch. Branches without any are left out.

    Costs a query per 500 branches, and one for each run that may have written the asset.
    """
    partition_keys: dict[str, Set[str | None]] = {}
    branches_by_run = {run_id_of_branch(branch): branch for branch in branches}
    run_ids = iter(branches_by_run)
    while chunk := list(islice(run_ids, _CHUNK)):
        for run in instance.get_runs(filters=RunsFilter(run_ids=chunk)):
            # A run of a whole job has no selection. The selection of a retry is smaller than its branch.
            may_have = not run.asset_selection or key in run.asset_selection or _continued_branch(run)
            if may_have and (run_partitions := load_run_partitions(instance, run).get(key)):
                partition_keys[branches_by_run[run.run_id]] = run_partitions
    return partition_keys


def _continued_branch(run: DagsterRun) -> str | None:
    """Return the branch that a retry took over from another run; None for most runs, without a search."""
    run_location = find_run_location(run.tags, run.run_id)
    return run_location.branch if run_location and run_location.continues else None


def _load_partitions(instance: DagsterInstance, runs: Iterable[DagsterRun]) -> PartitionsByAsset:
    partition_keys: dict[AssetKey, set[str | None]] = defaultdict(set)
    for run in runs:
        run_partitions = instance.event_log_storage.get_asset_partitions_for_run(
            run.run_id, DagsterEventType.ASSET_MATERIALIZATION
        )
        for key, partitions in run_partitions.items():
            partition_keys[key] |= partitions
    return partition_keys
