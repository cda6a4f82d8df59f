"""What starts the runs of an ingestion: enough records that wait, or records that have waited long enough."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

import dagster as dg

from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.ingest.batch.before import Before, look
from branchlake_dagster.ingest.declaring.declaration import Ingest
from branchlake_dagster.ingest.positions.offsets import records
from branchlake_dagster.ingest.reporting.observing import observations, without_brokers
from branchlake_dagster.ingest.running.batch_assets import INGESTION_TAG
from branchlake_dagster.ingest.running.pausing import pause
from branchlake_dagster.ingest.running.source import source_of
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.receivers.metrics_client import Monitored, scrape
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import NEXT_ATTEMPT_TAG, SET_ASIDE, STATUS_TAG, Status
from branchlake_dagster.wording import counted

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
    wanted = dg.RunsFilter(tags={INGESTION_TAG: ingest.name}, statuses=_ACTIVE)
    return list(instance.get_runs(wanted))


def unpublished_run(instance: dg.DagsterInstance, ingest: Ingest, job: str) -> dg.DagsterRun | None:
    """The newest run of an ingestion's job, if it has succeeded and is yet to be published.

    Another one would read the same records, and be refused. Not one that waits for somebody's word: the
    records are published without it, and it is refused when it is taken up again.
    """
    wanted = dg.RunsFilter(job_name=job, tags={INGESTION_TAG: ingest.name})
    for run in instance.get_runs(wanted, limit=1):
        done, tags = run.status is dg.DagsterRunStatus.SUCCESS, run.tags
        if done and tags.get(STATUS_TAG) == Status.PENDING and tags.get(NEXT_ATTEMPT_TAG) != SET_ASIDE:
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
            request = dg.RunRequest(tags={INGESTION_TAG: ingest.name})
            return dg.SensorResult([request], cursor=cursor, asset_events=events)
        reason = f"{counted(count, 'record')} waiting." if count else "Nothing waits."
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)

    return sensor
