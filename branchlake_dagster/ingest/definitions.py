"""The Dagster definitions of ingestions, to be merged into any `Definitions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dagster as dg

from branchlake_dagster.extras import require_modules
from branchlake_dagster.ingest.batch_assets import build_batch_assets
from branchlake_dagster.ingest.batch_report import receiver_key, receiver_spec, topic_key, topic_spec
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.ingest_sensor import (
    build_batch_sensor,
    landing_files_job,
    landing_files_schedule,
)
from branchlake_dagster.ingest.live_job import live_job, live_sensor
from branchlake_dagster.stored_names import RunTag


def ingest_definitions(
    *ingests: Ingest,
    lakehouse_key: str = "lakehouse",
    least_records: int = 10_000,
    most_age_s: float = 60.0,
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
        jobs.append(job)
        sensors.append(
            build_batch_sensor(
                ingest,
                f"ingest_{ingest.name}_job",
                lakehouse_key=lakehouse_key,
                least_records=least_records,
                most_age_s=most_age_s,
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
