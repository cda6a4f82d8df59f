"""Records that stopped an ingestion for good: each becomes a row or a dead letter, and its neighbors are written."""

from __future__ import annotations

import json
import math
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, LongType, MapType, NestedField, StringType, StructType

from branchlake_dagster.catalog.options import NAMESPACE_CREATE
from branchlake_dagster.ingest.binary_formats import Avro
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker, Message


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


HOSTILE_FIELDS: dict[str, str] = {
    "empty": '"": 2',
    "empty-in-struct": '"inside": {"": 2}',
    "empty-in-list": '"inside_list": [{"": 2}]',
    "empty-both": '"": {"": 2}',
    "40-levels": f'"deep": {_nested(40)}',
    "90-levels": f'"deeper": {_nested(90)}',
    "990-levels": f'"deepest": {_nested(990)}',
}
"""Fields of JSON objects, as text: Python's own encoder ends at a thousand levels."""
ALONE = [pytest.param([one], id=name, marks=pytest.mark.soak) for name, one in HOSTILE_FIELDS.items()]


@pytest.mark.parametrize("hostile", [pytest.param([*HOSTILE_FIELDS.values()], id="together"), *ALONE])
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "found"])
def test_a_field_that_cannot_be_a_column_stops_no_batch(
    driving: Driving, kafka: Broker, namespace: str, hostile: list[str], declared: bool
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "bigint"} if declared else {})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], evolve=["add"]))
    between = [f'{{"id": {2 + place}, {fields}}}'.encode() for place, fields in enumerate(hostile)]
    last = 2 + len(hostile)
    kafka.send(topic, [_json(id=1), *between, _json(id=last, more="x")])
    drive.batch()
    expected = [(number, "x" if number == last else None) for number in range(1, last + 1)]
    assert [(row["id"], row["more"]) for row in drive.rows(0, "id")] == expected
    assert drive.dead() == []
    kafka.send(topic, [_json(id=last + 1)])
    drive.batch()
    assert len(drive.rows()) == last + 1


def test_a_record_time_that_spark_cannot_hold_stops_no_batch(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic(message_timestamp_after_max_ms=str((1 << 63) - 1), retention_ms="-1")
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    nanoseconds = 1_767_323_045_000_000_000
    kafka.send(topic, [_json(id=1), Message(_json(id=2), b"k", [("h", b"v")], at=nanoseconds), _json(id=3)])
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 3]
    (letter,) = drive.dead()
    assert (letter["error_kind"], letter["offset"], letter["value"]) == ("unwritable", 1, _json(id=2))


def test_a_route_that_ends_in_a_line_break_is_another_route(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    tables = [
        IngestTable(key=[namespace, "a"], columns={"id": "int"}, route="a.*"),
        IngestTable(key=[namespace, "of_{route}"], columns={"id": "int"}, route="shop-(.*)"),
        IngestTable(key=[namespace, "to_{route}"], columns={"id": "int"}, route="to-.*"),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables, route_by="to"))
    routes = ["a", "a\n", "shop-eu", "shop-eu\n", "to-x", "to-x\n", "to-x\r\n", "\n"]
    kafka.send(topic, [_json(id=number, to=route) for number, route in enumerate(routes)])
    drive.batch()
    assert [letter["offset"] for letter in drive.dead()] == [1, 3, 5, 6, 7]
    assert {letter["error_kind"] for letter in drive.dead()} == {"route"}


@pytest.mark.parametrize(
    "items",
    [
        "null",
        pytest.param("string", marks=pytest.mark.soak),
        pytest.param({"type": "record", "name": "Empty", "fields": []}, id="record", marks=pytest.mark.soak),
    ],
)
def test_avro_that_claims_two_billion_items_is_a_dead_letter(
    driving: Driving, kafka: Broker, namespace: str, items: Any
) -> None:
    """Of items without bytes no end of the value is met; the array for them exhausted Spark's heap."""
    schema = {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "lines", "type": {"type": "array", "items": items}},
            {"name": "note", "type": "string"},
        ],
    }
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "bigint"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], format=Avro(json.dumps(schema))))
    claim = _avro_long(2_000_000_000)
    good = _avro_long(1) + b"\x00" + _avro_long(1) + b"x"
    kafka.send(topic, [good, _avro_long(2) + claim, _avro_long(3) + b"\x00" + claim, good])
    drive.batch()
    assert [row["id"] for row in drive.rows()] == [1, 1]
    assert [(letter["offset"], letter["error_kind"]) for letter in drive.dead()] == [
        (1, "format"),
        (2, "format"),
    ]


def test_values_inside_a_column_that_nobody_can_read_are_dead_letters(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Such a row made its whole table unreadable for Python: a day of the year 5,881,580, or broken text."""
    inner = {
        "type": "record",
        "name": "Inner",
        "fields": [
            {"name": "label", "type": "string"},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        ],
    }
    days = {"type": "array", "items": {"type": "int", "logicalType": "date"}}
    schema = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "of", "type": inner}, {"name": "days", "type": days}],
    }
    columns = {"of": "struct<label: string, at: timestamp>", "days": "array<date>"}
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns=columns, attributes={"at_offset": "offset"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], format=Avro(json.dumps(schema))))

    def encode(label: bytes = b"x", at: int = 0, day: int = 0) -> bytes:
        text = _avro_long(len(label)) + label
        return text + _avro_long(at) + _avro_long(1) + _avro_long(day) + _avro_long(0)

    kafka.send(topic, [encode(), encode(b"\xff"), encode(at=1 << 60), encode(day=(1 << 31) - 1), encode()])
    drive.batch()
    assert [row["at_offset"] for row in drive.rows(0, "at_offset")] == [0, 4]
    assert [(letter["offset"], letter["error_kind"]) for letter in drive.dead()] == [
        (1, "conversion"),
        (2, "conversion"),
        (3, "conversion"),
    ]


def test_avro_that_would_lose_a_part_in_its_column_is_a_dead_letter(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    fields = [
        {"name": "id", "type": "double"},
        {"name": "at", "type": "string"},
        {"name": "day", "type": "string"},
    ]
    schema = {"type": "record", "name": "Order", "fields": fields}
    columns = {"id": "bigint", "at": "timestamp", "day": "date"}
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns=columns)
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], format=Avro(json.dumps(schema))))

    def encode(number: float, at: str = "2026-01-02T03:04:05Z", day: str = "2026-01-02") -> bytes:
        texts = (_avro_long(len(text)) + text.encode() for text in (at, day))
        return struct.pack("<d", number) + b"".join(texts)

    bad = [
        encode(1.5),
        encode(math.nan),
        encode(1e300),
        encode(2, at="03:04:05"),
        encode(2, day="2026-01-02T?"),
    ]
    kafka.send(topic, [encode(4.0), *bad, encode(-5.0)])
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [-5, 4]
    assert [letter["offset"] for letter in drive.dead()] == [1, 2, 3, 4, 5]
    assert {letter["error_kind"] for letter in drive.dead()} == {"conversion"}


def test_values_inside_an_avro_column_are_cast_one_by_one(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Parts that do not fit became null, fields went to others by position, and a new field failed the batch."""
    inner_fields = [
        {"name": "b", "type": "long"},
        {"name": "a", "type": "double"},
        {"name": "new", "type": "int"},
    ]
    inner = {"type": "record", "name": "Inner", "fields": inner_fields}
    fields = [
        {"name": "id", "type": "long"},
        {"name": "of", "type": ["null", inner]},
        {"name": "times", "type": {"type": "array", "items": "string"}},
        {"name": "by", "type": {"type": "map", "values": "string"}},
        {"name": "other", "type": ["null", "string"]},
    ]
    columns = {
        "id": "bigint",
        "of": "struct<a: int, b: int, c: string>",
        "times": "array<timestamp>",
        "by": "map<string,decimal(5,2)>",
        "other": "struct<a: int>",
    }
    schema = {"type": "record", "name": "Order", "fields": fields}
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns=columns)
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], format=Avro(json.dumps(schema))))

    def text(value: str) -> bytes:
        return _avro_long(len(value)) + value.encode()

    def encode(number: int, *, b: int = 7, a: float = 8.0, at: str = "", by: str = "") -> bytes:
        of = _avro_long(1) + _avro_long(b) + struct.pack("<d", a) + _avro_long(9)
        times = _avro_long(1) + text(at) if at else b""
        prices = _avro_long(1) + text("k") + text(by) if by else b""
        return _avro_long(number) + of + times + b"\x00" + prices + b"\x00\x00"

    without = _avro_long(6) + b"\x00" * 4
    bad = [
        encode(1, b=3_000_000_000),
        encode(2, a=8.5),
        encode(3, at="03:04:05"),
        encode(4, by="1e-99999999"),
        without[:-1] + _avro_long(1) + text("not a struct"),
    ]
    kafka.send(topic, [encode(0), *bad, encode(5, at="2026-01-02T03:04:05Z", by="9.90"), without])
    drive.batch()
    of = {"a": 8, "b": 7, "c": None}
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert [(row["id"], row["of"], row["times"], row["by"]) for row in drive.rows(0, "id")] == [
        (0, of, [], []),
        (5, of, [at], [("k", Decimal("9.90"))]),
        (6, None, [], []),
    ]
    assert [(letter["offset"], letter["error_kind"]) for letter in drive.dead()] == [
        (offset, "conversion") for offset in range(1, 6)
    ]


def test_avro_decimals_with_too_many_digits_are_dead_letters(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Spark took the last 64 bits of such a decimal, so 184467440737095516.21 became 0.05."""
    short = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    fixed = {"type": "fixed", "name": "F", "size": 9, "logicalType": "decimal", "precision": 18, "scale": 0}
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "a", "type": fixed}]}
    fields = [
        {"name": "price", "type": ["null", short]},
        {"name": "of", "type": {"type": "array", "items": inner}},
    ]
    schema = {"type": "record", "name": "Order", "fields": fields}
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], attributes={"at_offset": "offset"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], format=Avro(json.dumps(schema))))

    def encode(price: int | None, count: int = 1) -> bytes:
        digits = b"" if price is None else price.to_bytes(9, "big", signed=True)
        text = _avro_long(0) if price is None else _avro_long(1) + _avro_long(9) + digits
        return text + _avro_long(1) + count.to_bytes(9, "big", signed=True) + _avro_long(0)

    too_long = (1 << 64) + 5
    kafka.send(topic, [encode(5), encode(too_long), encode(-5, too_long), encode(10**10), encode(None, -7)])
    drive.batch()
    assert str(drive.table().schema().find_type("price")) == "decimal(10, 2)"
    assert [(row["at_offset"], row["price"], row["of"]) for row in drive.rows(0, "at_offset")] == [
        (0, Decimal("0.05"), [{"a": Decimal(1)}]),
        (4, None, [{"a": Decimal(-7)}]),
    ]
    assert [(letter["offset"], letter["error_kind"]) for letter in drive.dead()] == [
        (offset, "format") for offset in (1, 2, 3)
    ]


def test_a_null_inside_a_column_that_needs_a_value_is_a_dead_letter(
    driving: Driving, kafka: Broker, lakehouse: Lakehouse, namespace: str
) -> None:
    """Each such record divided its batch, and its reason said nothing."""
    part = StructType(NestedField(10, "a", LongType(), required=True), NestedField(11, "b", LongType()))
    schema = Schema(
        NestedField(1, "id", LongType()),
        NestedField(2, "of", part),
        NestedField(3, "list", ListType(12, LongType(), element_required=True)),
        NestedField(4, "map", MapType(13, StringType(), 14, part, value_required=True)),
    )
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"])
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    lakehouse.catalog("main", properties={NAMESPACE_CREATE: "true"}).create_table((namespace, "t"), schema)
    good, bad = {"a": 1, "b": None}, {"a": None, "b": 1}
    kafka.send(
        topic,
        [
            _json(id=0, of=good),
            _json(id=1, of=bad),
            _json(id=2, of=good, list=[1], map={"k": good}),
            _json(id=3, list=[1, None]),
            _json(id=4, map={"k": None}),
            _json(id=5, map={"k": bad}),
            _json(id=6, of={"b": 2}),
            _json(id=7),
        ],
    )
    drive.batch()
    rows = drive.rows(0, "id")
    assert [row["id"] for row in rows] == [0, 2, 7]
    assert rows[2] == {"id": 7, "of": None, "list": None, "map": None}
    assert [(letter["offset"], letter["error_kind"]) for letter in drive.dead()] == [
        (offset, "conversion") for offset in (1, 3, 4, 5, 6)
    ]

    # A deletion needs only its keys.
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "changes"], mode="changes", keys=["id"])
    ingest = Ingest(name=f"{namespace}_c", topics=[topic], tables=[table], envelope="debezium")
    drive = driving(ingest)
    lakehouse.catalog("main").create_table((namespace, "changes"), schema)
    kafka.send(
        topic,
        [
            *(_json(op="c", after={"id": number, "of": good}) for number in (1, 2)),
            _json(op="c", after={"id": 3, "of": bad}),
            _json(op="d", before={"id": 1, "of": {"a": None}, "list": [None]}),
        ],
    )
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [2]
    assert [(letter["offset"], letter["error_kind"]) for letter in drive.dead()] == [(2, "conversion")]


def _avro_long(number: int) -> bytes:
    rest, encoded = (number << 1) ^ (number >> 63), b""
    while rest > 127:
        encoded, rest = encoded + bytes([rest & 127 | 128]), rest >> 7
    return encoded + bytes([rest])
