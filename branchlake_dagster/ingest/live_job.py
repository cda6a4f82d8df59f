"""The live mode in Dagster: one run that ingests batch after batch, and the sensor that keeps one going."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from branchlake_dagster.ingest.batch_assets import tasks_of
from branchlake_dagster.ingest.batch_report import (
    check_results,
    combined,
    evaluation,
    sentence,
    table_metadata_of,
)
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.ingest_sensor import active_runs, pause, told_and_observations
from branchlake_dagster.ingest.kafka_topics import Topics
from branchlake_dagster.ingest.live import LiveBatch, LiveIngestion, may_go_on
from branchlake_dagster.ingest.topic_source import source_of
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import EventMetadata, RunTag

_TOLD_EVERY_S = 10.0
"""A batch a second would be 86,400 rows a day for each table in Dagster's database."""
_GROUP_TOLD_EVERY_S = 5.0
_MOST_FAILURES = 10
"""In a row, before the run gives up; each waits twice as long as the one before."""
_LONGEST_WAIT_S = 30.0


def live_job(ingest: Ingest, *, lakehouse_key: str, interval_s: float, run_s: float) -> dg.JobDefinition:
    """A job whose run ingests until it has run for `run_s` seconds, is terminated, or cannot go on."""

    @dg.op(
        name=f"ingest_{ingest.name}_batches",
        config_schema={
            "run_s": dg.Field(float, default_value=run_s, description="Seconds after which it ends."),
            "interval_s": dg.Field(
                float, default_value=interval_s, description="Least time from batch to batch, seconds."
            ),
        },
        required_resource_keys={lakehouse_key},
        out=dg.Out(dg.Nothing),
        description=f"Ingests {', '.join(ingest.topics)} batch after batch, each published at once.",
    )
    def batches(context: dg.OpExecutionContext) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        _run(context, ingest, resource)

    @dg.job(
        name=f"ingest_{ingest.name}_live",
        tags={RunTag.INGESTION: ingest.name},
        executor_def=dg.in_process_executor,
        description=f"{ingest.name}, live: a branch, its checks and a publication for each batch.",
    )
    def live() -> None:
        batches()

    return live


def live_sensor(
    ingest: Ingest,
    *,
    lakehouse_key: str = "lakehouse",
    interval_s: int = 5,
    now: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """A sensor that starts the live run when none is there: the first, and after each that has ended.

    Ever later while they fail one after the other. How the topics are is told on their assets each minute.
    """
    job = f"ingest_{ingest.name}_live"

    @dg.sensor(
        name=f"ingest_{ingest.name}_live_sensor",
        job_name=job,
        minimum_interval_seconds=interval_s,
        required_resource_keys={lakehouse_key},
        description=f"Keeps a live run of {ingest.name} going.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        at, told = now(), float(context.cursor or 0.0)
        told, events = told_and_observations(ingest, resource.lakehouse, told, at)
        if active := active_runs(context.instance, ingest):
            reason = f"Run {active[0].run_id[:8]} is at it."
            return dg.SensorResult(skip_reason=reason, cursor=str(told), asset_events=events)
        if later := pause(context.instance, ingest, job, at):
            return dg.SensorResult(skip_reason=later, cursor=str(told), asset_events=events)
        request = dg.RunRequest(tags={RunTag.INGESTION: ingest.name})
        return dg.SensorResult([request], cursor=str(told), asset_events=events)

    return sensor


def _run(context: dg.OpExecutionContext, ingest: Ingest, resource: LakehouseResource) -> None:
    lake = resource.lakehouse
    source = source_of(ingest, lake.settings)
    topics = source.topics
    conf = resource.session_conf()
    live = LiveIngestion(
        ingest,
        lake,
        context.run_id,
        topics,
        source.records,
        session_at=lambda ref: lake.spark_session(ref, conf=conf),
        tasks=tasks_of(lake),
        properties=resource.maker(),
    )
    config: dict[str, Any] = context.op_config
    with _closing(live):
        keep_going(context, ingest, live, topics, run_s=config["run_s"], interval_s=config["interval_s"])


@contextmanager
def _closing(live: LiveIngestion) -> Iterator[None]:
    try:
        yield
    finally:
        live.close()


def keep_going(
    context: dg.OpExecutionContext,
    ingest: Ingest,
    live: LiveIngestion,
    topics: Topics,
    *,
    run_s: float,
    interval_s: float,
) -> None:
    """Batch after batch until the time is over; what is told is told in time also when it is interrupted."""
    ends, failures = time.monotonic() + run_s, 0
    with _Telling(context, ingest, topics) as telling:
        while (began := time.monotonic()) < ends:
            try:
                batch = live.batch()
            except Exception as error:
                failures += 1
                if not may_go_on(error) or failures > _MOST_FAILURES:
                    raise
                wait = min(0.5 * 2**failures, _LONGEST_WAIT_S)
                context.log.warning(f"{error} Again in {wait:g} s ({failures} of {_MOST_FAILURES}).")
                time.sleep(wait)
                continue
            failures = 0
            if batch is not None:
                telling.add(batch)
            telling.now_and_then()
            time.sleep(max(0.0, interval_s - (time.monotonic() - began)))


class _Telling:
    """What Dagster and the consumer group are told: of several batches at once, not of each."""

    def __init__(self, context: dg.OpExecutionContext, ingest: Ingest, topics: Topics) -> None:
        self._context = context
        self._ingest = ingest
        self._topics = topics
        self._waiting: list[LiveBatch] = []
        self._told = self._group_told = 0.0
        self._batches = 0
        self._noted: set[str] = set()

    def __enter__(self) -> "_Telling":
        return self

    def __exit__(self, *_: object) -> None:
        self._tell()

    def add(self, batch: LiveBatch) -> None:
        """A batch that is on `main`."""
        if self._waiting and _names(self._waiting[-1]) != _names(batch):
            self._tell()  # what is told together is of the same tables
        self._batches += 1
        self._waiting.append(batch)
        # Some are the same with every batch, which may be a second long.
        for note in {*batch.result.notes} - self._noted:
            self._noted.add(note)
            self._context.log.warning(note)
        self._context.log.debug(
            f"Batch {self._batches}: {sentence(batch.result)} On main as {batch.publication[:12]} after"
            f" {batch.seconds:.2f} s."
        )

    def now_and_then(self) -> None:
        """Tell what has come together, if it is time."""
        now = time.monotonic()
        if self._waiting and now - self._group_told >= _GROUP_TOLD_EVERY_S:
            self._group_told = now
            self._topics.report(self._ingest.group, self._waiting[-1].result.current)
        if now - self._told >= _TOLD_EVERY_S:
            self._told = now
            self._tell()

    def _tell(self) -> None:
        if not self._waiting:
            return
        batches, self._waiting = self._waiting, []
        last = batches[-1]
        records = sum(one.result.records for one in batches)
        self._context.log.info(
            f"{len(batches)} batches, {records:,} records on main, the last after {last.seconds:.2f} s;"
            f" {last.result.plan.lag:,} left."
        )
        self._topics.report(self._ingest.group, last.result.current)
        for event in self._events(batches):
            self._context.log_event(event)

    def _events(self, batches: list[LiveBatch]) -> Iterator[Any]:
        last = batches[-1]
        ingest = last.result.ingest
        keys = [*(table.asset for table in ingest.tables), ingest.dead_letters_asset]
        together = combined([one.result for one in batches])
        for number, key in enumerate(keys):
            dead = number == len(keys) - 1
            if not (together.dead if dead else together.scanned.rows(number)):
                continue
            metadata = {
                **table_metadata_of(together, number),
                EventMetadata.BATCHES: dg.MetadataValue.int(len(batches)),
                EventMetadata.VISIBLE_AFTER_S: dg.MetadataValue.float(
                    round(max(b.seconds for b in batches), 3)
                ),
            }
            yield dg.AssetMaterialization(key, metadata=metadata)
            verdict = "passed_with_warnings" if together.dead else "passed"
            yield dg.AssetObservation(
                key,
                description=f"Published as {last.publication}.",
                metadata={
                    EventMetadata.PUBLICATION: dg.MetadataValue.text(last.publication),
                    EventMetadata.VERDICT: dg.MetadataValue.text(verdict),
                    EventMetadata.RUN: dg.MetadataValue.dagster_run(self._context.run_id),
                    EventMetadata.TABLES: dg.MetadataValue.text(last.result.targets[number].name),
                },
            )
        for result in check_results(ingest, together.scanned.counts, _names(last)):
            yield evaluation(result)


def _names(batch: LiveBatch) -> list[str]:
    return [one.name for one in batch.result.targets]
