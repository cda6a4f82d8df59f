"""A compacted table meets other writers on `main`, open runs, lost replies, consumers and undos."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.compaction.compaction_branch import (
    ABANDONED_AFTER,
    new_branch_name,
    remove_abandoned_branches,
)
from branchlake_dagster.compaction.compactor import plan_compactions
from branchlake_dagster.compaction.errors import CompactionContended, CompactionNotClean, CompactionUnknown
from branchlake_dagster.compaction.file_measures import measure_table
from branchlake_dagster.compaction.rewritten_files import list_rewritten_partitions
from branchlake_dagster.errors import TableMissing, UndoRefused
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.rows import RowReader, drop_unchanged_rows
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.publication.ledger import iter_publications
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.stored_names import LakeProperty, MaintenanceKind
from branchlake_dagster_tests.compaction.compacting import Rewriting, open_run, rewrite_files
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks, spent_of
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal
from branchlake_dagster_tests.publication.workbench import Workbench
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.undo.test_undo import losing
from branchlake_dagster_tests.undo.test_undo_lake import undo

lakehouse = memory.lakehouse
ROWS = [("a", 1), ("a", 2), ("a", 3), ("b", 5), ("b", 6)]


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    """A table with three files in partition a, and two in b."""
    bench = Workbench(lakehouse, namespace)
    bench.seeded([ROWS[0], ROWS[3]])
    for rows in ([ROWS[1], ROWS[4]], [ROWS[2]]):
        run = bench.run()
        run.append(rows)
        bench.published(run)
    yield bench
    bench.clean()


def maintenance_commits(bench: Workbench) -> list[LogEntry]:
    return [
        entry
        for entry in bench.lake.nessie.log(MAIN)
        if entry.commit.properties.get(LakeProperty.MAINTENANCE) == MaintenanceKind.COMPACTION
    ]


def file_counts(bench: Workbench) -> dict[str, int]:
    measures = measure_table(bench.main(), "t", small_file_bytes=10**6)
    return {one.partition: one.files for one in measures}


def codes(publication: Any) -> dict[str, str]:
    return {partition: reason.code for partition, reason in publication.given_way.items()}


def test_nobody_else_wrote(bench: Workbench) -> None:
    before = len(list(iter_publications(bench.lake.nessie)))
    done = Rewriting(bench).publish()
    assert (done.given_way, done.is_rebased) == ({}, False)
    assert {one.partition: (len(one.removed), len(one.added)) for one in done.committed} == {
        "day=a": (3, 1),
        "day=b": (2, 1),
    }
    assert (file_counts(bench), bench.rows()) == ({"day=a": 1, "day=b": 1}, ROWS)
    (entry,) = maintenance_commits(bench)
    assert entry.commit.hash == done.commit
    assert len(list(iter_publications(bench.lake.nessie))) == before
    assert not [ref.name for ref in bench.lake.nessie.references() if ref.name.startswith("compact-")]


def test_appends_meanwhile_stay(bench: Workbench) -> None:
    rewriting = Rewriting(bench)
    run = bench.run()
    run.append([("a", 9), ("c", 1)])
    bench.published(run)
    done = rewriting.publish()
    assert (done.given_way, done.is_rebased) == ({}, True)
    assert bench.rows() == sorted([*ROWS, ("a", 9), ("c", 1)])
    assert file_counts(bench) == {"day=a": 2, "day=b": 1, "day=c": 1}
    snapshot = bench.main().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation is Operation.REPLACE
    assert snapshot.summary[LakeProperty.MAINTENANCE] == MaintenanceKind.COMPACTION


@pytest.mark.parametrize("how", ["replace", "upsert"])
def test_a_partition_whose_files_main_changed_gives_way(bench: Workbench, how: str) -> None:
    rewriting = Rewriting(bench)
    run = bench.run()
    if how == "replace":
        run.replace("a", [("a", 7)])
    else:
        run.upsert([("a", 2)], "day", "id")
    bench.published(run)
    rows = bench.rows()
    done = rewriting.publish()
    assert codes(done) == {"day=a": "same_files"}
    assert [one.partition for one in done.committed] == ["day=b"]
    assert bench.rows() == rows


def test_a_delete_on_main_is_not_reverted(bench: Workbench) -> None:
    rewriting = Rewriting(bench)
    delete_equal(bench.main(), "id", 2, "a")
    done = rewriting.publish()
    assert codes(done) == {"day=a": "main_wrote_delete_files"}
    assert [one.partition for one in done.committed] == ["day=b"]
    (due,) = [one for one in measure_table(bench.main(), "t", small_file_bytes=1) if one.delete_files]
    assert (due.partition, due.deletes_data_files) == ("day=a", 3)


def test_a_dropped_table_and_a_new_partition_spec(bench: Workbench) -> None:
    rewriting, other = Rewriting(bench), Rewriting(bench)
    with bench.main().update_spec() as update:
        update.add_identity("id")
    assert set(codes(other.publish()).values()) == {"partition_spec"}
    bench.lake.catalog().drop_table((bench.namespace, "t"))
    assert set(codes(rewriting.publish()).values()) == {"table_gone"}
    with pytest.raises(TableMissing):
        plan_compactions(bench.lake, [f"{bench.namespace}.t"])


@pytest.mark.parametrize("is_created_anew", [False, True])
@pytest.mark.parametrize("at_commit", [False, True])
def test_a_renamed_table_gives_way(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, at_commit: bool, is_created_anew: bool
) -> None:
    rewriting = Rewriting(bench)
    client = bench.lake.nessie
    commit, schema = client.commit, bench.main().schema()

    def rename() -> None:
        bench.lake.catalog().rename_table((bench.namespace, "t"), (bench.namespace, "renamed"))
        if is_created_anew:
            bench.lake.catalog().create_table((bench.namespace, "t"), schema)

    def commit_after_rename(branch: str, **options: Any) -> Any:
        if branch == MAIN and LakeProperty.MAINTENANCE in options.get("properties", {}):
            monkeypatch.undo()
            rename()
        return commit(branch, **options)

    if at_commit:
        monkeypatch.setattr(client, "commit", commit_after_rename)
    else:
        rename()
    assert set(codes(rewriting.publish()).values()) == {"table_gone"}
    assert maintenance_commits(bench) == []
    renamed = bench.main("renamed").scan().to_arrow()
    assert sorted(zip(*(renamed[name].to_pylist() for name in ("day", "id")), strict=True)) == ROWS
    if is_created_anew:
        assert bench.rows() == []


# -- open runs -----------------------------------------------------------------------------------------


def test_it_gives_way_to_a_run_that_rewrote_its_files(bench: Workbench) -> None:
    run, appending = open_run(bench), open_run(bench)
    run.upsert([("a", 2), ("a", 8)], "day", "id")
    appending.append([("b", 9)])
    done = Rewriting(bench).publish()
    assert codes(done) == {"day=a": "run_rewrote_files"}
    assert [one.partition for one in done.committed] == ["day=b"]
    bench.published(run)
    bench.published(appending)
    assert bench.rows() == sorted([*ROWS, ("a", 8), ("b", 9)])


def test_it_gives_way_to_a_run_that_wrote_delete_files(bench: Workbench) -> None:
    run = open_run(bench)
    delete_equal(run.table(), "id", 2, "a")
    done = Rewriting(bench).publish()
    assert (done.commit, set(codes(done).values())) == (None, {"run_wrote_delete_files"})
    bench.published(run)


@pytest.mark.parametrize("beside_others", [False, True])
def test_a_run_that_writes_after_the_compaction_is_published(bench: Workbench, beside_others: bool) -> None:
    run = open_run(bench)
    done = Rewriting(bench).publish()
    assert done.given_way == {}
    run.upsert([("c", 2), ("a", 9)], "id")
    rows = [row for row in ROWS if row != ("a", 2)] + [("a", 9), ("c", 2)]
    if beside_others:
        other = bench.run()
        other.append([("b", 70)])
        bench.published(other)
        rows.append(("b", 70))
    bench.published(run)
    assert bench.rows() == sorted(rows)


def test_a_run_that_deletes_by_delete_files_after_it_is_published(bench: Workbench) -> None:
    run = open_run(bench)
    Rewriting(bench).publish()
    position = current_position(bench.main())
    delete_equal(run.table(), "id", 2, "a")
    bench.published(run)
    # The run's state is current: its files, under its delete file.
    assert file_counts(bench) == {"day=a": 3, "day=b": 2}
    assert not capture_change(bench.main(), position, name="t").only_appends


# -- replies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrives", [True, False])
def test_a_lost_reply_commits_once(bench: Workbench, arrives: bool) -> None:
    rewriting = Rewriting(bench)
    run = bench.run()
    run.replace("b", [("b", 50)])
    bench.published(run)
    done = rewriting.publish(losing(bench, 1, arrives=arrives))
    assert [entry.commit.hash for entry in maintenance_commits(bench)] == [done.commit]
    assert [one.partition for one in done.committed] == ["day=a"]
    assert done.given_way.keys() == {"day=b"}
    assert done.is_rebased
    assert bench.rows() == [*ROWS[:3], ("b", 50)]


def test_an_outcome_that_stays_unknown_is_no_failure(bench: Workbench) -> None:
    with pytest.raises(CompactionUnknown):
        Rewriting(bench).publish(losing(bench, 99, arrives=False))
    client = losing(bench, 1, arrives=True)
    client.fails_after_loss = True
    with pytest.raises(CompactionUnknown):
        Rewriting(bench).publish(client)
    assert bench.rows() == ROWS
    assert len(maintenance_commits(bench)) == 1


def test_a_main_that_never_rests(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    rewriting = Rewriting(bench)
    client = bench.lake.nessie
    commit = client.commit

    def disturbed(branch: str, **options: Any) -> Any:
        if branch == MAIN and LakeProperty.MAINTENANCE in options.get("properties", {}):
            monkeypatch.undo()
            run = bench.run()
            run.append([("c", len(bench.rows()))])
            bench.published(run)
            monkeypatch.setattr(client, "commit", disturbed)
        return commit(branch, **options)

    monkeypatch.setattr(client, "commit", disturbed)
    with pytest.raises(CompactionContended):
        rewriting.publish()
    assert maintenance_commits(bench) == []


def test_a_branch_with_other_changes_is_not_published(bench: Workbench) -> None:
    run = bench.run()
    rewrite_files(run.table())
    run.append([("a", 100)])
    tables, client = IcebergTableFormat(bench.lake.catalog()), bench.lake.nessie
    before, after = (client.contents(ref, [bench.key()])[bench.key()] for ref in (MAIN, run.name))
    with pytest.raises(CompactionNotClean):
        list_rewritten_partitions("t", tables.load_change(bench.key(), before, after))


def test_abandoned_branches_are_removed_and_others_not(bench: Workbench) -> None:
    client = bench.lake.nessie
    base = client.reference(MAIN).hash
    names = [new_branch_name(), f"compact-{uuid.uuid4()}", "compact-q3-report"]
    for name in names:
        client.create_branch(name, from_ref=MAIN, from_hash=base)
    now = datetime.now(UTC)
    assert remove_abandoned_branches(client, now=now) == []
    later = now + ABANDONED_AFTER + timedelta(minutes=1)
    assert remove_abandoned_branches(client, now=later) == names[:1]
    for name in names[1:]:
        client.delete_branch(name, expected_hash=base)


# -- those who read ------------------------------------------------------------------------------------


def test_consumers_and_sensors_see_no_change(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)
    spent = spent_of(orders, namespace)
    with project(lakehouse, orders.asset, spent) as p:
        ticks = Ticks(p)
        orders.publish(p, ("a", 1), ("b", 2))
        orders.publish(p, ("a", 3))
        assert len(ticks.tick()) == 1
        published(p, spent)
        ticks.tick()
        bench = Workbench(lakehouse, namespace)
        key = bench.key("orders")
        table = lakehouse.catalog().load_table((namespace, "orders"))
        observed = len(p.observations(orders.key.path))
        position, head = current_position(table), table.metadata.current_snapshot_id
        rewrite_files(table)
        compacted = lakehouse.catalog().load_table((namespace, "orders"))
        assert compacted.metadata.current_snapshot_id != head
        assert capture_change(compacted, position, name=key.name).files_changed == 0
        assert ticks.tick() == []
        list(p.reconciler().reconcile_branches())
        assert len(p.observations(orders.key.path)) == observed
        orders.publish(p, ("b", 5))
        published(p, spent)
        assert values(p, spent) == [("a", 4), ("b", 7)]


def test_an_undo_of_rows_that_were_compacted_with_others(bench: Workbench) -> None:
    first, second = bench.runs[-2:]  # ("a", 2), ("b", 6) and ("a", 3)
    Rewriting(bench).publish()
    position = current_position(bench.main())
    later = bench.run()
    later.append([("b", 60)])
    bench.published(later)
    Rewriting(bench, ["b"]).publish()  # a compaction of compacted files
    undo(bench.lake, second.run_id)
    assert bench.rows() == [row for row in [*ROWS, ("b", 60)] if row != ("a", 3)]
    undo(bench.lake, later.run_id)
    assert bench.rows() == [row for row in ROWS if row != ("a", 3)]
    undo(bench.lake, first.run_id)
    assert bench.rows() == [("a", 1), ("b", 5)]
    changed = RowReader(bench.main(), capture_change(bench.main(), position, name="t")).read()
    changed = drop_unchanged_rows(changed)
    assert changed.added.num_rows == 0
    assert sorted(row["id"] for row in changed.removed.to_pylist()) == [2, 3, 6]
    assert file_counts(bench) == {"day=a": 1, "day=b": 1}


@pytest.mark.parametrize("how", ["upsert", "delete"])
def test_an_undo_of_compacted_rows_that_were_changed_since(bench: Workbench, how: str) -> None:
    last = bench.runs[-1]
    Rewriting(bench).publish()
    if how == "upsert":
        run = bench.run()
        run.upsert([("a", 1)], "day", "id")
        bench.published(run)
    else:
        delete_equal(bench.main(), "id", 1, "a")
    with pytest.raises(UndoRefused) as caught:
        undo(bench.lake, last.run_id)
    assert {one.reason.code for one in caught.value.dependencies} == {"compacted"}


def test_an_undo_after_a_run_reversed_the_compaction(bench: Workbench) -> None:
    first, last = bench.runs[-2:]
    upserting, appending = bench.run(), bench.run()
    Rewriting(bench).publish()
    upserting.upsert([("a", 2), ("a", 7)], "day", "id")
    appending.append([("b", 60)])
    bench.published(appending)
    bench.published(upserting)
    undo(bench.lake, last.run_id)
    rows = [("a", 1), ("a", 2), ("a", 7), ("b", 5), ("b", 6), ("b", 60)]
    assert bench.rows() == rows
    with pytest.raises(UndoRefused):
        undo(bench.lake, first.run_id)
    undo(bench.lake, upserting.run_id)
    assert bench.rows() == [row for row in rows if row != ("a", 7)]
