"""Records that an ingestion keeps as they were received, and their decoding by a later decoder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyspark import cloudpickle

from branchlake_dagster.cli.main import main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.rows import RowReader
from branchlake_dagster.ingest import divided_reprocessing
from branchlake_dagster.ingest.batch_context import BatchContext
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.errors import RowsNotIdentified
from branchlake_dagster.ingest.formats import Decoded
from branchlake_dagster.ingest.ingest_batch import BatchResult, ingest_batch
from branchlake_dagster.ingest.raw_reprocessing import (
    RawInterval,
    count_kept_records,
    reprocess_raw,
)
from branchlake_dagster.ingest.raw_slice import RawReprocessingResult
from branchlake_dagster.ingest.record_frames import find_unwritable_records
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection, reprocess_batch
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.ingest.test_unwritable import ANY_TIME, NANOSECONDS
from branchlake_dagster_tests.suite.kafka import Broker, Message, as_environment
from branchlake_dagster_tests.suite.raised import raising

# Spark's workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

READING = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
ATTRIBUTES: dict[str, Any] = {"part": "partition", "pos": "offset"}
ALWAYS = RawInterval(datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))


def decoder(*, factor: int = 1, days: int = 0, reads: str = r"^\d+:\d+$") -> Decoded:
    """A decoder of `id:n`. `n` is multiplied, the day is moved, and only values that match are decoded."""

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        texts = values.cast(pa.string())
        is_good = pc.fill_null(pc.match_substring_regex(texts, reads), fill_value=False)
        parts = pc.split_pattern(pc.if_else(is_good, texts, "0:0"), ":")
        ids, numbers = (pc.list_element(parts, index).cast(pa.int64()) for index in (0, 1))
        day_us = pc.multiply(pc.add(pc.bit_wise_and(ids, 1), days), 86_400_000_000)
        columns = [ids, pc.multiply(numbers, factor), day_us.cast(pa.timestamp("us", "UTC"))]
        reasons = pc.if_else(is_good, pa.scalar(None, pa.string()), "not a reading")
        return pa.StructArray.from_arrays(columns, fields=list(READING)), reasons

    return Decoded(decode, READING)


@pytest.fixture
def keeping(driving: Driving, kafka: Broker, namespace: str) -> Callable[..., tuple[Driver, str]]:
    """Makes an ingestion that keeps its records, and its topic."""

    def make(
        *, partitions: int = 1, topic_config: Mapping[str, str] = MappingProxyType({}), **options: Any
    ) -> tuple[Driver, str]:
        topic = kafka.topic(partitions=partitions, **topic_config)
        table = IngestTable(
            key=[namespace, "t"],
            columns={"id": "bigint", "n": "bigint", "at": "timestamp"},
            attributes=ATTRIBUTES,
            layout=["day(at)"],
        )
        declared = {"format": decoder(), "keep_value": True} | options
        return driving(Ingest(name=namespace, topics=[topic], tables=[table], **declared)), topic

    return make


def rows(drive: Driver) -> list[tuple[int, int, int]]:
    """Id, number and day since 1970 of each row, by position."""
    found = sorted(drive.rows(0), key=lambda row: (row["part"], row["pos"]))
    return [(row["id"], row["n"], (row["at"] - datetime(1970, 1, 1, tzinfo=UTC)).days) for row in found]


def kept(drive: Driver) -> list[dict[str, Any]]:
    return sorted(drive.rows(2), key=lambda row: (row["partition"], row["offset"]))


def letters(drive: Driver) -> list[tuple[int, bool]]:
    """Offset of each dead letter, and whether it waits."""
    return sorted((row["offset"], row["reprocessed_in"] is None) for row in drive.rows(1))


def decode_again(
    drive: Driver, run: str, interval: RawInterval = ALWAYS, **options: Any
) -> tuple[BatchContext, RawReprocessingResult | None]:
    place = drive.place()
    session = drive.lake.spark_session(place.branch)
    try:
        context = replace(place, run_id=run, session=lambda: session)
        return context, reprocess_raw(drive.ingest, context, interval, **options)
    finally:
        session.stop()


def changed_rows(table: Table, since: Table) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Id and number of the added and of the removed rows, as a consumer of the changes gets them."""
    change = capture_change(table, current_position(since), name="t")
    found = RowReader(table, change).read()
    before, after = (
        sorted(zip(part["id"].to_pylist(), part["n"].to_pylist(), strict=True))
        for part in (found.removed, found.added)
    )
    return [one for one in after if one not in before], [one for one in before if one not in after]


# -- what is kept ----------------------------------------------------------------------------------------


def test_each_record_is_kept_in_the_commit_of_its_row(
    keeping: Callable[..., tuple[Driver, str]], kafka: Broker
) -> None:
    drive, topic = keeping()
    headers = [("h", b"\x00\xff"), ("none", None)]
    kafka.send(topic, [Message(b"1:10", b"k", headers=headers), b"bad", Message(None, b"k")])
    result = drive.batch()
    assert (rows(drive), letters(drive)) == ([(1, 10, 1)], [(1, True), (2, True)])
    found = kept(drive)
    assert [(row["offset"], row["key"], row["value"]) for row in found] == [
        (0, b"k", b"1:10"),
        (1, None, b"bad"),
        (2, b"k", None),
    ]
    assert found[0]["headers"] == [{"key": "h", "value": b"\x00\xff"}, {"key": "none", "value": None}]
    assert {row["topic"] for row in found} == {topic}
    assert {row["batch"] for row in found} == {result.commit_id}
    assert found[0]["timestamp"] is not None
    # No record is read twice, and the table knows its offsets like the others.
    assert drive.look().plan.is_empty
    kafka.send(topic, [b"2:20"])
    base = drive.lake.nessie.reference("main").hash
    result = drive.batch(publish=False)
    (entry, *_) = drive.lake.nessie.log(result.head.name, limit=1, fetch_operations=True)
    assert entry.commit.parent_hashes[0] == base
    assert len(entry.operations) == 3  # one commit has changed all three tables
    drive.batch()
    assert [row["offset"] for row in kept(drive)] == [0, 1, 2, 3]


def test_a_table_that_is_filled_again_keeps_no_record_twice(
    keeping: Callable[..., tuple[Driver, str]], kafka: Broker
) -> None:
    drive, topic = keeping(on_rollback="replay")
    kafka.send(topic, [b"1:10"])
    drive.batch()
    kafka.send(topic, [b"2:20", b"bad"])
    drive.batch()
    first = drive.table(0).metadata.snapshots[0].snapshot_id
    drive.table(0).manage_snapshots().rollback_to_snapshot(first).commit()
    kafka.send(topic, [b"3:30"])
    while not drive.look().plan.is_empty:
        drive.batch()
    assert [row[0] for row in rows(drive)] == [1, 2, 3]
    assert [row["offset"] for row in kept(drive)] == [0, 1, 2, 3]
    # Kept records that were rolled back are read again, and no row comes twice.
    drive.table(2).manage_snapshots().rollback_to_snapshot(
        drive.table(2).metadata.snapshots[0].snapshot_id
    ).commit()
    assert len(kept(drive)) == 1
    while not drive.look().plan.is_empty:
        drive.batch()
    assert [row["offset"] for row in kept(drive)] == [0, 1, 2, 3]
    assert ([row[0] for row in rows(drive)], len(letters(drive))) == ([1, 2, 3], 1)


def _batch_at(drive: Driver, moment: datetime) -> BatchResult:
    place = drive.place()
    result = ingest_batch(drive.look(place.branch), place, drive.records, tasks=2, clock=lambda: moment)
    drive.publish(place, result)
    return result


def test_old_records_are_removed_by_whole_days_without_reading_them(
    keeping: Callable[..., tuple[Driver, str]], kafka: Broker
) -> None:
    drive, topic = keeping(keep_value_days=2)
    first = datetime(2026, 11, 1, 22, tzinfo=UTC)
    expired = []
    days = [(0, (b"1:1", b"2:2")), (3, (b"3:3",)), (50, (b"4:4",)), (51, (b"5:5",)), (75, (b"6:6",))]
    for hours, values in days:
        kafka.send(topic, values)
        if hours == 75:
            # Nobody can read files that are gone.
            for task in (
                drive.table(2).scan(row_filter="received_at < '2026-11-03T00:00:00+00:00'").plan_files()
            ):
                Path(task.file.file_path.removeprefix("file://")).unlink()
        expired.append(_batch_at(drive, first + timedelta(hours=hours)).expired_record_count)
    # At 50 h it is midnight of November 4th: the 1st ended more than two days ago.
    assert expired == [0, 0, 2, 0, 1]
    assert [row["value"] for row in kept(drive)] == [b"4:4", b"5:5", b"6:6"]
    assert len(rows(drive)) == 6
    removals = [
        one
        for one in drive.table(2).metadata.snapshots
        if one.summary and one.summary.operation is Operation.DELETE
    ]
    assert [one.summary["deleted-records"] for one in removals if one.summary] == ["2", "1"]


# -- decoded again ---------------------------------------------------------------------------------------


def test_a_corrected_decoder_changes_rows_days_and_dead_letters(
    keeping: Callable[..., tuple[Driver, str]], kafka: Broker
) -> None:
    """Rows from before the option stay, and so does a record that fails batches: it is left to its dead letter."""
    drive, topic = keeping(topic_config=ANY_TIME, keep_value=False)
    kafka.send(topic, [b"7:70"])
    drive.batch()
    with raising(ConfigurationError, reason="records_not_kept"):
        decode_again(drive, "run-0")
    drive.ingest = replace(drive.ingest, keep_value=True)
    session = drive.lake.spark_session()
    try:
        assert count_kept_records(session, drive.known, ALWAYS).first_received is None
        assert decode_again(drive, "run-0")[1] is None
        kafka.send(topic, [b"1:10", b"2:20", b"x3:30"])
        drive.batch()
        kafka.send(topic, [b"4:40", b"99:1", Message(b"5:50", at=NANOSECONDS)])
        drive.batch()
        counts = count_kept_records(session, drive.known, ALWAYS)
    finally:
        session.stop()
    assert (counts.total, counts.note(ALWAYS) is not None) == (6, True)
    assert counts.first_received is not None
    assert counts.by_day[0][0] == counts.first_received.date().isoformat()
    assert sum(number for _, number in counts.by_day) == 6
    assert counts.note(RawInterval(counts.first_received, ALWAYS.until)) is None
    assert [row["value"] for row in kept(drive)][-1] == b"5:50"
    before = drive.table(0)
    old = (7, 70, 1)
    assert rows(drive) == [old, (1, 10, 1), (2, 20, 0), (4, 40, 0), (99, 1, 1)]
    assert letters(drive) == [(3, True), (6, True)]

    # Today's decoder reads x3, no longer reads 99, and reads another number and day.
    def corrected(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        texts = pc.replace_substring(values.cast(pa.string()), "x", "")
        return decoder(factor=2, days=3, reads=r"^[1-4]:\d+$").decode(texts.cast(pa.binary()))

    drive.ingest = replace(drive.ingest, format=Decoded(corrected, READING))
    lines: list[str] = []
    place, result = decode_again(drive, "run-1", report=lines.append, slice_records=3)
    assert result is not None
    assert len(lines) == 2  # a slice has whole batches
    counted = {name: result.counts.get(name, 0) for name in ("records", "dead", "rows_insert", "rows_update")}
    assert counted == {"records": 5, "dead": 1, "rows_insert": 1, "rows_update": 3}
    assert (result.counts["rows_delete"], result.counts["letters_mark"]) == (1, 1)
    assert rows(drive)[1] == (1, 10, 1)  # nothing is on main yet
    assert drive.merge(place)
    expected = [old, (1, 20, 4), (2, 40, 3), (3, 60, 4), (4, 80, 3)]
    assert rows(drive) == expected
    assert letters(drive) == [(3, False), (5, True), (6, True)]
    assert changed_rows(drive.table(0), before) == (
        [(1, 20), (2, 40), (3, 60), (4, 80)],
        [(1, 10), (2, 20), (4, 40), (99, 1)],
    )

    # A repetition finds nothing to change, in this run's second attempt and in another run.
    again, second = decode_again(drive, "run-2")
    assert second is not None
    assert second.changed == set()
    assert not [name for name in second.counts if name.startswith(("rows_", "letters_"))]
    assert drive.lake.nessie.diff_at("main", again.branch).entries == ()
    assert decode_again(drive, "run-1")[1] is None
    empty = RawInterval(datetime(2000, 1, 1, tzinfo=UTC), datetime(2000, 1, 2, tzinfo=UTC))
    assert decode_again(drive, "run-3", empty)[1] is None
    assert drive.look().plan.is_empty
    kafka.send(topic, [b"1:1"])
    drive.batch()
    assert rows(drive) == [*expected, (1, 2, 4)]


def _dying_decoder(dies: bytes) -> Decoded:
    """A decoder that multiplies `n` by 2, and ends the process at the value `dies`."""

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        if dies in values.to_pylist():
            os._exit(7)
        return decoder(factor=2).decode(values)

    return Decoded(decode, READING)


def test_a_kept_record_that_ends_the_worker_is_a_dead_letter(
    keeping: Callable[..., tuple[Driver, str]], kafka: Broker
) -> None:
    drive, topic = keeping()
    kafka.send(topic, [b"1:10", b"2:20", Message(b"3:30", b"k", headers=[("h", b"\x00")])])
    drive.batch()
    drive.ingest = replace(drive.ingest, format=_dying_decoder(b"3:30"))
    place, result = decode_again(drive, "run-1")
    assert result is not None
    assert {name: result.counts[name] for name in ("records", "dead", "dead/unwritable", "rows_delete")} == {
        "records": 3,
        "dead": 1,
        "dead/unwritable": 1,
        "rows_delete": 1,
    }
    assert len(result.notes) == 1
    assert drive.merge(place)
    assert rows(drive) == [(1, 20, 1), (2, 40, 0)]
    (letter,) = drive.rows(1)
    assert (letter["offset"], letter["error_kind"], letter["table"]) == (2, "unwritable", None)
    assert (letter["key"], letter["value"], letter["reprocessed_in"]) == (b"k", b"3:30", None)
    assert letter["headers"] == [{"key": "h", "value": b"\x00"}]
    assert [row["value"] for row in kept(drive)] == [b"1:10", b"2:20", b"3:30"]
    assert [*drive.lake.nessie.entries("main", filter="entry.name.contains('__staged_')")] == []


@pytest.mark.parametrize("max_passes", [64, pytest.param(2, marks=pytest.mark.soak)])
def test_a_dead_letter_that_ends_the_worker_stays_one(
    keeping: Callable[..., tuple[Driver, str]],
    kafka: Broker,
    monkeypatch: pytest.MonkeyPatch,
    max_passes: int,
) -> None:
    """Dead letters that the search does not reach wait as before."""
    monkeypatch.setattr(
        divided_reprocessing,
        "find_unwritable_records",
        partial(find_unwritable_records, max_passes=max_passes),
    )
    drive, topic = keeping(format=decoder(reads="^nothing$"))
    kafka.send(topic, [b"1:10", b"3:30", b"2:20"])
    drive.batch()
    drive.ingest = replace(drive.ingest, format=_dying_decoder(b"3:30"))
    place = drive.place()
    session = drive.lake.spark_session(place.branch)
    try:
        context = replace(place, run_id="run-1", session=lambda: session)
        result = reprocess_batch(drive.ingest, context, DeadLetterSelection())
    finally:
        session.stop()
    assert result is not None
    assert drive.merge(place)
    waiting = sorted(
        (row["offset"], row["error_kind"]) for row in drive.rows(1) if row["reprocessed_in"] is None
    )
    if max_passes == 64:
        assert (result.scanned.counts["records"], result.scanned.counts["dead"]) == (3, 1)
        assert rows(drive) == [(1, 20, 1), (2, 40, 0)]
        assert waiting == [(1, "unwritable")]
    else:
        assert len(result.notes) == 2
        assert (result.scanned.counts["records"], result.scanned.counts["dead"]) == (2, 1)
        assert rows(drive) == [(1, 20, 1)]
        assert waiting == [(1, "unwritable"), (2, "format")]


def test_only_rows_that_differ_are_changes(keeping: Callable[..., tuple[Driver, str]], kafka: Broker) -> None:
    drive, topic = keeping()
    kafka.send(topic, [b"0:5", b"1:0", b"2:5", b"3:0"])
    drive.batch()
    before = drive.table(0)
    drive.ingest = replace(drive.ingest, format=decoder(factor=3))
    base_hash = drive.lake.nessie.reference("main").hash
    place, result = decode_again(drive, "run-1")
    assert result is not None
    assert result.counts["rows_update"] == 2
    assert isinstance(drive.publish_run(place, base_hash), Published)
    assert changed_rows(drive.table(0), before) == ([(0, 15), (2, 15)], [(0, 5), (2, 5)])

    # Its undo restores the rows. The next decoding changes them again, and nothing is read twice.
    PublicationUndo.of_lake(drive.lake).undo(find_publication(drive.lake.nessie, "run-1"))
    assert [number for _, number, _ in rows(drive)] == [5, 0, 5, 0]
    kafka.send(topic, [b"4:1"])
    drive.batch()
    assert [number for _, number, _ in rows(drive)] == [5, 0, 5, 0, 3]
    place, result = decode_again(drive, "run-2")
    assert result is not None
    assert result.counts["rows_update"] == 2
    assert drive.merge(place)
    assert [number for _, number, _ in rows(drive)] == [15, 0, 15, 0, 3]
    assert len(kept(drive)) == 5


@pytest.mark.parametrize("slice_records", [None, 1])
def test_records_that_arrive_meanwhile_are_kept(
    keeping: Callable[..., tuple[Driver, str]], kafka: Broker, slice_records: int | None
) -> None:
    """The bounds of their positions overlap those of the decoded rows, as partitions differ in length.

    Of two runs at once one is published.
    """
    drive, topic = keeping(partitions=2)
    kafka.send(
        topic, [*(Message(b"%d:1" % one, partition=0) for one in range(4)), Message(b"bad", partition=1)]
    )
    drive.batch()
    base = drive.lake.nessie.reference("main").hash
    drive.ingest = replace(drive.ingest, format=decoder(factor=7))
    place, result = decode_again(drive, "run-1", slice_records=slice_records)
    assert result is not None
    second = decode_again(drive, "run-2")[0]
    kafka.send(
        topic, [Message(b"5:1", partition=1), Message(b"6:1", partition=0), Message(b"bad", partition=0)]
    )
    drive.batch()
    assert isinstance(drive.publish_run(place, base), Published)
    assert isinstance(drive.publish_run(second, base), Refused)
    assert rows(drive) == [(0, 7, 0), (1, 7, 1), (2, 7, 0), (3, 7, 1), (6, 7, 0), (5, 7, 1)]
    assert letters(drive) == [(0, True), (5, True)]
    assert len(kept(drive)) == 8


def test_rows_whose_records_are_not_known_stop_it(
    keeping: Callable[..., tuple[Driver, str]], kafka: Broker
) -> None:
    drive, topic = keeping()
    kafka.send(topic, [b"1:1"])
    drive.batch()
    ingest = drive.ingest
    (table,) = ingest.tables
    drive.ingest = replace(ingest, tables=[replace(table, attributes={"part": "partition"})])
    with raising(RowsNotIdentified, "attributes", reason="position_columns_missing", subject="offset"):
        decode_again(drive, "run-1")
    drive.ingest = replace(ingest, tables=[replace(table, attributes={"part": "partition", "o": "offset"})])
    with raising(RowsNotIdentified, reason="position_columns_missing", subject="o"):
        decode_again(drive, "run-1")
    drive.ingest = replace(ingest, topics=[topic, kafka.topic()])
    with raising(RowsNotIdentified, reason="position_columns_missing", subject="topic"):
        decode_again(drive, "run-1")
    drive.ingest = replace(ingest, tables=[replace(table, mode="upsert", keys=["id"])])
    with raising(ConfigurationError, reason="not_reprocessable"):
        decode_again(drive, "run-1")
    drive.ingest = ingest
    schema = drive.table(0).schema().as_arrow()
    drive.table(0).append(pa.Table.from_pylist([{"id": 7}], schema))
    with raising(RowsNotIdentified, reason="rows_without_position"):
        decode_again(drive, "run-1")


def test_an_interval_without_time_is_refused() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    with raising(ConfigurationError, reason="interval_empty"):
        RawInterval(moment, moment)
    assert RawInterval.from_tag(ALWAYS.to_tag()) == ALWAYS
    with raising(ConfigurationError):
        Ingest(name="a", topics=["a"], tables=[IngestTable(key="raw/a")], keep_value=True, keep_value_days=0)


@pytest.mark.parametrize("slice_records", [None, 1])
def test_records_move_to_tables_that_they_name_now(
    driving: Driving, kafka: Broker, namespace: str, slice_records: int | None
) -> None:
    topic = kafka.topic()
    family = IngestTable(
        key=[namespace, "{route}"], columns={"id": "bigint"}, route="a|b", attributes=ATTRIBUTES
    )
    drive = driving(
        Ingest(
            name=namespace,
            topics=[topic],
            tables=[family],
            route_by="kind",
            on_unrouted="skip",
            keep_value=True,
        )
    )

    def ids(name: str) -> list[int]:
        table = drive.lake.catalog("main").load_table((namespace, name))
        return sorted(table.scan().to_arrow()["id"].to_pylist())

    kinds = ("a", "b", "c", "d")
    for some in [(one,) for one in kinds] if slice_records else [kinds]:
        kafka.send(topic, [json.dumps({"id": one, "kind": kind}).encode() for kind in some for one in (1, 2)])
        drive.batch()
    assert (ids("a"), ids("b")) == ([1, 2], [1, 2])
    drive.ingest = replace(drive.ingest, tables=[replace(family, route="b|c")])
    place, result = decode_again(drive, "run-1", slice_records=slice_records)
    assert result is not None
    # Records of the route d are still left out. Those of a have no table by the present declaration.
    assert result.counts.get("dead", 0) == 0
    assert drive.merge(place)
    assert (ids("b"), ids("c")) == ([1, 2], [1, 2])
    assert ids("a") == []
    kafka.send(topic, [b'{"id": 3, "kind": "c"}'])
    drive.batch()
    assert ids("c") == [1, 2, 3]


# -- the command -----------------------------------------------------------------------------------------

_MODULE = """
import json
from pathlib import Path

from branchlake_dagster import Ingest, IngestTable, Json, branchlake_definitions, ingest_definitions

table = IngestTable(
    key=["{name}", "t"],
    columns={{"id": "bigint"}},
    route="{route}",
    attributes={{"part": "partition", "pos": "offset"}},
)
orders = Ingest(name="{name}", topics=["{topic}"], tables=[table], route_by="kind", keep_value=True)
defs = branchlake_definitions(definitions=ingest_definitions(orders))
"""


def test_the_command_counts_and_decodes_in_a_run(
    driving: Driving, kafka: Broker, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[IngestTable(key=[namespace, "t"])]))
    kafka.send(topic, [json.dumps({"id": one, "kind": kind}).encode() for one, kind in ((1, "a"), (2, "b"))])
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(drive.lake.settings.state_dir))
    for name, value in as_environment(kafka.cluster).items():
        monkeypatch.setenv(name, value)
    interval = ["--since", "2026-01-01", "--until", "2100-01-01"]

    def module(name: str, route: str) -> str:
        text = _MODULE.format(name=namespace, topic=topic, route=route)
        (tmp_path / f"{name}{namespace}.py").write_text(text)
        return f"{name}{namespace}"

    def asked(location: str, *more: str) -> Any:
        done = CliRunner().invoke(
            main, ["reprocess", namespace, "-m", location, "--from-raw", "--json", *interval, *more]
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    narrow, wide = module("n", "a"), module("w", "a|b")
    assert asked(narrow, "--dry-run") == {"letters": [], "days": [], "kept_since": None, "run": None}
    with dg.DagsterInstance.get() as instance:
        repository = __import__(narrow).defs.get_repository_def()
        done = repository.get_job(f"ingest_{namespace}_job").execute_in_process(instance=instance)
        keys = {one.to_user_string() for one in _materialized(instance, done.run_id)}
    assert keys == {
        f"{namespace}/{one}" for one in ("t", f"{namespace}_dead_letters", f"{namespace}_kept_records")
    }
    assert drive.merge(replace(drive.place(), branch=run_branch_name(done.run_id)))
    assert [row["id"] for row in drive.rows(0)] == [1]
    counted = asked(wide, "--dry-run")
    assert ([one["records"] for one in counted["days"]], counted["run"]) == ([2], None)
    assert counted["kept_since"] is not None
    decoded = asked(wide)
    branch = drive.lake.catalog(run_branch_name(decoded["run"]))
    found = branch.load_table((namespace, "t")).scan().to_arrow()
    assert sorted(found["id"].to_pylist()) == [1, 2]
    with dg.DagsterInstance.get() as instance:
        keys = {one.to_user_string() for one in _materialized(instance, decoded["run"])}
    assert keys == {f"{namespace}/t", f"{namespace}/{namespace}_dead_letters"}
    bad = CliRunner().invoke(main, ["reprocess", namespace, "-m", wide, "--from-raw"])
    assert bad.exit_code != 0


def _materialized(instance: dg.DagsterInstance, run_id: str) -> list[dg.AssetKey]:
    logs = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    events = [one.get_dagster_event() for one in logs]
    return [event.asset_key for event in events if event.asset_key is not None]
