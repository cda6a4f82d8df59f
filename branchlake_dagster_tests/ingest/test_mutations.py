"""Rows that take the place of others, held against a dictionary."""

from __future__ import annotations

import json
import random
from typing import Any

from branchlake_dagster.ingest.declaring.declaration import Ingest, IngestTable
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.kafka import Broker, Message

COLUMNS = {"id": "bigint", "region": "string", "v": "string"}


def _json(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode()


def test_changes_and_upserts_leave_what_a_dictionary_has(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Two tables from one topic: one that does what the records say, one that puts each in its place."""
    topic = kafka.topic()
    keys = ["id", "region"]
    tables = [
        IngestTable(key=[namespace, "changes"], columns=COLUMNS, mode="changes", keys=keys, required=["v"]),
        IngestTable(key=[namespace, "upserts"], columns=COLUMNS, mode="upsert", keys=keys),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables, operation="op"))
    chance = random.Random(5)
    changes: dict[tuple[int, str], str] = {}
    upserts: dict[tuple[int, str], str | None] = {}
    for number in range(2):
        sent: list[Message | bytes] = []
        for place in range(120):
            key = (chance.randrange(12), chance.choice("ab"))
            word = chance.choice(["insert", "U", "update", "d", "delete"])
            value = None if word in ("d", "delete") else f"{number}.{place}"
            told = {"id": key[0], "region": key[1], "op": word, **({} if value is None else {"v": value})}
            sent.append(_json(told))
            upserts[key] = value
            if value is None:
                changes.pop(key, None)
            else:
                changes[key] = value
        # What says no operation or no key changes nothing; a tombstone is for the compaction of the topic.
        sent += [
            _json({"id": 1, "region": "a", "op": "t", "v": "?"}),
            _json({"id": 1, "op": "d"}),
            Message(None),
        ]
        upserts[1, "a"] = "?"
        kafka.send(topic, sent)
        drive.batch()
        assert {(row["id"], row["region"]): row["v"] for row in drive.rows(0)} == changes
        assert len(drive.rows(0)) == len(changes)
        assert {(row["id"], row["region"]): row["v"] for row in drive.rows(1)} == upserts
        assert len(drive.rows(1)) == len(upserts)
    assert [(row["error_kind"], row["table"]) for row in drive.dead()] == 2 * [
        ("operation", f"{namespace}.changes"),
        ("required", f"{namespace}.changes"),
        ("required", f"{namespace}.upserts"),
    ]
    # Nothing of the staging is left on main.
    names = [name[-1] for name in drive.lake.catalog("main").list_tables(namespace)]
    assert sorted(names) == sorted(["changes", "upserts", f"{namespace}_dead_letters"])
    assert all(not entry for entry in [drive.table(0).inspect.delete_files().num_rows])


def test_debezium_s_envelopes_plain_and_in_connect_s(driving: Driving, kafka: Broker, namespace: str) -> None:
    topic = kafka.topic()
    table = IngestTable(
        key=[namespace, "t"],
        columns={"id": "bigint", "v": "string"},
        mode="changes",
        keys=["id"],
        required=["v"],
    )
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], envelope="debezium"))

    def event(op: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any]:
        return {"before": before, "after": after, "op": op, "source": {"lsn": 5}, "ts_ms": 1}

    def wrapped(told: dict[str, Any]) -> bytes:
        return _json({"schema": {"type": "struct", "name": "x"}, "payload": told})

    kafka.send(
        topic,
        [
            _json(event("r", None, {"id": 1, "v": "snapshot"})),
            _json(event("c", None, {"id": 2, "v": "a"})),
            wrapped(event("u", {"id": 2, "v": "a"}, {"id": 2, "v": "b"})),
            wrapped(event("c", None, {"id": 3, "v": "c"})),
            # Of a deletion a table without full replica identity tells the key alone.
            _json(event("d", {"id": 1}, None)),
            Message(None, key=b"1"),
            wrapped(event("d", {"id": 9, "v": None}, None)),
            _json(event("c", None, {"id": 4})),
            _json({"op": "c", "after": "no row"}),
            _json(event("t", None, None)),
        ],
    )
    drive.batch()
    assert drive.rows(0, "id") == [{"id": 2, "v": "b"}, {"id": 3, "v": "c"}]
    assert [(row["offset"], row["error_kind"]) for row in drive.dead()] == [
        (7, "required"),
        (8, "syntax"),
        (9, "operation"),
    ]
    kafka.send(
        topic, [_json(event("c", None, {"id": 1, "v": "again"})), wrapped(event("d", {"id": 3}, None))]
    )
    drive.batch()
    assert drive.rows(0, "id") == [{"id": 1, "v": "again"}, {"id": 2, "v": "b"}]
