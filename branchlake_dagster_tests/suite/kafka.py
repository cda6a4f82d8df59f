"""The session's Kafka broker: creates topics for tests and sends records."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from branchlake_dagster.ingest.kafka_cluster import KafkaCluster


def as_settings(cluster: KafkaCluster) -> dict[str, str]:
    """Return the settings of a code location that uses this cluster, including its login."""
    settings = {
        "kafka_bootstrap": cluster.bootstrap,
        "kafka_security": cluster.security,
        "kafka_sasl_mechanism": cluster.mechanism,
        "kafka_username": cluster.username,
        "kafka_password": cluster.password,
    }
    return {name: value for name, value in settings.items() if value is not None}


def as_environment(cluster: KafkaCluster) -> dict[str, str]:
    """Return the same settings as environment variables."""
    return {f"BRANCHLAKE_{name.upper()}": value for name, value in as_settings(cluster).items()}


@dataclass(frozen=True)
class Message:
    """A record to send. `at` is its timestamp in milliseconds since 1970; None means now."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    partition: int = 0
    at: int | None = None


class Broker:
    """The session's broker. Topics have random names, so tests do not see each other's topics."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self.cluster = cluster
        self._admin = AdminClient(cluster.client_options())
        self._producer = self._new_producer()

    def _new_producer(self, **more: Any) -> Producer:
        options = {
            "message.max.bytes": 8 << 20,
            "linger.ms": 0,
            "enable.idempotence": True,
            # With more, the first records of a new topic may be lost and reported as stored (KAFKA-15591).
            "max.in.flight": 1,
        }
        return Producer({**self.cluster.client_options(), **options, **more})

    def topic(self, *, partitions: int = 1, **config: str) -> str:
        """Create a topic with this number of partitions and return its name."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.create(name, partitions=partitions, **config)
        return name

    def create(self, name: str, *, partitions: int = 1, **config: str) -> None:
        """Create a topic with this name. Names in `config` have `_` in place of `.`."""
        topic_config = {key.replace("_", "."): value for key, value in config.items()}
        # Records of tests have fixed times, which retention would delete after at most five minutes.
        defaults = {"max.message.bytes": str(8 << 20), "retention.ms": "-1"}
        wanted = NewTopic(name, partitions, 1, config=defaults | topic_config)
        _until_done(lambda: self._admin.create_topics([wanted])[name].result(30))

    def delete(self, name: str) -> None:
        """Delete a topic and wait until it no longer exists."""
        self._admin.delete_topics([name])[name].result(30)
        _until(lambda: name not in self._admin.list_topics(timeout=10).topics)

    def send(self, topic: str, messages: Iterable[Message | bytes]) -> None:
        """Send messages to a topic, in this order."""
        _send(self._producer, topic, messages)
        self._producer.flush(30)

    def transaction(self, topic: str, messages: Iterable[Message | bytes], *, commit: bool) -> None:
        """Send messages to a topic in a transaction, which is committed or aborted."""
        producer = self._new_producer(**{"transactional.id": uuid.uuid4().hex})
        producer.init_transactions(30)
        producer.begin_transaction()
        _send(producer, topic, messages)
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    @contextmanager
    def transaction_of(self, group: str, topic: str, offsets: Mapping[int, int]) -> Iterator[None]:
        """Commit offsets of a group in a transaction at the end of the block, as an exactly-once sink does."""
        producer, consumer = (
            self._new_producer(**{"transactional.id": uuid.uuid4().hex}),
            self.consumer(group),
        )
        try:
            producer.init_transactions(30)
            producer.begin_transaction()
            wanted = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
            producer.send_offsets_to_transaction(wanted, consumer.consumer_group_metadata(), 30)
            yield
            producer.commit_transaction(30)
        finally:
            consumer.close()

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets by partition as a consumer that joins the group and then leaves it."""
        consumer = self.consumer(group)
        try:
            wanted = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
            for one in consumer.commit(offsets=wanted, asynchronous=False) or ():
                assert one.error is None, one.error
        finally:
            consumer.close()

    def consumer(self, group: str, *topics: str) -> Consumer:
        """Return a consumer of the group. With topics it subscribes, and is a member after its first poll."""
        options = {"group.id": group, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        consumer = Consumer({**self.cluster.client_options(), **options})
        if topics:
            consumer.subscribe(list(topics))
        return consumer

    def delete_group(self, group: str) -> None:
        """Delete a consumer group with its offsets, as Kafka does when they expire."""
        _until_done(lambda: self._admin.delete_consumer_groups([group])[group].result(30))

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Delete the records before an offset, as retention does."""
        asked = self._admin.delete_records([TopicPartition(topic, partition, offset)])
        for future in asked.values():
            future.result(30)


def _send(producer: Producer, topic: str, messages: Iterable[Message | bytes]) -> None:
    failed: list[object] = []

    def remember_failure(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    for one in messages:
        message = Message(one) if isinstance(one, bytes) else one
        more = {} if message.at is None else {"timestamp": message.at}
        producer.produce(
            topic,
            message.value,
            key=message.key,
            partition=message.partition,
            headers=list(message.headers),
            on_delivery=remember_failure,
            **more,
        )
        producer.poll(0)
    producer.flush(30)
    assert not failed, failed


def _until_done(ask: Callable[[], object]) -> None:
    def done() -> bool:
        try:
            ask()
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                raise
            return False  # it is being deleted
        return True

    _until(done)


def _until(done: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, "the broker has not finished in time"
        time.sleep(0.05)
