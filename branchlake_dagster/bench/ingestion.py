"""`branchlake bench ingest`: records a second and seconds to visible, beside Spark Structured Streaming."""

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

from branchlake_dagster.bench.ingestion_by_runs import delays_by_runs
from branchlake_dagster.bench.kafka_feed import COLUMNS, SITES, Feed, sending
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.bench.time_to_visibility import PLACE, delays, packed, publications
from branchlake_dagster.ingest.batch_assets import tasks_of
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.ingest.kafka_cluster import Cluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.live import LiveBatch, LiveIngestion
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.ingest.spark_expressions import ddl
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import main_with_history
from branchlake_dagster.settings import Settings

_BATCH = 250_000
_RATES = (1_000, 10_000)
_WARM = 20_000


def measure(
    settings: Settings, *, records: int, seconds: float, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Both on one topic, in a state folder of its own, one after the other, `rounds` times, medians.

    `records_per_s`, `records_10_tables_per_s`, `plain_records_per_s`: flat out, from the first offset to all
    on `main`, servers warm; `sustained_…` without each run's first batch, which brings up Python's workers
    and compiles the plan. `p50_visible_s` and `p99_visible_s` (and `plain_…`): from sending a record to
    its being on `main`, by rate, over `seconds`; `runs_…` with a run for each batch, through a real daemon,
    with the settings of the sensor as they come. `lost` and `doubled`: over all of ours.
    """
    with own_lake(settings) as bench:
        lake = Lakehouse(bench, say=say)
        kafka = EmbeddedKafka(bench, say=say)
        try:
            lake.endpoints()
            main_with_history(lake.nessie)
            return _Stack(lake, kafka.cluster(), say).measure(records, seconds, rounds)
        finally:
            kafka.down()
            lake.servers.down()


@dataclass
class _Stack:
    lake: Lakehouse
    cluster: Cluster
    say: Callable[[str], None]
    _names: int = 0

    def measure(self, records: int, seconds: float, rounds: int) -> dict[str, Any]:
        feed = Feed(self.cluster, "flat")
        feed.create()
        self.say(f"Sending {records:,} records …")
        feed.flat_out(records)
        found: dict[str, Any] = {"records": records, "lost": 0, "doubled": 0}
        self.say("Warming up …")
        self._plain_flat_out("flat", _WARM)
        self._flat_out("flat", 1, _WARM)
        self._flat_out("flat", SITES, _WARM)
        speeds: dict[str, list[_Speed]] = {"plain_records": [], "records": [], "records_10_tables": []}
        for number in range(rounds):
            self.say(f"Flat out, round {number + 1} of {rounds} …")
            speeds["plain_records"].append(self._plain_flat_out("flat", records))
            for name, tables in (("records", 1), ("records_10_tables", SITES)):
                speed, lost, doubled = self._flat_out("flat", tables, records)
                speeds[name].append(speed)
                found["lost"] += lost
                found["doubled"] += doubled
        for name, told in speeds.items():
            found[f"{name}_per_s"] = round(float(np.median([one.per_s for one in told])))
            found[f"sustained_{name}_per_s"] = round(float(np.median([one.sustained_per_s for one in told])))
        for rate in _RATES:
            self.say(f"{rate:,} records a second for {seconds:g} s, live and plain …")
            live = self._live(rate, seconds)
            plain = self._plain_stream(rate, seconds)
            found[f"p50_visible_s_{rate}"], found[f"p99_visible_s_{rate}"] = _quantiles(live.delays)
            found[f"plain_p50_visible_s_{rate}"], found[f"plain_p99_visible_s_{rate}"] = _quantiles(plain)
            found[f"publications_per_h_{rate}"] = round(live.batches / live.seconds * 3600)
            found[f"files_per_h_{rate}"] = round(live.files / live.seconds * 3600)
            found["lost"] += live.lost
            found["doubled"] += live.doubled
            self.say(f"{rate:,} records a second for {seconds:g} s, a run a batch …")
            runs = delays_by_runs(self.lake, self.cluster, rate, seconds)
            found[f"runs_p50_visible_s_{rate}"], found[f"runs_p99_visible_s_{rate}"] = _quantiles(runs)
        most = _RATES[-1]
        found["p99_visible_s"] = found[f"p99_visible_s_{most}"]
        found["plain_p99_visible_s"] = found[f"plain_p99_visible_s_{most}"]
        for when in ("", "sustained_"):
            ours, plain = (found[f"{when}{name}_per_s"] for name in ("records_10_tables", "plain_records"))
            found[f"{when}throughput_ratio"] = round(ours / plain, 2)
        return found

    # -- ours ------------------------------------------------------------------------------------------

    def _ingestion(self, topic: str, tables: int, most: int) -> tuple[Ingest, LiveIngestion]:
        self._names += 1
        name = f"bench{self._names}"
        where: dict[str, Any] = {"partition_": "partition", "offset_": "offset"}
        made = (
            [IngestTable(key=[name, "all"], columns=COLUMNS, attributes=where)]
            if tables == 1
            else [
                IngestTable(key=[name, f"t{site}"], columns=COLUMNS, route=f"s{site}", attributes=where)
                for site in range(tables)
            ]
        )
        by = "topic" if tables == 1 else "site"
        ingest = Ingest(name=name, topics=[topic], tables=made, route_by=by, most_records=most)
        topics = KafkaTopics(self.cluster)
        live = LiveIngestion(
            ingest,
            self.lake,
            "00000000-0000-0000-0000-000000000000",
            topics,
            KafkaRecords(self.cluster, topics),
            session_at=self.lake.spark_session,
            tasks=tasks_of(self.lake),
            properties={},
        )
        return ingest, live

    def _flat_out(self, topic: str, tables: int, records: int) -> tuple[_Speed, int, int]:
        """How fast, and how many records are lost and there twice."""
        ingest, live = self._ingestion(topic, tables, min(_BATCH, records))
        done, began = 0, time.perf_counter()
        batches = []
        while done < records and (batch := live.batch()) is not None:
            done += batch.result.records
            batches.append((batch.result.records, batch.at.timestamp()))
        took = time.perf_counter() - began
        live.close()
        return _Speed.of(batches, took), *self._exact(ingest, done)

    def _exact(self, ingest: Ingest, sent: int) -> tuple[int, int]:
        found = self._offsets(ingest)
        once = len(np.unique(found))
        return sent - once, len(found) - once

    def _offsets(self, ingest: Ingest) -> np.ndarray[Any, Any]:
        catalog = self.lake.catalog(MAIN)
        parts = []
        for table in ingest.tables:
            rows = catalog.load_table(tuple(table.asset.path)).scan(selected_fields=PLACE).to_arrow()
            parts.append(packed(rows))
        return np.concatenate(parts)

    def _live(self, rate: int, seconds: float) -> _Live:
        ingest, live = self._ingestion(f"live{rate}", 1, _BATCH)
        feed = Feed(self.cluster, f"live{rate}")
        feed.create()
        batches: list[LiveBatch] = []
        with sending(feed, rate, seconds) as sender:
            began = time.perf_counter()
            while sender.is_alive() or not batches or _done(batches) < sum(map(len, feed.sent)):
                if (batch := live.batch()) is not None:
                    batches.append(batch)
                else:
                    time.sleep(0.05)
        took = time.perf_counter() - began
        live.close()
        (table,) = (tuple(one.asset.path) for one in ingest.tables)
        at = publications(self.lake, table)
        late = delays(
            self.lake.catalog(MAIN).load_table(table), feed, lambda snapshot: at[snapshot.snapshot_id]
        )
        lost, doubled = self._exact(ingest, sum(map(len, feed.sent)))
        files = sum(len(one) for batch in batches for one in batch.result.scanned.files.values())
        return _Live(late, len(batches), files, took, lost, doubled)

    # -- plain -----------------------------------------------------------------------------------------

    def _stream(self, session: SparkSession, topic: str, table: str) -> Any:
        self._names += 1
        schema = ddl(list(COLUMNS.items()))
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

    def _plain_flat_out(self, topic: str, records: int) -> _Speed:
        del records  # all that is there: it has no such limit
        session = self.lake.spark_session(MAIN)
        table = f"flat{self._names}"
        stream = self._stream(session, topic, table)
        began = time.perf_counter()
        query = stream.trigger(availableNow=True).toTable(f"nessie.plain.{table}")
        query.awaitTermination()
        took = time.perf_counter() - began
        session.stop()
        snapshots = self.lake.catalog(MAIN).load_table(("plain", table)).metadata.snapshots
        batches = [
            (int(one.summary["added-records"] or 0), one.timestamp_ms / 1000)
            for one in snapshots
            if one.summary is not None
        ]
        return _Speed.of(batches, took)

    def _plain_stream(self, rate: int, seconds: float) -> np.ndarray[Any, Any]:
        """The delays of all records, by the times of the snapshots that hold them."""
        topic = f"plain{rate}"
        feed = Feed(self.cluster, topic)
        feed.create()
        session = self.lake.spark_session(MAIN)
        stream = self._stream(session, topic, topic)
        query = stream.trigger(processingTime="0 seconds").toTable(f"nessie.plain.{topic}")
        with sending(feed, rate, seconds) as sender:
            sender.join()
        query.processAllAvailable()
        query.stop()
        session.stop()
        table = self.lake.catalog(MAIN).load_table(("plain", topic))
        return delays(table, feed, lambda snapshot: snapshot.timestamp_ms / 1000)


@dataclass(frozen=True)
class _Speed:
    """Records a second, from the start and from the second batch on."""

    per_s: float
    sustained_per_s: float

    @classmethod
    def of(cls, batches: Sequence[tuple[int, float]], took: float) -> _Speed:
        """Of batches, each with its records and when it was visible, and the seconds of all."""
        per_s = sum(count for count, _ in batches) / took
        if len(batches) < 2:
            return cls(per_s, per_s)
        return cls(per_s, sum(count for count, _ in batches[1:]) / (batches[-1][1] - batches[0][1]))


@dataclass(frozen=True)
class _Live:
    delays: np.ndarray[Any, Any]
    batches: int
    files: int
    seconds: float
    lost: int
    doubled: int


def _done(batches: Sequence[LiveBatch]) -> int:
    return sum(batch.result.records for batch in batches)


def _quantiles(delays: np.ndarray[Any, Any]) -> tuple[float, float]:
    return round(float(np.quantile(delays, 0.5)), 2), round(float(np.quantile(delays, 0.99)), 2)


def show(found: dict[str, Any], console: Console) -> None:
    """The figures as a table."""
    table = Table("", "live", "a run a batch", "plain Structured Streaming")
    table.add_row(
        "records/s, one table", f"{found['records_per_s']:,}", "", f"{found['plain_records_per_s']:,}"
    )
    table.add_row("records/s, ten tables, atomic", f"{found['records_10_tables_per_s']:,}", "", "")
    for name, told in (("one table", "records"), ("ten tables, atomic", "records_10_tables")):
        plain = f"{found['sustained_plain_records_per_s']:,}" if told == "records" else ""
        table.add_row(f"sustained, {name}", f"{found[f'sustained_{told}_per_s']:,}", "", plain)
    for rate in _RATES:
        for name in ("p50", "p99"):
            table.add_row(
                f"{name} to visible at {rate:,}/s, s",
                f"{found[f'{name}_visible_s_{rate}']}",
                f"{found[f'runs_{name}_visible_s_{rate}']}",
                f"{found[f'plain_{name}_visible_s_{rate}']}",
            )
        table.add_row(
            f"publications an hour at {rate:,}/s", f"{found[f'publications_per_h_{rate}']:,}", "", ""
        )
    table.add_row("lost, doubled", f"{found['lost']}, {found['doubled']}", "", "")
    console.print(table)
