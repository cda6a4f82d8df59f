"""The benchmark `branchlake bench ingest`: throughput and delay, compared with Spark Structured Streaming."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.ingestion_by_runs import measure_run_delays
from branchlake_dagster.bench.kafka_feed import COLUMNS, SITES, BenchFeed, send_in_background
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.bench.time_to_visibility import (
    OFFSET_COLUMNS,
    measure_delays,
    pack_offsets,
    publication_times,
)
from branchlake_dagster.ingest.batch_assets import count_read_tasks
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.live import LiveBatch, LiveIngestion
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.ingest.spark_expressions import format_ddl
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings

_BATCH = 250_000
_RATES = (1_000, 10_000)
_WARM_UP_RECORDS = 20_000


def measure_ingestion(
    settings: Settings, *, records: int, seconds: float, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure ingestion and Spark Structured Streaming on the same topic, in a temporary state folder.

    - `records_per_s`, `kept_records_per_s`, `records_10_tables_per_s`, `plain_records_per_s`: medians of
      `rounds` at full speed, with warm servers, from the first offset until all records are on `main`. The
      kept records also go into the table of kept records (`keep_value`).
    - `sustained_…`: the same without the first batch, which starts Python workers and compiles the plan.
    - `p50_visible_s_…`, `p99_visible_s_…`: seconds from sending a record until it is on `main`, at each
      rate for `seconds` seconds.
    - `plain_…`: the figures of Structured Streaming.
    - `runs_…`: the figures with one run per batch, in a real daemon with the default settings of the sensor.
    - `lost`, `doubled`: records of all live ingestions that are missing on `main`, or that `main` has twice.
    """
    with own_lake(settings) as bench_settings:
        lake = Lakehouse(bench_settings, say=say)
        kafka = EmbeddedKafka(bench_settings, say=say)
        try:
            lake.endpoints()
            ensure_main_has_commit(lake.nessie)
            return _IngestionBench(lake, kafka.cluster(), say).measure(records, seconds, rounds)
        finally:
            kafka.down()
            lake.servers.stop_all()


def open_live_ingestion(ingest: Ingest, lake: Lakehouse, cluster: KafkaCluster) -> LiveIngestion:
    """Return a live ingestion without a Dagster run, so without heartbeats. Close it at the end."""
    topics = KafkaTopics(cluster)
    return LiveIngestion(
        ingest,
        lake,
        "00000000-0000-0000-0000-000000000000",
        topics,
        KafkaRecords(cluster, topics),
        session_at=lake.spark_session,
        tasks=count_read_tasks(lake),
        properties={},
    )


@dataclass
class _IngestionBench:
    lake: Lakehouse
    cluster: KafkaCluster
    say: Callable[[str], None]
    _name_count: int = 0

    def measure(self, records: int, seconds: float, rounds: int) -> dict[str, Any]:
        feed = BenchFeed(self.cluster, "flat")
        feed.create_topic()
        self.say(f"Sending {records:,} records …")
        feed.send_flat_out(records)
        figures: dict[str, Any] = {"records": records, "lost": 0, "doubled": 0}
        self.say("Warming up …")
        self._stream_flat_out("flat", _WARM_UP_RECORDS)
        self._ingest_flat_out("flat", 1, _WARM_UP_RECORDS)
        self._ingest_flat_out("flat", SITES, _WARM_UP_RECORDS)
        throughputs: dict[str, list[_Throughput]] = {
            "plain_records": [],
            "records": [],
            "kept_records": [],
            "records_10_tables": [],
        }
        for number in range(rounds):
            self.say(f"Full speed, round {number + 1} of {rounds} …")
            throughputs["plain_records"].append(self._stream_flat_out("flat", records))
            for name, tables in (("records", 1), ("kept_records", 1), ("records_10_tables", SITES)):
                throughput, lost, doubled = self._ingest_flat_out(
                    "flat", tables, records, keep_value=name == "kept_records"
                )
                throughputs[name].append(throughput)
                figures["lost"] += lost
                figures["doubled"] += doubled
        for name, samples in throughputs.items():
            figures[f"{name}_per_s"] = round(float(np.median([sample.per_s for sample in samples])))
            figures[f"sustained_{name}_per_s"] = round(
                float(np.median([sample.sustained_per_s for sample in samples]))
            )
        for rate in _RATES:
            self.say(f"{rate:,} records per second for {seconds:g} s, live and with Structured Streaming …")
            live = self._ingest_live(rate, seconds)
            plain = self._stream_at_rate(rate, seconds)
            figures[f"p50_visible_s_{rate}"], figures[f"p99_visible_s_{rate}"] = _delay_quantiles(
                live.delays_s
            )
            figures[f"plain_p50_visible_s_{rate}"], figures[f"plain_p99_visible_s_{rate}"] = _delay_quantiles(
                plain
            )
            figures[f"publications_per_h_{rate}"] = round(live.batches / live.seconds * 3600)
            figures[f"files_per_h_{rate}"] = round(live.files / live.seconds * 3600)
            figures["lost"] += live.lost
            figures["doubled"] += live.doubled
            self.say(f"{rate:,} records per second for {seconds:g} s, with one run per batch …")
            runs = measure_run_delays(self.lake, self.cluster, rate, seconds)
            figures[f"runs_p50_visible_s_{rate}"], figures[f"runs_p99_visible_s_{rate}"] = _delay_quantiles(
                runs
            )
        highest_rate = _RATES[-1]
        figures["p99_visible_s"] = figures[f"p99_visible_s_{highest_rate}"]
        figures["plain_p99_visible_s"] = figures[f"plain_p99_visible_s_{highest_rate}"]
        for prefix in ("", "sustained_"):
            ours, plain = (
                figures[f"{prefix}{name}_per_s"] for name in ("records_10_tables", "plain_records")
            )
            figures[f"{prefix}throughput_ratio"] = round(ours / plain, 2)
        return figures

    # -- branchlake ------------------------------------------------------------------------------------

    def _create_ingestion(
        self, topic: str, tables: int, max_records: int, *, keep_value: bool = False
    ) -> tuple[Ingest, LiveIngestion]:
        self._name_count += 1
        name = f"bench{self._name_count}"
        attributes: dict[str, Any] = {"partition_": "partition", "offset_": "offset"}
        ingest_tables = (
            [IngestTable(key=[name, "all"], columns=COLUMNS, attributes=attributes)]
            if tables == 1
            else [
                IngestTable(key=[name, f"t{site}"], columns=COLUMNS, route=f"s{site}", attributes=attributes)
                for site in range(tables)
            ]
        )
        route_by = "topic" if tables == 1 else "site"
        ingest = Ingest(
            name=name,
            topics=[topic],
            tables=ingest_tables,
            route_by=route_by,
            most_records=max_records,
            keep_value=keep_value,
        )
        return ingest, open_live_ingestion(ingest, self.lake, self.cluster)

    def _ingest_flat_out(
        self, topic: str, tables: int, records: int, *, keep_value: bool = False
    ) -> tuple[_Throughput, int, int]:
        """Ingest at full speed. Return the throughput and the numbers of lost and doubled records."""
        ingest, live = self._create_ingestion(topic, tables, min(_BATCH, records), keep_value=keep_value)
        record_count, began = 0, time.perf_counter()
        batches = []
        while record_count < records and (batch := live.publish_next_batch()) is not None:
            record_count += batch.result.record_count
            batches.append((batch.result.record_count, batch.published_at.timestamp()))
        elapsed_s = time.perf_counter() - began
        live.close()
        return _Throughput.from_batches(batches, elapsed_s), *self._count_errors(ingest, record_count)

    def _count_errors(self, ingest: Ingest, sent_count: int) -> tuple[int, int]:
        offsets = self._read_offsets(ingest)
        distinct_count = len(np.unique(offsets))
        return sent_count - distinct_count, len(offsets) - distinct_count

    def _read_offsets(self, ingest: Ingest) -> np.ndarray[Any, Any]:
        catalog = self.lake.catalog(MAIN)
        parts = []
        for table in ingest.tables:
            rows = catalog.load_table(tuple(table.asset.path)).scan(selected_fields=OFFSET_COLUMNS).to_arrow()
            parts.append(pack_offsets(rows))
        return np.concatenate(parts)

    def _ingest_live(self, rate: int, seconds: float) -> _LiveFigures:
        ingest, live = self._create_ingestion(f"live{rate}", 1, _BATCH)
        feed = BenchFeed(self.cluster, f"live{rate}")
        feed.create_topic()
        batches: list[LiveBatch] = []
        with send_in_background(feed, rate, seconds) as sender:
            began = time.perf_counter()
            while (
                sender.is_alive() or not batches or _count_records(batches) < sum(map(len, feed.send_times))
            ):
                if (batch := live.publish_next_batch()) is not None:
                    batches.append(batch)
                else:
                    time.sleep(0.05)
        elapsed_s = time.perf_counter() - began
        live.close()
        (table,) = (tuple(item.asset.path) for item in ingest.tables)
        publication_s = publication_times(self.lake, table)
        delays_s = measure_delays(
            self.lake.catalog(MAIN).load_table(table),
            feed,
            lambda snapshot: publication_s[snapshot.snapshot_id],
        )
        lost, doubled = self._count_errors(ingest, sum(map(len, feed.send_times)))
        files = sum(len(item) for batch in batches for item in batch.result.scan_result.files.values())
        return _LiveFigures(delays_s, len(batches), files, elapsed_s, lost, doubled)

    # -- Spark Structured Streaming --------------------------------------------------------------------

    def _open_stream(self, session: SparkSession, topic: str, table: str) -> Any:
        self._name_count += 1
        schema = format_ddl(list(COLUMNS.items()))
        session.sql("CREATE NAMESPACE IF NOT EXISTS nessie.plain")
        session.sql(
            f"CREATE TABLE nessie.plain.{table} ({schema}, partition_ int, offset_ bigint) USING iceberg"
        )
        options = {**self.cluster.spark_options(), "subscribe": topic, "startingOffsets": "earliest"}
        records = (
            session.readStream.format("kafka").options(**options, maxOffsetsPerTrigger=str(_BATCH)).load()
        )
        rows = records.select(
            F.from_json(F.col("value").cast("string"), schema).alias("row"),
            F.col("partition").alias("partition_"),
            F.col("offset").alias("offset_"),
        ).select("row.*", "partition_", "offset_")
        checkpoint = self.lake.settings.state_dir / "checkpoints" / table
        return rows.writeStream.format("iceberg").option("checkpointLocation", checkpoint.as_uri())

    def _stream_flat_out(self, topic: str, records: int) -> _Throughput:
        del records  # the stream has no limit and reads all records of the topic
        session = self.lake.spark_session(MAIN)
        table = f"flat{self._name_count}"
        stream = self._open_stream(session, topic, table)
        began = time.perf_counter()
        query = stream.trigger(availableNow=True).toTable(f"nessie.plain.{table}")
        query.awaitTermination()
        elapsed_s = time.perf_counter() - began
        session.stop()
        snapshots = self.lake.catalog(MAIN).load_table(("plain", table)).metadata.snapshots
        batches = [
            (int(snapshot.summary["added-records"] or 0), snapshot.timestamp_ms / 1000)
            for snapshot in snapshots
            if snapshot.summary is not None
        ]
        return _Throughput.from_batches(batches, elapsed_s)

    def _stream_at_rate(self, rate: int, seconds: float) -> np.ndarray[Any, Any]:
        """Stream records at a rate. Return their delays, from sending to the time of their snapshot."""
        topic = f"plain{rate}"
        feed = BenchFeed(self.cluster, topic)
        feed.create_topic()
        session = self.lake.spark_session(MAIN)
        stream = self._open_stream(session, topic, topic)
        query = stream.trigger(processingTime="0 seconds").toTable(f"nessie.plain.{topic}")
        with send_in_background(feed, rate, seconds) as sender:
            sender.join()
        query.processAllAvailable()
        query.stop()
        session.stop()
        table = self.lake.catalog(MAIN).load_table(("plain", topic))
        return measure_delays(table, feed, lambda snapshot: snapshot.timestamp_ms / 1000)


@dataclass(frozen=True)
class _Throughput:
    """Records per second: over all batches, and without the first batch."""

    per_s: float
    sustained_per_s: float

    @classmethod
    def from_batches(cls, batches: Sequence[tuple[int, float]], elapsed_s: float) -> _Throughput:
        """Compute the throughput.

        `batches` are pairs of a number of records and the time when they were visible, in seconds since 1970.
        """
        per_s = sum(count for count, _ in batches) / elapsed_s
        if len(batches) < 2:
            return cls(per_s, per_s)
        return cls(per_s, sum(count for count, _ in batches[1:]) / (batches[-1][1] - batches[0][1]))


@dataclass(frozen=True)
class _LiveFigures:
    delays_s: np.ndarray[Any, Any]
    batches: int
    files: int
    seconds: float
    lost: int
    doubled: int


def _count_records(batches: Sequence[LiveBatch]) -> int:
    return sum(batch.result.record_count for batch in batches)


def _delay_quantiles(delays_s: np.ndarray[Any, Any]) -> tuple[float, float]:
    return round(float(np.quantile(delays_s, 0.5)), 2), round(float(np.quantile(delays_s, 0.99)), 2)


def show_ingestion(figures: dict[str, Any], console: Console) -> None:
    """Print the figures as a table."""
    table = Table("", "live", "one run per batch", "Structured Streaming")
    table.add_row(
        "records/s, one table", f"{figures['records_per_s']:,}", "", f"{figures['plain_records_per_s']:,}"
    )
    table.add_row("records/s, one table and kept records", f"{figures['kept_records_per_s']:,}", "", "")
    table.add_row("records/s, ten tables, atomic", f"{figures['records_10_tables_per_s']:,}", "", "")
    for name, key in (("one table", "records"), ("ten tables, atomic", "records_10_tables")):
        plain = f"{figures['sustained_plain_records_per_s']:,}" if key == "records" else ""
        table.add_row(f"sustained, {name}", f"{figures[f'sustained_{key}_per_s']:,}", "", plain)
    for rate in _RATES:
        for name in ("p50", "p99"):
            table.add_row(
                f"{name} delay at {rate:,}/s, s",
                f"{figures[f'{name}_visible_s_{rate}']}",
                f"{figures[f'runs_{name}_visible_s_{rate}']}",
                f"{figures[f'plain_{name}_visible_s_{rate}']}",
            )
        table.add_row(
            f"publications per hour at {rate:,}/s", f"{figures[f'publications_per_h_{rate}']:,}", "", ""
        )
    table.add_row("lost, doubled", f"{figures['lost']}, {figures['doubled']}", "", "")
    console.print(table)
