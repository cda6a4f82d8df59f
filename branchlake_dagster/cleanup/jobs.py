"""The Dagster job and schedule that remove abandoned branches, and the sensor that ends dead runs.

Dagster's default launcher notices the end of a run's process within seconds, but only while the code server
that started the process lives. Without the sensor, a run of an ended code server would stay "started" until
somebody ended it in Dagster.

This module does not postpone annotations: Dagster compares the annotation of `context` with the class itself.
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
from branchlake_dagster.cleanup.reaper_rules import (
    BranchOwner,
    Limits,
    MainHistory,
    OwnerState,
    Reaping,
    ReapingAction,
)
from branchlake_dagster.cleanup.sweeper import SWEEPER_TAG_FILTER, Sweeper, Sweeping
from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.branch_owner import (
    is_own_reference,
    is_retry,
    iter_continuing_runs,
    load_branch_owners,
    load_instance_id,
)
from branchlake_dagster.runs.discarding import report_branch_end
from branchlake_dagster.runs.failure_detector import (
    Liveness,
    continue_watch,
    judge_by_timestamp,
    local_clock_id,
)
from branchlake_dagster.runs.heartbeats import Heartbeat, HeartbeatStore
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import (
    FENCED,
    Retention,
    find_publication,
    find_recorded_base,
    is_judged,
    is_opened_by,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.tables.table_files import TableFiles

T = TypeVar("T")
_MAX_BULLETS = 500
_STEP_FAILURE_EVENTS = {DagsterEventType.STEP_FAILURE, DagsterEventType.STEP_UP_FOR_RETRY}


class RunsUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Dagster's storage does not answer, so it is unknown which branches are in use. Nothing was deleted."""


class NotOurs(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A branch or tag that should be ended does not have a name that branchlake gives."""


class DagsterRuns:
    """The reaper's interface to the runs of a Dagster instance; implements `BranchRuns`."""

    def __init__(self, instance: DagsterInstance) -> None:
        self._instance = instance

    def owners(self, branches: Collection[str]) -> Mapping[str, BranchOwner]:
        """Return the owner of each run branch, by branch name; branches of unknown runs are left out.

        Raises RunsUnreadable if Dagster's storage does not answer.
        """
        try:
            records = load_branch_owners(self._instance, branches)
            branch_owners = {
                branch: _build_owner(self._instance, branch, record)
                for branch, record in records.items()
                if record
            }
            waiting_branches = [
                b for b, owner in branch_owners.items() if owner.state is OwnerState.AWAITING_PUBLICATION
            ]
            continued_branches = {
                branch for branch, _ in iter_continuing_runs(self._instance, waiting_branches)
            }
        except Exception as error:
            # A storage may raise errors of SQL, gRPC or HTTP. Without an answer nothing may be deleted.
            raise RunsUnreadable(
                f"The runs could not be read from Dagster's storage: {type(error).__name__}.",
                hint="Nothing was deleted. Check Dagster's storage; the next pass tries again.",
            ) from error
        return {
            branch: replace(owner, is_continued=branch in continued_branches)
            for branch, owner in branch_owners.items()
        }

    def reports_after(self, run_id: str, beat: Heartbeat) -> bool:
        """Return whether the run's log shows that its executor outlived the writer of heartbeat `beat`.

        This is possible when steps are processes. The executor outlived the writer if the run's log has a
        step failure after that heartbeat, or any event later than the longest silence of the writer after it.
        False if the heartbeat has no time. Raises RunsUnreadable.
        """
        if beat.written_at is None:
            return False
        last_beat_time = beat.written_at.timestamp()
        return (
            self._newest_event_time(run_id, None) > last_beat_time + beat.max_silence_s
        ) or self._newest_event_time(run_id, _STEP_FAILURE_EVENTS) > last_beat_time

    def _newest_event_time(self, run_id: str, event_types: set[DagsterEventType] | None) -> float:
        try:
            page = self._instance.get_records_for_run(run_id, of_type=event_types, limit=1, ascending=False)
        except Exception as error:
            raise RunsUnreadable(
                f"The run's events could not be read from Dagster's storage: {type(error).__name__}.",
                run_id=run_id,
                hint="Nothing was deleted. Check Dagster's storage; the next pass tries again.",
            ) from error
        return page.records[0].timestamp if page.records else 0.0

    def report_dead(self, run_id: str, message: str) -> None:
        """Mark a run as failed, with `message`, if Dagster shows it as not finished."""
        run = self._instance.get_run_by_id(run_id)
        if run is not None and not run.is_finished:
            self._instance.report_run_failed(run, message)

    def fenced(self, run_id: str, branch: str, reason: str) -> None:
        """Record in the tags and log of a run without a verdict that its branch was discarded, and why.

        `reason` is part of a sentence. A run that has a publisher's verdict, or did not open `branch`, is not
        changed.
        """
        report_branch_end(
            self._instance, run_id, branch, verdict=FENCED, reason=f"its branch was ended: {reason}"
        )


def _build_owner(instance: DagsterInstance, branch: str, record: RunRecord) -> BranchOwner:
    run = record.dagster_run
    opened_branch = is_opened_by(run.tags, run.run_id)
    verdict_is_final = opened_branch and is_judged(run.tags, branch)
    if not run.is_finished:
        state = OwnerState.ACTIVE
    elif opened_branch and find_publication(run.tags, branch):
        state = OwnerState.PUBLISHED
    elif run.is_success and not verdict_is_final:
        state = OwnerState.AWAITING_PUBLICATION
    else:
        state = OwnerState.UNPUBLISHED
    end_time = datetime.fromtimestamp(record.end_time, UTC) if record.end_time else None
    publication = find_publication(run.tags, branch) or "" if opened_branch else ""
    return BranchOwner(
        run.run_id,
        state,
        record.create_timestamp,
        end_time,
        verdict_is_final,
        publication,
        base_hash=_find_base_hash(instance, run, branch),
        retention=Retention.from_run_tags(run.tags, run.run_id),
    )


def _find_base_hash(instance: DagsterInstance, run: DagsterRun, branch: str) -> str:
    """Return the base hash of the branch by the run's tags; empty if the tags do not record it.

    A retry that died before it opened its branch still has its parent's tags. Their base hash is valid for
    it, because it took over the parent's commits.
    """
    is_continuation = not is_opened_by(run.tags, run.run_id) and is_retry(instance, run)
    return find_recorded_base(run.tags, run.tags.get(RunTag.BRANCH, "") if is_continuation else branch) or ""


def reap_branches(
    lake: Lakehouse,
    instance: DagsterInstance,
    *,
    dry_run: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    branch_names: Collection[str] | None = None,
) -> Iterator[Reaping]:
    """Run one pass of the reaper over the lake, and yield its decisions.

    If `branch_names` is given, only these branches are judged, also those of other Dagster instances, and by
    the limits of the settings instead of those that runs recorded. With `dry_run` nothing is changed. The
    pass runs while the caller iterates.
    """
    reaper = _build_reaper(
        lake,
        instance,
        branch_names=branch_names,
        any_instance=branch_names is not None,
        now=now,
    )
    return reaper.run(dry_run=dry_run)


def _build_reaper(
    lake: Lakehouse,
    instance: DagsterInstance,
    *,
    branch_names: Collection[str] | None = None,
    any_instance: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Reaper:
    settings = lake.settings
    return Reaper(
        lake.nessie,
        DagsterRuns(instance),
        reaper_limits(settings),
        heartbeats=HeartbeatStore.from_settings(settings),
        now=now,
        monotonic=time.monotonic,
        sleep=time.sleep,
        is_on_main=MainHistory(lake.nessie).contains_commit,
        instance=load_instance_id(instance),
        files=TableFiles(settings.file_io_properties()),
        only=branch_names,
        anyones=any_instance,
    )


def end_dead_writers(
    lake: Lakehouse, instance: DagsterInstance, heartbeats: Collection[Heartbeat]
) -> Iterator[Reaping]:
    """End the branches and runs of the dead writers of `heartbeats`, and yield the decisions.

    A watch has proven that these writers are dead. Other branches are not judged.
    """
    branches = {beat.branch for beat in heartbeats}
    return _build_reaper(lake, instance, branch_names=branches).run(dead=heartbeats)


def sweep_discarded(
    lake: Lakehouse,
    instance: DagsterInstance,
    *,
    dry_run: bool = False,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    tag_name: str | None = None,
) -> Iterator[Sweeping]:
    """Delete the files of branches that were discarded longer ago than their grace period.

    The grace period is the one that the run recorded, or else the setting `discard_grace_h`. If `tag_name` is
    given, only this tag is handled, by the setting and also if another Dagster instance made it. Yields an
    outcome for each tag, also for tags that are kept.
    """
    settings = lake.settings
    return Sweeper(
        lake.nessie,
        TableFiles(settings.file_io_properties()),
        DagsterRuns(instance).owners,
        grace=timedelta(hours=settings.discard_grace_h),
        now=now,
        instance=load_instance_id(instance),
        ref_filter=SWEEPER_TAG_FILTER
        if tag_name is None
        else f"refType == 'TAG' && ref.name == '{tag_name}'",
        anyones=tag_name is not None,
    ).run(dry_run=dry_run)


def end_named_refs(
    lake: Lakehouse, instance: DagsterInstance, names: Collection[str], *, dry_run: bool = False
) -> tuple[list[Reaping], list[Sweeping]]:
    """End the named branches and sweep the named tags, and return the decisions on both.

    It does not matter which Dagster instance made them.

    A branch or tag is kept all the same if its writer sends heartbeats, its run awaits its verdict, it is
    younger than its grace period, or another reference needs its files. Raises NotOurs before any change if
    branchlake did not give one of the names.
    """
    for name in names:
        if not is_own_reference(
            name,
            ReferencePrefix.RUN,
            ReferencePrefix.PUBLICATION,
            ReferencePrefix.DISCARDED,
            ReferencePrefix.SWEEPING,
        ):
            raise NotOurs(
                f"{name} is not a branch or tag of a run.",
                branch=name,
                hint="If you created it, delete it with Nessie's own tools.",
            )
    run_branches = {
        name for name in names if is_own_reference(name, ReferencePrefix.RUN, ReferencePrefix.PUBLICATION)
    }
    reap_results = (
        list(reap_branches(lake, instance, dry_run=dry_run, branch_names=run_branches))
        if run_branches
        else []
    )
    sweep_results = [
        sweep_discarded(lake, instance, dry_run=dry_run, tag_name=name)
        for name in names
        if name not in run_branches
    ]
    return reap_results, [result for each in sweep_results for result in each]


def reaper_limits(settings: Settings) -> Limits:
    """Return the reaper's time limits from the settings."""
    return Limits(
        max_age=timedelta(hours=settings.orphan_max_age_h),
        orphan_grace=timedelta(minutes=settings.orphan_grace_min),
        keep_failed=timedelta(hours=settings.keep_failed_hours),
    )


def reap_job(lakehouse_key: str = "lakehouse", prefix: str = "") -> JobDefinition:
    """Build the job `reap_branches`: one pass of the reaper over run branches, then one of the sweeper.

    The metadata of the job's output has the numbers of deleted and kept branches and of deleted files, and
    the decisions. `lakehouse_key` is the resource key of the lake. `prefix` comes before the job's name.
    """

    @op(
        name=f"{prefix}reap_branches_op",
        description="Ends run branches that will not be published, and deletes old discarded branches.",
        required_resource_keys={lakehouse_key},
    )
    def reap_branches_op(context: OpExecutionContext) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        reap_results = _log_decisions(context, reap_branches(lake, context.instance))
        sweep_results = _log_decisions(context, sweep_discarded(lake, context.instance))
        deleted_branches = [result for result in reap_results if result.deletes_branch]
        kept_branches = [result for result in reap_results if result.action is ReapingAction.KEEP]
        context.add_output_metadata(
            {
                "deleted": MetadataValue.int(len(deleted_branches)),
                "kept": MetadataValue.int(len(kept_branches)),
                "files_deleted": MetadataValue.int(sum(result.files for result in sweep_results)),
                "bytes_freed": MetadataValue.int(sum(result.size for result in sweep_results)),
                "branches": _format_bullets(reap_results, "no run branches"),
                "discarded": _format_bullets(sweep_results, "nothing discarded"),
            }
        )

    @job(name=f"{prefix}reap_branches", description="Cleans up abandoned run branches.")
    def reap_branches_job() -> None:
        reap_branches_op()

    return reap_branches_job


def _log_decisions(context: OpExecutionContext, decisions: Iterator[T]) -> list[T]:
    results = []
    for decision in decisions:
        context.log.info(str(decision))
        results.append(decision)
    return results


def _format_bullets(results: Sequence[object], text_if_empty: str) -> MetadataValue:
    remainder = len(results) - _MAX_BULLETS
    bullets = [f"- {result}" for result in results[:_MAX_BULLETS]] or [text_if_empty]
    return MetadataValue.md(
        "\n".join([*bullets, *([f"- and {remainder} more, in the run's log"] if remainder > 0 else [])])
    )


def reap_schedule(reaper: JobDefinition, settings: Settings) -> ScheduleDefinition:
    """Build the schedule that launches the job `reaper` every `reap_interval_min` minutes."""
    minutes = settings.reap_interval_min
    return ScheduleDefinition(
        name=f"{reaper.name}_schedule",
        job=reaper,
        cron_schedule="0 * * * *" if minutes == 60 else f"*/{minutes} * * * *",
        default_status=DefaultScheduleStatus.RUNNING,
    )


def find_dead_writers(
    lake: Lakehouse,
    instance: DagsterInstance,
    cursor: str | None,
    *,
    clock: str,
    now: float,
    utc_now: datetime,
) -> tuple[list[Heartbeat], str]:
    """Return this instance's writers that are dead, and the cursor for the next call.

    `cursor` is the cursor that the previous call returned; None at the first call. `now` is the time of the
    monotonic clock that `clock` identifies, in seconds; `utc_now` is the time of the wall clock. Heartbeats
    without an instance count as this instance's. Raises HeartbeatsUnreadable.
    """
    this_instance = load_instance_id(instance)
    beats = [
        beat
        for beat in HeartbeatStore.from_settings(lake.settings).all()
        if beat.instance in ("", this_instance)
    ]
    suspects = [
        beat for beat, liveness in judge_by_timestamp(beats, utc_now).items() if liveness is Liveness.SUSPECT
    ]
    return continue_watch(cursor, suspects, clock=clock, now=now)


def dead_writer_sensor(
    settings: Settings, lakehouse_key: str = "lakehouse", prefix: str = ""
) -> SensorDefinition:
    """Build the sensor that ends the runs of dead writers and fences their branches.

    It checks silent writers every `watch_interval_s` seconds. `lakehouse_key` is the resource key of the
    lake. `prefix` comes before the sensor's name.
    """

    @sensor(
        name=f"{prefix}dead_writer_sensor",
        required_resource_keys={lakehouse_key},
        minimum_interval_seconds=settings.watch_interval_s,
        default_status=DefaultSensorStatus.RUNNING,
        description="Ends runs whose process disappeared without a report, and fences their branches.",
    )
    def dead_writer_sensor_(context: SensorEvaluationContext, **_: object) -> SkipReason:
        # `_`: Dagster also passes the resources by name when the sensor is called as a function, as in tests.
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        now, utc_now = time.monotonic(), datetime.now(UTC)
        dead_heartbeats, new_cursor = find_dead_writers(
            lake, context.instance, context.cursor, clock=local_clock_id(), now=now, utc_now=utc_now
        )
        results: list[Reaping] = (
            list(end_dead_writers(lake, context.instance, dead_heartbeats)) if dead_heartbeats else []
        )
        for result in results:
            context.log.info(str(result))
        context.update_cursor(new_cursor)
        if not dead_heartbeats:
            return SkipReason("Every writer sends heartbeats, or is being observed.")
        writers = ", ".join(sorted(f"process {beat.pid} on {beat.host}" for beat in dead_heartbeats)[:20])
        return SkipReason(f"{len(dead_heartbeats)} dead: {writers}. {' | '.join(map(str, results[:20]))}")

    return dead_writer_sensor_
