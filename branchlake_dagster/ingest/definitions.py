"""The Dagster definitions of ingestions, to be merged into any `Definitions`.

In live mode, a run ingests batch after batch, and a sensor restarts it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from branchlake_dagster.extras import require_modules
from branchlake_dagster.ingest.batch_assets import build_batch_assets, count_read_tasks
from branchlake_dagster.ingest.batch_report import (
    batch_table_metadata,
    combine_results,
    format_batch_summary,
    iter_check_results,
    receiver_key,
    receiver_spec,
    to_check_evaluation,
    topic_key,
    topic_spec,
)
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.event_days import build_days_sensor, days_spec
from branchlake_dagster.ingest.ingest_sensor import (
    build_batch_sensor,
    find_pause_reason,
    landing_files_job,
    landing_files_schedule,
    list_active_runs,
    observe_topics,
    parse_times,
)
from branchlake_dagster.ingest.kafka_topics import Topics
from branchlake_dagster.ingest.live import LiveBatch, LiveIngestion, can_continue_after
from branchlake_dagster.ingest.topic_source import open_topic_source
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import EventMetadata, RunTag

_REPORT_EVERY_S = 10.0
"""Seconds between two reports of a live run to Dagster.

One report for each batch would be 86,400 rows a day for each table in Dagster's database."""
_GROUP_REPORT_EVERY_S = 5.0
_MAX_FAILURES = 10
"""Number of failures in a row after which a live run continues. One more failure ends the run.

The wait after each failure is twice as long as the wait before, up to `_MAX_WAIT_S`."""
_MAX_WAIT_S = 30.0


def live_job(ingest: Ingest, *, lakehouse_key: str, interval_s: float, run_s: float) -> dg.JobDefinition:
    """Build a job whose run ingests for `run_s` seconds, or until it is terminated or cannot continue.

    `interval_s` is the least number of seconds from the start of a batch to the start of the next one. The
    configuration of a run can change both times. `lakehouse_key` is the resource key of the lake.
    """

    @dg.op(
        name=f"ingest_{ingest.name}_batches",
        config_schema={
            "run_s": dg.Field(float, default_value=run_s, description="Seconds after which the run ends."),
            "interval_s": dg.Field(
                float,
                default_value=interval_s,
                description="Least time from the start of a batch to the next, in seconds.",
            ),
        },
        required_resource_keys={lakehouse_key},
        out=dg.Out(dg.Nothing),
        description=f"Ingests {', '.join(ingest.topics)} batch after batch, and publishes each at once.",
    )
    def batches(context: dg.OpExecutionContext) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        _run_live(context, ingest, resource)

    @dg.job(
        name=f"ingest_{ingest.name}_live",
        tags={RunTag.INGESTION: ingest.name},
        executor_def=dg.in_process_executor,
        description=f"Live ingestion {ingest.name}: each batch has its branch, checks and publication.",
    )
    def live() -> None:
        batches()

    return live


def live_sensor(
    ingest: Ingest,
    *,
    lakehouse_key: str = "lakehouse",
    interval_s: int = 3,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """Build a sensor that starts a live run whenever no run of the ingestion is active.

    If runs fail one after the other, the sensor waits longer after each. Each minute it also reports the
    state of the topics on their assets. `interval_s` is the least number of seconds between two ticks.
    `clock` returns the time in seconds since 1970.
    """
    job_name = f"ingest_{ingest.name}_live"

    @dg.sensor(
        name=f"ingest_{ingest.name}_live_sensor",
        job_name=job_name,
        minimum_interval_seconds=interval_s,
        required_resource_keys={lakehouse_key},
        description=f"Keeps a live run of {ingest.name} running.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        now, last_observed = clock(), parse_times(context.cursor).get("told", 0.0)
        last_observed, events = observe_topics(ingest, resource.lakehouse, last_observed, now)
        if live_runs := list_active_runs(context.instance, ingest):
            reason = f"Run {live_runs[0].run_id[:8]} is active."
            return dg.SensorResult(skip_reason=reason, cursor=str(last_observed), asset_events=events)
        if pause_reason := find_pause_reason(context.instance, ingest, job_name, now):
            return dg.SensorResult(skip_reason=pause_reason, cursor=str(last_observed), asset_events=events)
        request = dg.RunRequest(tags={RunTag.INGESTION: ingest.name})
        return dg.SensorResult([request], cursor=str(last_observed), asset_events=events)

    return sensor


def _run_live(context: dg.OpExecutionContext, ingest: Ingest, resource: LakehouseResource) -> None:
    lake = resource.lakehouse
    source = open_topic_source(ingest, lake.settings)
    topics = source.topics
    conf = resource.session_conf()
    live = LiveIngestion(
        ingest,
        lake,
        context.run_id,
        topics,
        source.records,
        session_at=lambda ref: lake.spark_session(ref, conf=conf),
        tasks=count_read_tasks(lake),
        properties=resource.maker_properties(),
    )
    config: dict[str, Any] = context.op_config
    with _close_at_end(live):
        run_batches(context, ingest, live, topics, run_s=config["run_s"], interval_s=config["interval_s"])


@contextmanager
def _close_at_end(live: LiveIngestion) -> Iterator[None]:
    try:
        yield
    finally:
        live.close()


def run_batches(
    context: dg.OpExecutionContext,
    ingest: Ingest,
    live: LiveIngestion,
    topics: Topics,
    *,
    run_s: float,
    interval_s: float,
) -> None:
    """Ingest batch after batch for `run_s` seconds, at least `interval_s` seconds from start to start.

    After an error that may pass, tries again with growing pauses, up to 10 times in a row. Raises other
    errors. The published batches are reported even if the run is interrupted.
    """
    end_time, failures = time.monotonic() + run_s, 0
    with _BatchReporter(context, ingest, topics) as reporter:
        while (start_time := time.monotonic()) < end_time:
            try:
                batch = live.publish_next_batch()
            except Exception as error:
                failures += 1
                if not can_continue_after(error) or failures > _MAX_FAILURES:
                    raise
                wait = min(0.5 * 2**failures, _MAX_WAIT_S)
                context.log.warning(
                    f"{error} Retrying in {wait:g} s (failure {failures} of at most {_MAX_FAILURES})."
                )
                time.sleep(wait)
                continue
            failures = 0
            if batch is not None:
                reporter.add(batch)
            reporter.report_if_due()
            time.sleep(max(0.0, interval_s - (time.monotonic() - start_time)))


class _BatchReporter:
    """Reports batches to Dagster and to the consumer group, several batches in one report."""

    def __init__(self, context: dg.OpExecutionContext, ingest: Ingest, topics: Topics) -> None:
        self._context = context
        self._ingest = ingest
        self._topics = topics
        self._unreported: list[LiveBatch] = []
        self._reported_at = self._group_reported_at = 0.0
        self._batches = 0
        self._logged_notes: set[str] = set()

    def __enter__(self) -> "_BatchReporter":
        return self

    def __exit__(self, *_: object) -> None:
        self._report()

    def add(self, batch: LiveBatch) -> None:
        """Keep a batch that is on `main` for the next report, and log its new notes.

        Reports the earlier batches first if their tables differ from those of this batch.
        """
        if self._unreported and self._unreported[-1].result.targets.names != batch.result.targets.names:
            self._report()  # the batches of one report must have the same tables
        self._batches += 1
        self._unreported.append(batch)
        # A note may come with every batch, and there may be a batch each second, so log each note once.
        for note in {*batch.result.notes} - self._logged_notes:
            self._logged_notes.add(note)
            self._context.log.warning(note)
        self._context.log.debug(
            f"Batch {self._batches}: {format_batch_summary(batch.result)} Published as"
            f" {batch.publication[:12]} after {batch.seconds:.2f} s."
        )

    def report_if_due(self) -> None:
        """Report the batches since the last report, if that is long enough ago.

        The consumer group gets the offsets every 5 seconds, and Dagster gets a report every 10 seconds.
        """
        now = time.monotonic()
        if self._unreported and now - self._group_reported_at >= _GROUP_REPORT_EVERY_S:
            self._group_reported_at = now
            self._topics.report_offsets(self._ingest.group, self._unreported[-1].result.current_offsets)
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self._report()

    def _report(self) -> None:
        if not self._unreported:
            return
        batches, self._unreported = self._unreported, []
        last = batches[-1]
        records = sum(batch.result.record_count for batch in batches)
        self._context.log.info(
            f"Published {len(batches)} batches with {records:,} records, the last after {last.seconds:.2f} s;"
            f" lag {last.result.plan.lag:,}."
        )
        self._topics.report_offsets(self._ingest.group, last.result.current_offsets)
        for event in self._events(batches):
            self._context.log_event(event)

    def _events(self, batches: list[LiveBatch]) -> Iterator[Any]:
        last = batches[-1]
        ingest = last.result.ingest
        combined_result = combine_results([batch.result for batch in batches])
        for number, key in enumerate(ingest.all_assets):
            if not combined_result.count_rows(number):
                continue
            metadata = {
                **batch_table_metadata(combined_result, number),
                EventMetadata.BATCHES: dg.MetadataValue.int(len(batches)),
                EventMetadata.VISIBLE_AFTER_S: dg.MetadataValue.float(
                    round(max(b.seconds for b in batches), 3)
                ),
            }
            yield dg.AssetMaterialization(key, metadata=metadata)
            verdict = "passed_with_warnings" if combined_result.dead_letter_count else "passed"
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
        counts, declarations = combined_result.scan_result.counts, last.result.targets.declarations
        for result in iter_check_results(ingest, counts, declarations):
            yield to_check_evaluation(result)


def ingest_definitions(
    *ingests: Ingest,
    lakehouse_key: str = "lakehouse",
    least_records: int = 10_000,
    most_age_s: float = 60.0,
    quiet_s: float | None = None,
    live_interval_s: float = 1.0,
    live_run_s: float = 6 * 3600.0,
    receivers: Iterable[str] = (),
    live: bool = True,
    running: bool = False,
) -> dg.Definitions:
    """Build the assets, checks, jobs and sensors of ingestions, and their topics as external assets.

    Each ingestion has two jobs. `ingest_<name>_job` ingests one batch in each run and is started by
    `ingest_<name>_sensor`. `ingest_<name>_live` publishes batch after batch in one run and is kept running by
    `ingest_<name>_live_sensor`. All sensors are off by default: turn on one of the two.

    Args:
        *ingests (Ingest): The ingestions.
        lakehouse_key (str): The resource key of the lake.
        least_records (int): Number of waiting records that starts a batch at once.
        most_age_s (float): Longest time that a record waits for a batch, in seconds.
        quiet_s (float | None): A batch also starts when records wait and their number has not changed for
            this time, in seconds, from one tick of the sensor to another. The ticks are 5 s apart, so 5 s are
            the shortest time. None: not for this reason.
        live_interval_s (float): Least time between two batches of a live run, in seconds.
        live_run_s (float): Time after which a live run ends and another one takes over, in seconds.
        receivers (Iterable[str]): Monitors of receivers (`http://host:9464`). Each gets an asset, so list it
            once in a code location. The metrics themselves come from the monitors in `BRANCHLAKE_RECEIVERS`.
        live (bool): Whether there are live runs. Live runs do not run your own checks, so
            `branchlake_definitions` refuses checks on these tables unless this is False.
        running (bool): Whether the sensors for single batches are on at first.

    Returns:
        Definitions: Merge them with your own definitions.

    Raises:
        MissingExtra: `pip install 'branchlake_dagster[kafka]'`

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import Ingest, IngestTable, branchlake_definitions, ingest_definitions

            table = IngestTable(key="raw/orders", columns={"id": "bigint", "price": "double"})
            orders = Ingest(name="orders", topics=["orders"], tables=[table])
            defs = branchlake_definitions(definitions=ingest_definitions(orders))
    """
    if any(one.source == "kafka" for one in ingests):
        require_modules("kafka", "confluent_kafka", needed_by="ingestion from Kafka")
    external_specs = {
        topic_key(one, topic): topic_spec(one, topic) for one in ingests for topic in one.topics
    }
    external_specs |= {receiver_key(one): receiver_spec(one) for one in receivers}
    assets: list[dg.AssetsDefinition] = []
    jobs: list[Any] = []
    sensors: list[dg.SensorDefinition] = []
    for ingest in ingests:
        tables = build_batch_assets(ingest, live=live)
        tags = {RunTag.INGESTION: ingest.name}
        job = dg.define_asset_job(
            f"ingest_{ingest.name}_job", selection=dg.AssetSelection.assets(tables), tags=tags
        )
        assets.append(tables)
        if day_specs := [days_spec(ingest, table) for table in ingest.tables if table.days_from is not None]:
            external_specs |= {spec.key: spec for spec in day_specs}
            sensors.append(build_days_sensor(ingest, lakehouse_key=lakehouse_key))
        jobs.append(job)
        sensors.append(
            build_batch_sensor(
                ingest,
                f"ingest_{ingest.name}_job",
                lakehouse_key=lakehouse_key,
                least_records=least_records,
                most_age_s=most_age_s,
                quiet_s=quiet_s,
                running=running,
            )
        )
        if live:
            jobs.append(
                live_job(ingest, lakehouse_key=lakehouse_key, interval_s=live_interval_s, run_s=live_run_s)
            )
            sensors.append(live_sensor(ingest, lakehouse_key=lakehouse_key))
    schedules = []
    if landing_ingests := [one for one in ingests if one.source == "landing"]:
        removal_job = landing_files_job(landing_ingests, lakehouse_key=lakehouse_key)
        jobs.append(removal_job)
        schedules.append(landing_files_schedule(removal_job))
    return dg.Definitions(
        assets=[*(external_specs[key] for key in sorted(external_specs)), *assets],
        jobs=jobs,
        schedules=schedules,
        sensors=sensors,
    )
