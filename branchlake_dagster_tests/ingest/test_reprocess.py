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
from pyiceberg.types import LongType

from branchlake_dagster.branching.branch.run_branch import branch_name
from branchlake_dagster.cli.main import main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch.ingest_batch import Place
from branchlake_dagster.ingest.batch.reprocess import Chosen, reprocess_batch, waiting_letters
from branchlake_dagster.ingest.declaring.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.scanning.scan import Scanned
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.suite.kafka import Broker


def _json(**told: Any) -> bytes:
    return json.dumps(told).encode()


def _run(drive: Driver, chosen: Chosen, run: str, place: Place | None = None) -> tuple[Place, Scanned | None]:
    place = place or drive.place()
    # Letters are marked by Spark, so its session stands on the branch.
    session = drive.lake.spark_session(place.branch)
    try:
        there = replace(place, run_id=run, session=lambda: session)
        done = reprocess_batch(drive.ingest, there, chosen)
        return there, done and done.scanned
    finally:
        session.stop()


def _publish(drive: Driver, place: Place) -> bool:
    lake = drive.lake.nessie
    merged = lake.merge(
        from_name=place.branch,
        from_hash=lake.reference(place.branch).hash,
        into="main",
        expected_hash=lake.reference("main").hash,
        message="published",
        properties={},
    )
    return merged.applied


def test_what_is_chosen_comes_through_a_tag() -> None:
    chosen = Chosen(("syntax", "route"), "a.b", datetime(2026, 1, 2, tzinfo=UTC), None)
    assert Chosen.from_text(chosen.text()) == chosen
    assert Chosen.from_text(Chosen().text()) == Chosen()


_MODULE = """
from branchlake_dagster import Ingest, IngestTable, branchlake_definitions, ingest_definitions

table = IngestTable(key=["{name}", "t"], columns={{"id": "int"}})
orders = Ingest(name="{name}", topics=["{topic}"], tables=[table])
defs = branchlake_definitions(definitions=ingest_definitions(orders))
"""


def test_the_command_counts_letters_and_puts_them_back_in_a_run(
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
    monkeypatch.setenv("BRANCHLAKE_KAFKA_BOOTSTRAP", kafka.cluster.bootstrap)

    def asked(*more: str) -> Any:
        done = CliRunner().invoke(main, ["reprocess", namespace, "-m", f"m{namespace}", "--json", *more])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    letters = [{"table": f"{namespace}.t", "error_kind": "conversion", "letters": 2}]
    assert asked("--dry-run") == {"letters": letters, "run": None}
    assert asked("--dry-run", "--error-kind", "syntax") == {"letters": [], "run": None}
    found = asked()
    assert found["letters"] == letters
    branch = drive.lake.catalog(branch_name(found["run"]))
    rows = branch.load_table((namespace, "t")).scan().to_arrow()
    assert sorted(rows["id"].to_pylist()) == [1, 3_000_000_000]
    # On its branch: main has it when it is published.
    assert [row["id"] for row in drive.rows()] == [1]
    with dg.DagsterInstance.get() as instance:
        logs = instance.all_logs(found["run"], of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        events = [record.get_dagster_event().asset_check_evaluation_data for record in logs]
        verdicts = {one.check_name: one for one in events}
    assert (verdicts["converted"].passed, verdicts["tolerated"].passed) == (False, True)
    assert verdicts["tolerated"].description == "Of 2 dead letters that were put back 1 failed again."


def test_dead_letters_are_put_back_once(driving: Driving, kafka: Broker, namespace: str) -> None:
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
    waits = waiting_letters(session, drive.known, Chosen(kinds=["conversion"]))
    assert waits == [(f"{namespace}.a", "conversion", 1), (name, "conversion", 2)]
    late = Chosen(since=datetime.now(UTC) + timedelta(days=1))
    assert waiting_letters(session, drive.known, late) == []
    assert len(waiting_letters(session, drive.known, Chosen(until=late.since))) == 4
    session.stop()

    # What was wrong is put right: the tables hold more, and take another route.
    for number in range(2):
        with drive.table(number).update_schema() as update:
            update.update_column("n", field_type=LongType())
    wide = [replace(tables[0], route="a|c"), tables[1]]
    drive.ingest = replace(drive.ingest, tables=wide)
    place, found = _run(drive, Chosen(), "run-1")
    other, _ = _run(drive, Chosen(kinds=["route"]), "run-2")
    assert found is not None
    assert (found.counts["records"], found.rows(0), found.rows(1), found.counts["dead"]) == (5, 1, 1, 3)
    # An attempt after one that had committed adds nothing.
    assert _run(drive, Chosen(), "run-1", place)[1] is None
    assert _publish(drive, place)
    # Another that took up one of the same letters at once is refused.
    assert not _publish(drive, other)
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
    assert _publish(drive, _run(drive, Chosen(kinds=["conversion", "syntax"]), "run-3")[0])
    assert (len(drive.rows(0)), len(drive.rows(1))) == (1, 2)
    assert drive.look().plan.empty

    drive.ingest = replace(drive.ingest, tables=tables)
    with pytest.raises(ConfigurationError, match="cannot be put back"):
        Chosen(table=f"{namespace}.m").condition(drive.known)
