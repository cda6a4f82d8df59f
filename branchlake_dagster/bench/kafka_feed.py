"""A sender of small JSON records to Kafka, which records the time of each record."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from branchlake_dagster.bench.launched_run import BenchFailed
from branchlake_dagster.ingest.errors import IngestError
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.waiting import holds_within

PARTITIONS = 4
SITES = 10
COLUMNS = {
    "id": "bigint",
    "site": "string",
    "at": "timestamp",
    "x": "double",
    "y": "double",
    "name": "string",
    "note": "string",
}


def record_value(number: int) -> bytes:
    """Build the value of a record, about 180 bytes of JSON."""
    fields = {
        "id": number,
        "site": f"s{number % SITES}",
        "at": f"2026-11-22T18:00:00.{number % 1_000_000:06d}Z",
        "x": number * 0.5,
        "y": number * 0.25,
        "name": f"object-{number % 5_000}",
        "note": "some text that makes it as long as records are",
    }
    return json.dumps(fields).encode()


@dataclass
class BenchFeed:
    """Sends records to a topic.

    `send_times[partition][offset]` is the time at which a record was sent, in seconds since 1970.
    """

    cluster: KafkaCluster
    topic: str
    send_times: list[list[float]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])

    def create_topic(self) -> None:
        """Create the topic and wait until all its partitions have a leader. Raises BenchFailed after 30 s."""
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient({**self.cluster.client_options()})  # the futures end with the client, so keep it
        for future in admin.create_topics([NewTopic(self.topic, PARTITIONS, 1)]).values():
            future.result()
        is_ready = holds_within(30.0, self._has_leaders, every_s=0.1)
        if not is_ready:
            raise BenchFailed(f"Topic {self.topic} has partitions without a leader after 30 s.")

    def _has_leaders(self) -> bool:
        """Return whether all partitions of the topic have a leader."""
        try:
            return len(KafkaTopics(self.cluster).describe([self.topic])[self.topic].ends) == PARTITIONS
        except IngestError:
            return False

    def send_flat_out(self, count: int) -> None:
        """Send `count` records at full speed."""
        self._send(count, lambda _: None)

    def send_at_rate(self, per_s: float, seconds: float, stop: threading.Event) -> int:
        """Send `per_s` records per second for `seconds` seconds or until `stop`. Return the planned count."""
        began = time.perf_counter()

        def pace(number: int) -> None:
            ahead = number / per_s - (time.perf_counter() - began)
            if ahead > 0.002:
                time.sleep(ahead)

        count = int(per_s * seconds)
        self._send(count, pace, stop)
        return count

    def _send(self, count: int, pace: Callable[[int], None], stop: threading.Event | None = None) -> None:
        from confluent_kafka import Producer

        options = {**self.cluster.client_options(), "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
        producer = Producer({**options, "compression.type": "lz4", "enable.idempotence": True})
        for number in range(count):
            if not number % 100:
                pace(number)
                producer.poll(0)
                if stop is not None and stop.is_set():
                    break
            partition = number % PARTITIONS
            self.send_times[partition].append(time.time())
            while True:
                try:
                    producer.produce(self.topic, record_value(number), partition=partition)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.flush()


@contextmanager
def send_in_background(feed: BenchFeed, rate: int, seconds: float) -> Iterator[threading.Thread]:
    """Send `rate` records per second in a thread during the block. The thread stops at its end."""
    stop = threading.Event()
    sender = threading.Thread(target=feed.send_at_rate, args=(rate, seconds, stop), daemon=True)
    sender.start()
    try:
        yield sender
    finally:
        stop.set()
        sender.join()
