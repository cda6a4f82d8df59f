"""Which partitions of which assets stand on a run's branch, from the materialisations Dagster recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

from dagster import AssetKey, DagsterEventType, DagsterInstance, DagsterRun

from branchlake_dagster.branching.claims import workers
from branchlake_dagster.branching.run_tags import BRANCH_TAG

Written = Mapping[AssetKey, Set[str | None]]
"""Partition keys by asset; None stands for an asset without partitions."""


def written_on(instance: DagsterInstance, branch: str) -> Written:
    """What a branch carries: by the run that opened it and by its retries.

    Empty for the branch of a run that this instance does not know: another Dagster may write to the lake.
    """
    return _written_by(instance, workers(instance, branch))


def written_with(instance: DagsterInstance, run: DagsterRun) -> Written:
    """What the branch of this run carries."""
    branch = run.tags.get(BRANCH_TAG)
    # Most runs retry nothing; looking for their family would cost several queries each.
    return written_on(instance, branch) if run.parent_run_id and branch else _written_by(instance, [run])


def _written_by(instance: DagsterInstance, runs: Iterable[DagsterRun]) -> Written:
    found: dict[AssetKey, set[str | None]] = defaultdict(set)
    for run in runs:
        wrote = instance.event_log_storage.get_asset_partitions_for_run(
            run.run_id, DagsterEventType.ASSET_MATERIALIZATION
        )
        for key, partitions in wrote.items():
            found[key] |= partitions
    return found
