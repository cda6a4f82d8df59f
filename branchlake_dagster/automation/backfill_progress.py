"""Report the progress of a backfill, stage by stage: done, running, remaining, failed and lost partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from dagster import AssetKey, DagsterInstance, RunsFilter

from branchlake_dagster.automation.backfill_plan import Stage, plan_stages
from branchlake_dagster.automation.backlog import ConsumerBacklog, iter_consumers
from branchlake_dagster.automation.launch_decision import Attempt, LaunchOutcome, format_approval
from branchlake_dagster.automation.partition_backlog import (
    InFlightRuns,
    computed_partitions,
    iter_histories,
    to_attempt,
)
from branchlake_dagster.errors import BranchlakeError, ConfigurationError
from branchlake_dagster.internals.dagster import (
    AssetGraph,
    BackfillState,
    load_backfill,
    load_tagged_backfills,
)
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.wording import format_count

_SHOWN_RUNS = 3
"""The largest number of failed runs in a message."""
_UNDER_WAY = ("requested", "canceling")
"""The states of a backfill that may still create runs."""
_BROKEN = ("failed", "failing")
"""The states of a backfill that Dagster itself could not continue."""

Partition = str | None
"""A partition key; None means an asset without partitions."""


@dataclass(frozen=True)
class StageProgress:
    """The progress of a stage in partitions. For an asset without partitions each count is 0 or 1.

    `left_count` partitions have something to consume and no run that computes or has failed to compute it.
    `failed_count` partitions had a run for their present change, and it was not published;
    `failed_partitions` lists them. For `lost_count` partitions the remaining work is unknown, because their
    change is no longer known. `held_partitions` are those remaining partitions whose change waits for
    approval under `approval_ids`. `message` describes the progress for people.
    """

    stage: Stage
    planned_count: int
    done_count: int
    running_count: int
    left_count: int
    failed_count: int
    message: str
    lost_count: int = 0
    failed_partitions: tuple[Partition, ...] = ()
    held_partitions: tuple[Partition, ...] = ()
    approval_ids: tuple[str, ...] = ()


def load_stage_progress(
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    backfill_id: str,
    now: datetime,
    *,
    retries: Mapping[AssetKey, int] | None = None,
) -> list[StageProgress]:
    """Return the progress of each stage of a launched backfill. Runs of its retries count, too.

    `retries` maps an asset to the number of times its sensor retries a failed run; the default is 0. Raises
    ConfigurationError for an id that Dagster does not know.
    """
    state = require_backfill(instance, graph, backfill_id)
    retry_backfills = load_tagged_backfills(instance, graph, {RunTag.RETRY_OF: backfill_id})
    stages = plan_stages(
        graph, lake.lakehouse, state.key, state.partitions, reason=state.why, instance=instance
    )
    in_flight = InFlightRuns(instance, now)
    stage_progress = [
        _root_progress(stages[0], [state, *(retry for retry in retry_backfills if retry.key == state.key)])
    ]
    for stage in stages[1:]:
        must_wait = any(
            earlier.running_count or earlier.left_count or earlier.failed_count or earlier.lost_count
            for earlier in stage_progress
            if earlier.stage.number < stage.number
        )
        states = [retry for retry in retry_backfills if retry.key == stage.asset]
        stage_progress.append(
            load_consumer_progress(
                stage,
                graph,
                lake,
                instance,
                in_flight,
                must_wait=must_wait,
                requested_keys=requested_partitions(states),
                newest_retries=_load_newest_retries(instance, graph, backfill_id, stage.asset)
                if states
                else {},
                retries=(retries or {}).get(stage.asset, 0),
            )
        )
    return stage_progress


def require_backfill(instance: DagsterInstance, graph: AssetGraph, backfill_id: str) -> BackfillState:
    """Return the state of an asset backfill. Raises ConfigurationError if Dagster has none with this id."""
    state = load_backfill(instance, backfill_id, graph)
    if state is None:
        raise ConfigurationError(
            f"There is no asset backfill {backfill_id} in this Dagster instance.",
            hint="Dagster's page lists all backfills under Runs, Backfills.",
            reason="unknown_backfill",
            subject=backfill_id,
        )
    return state


def partition_states(states: Iterable[BackfillState]) -> dict[Partition, str]:
    """Return the state of each partition in backfills of one asset: done, failed, running or canceled.

    `states` are sorted, oldest first. The newest backfill of a partition counts, unless it was canceled
    before it reached the partition.
    """
    state_by_partition: dict[Partition, str] = {}
    for state in states:
        done_partitions: Collection[Partition] = state.done
        failed_partitions: Collection[Partition] = state.failed
        if state.partitions is None:
            done_partitions = [None] if state.status == "completed_success" else []
            failed_partitions = [None] if state.status == "completed_failed" else []
        for partition in state.partitions if state.partitions is not None else (None,):
            if partition in done_partitions or partition in failed_partitions:
                state_by_partition[partition] = (
                    "done"
                    if partition in done_partitions and partition not in failed_partitions
                    else "failed"
                )
            elif state.status in _UNDER_WAY:
                state_by_partition[partition] = "running"
            elif state.status in _BROKEN:
                state_by_partition[partition] = "failed"
            else:
                state_by_partition.setdefault(partition, "canceled")
    return state_by_partition


def requested_partitions(states: Iterable[BackfillState]) -> set[Partition]:
    """Return the partitions that Dagster backfills of one asset are still computing.

    `states` are the states of these backfills, oldest first. The result contains None for an asset without
    partitions.
    """
    return {partition for partition, state in partition_states(states).items() if state == "running"}


def _root_progress(stage: Stage, states: Sequence[BackfillState]) -> StageProgress:
    """Return the progress of the first stage, as Dagster's backfills `states` count it, oldest first.

    A partition is done if it was materialized and the materialization was not revoked.
    """
    state_by_partition = partition_states(states)
    planned_count = len(states[0].partitions) if states[0].partitions is not None else 1
    failed_partitions = tuple(
        partition for partition, state in state_by_partition.items() if state == "failed"
    )
    done_count, running_count = (
        sum(state == word for state in state_by_partition.values()) for word in ("done", "running")
    )
    status = states[-1].status.replace("_", " ")
    message = f"{status}: {done_count} of {format_count(planned_count, 'partition')}"
    return StageProgress(
        stage,
        planned_count,
        done_count,
        running_count,
        0,
        len(failed_partitions),
        message,
        failed_partitions=failed_partitions,
    )


def load_consumer_progress(
    stage: Stage,
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    in_flight: InFlightRuns,
    *,
    must_wait: bool,
    requested_keys: Collection[Partition] = (),
    newest_retries: Mapping[Partition, Attempt] | None = None,
    retries: int = 0,
) -> StageProgress:
    """Return the progress of a stage that consumes changes.

    For a stage that does not launch itself, all counts but `planned_count` are 0. A partition is done if it
    has nothing left to consume and all earlier stages are done. `must_wait` is True if an earlier stage is
    not done yet. `requested_keys` are partitions that were launched again and may not have a run yet;
    `newest_retries` has the newest retry run of each partition that has one. `retries` is the number of times
    that the sensor retries a failed run.
    """
    planned_count = len(stage.partitions) if stage.partitions is not None else 1
    if not stage.launches_itself:
        return StageProgress(stage, planned_count, 0, 0, 0, 0, stage.reason)
    (asset,) = iter_consumers(graph, lake.lakehouse.settings.default_namespace, [stage.asset])
    backlog = ConsumerBacklog(lake, asset.consumer, instance=instance, per_run=asset.per_run)
    try:
        pending_partitions = _pending_partitions(stage, backlog)
        launch_keys = {partition: backlog.launch_key(partition) for partition in pending_partitions}
        ids_by_partition = backlog.held_partitions([*pending_partitions], Approvals(instance))
    except TableMissing as error:
        return StageProgress(stage, planned_count, 0, 0, planned_count, 0, str(error))
    except BranchlakeError as error:
        return StageProgress(stage, planned_count, 0, 0, 0, 0, f"lost: {error}", lost_count=planned_count)
    running_partitions: set[Partition]
    if stage.partitions is None:
        running_partitions = (
            {*pending_partitions} if in_flight.has_whole_run(stage.asset) or None in requested_keys else set()
        )
    else:
        busy_partitions = {
            *in_flight.partitions_in_flight(stage.asset, asset.consumer.definition),
            *requested_keys,
        }
        running_partitions = {partition for partition in busy_partitions if partition in stage.partitions}
    waiting_keys = {
        partition: key for partition, key in launch_keys.items() if partition not in running_partitions
    }
    failed_attempts = _find_failed_attempts(instance, waiting_keys, retries, newest_retries or {})
    # A person may have launched a partition that waits for approval, and that run may have failed.
    ids_by_partition = {
        partition: names
        for partition, names in ids_by_partition.items()
        if partition not in running_partitions and partition not in failed_attempts
    }
    left_count = len(waiting_keys) - len(failed_attempts)
    done_count = 0 if must_wait else max(0, planned_count - len(pending_partitions | running_partitions))
    message = _format_counts(done_count, len(running_partitions), left_count, planned_count)
    if must_wait and not pending_partitions:
        message = "waits for the stage before it"
    if failed_attempts:
        message = f"{message}, {len(failed_attempts)} failed: {_format_reasons(failed_attempts.values())}"
    approval_ids = tuple(sorted({name for names in ids_by_partition.values() for name in names}))
    if ids_by_partition:
        held_count = len(ids_by_partition)
        approval = format_approval(approval_ids, plural=held_count > 1)
        message = f"{message}; {format_count(held_count, 'partition')} {approval}"
    return StageProgress(
        stage,
        planned_count,
        done_count,
        len(running_partitions),
        left_count,
        len(failed_attempts),
        message,
        failed_partitions=_sort_partitions(failed_attempts),
        held_partitions=_sort_partitions(ids_by_partition),
        approval_ids=approval_ids,
    )


def _sort_partitions(partitions: Iterable[Partition]) -> tuple[Partition, ...]:
    return tuple(sorted(partitions, key=lambda partition: partition or ""))


def _pending_partitions(stage: Stage, backlog: ConsumerBacklog) -> set[Partition]:
    """Return the partitions of the stage that have something left to consume.

    For an asset without partitions, the result is {None} or the empty set. Raises ChangeLost,
    PositionUnreadable, InputColumnGone, SchemaMismatch or TableMissing.
    """
    if stage.partitions is not None:
        return {partition for partition in backlog.pending_partitions if partition in stage.partitions}
    return {None} if backlog.require_unconsumed().has_any else set()


def _load_newest_retries(
    instance: DagsterInstance, graph: AssetGraph, backfill_id: str, asset: AssetKey
) -> dict[Partition, Attempt]:
    """Return the newest run of each partition in the retries of a backfill. Costs one query."""
    attempt_by_partition: dict[Partition, Attempt] = {}
    definition = graph.get(asset).partitions_def
    run_filter = RunsFilter(tags={RunTag.RETRY_OF: backfill_id})
    for record in instance.get_run_records(run_filter):  # the newest first
        run = record.dagster_run
        if asset in (run.asset_selection or ()):
            attempt = to_attempt(0, record)
            for partition in computed_partitions(run, definition, instance):
                attempt_by_partition.setdefault(partition, attempt)
    return attempt_by_partition


def _find_failed_attempts(
    instance: DagsterInstance,
    launch_keys: Mapping[Partition, str],
    retries: int,
    newest_retries: Mapping[Partition, Attempt],
) -> dict[Partition, Attempt]:
    """Map each partition whose newest attempt ended without a publication to this attempt.

    `launch_keys` maps a partition to the run key for its present state. Partitions of one run share a key.
    `retries` is the number of retries of the sensor whose runs are looked up for each key. `newest_retries`
    has attempts of retried backfills, which have no such key.
    """
    failed_attempts: dict[Partition, Attempt] = {}
    for partition, history in zip(
        launch_keys, iter_histories(instance, launch_keys.values(), retries), strict=True
    ):
        if not history.attempts:
            continue
        attempts = [history.attempts[-1]]
        if partition in newest_retries:
            attempts.append(newest_retries[partition])
        newest = max(attempts, key=lambda attempt: attempt.ended_at)
        if newest.outcome not in (LaunchOutcome.UNFINISHED, LaunchOutcome.AWAITS_VERDICT):
            failed_attempts[partition] = newest
    return failed_attempts


def _format_reasons(attempts: Iterable[Attempt]) -> str:
    """Return part of a sentence: the first failed runs with their reasons, and the next command.

    At most `_SHOWN_RUNS` runs are named.
    """
    # One run may have computed several partitions.
    distinct_attempts = [*{attempt.run_id: attempt for attempt in attempts}.values()]
    lines = [
        f"run {attempt.run_id[:8]} {attempt.reason}".rstrip() for attempt in distinct_attempts[:_SHOWN_RUNS]
    ]
    more = f" and {len(distinct_attempts) - _SHOWN_RUNS} more" if len(distinct_attempts) > _SHOWN_RUNS else ""
    return f"{'; '.join(lines)}{more}. Correct the cause, then: branchlake backfill retry"


def _format_counts(done_count: int, running_count: int, left_count: int, planned_count: int) -> str:
    if not running_count and not left_count and done_count == planned_count:
        return "done"
    return f"{done_count} of {planned_count} done, {running_count} running, {left_count} to do"
