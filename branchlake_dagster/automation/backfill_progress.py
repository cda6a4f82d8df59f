"""How far a backfill has come, stage by stage: what is published, what is under way, what is still to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from dagster import AssetKey, DagsterInstance, RunsFilter

from branchlake_dagster.automation.attempts import attempt_of, histories
from branchlake_dagster.automation.backfill_plan import Stage, plan
from branchlake_dagster.automation.backlog import Standing
from branchlake_dagster.automation.consumers import consumers
from branchlake_dagster.automation.in_flight import InFlight, computed_partitions
from branchlake_dagster.automation.launch_decision import Attempt, Outcome, approval_text
from branchlake_dagster.errors import BranchlakeError, ConfigurationError
from branchlake_dagster.internals.dagster import AssetGraph, BackfillState, backfill_of, backfills_tagged
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.wording import counted

_SHOWN = 3
"""Failed runs that are named."""
_UNDER_WAY = ("requested", "canceling")
"""The states of a backfill whose runs may still be made."""
_BROKEN = ("failed", "failing")
"""The states of a backfill that Dagster itself could not go on with."""

Partition = str | None
"""A partition's key; None stands for an asset without partitions."""


@dataclass(frozen=True)
class Progress:
    """A stage and what has become of it. Counts are of partitions; of an asset without any they are 0 or 1.

    `left` have something to consume and no run. `failed` have had a run for what they have to consume, which
    was not published; `failed_partitions` are these. `lost` cannot be told: their change is no longer known.
    `held_partitions` are among those that are left: their change waits for approval, which is given under the
    ids `approved_as`. `told` is the whole of it in words.
    """

    stage: Stage
    planned: int
    done: int
    running: int
    left: int
    failed: int
    told: str
    lost: int = 0
    failed_partitions: tuple[Partition, ...] = ()
    held_partitions: tuple[Partition, ...] = ()
    approved_as: tuple[str, ...] = ()


def progress(
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    backfill_id: str,
    now: datetime,
    *,
    retries: Mapping[AssetKey, int] | None = None,
) -> list[Progress]:
    """Each stage of a backfill that was launched, together with what was launched again of it.

    `retries` is how often an asset's sensor launches a failed run again (0 if it is not named). Raises
    ConfigurationError for an id that nobody knows.
    """
    state = require_backfill(instance, graph, backfill_id)
    again = backfills_tagged(instance, graph, {RunTag.RETRY_OF: backfill_id})
    stages = plan(graph, lake.lakehouse, state.key, state.partitions, why=state.why, instance=instance)
    in_flight = InFlight(instance, now)
    found = [_first(stages[0], [state, *(one for one in again if one.key == state.key)])]
    for stage in stages[1:]:
        waits = any(
            one.running or one.left or one.failed or one.lost
            for one in found
            if one.stage.number < stage.number
        )
        states = [one for one in again if one.key == stage.asset]
        found.append(
            follower(
                stage,
                graph,
                lake,
                instance,
                in_flight,
                waits=waits,
                requested=requested_partitions(states),
                launched_again=_launched_again(instance, graph, backfill_id, stage.asset) if states else {},
                retries=(retries or {}).get(stage.asset, 0),
            )
        )
    return found


def require_backfill(instance: DagsterInstance, graph: AssetGraph, backfill_id: str) -> BackfillState:
    """What has become of a backfill. Raises ConfigurationError for an id that Dagster does not know."""
    state = backfill_of(instance, backfill_id, graph)
    if state is None:
        raise ConfigurationError(
            f"There is no asset backfill {backfill_id} in this Dagster instance.",
            hint="Dagster's page lists them: Runs, Backfills.",
            reason="unknown_backfill",
            subject=backfill_id,
        )
    return state


def partition_states(states: Iterable[BackfillState]) -> dict[Partition, str]:
    """What has become of each partition of some backfills of one asset, which come oldest first.

    The value is "done", "failed", "running", or "canceled"; the newest backfill of a partition counts, unless
    it was canceled before the partition had its turn.
    """
    found: dict[Partition, str] = {}
    for state in states:
        done: Collection[Partition] = state.done
        failed: Collection[Partition] = state.failed
        if state.partitions is None:
            done = [None] if state.status == "completed_success" else []
            failed = [None] if state.status == "completed_failed" else []
        for one in state.partitions if state.partitions is not None else (None,):
            if one in done or one in failed:
                found[one] = "done" if one in done and one not in failed else "failed"
            elif state.status in _UNDER_WAY:
                found[one] = "running"
            elif state.status in _BROKEN:
                found[one] = "failed"
            else:
                found.setdefault(one, "canceled")
    return found


def requested_partitions(states: Iterable[BackfillState]) -> set[Partition]:
    """The partitions that some backfills of one asset have still to compute."""
    return {one for one, state in partition_states(states).items() if state == "running"}


def _first(stage: Stage, states: Sequence[BackfillState]) -> Progress:
    """The stage that Dagster's own backfills compute, as they count: materialised, and not taken back."""
    found = partition_states(states)
    planned = len(states[0].partitions) if states[0].partitions is not None else 1
    failed = tuple(one for one, state in found.items() if state == "failed")
    done, running = (sum(state == word for state in found.values()) for word in ("done", "running"))
    word = states[-1].status.replace("_", " ")
    told = f"{word}: {done} of {counted(planned, 'partition')}"
    return Progress(stage, planned, done, running, 0, len(failed), told, failed_partitions=failed)


def follower(
    stage: Stage,
    graph: AssetGraph,
    lake: LakehouseResource,
    instance: DagsterInstance,
    in_flight: InFlight,
    *,
    waits: bool,
    requested: Collection[Partition] = (),
    launched_again: Mapping[Partition, Attempt] | None = None,
    retries: int = 0,
) -> Progress:
    """A stage that launches itself: done is what has nothing left to consume, once those before it are.

    `waits`: a stage before it is not done yet. `requested` are partitions that were launched again and may
    not have a run yet, `launched_again` the newest run of each that has one. `retries` is how often the
    sensor launches a failed run again.
    """
    planned = len(stage.partitions) if stage.partitions is not None else 1
    if not stage.by_itself:
        return Progress(stage, planned, 0, 0, 0, 0, stage.why)
    (asset,) = consumers(graph, lake.lakehouse.settings.default_namespace, [stage.asset])
    standing = Standing(lake, asset.consumer, instance=instance, per_run=asset.per_run)
    try:
        pending = _pending(stage, standing)
        keys = {one: standing.launch_key(one) for one in pending}
        held = standing.held([*pending], Approvals(instance))
    except TableMissing as error:
        return Progress(stage, planned, 0, 0, planned, 0, str(error))
    except BranchlakeError as error:
        return Progress(stage, planned, 0, 0, 0, 0, f"lost: {error}", lost=planned)
    running: set[Partition]
    if stage.partitions is None:
        running = {*pending} if in_flight.whole(stage.asset) or None in requested else set()
    else:
        busy = {*in_flight.computed(stage.asset, asset.consumer.definition), *requested}
        running = {one for one in busy if one in stage.partitions}
    waiting = {one: key for one, key in keys.items() if one not in running}
    failed = _failed(instance, waiting, retries, launched_again or {})
    # A person may have launched a partition that waits, and that run may have failed.
    held = {one: names for one, names in held.items() if one not in running and one not in failed}
    left = len(waiting) - len(failed)
    done = 0 if waits else max(0, planned - len(pending | running))
    told = _told(done, len(running), left, planned)
    if waits and not pending:
        told = "waits for the stage before it"
    if failed:
        told = f"{told}, {len(failed)} failed: {_reasons(failed.values())}"
    ids = tuple(sorted({name for names in held.values() for name in names}))
    if held:
        told = f"{told}; {counted(len(held), 'partition')} {approval_text(ids, plural=len(held) > 1)}"
    return Progress(
        stage,
        planned,
        done,
        len(running),
        left,
        len(failed),
        told,
        failed_partitions=_sorted(failed),
        held_partitions=_sorted(held),
        approved_as=ids,
    )


def _sorted(partitions: Iterable[Partition]) -> tuple[Partition, ...]:
    return tuple(sorted(partitions, key=lambda one: one or ""))


def _pending(stage: Stage, standing: Standing) -> set[Partition]:
    """The partitions of the stage that have something left; None stands for an asset without partitions.

    Raises ChangeLost, PositionUnreadable, InputColumnGone or TableMissing.
    """
    if stage.partitions is not None:
        return {one for one in standing.partitions if one in stage.partitions}
    return {None} if standing.require_unconsumed().any else set()


def _launched_again(
    instance: DagsterInstance, graph: AssetGraph, backfill_id: str, asset: AssetKey
) -> dict[Partition, Attempt]:
    """By partition the newest run of the retries of a backfill; one query."""
    found: dict[Partition, Attempt] = {}
    definition = graph.get(asset).partitions_def
    for record in instance.get_run_records(
        RunsFilter(tags={RunTag.RETRY_OF: backfill_id})
    ):  # the newest first
        run = record.dagster_run
        if asset in (run.asset_selection or ()):
            attempt = attempt_of(0, record)
            for partition in computed_partitions(run, definition, instance):
                found.setdefault(partition, attempt)
    return found


def _failed(
    instance: DagsterInstance,
    keys: Mapping[Partition, str],
    retries: int,
    launched_again: Mapping[Partition, Attempt],
) -> dict[Partition, Attempt]:
    """The newest attempt for what each partition has to consume, where it ended without a publication.

    `keys` are those of the runs, by partition; a run can be that of several partitions.
    """
    found: dict[Partition, Attempt] = {}
    for partition, history in zip(keys, histories(instance, keys.values(), retries), strict=True):
        if not history.attempts:
            continue
        attempts = [history.attempts[-1]]
        if partition in launched_again:
            attempts.append(launched_again[partition])
        newest = max(attempts, key=lambda one: one.ended)
        if newest.outcome not in (Outcome.UNFINISHED, Outcome.AWAITS_VERDICT):
            found[partition] = newest
    return found


def _reasons(attempts: Iterable[Attempt]) -> str:
    """The first of the runs with the reason that it shows, and what to do."""
    failed = [*{one.run_id: one for one in attempts}.values()]  # one run may be that of several partitions
    shown = [f"run {one.run_id[:8]} {one.reason}".rstrip() for one in failed[:_SHOWN]]
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return f"{'; '.join(shown)}{more}. Correct the cause, then: branchlake backfill retry"


def _told(done: int, running: int, left: int, planned: int) -> str:
    if not running and not left and done == planned:
        return "done"
    return f"{done} of {planned} done, {running} running, {left} to do"
