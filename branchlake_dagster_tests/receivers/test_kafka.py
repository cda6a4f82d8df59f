"""The sink in Kafka, against the mock cluster inside librdkafka, which other clients reach too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.kafka_sink import BrokerUnreachable, KafkaSink
from branchlake_dagster.receivers.records import (
    NotConfirmed,
    NotHandedOver,
    ReceiverOrigin,
    Record,
    ResumeState,
    digest_value,
)
from branchlake_dagster.receivers.sockets import UdpConfig, UdpSource
from branchlake_dagster_tests.receivers.harness import an_intake, record, running, until
from branchlake_dagster_tests.receivers.test_udp import sender
from branchlake_dagster_tests.suite.raised import raising

ORIGIN = ReceiverOrigin("r1", "http")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a broker."""
    owner = ck.Producer({"test.mock.num.brokers": 1})
    (broker,) = owner.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    owner.flush(1)


def a_sink(cluster: str, topic: str, partition: int | None = 0, **options: Any) -> KafkaSink:
    made = KafkaSink(topic, partition, ORIGIN, {"bootstrap.servers": cluster, **options})
    made.open(resume=False)
    return made


def consumed(cluster: str, topic: str, number: int) -> list[ck.Message]:
    consumer = ck.Consumer({"bootstrap.servers": cluster, "group.id": "test"})
    consumer.assign([ck.TopicPartition(topic, 0, 0)])
    found: list[ck.Message] = []
    for _ in range(100):
        found += [one for one in consumer.consume(1_000, timeout=0.2) if one.error() is None]
        if len(found) >= number:
            break
    consumer.close()
    return found


def test_records_are_in_the_topic_with_key_headers_and_receipt(cluster: str) -> None:
    sink = a_sink(cluster, "whole")
    sink.write([Record(b"\x00v", b"k", 1_700_000_000_123_456_789, b"h:1", b"9"), record(b"", None)])
    sink.close()
    first, second = consumed(cluster, "whole", 2)
    assert (first.value(), first.key(), first.timestamp()[1]) == (b"\x00v", b"k", 1_700_000_000_123)
    assert dict(first.headers()) == {
        "branchlake.receiver": b"r1",
        "branchlake.protocol": b"http",
        "branchlake.received_ns": b"1700000000123456789",
        "branchlake.source": b"h:1",
        "branchlake.cursor": b"9",
    }
    assert (second.value(), second.key()) == (b"", None)
    assert "branchlake.cursor" not in dict(second.headers())


@pytest.mark.long
def test_many_records_keep_their_order_in_a_short_queue(cluster: str) -> None:
    sink = a_sink(cluster, "many", **{"queue.buffering.max.messages": 100})
    sent = [record(b"%d" % number) for number in range(1_000)]
    sink.write(sent)
    sink.close()
    assert [one.value() for one in consumed(cluster, "many", 1_000)] == [one.value for one in sent]


@pytest.mark.long
def test_the_cursor_is_found_again_in_the_topic(cluster: str) -> None:
    sink = a_sink(cluster, "resumed")
    assert sink.open(resume=True) == ResumeState()
    sink.write([record(b"a", cursor=b"0"), record(b"b", cursor=b"5")])
    sink.close()
    other = KafkaSink("resumed", 0, ReceiverOrigin("r2", "http"), {"bootstrap.servers": cluster})
    assert other.open(resume=True) == ResumeState()
    other.write([record(b"c", cursor=b"77")])
    other.close()
    again = KafkaSink("resumed", 0, ORIGIN, {"bootstrap.servers": cluster})
    assert again.open(resume=True) == ResumeState(b"5", (digest_value(b"a"), digest_value(b"b")))
    again.close()


@pytest.mark.long
def test_a_cursor_that_lies_far_back_is_found(cluster: str) -> None:
    sink = a_sink(cluster, "far")
    sink.write([record(b"a", cursor=b"3")])
    sink.close()
    other = KafkaSink("far", 0, ReceiverOrigin("r2", "udp"), {"bootstrap.servers": cluster})
    other.open(resume=False)
    other.write([record(b"x")] * 12_000)
    other.close()
    again = KafkaSink("far", 0, ORIGIN, {"bootstrap.servers": cluster})
    assert again.open(resume=True).cursor == b"3"
    again.close()


class Reports:
    """A producer that takes everything, and reports on each what `outcome` says; None: nothing."""

    def __init__(self, outcome: Any) -> None:
        self.outcome, self.sent, self.due, self.purged = outcome, list[bytes](), list[Any](), 0

    def list_topics(self, *_: Any, **__: Any) -> None: ...

    def produce(self, _: str, *, value: bytes, on_delivery: Any, **__: Any) -> None:
        self.due.append((value, on_delivery))

    def poll(self, _: float) -> None:
        kept = []
        for value, report in self.due:
            outcome = self.outcome(value)
            if outcome is None:
                kept.append((value, report))
                continue
            if outcome is True:
                self.sent.append(value)
            report(None if outcome is True else outcome, None)
        self.due = kept

    def purge(self) -> None:
        self.purged += 1


def reporting(outcome: Any, **more: Any) -> tuple[KafkaSink, list[Reports]]:
    made: list[Reports] = []

    def make(_: Any) -> Reports:
        made.append(Reports(outcome))
        return made[-1]

    sink = KafkaSink("t", 0, ORIGIN, {"bootstrap.servers": "nowhere:1"}, make_producer=make, **more)
    sink.open(resume=False)
    return sink, made


def test_only_what_the_broker_did_not_take_is_tried_again() -> None:
    broken = {b"b"}
    error = ck.KafkaError(ck.KafkaError.MSG_SIZE_TOO_LARGE)
    sink, (producer,) = reporting(lambda value: error if value in broken else True)
    with pytest.raises(NotHandedOver) as caught:
        sink.write([record(b"a"), record(b"b"), record(b"c")])
    assert [one.value for one in caught.value.records] == [b"b"]
    broken.clear()
    sink.write(caught.value.records)
    assert producer.sent == [b"a", b"c", b"b"]


def test_a_record_without_a_report_is_reported_as_trouble_and_is_not_sent_again() -> None:
    """It may be in the topic, so a second one would double it: its report is awaited in the next call."""
    silent = {b"b", b"x"}
    passed = iter(range(1_000_000))
    sink, (producer,) = reporting(
        lambda value: None if value in silent else True, clock=lambda: float(next(passed))
    )
    same = record(b"x")
    with pytest.raises(NotHandedOver) as caught:
        sink.write([record(b"a"), record(b"b"), record(b"c"), same, same])
    assert [one.value for one in caught.value.records] == [b"b", b"x", b"x"]
    assert len(producer.due) == 3
    with pytest.raises(NotHandedOver) as again:
        sink.write(caught.value.records)
    assert (again.value.records, len(producer.due)) == (caught.value.records, 3)
    silent.clear()
    sink.write([*again.value.records, record(b"d")])
    assert producer.sent == [b"a", b"c", b"b", b"x", b"x", b"d"]


def test_a_late_report_counts_whatever_its_state() -> None:
    outcomes: dict[bytes, Any] = {b"a": None, b"b": None, b"c": None}
    passed = iter(range(1_000_000))
    sink, (producer,) = reporting(lambda value: outcomes[value], clock=lambda: float(next(passed)))
    with pytest.raises(NotHandedOver) as first:
        sink.write([record(b"a"), record(b"b"), record(b"c")])
    outcomes |= {b"a": True, b"b": ck.KafkaError(ck.KafkaError.MSG_SIZE_TOO_LARGE)}
    producer.poll(0)  # as a look at the topic does between two calls
    with pytest.raises(NotHandedOver) as second:
        sink.write(first.value.records)
    assert [one.value for one in second.value.records] == [b"b", b"c"]
    outcomes |= {b"b": True, b"c": True}
    sink.write(second.value.records)
    assert producer.sent == [b"a", b"c", b"b"]


@pytest.mark.long
def test_a_slow_broker_gets_no_record_twice() -> None:
    """Its answers take longer than the sink's patience, and a message timeout would have sent them again."""
    options = {"test.mock.num.brokers": 1, "test.mock.broker.rtt": 100}
    sink = KafkaSink("slow", 0, ORIGIN, options, patience_s=0.02)
    sink.open(resume=False)
    left, failures = [record(b"%d" % number) for number in range(20)], 0
    while left:
        try:
            sink.write(left)
            left = []
        except NotHandedOver as error:
            left, failures = error.records, failures + 1
    assert failures
    (broker,) = sink._producer.list_topics(timeout=10).brokers.values()
    sink._producer.flush(30)  # nothing is under way
    cluster = f"{broker.host}:{broker.port}"
    consumer = ck.Consumer({"bootstrap.servers": cluster, "group.id": "test"})
    assert consumer.get_watermark_offsets(ck.TopicPartition("slow", 0), timeout=30) == (0, 20)
    consumer.close()
    found = consumed(cluster, "slow", 20)
    sink.close()
    assert [one.value() for one in found] == [b"%d" % number for number in range(20)]


def test_a_producer_has_one_request_in_flight_and_waits_for_its_report_without_a_limit() -> None:
    given: list[dict[str, Any]] = []

    def make(options: dict[str, Any]) -> Reports:
        given.append(options)
        return Reports(lambda _: True)

    KafkaSink("t", 0, ORIGIN, {"bootstrap.servers": "x:1"}, make_producer=make).open(resume=False)
    assert given[0]["message.timeout.ms"] == 0
    # With two, the first records of a new topic may be lost and reported as stored (KAFKA-15591).
    assert given[0]["max.in.flight.requests.per.connection"] == 1


def test_a_cursor_moves_only_after_everything_before_it_is_stored() -> None:
    error = ck.KafkaError(ck.KafkaError.MSG_SIZE_TOO_LARGE)
    sink, (producer,) = reporting(lambda value: error if value == b"b" else True)
    page = [record(b"a", cursor=b"0"), record(b"b", cursor=b"0"), record(b"c", cursor=b"9")]
    with pytest.raises(NotHandedOver) as caught:
        sink.write(page)
    assert producer.sent == [b"a"]
    assert caught.value.records == page[1:]


def test_after_a_fatal_error_another_producer_takes_over() -> None:
    fatal = ck.KafkaError(ck.KafkaError._FATAL)
    sink, made = reporting(lambda value: fatal if len(made) == 1 else True)
    with pytest.raises(NotHandedOver) as caught:
        sink.write([record(b"a")])
    sink.write(caught.value.records)
    assert [one.sent for one in made] == [[], [b"a"]]
    assert made[0].purged == 1


def test_at_the_end_what_has_no_report_is_unknown() -> None:
    sink, (producer,) = reporting(lambda value: True if value == b"a" else None)
    sink.stop_waiting()
    with pytest.raises(NotHandedOver) as never:
        sink.write([record(b"a"), record(b"b")])
    assert [one.value for one in never.value.records] == [b"a", b"b"]
    assert not producer.sent
    sink, (producer,) = reporting(lambda value: sink.stop_waiting() if value == b"b" else True)
    with pytest.raises(NotConfirmed) as unknown:
        sink.write([record(b"a"), record(b"b")])
    assert [one.value for one in unknown.value.records] == [b"b"]
    assert producer.sent == [b"a"]


def test_options_that_would_lose_records_are_refused() -> None:
    for option in (
        {"acks": "1"},
        {"enable.idempotence": "false"},
        {"message.timeout.ms": 300_000},
        {"delivery.timeout.ms": "1000"},
        {"retries": 3},
        {"message.send.max.retries": "0"},
        {"max.in.flight": 5},
        {"max.in.flight.requests.per.connection": "2"},
    ):
        with pytest.raises(ConfigurationError):
            KafkaSink("t", 0, ORIGIN, option)
    KafkaSink("t", 0, ORIGIN, {"message.timeout.ms": "0", "acks": "all"})
    with raising(ConfigurationError, "no.such.option", reason="kafka_option"):
        KafkaSink("t", 0, ORIGIN, {"no.such.option": "1"}).open(resume=False)
    with raising(ConfigurationError, reason="partition_not_named", subject="t"):
        KafkaSink("t", None, ORIGIN, {"bootstrap.servers": "x:1"}).open(resume=True)


def test_a_broker_that_is_down_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from branchlake_dagster.receivers import kafka_sink as kafka

    monkeypatch.setattr(kafka, "_ANSWER_TIMEOUT_S", 0.2)
    sink = KafkaSink("t", 0, ORIGIN, {"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    with raising(BrokerUnreachable, "127.0.0.1:1", reason="address", subject="t"):
        sink.open(resume=False)
    sink.close()


def test_datagrams_reach_the_topic(cluster: str) -> None:
    async def play() -> None:
        sink = KafkaSink("datagrams", 0, ReceiverOrigin("r1", "udp"), {"bootstrap.servers": cluster})
        intake = an_intake(lambda b, c: UdpSource(UdpConfig("127.0.0.1", 0), b, c), sink)
        async with running(intake):
            with sender(intake.source.address) as out:
                for number in range(500):
                    out.send(b"%d" % number)
            await until(lambda: intake.counts.received == 500)
        assert intake.counts.handed_over == 500

    asyncio.run(play())
    assert [one.value() for one in consumed(cluster, "datagrams", 500)] == [b"%d" % n for n in range(500)]
