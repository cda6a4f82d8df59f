"""Builds the sensor that starts an ingestion's runs, and the job that removes old landing files.

The sensor makes growing pauses while the runs keep failing. With wrong credentials a run fails within
seconds, and without pauses the sensor started another one every five seconds, all night. The same happened
with a batch that the gate blocks, although all of its steps succeed. Runs that were killed or interrupted do
not count as failing: the next run starts at once.

The job removes landing files whose records are on `main`. It has a schedule.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any, Self

import dagster as dg

from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.ingest.batch_context import PlannedBatch, plan_next_batch
from branchlake_dagster.ingest.batch_report import build_observations, build_offline_observations
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.errors import LandingUnavailable
from branchlake_dagster.ingest.offsets import count_offsets
from branchlake_dagster.ingest.topic_source import common_offsets, open_topic_source, remove_read_files
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.receivers.landing import Landing, LandingFile
from branchlake_dagster.receivers.metrics import MonitorReport, scrape_monitors
from branchlake_dagster.runs.discarding import FAILING_STATUSES, FAILURE_REASON_TAG, PERMANENT_FAILURES
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count

_PAUSES_S = (10.0, 30.0, 90.0, 270.0, 600.0)
"""Pauses after 2, 3, 4, … consecutive failures. The last one repeats. One failure causes no pause."""
_FAILS_SOON_S = 600.0
"""A run that failed after a longer time failed for a new reason, so it does not count."""


def find_pause_reason(instance: dg.DagsterInstance, ingest: Ingest, job_name: str, now: float) -> str | None:
    """Return why the next run must wait, after consecutive failed runs; None if it may start.

    `now` is the time in seconds since 1970.
    """
    runs_filter = dg.RunsFilter(job_name=job_name, tags={RunTag.INGESTION: ingest.name})
    newest_runs = instance.get_run_records(runs_filter, limit=len(_PAUSES_S) + 1)
    failed_runs = list(
        takewhile(lambda one: _has_failed_soon(one) and _has_failed_by_itself(one.dagster_run), newest_runs)
    )
    if len(failed_runs) < 2:
        return None
    last_failure, next_at = failed_runs[0], _end_time(failed_runs[0]) + _PAUSES_S[len(failed_runs) - 2]
    if now >= next_at:
        return None
    count = f"{len(failed_runs)} or more" if len(failed_runs) > len(_PAUSES_S) else str(len(failed_runs))
    return (
        f"{count} runs have failed one after the other, run {last_failure.dagster_run.run_id[:8]} last."
        f" The next one starts at {datetime.fromtimestamp(next_at, UTC):%H:%M:%S} UTC;"
        f" to try at once, launch {job_name}."
    )


def _end_time(run_record: dg.RunRecord) -> float:
    return run_record.end_time if run_record.end_time is not None else run_record.update_timestamp.timestamp()


def _has_failed_soon(run_record: dg.RunRecord) -> bool:
    if run_record.dagster_run.status is not dg.DagsterRunStatus.FAILURE:
        return False
    end_time = _end_time(run_record)
    return (
        end_time - (run_record.start_time if run_record.start_time is not None else end_time) < _FAILS_SOON_S
    )


def _has_failed_by_itself(run: dg.DagsterRun) -> bool:
    """Whether the run failed because of its work, or because its publication was blocked or refused.

    A run that was killed or interrupted has not failed by itself.
    """
    return (
        run.tags.get(FAILURE_REASON_TAG) in PERMANENT_FAILURES
        or run.tags.get(RunTag.STATUS) in FAILING_STATUSES
    )


_ACTIVE = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_OBSERVED_EVERY_S = 60.0
_log = logging.getLogger(__name__)


def list_active_runs(instance: dg.DagsterInstance, ingest: Ingest) -> list[dg.DagsterRun]:
    """Return the runs of an ingestion that have not ended."""
    runs_filter = dg.RunsFilter(tags={RunTag.INGESTION: ingest.name}, statuses=_ACTIVE)
    return list(instance.get_runs(runs_filter))


def find_unpublished_run(instance: dg.DagsterInstance, ingest: Ingest, job_name: str) -> dg.DagsterRun | None:
    """Return the newest run of an ingestion's job if it has succeeded and waits for publication, else None.

    Another run would read the same records and be refused. A parked run does not count: its records are
    published without it, and it is refused when it is resumed.
    """
    runs_filter = dg.RunsFilter(job_name=job_name, tags={RunTag.INGESTION: ingest.name})
    for run in instance.get_runs(runs_filter, limit=1):
        has_succeeded, tags = run.status is dg.DagsterRunStatus.SUCCESS, run.tags
        if (
            has_succeeded
            and tags.get(RunTag.STATUS) == RunState.PENDING
            and tags.get(RunTag.NEXT_ATTEMPT) != RunState.PARKED
        ):
            return run
    return None


def plan_batch_on_main(ingest: Ingest, lake: Lakehouse) -> PlannedBatch:
    """Plan the next batch of an ingestion from the progress on `main`. Reads no record.

    Raises the errors of `plan_next_batch` and `open_topic_source`.
    """
    topics, default_namespace = (
        open_topic_source(ingest, lake.settings).topics,
        lake.settings.default_namespace,
    )
    return plan_next_batch(ingest, lake.nessie, lake.catalog(MAIN), topics, namespace=default_namespace)


def observe_topics(
    ingest: Ingest, lake: Lakehouse, last_observed: float, now: float
) -> tuple[float, list[dg.AssetObservation]]:
    """Observe the topics if the last observation is at least a minute old.

    `last_observed` and `now` are in seconds since 1970. Returns the time of the last observation, and the new
    observations, [] if it is too early. If the topics cannot be read, the observations have only the counts
    of receivers, and the next batch reports the cause.
    """
    if now - last_observed < _OBSERVED_EVERY_S:
        return last_observed, []
    monitors: list[MonitorReport] = []
    try:
        monitors = scrape_monitors(lake.settings.receiver_monitors)
        topics = open_topic_source(ingest, lake.settings).topics
        planned_batch = plan_batch_on_main(ingest, lake)
        # A run ends before its batch is published, so the group gets the offsets that `main` has.
        topics.report_offsets(ingest.group, planned_batch.current_offsets)
        return now, build_observations(ingest, planned_batch, topics, monitors)
    except Exception as error:  # noqa: BLE001 - a failed observation must not delay the batches
        is_unexpected = not isinstance(error, BranchlakeError)
        if isinstance(error, LandingUnavailable) and error.reason == "unknown_topic":
            return now, build_offline_observations(ingest, monitors)  # the sensor's tick says it
        _log.warning(
            "The topics of ingestion %s could not be observed: %s", ingest.name, error, exc_info=is_unexpected
        )
        return now, build_offline_observations(ingest, monitors)


def parse_times(cursor: str | None) -> dict[str, float]:
    """Parse the times that a sensor of an ingestion has stored, by name.

    Without a cursor, or if somebody set it to something else, the result is empty: the sensor starts anew.
    """
    try:
        stored = json.loads(cursor or "{}")
    except ValueError:
        return {}
    values = stored if isinstance(stored, dict) else {"told": stored}  # a live sensor stores one time
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


@dataclass(frozen=True)
class _Wait:
    """The records that wait for a batch: their number, and times in seconds since 1970.

    `since` is the time at which the sensor first found some, and `unchanged_since` the time at which it first
    found this number.
    """

    count: int
    since: float
    unchanged_since: float

    @classmethod
    def continued(cls, stored_cursor: Mapping[str, float], count: int, now: float) -> Self:
        """Return the wait of `count` records after the wait that the last tick has stored in its cursor."""
        # A clock that was set back must not make the records wait until it is as late as it was before.
        since = min(now, stored_cursor.get("since", now))
        unchanged_since = min(now, stored_cursor.get("unchanged_since", now))
        return cls(count, since, unchanged_since if stored_cursor.get("waiting") == count else now)

    def to_cursor(self) -> dict[str, float]:
        """Return the values to store in the cursor, {} if no record waits."""
        if not self.count:
            return {}
        return {"since": self.since, "waiting": self.count, "unchanged_since": self.unchanged_since}

    def is_over(self, now: float, most_age_s: float, quiet_s: float | None) -> bool:
        """Return whether some record has waited long enough, or records wait and no further one arrives."""
        is_quiet = quiet_s is not None and now - self.unchanged_since >= quiet_s
        return self.count > 0 and (is_quiet or now - self.since >= most_age_s)


def build_batch_sensor(
    ingest: Ingest,
    job_name: str,
    *,
    lakehouse_key: str = "lakehouse",
    least_records: int = 10_000,
    most_age_s: float = 60.0,
    quiet_s: float | None = None,
    interval_s: int = 3,
    running: bool = False,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """Build the sensor that starts the job for each batch, one run at a time.

    It starts a run when `least_records` records wait, when some have waited for `most_age_s` seconds, or when
    some wait and their number has not changed for `quiet_s` seconds (None: never for this reason). It waits
    longer while runs keep failing. Every minute it reports observations of the topics on their assets, also
    while a run is active. `interval_s` is the least number of seconds between two ticks. With `running` the
    sensor is on by default. `clock` returns the time in seconds since 1970.
    """
    quiet_clause = "" if quiet_s is None else f", or when no further one arrives for {quiet_s:g} s"

    @dg.sensor(
        name=f"ingest_{ingest.name}_sensor",
        job_name=job_name,
        minimum_interval_seconds=interval_s,
        required_resource_keys={lakehouse_key},
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        description=f"Starts a batch of {ingest.name} when {least_records:,} records wait, or when some"
        f" have waited for {most_age_s:g} s{quiet_clause}.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        stored_cursor = parse_times(context.cursor)
        now = clock()
        last_observed, events = observe_topics(
            ingest, resource.lakehouse, stored_cursor.get("told", 0.0), now
        )
        if active := list_active_runs(context.instance, ingest):
            reason = f"Run {active[0].run_id[:8]} is active."
        elif ended_run := find_unpublished_run(context.instance, ingest, job_name):
            reason = f"Run {ended_run.run_id[:8]} must be published first."
        else:
            reason = None
        if reason is not None:
            cursor = json.dumps({**stored_cursor, "told": last_observed})
            return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)
        try:
            planned_batch = plan_batch_on_main(ingest, resource.lakehouse)
        except BranchlakeError as error:
            if not isinstance(error, Transient):
                raise
            cursor = json.dumps({**stored_cursor, "told": last_observed})
            return dg.SensorResult(skip_reason=str(error), cursor=cursor, asset_events=events)
        count = count_offsets(planned_batch.plan.ranges) + planned_batch.plan.lag
        wait = _Wait.continued(stored_cursor, count, now)
        cursor = json.dumps({"told": last_observed, **wait.to_cursor()})
        is_due = count >= least_records or wait.is_over(now, most_age_s, quiet_s)
        if planned_batch.plan.must_record or is_due:
            if pause_reason := find_pause_reason(context.instance, ingest, job_name, now):
                return dg.SensorResult(skip_reason=pause_reason, cursor=cursor, asset_events=events)
            cursor = json.dumps({"told": last_observed})
            request = dg.RunRequest(tags={RunTag.INGESTION: ingest.name})
            return dg.SensorResult([request], cursor=cursor, asset_events=events)
        reason = f"{format_count(count, 'record')} waiting." if count else "No records are waiting."
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)

    return sensor


def remove_landing_files(
    topic: str, ingests: Sequence[Ingest], lake: Lakehouse, *, clock: Callable[[], float] = time.time
) -> list[LandingFile]:
    """Remove old files of a topic whose records all `ingests` have on `main`. Return the removed files.

    Files that are younger than `landing_keep_h` hours stay. Raises the errors of `plan_next_batch` before
    anything is removed.
    """
    # A table that is filled again after a rollback needs files before the position of the other tables.
    planned_batches = [plan_batch_on_main(ingest, lake) for ingest in ingests]
    read_offsets = common_offsets(planned_batch.progress.start for planned_batch in planned_batches)
    finished_before = clock() - lake.settings.landing_keep_h * 3600
    return remove_read_files(
        Landing(lake.settings.landing_folder),
        [planned_batches[0].topics[topic]],
        read_offsets,
        finished_before=finished_before,
    )


def landing_files_job(ingests: Sequence[Ingest], *, lakehouse_key: str) -> dg.JobDefinition:
    """Build the job that removes old landing files, for all topics of these ingestions.

    `ingests` must have all ingestions of a topic: a file is removed if their tables on `main` have its
    records. `lakehouse_key` is the resource key of the lake.
    """
    topics = sorted({topic for ingest in ingests for topic in ingest.topics})
    name = _job_name(ingests)

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={lakehouse_key},
        out=dg.Out(dg.Nothing),
        description="Removes landing files whose records are all on main, except the newest of a partition.",
    )
    def remove(context: dg.OpExecutionContext) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        errors: list[BranchlakeError | OSError] = []
        landing = Landing(resource.lakehouse.settings.landing_folder)
        for topic in topics:
            readers = [ingest for ingest in ingests if topic in ingest.topics]
            try:
                removed = remove_landing_files(topic, readers, resource.lakehouse)
            except (BranchlakeError, OSError) as error:
                # Go on: otherwise the files of the other topics would fill the disk.
                context.log.warning(f"{topic}: no file was removed. {error}")
                # A folder without any topic may not be mounted.
                has_never_sent = getattr(error, "reason", None) == "unknown_topic" and landing.topics()
                if not has_never_sent:
                    errors.append(error)
                continue
            rows = sum(file.rows for file in removed)
            context.log.info(
                f"{topic}: removed {format_count(len(removed), 'file')} with {format_count(rows, 'record')}."
            )
        if errors:
            raise errors[0]

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        description=f"Removes files of {', '.join(topics)} that main has, after BRANCHLAKE_LANDING_KEEP_H.",
    )
    def job() -> None:
        remove()

    return job


def landing_files_schedule(job: Any) -> dg.ScheduleDefinition:
    """Build the hourly schedule of the job. It is off by default."""
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule="23 * * * *",
        default_status=dg.DefaultScheduleStatus.STOPPED,
    )


def _job_name(ingests: Sequence[Ingest]) -> str:
    """Return the name of the job: `landing_files_` and the first name of the ingestions.

    Two groups of ingestions in one code location have different names.
    """
    return f"landing_files_{min(ingest.name for ingest in ingests)}"
