"""Dead letters that are put back: each once, whoever asks how often."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.catalog.options import NAMESPACE_CREATE
from branchlake_dagster.cli.main import main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_context import BatchContext
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import DeadLettersLeftOut, EarlierAttemptLate
from branchlake_dagster.ingest.prepared_records import PreparedRecords
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection, count_dead_letters, reprocess_batch
from branchlake_dagster.ingest.scan import ScanResult
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.suite.kafka import Broker, Message, as_environment
from branchlake_dagster_tests.suite.raised import raising


def _json(**told: Any) -> bytes:
    return json.dumps(told).encode()


def _run(
    drive: Driver, chosen: DeadLetterSelection, run: str, place: BatchContext | None = None
) -> tuple[BatchContext, ScanResult | None]:
    place = place or drive.place()
    # Letters are marked by Spark, so its session stands on the branch.
    session = drive.lake.spark_session(place.branch)
    try:
        there = replace(place, run_id=run, session=lambda: session)
        done = reprocess_batch(drive.ingest, there, chosen)
        return there, done and done.scanned
    finally:
        session.stop()


def _letters(drive: Driver) -> list[tuple[int, str | None, str]]:
    """Those that wait: offset, table, kind."""
    return [(r["offset"], r["table"], r["error_kind"]) for r in drive.dead() if r["reprocessed_in"] is None]


def test_what_is_chosen_comes_through_a_tag() -> None:
    chosen = DeadLetterSelection(("syntax", "route"), "a.b", datetime(2026, 1, 2, tzinfo=UTC), None)
    assert DeadLetterSelection.from_tag(chosen.to_tag()) == chosen
    assert DeadLetterSelection.from_tag(DeadLetterSelection().to_tag()) == DeadLetterSelection()


_MODULE = """
from branchlake_dagster import Ingest, IngestTable, branchlake_definitions, ingest_definitions

table = IngestTable(key=["{name}", "t"], columns={{"id": "int"}})
orders = Ingest(name="{name}", topics=["{topic}"], tables=[table])
defs = branchlake_definitions(definitions=ingest_definitions(orders))
"""


def test_the_command_counts_dead_letters_and_reprocesses_them_in_a_run(
    driving: Driving, kafka: Broker, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "t"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [_json(id=1), _json(id=3_000_000_000), _json(id="x")])
    drive.batch()
    with drive.table().update_schema() as update:
        update.update_column("id", field_type=LongType())
    (tmp_path / f"m{namespace}.py").write_text(_MODULE.format(name=namespace, topic=topic))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(drive.lake.settings.state_dir))
    for name, value in as_environment(kafka.cluster).items():
        monkeypatch.setenv(name, value)

    def asked(*more: str) -> Any:
        done = CliRunner().invoke(main, ["reprocess", namespace, "-m", f"m{namespace}", "--json", *more])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    letters = [{"table": f"{namespace}.t", "error_kind": "conversion", "letters": 2}]
    assert asked("--dry-run") == {"letters": letters, "run": None}
    assert asked("--dry-run", "--error-kind", "syntax") == {"letters": [], "run": None}
    found = asked()
    assert found["letters"] == letters
    branch = drive.lake.catalog(run_branch_name(found["run"]))
    rows = branch.load_table((namespace, "t")).scan().to_arrow()
    assert sorted(rows["id"].to_pylist()) == [1, 3_000_000_000]
    # On its branch: main has it when it is published.
    assert [row["id"] for row in drive.rows()] == [1]
    with dg.DagsterInstance.get() as instance:
        logs = instance.all_logs(found["run"], of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        events = [record.get_dagster_event().asset_check_evaluation_data for record in logs]
        verdicts = {one.check_name: one for one in events}
    assert (verdicts["converted"].passed, verdicts["tolerated"].passed) == (False, True)
    assert verdicts["tolerated"].description == "2 dead letters reprocessed; 1 failed again."


def test_dead_letters_are_reprocessed_once(driving: Driving, kafka: Broker, namespace: str) -> None:
    topic = kafka.topic()
    columns = {"id": "bigint", "n": "int"}
    tables = [
        IngestTable(key=[namespace, "a"], columns=columns, route="a", attributes={"at": "offset"}),
        IngestTable(key=[namespace, "b"], columns=columns, route="a|b"),
        IngestTable(key=[namespace, "m"], columns=columns, route="m", mode="upsert", keys=["id"]),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables[:2], route_by="to"))
    kafka.send(
        topic,
        [
            _json(id=1, to="a", n="one"),
            _json(id=2, to="b", n=2),
            _json(id=3, to="c", n=3),
            b"never any JSON",
            _json(id=4, to="b", n=3_000_000_000),
        ],
    )
    drive.batch()
    assert [(row["offset"], row["error_kind"]) for row in drive.dead()] == [
        (0, "conversion"),
        (0, "conversion"),
        (2, "route"),
        (3, "syntax"),
        (4, "conversion"),
    ]
    first = drive.dead()
    name = f"{namespace}.b"
    session = drive.lake.spark_session()
    waits = count_dead_letters(session, drive.known, DeadLetterSelection(kinds=["conversion"]))
    assert waits == [(f"{namespace}.a", "conversion", 1), (name, "conversion", 2)]
    late = DeadLetterSelection(since=datetime.now(UTC) + timedelta(days=1))
    assert count_dead_letters(session, drive.known, late) == []
    assert len(count_dead_letters(session, drive.known, DeadLetterSelection(until=late.since))) == 4
    session.stop()

    # What was wrong is put right: the tables hold more, and take another route.
    for number in range(2):
        with drive.table(number).update_schema() as update:
            update.update_column("n", field_type=LongType())
    wide = [replace(tables[0], route="a|c"), tables[1]]
    drive.ingest = replace(drive.ingest, tables=wide)
    place, found = _run(drive, DeadLetterSelection(), "run-1")
    other, _ = _run(drive, DeadLetterSelection(kinds=["route"]), "run-2")
    assert found is not None
    assert (found.counts["records"], found.count_rows(0), found.count_rows(1), found.counts["dead"]) == (
        5,
        1,
        1,
        3,
    )
    # An attempt after one that had committed adds nothing.
    assert _run(drive, DeadLetterSelection(), "run-1", place)[1] is None
    assert drive.merge(place)
    # Another that took up one of the same letters at once is refused.
    assert not drive.merge(other)
    assert [(row["id"], row["n"], row["at"]) for row in drive.rows(0)] == [(3, 3, 2)]
    assert [row["id"] for row in drive.rows(1, "id")] == [2, 4]

    letters = drive.dead()
    assert [row for row in letters if row["reprocessed_in"] is None] == [
        row for row in letters if row["batch"] == "run-1"
    ]
    assert sorted(row["offset"] for row in letters if row["batch"] == "run-1") == [0, 0, 3]
    same = ("topic", "incarnation", "partition", "offset", "timestamp", "key", "value", "headers")
    again = next(row for row in letters if row["batch"] == "run-1" and row["offset"] == 3)
    assert [again[one] for one in same] == [first[3][one] for one in same]
    # All that is left fails again, and no row comes twice; the ingestion's own place did not move.
    assert drive.merge(_run(drive, DeadLetterSelection(kinds=["conversion", "syntax"]), "run-3")[0])
    assert (len(drive.rows(0)), len(drive.rows(1))) == (1, 2)
    assert drive.look().plan.is_empty

    drive.ingest = replace(drive.ingest, tables=tables)
    with raising(ConfigurationError, table=f"{namespace}.m", reason="not_reprocessable"):
        DeadLetterSelection(table=f"{namespace}.m").to_sql(drive.known)


def test_a_dead_letter_that_only_a_wider_table_takes_widens_it(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Marked and in no table, it was lost: rows that want a wider type are written when there is one."""
    topic = kafka.topic()
    tables = [IngestTable(key=[namespace, "t"])]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables))
    fields = NestedField(1, "id", IntegerType()), NestedField(2, "must", StringType(), required=True)
    catalog = drive.lake.catalog("main", properties={NAMESPACE_CREATE: "true"})
    catalog.create_table((namespace, "t"), Schema(*fields))
    kafka.send(topic, [_json(id=3_000_000_000, must="x", new=1.5), _json(id=2), _json(id="x", must="x")])
    drive.batch()
    assert _letters(drive) == [(0, f"{namespace}.t", "conversion"), *_letters(drive)[1:]]

    drive.ingest = replace(drive.ingest, evolve=["add", "widen", "relax"])
    place, found = _run(drive, DeadLetterSelection(), "run-1")
    assert found is not None
    assert (found.counts["records"], found.count_rows(0), found.counts["dead"]) == (3, 2, 1)
    assert drive.merge(place)
    assert drive.rows(0, "id") == [
        {"id": 2, "must": None, "new": None},
        {"id": 3_000_000_000, "must": "x", "new": 1.5},
    ]
    assert _letters(drive) == [(2, f"{namespace}.t", "conversion")]


def test_a_dead_letter_that_finds_no_table_stays_its_tables(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """The record is in the other table already: as anybody's letter it was put there a second time."""
    topic = kafka.topic()
    both = [
        IngestTable(key=[namespace, "a"], columns={"id": "int"}, route="x"),
        IngestTable(key=[namespace, "b"], columns={"id": "bigint"}, route="x|y"),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=both, route_by="to"))
    kafka.send(topic, [_json(id=3_000_000_000, to="x")])
    drive.batch()
    waits = [(0, f"{namespace}.a", "conversion")]
    assert (_letters(drive), len(drive.rows(1))) == (waits, 1)

    drive.ingest = replace(drive.ingest, tables=[replace(both[0], route="y"), both[1]])
    assert drive.merge(_run(drive, DeadLetterSelection(), "run-1")[0])
    assert _letters(drive) == [(0, f"{namespace}.a", "route")]
    assert drive.merge(_run(drive, DeadLetterSelection(), "run-2")[0])
    with drive.table(0).update_schema() as update:
        update.update_column("id", field_type=LongType())
    drive.ingest = replace(drive.ingest, tables=both)
    assert drive.merge(_run(drive, DeadLetterSelection(), "run-3")[0])
    assert (_letters(drive), len(drive.rows(0)), len(drive.rows(1))) == ([], 1, 1)


def test_a_dead_letter_without_a_value_stays_one_beside_merged_tables(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """Of records without a value merged tables take nothing. A letter that is put back is kept."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "a"], columns={"id": "int"}, route="x")
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], route_by="to"))
    kafka.send(topic, [Message(None, b"k")])
    drive.batch()
    merged = replace(table, key=[namespace, "m"], mode="upsert", keys=["id"])
    drive.ingest = replace(drive.ingest, tables=[table, merged])
    place, found = _run(drive, DeadLetterSelection(), "run-1")
    assert found is not None
    assert (found.counts["records"], found.counts["dead"]) == (1, 1)
    assert drive.merge(place)
    assert _letters(drive) == [(0, None, "empty")]


def test_dead_letters_that_would_give_nothing_are_not_reprocessed(
    driving: Driving, kafka: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever mistake of ours leaves one out: what topics have may be left out by choice, letters never."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "a"], columns={"id": "int"}, route="x")
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], route_by="to"))
    kafka.send(topic, [_json(id=1, to="y"), _json(id="x", to="x")])
    drive.batch()
    monkeypatch.setattr(PreparedRecords, "_is_redundant_tombstone", lambda _: F.expr("true"))
    with raising(DeadLettersLeftOut, 2, 1):
        _run(drive, DeadLetterSelection(), "run-1")
    assert len(_letters(drive)) == 2


def test_dead_letters_that_arrive_meanwhile_do_not_refuse_it(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "a"], columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table]))
    kafka.send(topic, [_json(id="x"), _json(id="y")])
    drive.batch()
    base = drive.lake.nessie.reference("main").hash
    place, _ = _run(drive, DeadLetterSelection(), "run-1")
    kafka.send(topic, [_json(id="z")])
    drive.batch()
    assert isinstance(drive.publish_run(place, base), Published)
    assert [one[0] for one in _letters(drive)] == [0, 1, 2]


def test_late_commits_of_an_earlier_attempt_are_not_reprocessed_twice(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "a"], columns={"id": "int"}, route="x")
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], route_by="to"))
    kafka.send(topic, [_json(id=1, to="y")])
    drive.batch()
    drive.ingest = replace(drive.ingest, tables=[replace(table, route="y")])
    place = drive.place()
    late: list[ScanResult | None] = []
    session = drive.lake.spark_session(place.branch)

    def open_session() -> SparkSession:
        if not late:
            late.append(_run(drive, DeadLetterSelection(), "run-1", place)[1])
        return session

    with pytest.raises(EarlierAttemptLate):
        reprocess_batch(
            drive.ingest, replace(place, run_id="run-1", session=open_session), DeadLetterSelection()
        )
    session.stop()
    assert late[0] is not None
    assert drive.lake.catalog(place.branch).load_table((namespace, "a")).scan().to_arrow().num_rows == 1


def test_a_table_that_is_filled_again_leaves_waiting_dead_letters_alone(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """It takes by now what it could not then; the letter, put back, added the row a second time."""
    topic = kafka.topic()
    tables = [
        IngestTable(key=[namespace, "t"], columns={"id": "int"}, route="x"),
        IngestTable(key=[namespace, "m"], columns={"id": "int"}, route="x", mode="upsert", keys=["id"]),
    ]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables, route_by="to"))
    kafka.send(topic, [_json(id=1, to="x")])
    drive.batch()
    kafka.send(topic, [_json(id=3_000_000_000, to="x"), _json(id=2, to="x"), _json(id=4, to="y")])
    drive.batch()
    assert len(_letters(drive)) == 3
    for number in range(2):
        table = drive.table(number)
        first = table.metadata.snapshots[0].snapshot_id
        table.manage_snapshots().rollback_to_snapshot(first).commit()
        with drive.table(number).update_schema() as update:
            update.update_column("id", field_type=LongType())
    wide = [replace(one, route="x|y") for one in tables]
    drive.ingest = replace(drive.ingest, tables=wide, on_rollback="replay")
    while not drive.look().plan.is_empty:
        drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 2]
    # No letter goes into a table whose rows are merged, so this one takes what fits now.
    assert [row["id"] for row in drive.rows(1, "id")] == [1, 2, 4, 3_000_000_000]
    assert drive.merge(_run(drive, DeadLetterSelection(), "run-1")[0])
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 2, 4, 3_000_000_000]
    assert len(_letters(drive)) == 1
