"""Batches of JSON on a real broker, Spark and Nessie: where records go, and what becomes of the tables."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pandera.pyspark as pa
import pyspark.sql.types as T  # noqa: N812 - the name every Spark reader expects
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    UUIDType,
)

from branchlake_dagster.catalog.options import NAMESPACE_CREATE
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import (
    EarlierAttemptLate,
    PositionLost,
    RecordsDeleted,
    TopicChanged,
    TopicReplaced,
)
from branchlake_dagster.ingest.ingest_batch import ingest_batch
from branchlake_dagster.ingest.worker_writer import TABLES_PER_SET
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker, Message
from branchlake_dagster_tests.suite.raised import raising


class Contract(pa.DataFrameModel):
    amount: T.LongType() = pa.Field(ge=0, nullable=True)
    site: T.StringType() = pa.Field(isin=["a", "b", "c"], nullable=True)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_records_go_to_the_tables_of_their_route(driving: Driving, kafka: Broker, namespace: str) -> None:
    one, other = kafka.topic(partitions=2), kafka.topic()
    columns = {"id": "bigint", "amount": "bigint", "site": "string"}
    attributes = {
        "topic": "topic",
        "part": "partition",
        "at": "offset",
        "moment": "timestamp",
        "its_key": "key",
    }
    ingest = Ingest(
        name=namespace,
        topics=[one, other],
        route_by="to.site",
        tables=[
            IngestTable(key=[namespace, "a"], columns=columns, route="a", required=["id"]),
            IngestTable(key=[namespace, "ab"], columns=columns, route="a|b.*", contract=Contract),
            IngestTable(key=[namespace, "every"], columns={"id": "int"}, attributes=attributes),
            IngestTable(key=[namespace, "dot"], columns=columns, route=r"a\.b"),
        ],
    )
    drive = driving(ingest)
    moment = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    told = int(moment.timestamp() * 1000)
    kafka.send(
        one,
        [
            Message(_json(id=1, amount=5, site="a", to={"site": "a"}), at=told),
            Message(_json(id=2, amount=5, site="b", to={"site": "bcd"}), key=b"k", partition=1, at=told),
            Message(_json(id=None, amount=5, to={"site": "a"}), at=told),
            Message(_json(id=4, amount=-1, site="z", to={"site": "b"}), at=told),
            Message(_json(id=5, to={"site": "xa"}), at=told + 5000),
        ],
    )
    kafka.send(other, [Message(_json(id=3_000_000_000, to={"site": "a.b"}), at=told), _json(id=7)])
    result = drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [1]
    assert [row["id"] for row in drive.arrow(1).sort_by("id").to_pylist()] == [1, 2, None]
    assert sorted(
        (row["topic"], row["part"], row["at"], row["id"]) for row in drive.rows(2) if row["id"]
    ) == (sorted([(one, 0, 0, 1), (one, 1, 0, 2), (one, 0, 2, 4), (one, 0, 3, 5), (other, 0, 1, 7)]))
    (second,) = [row for row in drive.rows(2) if row["id"] == 2]
    assert (second["moment"], second["its_key"]) == (moment, b"k")
    assert [row["id"] for row in drive.rows(3)] == [3_000_000_000]
    assert [
        (row["topic"], row["offset"], row["table"], row["error_kind"], row["error"]) for row in drive.dead()
    ] == (
        sorted(
            [
                (one, 1, f"{namespace}.a", "required", "id is null."),
                (one, 2, f"{namespace}.ab", "contract", drive.dead()[-2 if one < other else -1]["error"]),
                (other, 0, f"{namespace}.every", "conversion", "id is not a valid int."),
            ]
        )
    )
    (broken,) = [row["error"] for row in drive.dead() if row["error_kind"] == "contract"]
    assert "amount" in broken
    assert "site" in broken
    # Of three partitions the least of their latest times; each of them took part.
    assert result.progress.valid_through_ms == told

    # A batch that has nothing from two of them knows their times all the same.
    kafka.send(other, [_json(id=8)])
    result = drive.batch()
    assert (result.record_count, result.progress.valid_through_ms) == (1, told)
    assert drive.look().plan.is_empty


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["once", "again"])
def test_more_tables_and_partitions_than_an_expression_may_be_deep(
    driving: Driving, kafka: Broker, namespace: str, again: bool
) -> None:
    """And more tables than a number has bits: each gets what is its own, also when one is filled again."""
    number = TABLES_PER_SET + 2
    topic = kafka.topic(partitions=number)
    tables = [
        IngestTable(key=[namespace, f"t{one}"], columns={"id": "int"}, route=f"r{one}")
        for one in range(number)
    ]
    ingest = Ingest(name=namespace, topics=[topic], tables=tables, route_by="to", on_rollback="replay")
    drive = driving(ingest)
    rounds = (0, number) if again else (0,)
    for first in rounds:
        kafka.send(
            topic,
            [Message(_json(id=first + one, to=f"r{one}"), partition=one) for one in range(number)]
            + [Message(_json(id="x", to=f"r{TABLES_PER_SET}"), partition=TABLES_PER_SET)],
        )
        drive.batch()
    expected = [[first + one for first in rounds] for one in range(number)]
    assert [sorted(drive.arrow(one)["id"].to_pylist()) for one in range(number)] == expected
    assert [letter["table"] for letter in drive.dead()] == [f"{namespace}.t{TABLES_PER_SET}"] * len(rounds)
    if not again:
        return

    table = drive.table(TABLES_PER_SET)
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    drive.batch()
    assert [sorted(drive.arrow(one)["id"].to_pylist()) for one in range(number)] == expected
    assert len(drive.dead()) == 2


def test_a_record_without_a_route_is_a_dead_letter_or_is_left_out(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topics = [kafka.topic(), kafka.topic()]
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"}, route=topics[0])
    drive = driving(Ingest(name=namespace, topics=topics, tables=[table]))
    for topic in topics:
        kafka.send(topic, [_json(id=1), None or _json(id="x")])
    drive.batch()
    assert [row["id"] for row in drive.rows()] == [1]
    assert sorted(
        (row["topic"], row["offset"], row["error"], row["table"]) for row in drive.dead()
    ) == sorted(
        [
            (topics[0], 1, "id is not a valid int.", f"{namespace}.t"),
            (topics[1], 0, f"No table takes the route {topics[1]}", None),
            (topics[1], 1, f"No table takes the route {topics[1]}", None),
        ],
        key=str,
    )
    drive.ingest = replace(drive.ingest, on_unrouted="skip")
    kafka.send(topics[1], [_json(id=1)])
    assert (drive.batch().record_count, len(drive.dead())) == (1, 3)


def test_what_cannot_be_read_is_skipped_by_no_setting(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Its route stands in it, and nobody could say that it was not meant for a table."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"}, route="a")
    ingest = Ingest(name=namespace, topics=[topic], tables=[table], route_by="to", on_unrouted="skip")
    drive = driving(ingest)
    kafka.send(topic, [_json(id=1, to="a"), _json(id=2, to="b"), b'{"id": 3, "to": "a', b"\xff"])
    drive.batch()
    assert [row["id"] for row in drive.rows()] == [1]
    assert [(row["offset"], row["error_kind"]) for row in drive.dead()] == [(2, "syntax"), (3, "encoding")]


def test_times_that_there_are_not_stop_nothing(driving: Driving, kafka: Broker, namespace: str) -> None:
    """A producer sent microseconds as milliseconds: each batch failed in the partition of that day."""
    topic = kafka.topic(message_timestamp_after_max_ms=str((1 << 63) - 1), retention_ms="-1")
    table = IngestTable(
        key=[namespace, "t"],
        columns={"id": "int"},
        attributes={"at": "timestamp"},
        layout=["day(at)"],
    )
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    moment = int(datetime(2026, 9, 1, tzinfo=UTC).timestamp() * 1_000)
    kafka.send(
        topic,
        [
            Message(_json(id=1), at=1_000 * moment),
            Message(b"nonsense", at=1_000 * moment),
            Message(_json(id=2), at=moment),
        ],
    )
    result = drive.batch()
    assert {row["id"]: row["at"] and row["at"].year for row in drive.rows()} == {1: None, 2: 2026}
    assert [row["timestamp"] for row in drive.dead()] == [None]
    assert result.progress.valid_through_ms == moment


def test_every_new_field_of_a_batch_becomes_a_column(driving: Driving, kafka: Broker, namespace: str) -> None:
    """Types are found in the first ten thousand records with a new field, and then in all.

    Of those none had the second one, and the third one without a value.
    """
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], evolve=["add"]))
    last = _json(id=-1, seldom="s", none=None, late=1.5, empty=[])
    kafka.send(topic, [_json(id=n, often=n, late=None) for n in range(10_500)] + [last])
    assert drive.batch().record_count == 10_501
    (row,) = [row for row in drive.rows() if row["id"] == -1]
    assert row == {"id": -1, "often": None, "seldom": "s", "late": 1.5}
    assert drive.dead() == []


def test_fields_that_cannot_be_columns_are_left_out_and_reported(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Each of them has stopped an ingestion for good: the update of the schema, or the next pass, failed."""
    topic = kafka.topic()
    table = IngestTable(
        key=[namespace, "t"],
        columns={"id": "int", "at": "timestamp", "s": "struct<b: int>"},
        layout=["day(at)"],
    )
    other = IngestTable(key=[namespace, "made"])
    ingest = Ingest(name=namespace, topics=[topic], tables=[table, other], evolve=["add"], most_columns=6)
    drive = driving(ingest)
    strange: dict[str, Any] = {
        "ID": 2,
        "at_day": "x",
        "s.b": 1,
        "empty": {"x": None},
        "many": [{}],
        "nothing": [None, {"a": [None]}],
        "in": {"a": 1, "A": 2},
        "new": 1.5,
        "New": 2,
    }
    kafka.send(topic, [_json(id=1, at="2026-01-02T00:00:00Z", **strange)])
    result = drive.batch()
    assert result.dead_letter_count == 0
    assert [field.name for field in drive.table(0).schema().fields] == ["id", "at", "s", "New"]
    assert drive.rows(0)[0]["New"] == 2
    assert [field.name for field in drive.table(1).schema().fields] == ["ID", "New", "at", "at_day", "s.b"]
    assert result.notes == (
        f"3 fields did not become columns of {namespace}.made, because the table has its maximum of columns, or"
        " their names are already used in another case or for another purpose: id, in, new.",
        f"5 fields did not become columns of {namespace}.t, because the table has its maximum of columns, or"
        " their names are already used in another case or for another purpose: ID, at_day, in, new, s.b.",
    )

    # Of names that are ids only so many become columns.
    kafka.send(topic, [_json(**{f"u-{n}": n for n in range(at, at + 40)}) for at in range(0, 400, 40)])
    result = drive.batch()
    assert len(drive.table(0).schema().fields) == 6
    assert len(result.notes) == 2


def test_values_that_nobody_can_write_are_dead_letters(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Spark has them of the column's type. One in a batch failed it, and each one after it."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], attributes={"k": "key"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], evolve=["relax"]))
    schema = Schema(
        NestedField(1, "id", IntegerType(), required=True),
        NestedField(2, "u", UUIDType()),
        NestedField(3, "f", FixedType(2)),
        NestedField(4, "part", DoubleType()),
        NestedField(5, "day", DateType()),
        NestedField(6, "k", StringType()),
        NestedField(7, "price", DecimalType(10, 2)),
        identifier_field_ids=[1],
    )
    spec = PartitionSpec(PartitionField(4, 1000, IdentityTransform(), "part"))
    catalog = drive.lake.catalog("main", properties={NAMESPACE_CREATE: "true"})
    catalog.create_table((namespace, "t"), schema, partition_spec=spec)
    one = uuid.uuid4()
    values = [
        Message(_json(id=1, u=str(one), f="aGk=", part=1.5, day="2026-01-02"), b"key"),
        Message(_json(id=2, u=one.hex.upper())),
        Message(_json(id=3, u="none")),
        Message(_json(id=4, f="aGkh")),
        Message(_json(id=5, part=math.nan)),
        Message(_json(id=6, day="0000-12-31")),
        Message(_json(id=7), b"\xff"),
        Message(_json(u=str(one))),
        Message(_json(id=11, u=f"{one}\u2028")),
        Message(b'{"id":9,"price":1e30000000}'),
        Message(b'{"id":"10","price":1e-30000000}'),
    ]
    kafka.send(topic, values)
    drive.batch()
    first, second, small = drive.rows(0, "id")
    assert (small["id"], small["price"]) == (10, 0)
    assert (first["u"], first["f"], first["part"], first["k"]) == (one, b"hi", 1.5, "key")
    assert (second["u"], second["k"]) == (one, None)
    assert [(row["offset"], row["error_kind"], row["error"]) for row in drive.dead()] == [
        (2, "conversion", "u is not a valid uuid."),
        (3, "conversion", "f is not a valid fixed[2]."),
        (4, "conversion", "part is not a valid number, but its table is partitioned by it."),
        (5, "conversion", "day is not a valid date."),
        (6, "conversion", "The key is not valid text for k."),
        (7, "required", "id is null."),
        (8, "conversion", "u is not a valid uuid."),
        (9, "conversion", "price is not a valid decimal(10,2)."),
    ]


def test_tables_are_made_from_what_the_records_have_and_grow_with_them(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    tables = [
        IngestTable(key=[namespace, "a"], route="a", attributes={"at": "offset"}),
        IngestTable(key=[namespace, "b"], columns={"id": "int"}, route="b"),
    ]
    ingest = Ingest(name=namespace, topics=[topic], tables=tables, route_by="to", evolve=["add"])
    drive = driving(ingest)
    first = {"to": "a", "id": 1, "x": 1.5, "ok": True, "odd name": "n", "in": {"a": 1, "v": None}, "m": [1]}
    kafka.send(topic, [_json(**first), b"[5]", b"nonsense", _json(to="a", id="text", v=None)])
    drive.batch()
    found = {field.name: str(field.field_type) for field in drive.table(0).schema().fields}
    assert found == {
        "to": "string",
        "id": "string",
        "x": "double",
        "ok": "boolean",
        "odd name": "string",
        "in": found["in"],
        "m": "list<long>",
        "at": "long",
    }
    assert [row["id"] for row in drive.rows(0, "at")] == ["1", "text"]
    assert drive.rows(0, "at")[0]["in"] == {"a": 1}

    # New fields come to the tables whose records have them, wherever in the batch they stand.
    more = [_json(to="a", id=n) for n in range(50)]
    kafka.send(topic, [*more, _json(to="a", id=60, late={"n": 1}), _json(to="b", id=3, other=[1.5])])
    result = drive.batch()
    assert result.record_count == 52
    assert len(drive.rows(0)) == 53
    assert [row["late"] for row in drive.rows(0) if row["late"]] == [{"n": 1}]
    assert drive.rows(1) == [{"id": 3, "other": [1.5]}]
    assert "other" not in drive.table(0).schema().column_names
    assert "late" not in drive.table(1).schema().column_names
    assert len(drive.dead()) == 2


def test_a_table_is_widened_and_relaxed_where_that_is_wanted(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    schema = Schema(
        NestedField(1, "id", IntegerType(), required=True),
        NestedField(2, "n", IntegerType()),
        NestedField(3, "r", FloatType()),
        NestedField(4, "price", DecimalType(4, 2)),
        NestedField(5, "must", StringType(), required=True),
        NestedField(6, "other", IntegerType()),
    )
    table = IngestTable(key=[namespace, "t"])
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    catalog = drive.lake.catalog("main", properties={NAMESPACE_CREATE: "true"})
    catalog.create_table((namespace, "t"), schema)
    values = [
        _json(id=1, n=1, r=1.5, price="1.25", must="x"),
        _json(id=2, n=3_000_000_000, must="x"),
        _json(id=3, r=1e300, must="x"),
        _json(id=4, price="123456.25", must="x"),
        _json(id=5),
        _json(id=6, n="no number", must="x"),
        _json(id=7, other=5, must="x"),
    ]
    kafka.send(topic, values)
    drive.batch()
    assert [(row["offset"], row["error_kind"]) for row in drive.dead()] == [
        (1, "conversion"),
        (3, "conversion"),
        (4, "required"),
        (5, "conversion"),
    ]

    drive.ingest = replace(drive.ingest, evolve=["widen", "relax"])
    kafka.send(topic, values)
    drive.batch()
    fields = {field.name: (field.field_type, field.required) for field in drive.table().schema().fields}
    assert fields["n"] == (LongType(), False)
    assert str(fields["r"][0]) == "double"
    assert fields["price"][0] == DecimalType(38, 2)
    assert fields["must"] == (StringType(), False)
    # What nothing asked for stays.
    assert fields["id"] == (IntegerType(), True)
    assert fields["other"][0] == IntegerType()
    rows = drive.rows()
    assert sorted(row["n"] for row in rows if row["n"]) == [1, 1, 3_000_000_000]
    assert sorted(row["price"] for row in rows if row["price"]) == [
        Decimal("1.25"),
        Decimal("1.25"),
        Decimal("123456.25"),
    ]
    assert 1e300 in [row["r"] for row in rows]
    assert [row["id"] for row in rows if row["must"] is None] == [5]
    assert [(row["offset"], row["error"]) for row in drive.dead()[4:]] == [(12, "n is not a valid bigint.")]


def test_fields_are_found_by_the_name_mapping(driving: Driving, kafka: Broker, namespace: str) -> None:
    topic = kafka.topic()
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "site", StringType()))
    table = IngestTable(key=[namespace, "t"], columns={"ignored": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    mapping = [{"field-id": 1, "names": ["id", "orderId"]}, {"field-id": 2, "names": ["Ort", "$si.te"]}]
    properties = {"schema.name-mapping.default": json.dumps(mapping)}
    catalog = drive.lake.catalog("main", properties={NAMESPACE_CREATE: "true"})
    catalog.create_table((namespace, "t"), schema, properties=properties)
    kafka.send(
        topic, [b'{"orderId":"1","$si.te":"x"}', b'{"id":2,"Ort":"y"}', b'{"id":3,"site":"no such name"}']
    )
    drive.batch()
    assert drive.rows(0, "id") == [{"id": 1, "site": "x"}, {"id": 2, "site": "y"}, {"id": 3, "site": None}]


def test_only_committed_records_count_and_compaction_leaves_gaps(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic(cleanup_policy="compact", min_cleanable_dirty_ratio="0.01", segment_ms="100")
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"}, attributes={"at": "offset"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], most_records=4))
    kafka.transaction(topic, [Message(_json(id=1), b"a"), Message(_json(id=2), b"b")], commit=True)
    kafka.transaction(topic, [Message(_json(id=3), b"c"), Message(_json(id=4), b"d")], commit=False)
    kafka.transaction(topic, [Message(_json(id=5), b"e")], commit=True)
    counts = []
    while not drive.look().plan.is_empty:
        counts.append(drive.batch().record_count)
    assert [row["id"] for row in drive.rows(0, "at")] == [1, 2, 5]
    # Markers of transactions take offsets and are no records: a batch may be empty, and is one all the same.
    assert sum(counts) == 3
    assert drive.look().progress.position[drive.topics.describe([topic])[topic].partitions()[0]] == 8


def test_a_topic_that_loses_records_or_is_made_again_stops_and_goes_on_by_the_rules(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], start="latest"))
    kafka.send(topic, [_json(id=0)])
    assert drive.batch().record_count == 0
    kafka.send(topic, [_json(id=n) for n in (1, 2, 3)])
    kafka.delete_before(topic, 0, 3)
    with raising(TopicChanged, 1, 2, reason="records_deleted", subject=f"{topic}[0]"):
        drive.batch()
    drive.ingest = replace(drive.ingest, on_lost="skip", start="earliest")
    assert drive.batch().notes
    assert [row["id"] for row in drive.rows()] == [3]
    kafka.delete(topic)
    kafka.create(topic)
    kafka.send(topic, [_json(id=4)])
    with raising(TopicChanged, reason="recreated", subject=topic):
        drive.batch()
    drive.ingest = replace(drive.ingest, on_recreated="start_over")
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [3, 4]


def test_records_that_are_deleted_while_a_batch_reads_them_give_nothing(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [_json(id=1), _json(id=2)])
    place = drive.place()
    before = drive.look(place.branch)
    kafka.delete_before(topic, 0, 1)
    with raising(RecordsDeleted, subject=topic):
        ingest_batch(before, place, drive.records, tasks=2)
    drive.batch()
    rows = drive.lake.catalog().load_table((namespace, "t")).scan().to_arrow()
    assert rows["id"].to_pylist() == [2]


def test_a_topic_that_is_made_again_while_a_batch_reads_it_gives_nothing(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Spark's source knows a topic by its name: it reads the new one as the one that was planned."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], on_recreated="start_over"))
    kafka.send(topic, [_json(id=1)])
    place = drive.place()
    before = drive.look(place.branch)
    kafka.delete(topic)
    kafka.create(topic)
    kafka.send(topic, [_json(id=2)])
    with raising(TopicReplaced, subject=topic):
        ingest_batch(before, place, drive.records, tasks=2)
    drive.batch()
    kafka.send(topic, [_json(id=3)])
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [2, 3]


def test_what_an_earlier_attempt_sends_late_is_not_built_on(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Its commit arrives after the next attempt of the step has looked, and before that one commits."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [_json(id=1)])
    drive.batch()
    kafka.send(topic, [_json(id=2)])
    place = drive.place()
    before = drive.look(place.branch)
    ingest_batch(drive.look(place.branch), place, drive.records, tasks=2)
    with pytest.raises(EarlierAttemptLate) as caught:
        ingest_batch(before, place, drive.records, tasks=2)
    assert caught.value.branch == place.branch
    held = drive.lake.catalog(place.branch).load_table((namespace, "t")).scan().to_arrow()
    assert sorted(held["id"].to_pylist()) == [1, 2]


def test_a_table_that_is_rolled_back_is_filled_again_alone(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    tables = [
        IngestTable(key=[namespace, name], columns={"id": "int"}, mode=mode, keys=["id"], route=route)
        for name, mode, route in (("a", "append", None), ("b", "append", None), ("c", "upsert", None))
    ]
    ingest = Ingest(name=namespace, topics=[topic], tables=tables, most_records=4)
    drive = driving(ingest)
    for start in (0, 4):
        kafka.send(topic, [*(_json(id=n) for n in range(start, start + 3)), b"bad"])
        drive.batch()
    for number in (0, 2, -1):  # the dead letters too
        table = drive.table(number)
        first = table.metadata.snapshots[0].snapshot_id
        table.manage_snapshots().rollback_to_snapshot(first).commit()
    kafka.send(topic, [_json(id=8), b"bad"])
    with raising(PositionLost, namespace, reason="rolled_back"):
        drive.look()
    drive.ingest = replace(ingest, on_rollback="replay", most_records=100)
    while not drive.look().plan.is_empty:
        drive.batch()
    for number in range(3):
        assert [row["id"] for row in drive.rows(number, "id")] == [0, 1, 2, 4, 5, 6, 8]
    # Of a record that is read again there is a dead letter already.
    assert [row["offset"] for row in drive.dead()] == [n for n in (3, 7, 9) for _ in tables]
