"""Measure a live ingestion and queries, first alone and then beside the maintenance of the lake."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
from pyiceberg.table import Table

from branchlake_dagster.bench.ingestion import open_live_ingestion
from branchlake_dagster.bench.kafka_feed import COLUMNS, BenchFeed, send_in_background
from branchlake_dagster.bench.lake_processes import (
    LakeProcess,
    MaintenanceFigures,
    ReadFigures,
    maintain_until_stopped,
    read_until_stopped,
)
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.bench.time_to_visibility import OFFSET_COLUMNS, pack_offsets
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.live import LiveBatch, LiveIngestion
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings

_RATE = 500
"""Records per second."""
_FIRST_RECORDS = 1_000
"""Records of a table before its phase begins, so that readers find rows."""
_KEEP_SNAPSHOTS = 20
"""How many snapshots the ingestion keeps: few, so that it removes some beside the expiry."""
_MAX_BATCH = 100_000
_STRAY_FILES = 100
_LONGEST_WRITE_S = 120.0
"""The grace of the collection. Nothing else protects the files of a batch, which has no heartbeats here."""
_ROUNDS_PER_PHASE = 10
_MAX_ROUND_S = 60.0
_CATCH_UP_S = 600.0
MOST_MINUTES_WITHOUT = 10.0
"""The longest first phase in minutes: 500 queries suffice for a comparison of their 95th percentiles."""


def measure_live_maintenance(
    settings: Settings, *, minutes: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Ingest 500 records a second live in two phases, and measure what the maintenance costs.

    Both phases have their own table, 50 queries a minute by DuckDB, and a Spark reader. In the second phase,
    a process compacts, expires and collects every minute, or ten times in a shorter phase. The lake is a
    temporary one. Collections delete files that were never committed: all commits of the benchmark are within
    the history horizon.

    Args:
        settings: The settings of the lake.
        minutes: The minutes of the second phase. The first has as many, but at most `MOST_MINUTES_WITHOUT`.
        say: Called with lines of progress.

    Returns:
        Figures by name. `live_minutes_without` and `live_minutes` are the minutes of the phases.
            `live_p50_…_s` and `live_p99_…_s` are seconds from sending a record until its batch was published,
            `query_p95_…_s` and `spark_p95_…_s` the seconds of a query; `…_without_…` is the first phase and
            `…_with_…` the second. `files_after_hour_of_live` counts the data files of the second table at its
            end, and `files_without_maintenance` those of the first. `live_lost` and `live_doubled` count
            records of both, `live_refused` batches that raised an error, `failed_reads` and `wrong_reads` the
            reads that raised one, and those with missing or doubled rows. Raises BenchFailed if a process
            fails.
    """
    grace_h = min(_LONGEST_WRITE_S, minutes * 60) / 3600
    with own_lake(settings) as bench_settings, ExitStack() as ending:
        rules = {"deletion_delay_h": 0.0, "orphan_file_grace_h": grace_h}
        lake = Lakehouse(bench_settings.model_copy(update=rules), say=say)
        kafka = EmbeddedKafka(bench_settings, say=say)
        ending.callback(lake.servers.stop_all)
        ending.callback(kafka.down)
        lake.endpoints()
        ensure_main_has_commit(lake.nessie)
        minutes_without = min(minutes, MOST_MINUTES_WITHOUT)
        trial = _Trial(lake, kafka.cluster(), say)
        say("Warming up …")
        trial.warm_up()
        say(f"{minutes_without:g} minutes of live ingestion without maintenance …")
        alone = trial.run_phase("alone", minutes_without * 60, is_maintained=False)
        say(f"{minutes:g} minutes of live ingestion with maintenance …")
        maintained = trial.run_phase("maintained", minutes * 60, is_maintained=True)
        return {
            "live_minutes_without": minutes_without,
            "live_minutes": minutes,
            **_compare_phases(alone, maintained),
        }


@dataclass
class _Phase:
    """The outcome of a phase. `delays_s` are the seconds from sending each record to its publication."""

    delays_s: np.ndarray[Any, Any]
    reads: ReadFigures
    maintenance: MaintenanceFigures | None
    files: int
    lost: int
    doubled: int
    refused: list[str]


@dataclass
class _Ingestion:
    """An ingestion, its records, its published `batches`, and the errors of other batches in `refused`."""

    live: LiveIngestion
    feed: BenchFeed
    identifier: tuple[str, str]
    batches: list[LiveBatch] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all records that were sent so far are published."""
        published = sum(batch.result.record_count for batch in self.batches)
        return published >= sum(map(len, self.feed.send_times))

    def publish_next(self) -> None:
        """Publish a batch if records wait; else wait for 50 ms. An error counts as a refusal."""
        try:
            batch = self.live.publish_next_batch()
        except BranchlakeError as error:
            self.refused.append(f"{type(error).__name__}: {error}")
            return
        if batch is None:
            time.sleep(0.05)
        else:
            self.batches.append(batch)

    def publish_all(self) -> None:
        """Publish batches until all records are published, for at most ten minutes."""
        deadline = time.monotonic() + _CATCH_UP_S
        while not self.is_complete and time.monotonic() < deadline:
            self.publish_next()

    def list_delays(self, first_batch: int) -> np.ndarray[Any, Any]:
        """Return the seconds from sending to publication, of all records of batches from `first_batch` on.

        They are computed from the offsets of batches, because snapshots expire.
        """
        delays = [np.empty(0)]
        for batch in self.batches[first_batch:]:
            for partition, offsets in batch.result.plan.ranges.items():
                send_times = self.feed.send_times[partition.partition][offsets.start : offsets.end]
                delays.append(batch.published_at.timestamp() - np.array(send_times))
        return np.concatenate(delays)


@dataclass
class _Trial:
    lake: Lakehouse
    cluster: KafkaCluster
    say: Callable[[str], None]

    def warm_up(self) -> None:
        """Ingest into a table of its own, and leave files there that no commit has."""
        ingestion = self._open("warm")
        ingestion.publish_all()
        ingestion.live.close()
        folder = Path(urlparse(self._load(ingestion).location()).path) / "data"
        for _ in range(_STRAY_FILES):
            (folder / f"stray-{uuid.uuid4()}.parquet").write_bytes(b"never committed")

    def run_phase(self, name: str, seconds: float, *, is_maintained: bool) -> _Phase:
        ingestion = self._open(name)
        ingestion.publish_all()
        first_batch, table = len(ingestion.batches), ".".join(ingestion.identifier)
        maintenance: LakeProcess[MaintenanceFigures] | None = None
        with ExitStack() as ending:
            ending.callback(ingestion.live.close)
            readers = LakeProcess(read_until_stopped, self.lake.settings, table)
            ending.callback(readers.kill)
            if is_maintained:
                every_s = min(_MAX_ROUND_S, seconds / _ROUNDS_PER_PHASE)
                maintenance = LakeProcess(maintain_until_stopped, self.lake.settings, every_s)
                ending.callback(maintenance.kill)
                maintenance.wait_until_ready()
            readers.wait_until_ready()
            with send_in_background(ingestion.feed, _RATE, seconds) as sender:
                while sender.is_alive():
                    ingestion.publish_next()
            ingestion.publish_all()
            reads = readers.finish()
            done = maintenance.finish() if maintenance is not None else None
        files = len(list(self._load(ingestion).scan().plan_files()))
        delays_s = ingestion.list_delays(first_batch)
        self.say(f"{len(ingestion.batches):,} batches, {len(reads.query_s):,} queries, {files:,} files.")
        return _Phase(delays_s, reads, done, files, *self._count_errors(ingestion), ingestion.refused)

    def _open(self, name: str) -> _Ingestion:
        """Open an ingestion into the new table `live_{name}.records`, and send its first records."""
        feed = BenchFeed(self.cluster, f"live_{name}")
        feed.create_topic()
        feed.send_flat_out(_FIRST_RECORDS)
        identifier = (f"live_{name}", "records")
        attributes: dict[str, Any] = dict(zip(OFFSET_COLUMNS, ("partition", "offset"), strict=True))
        ingest = Ingest(
            name=f"live_{name}",
            topics=[feed.topic],
            tables=[IngestTable(key=list(identifier), columns=COLUMNS, attributes=attributes)],
            route_by="topic",
            most_records=_MAX_BATCH,
            keep_snapshots=_KEEP_SNAPSHOTS,
        )
        return _Ingestion(open_live_ingestion(ingest, self.lake, self.cluster), feed, identifier)

    def _load(self, ingestion: _Ingestion) -> Table:
        return self.lake.catalog(MAIN).load_table(ingestion.identifier)

    def _count_errors(self, ingestion: _Ingestion) -> tuple[int, int]:
        """Return the numbers of lost and of doubled records of a table."""
        rows = self._load(ingestion).scan(selected_fields=OFFSET_COLUMNS).to_arrow()
        positions = pack_offsets(rows)
        sent = [
            partition << 40 | np.arange(len(times))
            for partition, times in enumerate(ingestion.feed.send_times)
        ]
        lost = np.setdiff1d(np.concatenate(sent), positions).size
        return int(lost), int(positions.size - np.unique(positions).size)


def _compare_phases(alone: _Phase, maintained: _Phase) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, phase in (("without", alone), ("with", maintained)):
        figures |= {
            f"live_p50_{name}_s": _quantile(phase.delays_s, 0.5),
            f"live_p99_{name}_s": _quantile(phase.delays_s, 0.99),
            f"query_p95_{name}_s": _quantile(phase.reads.query_s, 0.95),
            f"spark_p95_{name}_s": _quantile(phase.reads.spark_s, 0.95),
            f"queries_{name}": len(phase.reads.query_s),
            f"spark_reads_{name}": len(phase.reads.spark_s),
        }
    phases, done = (alone, maintained), maintained.maintenance or MaintenanceFigures()
    return figures | {
        "files_without_maintenance": alone.files,
        "files_after_hour_of_live": maintained.files,
        "live_records": sum(phase.delays_s.size for phase in phases),
        "live_lost": sum(phase.lost for phase in phases),
        "live_doubled": sum(phase.doubled for phase in phases),
        "live_refused": sum(len(phase.refused) for phase in phases),
        "failed_reads": sum(phase.reads.failed for phase in phases),
        "wrong_reads": sum(phase.reads.wrong for phase in phases),
        "maintenance_rounds": done.rounds,
        "maintenance_failed": done.failed,
        "compactions": done.compactions,
        "compacted_files": done.compacted_files,
        "expired_snapshots": done.expired_snapshots,
        "collected_files": done.collected_files,
        "problems": [
            *(problem for phase in phases for problem in (*phase.refused, *phase.reads.errors)),
            *done.errors,
        ],
    }


def _quantile(seconds: Any, share: float) -> float | None:
    return round(float(np.quantile(seconds, share)), 2) if len(seconds) else None
