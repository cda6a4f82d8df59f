"""The reaper at work: its job, its schedule and its command, and the sensor for dead writers.

The reaper at work: its rules applied with Dagster's knowledge of runs, as a job, a schedule and a command.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.

The sensor that ends runs whose process is gone, minutes after it went.

Dagster's default launcher sees the end of a run's process within seconds, but only while the code server
that started it lives. Without it, a run would stay "started" until somebody ended it by hand.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    RunRecord,
    ScheduleDefinition,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    job,
    op,
    sensor,
)

from branchlake_dagster.cleanup.reaper import Reaper
from branchlake_dagster.cleanup.reaper_rules import Limits, Owner, Reaping, ReapingAction, RunState
from branchlake_dagster.cleanup.sweeper import TAGS, Sweeper, Sweeping
from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.publisher import publisher_of
from branchlake_dagster.runs.branch_names import is_ours
from branchlake_dagster.runs.branch_owner import continuing_runs, is_retry, owners
from branchlake_dagster.runs.discarding import report_end
from branchlake_dagster.runs.failure_detector import Liveness, by_timestamp, look_again, this_clock
from branchlake_dagster.runs.heartbeats import Heartbeat, HeartbeatStore
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.origin import instance_id
from branchlake_dagster.runs.run_tags import (
    FENCED,
    Retention,
    base_hash_of,
    judged,
    opened_by,
    publication_of,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.tables.table_files import TableFiles

T = TypeVar("T")
_NOTED = {DagsterEventType.STEP_FAILURE, DagsterEventType.STEP_UP_FOR_RETRY}


class RunsUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Dagster's storage does not answer, so nobody can say which branches are in use."""


class NotOurs(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A reference that was to be ended has no name of ours."""


class DagsterRuns:
    """The runs of a Dagster instance as the reaper sees them."""

    def __init__(self, instance: DagsterInstance) -> None:
        self._instance = instance

    def owners(self, branches: Collection[str]) -> Mapping[str, Owner]:
        """The run of each branch with its state; raises RunsUnreadable."""
        try:
            records = owners(self._instance, branches)
            found = {branch: _owner_of(branch, record) for branch, record in records.items() if record}
            waiting = [b for b, one in found.items() if one.state is RunState.AWAITING_PUBLICATION]
            continued = {branch for branch, _ in continuing_runs(self._instance, waiting)}
        except Exception as error:
            # Whatever the storage raises (SQL, gRPC, HTTP): without an answer nothing may be deleted.
            raise RunsUnreadable(
                f"Dagster's storage could not be asked for runs: {type(error).__name__}.",
                hint="Without its answer nothing is deleted.",
            ) from error
        return {branch: replace(one, continued=branch in continued) for branch, one in found.items()}

    def reports_after(self, run_id: str, beat: Heartbeat) -> bool:
        """Whether the run's executor outlived the writer of `beat`, as it does when steps are processes.

        It noted the failure of a step after that beat, or wrote anything when the writer was silent already.
        """
        if beat.written_at is None:
            return False
        last = beat.written_at.timestamp()
        return (self._newest(run_id, None) > last + beat.silent_s) or self._newest(run_id, _NOTED) > last

    def _newest(self, run_id: str, kinds: set[DagsterEventType] | None) -> float:
        try:
            page = self._instance.get_records_for_run(run_id, of_type=kinds, limit=1, ascending=False)
        except Exception as error:
            raise RunsUnreadable(
                f"The events of a run could not be read: {type(error).__name__}.",
                run_id=run_id,
                hint="Nothing was deleted.",
            ) from error
        return page.records[0].timestamp if page.records else 0.0

    def report_dead(self, run_id: str, message: str) -> None:
        """Report a run as failed that Dagster still takes for running."""
        run = self._instance.get_run_by_id(run_id)
        if run is not None and not run.is_finished:
            self._instance.report_run_failed(run, message)

    def fenced(self, run_id: str, branch: str, reason: str) -> None:
        """Show on a run that has no verdict that its branch was discarded, and why."""
        report_end(self._instance, run_id, branch, verdict=FENCED, reason=f"its branch was ended: {reason}")


def _owner_of(branch: str, record: RunRecord) -> Owner:
    run = record.dagster_run
    own = opened_by(run.tags, run.run_id)
    told = own and judged(run.tags, branch)
    if not run.is_finished:
        state = RunState.ACTIVE
    elif own and publication_of(run.tags, branch):
        state = RunState.PUBLISHED
    elif run.is_success and not told:
        state = RunState.AWAITING_PUBLICATION
    else:
        state = RunState.UNPUBLISHED
    ended = datetime.fromtimestamp(record.end_time, UTC) if record.end_time else None
    publication = publication_of(run.tags, branch) or "" if own else ""
    return Owner(
        run.run_id,
        state,
        record.create_timestamp,
        ended,
        told,
        publication,
        base_hash=_base_of(run, branch),
        retention=Retention.of_run(run.tags, run.run_id),
    )


def _base_of(run: DagsterRun, branch: str) -> str:
    """The base of the branch by the run's tags; empty if they name none.

    A retry that died before it opened its branch has the tags of its parent, whose commits it continued.
    """
    continued = not opened_by(run.tags, run.run_id) and is_retry(run)
    return base_hash_of(run.tags, run.tags.get(RunTag.BRANCH, "") if continued else branch) or ""


def reap_branches(
    lake: Lakehouse,
    instance: DagsterInstance,
    *,
    dry_run: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    only: Collection[str] | None = None,
) -> Iterator[Reaping]:
    """One pass of the reaper over the lake, with Dagster's knowledge of runs.

    `only` are branches that a person has named, whoever made them.
    """
    reaper = _reaper(
        lake, instance, only=only, anyones=only is not None, now=now, monotonic=monotonic, sleep=sleep
    )
    return reaper.run(dry_run=dry_run)


def _reaper(
    lake: Lakehouse,
    instance: DagsterInstance,
    *,
    only: Collection[str] | None = None,
    anyones: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Reaper:
    settings = lake.settings
    return Reaper(
        lake.nessie,
        DagsterRuns(instance),
        limits_of(settings),
        heartbeats=HeartbeatStore.of(settings),
        now=now,
        monotonic=monotonic,
        sleep=sleep,
        is_on_main=lambda commit: publisher_of(lake).is_on_main(commit),
        instance=instance_id(instance),
        files=TableFiles(settings.file_io_properties()),
        only=only,
        anyones=anyones,
    )


def end_dead(lake: Lakehouse, instance: DagsterInstance, dead: Collection[Heartbeat]) -> Iterator[Reaping]:
    """End the branches and runs of writers that were watched and are dead; look at nothing else."""
    branches = {beat.branch for beat in dead}
    return _reaper(lake, instance, only=branches).run(dead=dead)


def sweep_discarded(
    lake: Lakehouse,
    instance: DagsterInstance,
    *,
    dry_run: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    only: str | None = None,
) -> Iterator[Sweeping]:
    """Delete the files of branches that were discarded longer ago than `discard_grace_h`.

    `only` is a tag that a person has named, whoever made it.
    """
    settings = lake.settings
    return Sweeper(
        lake.nessie,
        TableFiles(settings.file_io_properties()),
        DagsterRuns(instance).owners,
        grace=timedelta(hours=settings.discard_grace_h),
        now=now,
        instance=instance_id(instance),
        listing=TAGS if only is None else f"refType == 'TAG' && ref.name == '{only}'",
        anyones=only is not None,
    ).run(dry_run=dry_run)


def end_named(
    lake: Lakehouse, instance: DagsterInstance, names: Collection[str], *, dry_run: bool = False
) -> tuple[list[Reaping], list[Sweeping]]:
    """End these branches and sweep these tags, whichever Dagster instance made them: a person has said so.

    What beats, waits for its verdict, is younger than its grace or needed elsewhere stays all the same.
    Raises NotOurs, before anything is done, for a name that no machinery of ours has given.
    """
    for name in names:
        if not is_ours(
            name,
            ReferencePrefix.RUN,
            ReferencePrefix.PUBLICATION,
            ReferencePrefix.DISCARDED,
            ReferencePrefix.SWEEPING,
        ):
            raise NotOurs(
                f"{name} is no branch or tag of a run.",
                branch=name,
                hint="Delete it with Nessie's own tools, if it is yours.",
            )
    wanted = {name for name in names if is_ours(name, ReferencePrefix.RUN, ReferencePrefix.PUBLICATION)}
    reaped = list(reap_branches(lake, instance, dry_run=dry_run, only=wanted)) if wanted else []
    swept = [
        sweep_discarded(lake, instance, dry_run=dry_run, only=name) for name in names if name not in wanted
    ]
    return reaped, [one for each in swept for one in each]


def limits_of(settings: Settings) -> Limits:
    """The reaper's patience as it is set."""
    return Limits(
        max_age=timedelta(hours=settings.orphan_max_age_h),
        orphan_grace=timedelta(minutes=settings.orphan_grace_min),
        keep_failed=timedelta(hours=settings.keep_failed_hours),
    )


def reap_job(lakehouse_key: str = "lakehouse", prefix: str = "") -> JobDefinition:
    """The job `reap_branches`: one pass over branches, then over discarded states; told as metadata.

    `lakehouse_key` is the key of the lake's resource, `prefix` is put before the job's name.
    """

    @op(
        name=f"{prefix}reap_branches_op",
        description="Ends run branches that nobody will publish, and deletes what long discarded ones left.",
        required_resource_keys={lakehouse_key},
    )
    def reap_branches_op(context: OpExecutionContext) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        reaped = _logged(context, reap_branches(lake, context.instance))
        swept = _logged(context, sweep_discarded(lake, context.instance))
        deleted = [one for one in reaped if one.delete]
        kept = [one for one in reaped if one.action is ReapingAction.KEEP]
        context.add_output_metadata(
            {
                "deleted": MetadataValue.int(len(deleted)),
                "kept": MetadataValue.int(len(kept)),
                "files_deleted": MetadataValue.int(sum(one.files for one in swept)),
                "bytes_freed": MetadataValue.int(sum(one.size for one in swept)),
                "branches": _bullets(reaped) or MetadataValue.md("no run branches"),
                "discarded": _bullets(swept) or MetadataValue.md("nothing discarded"),
            }
        )

    @job(name=f"{prefix}reap_branches", description="Clean-up of abandoned run branches.")
    def reap_branches_job() -> None:
        reap_branches_op()

    return reap_branches_job


def _logged(context: OpExecutionContext, decisions: Iterator[T]) -> list[T]:
    told = []
    for one in decisions:
        context.log.info(str(one))
        told.append(one)
    return told


def _bullets(lines: Sequence[object], most: int = 500) -> MetadataValue | None:
    more = [f"- and {len(lines) - most} more, in the run's log"] if len(lines) > most else []
    return MetadataValue.md("\n".join([*(f"- {one}" for one in lines[:most]), *more])) if lines else None


def reap_schedule(reaper: JobDefinition, settings: Settings) -> ScheduleDefinition:
    """Runs `reaper` every `reap_interval_min` minutes."""
    minutes = settings.reap_interval_min
    return ScheduleDefinition(
        name=f"{reaper.name}_schedule",
        job=reaper,
        cron_schedule="0 * * * *" if minutes == 60 else f"*/{minutes} * * * *",
        default_status=DefaultScheduleStatus.RUNNING,
    )


def dead_writers(
    lake: Lakehouse, instance: DagsterInstance, told: str | None, *, clock: str, now: float, at: datetime
) -> tuple[list[Heartbeat], str]:
    """The instance's writers that are dead, and what the next look needs; `at` is the wall clock's time."""
    here = instance_id(instance)
    beats = [beat for beat in HeartbeatStore.of(lake.settings).all() if beat.instance in ("", here)]
    suspects = [beat for beat, pulse in by_timestamp(beats, at).items() if pulse is Liveness.SUSPECT]
    return look_again(told, suspects, clock=clock, now=now)


def dead_writer_sensor(
    settings: Settings, lakehouse_key: str = "lakehouse", prefix: str = ""
) -> SensorDefinition:
    """Looks at silent writers every `watch_interval_s`, ends the runs of dead ones and fences them.

    `lakehouse_key` is the key of the lake's resource, `prefix` is put before the sensor's name.
    """

    @sensor(
        name=f"{prefix}dead_writer_sensor",
        required_resource_keys={lakehouse_key},
        minimum_interval_seconds=settings.watch_interval_s,
        default_status=DefaultSensorStatus.RUNNING,
        description="Ends runs whose process is gone without a word, and fences their branches.",
    )
    def dead_writer_sensor_(context: SensorEvaluationContext, **_: object) -> SkipReason:
        # `_`: called like a function, as in tests, Dagster passes the resources by name too.
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        now, at = time.monotonic(), datetime.now(UTC)
        dead, remembered = dead_writers(
            lake, context.instance, context.cursor, clock=this_clock(), now=now, at=at
        )
        told: list[Reaping] = list(end_dead(lake, context.instance, dead)) if dead else []
        for one in told:
            context.log.info(str(one))
        context.update_cursor(remembered)
        if not dead:
            return SkipReason("Every writer sends heartbeats, or is being observed.")
        writers = ", ".join(sorted(f"process {beat.pid} on {beat.host}" for beat in dead)[:20])
        return SkipReason(f"{len(dead)} dead: {writers}. {' | '.join(map(str, told[:20]))}")

    return dead_writer_sensor_
