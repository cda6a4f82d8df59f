"""A topic of a million records of which one in a hundred is poison: all counted, each once."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from random import Random

import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.live import LiveIngestion
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster_tests.ingest.histories.tokens import DEAD, KINDS, PARTITIONS, Tokens, ingestion
from branchlake_dagster_tests.suite.kafka import Broker

_AT_ONCE = 50_000


def million(
    lake: Lakehouse, broker: EmbeddedKafka, seed: int, records: int, say: Callable[[str], None]
) -> dict[str, object]:
    """Counts by table, whether each token is there exactly once, and seconds of the batches."""
    cluster = broker.cluster()
    kafka = Broker(cluster)
    tokens = Tokens([kafka.topic(partitions=PARTITIONS)], Random(seed))
    while len(tokens.belongs) < records:
        tokens.send(kafka, min(_AT_ONCE, records - len(tokens.belongs)), poison=0.01)
    say(f"{records:,} records sent")
    ingest = ingestion(tokens.topics, most_records=250_000)
    one = LiveIngestion(
        ingest,
        lake,
        str(uuid.uuid4()),
        topics := KafkaTopics(cluster),
        KafkaRecords(cluster, topics),
        session_at=lake.spark_session,
        tasks=2,
        properties={},
    )
    began = time.perf_counter()
    batches = 0
    while one.publish_next_batch() is not None:
        batches += 1
    seconds = time.perf_counter() - began
    one.close()
    wanted = Counter(tokens.belongs.values())
    found, exact = Counter[str](), True
    for place in (*KINDS, DEAD):
        mine = sorted(token for token, where in tokens.belongs.items() if where == place)
        there = _tokens(lake, ingest.name, place)
        found[place] = len(there)
        exact &= there == mine
    return {
        "records": records,
        "wanted": dict(wanted),
        "found": dict(found),
        "exact": exact,
        "batches": batches,
        "seconds": round(seconds, 1),
        "records_per_s": round(records / seconds),
    }


def _tokens(lake: Lakehouse, name: str, place: str) -> list[int]:
    catalog = lake.catalog(MAIN)
    if place == DEAD:
        values = catalog.load_table((name, f"{name}_dead_letters")).scan().to_arrow()["value"].to_pylist()
        return sorted(int(re.findall(rb"\d+", one)[0]) for one in values)
    ids: pa.ChunkedArray = catalog.load_table((name, place)).scan().to_arrow()["id"]
    return [int(one) for one in ids.take(pc.sort_indices(ids)).to_pylist()]
