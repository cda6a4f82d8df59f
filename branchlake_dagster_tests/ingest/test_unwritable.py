"""Records that no pass can read: the batch is divided, they become dead letters, and all others are written.

What fails here is a record time that Spark's Kafka source cannot hold: nanoseconds written as milliseconds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from pyspark.errors import PySparkException

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest import batch_passes
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import KafkaUnavailable
from branchlake_dagster.ingest.ingest_batch import ingest_batch
from branchlake_dagster.ingest.record_frames import find_unwritable_records
from branchlake_dagster.ingest.unwritable_records import error_reason, is_caused_by_records
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.spark.session import SparkGone
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker, Message

NANOSECONDS = 1_767_323_045_000_000_000
ANY_TIME = {"message_timestamp_after_max_ms": str((1 << 63) - 1), "retention_ms": "-1"}


def bad(number: int, partition: int = 0) -> Message:
    return Message(
        json.dumps({"id": number}).encode(), b"k\xff", [("h", b"\x00")], partition, at=NANOSECONDS + number
    )


def good(number: int, partition: int = 0, **more: object) -> Message:
    return Message(json.dumps({"id": number, **more}).encode(), partition=partition)


FEW = (2, [(0, 100, 0), (3, 101, 1)])
MANY = (30, [(3, 100, 0), (11, 101, 1), (12, 102, 1), (25, 103, 2)])


@pytest.mark.parametrize(
    ("count", "bad_ones"),
    [pytest.param(*FEW, id="few"), pytest.param(*MANY, id="many", marks=pytest.mark.soak)],
)
def test_all_others_are_written_and_each_bad_record_is_a_dead_letter(
    driving: Driving, kafka: Broker, namespace: str, count: int, bad_ones: list[tuple[int, int, int]]
) -> None:
    """Also while the first batch makes the tables, and the records bring columns."""
    topic = kafka.topic(partitions=3, **ANY_TIME)
    tables = [
        IngestTable(key=[namespace, "found"], attributes={"at": "offset"}),
        IngestTable(key=[namespace, "latest"], columns={"id": "bigint"}, mode="upsert", keys=["id"]),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables, evolve=["add"]))
    sent = [good(n, n % 3, **({"late": "x"} if n == count - 1 else {})) for n in range(count)]
    for place, number, partition in bad_ones:
        sent.insert(place, bad(number, partition))
    kafka.send(topic, sent)
    result = drive.batch()
    assert sorted(row["id"] for row in drive.rows(0)) == list(range(count))
    assert sorted(row["id"] for row in drive.rows(1)) == list(range(count))
    assert [row["late"] for row in drive.rows(0, "id")][-1] == "x"
    letters = drive.dead()
    assert sorted(json.loads(letter["value"])["id"] for letter in letters) == [
        number for _, number, _ in bad_ones
    ]
    for letter in letters:
        assert (letter["error_kind"], letter["key"], letter["timestamp"]) == ("unwritable", b"k\xff", None)
        assert letter["headers"] == [{"key": "h", "value": b"\x00"}]
        assert (letter["table"], letter["batch"]) == (None, result.commit_id)
        assert "long overflow" in letter["error"]
    dead = len(bad_ones)
    assert (result.record_count, result.dead_letter_count, result.scan_result.counts["dead/unwritable"]) == (
        count + dead,
        dead,
        dead,
    )
    assert len(result.notes) == 1
    assert drive.look().plan.is_empty
    kafka.send(topic, [good(count)])
    assert (drive.batch().record_count, len(drive.rows(0))) == (1, count + 1)


def test_a_batch_of_nothing_else_is_dead_letters_alone(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic(**ANY_TIME)
    table = IngestTable(key=[namespace, "t"], columns={"id": "bigint"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [bad(1), bad(2)])
    result = drive.batch()
    assert (result.record_count, result.dead_letter_count) == (2, 2)
    assert [letter["offset"] for letter in drive.dead()] == [0, 1]
    kafka.send(topic, [good(3)])
    drive.batch()
    assert drive.rows() == [{"id": 3}]


def test_what_a_search_does_not_reach_waits_for_the_next_batch(
    driving: Driving, kafka: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batch_passes, "find_unwritable_records", partial(find_unwritable_records, max_passes=5)
    )
    topic = kafka.topic(partitions=2, **ANY_TIME)
    table = IngestTable(key=[namespace, "t"], columns={"id": "bigint"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], start="earliest"))
    numbers = range(6)
    kafka.send(topic, [bad(n, n % 2) if n % 3 == 0 else good(n, n % 2) for n in numbers])
    batches = 0
    while not drive.look().plan.is_empty:
        before = drive.look().plan
        drive.batch()
        after = drive.look().plan
        assert sum(map(len, after.ranges.values())) < sum(map(len, before.ranges.values()))
        batches += 1
    assert batches > 1
    assert [row["id"] for row in drive.rows(0, "id")] == [n for n in numbers if n % 3]
    assert sorted(json.loads(one["value"])["id"] for one in drive.dead()) == [n for n in numbers if not n % 3]


def test_nothing_is_divided_where_a_harmless_record_fails_too(
    driving: Driving, kafka: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a wrong declaration must not turn records into dead letters."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "bigint"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [good(1)])
    calls: list[int] = []

    def failing(*_: object, **__: object) -> object:
        calls.append(1)
        raise PySparkException("broken")

    monkeypatch.setattr(batch_passes, "scan_records", failing)
    place = drive.place()
    head = drive.lake.nessie.reference(place.branch).hash
    with pytest.raises(PySparkException):
        ingest_batch(drive.look(place.branch), place, drive.records, tasks=2)
    assert len(calls) == 2
    entries = drive.lake.nessie.diff(f"{place.branch}@{head}", place.branch)
    assert [one.key for one in entries if one.key.name == "t"] == []


@pytest.mark.parametrize("columns", [{"id": "bigint"}, {}], ids=["declared", "found"])
def test_a_table_that_is_declared_wrongly_makes_no_dead_letters(
    driving: Driving, kafka: Broker, namespace: str, columns: dict[str, str]
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns=columns, required=["misspelled"])
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [good(1), good(2)])
    with pytest.raises(PySparkException):
        drive.batch()
    assert not drive.lake.catalog("main").table_exists((namespace, f"{namespace}_dead_letters"))


def test_a_table_that_is_filled_again_gets_no_second_dead_letter(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic(**ANY_TIME)
    tables = [IngestTable(key=[namespace, name], columns={"id": "bigint"}) for name in "ab"]
    ingest = Ingest(name=namespace, topics=[topic], tables=tables)
    drive = driving(ingest)
    kafka.send(topic, [good(1)])
    drive.batch()
    kafka.send(topic, [good(2), bad(3), good(4)])
    drive.batch()
    table = drive.table(0)
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    drive.ingest = replace(ingest, on_rollback="replay")
    kafka.send(topic, [bad(5), good(6)])
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 2, 4, 6]
    assert [row["id"] for row in drive.rows(1, "id")] == [1, 2, 4, 6]
    assert [(one["offset"], one["table"]) for one in drive.dead()] == [(2, None), (4, None)]


def test_only_what_records_may_cause_is_divided() -> None:
    assert is_caused_by_records(PySparkException("x"))
    assert is_caused_by_records(ValueError("x"))
    assert is_caused_by_records(SchemaMismatch("x"))
    others = [
        SparkGone("x"),
        KafkaUnavailable("x"),
        NessieUnavailable("x"),
        ConfigurationError("x"),
        OSError("x"),
        TimeoutError("x"),
    ]
    assert not any(map(is_caused_by_records, others))


def test_a_reason_is_the_innermost_cause() -> None:
    java = "Job aborted\n\tat org.apache.spark.Foo(Foo.scala:1)\nCaused by: java.lang.ArithmeticException: long overflow\n"
    assert error_reason(PySparkException(java)) == "java.lang.ArithmeticException: long overflow"
    python = 'Traceback\n  File "x.py", line 1, in f\nValueError: Can not validate empty avro name\n'
    assert error_reason(PySparkException(python)) == "ValueError: Can not validate empty avro name"
    head = "PythonException: \n  An exception was thrown from the Python worker.\nTraceback (most recent call last):\n"
    arrow = (
        head
        + '  File "a.pxi", line 1, in f\n    x()\n    ^^^\npyarrow.lib.ArrowInvalid: has nulls\n\nJVM stacktrace:\n\tat a.B(C.scala:1)'
    )
    assert error_reason(PySparkException(arrow)) == "pyarrow.lib.ArrowInvalid: has nulls"
    # The text of an exception may have lines that look like the end of a traceback.
    frame = '  File "a.py", line 3, in f\n    M()\n'
    lines = (
        head + frame + "pydantic.ValidationError: 2 errors for M\na\n  Field required\nb\n  Field required\n"
    )
    assert error_reason(PySparkException(lines)) == "pydantic.ValidationError: 2 errors for M"
    chained = f"{head}{frame}KeyError: 'a'\n\nDuring handling:\n\nTraceback (most recent call last):\n{frame}Odd: b\n"
    assert error_reason(PySparkException(chained)) == "Odd: b"
    assert error_reason(KeyError("x" * 2_000)).startswith("KeyError: 'xx")
    assert len(error_reason(KeyError("x" * 2_000))) == 500
