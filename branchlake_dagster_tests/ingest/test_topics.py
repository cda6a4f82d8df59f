"""What brokers and landing folders say of topics, where it is not what one would think."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient, OffsetSpec
from pyspark.errors import PythonException, SparkRuntimeException

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import AnotherIngestion, KafkaRefused, KafkaUnavailable, RecordsDeleted
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics, translate_spark_errors
from branchlake_dagster.ingest.offsets import Topic, TopicPartition
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.ingest.topic_source import LandingTopics
from branchlake_dagster.ingest.worker_writer import NO_TIME_US
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.spark.session import translate_refusals
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker, Message
from branchlake_dagster_tests.suite.raised import raising

ONE = TopicPartition("t", "i", 0)
OTHER = TopicPartition("t", "i", 1)


@pytest.mark.parametrize(
    ("time_ms", "expected"),
    [(-1, None), (-2, -2_000), (0, 0), (10**15, None), (253_402_300_799_999, 253_402_300_799_999_000)],
)
def test_a_fetched_record_has_a_time_only_if_the_producer_set_one(time_ms: int, expected: int | None) -> None:
    topics: Any = SimpleNamespace(fetch_record=lambda *_: (time_ms, None, b"v", []))
    cluster: Any = None
    (record,) = KafkaRecords(cluster, topics).fetch([(ONE, 0)])
    assert record.timestamp_us == expected


def test_topics_without_an_id_are_refused() -> None:
    """One that is made again has the same id as before: none."""
    topics = KafkaTopics(KafkaCluster("127.0.0.1:1"))

    def describe(*_: Any, **__: Any) -> dict[str, Future[Any]]:
        told: Future[Any] = Future()
        told.set_result(SimpleNamespace(topic_id=confluent_kafka.Uuid(0, 0), partitions=[]))
        return {"orders": told}

    admin = SimpleNamespace(describe_topics=describe, poll=lambda _: 0)
    topics.__dict__["_admin"] = admin
    for ask in (topics.describe, topics.topic_ids):
        with raising(KafkaRefused, "Kafka 2.8", reason="topic_id_missing", subject="orders"):
            ask(["orders"])


def test_records_that_are_deleted_between_the_requests_are_no_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A begin after the end looked like a topic that had lost its end, which stops an ingestion."""
    topics = KafkaTopics(KafkaCluster("127.0.0.1:1"))
    one = SimpleNamespace(topic_id="i", partitions=[SimpleNamespace(id=0)])
    monkeypatch.setattr(topics, "_describe_topics", lambda _: {"t": one})
    states = [(0, 100, 110), (150, 150, 160), (150, 170, 180)]

    def list_offsets(specs: dict[Any, Any], isolation: Any) -> dict[tuple[str, int], int]:
        begin, committed, end = states.pop(0)
        if type(next(iter(specs.values()))) is type(OffsetSpec.earliest()):
            return {("t", 0): begin}
        is_committed = isolation == confluent_kafka.IsolationLevel.READ_COMMITTED
        return {("t", 0): committed if is_committed else end}

    monkeypatch.setattr(topics, "_list_offsets", list_offsets)
    found = topics.describe(["t"])["t"]
    assert found.begins[0] <= found.ends[0] <= found.log_ends[0]


def test_a_start_after_the_committed_records_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first record since the start was in an open transaction: that was taken for a reset of the topic."""
    topics = KafkaTopics(KafkaCluster("127.0.0.1:1"))
    moment = datetime.fromtimestamp(1_700_000_000, UTC)

    def starts(offset: int) -> Any:
        monkeypatch.setattr(topics, "_list_offsets", lambda *_: {("t", 0): offset})
        return topics.offsets_at_time(Topic("t", "i", {0: 2}, {0: 5}), moment)

    assert [starts(offset) for offset in (3, 5, -1)] == [{ONE: 3}, {ONE: 5}, {ONE: 5}]
    with raising(KafkaUnavailable, 7, 5, reason="not_committed", subject="t[0]"):
        starts(7)


COLLECTED_BY_ITS_OWN_THREAD = """
import gc, threading
from confluent_kafka import TopicCollection
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics

gc.disable()
topics = KafkaTopics(KafkaCluster("127.0.0.1:1"))
topics.itself = topics
future = topics._admin.describe_topics(TopicCollection(["orders"]), request_timeout=0.2)["orders"]
collected = threading.Event()

def collect(_):
    assert threading.current_thread() is not threading.main_thread()
    gc.collect()
    collected.set()

future.add_done_callback(collect)
del topics
assert collected.wait(30)
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("org.apache.kafka.common.errors.TimeoutException: no answer", KafkaUnavailable),
        ("org.apache.kafka.common.errors.TopicAuthorizationException: no", KafkaRefused),
        ("KafkaIllegalStateException: [KAFKA_DATA_LOSS]", RecordsDeleted),
    ],
)
def test_the_text_of_a_record_is_no_failure_of_kafka(text: str, error: type[BranchlakeError]) -> None:
    """A record whose text was in the error of a worker was taken for a broker that does not answer."""
    cluster = KafkaCluster("127.0.0.1:1")
    with raising(error), translate_spark_errors(cluster):
        raise SparkRuntimeException(f"Job aborted. Caused by: {text}", {})
    worker_error = PythonException(f"An exception was thrown from the Python worker.\nValueError: {text}", {})
    with pytest.raises(PythonException), translate_spark_errors(cluster):
        raise worker_error


@pytest.mark.parametrize(
    ("prefix", "error"),
    [("", NessieUnauthorized), ("org.apache.spark.api.python.PythonException: ValueError: ", ValueError)],
)
def test_the_text_of_a_record_is_no_refusal_by_nessie(prefix: str, error: type[Exception]) -> None:
    with pytest.raises(error), translate_refusals():
        raise ValueError(f"Job aborted. {prefix}NessieForbiddenException")


def test_a_client_may_be_garbage_on_its_own_thread() -> None:
    """librdkafka aborts a process whose client is closed by the client's own thread."""
    subprocess.run([sys.executable, "-c", COLLECTED_BY_ITS_OWN_THREAD], check=True)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([253_402_300_800_000], None),
        ([1 << 60], None),
        ([-1], None),
        ([1 << 60, 1_700_000_000_000], datetime.fromtimestamp(1_700_000_000, UTC)),
    ],
)
def test_a_time_that_no_calendar_has_is_not_known(
    monkeypatch: pytest.MonkeyPatch, times: list[int], expected: datetime | None
) -> None:
    messages = [
        SimpleNamespace(
            topic=lambda: "t",
            partition=lambda number=number: number,
            timestamp=lambda at=at: (1, at),
            error=lambda: None,
        )
        for number, at in enumerate(times)
    ]

    def consumer(_: object) -> Any:
        nothing = lambda *_: None  # noqa: E731
        return SimpleNamespace(
            assign=nothing, pause=nothing, close=nothing, consume=lambda *_, **__: messages
        )

    monkeypatch.setattr(confluent_kafka, "Consumer", consumer)
    offsets = dict.fromkeys((ONE, OTHER)[: len(times)], 0)
    assert KafkaTopics(KafkaCluster("127.0.0.1:1")).earliest_time(offsets) == expected


def test_nor_that_of_a_landed_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.parquet"
    times = pa.array([253_402_300_800_000_000, None, NO_TIME_US], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"timestamp": times}), path)
    monkeypatch.setattr(LandingTopics, "_file_of_offset", lambda *_: SimpleNamespace(path=path, first=0))
    for offset in (0, 1, 2):
        assert LandingTopics(tmp_path).earliest_time({ONE: offset}) is None


def test_a_group_gets_a_report_of_a_topic_that_was_created_again(
    driving: Driving, kafka: Broker, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of both at once librdkafka takes nothing, so the lag stood still for ever."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], on_recreated="start_over"))
    kafka.send(topic, [b'{"id": 1}', b'{"id": 2}'])
    drive.batch()
    kafka.delete(topic)
    kafka.create(topic)
    kafka.send(topic, [b'{"id": 3}'])
    result = drive.batch()
    assert (len(result.progress.offsets), list(result.current_offsets.values())) == (2, [1])
    drive.topics.report_offsets(drive.ingest.group, result.current_offsets)
    assert not caplog.records
    admin = AdminClient(kafka.cluster.client_options())  # its answers end with it
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(drive.ingest.group)])
    told = asked[drive.ingest.group].result(60).topic_partitions
    assert [(one.topic, one.partition, one.offset) for one in told] == [(topic, 0, 1)]


def test_a_rollback_is_distinguished_from_an_older_state(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Its letters have the new number, and a table that another ingestion fills is still seen as such."""
    topic = kafka.topic(partitions=2)
    ingest = Ingest(
        name=namespace,
        topics=[topic],
        tables=[IngestTable(key=f"{namespace}/{{route}}", route="(.*)", columns={"id": "int"})],
        route_by="to",
        on_reset="continue_at_end",
    )
    drive = driving(ingest)
    kafka.send(topic, [Message(b'{"id": 1, "to": "a"}', partition=0)])
    drive.batch()
    (incarnation,) = {one.incarnation for one in drive.look().progress.position}
    # As if partition 0 had had more, which a broker has lost.
    key, anchor = LakeProperty.OFFSETS_PREFIX + namespace, drive.table(-1)
    further = json.loads(anchor.properties[key])
    further["topics"][f"{topic}@{incarnation}"]["0"] = 9
    anchor.transaction().set_properties({key: json.dumps(further)}).commit_transaction()
    kafka.send(topic, [Message(b'{"id": "x", "to": "a"}', partition=1)])
    result = drive.batch()
    assert [row["incarnation"] for row in drive.dead()] == [f"{incarnation}~1"]
    assert {(one.incarnation, one.partition) for one in result.current_offsets} == {
        (f"{incarnation}~1", 0),
        (f"{incarnation}~1", 1),
    }

    second = IngestTable(key=[namespace, "b"], route="b", columns={"id": "int"})
    other = Ingest(name=f"{namespace}_2", topics=[topic], tables=[second], route_by="to")
    kafka.send(topic, [Message(b'{"id": 2, "to": "b"}', partition=0)])
    driving(other).batch()
    with raising(AnotherIngestion, subject=f"{namespace}_2"):
        drive.batch()
