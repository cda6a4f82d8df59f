"""Generated hostile records, by seed: no batch fails, and each record is a row or a dead letter, once."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from branchlake_dagster.ingest.binary_formats import Avro, protobuf
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.formats import Format, Json
from branchlake_dagster.ingest.unwritable_records import UNWRITABLE
from branchlake_dagster_tests.ingest import generated
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker, Message
from branchlake_dagster_tests.suite.soak import soaking

COUNT = int(os.environ.get("BRANCHLAKE_TEST_HOSTILE", "80"))
"""Records of each format."""
SEED = int(os.environ.get("BRANCHLAKE_TEST_HOSTILE_SEED", "7"))
COLUMNS = {
    "id": "bigint",
    "n": "int",
    "price": "decimal(10,2)",
    "f": "double",
    "r": "float",
    "ok": "boolean",
    "at": "timestamp",
    "local": "timestamp_ntz",
    "day": "date",
    "text": "string",
    "raw": "binary",
    "in": "struct<a: int, b: string>",
    "many": "array<int>",
    "by": "map<string,int>",
}
_MOST = 10_000


def _table(namespace: str, name: str, **more: object) -> IngestTable:
    return IngestTable(key=[namespace, name], attributes={"o": "offset", "sent": "timestamp"}, **more)


def _holds_each_record_once(
    driving: Driving,
    kafka: Broker,
    ingest: Ingest,
    messages: Iterable[Message],
    *,
    families: bool = False,
    unreadable: int = 0,
) -> None:
    """Ingest the messages, and hold rows and dead letters against their offsets."""
    topic = ingest.topics[0]
    sent = list(messages)
    for number, at in enumerate(generated.UNREADABLE_TIMES[:unreadable]):
        place = (number + 1) * len(sent) // 4
        sent[place] = replace(sent[place], at=at)
    kafka.send(topic, sent)
    drive = driving(ingest)
    while not drive.look().plan.is_empty:
        drive.batch()
    seen: Counter[tuple[int, str]] = Counter()
    for number, name in enumerate(drive.wanted):
        table = drive.arrow(number)
        if number == len(drive.wanted) - 1:
            letters = table.to_pylist()
            seen.update((one["offset"], one["table"] or "") for one in letters)
        else:
            seen.update((offset, name) for offset in table["o"].to_pylist())
    twice = [one for one, count in seen.items() if count > 1]
    assert twice == []
    offsets = {offset for offset, _ in seen}
    missing = [offset for offset in range(len(sent)) if offset not in offsets]
    # A deletion's tombstone says nothing where rows are merged; here no table merges.
    assert missing == []
    if not families:
        names = list(drive.wanted)[:-1]
        lost = [
            at
            for at in range(len(sent))
            if (at, "") not in seen and any((at, one) not in seen for one in names)
        ]
        assert lost == []
    # Only what Spark's own source cannot read may need the division of a batch.
    unwritable = [one for one in letters if one["error_kind"] == UNWRITABLE]
    unreadable_at = {at for at, one in enumerate(sent) if one.at in generated.UNREADABLE_TIMES}
    assert [one for one in unwritable if one["offset"] not in unreadable_at] == []
    assert len(unwritable) == len(unreadable_at)


def _ingest(
    kafka: Broker, namespace: str, tables: Sequence[IngestTable], reading: Format, **more: object
) -> Ingest:
    topic = kafka.topic(message_timestamp_after_max_ms=str((1 << 63) - 1), retention_ms="-1")
    return Ingest(
        name=namespace,
        topics=[topic],
        tables=tables,
        format=reading,
        most_records=_MOST,
        **more,
    )


def test_json(driving: Driving, kafka: Broker, namespace: str) -> None:
    table = _table(namespace, "declared", columns=COLUMNS, layout=["day(at)", "bucket(4, id)"])
    ingest = _ingest(kafka, namespace, [table], Json())
    _holds_each_record_once(driving, kafka, ingest, generated.json_records(Random(SEED), COUNT))


def test_json_whose_fields_become_columns(driving: Driving, kafka: Broker, namespace: str) -> None:
    """Few records: each batch is read again for each column's turn."""
    table = _table(namespace, "found", layout=["day(sent)"])
    ingest = _ingest(kafka, namespace, [table], Json(), evolve=["add", "widen", "relax"], most_columns=15)
    _holds_each_record_once(driving, kafka, ingest, generated.json_records(Random(SEED), COUNT // 5))


def test_json_with_routes_and_named_tables(driving: Driving, kafka: Broker, namespace: str) -> None:
    tables = [
        _table(namespace, "a", columns=COLUMNS, route="a.*|true|1"),
        _table(namespace, "of_{route}", columns={"id": "bigint"}),
    ]
    ingest = _ingest(kafka, namespace, tables, Json(), route_by="text", most_tables=5)
    messages = generated.json_records(Random(SEED + 1), COUNT // 2)
    _holds_each_record_once(driving, kafka, ingest, messages, families=True)


def test_debezium(driving: Driving, kafka: Broker, namespace: str) -> None:
    ingest = _ingest(kafka, namespace, [_table(namespace, "t", columns=COLUMNS)], Json(), envelope="debezium")
    _holds_each_record_once(driving, kafka, ingest, generated.debezium_records(Random(SEED), COUNT))


def test_avro(driving: Driving, kafka: Broker, namespace: str) -> None:
    schema = json.loads(json.dumps(generated.SCHEMA))
    columns = {"id": "int", "day": "date", "at": "timestamp", "price": "decimal(12,2)", "code": "binary"}
    tables = [
        _table(namespace, "declared", columns=columns, layout=["day(at)", "truncate(3, price)"]),
        _table(
            namespace,
            "found",
            columns={"text": "string", "many": "array<bigint>", "inside": "struct<s: string>"},
        ),
    ]
    ingest = _ingest(kafka, namespace, tables, Avro(json.dumps(schema)))
    # What Spark cannot read divides the batch into many passes; test_unwritable.py has that of JSON.
    unreadable = 1 if soaking() else 0
    messages = generated.avro_records(Random(SEED), COUNT)
    _holds_each_record_once(driving, kafka, ingest, messages, unreadable=unreadable)


def test_protobuf(driving: Driving, kafka: Broker, namespace: str) -> None:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="hostile.proto", package="shop", syntax="proto3")
    order = file.message_type.add(name="Order")
    for number, (name, kind) in enumerate(
        {
            "id": field.TYPE_INT64,
            "text": field.TYPE_STRING,
            "raw": field.TYPE_BYTES,
            "f": field.TYPE_DOUBLE,
            "ok": field.TYPE_BOOL,
            "n": field.TYPE_UINT64,
        }.items(),
        start=1,
    ):
        order.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    order.field.add(name="many", number=7, type=field.TYPE_INT32, label=field.LABEL_REPEATED)
    order.field.add(
        name="deep", number=8, type=field.TYPE_MESSAGE, type_name=".shop.Line", label=field.LABEL_REPEATED
    )
    line = file.message_type.add(name="Line")
    line.field.add(name="sku", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    descriptors = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))

    def valid(chance: Random) -> bytes:
        encoded: bytes = message(
            id=generated.any_number(chance),
            text=generated.any_text(chance).encode("utf-8", "replace").decode(),
            raw=b"\xff",
            f=float(chance.choice(["nan", "inf", "1e308"])),
            n=generated.any_number(chance) & ((1 << 64) - 1),
            many=[1, -1],
            deep=[{"sku": "x"}],
        ).SerializeToString()
        return encoded

    reading = protobuf(descriptors, "shop.Order")
    ingest = _ingest(
        kafka,
        namespace,
        [_table(namespace, "t", columns={"id": "bigint", "text": "string", "f": "float"})],
        reading,
    )
    _holds_each_record_once(driving, kafka, ingest, generated.protobuf_records(Random(SEED), COUNT, valid))
