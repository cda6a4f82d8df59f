"""How far a backfill has come, stage by stage: what is published, what is under way, what is still to do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dagster import DagsterInstance

from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.errors import BranchlakeError, ConfigurationError
from branchlake_dagster.incremental.backfill.plan import Stage, plan
from branchlake_dagster.incremental.backlog import Standing
from branchlake_dagster.incremental.consumers import consumers
from branchlake_dagster.incremental.in_flight import InFlight
from branchlake_dagster.library_internals.dagster import AssetGraph, BackfillState, backfill_of
from branchlake_dagster.wording import counted


@dataclass(frozen=True)
class Progress:
    """A stage and what has become of it. Counts are of partitions; of an asset without any they are 0 or 1.

    `left` have something to consume and no run; `told` is the whole of it in words.
    """

    stage: Stage
    planned: int
    done: int
    running: int
    left: int
    failed: int
    told: str


def progress(
    graph: AssetGraph, lake: LakehouseResource, instance: DagsterInstance, backfill_id: str, now: datetime
) -> list[Progress]:
    """Each stage of a backfill that was launched. Raises ConfigurationError for an id that nobody knows."""
    state = backfill_of(instance, backfill_id, graph)
    if state is None:
        raise ConfigurationError(
            f"There is no asset backfill {backfill_id} in this Dagster instance.",
            hint="Its page lists them: Overview, Backfills.",
        )
    stages = plan(graph, lake.lakehouse, state.key, state.partitions, why=state.why, instance=instance)
    in_flight = InFlight(instance, now)
    found = [_first(stages[0], state)]
    for stage in stages[1:]:
        waits = any(one.running or one.left for one in found if one.stage.number < stage.number)
        found.append(_follower(stage, graph, lake, instance, in_flight, waits=waits))
    return found


def _first(stage: Stage, state: BackfillState) -> Progress:
    """The stage that Dagster's own backfill computes, as it counts: materialised, and not taken back."""
    planned = len(state.partitions) if state.partitions is not None else 1
    done, failed = len(state.done), len(state.failed)
    if state.partitions is None:
        done, failed = int(state.status == "completed_success"), int(state.status == "completed_failed")
    under_way = state.status in ("requested", "canceling")
    rest = max(0, planned - done - failed)
    told = f"{state.status.replace('_', ' ')}: {done} of {counted(planned, 'partition')}"
    return Progress(stage, planned, done, rest if under_way else 0, 0, failed, told)


def _follower(
    stage: Stage,
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    in_flight: InFlight,
    *,
    waits: bool,
) -> Progress:
    """A stage that launches itself: done is what has nothing left to consume, once those before it are."""
    planned = len(stage.partitions) if stage.partitions is not None else 1
    if not stage.by_itself:
        return Progress(stage, planned, 0, 0, 0, 0, stage.why)
    try:
        pending = _pending(stage, graph, lake, instance)
    except BranchlakeError as error:
        return Progress(stage, planned, 0, 0, planned, 0, str(error))
    if stage.partitions is None:
        running = int(in_flight.whole(stage.asset))
    else:
        running = len(in_flight.partitions(stage.asset) & set(stage.partitions))
    left = max(0, pending - running)
    done = 0 if waits else max(0, planned - pending)
    told = "waits for the stage before it" if waits and not pending else _told(done, running, left, planned)
    return Progress(stage, planned, done, running, left, 0, told)


def _pending(stage: Stage, graph: AssetGraph, lake: LakehouseResource, instance: DagsterInstance) -> int:
    (asset,) = consumers(graph, lake.lakehouse.settings.default_namespace, [stage.asset])
    standing = Standing(lake, asset.consumer, instance=instance)
    if stage.partitions is None:
        return int(standing.unconsumed.any)
    return len(set(standing.partitions) & set(stage.partitions))


def _told(done: int, running: int, left: int, planned: int) -> str:
    if not running and not left:
        return "done"
    return f"{done} of {planned} done, {running} running, {left} to do"
