"""Tables that are rolled back below dead letters which were put back: seen, and got right by docs/operations.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pyiceberg.table import Table

from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import PositionLost
from branchlake_dagster.ingest.progress import (
    ReprocessingRun,
    add_reprocessing_run,
    reprocessing_runs,
    require_reprocessed_rows,
)
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection, reprocess_batch
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.raised import raising

_PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def _json(**told: Any) -> bytes:
    return json.dumps(told).encode()


def _put_back(drive: Driver, run: str) -> None:
    """All letters that wait, published."""
    place = drive.place()
    session = drive.lake.spark_session(place.branch)
    try:
        done = reprocess_batch(
            drive.ingest, replace(place, run_id=run, session=lambda: session), DeadLetterSelection()
        )
    finally:
        session.stop()
    assert done is not None
    assert drive.merge(place)


def _by_the_page(drive: Driver, words: str, values: Mapping[str, str]) -> None:
    """Run the statements of the page's block that has these words, for the table `a` of the ingestion."""
    blocks = [one.split("```")[0] for one in _PAGE.read_text().split("```sql\n")[1:]]
    (text,) = [one for one in blocks if words in one]
    dead, own = ".".join(list(drive.wanted.values())[-1]), ".".join(next(iter(drive.wanted.values())))
    shown = {
        "raw.orders_dead_letters": dead,
        "raw.orders": own,
        "reprocessed.orders": f"reprocessed.{drive.ingest.name}",
        "'orders'": f"'{drive.ingest.topics[0]}'",
    }
    for old, new in {**values, **shown}.items():
        text = text.replace(old, new)
    session = drive.lake.spark_session()
    try:
        for statement in filter(str.strip, text.split(";")):
            session.sql(statement)
    finally:
        session.stop()


def _head(drive: Driver, number: int) -> int:
    found = drive.table(number).metadata.current_snapshot_id
    assert found is not None
    return found


def _roll_back(drive: Driver, number: int, snapshot: int) -> None:
    drive.table(number).manage_snapshots().rollback_to_snapshot(snapshot).commit()


def _takes(drive: Driver, routes: str, **more: Any) -> None:
    tables = [replace(one, route=routes) for one in drive.ingest.tables]
    drive.ingest = replace(drive.ingest, tables=tables, **more)


def _waiting(drive: Driver) -> list[int]:
    return [row["offset"] for row in drive.dead() if row["reprocessed_in"] is None]


def test_rolled_back_rows_of_reprocessed_dead_letters_are_reprocessed_again(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """The table's offsets do not tell: the letters' own are before them, and no replay reads these again."""
    topic = kafka.topic()
    tables = [IngestTable(key=[namespace, name], columns={"id": "int"}, route="x") for name in ("a", "b")]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables, route_by="to"))
    kafka.send(topic, [_json(id=1, to="x"), _json(id=2, to="y")])
    drive.batch()
    first = _head(drive, 0)
    _takes(drive, "x|y")
    _put_back(drive, "run-1")
    put_in = _head(drive, 0)
    assert drive.look().plan.is_empty
    # Back to what all of its offsets are in.
    _roll_back(drive, 0, first)
    with raising(PositionLost, f"{topic}[0]", reason="reprocessed_rows_lost") as lost:
        drive.look()
    assert (lost.value.table, lost.value.branch, lost.value.run_id) == (f"{namespace}.a", "main", "run-1")
    _by_the_page(drive, "set_current_snapshot", {"4711": str(put_in)})
    assert drive.look().plan.is_empty

    kafka.send(topic, [_json(id=3, to="x"), _json(id=4, to="z")])
    drive.batch()
    _takes(drive, "x|y|z")
    _put_back(drive, "run-2")
    assert [[row["id"] for row in drive.rows(n, "id")] for n in range(2)] == 2 * [[1, 2, 3, 4]]
    _roll_back(drive, 0, first)
    for rule in ("stop", "replay"):
        _takes(drive, "x|y|z", on_rollback=rule)
        with raising(PositionLost, "run-1", "run-2", reason="reprocessed_rows_lost"):
            drive.look()
        with raising(PositionLost, "run-1", reason="reprocessed_rows_lost"):
            _put_back(drive, "run-3")
    _takes(drive, "x|y|z", on_rollback="skip")
    assert drive.look().plan.is_empty

    runs = {"'1081e5a2-…'": "'run-1', 'run-2'", ">= 10": ">= 2"}
    _by_the_page(drive, "NOT EXISTS", runs)
    _takes(drive, "x|y|z", on_rollback="replay")
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 3, 4]
    _put_back(drive, "run-3")
    assert [[row["id"] for row in drive.rows(n, "id")] for n in range(2)] == 2 * [[1, 2, 3, 4]]
    _takes(drive, "x|y|z", on_rollback="stop")
    assert drive.look().plan.is_empty
    assert not _waiting(drive)


def test_dead_letters_whose_marks_were_rolled_back_are_not_reprocessed_twice(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "a"], columns={"id": "int"}, route="x")
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], route_by="to"))
    kafka.send(topic, [_json(id=1, to="x"), _json(id=2, to="y"), b"never any JSON"])
    drive.batch()
    first = _head(drive, -1)
    _takes(drive, "x|y")
    _put_back(drive, "run-1")
    marked = _head(drive, -1)
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 2]
    _roll_back(drive, -1, first)
    with raising(PositionLost, "run-1", marked, reason="marks_lost"):
        drive.look()
    # What is left out for good is not put back either.
    _takes(drive, "x|y", on_rollback="skip")
    kafka.send(topic, [_json(id=5, to="x"), _json(id="x", to="x")])
    drive.batch()
    with raising(PositionLost, reason="marks_lost"):
        _put_back(drive, "run-2")
    _takes(drive, "x|y", on_rollback="stop")

    _by_the_page(drive, "UPDATE", {"5012": str(marked), "1081e5a2-…": "run-1"})
    assert drive.look().plan.is_empty
    assert _waiting(drive) == [2, 4]
    _put_back(drive, "run-2")
    assert _waiting(drive) == [2, 4]
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 2, 5]


def test_dead_letters_are_reprocessed_while_the_rows_of_a_roll_back_are_left_out(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """A table that nothing is for any more says for ever that it was rolled back."""
    topic = kafka.topic()
    tables = [IngestTable(key=[namespace, name], columns={"id": "int"}, route=name) for name in ("a", "b")]
    drive = driving(Ingest(name=namespace, topics=[topic], tables=tables, route_by="to"))
    for number in range(2):
        kafka.send(topic, [_json(id=number, to="a"), _json(id=number, to="y")])
        drive.batch()
    _roll_back(drive, 0, drive.table(0).metadata.snapshots[0].snapshot_id)
    drive.ingest = replace(drive.ingest, tables=[tables[0], replace(tables[1], route="b|y")])
    with raising(PositionLost, reason="replay_pending"):
        _put_back(drive, "run-1")
    drive.ingest = replace(drive.ingest, on_rollback="skip")
    _put_back(drive, "run-1")
    assert [[row["id"] for row in drive.rows(n, "id")] for n in range(2)] == [[0], [0, 1]]


def test_a_replay_reads_nothing_again_that_was_reprocessed(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """What it begins with is what the table's snapshots tell, and the letter's batch had no row for it."""
    topic = kafka.topic()
    table = IngestTable(key=[namespace, "a"], columns={"id": "int"}, route="x")
    ingest = Ingest(name=namespace, topics=[topic], tables=[table], route_by="to", on_rollback="replay")
    drive = driving(ingest)
    for to in ("x", "y", "z"):
        kafka.send(topic, [_json(id=1, to=to)])
        drive.batch()
    _takes(drive, "x|y")
    _put_back(drive, "run-1")
    put_in = _head(drive, 0)
    kafka.send(topic, [_json(id=2, to="x")])
    drive.batch()
    _roll_back(drive, 0, put_in)
    drive.batch()
    assert [row["id"] for row in drive.rows(0, "id")] == [1, 1, 2]
    assert drive.look().plan.is_empty


# -- what snapshots tell -----------------------------------------------------------------------------------


def _table(*line: int, beside: tuple[int, ...] = (), first: int | None = None, **runs: int) -> Table:
    """A table whose line has these snapshots, each numbered by its sequence; `first`: others have expired."""
    snapshots = [
        SimpleNamespace(
            snapshot_id=number,
            parent_snapshot_id=line[place - 1] if place else first,
            sequence_number=number,
            summary=None,
        )
        for place, number in enumerate(line)
    ]
    snapshots += [
        SimpleNamespace(snapshot_id=number, parent_snapshot_id=1, sequence_number=number, summary=None)
        for number in beside
    ]
    told = [{"run": run, "at": at, "sequence": at} for run, at in runs.items()]
    metadata = SimpleNamespace(
        snapshots=snapshots,
        current_snapshot_id=line[-1],
        properties={f"{LakeProperty.REPROCESSED_PREFIX}orders": json.dumps(told)},
    )
    return cast("Table", SimpleNamespace(metadata=metadata))


def _lost(table: Table, **more: Any) -> bool:
    try:
        rules = {"on_rollback": "stop", "branch": "main", "dead_letter_table_name": "dead", **more}
        require_reprocessed_rows("orders", {"t": table}, **rules)
    except PositionLost:
        return True
    return False


def test_a_rollback_is_distinguished_from_expired_snapshots() -> None:
    assert not _lost(_table(1, 2, 3, r=2))
    assert _lost(_table(1, beside=(2,), r=2))
    assert not _lost(_table(1, beside=(2,), r=2), on_rollback="skip")
    # All up to it have expired, and nothing was rolled back.
    assert not _lost(_table(3, 4, first=2, r=2))
    assert not _lost(_table(3, 4, r=2))
    # It was rolled back to 3, and then 1, 2 and 5 expired: 3 would have gone before 5.
    assert _lost(_table(3, 6, first=2, r=5))
    assert _lost(_table(1, 6, r=5))


def test_a_replayed_snapshot_is_the_one_that_it_repeats() -> None:
    table = _table(1, 9, r=2)
    summary = SimpleNamespace(additional_properties={LakeProperty.REPLAYED_FROM: "2"})
    cast("Any", table.metadata.snapshots[1]).summary = summary
    assert not _lost(table)


def test_the_property_forgets_expired_snapshots_and_reads_what_older_releases_wrote() -> None:
    table = _table(3, 4, first=2, old=2, other=3)
    found = add_reprocessing_run("orders", table.metadata, ReprocessingRun("new", 5, 5))
    told = reprocessing_runs("orders", {f"{LakeProperty.REPROCESSED_PREFIX}orders": found})
    assert told == [ReprocessingRun("other", 3, 3), ReprocessingRun("new", 5, 5)]
    for plain in ("1081e5a2-6c1f-4a55-a10c-09b1a6d1c4f0", "17", "run"):
        assert reprocessing_runs("orders", {f"{LakeProperty.REPROCESSED_PREFIX}orders": plain}) == [
            ReprocessingRun(plain)
        ]
    assert reprocessing_runs("orders", {}) == []
