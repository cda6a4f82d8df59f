"""Rows that take the place of others, held against a dictionary."""

from __future__ import annotations

import json
import random
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.catalog.stored_files import load_prefixes
from branchlake_dagster.cleanup.sweep_plan import SweepPlanner
from branchlake_dagster.ingest import batch_passes
from branchlake_dagster.ingest.batch_assets import undo_earlier_attempt
from branchlake_dagster.ingest.batch_commit import (
    create_staging_table,
    list_staging_tables,
    merge_staged_rows,
)
from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.ingest_batch import ingest_batch
from branchlake_dagster.ingest.scan import ScanResult
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown, NessieUnavailable
from branchlake_dagster.tables.table_files import TableFiles, normalize_location
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.suite.kafka import Broker, Message

EPOCH = datetime.fromtimestamp(0, UTC)
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
            *(_json(event("c", None, {"id": number, "v": "a"})) for number in range(11, 16)),
        ],
    )
    drive.batch()
    moved = [{"id": number, "v": "a"} for number in range(11, 16)]
    assert drive.rows(0, "id") == [{"id": 2, "v": "b"}, {"id": 3, "v": "c"}, *moved]
    assert [(row["offset"], row["error_kind"]) for row in drive.dead()] == [
        (7, "required"),
        (8, "syntax"),
        (9, "operation"),
    ]
    # An update that changes the key takes the old row away.
    kafka.send(
        topic,
        [
            _json(event("c", None, {"id": 1, "v": "again"})),
            wrapped(event("d", {"id": 3}, None)),
            _json(event("u", {"id": 11, "v": "a"}, {"id": 110, "v": "b"})),
            wrapped(event("u", {"id": 12}, {"id": 120, "v": "b"})),
            _json(event("u", {"id": 13}, {"id": 13, "v": "b"})),
            _json(event("u", None, {"id": 14, "v": "b"})),
            # A key that becomes free is taken in the same batch, and a chain of changes leaves its end alone.
            _json(event("u", {"id": 15}, {"id": 150, "v": "b"})),
            _json(event("c", None, {"id": 15, "v": "new"})),
            _json(event("u", {"id": 150}, {"id": 151, "v": "c"})),
        ],
    )
    drive.batch()
    assert {row["id"]: row["v"] for row in drive.rows()} == {
        1: "again",
        2: "b",
        110: "b",
        120: "b",
        13: "b",
        14: "b",
        15: "new",
        151: "c",
    }
    assert (len(drive.rows()), len(drive.dead())) == (8, 3)


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
        create_staging_table(place.catalog, target, "the earlier attempt's")
        merge_staged_rows(session, target, staged, properties)

    monkeypatch.setattr("branchlake_dagster.ingest.ingest_batch.merge_staged_rows", late)
    result = ingest_batch(drive.look(place.branch), place, drive.records, tasks=2)
    names = [entry.key.name for entry in drive.lake.nessie.entries(place.branch)]
    assert not [one for one in names if "staged" in one]
    drive.publish(place, result)
    assert [row["v"] for row in drive.rows(0, "id")] == ["a", "b"]

    again, tables = drive.place(), [(namespace, "t")]
    base = drive.lake.nessie.reference("main").hash
    create_staging_table(again.catalog, result.targets[0], "one that failed")
    assert undo_earlier_attempt(drive.lake.nessie, again.branch, base, tables, ingestion="i", properties={})
    assert not list_staging_tables(drive.lake.nessie, again.branch, tables)


def test_columns_may_have_the_names_of_branchlakes_columns(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
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


def parquet_files(drive: Driver, namespace: str) -> set[str]:
    """All data files below the tables of a namespace, whoever names them."""
    warehouse = Path(drive.lake.settings.warehouse_uri.removeprefix("file://"))
    return {str(path) for path in (warehouse / namespace).rglob("*.parquet")}


def named_files(drive: Driver) -> set[str]:
    """The data files that a snapshot of the tables on `main` has."""
    found = set()
    for number in range(len(drive.wanted)):
        table = drive.table(number)
        for snapshot in table.snapshots():
            tasks = table.scan(snapshot_id=snapshot.snapshot_id).plan_files()
            found |= {re.sub("^file:/+", "/", task.file.file_path) for task in tasks}
    return found


def staging_files(drive: Driver, namespace: str) -> list[str]:
    """All files of staging tables below the folder of a namespace."""
    warehouse = Path(drive.lake.settings.warehouse_uri.removeprefix("file://"))
    return [
        str(path)
        for path in (warehouse / namespace).rglob("*")
        if path.is_file() and "__staged_" in str(path.relative_to(warehouse))
    ]


def test_a_batch_leaves_no_file_that_no_table_has(driving: Driving, kafka: Broker, namespace: str) -> None:
    """Merged rows were staged, and records with new fields were read again: both were written before."""
    topic = kafka.topic()
    tables = [
        IngestTable(key=[namespace, "merged"], columns=COLUMNS, mode="upsert", keys=["id"]),
        IngestTable(key=[namespace, "appended"], columns=COLUMNS),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables, evolve=["add"]))
    for more in ({}, {"new": 1}):
        kafka.send(topic, [_json({"id": n, "region": "a", "v": "x", **more}) for n in range(3)])
        drive.batch()
        assert parquet_files(drive, namespace) == named_files(drive)
        assert staging_files(drive, namespace) == []
    assert {row["new"] for row in drive.rows(0)} == {1}


def test_a_discarded_batch_is_swept_after_its_staging_metadata_was_deleted(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "merged"], columns=COLUMNS, mode="upsert", keys=["id"])
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [_json({"id": 1, "region": "a", "v": "x"})])
    nessie, place = drive.lake.nessie, drive.place()
    base = nessie.reference(place.branch).hash
    result = ingest_batch(drive.look(place.branch), place, drive.records, tasks=2)
    assert staging_files(drive, namespace) == []
    tag = nessie.create_tag(f"discarded-{namespace}", from_ref=place.branch, from_hash=result.head.hash)
    nessie.delete_branch(place.branch, expected_hash=result.head.hash)
    files = TableFiles(drive.lake.settings.file_io_properties())
    plan = SweepPlanner(nessie, files, nessie.references(fetch_metadata=True)).plan(tag, base, EPOCH, base)
    for phase in plan.phases:
        for path in phase:
            files.delete(path)
    nessie.delete_tag(tag.name, expected_hash=tag.hash)
    folder = Path(drive.lake.settings.warehouse_uri.removeprefix("file://")) / namespace
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("certain", [True, False])
def test_a_batch_that_failed_leaves_data_files_only_where_its_commit_may_have_happened(
    driving: Driving, kafka: Broker, namespace: str, certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "appended"], columns=COLUMNS)
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [_json({"id": 1, "region": "a", "v": "x"})])
    error = NessieConflict("lost") if certain else NessieOutcomeUnknown("lost")

    def commit(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("branchlake_dagster.ingest.ingest_batch.commit_tables", commit)
    with pytest.raises(type(error)):
        drive.batch()
    assert bool(parquet_files(drive, namespace)) is not certain


def test_a_scan_that_failed_leaves_no_file_in_any_table(
    driving: Driving, kafka: Broker, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of a scan that failed may have written files that they could not report. Other files stay."""
    topic = kafka.topic()
    properties = {"write.data.path": tmp_path.as_uri(), "write.object-storage.enabled": "true"}
    tables = [
        IngestTable(key=[namespace, "merged"], columns=COLUMNS, mode="upsert", keys=["id"]),
        IngestTable(key=[namespace, "divided"], columns=COLUMNS, layout=["region"]),
        IngestTable(key=[namespace, "elsewhere"], columns=COLUMNS, properties=properties),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables))
    kafka.send(topic, [_json({"id": 1, "region": "a", "v": "x"}), b"no JSON"])
    drive.batch()
    real, failed_scans = batch_passes.scan_records, []

    def scan_without_report(*given: Any, **options: Any) -> ScanResult:
        failed_scans.append(real(*given, **options))
        raise NessieUnavailable("gone")

    monkeypatch.setattr(batch_passes, "scan_records", scan_without_report)
    kafka.send(topic, [_json({"id": 2, "region": "b", "v": "x"}), b"no JSON"])
    with pytest.raises(NessieUnavailable):
        drive.batch()
    assert sum(len(files) for one in failed_scans for files in one.files.values()) == 4
    outside = {str(path) for path in tmp_path.rglob("*.parquet")}
    assert parquet_files(drive, namespace) | outside == named_files(drive)
    assert len(outside) == 1
    # All of it was written where writers had recorded that they would.
    io, settings = drive.table(0).io, drive.lake.settings
    prefixes = tuple(map(normalize_location, load_prefixes(io, settings.warehouse_uri)))
    folder = Path(settings.warehouse_uri.removeprefix("file://")) / namespace
    files = [path for parent in (folder, tmp_path) for path in parent.rglob("*.*") if path.is_file()]
    assert [path for path in files if not normalize_location(path.as_uri()).startswith(prefixes)] == []


def test_of_two_partitions_the_later_record_counts(driving: Driving, kafka: Broker, namespace: str) -> None:
    """Offsets of different partitions say nothing; within one partition they say all."""
    topic = kafka.topic(partitions=2)
    table = IngestTable(key=[namespace, "t"], columns=COLUMNS, mode="upsert", keys=["id"])
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    now = 1_767_323_045_000
    kafka.send(
        topic,
        [
            Message(_json({"id": 9, "v": "?"}), at=now),
            Message(_json({"id": 1, "v": "old"}), at=now),
            Message(_json({"id": 1, "v": "new"}), partition=1, at=now + 1),
            # The clock of a producer was set back: its last record still counts among those of its partition.
            Message(_json({"id": 2, "v": "first"}), at=now + 5),
            Message(_json({"id": 2, "v": "last"}), at=now + 2),
            Message(_json({"id": 2, "v": "other"}), partition=1, at=now + 1),
        ],
    )
    drive.batch()
    assert {row["id"]: row["v"] for row in drive.rows()} == {9: "?", 1: "new", 2: "last"}


@pytest.mark.parametrize("mode", ["upsert", "changes"])
def test_the_key_of_a_record_identifies_its_row_and_a_tombstone_deletes_it(
    driving: Driving, kafka: Broker, namespace: str, mode: Any
) -> None:
    topic = kafka.topic()
    table = IngestTable(
        key=[namespace, "t"],
        columns={"k": "string", "v": "string", "op": "string"},
        mode=mode,
        keys=["k"],
        attributes={"k": "key"},
        required=["k"],
    )
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], operation="op"))

    def record(key: bytes | None, told: dict[str, Any] | None) -> Message:
        return Message(None if told is None else _json({"op": "u", **told}), key=key)

    kafka.send(
        topic,
        [
            record(b"a", {"v": "1"}),
            record(b"b", {"v": "2"}),
            record(b"b", None),
            record(b"c", None),
            record(b"c", {"v": "3"}),
            record(None, {"v": "4"}),
            record(b"\xff", {"v": "5"}),
            record(None, None),
        ],
    )
    drive.batch()
    assert {row["k"]: row["v"] for row in drive.rows()} == {"a": "1", "c": "3"}
    assert [(row["offset"], row["error_kind"]) for row in drive.dead()] == [
        (5, "required"),
        (6, "conversion"),
        (7, "required"),
    ]
    kafka.send(topic, [record(b"a", None), record(b"c", {"v": "6"})])
    drive.batch()
    assert {row["k"]: row["v"] for row in drive.rows()} == {"c": "6"}
