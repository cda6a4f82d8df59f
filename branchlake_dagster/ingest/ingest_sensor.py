"""The sensor that starts an ingestion's runs, and pauses after runs that keep failing.

How long a sensor leaves an ingestion alone whose runs keep failing.

With wrong credentials a run ends within seconds: its sensor started another one every five seconds, all
night. So it did with a batch that the gate blocks, whose steps all succeed. A run that was killed or
interrupted is no such run, however often that happens: what it was at goes on at once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import takewhile

import dagster as dg

from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.ingest.batch_context import Before, look
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.observation import observations, without_brokers
from branchlake_dagster.ingest.offsets import records
from branchlake_dagster.ingest.topic_source import source_of
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.receivers.metrics_client import Monitored, scrape
from branchlake_dagster.runs.discarding import FAILS, FAILS_BY_ITSELF, FAILURE_REASON_TAG
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import SET_ASIDE, Status
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import counted

_WAITS_S = (10.0, 30.0, 90.0, 270.0, 600.0)
"""After the second failure in a row (none after the first), the third, …; then always the last of them."""
_SOON_S = 600.0
"""A run that worked for longer has failed for something new."""


def pause(instance: dg.DagsterInstance, ingest: Ingest, job: str, now: float) -> str | None:
    """Why no run is to be started yet: those before it have failed, one after the other. None: one may.

    `now` is a wall clock, seconds since 1970.
    """
    wanted = dg.RunsFilter(job_name=job, tags={RunTag.INGESTION: ingest.name})
    newest = instance.get_run_records(wanted, limit=len(_WAITS_S) + 1)
    failed = list(takewhile(lambda one: _failed_soon(one) and _by_itself(one.dagster_run), newest))
    if len(failed) < 2:
        return None
    last, next_at = failed[0], _ended(failed[0]) + _WAITS_S[len(failed) - 2]
    if now >= next_at:
        return None
    count = f"{len(failed)} or more" if len(failed) > len(_WAITS_S) else str(len(failed))
    return (
        f"{count} runs have failed one after the other, run {last.dagster_run.run_id[:8]} last."
        f" The next one starts at {datetime.fromtimestamp(next_at, UTC):%H:%M:%S} UTC;"
        f" to try at once, launch {job}."
    )


def _ended(record: dg.RunRecord) -> float:
    return record.end_time if record.end_time is not None else record.update_timestamp.timestamp()


def _failed_soon(record: dg.RunRecord) -> bool:
    if record.dagster_run.status is not dg.DagsterRunStatus.FAILURE:
        return False
    ended = _ended(record)
    return ended - (record.start_time if record.start_time is not None else ended) < _SOON_S


def _by_itself(run: dg.DagsterRun) -> bool:
    """Whether it has failed by what it did, or by what its publication found."""
    return run.tags.get(FAILURE_REASON_TAG) in FAILS_BY_ITSELF or run.tags.get(RunTag.STATUS) in FAILS


_ACTIVE = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_OBSERVED_EVERY_S = 60.0
_log = logging.getLogger(__name__)


def active_runs(instance: dg.DagsterInstance, ingest: Ingest) -> list[dg.DagsterRun]:
    """The runs of an ingestion that have not ended."""
    wanted = dg.RunsFilter(tags={RunTag.INGESTION: ingest.name}, statuses=_ACTIVE)
    return list(instance.get_runs(wanted))


def unpublished_run(instance: dg.DagsterInstance, ingest: Ingest, job: str) -> dg.DagsterRun | None:
    """The newest run of an ingestion's job, if it has succeeded and is yet to be published.

    Another one would read the same records, and be refused. Not one that waits for somebody's word: the
    records are published without it, and it is refused when it is taken up again.
    """
    wanted = dg.RunsFilter(job_name=job, tags={RunTag.INGESTION: ingest.name})
    for run in instance.get_runs(wanted, limit=1):
        done, tags = run.status is dg.DagsterRunStatus.SUCCESS, run.tags
        if done and tags.get(RunTag.STATUS) == Status.PENDING and tags.get(RunTag.NEXT_ATTEMPT) != SET_ASIDE:
            return run
    return None


def waiting(ingest: Ingest, lake: Lakehouse) -> Before:
    """What waits, by `main`. Raises as `look`."""
    topics, space = source_of(ingest, lake.settings).topics, lake.settings.default_namespace
    return look(ingest, lake.nessie, lake.catalog(MAIN), topics, namespace=space)


def told_and_observations(
    ingest: Ingest, lake: Lakehouse, told: float, at: float
) -> tuple[float, list[dg.AssetObservation]]:
    """How the topics are, if it was told a minute ago or longer, and when it was told last.

    Of topics that cannot be looked at only what receivers count is told: the batches say why.
    """
    if at - told < _OBSERVED_EVERY_S:
        return told, []
    monitors: list[Monitored] = []
    try:
        monitors = scrape(lake.settings.receiver_monitors)
        topics = source_of(ingest, lake.settings).topics
        before = waiting(ingest, lake)
        # Runs of one batch each end before they are published: what the group has is what `main` has.
        topics.report(ingest.group, before.current)
        return at, observations(ingest, before, topics, monitors)
    except Exception as error:  # noqa: BLE001 - what cannot be told holds up no batch, which says why itself
        strange = not isinstance(error, BranchlakeError)
        _log.warning("The topics of %s could not be looked at: %s", ingest.name, error, exc_info=strange)
        return at, without_brokers(ingest, monitors)


def batch_sensor(
    ingest: Ingest,
    job: str,
    *,
    lakehouse_key: str = "lakehouse",
    least_records: int = 10_000,
    most_age_s: float = 60.0,
    interval_s: int = 5,
    now: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """A sensor that starts the job for a batch, one at a time.

    When `least_records` wait, or some have waited for `most_age_s` seconds; ever later while its runs fail
    one after the other. How the topics are is told on their assets each minute, also while a run is at it.
    """

    @dg.sensor(
        name=f"ingest_{ingest.name}_sensor",
        job_name=job,
        minimum_interval_seconds=interval_s,
        required_resource_keys={lakehouse_key},
        description=f"Starts a batch of {ingest.name} when {least_records:,} records wait, or some for"
        f" {most_age_s:g} s.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        held = json.loads(context.cursor or "{}")
        at = now()
        told, events = told_and_observations(ingest, resource.lakehouse, held.get("told", 0.0), at)
        if active := active_runs(context.instance, ingest):
            reason = f"Run {active[0].run_id[:8]} is at it."
        elif done := unpublished_run(context.instance, ingest, job):
            reason = f"Run {done.run_id[:8]} is to be published first."
        else:
            reason = None
        if reason is not None:
            cursor = json.dumps({**held, "told": told})
            return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)
        try:
            before = waiting(ingest, resource.lakehouse)
        except BranchlakeError as error:
            if not isinstance(error, Transient):
                raise
            cursor = json.dumps({**held, "told": told})
            return dg.SensorResult(skip_reason=str(error), cursor=cursor, asset_events=events)
        count = records(before.plan.ranges) + before.plan.lag
        since = held.get("since", at) if count else None
        cursor = json.dumps({"told": told, **({"since": since} if since is not None else {})})
        aged = since is not None and at - since >= most_age_s
        if before.plan.due or count >= least_records or (count and aged):
            if later := pause(context.instance, ingest, job, at):
                return dg.SensorResult(skip_reason=later, cursor=cursor, asset_events=events)
            cursor = json.dumps({"told": told})
            request = dg.RunRequest(tags={RunTag.INGESTION: ingest.name})
            return dg.SensorResult([request], cursor=cursor, asset_events=events)
        reason = f"{counted(count, 'record')} waiting." if count else "Nothing waits."
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)

    return sensor
