"""What a plan reads of `main`'s snapshots: each once, whoever asks, and never what is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import StaticPartitionsDefinition
from pyiceberg.exceptions import ValidationException
from pyiceberg.io import FileIO
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.internals.column_metrics import reliable_metrics
from branchlake_dagster.internals.pyiceberg import apply_updates, build_snapshot
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import IcebergTable
from branchlake_dagster.publication import snapshot_files
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.publication.publisher import build_publisher
from branchlake_dagster.publication.replay import IcebergTableFormat, ReplayImpossible
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.publication.table_change import ChangeMode
from branchlake_dagster.tables.replaced_rows import build_replaced_rows as predicate_of
from branchlake_dagster.tables.selection import select_partitions
from branchlake_dagster_tests.internals.plain_pyiceberg import without_null_counts
from branchlake_dagster_tests.publication.workbench import FLAT, SCHEMA, Workbench
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse

DAYS = tuple("abcdefghij")


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each snapshot's manifest list was read, to open a run's files or to plan."""
    found: Counter[int] = Counter()
    real = snapshot_files.read_manifests

    def noted(io: FileIO, snapshot: Snapshot) -> object:
        found[snapshot.snapshot_id] += 1
        return real(io, snapshot)

    monkeypatch.setattr(snapshot_files, "read_manifests", noted)
    return found


def test_runs_that_replaced_a_partition_each_read_every_snapshot_of_main_once(
    bench: Workbench, read: Counter[int]
) -> None:
    bench.seeded([(day, 1) for day in DAYS])
    waiting = [bench.run() for _ in DAYS]
    for day, run in zip(DAYS, waiting, strict=True):
        run.replace(day, [(day, 2)])
    beside = bench.run()
    beside.append([("k", 1)])
    bench.published(beside)
    read.clear()
    bench.published(*waiting)
    assert bench.rows() == [*((day, 2) for day in DAYS), ("k", 1)]
    # Those of the ten runs, that of the one beside, and those that were made for all but the last.
    assert set(read.values()) == {1}
    own = sum(len(run.table().snapshots()) - 1 for run in waiting)
    assert own == 20
    assert len(read) == 1 + own + own - 2


def test_the_next_pass_of_the_process_reads_none_of_them_again(bench: Workbench, read: Counter[int]) -> None:
    bench.seeded([("a", 1), ("b", 1)])
    runs = [bench.run(), bench.run()]
    for day, run in zip("ab", runs, strict=True):
        run.replace(day, [(day, 2)])
    others = [bench.run(), bench.run()]
    for run in others:
        run.append([("c", 1)])
        bench.published(run)
    read.clear()
    for run in runs:
        candidate = run.candidate()
        assert isinstance(build_publisher(bench.lake).publish([candidate])[candidate.branch], Published)
    assert bench.rows() == [("a", 2), ("b", 2), ("c", 1), ("c", 1)]
    assert set(read.values()) == {1}


def test_partitions_of_like_names_are_distinguished(bench: Workbench) -> None:
    bench.seeded([("a b", 1), ("a+b", 1), ("null", 1)])
    table = bench.main()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    files = SnapshotFiles().reader_for(table)(snapshot).added
    assert {file.partition for file in files} == {"day=a b", "day=a+b", "day=null"}
    for day in ("a b", "a+b", "null"):
        one = predicate_of(
            select_partitions(
                [day], StaticPartitionsDefinition([day]), {"": "day"}, schema=SCHEMA, table_name="t"
            ),
            SCHEMA,
        )
        assert [file.partition for file in files if file.may_hold(one)] == [f"day={day}"]


def test_what_is_kept_is_bounded(bench: Workbench) -> None:
    bench.seeded([(day, 1) for day in DAYS])
    table = bench.main()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    # Ten files of two columns and their names, and the snapshot itself.
    for most, kept in ((63, False), (64, True)):
        touched = SnapshotFiles(most).reader_for(table)
        first = touched(snapshot)
        assert len(first.added) == 10
        assert (touched(snapshot) is first) is kept


def test_a_column_more_and_another_layout_are_looked_at_anew(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    files, table = SnapshotFiles(), bench.main()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    first = files.reader_for(table)(snapshot)
    assert files.reader_for(bench.main())(snapshot) is first
    (file,) = first.added
    assert (file.partition, file.bounds("id"), first.mode) == ("day=a", (1, 1), None)
    with table.update_schema() as update:
        update.rename_column("id", "number")
    (file,) = files.reader_for(table)(snapshot).added
    assert (file.bounds("id"), file.bounds("number")) == (None, (1, 1))
    with table.update_spec() as change:
        change.add_identity("number")
    assert files.reader_for(table)(snapshot).mode is ChangeMode.OLD_LAYOUT


@pytest.mark.spark
def test_the_bounds_of_sparks_files_are_those_of_all_row_groups(bench: Workbench) -> None:
    """Which the sort order id of a manifest entry is taken for: PyIceberg 0.12 writes none."""
    first = bench.run()
    first.create(spec=FLAT)
    bench.published(first)
    bench.sql(
        "ALTER TABLE {t} SET TBLPROPERTIES ('write.parquet.row-group-size-bytes'='1000',"
        " 'write.parquet.row-group-check-min-record-count'='1')",
        "INSERT INTO {t} SELECT /*+ COALESCE(1) */"
        " CASE id WHEN 998 THEN repeat('a', 5000) WHEN 999 THEN repeat('z', 6000) ELSE 'b' END, id"
        " FROM range(1000)",
    )
    table = bench.main()
    (file,) = (task.file for task in table.scan().plan_files())
    assert len(file.split_offsets or ()) > 1
    assert file.sort_order_id == 0
    metrics = reliable_metrics(file, table.schema().fields)
    low, high = metrics.lower_bounds.get(1, b""), metrics.upper_bounds.get(1, b"\xff")
    assert low <= b"a" * 5000 <= b"z" * 6000 <= high
    assert metrics.lower_bounds[2] < metrics.upper_bounds[2]


def test_bounds_of_a_key_need_a_count_of_its_nulls(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("a", 2)], spec=FLAT)
    table = bench.main()
    (file,) = (task.file for task in table.scan().plan_files())
    snapshot = table.current_snapshot()
    assert snapshot is not None
    (known,) = SnapshotFiles().reader_for(table)(snapshot).added
    assert (known.bounds("day"), known.bounds("id")) == (("a", "a"), (1, 2))
    updates = build_snapshot(
        table,
        added=[without_null_counts(file)],
        removed=[file],
        operation=Operation.OVERWRITE,
        properties={},
        written_paths=[],
    )
    later = apply_updates(table.metadata, updates)
    snapshot = later.current_snapshot()
    assert snapshot is not None
    (unknown,) = SnapshotFiles().reader_for(table)(snapshot).added
    assert (unknown.bounds("day"), unknown.bounds("id")) == (None, None)


def test_a_file_that_does_not_exist_cannot_be_replaced(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 1)])
    before = bench.main()
    run = bench.run()
    run.replace("a", [("a", 2)])
    bench.published(run)
    gone = next(task.file for task in before.scan("day = 'a'").plan_files())
    written: list[str] = []
    with raising(ValidationException, gone.file_path):
        build_snapshot(
            bench.main(),
            added=(),
            removed=[gone],
            operation=Operation.DELETE,
            properties={},
            written_paths=written,
        )
    assert written == []


def test_a_replay_that_would_remove_what_is_gone_is_refused_and_leaves_nothing(bench: Workbench) -> None:
    bench.seeded([("a", 1)])
    tables, key = IcebergTableFormat(bench.lake.catalog()), bench.key()

    def now(ref: str = MAIN) -> IcebergTable:
        found = bench.lake.nessie.content(ref, key)
        assert isinstance(found, IcebergTable)
        return found

    before, run, other = now(), bench.run(), bench.run()
    run.append([("b", 1)])
    run.replace("a", [("a", 2)])
    other.replace("a", [("a", 3)])
    bench.published(other)
    after = now(run.name)
    folder = Path(bench.main().location().removeprefix("file://")) / "metadata"
    there = sorted(folder.iterdir())
    with raising(ReplayImpossible, table=f"{bench.namespace}.t") as refused:
        tables.replay(key, tables.load_change(key, before, after), after, tables.open(key, now()))
    assert isinstance(refused.value.__cause__, ValidationException)
    assert sorted(folder.iterdir()) == there
