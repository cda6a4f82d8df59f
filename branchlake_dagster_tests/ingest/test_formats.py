"""Avro, plain and with a registry, Protobuf, and a format of one's own."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.binary_formats import Avro, RegistryAvro, protobuf, with_long_decimals
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.decoder_results import check_decoded
from branchlake_dagster.ingest.errors import KafkaUnavailable
from branchlake_dagster.ingest.formats import Decoded, decode_values
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.raised import raising

FIRST = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "site", "type": ["null", "string"], "default": None}],
}
SECOND = {
    "type": "record",
    "name": "Order",
    "fields": [*FIRST["fields"], {"name": "amount", "type": "double"}],
}


def _long(number: int) -> bytes:
    """Avro's variable-length whole number."""
    rest, found = (number << 1) ^ (number >> 63), b""
    while rest > 127:
        found, rest = found + bytes([rest & 127 | 128]), rest >> 7
    return found + bytes([rest])


def _order(number: int, site: str | None = None, amount: float | None = None) -> bytes:
    told = b"\x00" if site is None else b"\x02" + _long(len(site.encode())) + site.encode()
    return _long(number) + told + (b"" if amount is None else struct.pack("<d", amount))


def _framed(schema: int, value: bytes) -> bytes:
    return b"\x00" + schema.to_bytes(4, "big") + value


@contextmanager
def registry(subject: str, versions: dict[int, tuple[int, Any]], status: list[int]) -> Iterator[str]:
    """A schema registry on loopback: `versions` to ids and schemas; with `status` it answers that instead."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            base = f"/subjects/{subject}/versions"
            told: Any = None
            if self.path == base:
                told = sorted(versions)
            elif self.path.startswith(base):
                number, schema = versions[int(self.path.rsplit("/", 1)[1])]
                told = {"subject": subject, "id": number, "schema": json.dumps(schema)}
            code = status[0] if status else 404 if told is None else 200
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_avro_plain_and_with_a_registry(driving: Driving, kafka: Broker, namespace: str) -> None:
    plain, framed = kafka.topic(), kafka.topic()
    made = IngestTable(key=[namespace, "plain"], attributes={"at": "offset"})
    drive = driving(
        Ingest(name=f"{namespace}_p", topics=[plain], tables=[made], format=Avro(json.dumps(FIRST)))
    )
    kafka.send(plain, [_order(1, "ü"), _order(-(1 << 62)), b"\x02", b"", _order(3, "x")])
    drive.batch()
    # The table was made by the schema.
    assert str(drive.table().schema().find_type("id")) == "long"
    assert [(row["at"], row["id"], row["site"]) for row in drive.rows(0, "at")] == [
        (0, 1, "ü"),
        (1, -(1 << 62), None),
        (4, 3, "x"),
    ]
    assert [(row["offset"], row["error_kind"], row["value"]) for row in drive.dead()] == [
        (2, "format", b"\x02"),
        (3, "format", b""),
    ]
    # Spark does not cast bytes to numbers.
    with_bytes = {**FIRST, "fields": [{"name": "id", "type": "bytes"}]}
    drive.ingest = replace(drive.ingest, format=Avro(json.dumps(with_bytes)))
    kafka.send(plain, [b"\x02a"])
    with raising(
        ConfigurationError,
        "bigint",
        "binary",
        table=f"{namespace}.plain",
        reason="cast_unsupported",
        subject="id",
    ):
        drive.batch(publish=False)

    status: list[int] = []
    versions: dict[int, tuple[int, Any]] = {1: (7, FIRST)}
    with registry(f"{framed}-value", versions, status) as url:
        columns = {"id": "int", "site": "string", "amount": "decimal(10,2)"}
        table = IngestTable(key=[namespace, "t"], columns=columns, route="a|b", attributes={"at": "offset"})
        reading = RegistryAvro(url, f"{framed}-value")
        ingest = Ingest(name=namespace, topics=[framed], tables=[table], format=reading, route_by="site")
        drive = driving(ingest)
        kafka.send(framed, [_framed(7, _order(1, "a")), _framed(8, _order(2, "b", 1.255))])
        drive.batch()
        assert [(row["offset"], row["error_kind"], row["error"]) for row in drive.dead()] == [
            (1, "schema", "The registry's subject has no schema 8")
        ]
        versions[2] = (8, SECOND)
        kafka.send(
            framed,
            [
                _framed(8, _order(2, "b", 1.25)),
                _framed(7, _order(3, "a")),
                _framed(7, _order(1 << 40, "a")),
                _framed(9, _order(4, "a")),
                _order(5, "a"),
                b"\x00",
                _framed(8, b"\x02"),
                _framed(8, _order(6, "elsewhere", 1.0)),
            ],
        )
        drive.batch()
        assert [(row["id"], row["site"], str(row["amount"])) for row in drive.rows(0, "at")] == [
            (1, "a", "None"),
            (2, "b", "1.25"),
            (3, "a", "None"),
        ]
        assert [(row["offset"], row["error_kind"]) for row in drive.dead()[1:]] == [
            (4, "conversion"),
            (5, "schema"),
            (6, "format"),
            (7, "format"),
            (8, "format"),
            (9, "route"),
        ]
        # Versions that no record of the table can have: their records alone are dead letters.
        inner = {"type": "record", "name": "Inner", "fields": FIRST["fields"]}
        versions[3] = (10, {"type": "record", "name": "Order", "fields": [{"name": "id", "type": inner}]})
        versions[4] = (11, "string")
        # Versions that Spark cannot read, or does not cast to the columns.
        link = {"name": "next", "type": ["null", "Order"]}
        same_names = [{"name": "id", "type": "long"}, {"name": "ID", "type": "long"}]
        bytes_as_id = [{"name": "id", "type": "bytes"}, FIRST["fields"][1]]
        versions[5] = (12, {**FIRST, "fields": [*FIRST["fields"], link]})
        versions[6] = (13, {**FIRST, "fields": same_names})
        versions[7] = (14, {**FIRST, "fields": bytes_as_id})
        records = [_framed(10, _order(1)), _framed(11, _long(0)), _framed(7, _order(4, "a"))]
        records += [
            _framed(12, _order(1) + b"\x00"),
            _framed(13, _long(1) * 2),
            _framed(14, b"\x02x\x02\x02a"),
        ]
        kafka.send(framed, records)
        drive.batch()
        assert [row["id"] for row in drive.rows(0, "at")] == [1, 2, 3, 4]
        assert [(row["offset"], row["error_kind"]) for row in drive.dead()[7:]] == [
            (10, "route"),
            (11, "schema"),
            (13, "schema"),
            (14, "schema"),
            (15, "conversion"),
        ]
        status.append(503)
        kafka.send(framed, [_framed(7, _order(9, "a"))])
        with raising(KafkaUnavailable, 503, reason="registry_status"):
            drive.batch(publish=False)
    with raising(KafkaUnavailable, reason="registry_away"):
        drive.batch(publish=False)


def _descriptors() -> bytes:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    line = file.message_type.add(name="Line")
    line.field.add(name="sku", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    order = file.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    order.field.add(name="price", number=2, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    order.field.add(name="raw", number=3, type=field.TYPE_BYTES, label=field.LABEL_OPTIONAL)
    order.field.add(
        name="lines", number=4, type=field.TYPE_MESSAGE, type_name=".shop.Line", label=field.LABEL_REPEATED
    )
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


def test_a_length_that_overflows_fails_its_own_value_alone() -> None:
    """The native code panics, which is no Exception in Python: it failed the batch, for each such record."""
    reading = protobuf(_descriptors(), "shop.Order")
    assert isinstance(reading.schema, pa.Schema)
    kind = pa.struct(list(reading.schema))
    overflowing = b"\x1a" + b"\xff" * 9 + b"\x01"
    values = pa.array([b"\x08\x01", overflowing, b"\x08\x02"], pa.binary())
    rows, reasons = decode_values(reading.decode, values, kind)
    assert [row and row["id"] for row in rows.to_pylist()] == [1, None, 2]
    assert [reason is not None for reason in reasons.to_pylist()] == [False, True, False]


def test_a_function_that_fails_for_no_values_fails_no_batch() -> None:
    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        raise ValueError(f"{len(values)} values")

    kind = pa.struct([pa.field("id", pa.int64())])
    rows, reasons = decode_values(decode, pa.array([], pa.binary()), kind)
    assert (rows.type, len(rows), len(reasons)) == (kind, 0, 0)


def _decode_order(value: bytes) -> dict[str, Any]:
    return {"id": len(value), "site": "x"}


_ORDERS = pa.struct([("id", pa.int64()), ("site", pa.string())])


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [ValueError("\udc80"), _UnprintableError(), SystemExit(2)], ids=["surrogate", "no-text", "exit"]
)
def test_an_error_without_a_message_fails_its_own_value_alone(error: BaseException) -> None:
    """Its message could not be written, or it was no Exception, so it failed the batch instead of its value."""

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        if b"bad" in values.to_pylist():
            raise error
        return pa.array(map(_decode_order, values.to_pylist()), _ORDERS), pa.nulls(len(values), pa.string())

    rows, reasons = decode_values(decode, pa.array([b"a", b"bad", b"ccc"], pa.binary()), _ORDERS)
    assert [row and row["id"] for row in rows.to_pylist()] == [1, None, 3]
    assert [type(error).__name__ in (reason or "") for reason in reasons.to_pylist()] == [False, True, False]


def test_a_decoder_that_gives_neither_a_row_nor_a_reason_gives_a_dead_letter() -> None:
    """Such a value became a row of nulls. A record without a value has its reason elsewhere."""

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        rows = [None if value in (None, b"bad") else _decode_order(value) for value in values.to_pylist()]
        return pa.array(rows, _ORDERS), pa.nulls(len(rows), pa.string())

    rows, reasons = decode_values(decode, pa.array([b"a", b"bad", None], pa.binary()), _ORDERS)
    assert [row and row["id"] for row in rows.to_pylist()] == [1, None, None]
    assert [reason is not None for reason in reasons.to_pylist()] == [False, True, False]


def test_rows_without_any_field_of_the_schema_are_not_rows_of_nulls() -> None:
    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        rows = [{"name": "x"} if value == b"bad" else _decode_order(value) for value in values.to_pylist()]
        return pa.array(rows), pa.nulls(len(rows), pa.string())

    rows, reasons = decode_values(decode, pa.array([b"bad"], pa.binary()), _ORDERS)
    assert (rows.to_pylist(), [reason is not None for reason in reasons.to_pylist()]) == ([None], [True])
    rows, reasons = decode_values(decode, pa.array([b"a"], pa.binary()), _ORDERS)
    assert (rows.to_pylist(), reasons.to_pylist()) == ([{"id": 1, "site": "x"}], [None])


def test_a_null_in_a_field_without_nulls_fails_its_own_value_alone() -> None:
    """Spark trusts the schema: it read the null as zero."""
    line = pa.struct([pa.field("sku", pa.string(), nullable=False)])
    lines = pa.field("lines", pa.list_(line))
    kind = pa.struct([pa.field("id", pa.int64(), nullable=False), lines])

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        ids = [None if value == b"bad" else len(value) for value in values.to_pylist()]
        skus = pa.array([None if value == b"worse" else "s" for value in values.to_pylist()])
        line_rows = pa.StructArray.from_arrays([skus], fields=list(line))
        line_lists = pa.ListArray.from_arrays(list(range(len(values) + 1)), line_rows).cast(lines.type)
        rows = pa.StructArray.from_arrays([pa.array(ids, pa.int64()), line_lists], fields=list(kind))
        return rows, pa.nulls(len(values), pa.string())

    rows, reasons = decode_values(decode, pa.array([b"a", b"bad", b"worse", b"dd"], pa.binary()), kind)
    assert [row and row["id"] for row in rows.to_pylist()] == [1, None, None, 2]
    assert [reason is not None for reason in reasons.to_pylist()] == [False, True, True, False]


@pytest.mark.parametrize(
    "kind",
    [
        pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)),
        pa.list_(pa.field("element", pa.int64(), nullable=False)),
        pa.large_list(pa.field("element", pa.int64(), nullable=False)),
        pa.list_(pa.field("element", pa.int64(), nullable=False), 1),
    ],
)
def test_only_the_values_of_a_slice_are_looked_at_for_nulls(kind: pa.DataType) -> None:
    """A decoder that returned part of an array lost valid records, and two kinds of lists had no check."""
    values = pa.array([None, 1, 2], pa.int64())
    if pa.types.is_map(kind):
        parts = pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["a", "b", "c"]), values, type=kind)
    elif pa.types.is_fixed_size_list(kind):
        parts = pa.FixedSizeListArray.from_arrays(values, type=kind)
    else:
        arrays = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        parts = arrays.from_arrays([0, 1, 2, 3], values, type=kind)
    row_type = pa.struct([("parts", kind)])
    rows = pa.StructArray.from_arrays([parts], fields=list(row_type))
    reasons = pa.nulls(3, pa.string())
    decoded, _ = check_decoded(rows[1:], reasons[1:], pa.array([b"", b""], pa.binary()), row_type)
    assert len(decoded) == 2
    with pytest.raises(ValueError):  # noqa: PT011 - the error has no code
        check_decoded(rows, reasons, pa.array([b"", b"", b""], pa.binary()), row_type)


def test_results_in_chunks_are_results() -> None:
    def decode(values: pa.BinaryArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        parts = [pa.array([_decode_order(value)], _ORDERS) for value in values.to_pylist()]
        return pa.chunked_array(parts, _ORDERS), pa.chunked_array([pa.nulls(len(values), pa.string())])

    rows, reasons = decode_values(decode, pa.array([b"a", b"bb"], pa.binary()), _ORDERS)  # type: ignore[arg-type]
    assert (type(rows), type(reasons)) == (pa.StructArray, pa.StringArray)
    assert [row["id"] for row in rows.to_pylist()] == [1, 2]


def test_a_reason_that_is_not_utf8_is_replaced() -> None:
    """It was written to the dead letters, whose text nobody could read any more."""

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        return pa.nulls(len(values), _ORDERS), pa.array([b"\xff"] * len(values), pa.binary()).view(
            pa.string()
        )

    _, reasons = decode_values(decode, pa.array([b"a", b"b"], pa.binary()), _ORDERS)
    assert all(reasons.to_pylist())


def test_a_protobuf_time_keeps_its_year() -> None:
    """In nanoseconds every time after 2262 was the last one that nanoseconds can hold."""
    file = descriptor_pb2.FileDescriptorProto(name="times.proto", package="shop", syntax="proto3")
    file.dependency.append(timestamp_pb2.DESCRIPTOR.name)
    field = descriptor_pb2.FieldDescriptorProto
    file.message_type.add(name="Tick").field.add(
        name="at",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".google.protobuf.Timestamp",
        label=field.LABEL_OPTIONAL,
    )
    times = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(times)
    reading = protobuf(descriptor_pb2.FileDescriptorSet(file=[times, file]).SerializeToString(), "shop.Tick")
    first_of_3000 = datetime(3000, 1, 1, tzinfo=UTC)
    encoded = timestamp_pb2.Timestamp(seconds=int(first_of_3000.timestamp())).SerializeToString()
    values = pa.array([b"\x0a" + bytes([len(encoded)]) + encoded], pa.binary())
    rows, _ = decode_values(reading.decode, values, pa.struct(list(reading.schema)))
    assert rows.to_pylist() == [{"at": first_of_3000}]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ({"type": "bytes", "logicalType": "decimal", "precision": 10}, 38),
        ({"type": "bytes", "logicalType": "decimal", "precision": 19}, 19),
        ({"type": "fixed", "name": "f", "size": 9, "logicalType": "decimal", "precision": 4}, 21),
        ({"type": "fixed", "name": "f", "size": 8, "logicalType": "decimal", "precision": 4}, 4),
        ({"type": "bytes", "logicalType": "decimal"}, None),
    ],
)
def test_decimals_are_read_with_all_their_bytes(kind: dict[str, Any], precision: int | None) -> None:
    """Where Spark reads 64 bits of a decimal, a value of nine bytes became another number."""
    schema = {"type": "record", "name": "R", "fields": [{"name": "d", "type": ["null", kind]}]}
    long_schema = json.loads(with_long_decimals(json.dumps(schema)))
    _, long_kind = long_schema["fields"][0]["type"]
    assert long_kind == (kind if precision is None else {**kind, "precision": precision})


def test_protobuf_and_functions_of_batches(driving: Driving, kafka: Broker, namespace: str) -> None:
    topic, own = kafka.topic(), kafka.topic()
    descriptors = _descriptors()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    with raising(ConfigurationError, reason="unknown_message", subject="shop.Nothing"):
        protobuf(descriptors, "shop.Nothing")
    table = IngestTable(key=[namespace, "orders"], attributes={"at": "offset"})
    reading = protobuf(descriptors, "shop.Order")
    drive = driving(Ingest(name=f"{namespace}_p", topics=[topic], tables=[table], format=reading))
    values = [
        order(id=n, price=n / 2, raw=b"\xff", lines=[{"sku": f"s{n}"}]).SerializeToString()
        for n in range(1, 40)
    ]
    broken = {5: b"\x08", 6: b"\xff\xff\xff", 17: b"no message at all"}
    for place, value in broken.items():
        values[place] = value
    kafka.send(topic, values)
    drive.batch()
    rows = {row["at"]: row for row in drive.rows()}
    assert {n: (row["id"], row["price"], row["raw"], row["lines"]) for n, row in rows.items()} == {
        n: (n + 1, (n + 1) / 2, b"\xff", [{"sku": f"s{n + 1}"}]) for n in range(39) if n not in broken
    }
    assert {row["offset"]: row["value"] for row in drive.dead()} == broken

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        whole = [value is not None and len(value.as_py() or b"") == 6 for value in values]
        read = [
            struct.unpack("<Ih", value.as_py()) if ok else None
            for value, ok in zip(values, whole, strict=True)
        ]
        rows = [
            None if one is None else {"tick": one[0], "level": one[1], "at": one[1] * 200_000_000_000_000_000}
            for one in read
        ]
        kind = pa.struct([("tick", pa.int64()), ("level", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
        return pa.array(rows, kind), pa.array(
            [None if ok else "It has not 6 bytes." for ok in whole], pa.string()
        )

    schema = pa.schema([("tick", pa.int64()), ("level", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
    columns = {"tick": "bigint", "level": "int", "at": "timestamp"}
    frames = IngestTable(key=[namespace, "frames"], columns=columns, required=["tick"])
    drive = driving(Ingest(name=namespace, topics=[own], tables=[frames], format=Decoded(decode, schema)))
    values = [
        struct.pack("<Ih", 4_000_000_000, 0),
        b"short",
        struct.pack("<Ih", 1, 1),
        struct.pack("<Ih", 2, 2),
    ]
    kafka.send(own, [*values, struct.pack("<Ih", 3, -1)])
    drive.batch()
    assert [(row["tick"], row["level"], row["at"].year) for row in drive.rows(0, "tick")] == [
        (1, 1, 8307),
        (4_000_000_000, 0, 1970),
    ]
    # A time of the year 14645, and one before the first, which Spark has and nobody writes.
    assert [(row["offset"], row["error"]) for row in drive.dead()] == [
        (1, "It has not 6 bytes."),
        (3, "at is not a valid timestamp."),
        (4, "at is not a valid timestamp."),
    ]


def test_tables_get_the_new_fields_of_a_schema(driving: Driving, kafka: Broker, namespace: str) -> None:
    """And those of a row in Debezium's envelope: `evolve=["add"]` did nothing for either, without a word."""
    avro, own, envelopes = kafka.topic(), kafka.topic(), kafka.topic()
    old = IngestTable(key=[namespace, "avro"], columns={"id": "bigint"})
    drive = driving(
        Ingest(
            name=f"{namespace}_a",
            topics=[avro],
            tables=[old],
            format=Avro(json.dumps(SECOND)),
            evolve=["add"],
        )
    )
    kafka.send(avro, [_order(1, "a", 1.5)])
    drive.batch()
    assert drive.rows() == [{"id": 1, "site": "a", "amount": 1.5}]

    schema = pa.schema([("id", pa.int64()), ("more", pa.string())])

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        rows = [{"id": len(one.as_py()), "more": one.as_py().decode()} for one in values]
        return pa.array(rows, pa.struct(list(schema))), pa.nulls(len(rows), pa.string())

    decoded = IngestTable(key=[namespace, "decoded"], columns={"id": "bigint"})
    drive = driving(
        Ingest(
            name=f"{namespace}_d",
            topics=[own],
            tables=[decoded],
            format=Decoded(decode, schema),
            evolve=["add"],
        )
    )
    # One value that the function raises for: it alone is a dead letter.
    kafka.send(own, [b"abc", b"\xff", b"de"])
    drive.batch()
    assert drive.rows(0, "id") == [{"id": 2, "more": "de"}, {"id": 3, "more": "abc"}]
    assert [(one["offset"], one["error_kind"]) for one in drive.dead()] == [(1, "format")]

    changes = IngestTable(key=[namespace, "changes"], columns={"id": "bigint"}, mode="changes", keys=["id"])
    ingest = Ingest(
        name=f"{namespace}_e", topics=[envelopes], tables=[changes], envelope="debezium", evolve=["add"]
    )
    drive = driving(ingest)
    rows = [{"id": 1, "more": "x"}, {"id": 2, "deep": {"n": 1}}]
    kafka.send(envelopes, [json.dumps({"op": "c", "after": row}).encode() for row in rows])
    drive.batch()
    assert drive.rows(0, "id") == [
        {"id": 1, "more": "x", "deep": None},
        {"id": 2, "more": None, "deep": {"n": 1}},
    ]


def test_debezium_s_envelopes_in_avro(driving: Driving, kafka: Broker, namespace: str) -> None:
    """Debezium defines the row in `before`, and names it in `after`. Other versions have no envelope."""
    value = {**FIRST, "name": "Value"}
    fields = [
        {"name": "before", "type": ["null", value]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
    ]
    envelope = {"type": "record", "name": "Envelope", "namespace": "s.orders", "fields": fields}

    def event(op: bytes, before: bytes | None, after: bytes | None) -> bytes:
        rows = [b"\x00" if row is None else b"\x02" + row for row in (before, after)]
        return _framed(7, b"".join([*rows, _long(1), op]))

    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "bigint"}, mode="changes", keys=["id"])
    versions: dict[int, tuple[int, Any]] = {1: (7, envelope), 2: (8, FIRST)}
    with registry(f"{topic}-value", versions, []) as url:
        drive = driving(
            Ingest(
                name=namespace,
                topics=[topic],
                tables=[table],
                format=RegistryAvro(url, f"{topic}-value"),
                envelope="debezium",
                evolve=["add"],
            )
        )
        records = [event(b"c", None, _order(number, "a")) for number in (1, 2, 3)]
        records += [event(b"u", _order(1, "a"), _order(4, "b")), event(b"d", _order(2), None)]
        kafka.send(topic, [*records, _framed(8, _order(5))])
        drive.batch()
    assert drive.rows(0, "id") == [{"id": 3, "site": "a"}, {"id": 4, "site": "b"}]
    assert [letter["offset"] for letter in drive.dead()] == [5]
