"""Benchmark of ingestion with one run per batch, started by a real Dagster daemon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.bench.ingestion_project import NAME, TABLE, TOPIC
from branchlake_dagster.bench.kafka_feed import BenchFeed, send_in_background
from branchlake_dagster.bench.launched_run import BenchFailed, start_sensor
from branchlake_dagster.bench.time_to_visibility import measure_delays, publication_times
from branchlake_dagster.cli.dagster_home import dagster_dev, dagster_home
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.waiting import holds_within

_MODULE = "branchlake_dagster.bench.ingestion_project"
_TIMEOUT_S = 180.0
_FIRST_RECORDS = 10_000


def measure_run_delays(
    lake: Lakehouse, cluster: KafkaCluster, rate: int, seconds: float
) -> np.ndarray[Any, Any]:
    """Measure the seconds from sending each record until it is on `main`.

    The sensor has its default settings, and starts one run per batch. Before the measurement, the servers,
    the daemon and the sensor have published a first batch.

    Raises:
        BenchFailed: Three minutes after the last record was sent, records are missing or doubled on `main`.
    """
    feed = BenchFeed(cluster, f"runs{rate}")
    feed.create_topic()
    environment = {
        "BRANCHLAKE_STATE_DIR": str(lake.settings.state_dir),
        "BRANCHLAKE_KAFKA_BOOTSTRAP": cluster.bootstrap,
        TOPIC: feed.topic,
    }
    home = dagster_home(lake.settings)
    with dagster_dev(_MODULE, home=Path(home), environment=environment) as url:
        start_sensor(url, _MODULE, f"ingest_{NAME}_sensor")
        feed.send_flat_out(_FIRST_RECORDS)
        holds_within(_TIMEOUT_S, lambda: _count_rows(lake) >= _FIRST_RECORDS, every_s=0.2)
        start_time = time.time()
        with send_in_background(feed, rate, seconds) as sender:
            sender.join()
        sent_count = sum(map(len, feed.send_times))
        holds_within(_TIMEOUT_S, lambda: _count_rows(lake) >= sent_count, every_s=0.5)
        table = lake.catalog(MAIN).load_table(TABLE)
        publication_s = publication_times(lake, TABLE)
        delays_s = measure_delays(
            table, feed, lambda snapshot: publication_s[snapshot.snapshot_id], since=start_time
        )
        with dg.DagsterInstance.get() as instance:
            holds_within(60.0, lambda: all(run.is_finished for run in instance.get_runs()), every_s=0.2)
    if len(delays_s) != sent_count - _FIRST_RECORDS:
        raise BenchFailed(
            f"{sent_count - _FIRST_RECORDS:,} records were sent, but {len(delays_s):,} are on main."
        )
    lake.catalog(MAIN).drop_table(TABLE)
    return delays_s


def _count_rows(lake: Lakehouse) -> int:
    try:
        snapshot = lake.catalog(MAIN).load_table(TABLE).current_snapshot()
    except NoSuchTableError:
        return 0
    summary = snapshot.summary if snapshot is not None else None
    return int(summary["total-records"] or 0) if summary is not None else 0
