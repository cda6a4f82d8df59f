"""Launch the failed partitions of a backfill again, and rebuild stages whose change is no longer known.

Launch the first stage of a backfill through Dagster's daemon. The later stages launch themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.automation.backfill_progress import Partition, StageProgress
from branchlake_dagster.automation.backlog import iter_consumers
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.internals.dagster import AssetGraph, add_asset_backfill, load_backfill
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import APPROVAL_REQUIRED
from branchlake_dagster.stored_names import RunTag


def launch_backfill(
    graph: AssetGraph,
    instance: DagsterInstance,
    root: AssetKey,
    partitions: Sequence[str] | None,
    *,
    reason: str,
    base_hash: str,
    approval: bool = False,
    requested_at: float,
) -> str:
    """Request a Dagster backfill of `root` and return its id.

    Its runs compute their partitions again from all rows, whatever was consumed for them before. `base_hash`
    is the hash of `main` now. With `approval`, each stage waits until the results of the stage before it are
    approved. `requested_at` is a POSIX time in seconds.
    """
    return add_asset_backfill(
        graph,
        instance,
        root,
        partitions,
        tags={RunTag.REBUILD: "true", RunTag.BACKFILL: reason[:200], RunTag.BACKFILL_BASE: base_hash}
        | ({RunTag.APPROVAL: APPROVAL_REQUIRED} if approval else {}),
        title=f"Backfill of {root.to_user_string()}",
        description=reason,
        requested_at=requested_at,
    )


def launch_again(
    graph: AssetGraph,
    instance: DagsterInstance,
    asset: AssetKey,
    partitions: Sequence[str] | None,
    *,
    backfill_id: str,
    rebuild: bool,
    approval: bool = False,
    requested_at: float,
) -> str:
    """Request a new Dagster backfill for partitions of a stage of backfill `backfill_id`; return its own id.

    Its runs consume the remaining changes. With `rebuild`, they compute their partitions again from all rows.
    With `approval`, the later stages wait until their results are approved. `requested_at` is a POSIX time in
    seconds.
    """
    reason = f"Retry of backfill {backfill_id}"
    return add_asset_backfill(
        graph,
        instance,
        asset,
        partitions,
        tags={RunTag.RETRY_OF: backfill_id, RunTag.BACKFILL: reason}
        | ({RunTag.REBUILD: "true"} if rebuild else {})
        | ({RunTag.APPROVAL: APPROVAL_REQUIRED, RunTag.FOLLOWS: backfill_id} if approval else {}),
        title=f"{reason}: {asset.to_user_string()}",
        description=reason,
        requested_at=requested_at,
    )


@dataclass(frozen=True)
class StageRetry:
    """Partitions of a stage to launch again; `partitions` is (None,) for an asset without partitions.

    With `rebuild`, their runs compute the partitions again from all rows instead of consuming the remaining
    changes. `backfill_id` is the id of the new Dagster backfill, None before it is requested.
    """

    number: int
    asset: AssetKey
    partitions: tuple[Partition, ...]
    rebuild: bool
    backfill_id: str | None = None


@dataclass(frozen=True)
class LostStage:
    """A stage whose change is no longer known, with the reason. Only a rebuild can compute it again.

    `partitions` are the partitions that a rebuild has to compute; empty if a rebuild does not help.
    """

    number: int
    asset: AssetKey
    partitions: tuple[Partition, ...]
    reason: str


@dataclass(frozen=True)
class RetryPlan:
    """The partitions to launch again, stage by stage, and the stages that stay lost."""

    launches: tuple[StageRetry, ...] = ()
    lost_stages: tuple[LostStage, ...] = ()


def plan_retry(
    stage_progress: Sequence[StageProgress],
    partitions_to_rebuild: Mapping[AssetKey, Sequence[Partition]],
    *,
    rebuild_lost: bool,
) -> RetryPlan:
    """Decide which partitions of a backfill to launch again.

    Only failed partitions are launched. Stages after a retried stage launch themselves, as after the first
    attempt. `partitions_to_rebuild` maps an asset to the partitions that a rebuild has to compute. With
    `rebuild_lost` they are launched, otherwise they become `lost_stages`. A lost stage that is not among them
    is being rebuilt already.
    """
    launches: list[StageRetry] = []
    lost_stages: list[LostStage] = []
    for progress in stage_progress:
        number, asset = progress.stage.number, progress.stage.asset
        if progress.failed_partitions:
            # The first stage computes its partitions from all rows, as in its first attempt.
            launches.append(StageRetry(number, asset, progress.failed_partitions, rebuild=number == 0))
        if progress.lost_count and asset in partitions_to_rebuild:
            partitions = tuple(partitions_to_rebuild[asset])
            if rebuild_lost and partitions:
                launches.append(StageRetry(number, asset, partitions, rebuild=True))
            else:
                lost_stages.append(LostStage(number, asset, partitions, progress.message))
    return RetryPlan(tuple(launches), tuple(lost_stages))


def find_lost_partitions(
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    stage_progress: Sequence[StageProgress],
    requested_by_asset: Mapping[AssetKey, set[Partition]],
) -> dict[AssetKey, list[Partition]]:
    """Return the partitions that a rebuild has to compute, for each asset whose change is no longer known.

    `requested_by_asset` has the partitions that were launched again and are not computed yet. An asset is
    omitted if no other partition has to be computed. Its list is empty if a rebuild does not help.
    """
    lost_by_asset: dict[AssetKey, list[Partition]] = {}
    for progress in stage_progress:
        if not progress.lost_count:
            continue
        asset = progress.stage.asset
        (consumer,) = iter_consumers(graph, lake.lakehouse.settings.default_namespace, [asset])
        try:
            consumption = Consumption(lake, consumer.consumer, rebuild=True, instance=instance)
            partition_keys: list[Partition] = [None]
            if consumer.consumer.tracks_partitions:
                partition_keys = [*sorted(consumption.partitions_to_rebuild())]
        except BranchlakeError:  # for example a missing input column, which the stage's message names
            partition_keys = []
        missing_keys = [key for key in partition_keys if key not in requested_by_asset.get(asset, ())]
        if missing_keys or not partition_keys:
            lost_by_asset[asset] = missing_keys
    return lost_by_asset


def launch_retry(
    graph: AssetGraph, instance: DagsterInstance, backfill_id: str, plan: RetryPlan, requested_at: float
) -> tuple[StageRetry, ...]:
    """Request a Dagster backfill for each stage of the plan; return the stages with their backfill ids."""
    original = load_backfill(instance, backfill_id, graph)
    approval = original is not None and RunTag.APPROVAL in original.tags
    launched_stages: list[StageRetry] = []
    for stage_retry in plan.launches:
        partition_keys = [name for name in stage_retry.partitions if name is not None]
        retry_id = launch_again(
            graph,
            instance,
            stage_retry.asset,
            partition_keys or None,
            backfill_id=backfill_id,
            rebuild=stage_retry.rebuild,
            approval=approval,
            requested_at=requested_at,
        )
        launched_stages.append(
            StageRetry(
                stage_retry.number, stage_retry.asset, stage_retry.partitions, stage_retry.rebuild, retry_id
            )
        )
    return tuple(launched_stages)
