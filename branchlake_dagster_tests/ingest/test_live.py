"""Batch after batch on real servers: published exactly once, whoever interferes."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from branchlake_dagster.cleanup.jobs import DagsterRuns, reap_branches
from branchlake_dagster.cleanup.reaper import Reaper
from branchlake_dagster.cleanup.reaper_rules import Limits, Reaping, ReapingAction
from branchlake_dagster.embedded.servers import Endpoints
from branchlake_dagster.ingest import live as live_module
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import Superseded, TooManyDeadLetters
from branchlake_dagster.ingest.ingest_batch import BatchResult
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.live import LiveIngestion
from branchlake_dagster.ingest.offsets import TableProgress
from branchlake_dagster.ingest.record_frames import KafkaRecords
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieOutcomeUnknown, NessieUnavailable
from branchlake_dagster.publication.publisher import PublicationContended
from branchlake_dagster.publication.reconciler import RUN_BRANCH_FILTER
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.dagster_internals import create_run_for_test
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.kafka import Broker, Message
from branchlake_dagster_tests.suite.raised import raising

COLUMNS = {"id": "bigint", "kind": "string"}
AT = int(time.time()) * 1_000 - 3_600_000
"""The records' time, ms since 1970: not so long ago that the broker's retention takes them away."""


def two_tables(topic: str, **more: Any) -> Ingest:
    name = f"i{uuid.uuid4().hex[:8]}"
    tables = [
        IngestTable(key=[name, kind], columns=COLUMNS, route=kind, attributes={"o": "offset"})
        for kind in ("a", "b")
    ]
    return Ingest(name=name, topics=[topic], tables=tables, route_by="kind", **more)


def record(number: int, kind: str = "a") -> Message:
    return Message(json.dumps({"id": number, "kind": kind}).encode(), at=AT + 1_000 * number)


class Stopped(BaseException):
    """The process is gone."""


class Live(LiveIngestion):
    """With something that happens between the batch and its publication."""

    between: Callable[[BatchResult], None] = staticmethod(lambda _: None)

    def _publish(self, base_hash: str, result: BatchResult) -> str:
        self.between(result)
        return super()._publish(base_hash, result)


@contextmanager
def live(
    lake: Lakehouse,
    kafka: Broker,
    ingest: Ingest,
    session_at: Callable[[str], SparkSession] | None = None,
) -> Iterator[Live]:
    made = Live(
        ingest,
        lake,
        str(uuid.uuid4()),
        topics := KafkaTopics(kafka.cluster),
        KafkaRecords(kafka.cluster, topics),
        session_at=session_at or lake.spark_session,
        tasks=2,
        properties={},
    )
    with closing(made):
        yield made


def ids(lake: Lakehouse, ingest: Ingest, kind: str) -> list[int]:
    found = lake.catalog("main").load_table((ingest.name, kind)).scan().to_arrow()
    return sorted(found["id"].to_pylist())


def run_branches(lake: Lakehouse) -> set[str]:
    return {one.name for one in lake.nessie.references(filter=RUN_BRANCH_FILTER)}


def test_spark_bounds_the_bytes_it_sends_to_workers_unless_records_are_small(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    """As large as a broker lets them be, so many records as small ones are sent at once were more than fits."""
    topic = kafka.topic()
    ingest = two_tables(topic)
    sessions: list[SparkSession] = []

    def opened(ref: str) -> SparkSession:
        sessions.append(lakehouse.spark_session(ref))
        return sessions[-1]

    bounds = []
    with live(lakehouse, kafka, ingest, session_at=opened) as one:
        for kind in ("a" * 10, "a" * 10, "a" * 900_000, "a" * 10):
            kafka.send(topic, [record(1, "a"), record(1, kind)])
            assert one.publish_next_batch() is not None
            bounds.append(int(sessions[-1].conf.get("spark.sql.execution.arrow.maxBytesPerBatch") or 0))
    assert len(sessions) == 1
    assert bounds == [64 << 20, (1 << 31) - 1, (1 << 31) - 1, 64 << 20]


def test_a_record_that_fails_its_batch_is_published_as_a_dead_letter_with_the_others(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    """Spark's Kafka source cannot hold the time of a producer that writes nanoseconds as milliseconds."""
    topic = kafka.topic(message_timestamp_after_max_ms=str((1 << 63) - 1), retention_ms="-1")
    ingest = two_tables(topic)
    kafka.send(topic, [record(1), replace(record(2), at=AT * 1_000_000), record(3, "b")])
    before = run_branches(lakehouse)
    with live(lakehouse, kafka, ingest) as one:
        batch = one.publish_next_batch()
        assert batch is not None
        assert one.publish_next_batch() is None
    assert (batch.result.record_count, batch.result.scan_result.counts["dead/unwritable"]) == (3, 1)
    assert (ids(lakehouse, ingest, "a"), ids(lakehouse, ingest, "b")) == ([1], [3])
    assert run_branches(lakehouse) == before


def test_each_batch_is_one_publication_with_its_offsets(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic(partitions=2)
    ingest = two_tables(topic, most_records=3)
    kafka.send(topic, [record(1), record(2, "b"), Message(b"no", partition=1, at=AT + 9_000), record(3, "c")])
    before = run_branches(lakehouse)
    with live(lakehouse, kafka, ingest) as one:
        first, second = one.publish_next_batch(), one.publish_next_batch()
        assert first is not None
        assert second is not None
        assert one.publish_next_batch() is None
    assert first.result.plan.lag == 1
    assert (first.result.record_count, second.result.record_count) == (3, 1)
    assert run_branches(lakehouse) == before
    assert (ids(lakehouse, ingest, "a"), ids(lakehouse, ingest, "b")) == ([1], [2])
    log = [entry.commit.hash for entry in lakehouse.nessie.log("main", limit=2)]
    assert log == [second.publication, first.publication]
    catalog = lakehouse.catalog("main")
    dead = catalog.load_table((ingest.name, f"{ingest.name}_dead_letters"))
    found = {row["value"]: row["error_kind"] for row in dead.scan().to_arrow().to_pylist()}
    assert found == {b"no": "syntax", record(3, "c").value: "route"}
    told = TableProgress.from_json(dead.metadata.properties[LakeProperty.OFFSETS_PREFIX + ingest.name])
    assert {(each.topic, each.partition): offset for each, offset in told.offsets.items()} == {
        (topic, 0): 3,
        (topic, 1): 1,
    }
    table = catalog.load_table((ingest.name, "a"))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    summary = snapshot.summary.additional_properties
    assert summary[LakeProperty.COMMIT_ID] == first.result.commit_id
    assert (
        TableProgress.from_json(summary[LakeProperty.OFFSETS_PREFIX + ingest.name]).commit_id
        == first.result.commit_id
    )
    # The least of the partitions' latest times, as soon as both have had a record.
    times = [one.result.progress.valid_through_ms for one in (first, second)]
    assert summary.get(LakeProperty.VALID_THROUGH_MS) == (str(times[0]) if times[0] is not None else None)
    assert times in ([AT + 2_000, AT + 3_000], [None, AT + 3_000])


def test_of_two_batches_for_the_same_offsets_one_is_published(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic)
    kafka.send(topic, [record(1), record(2, "b"), Message(b"no")])
    with live(lakehouse, kafka, ingest) as paused, live(lakehouse, kafka, ingest) as other:
        paused.between = lambda _: other.publish_next_batch()  # both make the tables
        with pytest.raises(Superseded):
            paused.publish_next_batch()
        assert (ids(lakehouse, ingest, "a"), ids(lakehouse, ingest, "b")) == ([1], [2])
        kafka.send(topic, [record(3, "b")])

        def meanwhile(_: BatchResult) -> None:
            kafka.send(topic, [record(4)])
            assert other.publish_next_batch() is not None  # takes both, and fills another table as well

        paused.between = meanwhile
        with raising(Superseded, reason="batch_published_first"):
            paused.publish_next_batch()
        paused.between = lambda _: None
        assert paused.publish_next_batch() is None  # it sees what main has
    assert (ids(lakehouse, ingest, "a"), ids(lakehouse, ingest, "b")) == ([1, 4], [2, 3])


def test_a_writer_whose_branch_is_gone_publishes_nothing(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic)
    kafka.send(topic, [record(1)])

    def reaped(result: BatchResult) -> None:
        head = lakehouse.nessie.reference(result.head.name)
        lakehouse.nessie.delete_branch(head.name, expected_hash=head.hash)

    with live(lakehouse, kafka, ingest) as one:
        one.between = reaped
        with raising(Superseded, reason="fenced"):
            one.publish_next_batch()
        one.between = lambda _: None
        assert one.publish_next_batch() is not None
    assert ids(lakehouse, ingest, "a") == [1]


def test_a_batch_that_dies_anywhere_leaves_nothing(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic)
    kafka.send(topic, [record(number, "ab"[number % 2]) for number in range(10)])

    def dies(_: BatchResult) -> None:
        raise Stopped

    with live(lakehouse, kafka, ingest) as one:
        one.between = dies
        with pytest.raises(Stopped):
            one.publish_next_batch()
    with live(lakehouse, kafka, ingest) as one:
        publish = one._publisher.publish

        def published_and_died(*args: Any, **named: Any) -> Any:
            publish(*args, **named)
            raise Stopped

        monkeypatch.setattr(one._publisher, "publish", published_and_died)
        with pytest.raises(Stopped):
            one.publish_next_batch()
    with live(lakehouse, kafka, ingest) as one:
        assert one.publish_next_batch() is None
    assert ids(lakehouse, ingest, "a") + ids(lakehouse, ingest, "b") == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


def test_an_unknown_outcome_stays_unknown_whatever_fails_after_it(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt arrives and its answer is lost; then Nessie is away until the last attempt."""
    topic = kafka.topic()
    ingest = two_tables(topic)
    kafka.send(topic, [record(1)])
    with live(lakehouse, kafka, ingest) as one:
        publish, attempts = one._publisher.publish, 0

        def lose_answers(candidates: Any, **named: Any) -> Any:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                publish(candidates, **named)
            error = NessieOutcomeUnknown("lost") if attempts == 1 else NessieUnavailable("away")
            return {candidate.branch: error for candidate in candidates}

        monkeypatch.setattr(one._publisher, "publish", lose_answers)
        monkeypatch.setattr(one, "_sleep", lambda _: None)
        with raising(NessieOutcomeUnknown):
            one.publish_next_batch()
    assert attempts > 1
    assert ids(lakehouse, ingest, "a") == [1]


def test_too_many_dead_letters_block_the_batch(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic, tolerance=0.2)
    kafka.send(topic, [record(1), Message(b"no")])
    with live(lakehouse, kafka, ingest) as one, raising(TooManyDeadLetters, "50.00%"):
        one.publish_next_batch()
    assert not lakehouse.catalog("main").table_exists((ingest.name, "a"))


def test_a_table_that_is_rolled_back_meanwhile_is_filled_again(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic, on_rollback="replay")
    with live(lakehouse, kafka, ingest) as one:
        for number in (1, 2):
            kafka.send(topic, [record(number), record(number, "b")])
            one.publish_next_batch()

        def rolled_back(_: BatchResult) -> None:
            table = lakehouse.catalog("main").load_table((ingest.name, "a"))
            table.manage_snapshots().rollback_to_snapshot(table.history()[0].snapshot_id).commit()

        kafka.send(topic, [record(3), record(3, "b")])
        one.between = rolled_back
        with contextlib.suppress(Superseded):
            one.publish_next_batch()
        one.between = lambda _: None
        while one.publish_next_batch():
            pass
    assert (ids(lakehouse, ingest, "a"), ids(lakehouse, ingest, "b")) == ([1, 2, 3], [1, 2, 3])


@pytest.mark.soak  # test_batches.py: test_a_table_that_is_rolled_back_is_filled_again_alone
def test_a_table_is_filled_again_alone_and_no_dead_letter_comes_twice(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic, on_rollback="replay")
    catalog = lakehouse.catalog("main")
    bad = Message(b'{"id": "x", "kind": "a"}')
    with live(lakehouse, kafka, ingest) as one:
        for number in (1, 2):
            kafka.send(topic, [record(number), record(number, "b"), bad, Message(b"no"), record(9, "c")])
            one.publish_next_batch()
        for name in ("a", f"{ingest.name}_dead_letters"):
            before = catalog.load_table((ingest.name, name)).scan().to_arrow().num_rows
            table = catalog.load_table((ingest.name, name))
            table.manage_snapshots().rollback_to_snapshot(table.history()[0].snapshot_id).commit()
            assert one.publish_next_batch() is not None
            assert one.publish_next_batch() is None
            after = catalog.load_table((ingest.name, name)).scan().to_arrow().num_rows
            assert (name, after) == (name, before)
            assert (ids(lakehouse, ingest, "a"), ids(lakehouse, ingest, "b")) == ([1, 2], [1, 2])
            letters = catalog.load_table((ingest.name, f"{ingest.name}_dead_letters")).scan().to_arrow()
            assert letters.num_rows == 6, name


def test_it_takes_no_snapshots_out_any_more_when_it_meets_another_writer(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic, keep_snapshots=2)

    def table() -> Table:
        return lakehouse.catalog("main").load_table((ingest.name, "a"))

    def by_hand(_: BatchResult) -> None:
        one.between = lambda _: None
        table().append(table().scan(limit=1).to_arrow())

    with live(lakehouse, kafka, ingest) as one:
        for number in range(4):
            kafka.send(topic, [record(number)])
            one.publish_next_batch()
        assert len(table().snapshots()) == 3  # one was taken out for the fourth
        kafka.send(topic, [record(4)])
        one.between = by_hand
        with raising(PublicationContended, reason="expired_snapshots"):
            one.publish_next_batch()
        assert one.publish_next_batch() is not None
        assert len(table().snapshots()) == 5
    assert sorted({*ids(lakehouse, ingest, "a")}) == [0, 1, 2, 3, 4]
    assert len(ids(lakehouse, ingest, "a")) == 6


class MovedLake(Lakehouse):
    """A lake whose Nessie is started again at another address, so that it has another client."""

    def __init__(self, lake: Lakehouse) -> None:
        super().__init__(lake.settings)
        at = self.endpoints(spark=False)
        self.client = NessieClient(at.nessie_uri, token=at.nessie_token, sleep=lambda _: None)

    @property
    def nessie(self) -> NessieClient:
        return self.client

    def move(self) -> None:
        old, at = self.client, self.endpoints(spark=False)
        old._transport.uri = "http://127.0.0.1:1/api/v2"
        self.client = NessieClient(at.nessie_uri, token=at.nessie_token)


def test_it_goes_on_when_nessie_is_back_at_another_address(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic)
    moved = MovedLake(lakehouse)
    kafka.send(topic, [record(1)])
    with live(moved, kafka, ingest) as one:
        one.publish_next_batch()
        moved.move()
        kafka.send(topic, [record(2)])
        one.publish_next_batch()
    assert ids(lakehouse, ingest, "a") == [1, 2]


class RestartedSpark(Lakehouse):
    """A lake whose Spark says that it is somewhere else."""

    at = ""

    def endpoints(self, *, spark: bool = True) -> Endpoints:
        found = super().endpoints(spark=spark)
        return replace(found, spark_remote=self.at) if self.at and spark else found


def test_it_opens_another_session_when_spark_is_back_at_another_address(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic, opened = kafka.topic(), list[Any]()
    ingest = two_tables(topic)
    lake = RestartedSpark(lakehouse.settings)

    def session_at(ref: str) -> Any:
        opened.append(lakehouse.spark_session(ref))
        return opened[-1]

    with live(lake, kafka, ingest) as one:
        one._session_at = session_at
        for number, at in enumerate(("", "", "sc://elsewhere"), 1):
            lake.at = at
            kafka.send(topic, [record(number)])
            assert one.publish_next_batch() is not None
        assert len(opened) == 2
        opened[0].stop()
    assert ids(lakehouse, ingest, "a") == [1, 2, 3]


def test_what_is_left_of_a_batch_that_died_in_its_pass_is_reaped(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    ingest = two_tables(topic)
    kafka.send(topic, [record(1)])
    before = run_branches(lakehouse)

    def dies(*_: Any, **__: Any) -> Any:
        raise Stopped

    with new_instance() as instance, live(lakehouse, kafka, ingest) as one:
        one._properties = {LakeProperty.INSTANCE: instance.run_storage.get_run_storage_id()}
        monkeypatch.setattr(one._records, "load_frame", dies)
        monkeypatch.setattr(one, "_clean_up", lambda *_, **__: None)
        with pytest.raises(Stopped):
            one.publish_next_batch()
        (left,) = run_branches(lakehouse) - before
        later = datetime.now(UTC) + timedelta(days=2)
        (ended,) = reap_branches(lakehouse, instance, branch_names=[left], now=lambda: later)
    assert ended.action is ReapingAction.DISCARD, ended.reason


def test_what_is_left_of_a_batch_that_died_as_it_had_its_branch_is_reaped(
    lakehouse: Lakehouse, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was committed on the branch, so only its name tells whose it is and how old."""
    topic = kafka.topic()
    ingest = two_tables(topic)
    kafka.send(topic, [record(1)])
    made: list[str] = []
    create = NessieClient.create_branch

    def made_and_died(client: NessieClient, name: str, **where: Any) -> Any:
        create(client, name, **where)
        made.append(name)
        raise Stopped

    def reaped(instance: dg.DagsterInstance, *, after: timedelta) -> Reaping:
        (found,) = Reaper(
            lakehouse.nessie,
            DagsterRuns(instance),
            Limits(max_age=timedelta(hours=6), orphan_grace=timedelta(hours=1)),
            heartbeats=None,
            now=lambda: datetime.now(UTC) + after,
            monotonic=time.monotonic,
            sleep=time.sleep,
            is_on_main=lambda *_: True,
            ref_filter=f"ref.name == '{made[-1]}'",
            discarded_filter="ref.name == ''",
            claim_filter="ref.name == ''",
            instance=instance.run_storage.get_run_storage_id(),
        ).run()
        assert (found.action is ReapingAction.KEEP) == (made[-1] in run_branches(lakehouse))
        return found

    hours = timedelta(hours=1)
    with new_instance() as instance, new_instance() as other:
        for forgotten in (False, True):
            with live(lakehouse, kafka, ingest) as one, monkeypatch.context() as patch:
                one._properties = {LakeProperty.INSTANCE: instance.run_storage.get_run_storage_id()}
                patch.setattr(NessieClient, "create_branch", made_and_died)
                patch.setattr(one, "_clean_up", lambda *_, **__: None)
                with pytest.raises(Stopped):
                    one.publish_next_batch()
            run = create_run_for_test(instance, run_id=one._run_id, status=dg.DagsterRunStatus.STARTED)
            at_work = reaped(instance, after=5 * hours)
            assert (at_work.action, at_work.reason.code) == (ReapingAction.KEEP, "run_active")
            elsewhere = reaped(other, after=1000 * hours)
            assert elsewhere.action is ReapingAction.KEEP
            assert elsewhere.instance == instance.run_storage.get_run_storage_id()
            if forgotten:
                instance.delete_run(run.run_id)
            else:
                instance.report_run_failed(run)
            assert reaped(instance, after=hours / 2).action is ReapingAction.KEEP
            assert reaped(instance, after=2 * hours).action is ReapingAction.DISCARD


def test_an_interruption_leaves_no_branch_wherever_it_comes(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster raises it between any two lines: while a batch's branch is made, or while it is taken away."""
    topic = kafka.topic()
    ingest, client = two_tables(topic), lakehouse.nessie
    kafka.send(topic, [record(1, "a")])
    make, drop, tries = client.create_branch, live_module.end_judged_branch, []

    def made(*args: Any, **more: Any) -> None:
        make(*args, **more)
        raise KeyboardInterrupt

    def dropped(*args: Any, **more: Any) -> None:
        tries.append(args)
        if len(tries) == 1:
            raise KeyboardInterrupt
        drop(*args, **more)

    with live(lakehouse, kafka, ingest) as one:
        there = run_branches(lakehouse)
        with monkeypatch.context() as patch:
            patch.setattr(client, "create_branch", made)
            with pytest.raises(KeyboardInterrupt):
                one.publish_next_batch()
        assert run_branches(lakehouse) == there
        with monkeypatch.context() as patch:
            patch.setattr(live_module, "end_judged_branch", dropped)
            with pytest.raises(KeyboardInterrupt):
                one.publish_next_batch()
        assert len(tries) == 2
        assert run_branches(lakehouse) == there
        # It was on main when the interruption came.
        assert one.publish_next_batch() is None
