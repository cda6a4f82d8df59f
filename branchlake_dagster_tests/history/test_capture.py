"""Change capture on real tables: what came, what went, and what was only moved."""

from __future__ import annotations

import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestEntry, ManifestFile
from pyiceberg.table import Table

from branchlake_dagster.history import manifests as own_files
from branchlake_dagster.history.capture import capture_change, current_position, position_on_branch
from branchlake_dagster.history.change import ChangeKind, ChangeLost, ChangeSet, LossReason, Position
from branchlake_dagster.history.manifests import OwnFilesCache, read_manifest_entries
from branchlake_dagster.history.rows import ChangedRows, RowReader, drop_unchanged_rows
from branchlake_dagster.incremental.change_tables import build_change_table, write_copied_rows
from branchlake_dagster_tests.history.snapshot_tables import (
    BY_DAY,
    SCHEMA,
    append,
    catalogue,
    change_files,
    compact,
    counted,
    difference,
    frame,
    replace_day,
)
from branchlake_dagster_tests.publication.rebase.deleting import delete_at
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with catalogue(tmp_path) as found:
        yield found


@pytest.fixture
def table(catalog: Catalog) -> Table:
    made = catalog.create_table("shop.t", SCHEMA, partition_spec=BY_DAY)
    append(made, [("a", 1), ("a", 2), ("b", 3)])
    return made


def captured(table: Table, since: Position | None) -> ChangeSet:
    return capture_change(table, since, name="shop.t", cache=OwnFilesCache())


def rows(table: Table, change: ChangeSet) -> Counter[tuple[object, ...]]:
    return difference(RowReader(table, change).read())


def test_nothing_has_changed(table: Table) -> None:
    change = captured(table, current_position(table))
    assert change.empty
    assert change.steps == ()
    assert change.label() == "no change"
    assert change.up_to == current_position(table)


def test_a_new_consumer_loses_no_row_that_it_never_had(table: Table) -> None:
    """Delete files stay when the data file of their row is removed or compacted."""
    (path,) = (task.file.file_path for task in table.scan("day = 'a'").plan_files())
    delete_at(table, path, 0, properties={})
    replace_day(table, "a", [("a", 7)])
    change = captured(table, None)
    assert change.deletes
    assert rows(table, change) == {("a", 7): 1, ("b", 3): 1}


def test_a_row_of_a_file_that_was_removed_and_restored_can_be_deleted(table: Table) -> None:
    """As an undo restores a file, after which somebody deletes one of its rows."""
    since = current_position(table)
    (file,) = (task.file for task in table.scan("day = 'a'").plan_files())
    change_files(table, removed=[file])
    change_files(table, added=[file])
    delete_at(table, file.file_path, 1, properties={})
    change = captured(table, since)
    assert not change.added
    assert not change.removed
    assert rows(table, change) == {("a", 2): -1}


def test_a_new_consumer_gets_everything(table: Table) -> None:
    change = captured(table, None)
    assert change.whole
    assert change.rows_added == 3
    assert change.only_appends
    assert rows(table, change) == counted(table.scan().to_arrow())


def test_what_was_read_of_everything_is_not_read_again(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted_entries(io: FileIO, manifest: ManifestFile) -> Iterator[ManifestEntry]:
        read.append(manifest.manifest_path)
        return read_manifest_entries(io, manifest)

    monkeypatch.setattr(own_files, "read_manifest_entries", counted_entries)
    cache = OwnFilesCache()
    append(table, [("c", 4)])
    first = capture_change(table, None, name="shop.t", cache=cache)
    assert len(read) == len(set(read)) == 2
    append(table, [("d", 5)])
    table.delete("day = 'c'")
    change = capture_change(table, None, name="shop.t", cache=cache)
    manifests = table.current_snapshot().manifests(table.io)
    assert set(read[2:]) == {one.manifest_path for one in manifests} - set(read[:2])
    assert {one.file.partition[0] for one in change.added} == {"a", "b", "d"}
    known = {one.snapshot_id for one in table.metadata.snapshots}
    assert {one.snapshot_id for one in change.added} <= known
    assert {one.path for one in first.added} == {
        task.file.file_path for task in table.scan(snapshot_id=first.up_to.snapshot_id).plan_files()
    }


def test_appends_are_reported_by_file_with_rows_and_partition(table: Table) -> None:
    start = current_position(table)
    append(table, [("a", 4)])
    append(table, [("b", 5), ("c", 6)])
    change = captured(table, start)
    assert change.kinds == (ChangeKind.APPEND,)
    assert len(change.steps) == 2
    assert [(one.ordinal, one.file.partition[0], one.rows) for one in change.added] == [
        (0, "a", 1),
        (1, "b", 1),
        (1, "c", 1),
    ]
    assert rows(table, change) == Counter([("a", 4), ("b", 5), ("c", 6)])
    assert change.oldest == change.steps[0].at


def test_a_replaced_partition_takes_rows_away_and_brings_new_ones(table: Table) -> None:
    start = current_position(table)
    replace_day(table, "a", [("a", 2), ("a", 7)])
    change = captured(table, start)
    assert ChangeKind.REPLACE_PARTITIONS in change.kinds
    assert not change.only_appends
    assert rows(table, change) == Counter({("a", 7): 1, ("a", 1): -1})
    net = drop_unchanged_rows(RowReader(table, change).read())
    assert (counted(net.added), counted(net.removed)) == (Counter([("a", 7)]), Counter([("a", 1)]))


def test_unchanged_rows_of_two_rewrites_are_left_out_beside_their_commits(table: Table) -> None:
    """The first rewrite removes the old file, and the second one adds the new file."""
    start = current_position(table)
    replace_day(table, "a", [("a", 2), ("a", 7)])
    replace_day(table, "a", [("a", 2), ("a", 7), ("a", 7), ("a", 9)])
    found = RowReader(table, captured(table, start), commits=True).read()
    net = drop_unchanged_rows(found)
    assert counted(net.added.select(["day", "value"])) == Counter([("a", 7), ("a", 7), ("a", 9)])
    assert counted(net.removed.select(["day", "value"])) == Counter([("a", 1)])
    assert net.added.schema == found.added.schema
    assert {*net.added["_commit_snapshot_id"].to_pylist()} == {table.metadata.snapshots[-1].snapshot_id}


def test_the_newest_of_equal_rows_remain() -> None:
    def side(*rows: tuple[int | None, int]) -> pa.Table:
        names = {"n": pa.int64(), "_change_ordinal": pa.int32(), "_commit_snapshot_id": pa.int64()}
        values = [{"n": n, "_change_ordinal": at, "_commit_snapshot_id": 10 + at} for n, at in rows]
        return pa.Table.from_pylist(values, schema=pa.schema(names))

    net = drop_unchanged_rows(
        ChangedRows(side((None, 0), (None, 2), (None, 1), (5, 1)), side((None, 2), (6, 0)))
    )
    assert sorted(net.added["_change_ordinal"].to_pylist()) == [1, 1, 2]
    assert net.added.filter(pc.is_null(net.added["n"]))["_commit_snapshot_id"].to_pylist() == [12, 11]
    assert net.removed["n"].to_pylist() == [6]


def test_deletes_and_updates_are_distinguished(table: Table) -> None:
    start = current_position(table)
    table.delete("day = 'b'")
    assert captured(table, start).kinds == (ChangeKind.DELETE,)
    middle = current_position(table)
    table.delete("value = 1")  # rewrites the file of a
    assert captured(table, middle).kinds == (ChangeKind.UPDATE,)
    assert rows(table, captured(table, start)) == Counter({("b", 3): -1, ("a", 1): -1})


def test_what_was_added_and_removed_again_cancels(table: Table) -> None:
    start = current_position(table)
    append(table, [("c", 8)])
    table.delete("day = 'c'")
    change = captured(table, start)
    assert change.empty
    assert len(change.steps) == 2


def test_compactions_change_no_rows(table: Table) -> None:
    start = current_position(table)
    append(table, [("a", 4)])
    compact(table)
    change = captured(table, start)
    assert [step.kind for step in change.steps] == [ChangeKind.APPEND, ChangeKind.COMPACT]
    assert rows(table, change) == Counter([("a", 4)])
    middle = current_position(table)
    compact(table)
    assert captured(table, middle).empty
    table.delete("day = 'a'")
    assert rows(table, captured(table, start)) == Counter({("a", 1): -1, ("a", 2): -1})


def test_snapshots_of_the_consumers_own_run_come_back_under_other_names(table: Table) -> None:
    base = current_position(table)
    append(table, [("m", 1)])  # what main got meanwhile
    append(table, [("own", 2)], replayed_from="4711")
    append(table, [("m", 3)])
    consumed = Position(base.table_uuid, base.snapshot_id, (4711,))
    assert rows(table, captured(table, consumed)) == Counter([("m", 1), ("m", 3)])


def test_a_position_on_a_branch_names_unpublished_snapshots(table: Table, catalog: Catalog) -> None:
    on_main = catalog.load_table("shop.t")
    append(table, [("own", 2)])
    found = position_on_branch(table, on_main)
    assert found.snapshot_id == on_main.metadata.current_snapshot_id
    assert found.unpublished_snapshots == (table.metadata.current_snapshot_id,)
    assert captured(table, found).empty
    assert Position.from_dict(found.as_dict()) == found


def test_a_roll_back_below_what_the_consumers_own_run_added(table: Table) -> None:
    base = current_position(table)
    append(table, [("own", 2)], replayed_from="4711")
    consumed = Position(base.table_uuid, base.snapshot_id, (4711,))
    assert captured(table, consumed).empty
    assert base.snapshot_id is not None
    table.manage_snapshots().rollback_to_snapshot(base.snapshot_id).commit()
    with pytest.raises(ChangeLost) as caught:
        captured(table, consumed)
    assert caught.value.loss is LossReason.ROLLED_BACK


def test_tables_that_two_runs_created_are_one(table: Table) -> None:
    append(table, [("own", 2)], replayed_from="4711")
    elsewhere = Position("another-uuid", None, (4711,))
    assert rows(table, captured(table, elsewhere)) == counted(frame([("a", 1), ("a", 2), ("b", 3)]))


def test_a_table_that_was_empty_and_has_lost_its_first_snapshots(table: Table) -> None:
    empty = Position(str(table.metadata.table_uuid), None)
    append(table, [("c", 8)])
    table.maintenance.expire_snapshots().by_id(table.metadata.snapshots[0].snapshot_id).commit()
    table.refresh()
    change = captured(table, empty)
    assert rows(table, change) == counted(table.scan().to_arrow())


@pytest.mark.parametrize(
    ("how", "loss"),
    [
        ("recreated", LossReason.RECREATED),
        ("expired", LossReason.EXPIRED),
        ("rolled back", LossReason.ROLLED_BACK),
    ],
)
def test_a_lost_position_says_what_became_of_it(
    table: Table, catalog: Catalog, how: str, loss: LossReason
) -> None:
    first = current_position(table)
    append(table, [("c", 8)])
    if how == "recreated":
        catalog.drop_table("shop.t")
        table = catalog.create_table("shop.t", SCHEMA)
    elif how == "expired":
        append(table, [("d", 9)])
        for snapshot in table.metadata.snapshots[:2]:
            table.maintenance.expire_snapshots().by_id(snapshot.snapshot_id).commit()
    else:
        assert first.snapshot_id is not None
        later = current_position(table)
        table.manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
        first = later
    with raising(ChangeLost, table="shop.t", loss=loss):
        captured(table, first)


def test_files_that_are_gone_are_an_error_of_its_own(table: Table) -> None:
    start = current_position(table)
    append(table, [("c", 8)])
    change = captured(table, start)
    Path(change.added[0].path.removeprefix("file://")).unlink()
    with raising(ChangeLost, loss=LossReason.FILES_GONE):
        RowReader(table, change).read()


def test_a_manifest_is_read_once(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    start, cache = current_position(table), OwnFilesCache()
    append(table, [("c", 8)])
    first = capture_change(table, start, name="shop.t", cache=cache)
    for snapshot in table.metadata.snapshots:
        Path(snapshot.manifest_list.removeprefix("file://")).unlink()
    assert capture_change(table, start, name="shop.t", cache=cache) == first


def test_the_cache_forgets_what_was_used_least(table: Table) -> None:
    start, cache = current_position(table), OwnFilesCache(max_bytes=8_000)
    append(table, [("c", 8)])
    append(table, [("d", 9)])
    capture_change(table, start, name="shop.t", cache=cache)
    assert len(cache._cache) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "text"), [pytest.param(2, "short", marks=pytest.mark.soak), (40, "short"), (10, "x" * 4_000)]
)
def test_the_cache_is_bounded_by_the_memory_that_files_take(tmp_path: Path, columns: int, text: str) -> None:
    """A file of many columns, or with long bounds, counts for as much as it takes."""
    most = 1_000_000
    cache = OwnFilesCache(max_bytes=most)
    with catalogue(tmp_path) as catalog:
        rows = pa.table({f"c{number}": [text] for number in range(columns)})
        properties = {"write.metadata.metrics.default": "full"}
        table = catalog.create_table("shop.wide", rows.schema, properties=properties)
        table.append(rows)
        snapshot = table.current_snapshot()
        assert snapshot is not None
        path = snapshot.manifest_list.removeprefix("file://")
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(600):
            shutil.copy(path, f"{path}-{number}")
            same = snapshot.model_copy(update={"manifest_list": f"{snapshot.manifest_list}-{number}"})
            cache.load_files([same], None, table.io)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert len(cache._cache) > 1
    assert taken < 1.5 * most


def test_rows_are_read_with_the_columns_of_today(table: Table) -> None:
    start = current_position(table)
    append(table, [("c", 8)])
    with table.update_schema() as update:
        update.rename_column("value", "amount")
        update.add_column("note", SCHEMA.find_type("day"))
    change = captured(table, start)
    found = RowReader(table, change, columns=["amount", "note"], commits=True).read()
    assert found.added.to_pylist() == [
        {
            "amount": 8,
            "note": None,
            "_change_ordinal": 0,
            "_commit_snapshot_id": table.metadata.snapshots[-1].snapshot_id,
        }
    ]
    assert found.with_change_types()["_change_type"].to_pylist() == ["INSERT"]


def test_rows_without_a_file_of_their_own_are_copied_into_a_change_table(table: Table) -> None:
    how = {"name": ("shop", "c"), "location": f"{table.location()}-change", "change_of": "shop.t"}
    empty = build_change_table(table, (), properties={}, **how)
    files = write_copied_rows(empty, frame([("a", 4), ("b", 5)]))
    made = build_change_table(empty.table, files, properties={}, **how)
    assert counted(made.table.scan().to_arrow()) == Counter([("a", 4), ("b", 5)])
