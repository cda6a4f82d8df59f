"""Which partitions of which assets stand on a run's branch, from the materialisations Dagster recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from itertools import islice

from dagster import AssetKey, DagsterEventType, DagsterInstance, DagsterRun, RunsFilter

from branchlake_dagster.runs.branch_owner import runs_on
from branchlake_dagster.runs.run_branch import run_id_of
from branchlake_dagster.runs.run_tags import place_of

_CHUNK = 500
"""Values in one query; SQLite takes at most 999."""

Written = Mapping[AssetKey, Set[str | None]]
"""Partition keys by asset; None stands for an asset without partitions."""


def written_on(instance: DagsterInstance, branch: str) -> Written:
    """What a branch carries: by the run that opened it and by its retries.

    Empty for the branch of a run that this instance does not know: another Dagster may write to the lake.
    """
    return _written_by(instance, runs_on(instance, branch))


def written_with(instance: DagsterInstance, run: DagsterRun) -> Written:
    """What the branch of this run carries."""
    continuing = _continuing(run)
    return written_on(instance, continuing) if continuing else _written_by(instance, [run])


def brought_by(
    instance: DagsterInstance, branches: Iterable[str], key: AssetKey
) -> Mapping[str, Set[str | None]]:
    """Which partitions of `key` each of these branches carries; those that carry none are left out.

    A query per 500 branches, and one more for each run that may have written the asset.
    """
    found: dict[str, Set[str | None]] = {}
    names = {run_id_of(branch): branch for branch in branches}
    rest = iter(names)
    while part := list(islice(rest, _CHUNK)):
        for run in instance.get_runs(filters=RunsFilter(run_ids=part)):
            # A run of a whole job has no selection, a retry less than what its branch carries.
            may_have = not run.asset_selection or key in run.asset_selection or _continuing(run)
            if may_have and (written := written_with(instance, run).get(key)):
                found[names[run.run_id]] = written
    return found


def _continuing(run: DagsterRun) -> str | None:
    """The branch of a run that took over another's work; None for most runs, which need no search."""
    place = place_of(run.tags, run.run_id)
    return place.branch if place and place.continues else None


def _written_by(instance: DagsterInstance, runs: Iterable[DagsterRun]) -> Written:
    found: dict[AssetKey, set[str | None]] = defaultdict(set)
    for run in runs:
        wrote = instance.event_log_storage.get_asset_partitions_for_run(
            run.run_id, DagsterEventType.ASSET_MATERIALIZATION
        )
        for key, partitions in wrote.items():
            found[key] |= partitions
    return found
