"""An existing sink is taken over at its offsets, on real servers: no record is read twice, and none is lost."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.errors import Transient
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import (
    ConsumerGroupActive,
    StartOffsetsMissing,
    StartOffsetsOutOfRange,
    Superseded,
)
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.ingest.planning import CommittedOffsets, StartingOffsets
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.ingest.test_landing_source import LandingDriver, an_ingest, land, values
from branchlake_dagster_tests.ingest.test_live import live
from branchlake_dagster_tests.suite.kafka import Broker, Message

pytestmark = pytest.mark.spark


def a_group() -> str:
    return f"old-sink-{uuid.uuid4().hex[:8]}"


def an_ingestion(topic: str, start: Any, **more: Any) -> Ingest:
    name = f"i{uuid.uuid4().hex[:8]}"
    attributes: dict[str, Any] = {"p": "partition", "o": "offset"}
    table = IngestTable(key=[name, "t"], columns={"id": "bigint"}, attributes=attributes)
    return Ingest(name=name, topics=[topic], tables=[table], start=start, **more)


def send(kafka: Broker, topic: str, count: int, *, partition: int = 0) -> None:
    kafka.send(topic, [Message(json.dumps({"id": n}).encode(), partition=partition) for n in range(count)])


def held(lake: Lakehouse, ingest: Ingest) -> dict[int, list[int]]:
    """By partition the offsets of the rows on `main`, each as often as it is there."""
    found: dict[int, list[int]] = {}
    for row in lake.catalog("main").load_table((ingest.name, "t")).scan().to_arrow().to_pylist():
        found.setdefault(row["p"], []).append(row["o"])
    return {partition: sorted(offsets) for partition, offsets in found.items()}


def positions(drive: Driver) -> dict[int, int]:
    return {one.partition: offset for one, offset in drive.look().progress.position.items()}


# -- batch by batch ----------------------------------------------------------------------------------------


def test_the_first_record_is_the_one_at_the_committed_offset(driving: Driving, kafka: Broker) -> None:
    topic, group = kafka.topic(partitions=3), a_group()
    send(kafka, topic, 5)
    send(kafka, topic, 4, partition=1)
    kafka.commit(group, topic, {0: 2, 1: 4, 2: 0})
    ingest = an_ingestion(topic, CommittedOffsets(group))
    drive = driving(ingest)
    result = drive.batch()
    assert any(group in note for note in result.notes)
    assert held(drive.lake, ingest) == {0: [2, 3, 4]}
    assert positions(drive) == {0: 5, 1: 4, 2: 0}
    # From now on the tables count, whatever becomes of the group.
    kafka.delete_group(group)
    send(kafka, topic, 1)
    send(kafka, topic, 2, partition=1)
    send(kafka, topic, 1, partition=2)
    assert not drive.batch().notes
    assert held(drive.lake, ingest) == {0: [2, 3, 4, 5], 1: [4, 5], 2: [0]}


def test_the_start_is_recorded_also_where_nothing_waits(driving: Driving, kafka: Broker) -> None:
    topic, group = kafka.topic(), a_group()
    send(kafka, topic, 3)
    kafka.commit(group, topic, {0: 3})
    ingest = an_ingestion(topic, CommittedOffsets(group))
    drive = driving(ingest)
    assert drive.look().plan.must_record
    assert drive.batch().record_count == 0
    assert drive.look().plan.is_empty
    kafka.delete_group(group)
    send(kafka, topic, 1)
    drive.batch()
    assert held(drive.lake, ingest) == {0: [3]}


def test_given_offsets_are_exact_and_counted_once(driving: Driving, kafka: Broker) -> None:
    topic = kafka.topic(partitions=2)
    send(kafka, topic, 5)
    send(kafka, topic, 4, partition=1)
    ingest = an_ingestion(topic, StartingOffsets({topic: {0: 4, 1: 1}}), most_records=2)
    drive = driving(ingest)
    while not drive.look().plan.is_empty:
        drive.batch()
    assert held(drive.lake, ingest) == {0: [4], 1: [1, 2, 3]}
    drive.ingest = replace(ingest, start=StartingOffsets({topic: {0: 0, 1: 0}}))
    assert drive.look().plan.is_empty


@pytest.mark.parametrize(("otherwise", "rows"), [("earliest", {0: [2], 1: [0, 1]}), ("latest", {0: [2]})])
def test_partitions_that_were_never_committed_start_as_declared(
    driving: Driving, kafka: Broker, otherwise: Any, rows: dict[int, list[int]]
) -> None:
    topic, group = kafka.topic(partitions=2), a_group()
    send(kafka, topic, 3)
    send(kafka, topic, 2, partition=1)
    kafka.commit(group, topic, {0: 2})
    ingest = an_ingestion(topic, CommittedOffsets(group))
    drive = driving(ingest)
    with pytest.raises(StartOffsetsMissing) as missing:
        drive.look()
    assert missing.value.partitions == (f"{topic}[1]",)
    drive.ingest = replace(ingest, start=CommittedOffsets(group, otherwise=otherwise))
    drive.batch()
    assert held(drive.lake, ingest) == rows


def test_a_group_that_has_committed_nothing_always_stops_it(driving: Driving, kafka: Broker) -> None:
    """Its name is wrong, or its offsets have expired: from the start all rows would come twice."""
    topic, other, group = kafka.topic(), kafka.topic(), a_group()
    kafka.commit(group, other, {0: 0})
    for name in (a_group(), group):
        drive = driving(an_ingestion(topic, CommittedOffsets(name, otherwise="earliest")))
        with pytest.raises(StartOffsetsMissing) as missing:
            drive.look()
        assert name in missing.value.message


def test_offsets_that_the_topic_has_no_more_or_not_yet_are_refused(driving: Driving, kafka: Broker) -> None:
    topic, group = kafka.topic(partitions=2), a_group()
    send(kafka, topic, 5)
    kafka.delete_before(topic, 0, 3)
    kafka.commit(group, topic, {0: 2, 1: 1})
    drive = driving(an_ingestion(topic, CommittedOffsets(group, otherwise="earliest")))
    with pytest.raises(StartOffsetsOutOfRange) as refused:
        drive.look()
    assert refused.value.partitions == (f"{topic}[0]", f"{topic}[1]")
    drive = driving(an_ingestion(topic, StartingOffsets({topic: {0: 6, 1: 0}})))
    with pytest.raises(StartOffsetsOutOfRange) as refused:
        drive.look()
    assert refused.value.partitions == (f"{topic}[0]",)


def test_a_group_that_still_reads_is_waited_for(driving: Driving, kafka: Broker) -> None:
    topic, group = kafka.topic(), a_group()
    send(kafka, topic, 3)
    ingest = an_ingestion(topic, CommittedOffsets(group))
    drive = driving(ingest)
    with closing(kafka.consumer(group, topic)) as sink:
        (first, *_) = sink.consume(1, timeout=30)
        with pytest.raises(ConsumerGroupActive) as active:
            drive.look()
        assert isinstance(active.value, Transient)
        sink.commit(message=first, asynchronous=False)
    drive.batch()
    assert held(drive.lake, ingest) == {0: [1, 2]}


def test_a_transaction_that_commits_offsets_is_waited_for(kafka: Broker) -> None:
    """Kafka gives no offset then: not even the one before it, and the partition looks never committed."""
    topic, group = kafka.topic(), a_group()
    send(kafka, topic, 3)
    kafka.commit(group, topic, {0: 1})
    topics = KafkaTopics(kafka.cluster)
    with kafka.transaction_of(group, topic, {0: 3}), pytest.raises(ConsumerGroupActive):
        topics.committed_offsets(group, [topic])
    until = time.monotonic() + 30
    while True:
        try:
            committed = topics.committed_offsets(group, [topic])
            break
        except ConsumerGroupActive:  # its markers are written after the commit
            assert time.monotonic() < until
            time.sleep(0.1)
    assert committed == {topic: {0: 3}}


def test_a_table_with_the_old_sink_s_rows_is_filled_again_from_the_start_only(
    driving: Driving, kafka: Broker
) -> None:
    topic, group = kafka.topic(), a_group()
    send(kafka, topic, 4)
    kafka.commit(group, topic, {0: 2})
    ingest = an_ingestion(topic, CommittedOffsets(group), on_rollback="replay")
    drive = driving(ingest)
    # What the old sink has written: the records before its committed offset.
    old = driving(an_ingestion(topic, "earliest"))
    old.ingest = replace(old.ingest, tables=ingest.tables, name=f"{ingest.name}_old", most_records=2)
    old.batch()
    table = drive.lake.catalog("main").load_table((ingest.name, "t"))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    with table.transaction() as change:
        change.remove_properties(f"branchlake.offsets.{ingest.name}_old")
    drive.batch()
    assert held(drive.lake, ingest) == {0: [0, 1, 2, 3]}
    table = drive.lake.catalog("main").load_table((ingest.name, "t"))
    table.manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
    assert held(drive.lake, ingest) == {0: [0, 1]}
    drive.batch()
    assert held(drive.lake, ingest) == {0: [0, 1, 2, 3]}


def test_a_landing_folder_starts_at_given_offsets(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    land(tmp_path, "a", values(1, 2, 3), values(4))
    land(tmp_path, "a", values(5, 6), partition=1)
    start = StartingOffsets({"a": {0: 2}}, otherwise="latest")
    drive = LandingDriver(lakehouse, tmp_path, an_ingest(start=start), spark_session)
    drive.batch()
    assert sorted((row["p"], row["o"]) for row in drive.rows()) == [(0, 2), (0, 3)]
    land(tmp_path, "a", values(7), partition=1)
    drive.batch()
    assert sorted((row["p"], row["o"]) for row in drive.rows()) == [(0, 2), (0, 3), (1, 2)]


def test_of_two_live_runs_that_start_at_once_one_is_published(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    """The group has moved between them, as when the old sink was started once more."""
    topic, group = kafka.topic(), a_group()
    send(kafka, topic, 5)
    kafka.commit(group, topic, {0: 2})
    ingest = an_ingestion(topic, CommittedOffsets(group))
    with live(lakehouse, kafka, ingest) as paused, live(lakehouse, kafka, ingest) as other:

        def meanwhile(_: Any) -> None:
            kafka.commit(group, topic, {0: 3})
            assert other.publish_next_batch() is not None

        paused.between = meanwhile
        with pytest.raises(Superseded):
            paused.publish_next_batch()
        paused.between = lambda _: None
        assert paused.publish_next_batch() is None
    assert held(lakehouse, ingest) == {0: [3, 4]}
