"""A compaction on `main` never makes a run fail: its files are mapped, restored, or the run's state is taken."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.sorting import SortDirection
from pyiceberg.transforms import IdentityTransform

from branchlake_dagster.expiry.manifest_rewrite import ManifestRewriter
from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.expiry.snapshot_expiry import SnapshotExpirer
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.rows import RowReader, drop_unchanged_rows
from branchlake_dagster.internals.column_metrics import DataPaths
from branchlake_dagster.internals.pyiceberg import commit_compaction, write_data_files
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.compaction_reversal import (
    drop_reversed_compactions,
    reverse_compactions,
)
from branchlake_dagster.publication.conflicts import find_overlap, map_over_compactions
from branchlake_dagster.publication.table_change import ChangeMode, DeleteFile, SnapshotChange
from branchlake_dagster.stored_names import LakeProperty, MaintenanceKind
from branchlake_dagster_tests.publication.rebase.test_carried_metadata import branch, tag
from branchlake_dagster_tests.publication.rebase.test_overlap import (
    BIG,
    F1,
    F2,
    MERGED,
    change,
    deleting,
    file,
    sized,
    step,
)
from branchlake_dagster_tests.publication.workbench import Run, Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

UPSERT_F1 = step(ChangeMode.UPSERT, (file("new", ids=(1, 2)),), (F1,), ("id",))


def mapped(run: SnapshotChange, *main: SnapshotChange) -> tuple[tuple[set[str], set[str]], ...]:
    """The removed and the added files of each step of the adapted run."""
    adapted = reverse_compactions(map_over_compactions(change(run), change(*main)), change(*main))
    assert find_overlap(adapted, change(*main)) is None
    return tuple(
        ({each.path for each in one.removed}, {each.path for each in one.added}) for one in adapted.steps
    )


def test_an_upsert_of_one_of_the_compacted_files_restores_them() -> None:
    assert mapped(UPSERT_F1, MERGED) == (({"big"}, {"f1", "f2"}), ({"f1"}, {"new"}))


def test_an_upsert_of_all_compacted_files_restores_them_too() -> None:
    # An append of main between the keys of the two files would meet the bounds of the compacted file.
    both = step(ChangeMode.UPSERT, (file("new", ids=(1, 2)),), (F1, F2), ("id",))
    assert mapped(both, MERGED) == (({"big"}, {"f1", "f2"}), ({"f1", "f2"}, {"new"}))


def test_a_compaction_of_compacted_files_is_reversed_first() -> None:
    again = SnapshotChange(10, ChangeMode.COMPACT, (sized("bigger", 9),), (BIG, sized("f3", 2)))
    assert mapped(UPSERT_F1, MERGED, again) == (
        ({"bigger"}, {"big", "f3"}),
        ({"big"}, {"f1", "f2"}),
        ({"f1"}, {"new"}),
    )


def test_only_the_partition_that_the_run_changed_is_restored() -> None:
    other = sized("other", 2, "day=2")
    both = replace(
        MERGED, added=(BIG, sized("big2", 4, "day=2")), removed=(F1, F2, other, sized("o2", 2, "day=2"))
    )
    assert mapped(UPSERT_F1, both) == (({"big"}, {"f1", "f2"}), ({"f1"}, {"new"}))


@pytest.mark.parametrize(
    "main",
    [
        (SnapshotChange(9, ChangeMode.COMPACT, (sized("big", 6),), (F1, F2)),),  # deletes were folded in
        (MERGED, step(ChangeMode.REWRITE, (), (BIG,), run="them")),
        (MERGED, deleting(DeleteFile("d", "day=1", DataPaths(b"big", b"big")))),
    ],
)
def test_rows_never_come_back(main: tuple[SnapshotChange, ...]) -> None:
    run = reverse_compactions(change(UPSERT_F1), change(*main))
    assert find_overlap(run, change(*main)) is not None


def test_a_reversed_compaction_counts_as_never_made() -> None:
    reversal = SnapshotChange(11, ChangeMode.COMPACT, (F1, F2), (BIG,))
    kept = drop_reversed_compactions([MERGED, UPSERT_F1, reversal])
    assert [(one.snapshot_id, one.touched_files) for one in kept] == [
        (9, ()),
        (7, UPSERT_F1.touched_files),
        (11, ()),
    ]
    assert drop_reversed_compactions([MERGED, replace(reversal, added=(F1,))])[0] == MERGED


# -- on tables -----------------------------------------------------------------------------------------


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def compact(bench: Workbench) -> None:
    """Publish a compaction of each partition's files."""
    run = bench.run()
    table = run.table()
    transaction, commit_id, numbers = table.transaction(), uuid.uuid4(), itertools.count()
    producer = transaction.update_snapshot().overwrite(commit_uuid=commit_id)
    tasks = sorted(table.scan().plan_files(), key=lambda task: str(task.file.partition))
    for _, group in itertools.groupby(tasks, key=lambda task: str(task.file.partition)):
        members = list(group)
        scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
        for task in members:
            producer.delete_data_file(task.file)
        for new_file in write_data_files(
            table.metadata, scan.to_table(members), table.io, commit=commit_id, numbers=numbers
        ):
            producer.append_data_file(new_file)
    commit_compaction(transaction, producer)
    bench.published(run)


def merge_manifests(bench: Workbench) -> None:
    (result,) = ManifestRewriter.of_lake(bench.lake).run([bench.key().name], min_count=2)
    assert result.commit is not None


def expire(bench: Workbench, open_run: Run) -> None:
    """Remove all snapshots but the current one and the base of a run."""
    for ref in list(bench.lake.nessie.references()):
        if ref.name.startswith("run-") and ref.name != open_run.name:
            bench.lake.nessie.delete_branch(ref.name, expected_hash=ref.hash)
    policy = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=timedelta(0))
    expirer = SnapshotExpirer.of_lake(bench.lake)
    result = expirer.run(expirer.plan([bench.key().name], policy))
    assert [table.expired_count for table in result.tables] == [2]


def three_files(bench: Workbench) -> None:
    bench.seeded([("a", 1), ("b", 5)])
    for number in (2, 3):
        run = bench.run()
        run.append([("a", number)])
        bench.published(run)


ROWS = [("a", 1), ("a", 2), ("a", 3), ("b", 5)]
CHANGES: dict[str, tuple[Callable[[Run], None], list[tuple[str, int]]]] = {
    "append": (lambda run: run.append([("a", 9)]), [*ROWS[:3], ("a", 9), ROWS[3]]),
    "replace": (lambda run: run.replace("a", [("a", 9)]), [("a", 9), ("b", 5)]),
    "upsert": (lambda run: run.upsert([("c", 2)], "id"), [("a", 1), ("a", 3), ("b", 5), ("c", 2)]),
    "replace table": (lambda run: run.replace_table([("z", 1)]), [("z", 1)]),
    "sort order": (lambda run: set_sort_order(run), ROWS),
}


def set_sort_order(run: Run) -> None:
    with run.table().update_sort_order() as update:
        update.asc("id", IdentityTransform())
    assert SortDirection.ASC in {one.direction for one in run.table().sort_order().fields}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("is_run_first", [True, False])
def test_a_run_and_a_compaction_in_both_orders(bench: Workbench, what: str, is_run_first: bool) -> None:
    three_files(bench)
    act, rows = CHANGES[what]
    position = current_position(bench.main())
    run = bench.run()
    if is_run_first:
        act(run)
        compact(bench)
    else:
        compact(bench)
        act(run)
    compacted_position = current_position(bench.main())
    bench.published(run)
    assert bench.rows() == rows
    for since, before in ((position, ROWS), (compacted_position, ROWS)):
        # Consumers see the run's change alone, whether they had consumed the compaction or not.
        captured = capture_change(bench.main(), since, name="t")
        changed = drop_unchanged_rows(RowReader(bench.main(), captured).read())
        consumed = sorted(
            [*before, *((row["day"], row["id"]) for row in changed.added.to_pylist())],
        )
        for row in changed.removed.to_pylist():
            consumed.remove((row["day"], row["id"]))
        assert consumed == rows
    later = bench.run()  # opened after it, so the history holds for it too
    later.replace("a", [("a", 70)])
    bench.published(later)
    assert bench.rows() == [("a", 70), *(row for row in rows if row[0] != "a")]


@pytest.mark.parametrize("what", CHANGES)
def test_a_run_beside_a_compaction_and_an_expiry(bench: Workbench, what: str) -> None:
    three_files(bench)
    act, rows = CHANGES[what]
    run = bench.run()
    act(run)
    compact(bench)
    expire(bench, run)
    kept_ids = {snapshot.snapshot_id for snapshot in bench.main().metadata.snapshots}
    bench.published(run)
    assert bench.rows() == rows
    parents = {one.snapshot_id: one.parent_snapshot_id for one in bench.main().metadata.snapshots}
    assert kept_ids <= parents.keys()
    assert len([one for one in parents.values() if one not in parents]) == 1  # one history without a gap


def drop_table(run: Run) -> None:
    run.catalog.drop_table((run.bench.namespace, "t"))


def create_again(run: Run) -> None:
    drop_table(run)
    run.create()
    run.append([("z", 1)])


MAINTENANCE: dict[str, Callable[[Workbench, Run], None]] = {
    "compaction": lambda bench, _: compact(bench),
    "merge of manifests": lambda bench, _: merge_manifests(bench),
    "expiry": expire,
}


@pytest.mark.parametrize("maintenance", MAINTENANCE)
@pytest.mark.parametrize(("act", "rows"), [(drop_table, None), (create_again, [("z", 1)])])
def test_a_run_that_ends_the_tables_history(
    bench: Workbench,
    maintenance: str,
    act: Callable[[Run], None],
    rows: list[tuple[str, int]] | None,
) -> None:
    """A dropped or created table cannot be rebased. Maintenance meanwhile must not be the cause of a refusal."""
    three_files(bench)
    run = bench.run()
    act(run)
    MAINTENANCE[maintenance](bench, run)
    bench.published(run)
    if rows is None:
        assert not bench.lake.catalog().table_exists((bench.namespace, "t"))
    else:
        assert bench.rows() == rows


@pytest.mark.parametrize("maintenance", MAINTENANCE)
@pytest.mark.parametrize("act", [tag, branch])
def test_tags_and_branches_of_a_run_stay(
    bench: Workbench, maintenance: str, act: Callable[[Run], None]
) -> None:
    three_files(bench)
    run = bench.run()
    act(run)
    wanted = set(run.table().refs())
    MAINTENANCE[maintenance](bench, run)
    bench.published(run)
    assert set(bench.main().refs()) == wanted
    assert bench.rows() == ROWS


def test_a_tag_of_a_run_on_a_snapshot_that_expired_meanwhile(bench: Workbench) -> None:
    three_files(bench)
    run = bench.run()
    oldest_id = run.table().metadata.snapshots[0].snapshot_id
    run.table().manage_snapshots().create_tag(oldest_id, "first").commit()
    run.replace_table([("z", 1)])
    expire(bench, run)
    bench.published(run)
    assert bench.main().metadata.snapshot_by_id(oldest_id) is not None
    assert bench.rows() == [("z", 1)]
    # Otherwise a query for a time between two entries would get the oldest rows.
    assert oldest_id not in {entry.snapshot_id for entry in bench.main().metadata.snapshot_log}


def test_a_run_that_renames_a_table_beside_maintenance_is_refused(bench: Workbench) -> None:
    three_files(bench)
    run = bench.run()
    run.catalog.rename_table((bench.namespace, "t"), (bench.namespace, "u"))
    compact(bench)
    bench.refused(run)
    assert bench.rows() == ROWS


def test_a_consumer_of_a_merge_of_manifests_goes_on(bench: Workbench) -> None:
    three_files(bench)
    run = bench.run()
    run.replace_table([("z", 1)])
    merge_manifests(bench)
    position = current_position(bench.main())
    later = bench.run()
    later.append([("y", 2)])
    bench.published(run)
    captured = capture_change(bench.main(), position, name="t")
    changed = drop_unchanged_rows(RowReader(bench.main(), captured).read())
    assert changed.removed.num_rows == len(ROWS)
    assert [(row["day"], row["id"]) for row in changed.added.to_pylist()] == [("z", 1)]
    bench.published(later)
    assert bench.rows() == [("y", 2), ("z", 1)]


def test_restored_files_are_a_snapshot_that_changes_no_row(bench: Workbench) -> None:
    three_files(bench)
    run, other = bench.run(), bench.run()
    run.upsert([("c", 2)], "id")
    compact(bench)
    other.append([("b", 6)])
    bench.published(other)  # so the run's own state cannot be taken
    bench.published(run)
    assert bench.rows() == [("a", 1), ("a", 3), ("b", 5), ("b", 6), ("c", 2)]
    reversal, upsert = bench.main().snapshots()[-2:]
    assert reversal.summary is not None
    assert reversal.summary.operation is Operation.REPLACE
    assert reversal.summary[LakeProperty.MAINTENANCE] == MaintenanceKind.COMPACTION_REVERSED
    assert LakeProperty.REPLAYED_FROM not in reversal.summary.additional_properties
    assert upsert.summary is not None
    assert upsert.summary[LakeProperty.RUN_ID] == run.run_id


def test_two_waiting_upserts_of_compacted_files(bench: Workbench) -> None:
    three_files(bench)
    one, two = bench.run(), bench.run()
    one.upsert([("a", 2)], "day", "id")
    two.upsert([("a", 3), ("a", 7)], "day", "id")
    one.append([("a", 8)])
    compact(bench)
    bench.published(one)
    bench.published(two)
    assert bench.rows() == [("a", 1), ("a", 2), ("a", 3), ("a", 7), ("a", 8), ("b", 5)]


def test_a_serializable_run_does_not_see_a_compaction(bench: Workbench) -> None:
    three_files(bench)
    run, late = bench.run(reads=["t"]), bench.run(reads=["t"])
    run.create("u")
    late.create("v")
    compact(bench)
    bench.published(run)
    other = bench.run()
    other.append([("b", 6)])
    bench.published(other)
    assert bench.refused(late).codes == ("read_and_changed",)


def test_a_run_from_between_meets_a_state_that_was_taken(bench: Workbench) -> None:
    three_files(bench)
    old = bench.run()
    compact(bench)
    between = bench.run()
    between.replace("b", [("b", 50)])
    old.replace_table([("a", 1), ("b", 5)])
    set_sort_order(old)
    bench.published(old)
    assert bench.refused(between).codes
    assert bench.rows() == [("a", 1), ("b", 5)]
