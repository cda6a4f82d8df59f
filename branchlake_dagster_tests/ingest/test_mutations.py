"""Rows that take the place of others, held against a dictionary."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from branchlake_dagster.ingest.batch.ingest_batch import ingest_batch
from branchlake_dagster.ingest.batch.merge import merge, staging_table, staging_tables
from branchlake_dagster.ingest.declaring.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.running.earlier_attempts import take_back
from branchlake_dagster.ingest.scanning.targets import Target
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


def test_an_attempt_that_was_given_up_takes_no_staged_rows_away(
    driving: Driving, kafka: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made the table anew in which the next attempt's rows waited, and these were lost without a word."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns=COLUMNS, mode="upsert", keys=["id"])
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [_json({"id": 1, "v": "a"})])
    drive.batch()
    kafka.send(topic, [_json({"id": 2, "v": "b"})])
    place = drive.place()

    def late(session: Any, target: Target, staged: Any, properties: Any) -> None:
        staging_table(place.catalog, target, "the earlier attempt's")
        merge(session, target, staged, properties)

    monkeypatch.setattr("branchlake_dagster.ingest.batch.ingest_batch.merge", late)
    result = ingest_batch(drive.look(place.branch), place, drive.records, tasks=2)
    names = [entry.key.name for entry in drive.lake.nessie.entries(place.branch)]
    assert not [one for one in names if "staged" in one]
    drive.publish(place, result)
    assert [row["v"] for row in drive.rows(0, "id")] == ["a", "b"]

    again, tables = drive.place(), [(namespace, "t")]
    base = drive.lake.nessie.reference("main").hash
    staging_table(again.catalog, result.targets[0], "one that failed")
    assert take_back(drive.lake.nessie, again.branch, base, tables, ingestion="i", properties={})
    assert not staging_tables(drive.lake.nessie, again.branch, tables)


def test_columns_may_have_the_names_of_ours(driving: Driving, kafka: Broker, namespace: str) -> None:
    """Debezium's transforms write __op and more."""
    topic = kafka.topic()
    columns = {"id": "bigint", "__op": "string", "__OFFSET": "string", "___op": "int", "__nth": "int"}
    table = IngestTable(key=[namespace, "t"], columns=columns, mode="changes", keys=["id"])
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], operation="__op"))
    record = {"__OFFSET": "9", "___op": 1, "__nth": 7}
    kafka.send(
        topic,
        [
            _json({"id": 1, "__op": "c", **record}),
            _json({"id": 2, "__op": "c", **record}),
            _json({"id": 1, "__op": "u", **record, "__nth": 8}),
            _json({"id": 2, "__op": "d"}),
        ],
    )
    drive.batch()
    assert drive.rows(0) == [{"id": 1, "__op": "u", **record, "__nth": 8}]
