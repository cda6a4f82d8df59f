"""Launching again what has failed of a backfill, and what its stages no longer know the change of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagster import AssetKey, DagsterInstance

from branchlake_dagster.automation.backfill_launch import launch_again
from branchlake_dagster.automation.backfill_progress import Partition, Progress
from branchlake_dagster.automation.consumers import consumers
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.internals.dagster import AssetGraph, backfill_of
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag


@dataclass(frozen=True)
class StageRetry:
    """Partitions of a stage to be launched again; `partitions` is (None,) for an asset without partitions.

    `rebuild`: their runs compute everything anew rather than consume what is left. `backfill` is the id of
    the Dagster backfill that computes them, None before it was requested.
    """

    number: int
    asset: AssetKey
    partitions: tuple[Partition, ...]
    rebuild: bool
    backfill: str | None = None


@dataclass(frozen=True)
class LostStage:
    """A stage whose change is no longer known, and why. It is only computed again as a rebuild.

    `partitions` are those that a rebuild has to compute; it is empty if a rebuild does not help.
    """

    number: int
    asset: AssetKey
    partitions: tuple[Partition, ...]
    why: str


@dataclass(frozen=True)
class RetryPlan:
    """What is launched again, stage by stage, and the stages that stay lost."""

    launches: tuple[StageRetry, ...] = ()
    lost: tuple[LostStage, ...] = ()


def plan_retry(
    found: Sequence[Progress],
    lost: Mapping[AssetKey, Sequence[Partition]],
    *,
    rebuild_lost: bool,
) -> RetryPlan:
    """Decide what to launch again of the stages of a backfill.

    Only what has failed is launched: what is done, under way or still to do is left alone, and what follows
    from a retried stage launches itself as it does after the first attempt. `lost` are the partitions that a
    rebuild has to compute, by asset; they are launched with `rebuild_lost`, and named otherwise. A lost
    stage that is not among them is being rebuilt.
    """
    launches: list[StageRetry] = []
    stays: list[LostStage] = []
    for one in found:
        number, asset = one.stage.number, one.stage.asset
        if one.failed_partitions:
            # The first stage computes its partitions anew, as its first attempt does.
            launches.append(StageRetry(number, asset, one.failed_partitions, rebuild=number == 0))
        if one.lost and asset in lost:
            partitions = tuple(lost[asset])
            if rebuild_lost and partitions:
                launches.append(StageRetry(number, asset, partitions, rebuild=True))
            else:
                stays.append(LostStage(number, asset, partitions, one.told))
    return RetryPlan(tuple(launches), tuple(stays))


def lost_partitions(
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    found: Sequence[Progress],
    requested: Mapping[AssetKey, set[Partition]],
) -> dict[AssetKey, list[Partition]]:
    """The partitions that a rebuild has to compute until the change of a lost stage is known again.

    `requested` are partitions that were launched again and are not computed yet. A stage of which nothing
    else has to be computed is left out; one that a rebuild does not help has no partitions.
    """
    lost: dict[AssetKey, list[Partition]] = {}
    for one in found:
        if not one.lost:
            continue
        asset = one.stage.asset
        (consumer,) = consumers(graph, lake.lakehouse.settings.default_namespace, [asset])
        try:
            consumption = Consumption(lake, consumer.consumer, rebuild=True, instance=instance)
            keys: list[Partition] = [None]
            if consumer.consumer.by_partition:
                keys = [*sorted(consumption.partitions_to_rebuild())]
        except BranchlakeError:  # an input without its column, say, which the stage's text names
            keys = []
        rest = [key for key in keys if key not in requested.get(asset, ())]
        if rest or not keys:
            lost[asset] = rest
    return lost


def launch_retry(
    graph: AssetGraph, instance: DagsterInstance, backfill_id: str, plan: RetryPlan, at: float
) -> tuple[StageRetry, ...]:
    """Request a Dagster backfill for each stage of the plan; returns the stages with their backfills."""
    first = backfill_of(instance, backfill_id, graph)
    approval = first is not None and RunTag.APPROVAL in first.tags
    done: list[StageRetry] = []
    for one in plan.launches:
        names = [name for name in one.partitions if name is not None]
        number = launch_again(
            graph,
            instance,
            one.asset,
            names or None,
            backfill_id=backfill_id,
            rebuild=one.rebuild,
            approval=approval,
            at=at,
        )
        done.append(StageRetry(one.number, one.asset, one.partitions, one.rebuild, number))
    return tuple(done)
