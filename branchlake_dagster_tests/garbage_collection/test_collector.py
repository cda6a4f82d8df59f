"""What a pass deletes and what it keeps, on a lake in memory with real files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io import FileIO
from pyiceberg.table import Table, Transaction
from pyiceberg.table.statistics import StatisticsFile

from branchlake_dagster.errors import (
    ConfigurationError,
    HeartbeatsUnreadable,
    JournalLost,
    MomentExpired,
    NessieUnavailable,
    RootsUnreadable,
    StoredFileDamaged,
    WarehouseShared,
    WarehouseUnreadable,
)
from branchlake_dagster.garbage_collection import collector as collector_module
from branchlake_dagster.garbage_collection import journal as journal_module
from branchlake_dagster.garbage_collection import reachable_files, warehouse_files
from branchlake_dagster.garbage_collection.collection_plan import OpenPlan, PlannedFile, plan_digest
from branchlake_dagster.garbage_collection.collector import FileCollector
from branchlake_dagster.garbage_collection.explanation import FileExplanation, MomentExplanation
from branchlake_dagster.garbage_collection.journal import JournaledPlan
from branchlake_dagster.garbage_collection.live_history import LiveHistory
from branchlake_dagster.garbage_collection.reachable_files import (
    ReachableFiles,
    read_manifest_list,
    read_manifest_paths,
)
from branchlake_dagster.garbage_collection.summary import (
    explanation_to_json,
    format_explanation,
    format_plan,
    format_result,
    list_holder_rows,
    list_plan_rows,
    list_table_rows,
    plan_to_json,
    result_to_json,
    status_to_json,
)
from branchlake_dagster.garbage_collection.warehouse_files import Deletion, WarehouseFiles
from branchlake_dagster.internals.pyiceberg import _CachingTransaction
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, OtherContent, Put
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.stored_names import JOURNAL_BRANCH
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
    SavedLake,
    forget_repositories,
    open_lake,
)
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.lake


@pytest.fixture
def lake(tmp_path: Path) -> CollectedLake:
    made = open_lake(tmp_path)
    made.create()
    made.append(1)
    return made


# -- what is deleted -----------------------------------------------------------------------------------


def test_a_stray_file_is_planned_and_deleted_after_the_delay(lake: CollectedLake) -> None:
    stray = lake.stray()
    lake.age()
    before = lake.files()
    first = lake.collector(ago=2 * DAY).run()
    assert (first.executed, first.plan.file_count, lake.files()) == ((), 1, before)
    assert first.plan.sample[0].path == stray
    assert first.plan.files_by_table == {"shop.t": (1, 1)}
    soon = lake.collector(ago=1.5 * DAY).run()
    assert (soon.executed, soon.plan.file_count, lake.files()) == ((), 0, before)
    second = lake.collector().run()
    (executed,) = second.executed
    assert (executed.plan_id, executed.state, executed.deleted, executed.deleted_bytes) == (
        first.plan.plan_id,
        "executed",
        1,
        1,
    )
    assert before - lake.files() == {stray}
    assert lake.rows() == [1]
    third = lake.collector().run()
    assert (third.executed, third.plan.file_count) == ((), 0)


def test_a_plan_changes_nothing(lake: CollectedLake) -> None:
    stray = lake.stray()
    lake.age()
    plan = lake.collector().plan()
    assert (plan.plan_id, plan.file_count, plan.sample[0].path) == ("", 1, stray)
    assert not lake.nessie.has_reference(JOURNAL_BRANCH)
    assert Path(stray).exists()


def test_the_journal_sums_the_bytes_of_open_plans_by_table(lake: CollectedLake) -> None:
    lake.create("u")
    for name, size in (("t", 3), ("t", 4), ("u", 5)):
        lake.write(lake.table_folder(name) / "data" / f"{size}.parquet", b"x" * size)
    lake.age()
    collector = lake.collector(ago=2 * DAY)
    assert collector.journal.load_planned_bytes() == {}
    collector.run()
    assert collector.journal.load_planned_bytes() == {"shop.t": 7, "shop.u": 5}
    lake.collector().run()
    assert collector.journal.load_planned_bytes() == {}


def test_files_of_a_replaced_state_go_with_the_horizon(lake: CollectedLake) -> None:
    lake.at(datetime.now(UTC) - 50 * DAY)
    gone = open_table_with_dropped_snapshot(lake)
    lake.at(datetime.now(UTC) - 40 * DAY)
    lake.append(5, name="u")  # the state at the horizon
    lake.at(datetime.now(UTC) - 10 * DAY)
    kept_row = lake.append(6, name="u")
    lake.age()
    deleted = lake.collect()
    assert gone in deleted
    assert kept_row not in deleted
    assert lake.rows(name="u") == [2, 5, 6]


def open_table_with_dropped_snapshot(lake: CollectedLake) -> str:
    """Create table `u`, overwrite its row, and expire the snapshot before; return the replaced data file."""
    lake.create("u")
    gone = lake.append(1, name="u")
    table = lake.table("u")
    old_id = table.current_snapshot().snapshot_id  # type: ignore[union-attr]
    table.overwrite(pa.table({"n": [2]}))
    snapshots = [one.snapshot_id for one in lake.table("u").metadata.snapshots[:-1]]
    assert old_id in snapshots
    lake.table("u").maintenance.expire_snapshots().by_ids(snapshots).commit()
    return gone


def test_the_state_at_the_horizon_is_kept(lake: CollectedLake) -> None:
    """Not only younger commits: the lake was in the state of the newest older one."""
    lake.at(datetime.now(UTC) - 60 * DAY)
    gone = open_table_with_dropped_snapshot(lake)
    expired = lake.nessie.reference(MAIN).hash
    lake.at(datetime.now(UTC) - 50 * DAY)
    lake.create("v")
    at_horizon = lake.append(3, name="v")
    lake.at(datetime.now(UTC) - 1 * DAY)
    lake.lake.catalog().drop_table((lake.namespace, "v"))
    lake.age()
    deleted = lake.collect()
    assert at_horizon not in deleted
    assert gone in deleted
    assert expired


def test_a_tag_keeps_what_main_dropped(lake: CollectedLake) -> None:
    lake.at(datetime.now(UTC) - 90 * DAY)
    lake.create("v")
    kept = lake.append(3, name="v")
    lake.tag("release-1")
    lake.lake.catalog().drop_table((lake.namespace, "v"))
    lake.at(datetime.now(UTC) - 80 * DAY)
    lake.append(4)
    lake.age()
    assert kept not in lake.collect()
    assert lake.rows(name="v", ref="release-1") == [3]
    lake.delete("release-1")
    deleted = lake.collect()
    assert kept in deleted
    assert lake.rows() == [1, 4]


def test_files_of_a_dropped_table_whose_log_is_old_are_found(lake: CollectedLake) -> None:
    """Also by a later pass: the journal remembers the folder, and the log is read from where it was left."""
    lake.at(datetime.now(UTC) - 90 * DAY)
    lake.create("v", location=f"file://{lake.root}/elsewhere/v")
    gone = lake.append(3, name="v")
    lake.lake.catalog().drop_table((lake.namespace, "v"))
    lake.at(datetime.now(UTC) - 80 * DAY)
    lake.append(4)
    for prefix in (lake.root / "_branchlake" / "prefixes").iterdir():
        prefix.unlink()
    lake.age(1)
    lake.collector(ago=3 * DAY).run()
    lake.age()
    assert gone in lake.collect()


def test_files_of_a_table_that_was_never_committed_are_found_by_the_recorded_prefix(
    lake: CollectedLake,
) -> None:
    folder = lake.root / "shop" / "t_00000000-0000-4000-8000-000000000000"
    lost = lake.write(folder / "data" / "lost.parquet")
    other = lake.write(lake.root / "shop" / "t_old" / "mine.csv")
    foreign = lake.write(lake.root / "shop" / "notes.txt")
    lake.age()
    deleted = lake.collect()
    assert lost in deleted
    assert {other, foreign}.isdisjoint(deleted)


def test_names_that_are_not_unicode_stop_no_collection(lake: CollectedLake) -> None:
    """In the folder of a namespace, in a table's folder, and as a folder."""
    stray, root, folder = lake.stray(), os.fsencode(lake.root), os.fsencode(lake.table_folder())
    names = [b"%s/shop/\xff" % root, b"%s/shop/\xff-folder/x" % root, b"%s/data/\xff.parquet" % folder]
    for name in names:
        lake.write(Path(os.fsdecode(name)))
    lake.age()
    assert lake.collect() == {stray}
    assert all(os.path.exists(name) for name in names)  # noqa: PTH110 - they are bytes


def test_a_checksum_file_goes_with_its_file(lake: CollectedLake) -> None:
    stray = Path(lake.stray(file="x.parquet"))
    checksum = lake.write(stray.with_name(".x.parquet.crc"))
    lake.age()
    assert lake.collect() == {str(stray), checksum}


# -- what is kept --------------------------------------------------------------------------------------


def test_a_checksum_file_goes_although_the_process_is_killed_beside_its_file(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum file is hidden. No later pass lists it if its file is gone."""
    strays = [Path(lake.stray(file=f"{number}.parquet")) for number in range(3)]
    checksums = [lake.write(stray.with_name(f".{stray.name}.crc")) for stray in strays]
    lake.age()
    lake.collector(ago=4 * DAY).run()
    collector = lake.collector(ago=2 * DAY)
    delete_one = collector._files._delete_one

    def delete_and_die(path: str) -> None:
        delete_one(path)
        raise Killed

    monkeypatch.setattr(collector._files, "_delete_one", delete_and_die)
    with pytest.raises(Killed):
        collector.run()
    lake.collector(ago=2 * DAY).run()
    lake.collector().run()
    assert not {*map(str, strays), *checksums} & lake.files()


def test_young_files_and_files_of_the_future_are_kept(lake: CollectedLake) -> None:
    old, young, future = (lake.stray(file=f"{name}.parquet") for name in ("old", "young", "future"))
    lake.age()
    lake.age(8, only=[young])
    # A pass of two days ago sees it as six days old.
    lake.age(-30, only=[future])
    first = lake.collector(ago=2 * DAY).run()
    assert [file.path for file in first.plan.sample] == [old]
    assert lake.collect() == {old}


@pytest.mark.usefixtures("real_file_times")
def test_an_old_file_that_was_moved_or_copied_lately_is_young(lake: CollectedLake, tmp_path: Path) -> None:
    """`mv`, `cp -p` and `rsync -a` keep the time of the content."""
    source = lake.write(tmp_path / "source.parquet")
    lake.age(20, only=[source])
    folder = lake.table_folder() / "data"
    shutil.copy2(source, folder / "copied.parquet")
    moved = Path(shutil.move(source, folder / "moved.parquet"))
    assert moved.stat().st_mtime < time.time() - 19 * 86400
    assert lake.collector().plan().file_count == 0
    later = lake.collector(ago=-8 * DAY).plan()
    assert {file.path for file in later.sample} == {str(moved), str(folder / "copied.parquet")}
    # The time that is compared before the deletion is that of the content.
    assert {file.modified_us for file in later.sample} == {moved.stat().st_mtime_ns // 1000}


def test_a_planned_file_that_was_replaced_by_a_copy_of_itself_is_kept(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = lake.stray(), lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    inode = Path(kept).stat().st_ino
    monkeypatch.setattr(
        warehouse_files,
        "last_change_ns",
        lambda status: status.st_ctime_ns if status.st_ino == inode else status.st_mtime_ns,
    )
    (executed,) = lake.collector().run().executed
    assert (executed.deleted, executed.kept) == (1, 1)
    assert Path(kept).exists()
    assert not Path(gone).exists()


def test_a_machine_whose_clock_is_ahead_deletes_nothing(lake: CollectedLake) -> None:
    lake.stray()
    lake.age(1)
    collector = lake.collector(ago=-400 * DAY)
    assert collector.run().plan.file_count == 0
    assert collector.run().executed == ()


def test_hidden_files_and_links_are_kept(lake: CollectedLake) -> None:
    folder = lake.table_folder()
    kept = [
        lake.write(folder / "data" / "_SUCCESS"),
        lake.write(folder / ".hidden" / "x.parquet"),
        lake.write(folder / "_temporary" / "0" / "x.parquet"),
    ]
    gone = lake.write(folder / "data" / "_day=2026-01-01" / "x.parquet")
    outside = lake.root / "of somebody else"
    linked = lake.write(outside / "x.parquet")
    (folder / "data" / "link").symlink_to(outside)
    (folder / "data" / "link.parquet").symlink_to(linked)
    lake.age()
    stamp = (datetime.now(UTC) - 20 * DAY).timestamp()
    os.utime(folder / "data" / "link.parquet", (stamp, stamp), follow_symlinks=False)
    assert [file.path for file in lake.collector().plan().sample] == [gone]
    assert lake.collect() == {gone}
    assert all(Path(path).exists() for path in [*kept, linked])
    assert (folder / "data" / "link.parquet").is_symlink()


def test_a_planned_file_that_became_a_link_or_a_folder_is_kept(lake: CollectedLake, tmp_path: Path) -> None:
    linked, folder, gone = (Path(lake.stray()) for _ in range(3))
    lake.age()
    lake.collector(ago=2 * DAY).run()
    linked.unlink()
    linked.symlink_to(lake.write(tmp_path / "mine"))
    folder.unlink()
    folder.mkdir()
    (executed,) = lake.collector().run().executed
    assert (executed.deleted, executed.kept) == (1, 2)
    assert linked.exists()
    assert folder.exists()
    assert not gone.exists()


def test_files_of_a_living_writer_are_kept(lake: CollectedLake) -> None:
    lake.at(datetime.now(UTC) - 30 * DAY)
    lake.append(2)  # the writer's branch starts here
    branch = lake.branch("run-00000000-0000-4000-8000-000000000001")
    stray = lake.stray()
    older = lake.stray()
    lake.age(20)
    lake.age(40, only=[older])
    lake.heartbeats.beat(branch)
    assert lake.collect() == {older}
    assert lake.collector().plan().metrics.kept["claimed"] == 1
    lake.heartbeats.beats.clear()
    assert lake.collect() == {stray}


def test_files_from_before_a_living_writers_start_are_deleted(lake: CollectedLake) -> None:
    """Also of tables that its branch changed, and if its branch does not exist or is `main`."""
    branch = lake.branch("run-00000000-0000-4000-8000-000000000001")
    lake.append(5, ref=branch)
    older, younger = lake.stray(), lake.stray()
    lake.age(40)
    lake.age(12, only=[younger])
    for name in (branch, "run-00000000-0000-4000-8000-000000000002", MAIN):
        lake.heartbeats.beat(name, started_at=datetime.now(UTC) - 20 * DAY)
    lake.at(datetime.now(UTC) - 20 * DAY)
    assert lake.collect() == {older}
    assert lake.collector().plan().metrics.kept["claimed"] >= 1
    lake.heartbeats.beats.clear()
    assert lake.collect() == {younger}


def test_silent_writers_are_reported_before_they_are_watched(lake: CollectedLake) -> None:
    sentences: list[str] = []
    lake.heartbeats.beat("run-00000000-0000-4000-8000-000000000009", at=datetime.now(UTC) - 9 * DAY)
    lake.heartbeats.dead = [lake.heartbeats.beats.pop()]
    lake.collector(progress=sentences.append).plan()
    assert any("1 silent writer" in sentence for sentence in sentences[:2])


def test_a_writer_whose_clock_is_wrong_is_alive_while_its_file_changes(lake: CollectedLake) -> None:
    stray = lake.stray()
    lake.age(400)
    lake.heartbeats.beat("run-00000000-0000-4000-8000-000000000009", at=datetime.now(UTC) - 9 * DAY)
    assert lake.collector(ago=2 * DAY).run().plan.file_count == 0
    lake.heartbeats.beats.clear()
    assert lake.collect() == {stray}


def test_a_writer_whose_branch_shares_no_commit_with_main_may_have_written_any_file(
    lake: CollectedLake,
) -> None:
    stray = lake.stray()
    lake.age(400)
    branch = "run-00000000-0000-4000-8000-000000000009"
    lake.nessie.create_branch(branch, from_ref=MAIN, from_hash=lake.nessie.no_ancestor_hash)
    properties = {"namespace.create": "true"}
    lake.lake.catalog(branch, properties=properties).create_namespace("alone")
    lake.heartbeats.beat(branch)
    assert lake.collector(ago=2 * DAY).run().plan.file_count == 0
    lake.heartbeats.beats.clear()
    assert lake.collect() == {stray}


def test_a_manifest_that_is_shorter_than_recorded_is_damaged(lake: CollectedLake) -> None:
    """Although all of its blocks can be read."""
    table = lake.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    (manifest,) = snapshot.manifests(table.io)
    assert len(read_manifest_paths(table.io, manifest.manifest_path, manifest.manifest_length).live) == 1
    with pytest.raises(StoredFileDamaged):
        read_manifest_paths(table.io, manifest.manifest_path, manifest.manifest_length + 1)


def test_a_manifest_that_polars_cannot_read_is_read_by_pyiceberg(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append(2)
    lake.table().delete("n = 1")
    table = lake.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None

    def read() -> list[object]:
        lists = read_manifest_list(table.io, snapshot.manifest_list)
        paths = [read_manifest_paths(table.io, *each) for each in lists]
        return [
            lists,
            [each.live.to_list() for each in paths],
            [each.removed.to_list() for each in paths],
            [each.removed_by.tolist() for each in paths],
        ]

    expected = read()

    def refuse(*_: object, **__: object) -> None:
        raise pl.exceptions.ComputeError("no")

    monkeypatch.setattr("branchlake_dagster.garbage_collection.reachable_files.pl.read_avro", refuse)
    assert read() == expected
    assert any(expected[2])  # type: ignore[arg-type]


def test_a_writer_whose_branch_is_unknown_may_have_written_any_file(lake: CollectedLake) -> None:
    stray = lake.stray()
    lake.age(400)
    lake.heartbeats.beat("run-00000000-0000-4000-8000-000000000009")
    assert lake.collect() == set()
    # It is silent and does not write again under watch, so it is dead.
    lake.heartbeats.dead = [replace(lake.heartbeats.beats.pop(), written_at=datetime.now(UTC) - 9 * DAY)]
    assert lake.collect() == {stray}


def test_unreadable_heartbeats_stop_the_pass(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    lake.heartbeats.error = HeartbeatsUnreadable("no")
    before = lake.files()
    with pytest.raises(HeartbeatsUnreadable):
        lake.collector().run()
    assert lake.files() == before


def test_statistics_files_are_roots(lake: CollectedLake) -> None:
    folder = lake.table_folder() / "metadata"
    kept, gone = lake.write(folder / "kept.stats"), lake.write(folder / "gone.stats")
    table = lake.table()
    snapshot_id = table.metadata.current_snapshot_id
    assert snapshot_id is not None
    statistics = StatisticsFile(
        snapshot_id=snapshot_id,
        statistics_path=f"file:{kept}",
        file_size_in_bytes=1,
        file_footer_size_in_bytes=1,
        blob_metadata=[],
    )
    with table.update_statistics() as update:
        update.set_statistics(statistics)
    lake.age()
    assert lake.collect() == {gone}


@pytest.mark.parametrize(
    "spell",
    [
        lambda path: f"file:{path}",
        lambda path: f"file://{path}",
        lambda path: f"file://localhost{path}",
        lambda path: path,
        lambda path: f"FILE:{path}",
        lambda path: f"file:{path}".replace("/metadata/", "//metadata/./"),
        lambda path: f"file:{path}".replace(" ", "%20"),
        lambda path: f"file:{path}".replace(" ", "%2520"),
        lambda path: f"file:{path}".replace(" ", "+"),
        lambda path: f"file:{path}".replace("ä", "a\u0308"),
        lambda path: f"file:{path}".replace("Stats", "STATS"),
        lambda path: f"file:{path}".replace("Stats", "St\tats\n"),
        lambda path: f"file:{path}?version=1/2",
        lambda path: f"file:{path}#part/2",
    ],
)
def test_a_file_that_is_spelled_in_another_way_is_kept(lake: CollectedLake, spell: Any) -> None:
    kept = lake.write(lake.table_folder() / "metadata" / "a ä Stats")
    gone = lake.write(lake.table_folder() / "metadata" / "b ä Stats")
    table = lake.table()
    snapshot_id = table.metadata.current_snapshot_id
    assert snapshot_id is not None
    statistics = StatisticsFile(
        snapshot_id=snapshot_id,
        statistics_path=spell(kept),
        file_size_in_bytes=1,
        file_footer_size_in_bytes=1,
        blob_metadata=[],
    )
    with table.update_statistics() as update:
        update.set_statistics(statistics)
    lake.age()
    assert lake.collect() == {gone}


def test_a_table_below_a_symbolic_link_is_found_by_its_other_name(lake: CollectedLake) -> None:
    (lake.root / "alias").symlink_to(lake.root / "shop")
    lake.create("v", location=f"file://{lake.root}/alias/v")
    kept = lake.append(7, name="v")
    gone = lake.write(lake.root / "shop" / "v" / "data" / "x.parquet")
    lake.age()
    # The same folder under its other name.
    collector = lake.collector(ago=2 * DAY)
    collector.journal.open()
    collector.journal.record_folders({f"file://{lake.root}/shop/v/": "shop.v"}, datetime.now(UTC))
    assert lake.collect() == {gone}
    assert Path(kept).exists()
    assert lake.rows(name="v") == [7]


def test_views_and_unknown_contents_are_roots(lake: CollectedLake) -> None:
    folder = lake.table_folder()
    view = lake.write(folder / "metadata" / "view.metadata.json")
    beside_view = lake.write(folder / "metadata" / "old-view.metadata.json")
    lake.create("u")
    unknown = lake.write(lake.table_folder("u") / "delta" / "part.parquet")
    head = lake.nessie.reference(MAIN).hash
    operations = [
        Put(
            ContentKey(["shop", "seen"]),
            OtherContent(None, "ICEBERG_VIEW", {"metadataLocation": f"file://{view}", "versionId": 1}),
        ),
        Put(
            ContentKey(["shop", "odd"]),
            OtherContent(None, "DELTA_LAKE_TABLE", {"location": f"file://{lake.table_folder('u')}/delta"}),
        ),
    ]
    lake.nessie.commit(MAIN, expected_hash=head, operations=operations, message="views")
    lake.age()
    deleted = lake.collect()
    assert deleted == {beside_view}
    assert Path(unknown).exists()


def test_files_outside_the_warehouse_are_never_candidates(lake: CollectedLake, tmp_path: Path) -> None:
    lake.create("far", location=f"file://{tmp_path}/far")
    lake.append(1, name="far")
    stray = lake.write(tmp_path / "far" / "data" / "x.parquet")
    lake.create("all", location=f"file://{lake.root}")
    own = lake.write(lake.root / "_branchlake" / "else" / "x.parquet")
    lake.create("own", location=f"file://{lake.root}/_branchlake/own")
    below = lake.write(lake.root / "_branchlake" / "own" / "x.parquet")
    lake.age()
    lake.age(only=[stray])
    lake.collect()
    assert all(Path(path).exists() for path in (stray, own, below))


def test_a_registered_copy_of_metadata_does_not_make_its_folder_a_tables(lake: CollectedLake) -> None:
    table = lake.table()
    copied = lake.root / "shop" / "copy.metadata.json"
    lake.write(copied, Path(table.metadata_location.removeprefix("file://")).read_bytes())
    lake.lake.catalog().register_table((lake.namespace, "copy"), f"file://{copied}")
    mine, gone = lake.write(lake.root / "shop" / "mine.csv"), lake.stray()
    lake.age()
    assert lake.collect() == {gone}
    lake.lake.catalog().drop_table((lake.namespace, "copy"))
    lake.age()
    lake.collect()
    assert Path(mine).exists()


def test_a_file_in_another_tables_folder_is_judged_by_all_tables(lake: CollectedLake) -> None:
    lake.create("u")
    borrowed = lake.write(lake.table_folder() / "data" / "borrowed.parquet")
    pq.write_table(pa.table({"n": [9]}), borrowed)
    lake.table("u").add_files([f"file://{borrowed}"])
    lake.age()
    assert lake.collect() == set()
    assert lake.rows("u") == [9]


def test_a_removed_entry_of_a_manifest_is_no_root(lake: CollectedLake) -> None:
    lake.at(datetime.now(UTC) - 60 * DAY)
    lake.create("u")
    gone = lake.append(1, name="u")
    lake.table("u").delete("n = 1")
    old_ids = [one.snapshot_id for one in lake.table("u").metadata.snapshots[:-1]]
    lake.table("u").maintenance.expire_snapshots().by_ids(old_ids).commit()
    lake.at(datetime.now(UTC) - 50 * DAY)
    lake.append(2, name="u")
    lake.age()
    plan = lake.collector().plan()
    (file,) = [each for each in plan.sample if each.path == gone]
    assert file.reason == "removed"
    assert gone in lake.collect()


# -- what cannot be read -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
@pytest.mark.parametrize("which", ["list", "manifest"])
def test_a_table_whose_manifests_are_damaged_is_kept_whole(
    lake: CollectedLake, which: str, damage: str
) -> None:
    lake.create("u")
    lake.append(1, name="u")
    kept, gone = lake.stray("u"), lake.stray()
    location = metadata_locations(lake, "u")[which]
    path = Path(location.removeprefix("file://"))
    content = path.read_bytes()
    lake.age()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
        lake.age()
    before = lake.files()
    plan = lake.collector(ago=2 * DAY).run().plan
    assert (plan.metrics.unreadable, plan.metrics.unreadable_states) == ((location,), ())
    assert format_plan(plan)
    lake.collector().run()
    assert before - lake.files() == {gone}
    assert Path(kept).exists()


def metadata_locations(lake: CollectedLake, name: str) -> dict[str, str]:
    table = lake.table(name)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return {
        "metadata": table.metadata_location,
        "list": snapshot.manifest_list,
        "manifest": snapshot.manifests(table.io)[0].manifest_path,
    }


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_nothing_is_planned_or_deleted_if_a_metadata_file_is_damaged(
    lake: CollectedLake, damage: str
) -> None:
    """It may name files in any table's folder. Plans wait until it can be read again."""
    lake.create("u")
    lake.append(1, name="u")
    gone, borrowed = lake.stray("u"), lake.stray()
    pq.write_table(pa.table({"n": [9]}), borrowed)
    lake.age()
    assert lake.collector(ago=4 * DAY).run().plan.file_count == 2
    lake.table("u").add_files([f"file://{borrowed}"])
    later = lake.stray()
    lake.age(only=[later])
    location = metadata_locations(lake, "u")["metadata"]
    path = Path(location.removeprefix("file://"))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"")
    before = lake.files()
    result = lake.collector(ago=2 * DAY).run()
    assert (result.executed, result.plan.file_count, lake.files()) == ((), 0, before)
    assert result.plan.metrics.unreadable_states == (location,)
    assert location in format_result(result)
    json.dumps(result_to_json(result))
    path.write_bytes(content)
    lake.age(only=[str(path)])
    (executed,) = lake.collector(ago=2 * DAY).run().executed
    assert (executed.deleted, executed.kept) == (1, 1)
    lake.collector().run()
    assert before - lake.files() == {gone, later}
    assert lake.rows("u") == [1, 9]


def test_a_metadata_file_that_is_damaged_between_two_batches_stops_the_plan(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    strays = [lake.stray(file=f"{number}.parquet") for number in range(3)]
    lake.age()
    lake.collector(ago=2 * DAY).run()
    monkeypatch.setattr(collector_module, "BATCH_FILES", 1)
    collector = lake.collector()
    delete = collector._files.delete

    def delete_and_damage(batch: Any) -> list[Deletion]:
        done = delete(batch)
        lake.append(5)
        Path(lake.table().metadata_location.removeprefix("file://")).write_bytes(b"")
        return done

    monkeypatch.setattr(collector._files, "delete", delete_and_damage)
    result = collector.run()
    (executed,) = result.executed
    assert (executed.state, executed.deleted) == ("open", 1)
    assert result.plan.metrics.unreadable_states == (table_content(lake).metadata_location,)
    assert sum(Path(path).exists() for path in strays) == 2


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("sweeping-", "metadata"),
        ("discarded-", "metadata"),
        ("sweeping-", "manifest list"),
        ("discarded-", "manifest"),
    ],
)
def test_a_sweep_beside_a_collection_does_not_stop_it(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch, prefix: str, kind: str
) -> None:
    """It deletes the metadata of a discarded run before its tag, manifests and manifest lists first."""
    client, main_hash = lake.lake.nessie, lake.lake.nessie.reference("main").hash
    client.create_branch("work", from_ref="main", from_hash=main_hash)
    lake.lake.catalog("work").load_table(("shop", "t")).append(pa.table({"n": [7]}))
    head, name = client.reference("work"), f"{prefix}{uuid.uuid4()}"
    table = lake.lake.catalog("work").load_table(("shop", "t"))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    locations = {
        "metadata": table.metadata_location,
        "manifest list": snapshot.manifest_list,
        "manifest": next(
            one.manifest_path
            for one in snapshot.manifests(table.io)
            if one.added_snapshot_id == snapshot.snapshot_id
        ),
    }
    location = locations[kind]
    client.create_tag(name, from_ref="work", from_hash=head.hash)
    client.delete_branch("work", expected_hash=head.hash)
    stray = lake.stray()
    lake.age()
    collector = lake.collector()
    begin = collector._begin

    def begin_and_sweep(*arguments: Any) -> Any:
        one = begin(*arguments)
        update = one.history.update

        def update_and_sweep() -> Any:
            states = update()
            Path(location.removeprefix("file://")).unlink(missing_ok=True)
            if prefix == "discarded-" and name in {ref.name for ref in client.references()}:
                client.delete_tag(name, expected_hash=head.hash)
            return states

        one.history.update = update_and_sweep
        return one

    monkeypatch.setattr(collector, "_begin", begin_and_sweep)
    plan = collector.plan()
    assert (plan.metrics.unreadable_states, plan.metrics.unreadable) == ((), ())
    assert stray in {file.path for file in plan.sample}


def test_files_of_a_damaged_table_in_its_other_folders_are_kept(lake: CollectedLake) -> None:
    """In folders that earlier states, the journal or writers have named, and where it borrows files."""
    lake.create("u")
    lake.create("v")
    borrowed = lake.stray()
    pq.write_table(pa.table({"n": [9]}), borrowed)
    lake.append(1, name="u")
    lake.table("u").add_files([f"file://{borrowed}"])
    recorded = lake.write(
        lake.root / "shop" / "u_00000000-0000-4000-8000-000000000000" / "data" / "x.parquet"
    )
    journaled = lake.write(lake.root / "moved" / "u" / "data" / "x.parquet")
    beside_borrowed, gone = lake.stray(), lake.stray("v")
    lake.age()
    collector = lake.collector(ago=3 * DAY)
    collector.journal.open()
    collector.journal.record_folders({f"file://{lake.root}/moved/u/": "shop.u"}, datetime.now(UTC))
    snapshot = lake.table("u").metadata.snapshots[0]
    Path(snapshot.manifest_list.removeprefix("file://")).unlink()
    assert lake.collect() == {gone}
    assert all(Path(path).exists() for path in (recorded, journaled, beside_borrowed))


@pytest.mark.parametrize(
    "error", [FileNotFoundError("x"), OSError("AWS Error NO_SUCH_BUCKET"), ValueError("x")]
)
def test_a_table_outside_the_warehouse_that_is_unreadable_for_good_does_not_stop_the_pass(
    lake: CollectedLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lake.create("far", location=f"file://{tmp_path}/far")
    lake.append(1, name="far")
    kept = lake.write(lake.root / "shop" / "near" / "data" / "x.parquet")
    collector = lake.collector(ago=5 * DAY)
    collector.journal.open()
    folders = {f"file://{lake.root}/shop/near/": "shop.far"}
    collector.journal.record_folders(folders, datetime.now(UTC))
    gone = lake.stray()
    lake.age()
    read = reachable_files.read_metadata_fields
    answers: list[Exception] = [error]

    def refuse(io: FileIO, location: str) -> dict[str, Any]:
        if str(tmp_path / "far") in location:
            raise answers[-1]
        return read(io, location)

    monkeypatch.setattr(reachable_files, "read_metadata_fields", refuse)
    metrics = lake.collector().plan().metrics
    assert lake.table("far").metadata_location in metrics.unreadable
    assert metrics.unreadable_states == ()
    assert lake.collect() == {gone}
    assert Path(kept).exists()
    # Another error may go away by itself.
    answers.append(TimeoutError("no answer"))
    with pytest.raises(RootsUnreadable):
        lake.collector().run()


@pytest.mark.filterwarnings("ignore:No preferred file implementation")
def test_metadata_in_a_storage_of_an_unknown_scheme_does_not_stop_the_pass(lake: CollectedLake) -> None:
    head = lake.nessie.reference(MAIN).hash
    location = "odd://somewhere/t/metadata/v1.metadata.json"
    content = replace(table_content(lake), content_id=None, metadata_location=location)
    lake.nessie.commit(
        MAIN, expected_hash=head, operations=[Put(ContentKey(["shop", "odd"]), content)], message="odd"
    )
    gone = lake.stray()
    lake.age()
    assert lake.collector().plan().metrics.unreadable == (location,)
    explained = lake.collector().explain(gone)
    assert isinstance(explained, FileExplanation)
    assert explained.unreadable == (location,)
    assert lake.collect() == {gone}


def table_content(lake: CollectedLake) -> IcebergTable:
    key = ContentKey([lake.namespace, "t"])
    content = lake.nessie.contents(MAIN, [key])[key]
    assert isinstance(content, IcebergTable)
    return content


def test_a_storage_that_does_not_answer_stops_the_pass(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    before = lake.files()

    def refuse(*_: object) -> None:
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr("branchlake_dagster.garbage_collection.reachable_files.read_manifest_paths", refuse)
        with pytest.raises(RootsUnreadable):
            lake.collector().run()
    with monkeypatch.context() as patch:
        patch.setattr(
            "branchlake_dagster.garbage_collection.warehouse_files._iter_local_paths",
            lambda _: (_ for _ in ()).throw(PermissionError("no")),
        )
        with pytest.raises(WarehouseUnreadable):
            lake.collector().run()
    with monkeypatch.context() as patch:
        collector = lake.collector()
        patch.setattr(
            collector._client,
            "references",
            lambda **_: (_ for _ in ()).throw(NessieUnavailable("no")),
        )
        with pytest.raises(NessieUnavailable):
            collector.run()
    assert lake.files() == before


# -- commits meanwhile ---------------------------------------------------------------------------------


class Interrupting(WarehouseFiles):
    """Calls something at the end of the listing of the first folder, and before deletions."""

    at_listing: Any = None
    at_deletion: Any = None

    def iter_batches(self, folder: str) -> Iterator[Any]:
        yield from super().iter_batches(folder)
        if self.at_listing is not None:
            call, self.at_listing = self.at_listing, None
            call()


def interrupted(lake: CollectedLake, *, ago: timedelta = timedelta(0)) -> tuple[FileCollector, Interrupting]:
    collector = lake.collector(ago=ago)
    files = Interrupting.from_settings(lake.lake.settings)
    assert isinstance(files, Interrupting)
    collector._files = files
    return collector, files


def test_a_file_that_is_committed_after_the_listing_is_not_planned(lake: CollectedLake) -> None:
    """It is old, because its writer was slow or added a file of before."""
    late = lake.stray()
    pq.write_table(pa.table({"n": [9]}), late)
    lake.age()
    collector, files = interrupted(lake, ago=2 * DAY)
    files.at_listing = lambda: lake.table().add_files([f"file://{late}"])
    assert collector.run().plan.file_count == 0


def test_a_file_that_is_committed_after_the_plan_is_not_deleted(lake: CollectedLake) -> None:
    late = lake.stray()
    pq.write_table(pa.table({"n": [9]}), late)
    gone = lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    collector, files = interrupted(lake)
    files.at_listing = lambda: lake.table().add_files([f"file://{late}"])
    before = lake.files()
    (executed,) = collector.run().executed
    assert (executed.deleted, executed.kept) == (1, 1)
    assert before - lake.files() == {gone}
    assert lake.rows() == [1, 9]


def test_a_file_that_is_committed_between_two_batches_is_not_deleted(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [lake.stray(file=f"{number}.parquet") for number in range(4)]
    for path in paths:
        pq.write_table(pa.table({"n": [9]}), path)
    lake.age()
    lake.collector(ago=2 * DAY).run()
    monkeypatch.setattr(collector_module, "BATCH_FILES", 2)
    collector = lake.collector()
    delete = collector._files.delete
    left: list[str] = []

    def delete_and_commit(batch: Any) -> list[Deletion]:
        done = delete(batch)
        if not left:
            left.extend(path for path in paths if Path(path).exists())
            lake.table().add_files([f"file://{left[0]}"])
        return done

    monkeypatch.setattr(collector._files, "delete", delete_and_commit)
    (executed,) = collector.run().executed
    assert (executed.deleted, executed.kept) == (3, 1)
    assert Path(left[0]).exists()
    assert not Path(left[1]).exists()


@pytest.mark.parametrize("change", ["rename", "rename and create", "drop"])
@pytest.mark.parametrize("part", ["plan", "execution"])
def test_a_table_that_is_renamed_or_dropped_meanwhile_keeps_its_files(
    lake: CollectedLake, change: str, part: str
) -> None:
    """A commit of before still has a dropped table. Files that nothing needs go all the same."""
    old = lake.stray()
    kept = lake.data_files()
    lake.age()

    def change_table() -> None:
        catalog = lake.lake.catalog()
        if change == "drop":
            catalog.drop_table((lake.namespace, "t"))
            return
        catalog.rename_table((lake.namespace, "t"), (lake.namespace, "renamed"))
        if change == "rename and create":
            lake.create("t")

    head = lake.nessie.reference(MAIN).hash
    for executing, ago in ((False, 2 * DAY), (True, timedelta(0))):
        collector, files = interrupted(lake, ago=ago)
        if executing == (part == "execution"):
            files.at_listing = change_table
        collector.run()
    assert not Path(old).exists()
    assert all(Path(path).exists() for path in kept)
    assert lake.rows("t", f"{MAIN}@{head}") == [1]
    if change != "drop":
        assert lake.rows("renamed") == [1]
    assert lake.collect() == set()


def test_a_file_that_was_written_again_is_not_deleted(lake: CollectedLake) -> None:
    grown, touched, gone = lake.stray(), lake.stray(), lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    Path(grown).write_bytes(b"more")
    lake.age(20, only=[grown])
    lake.age(19, only=[touched])
    before = lake.files()
    (executed,) = lake.collector().run().executed
    assert (executed.deleted, executed.kept) == (1, 2)
    assert before - lake.files() == {gone}


# -- the journal ---------------------------------------------------------------------------------------


def test_the_journal_survives_its_own_collections(lake: CollectedLake) -> None:
    for number in range(3):
        lake.stray(file=f"{number}.parquet")
        lake.age()
        lake.collect()
    status = lake.collector().status()
    assert (status.passes, status.deleted_files, status.open_plans) == (6, 3, ())
    assert status.last_pass_started_at is not None
    assert status.last_pass_ended_at is not None
    assert status.last_pass_ended_at > status.last_pass_started_at
    json.dumps(status_to_json(status))


@pytest.mark.parametrize("lost", ["branch", "tables"])
def test_nothing_is_deleted_if_the_journal_is_lost(lake: CollectedLake, lost: str) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    if lost == "branch":
        lake.delete(JOURNAL_BRANCH)
    else:
        for name in ("collections", "deleted_files", "table_folders"):
            lake.lake.catalog(JOURNAL_BRANCH).drop_table(("branchlake", name))
    before = lake.files()
    for call in (lake.collector().run, lake.collector().plan):
        with pytest.raises(JournalLost) as raised:
            call()
        assert raised.value.reason == "no_journal"
    assert lake.files() == before
    # A person accepts it. The plan is lost as well, so the files wait for another delay.
    adopted = lake.collector(ago=2 * DAY).run(adopt_journal=True)
    assert (adopted.executed, adopted.plan.file_count) == ((), 1)
    assert lake.collector().run().deleted == 1


@pytest.mark.parametrize("ending", [".metadata.json", ".avro", ".parquet"])
def test_nothing_is_deleted_if_files_of_the_journal_are_missing(lake: CollectedLake, ending: str) -> None:
    """As after a restore of Nessie from a backup that is older than the history horizon."""
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    for path in (lake.root / "branchlake").rglob(f"*{ending}"):
        path.unlink()
    before = lake.files()
    for call in (lake.collector().run, lake.collector().plan):
        with pytest.raises(JournalLost) as raised:
            call()
        assert raised.value.reason == "unreadable_journal"
    assert lake.files() == before
    # A person accepts it, and a new journal begins.
    adopted = lake.collector(ago=2 * DAY).run(adopt_journal=True)
    assert (adopted.executed, adopted.plan.file_count) == ((), 1)
    assert lake.collector().run().deleted == 1


def test_nothing_is_deleted_if_nessie_is_older_than_the_warehouse(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=3 * DAY).run()
    backup = lake.nessie.reference(JOURNAL_BRANCH).hash
    lake.collector(ago=2 * DAY).run()
    lake.delete(JOURNAL_BRANCH)
    lake.nessie.create_branch(JOURNAL_BRANCH, from_ref=MAIN, from_hash=backup)
    before = lake.files()
    with pytest.raises(JournalLost) as raised:
        lake.collector().run()
    assert raised.value.reason == "older_journal"
    assert lake.files() == before


def test_a_warehouse_of_another_nessie_is_left_alone(lake: CollectedLake, tmp_path: Path) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    other = open_lake(tmp_path / "other", {"warehouse": f"file://{lake.root}"})
    with pytest.raises(WarehouseShared):
        other.collector().run()
    forget_repositories(lake)
    with pytest.raises(JournalLost) as raised:
        other.collector().run()
    assert raised.value.reason == "no_journal"
    other.collector(ago=2 * DAY).journal.open(adopt=True)
    with pytest.raises(WarehouseShared):
        lake.collector().run()
    forget_repositories(lake)
    with pytest.raises(JournalLost) as raised:
        lake.collector().run()
    assert raised.value.reason == "other_journal"


def test_a_plan_whose_rows_are_not_those_that_were_planned_is_abandoned(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    first = lake.collector(ago=2 * DAY).run()
    collector = lake.collector()
    victim = replace(first.plan.sample[0], path=lake.stray())
    lake.age()
    collector.journal.record_files(first.plan.plan_id, [victim], "planned", datetime.now(UTC))
    before = lake.files()
    result = collector.run()
    assert [(each.state, each.deleted) for each in result.executed] == [("damaged", 0)]
    assert lake.files() == before
    assert collector.run().plan.file_count == 2


def test_a_journaled_file_outside_the_tables_folders_is_kept(lake: CollectedLake, tmp_path: Path) -> None:
    """Although the plan is complete: somebody else wrote it, or a bug did."""
    victims = [tmp_path / "mine.csv", lake.root / "_branchlake" / "x.parquet", lake.root / "x.parquet"]
    for path in victims:
        lake.write(path)
    files = [PlannedFile(str(path), "", "unreferenced", 1, 0) for path in victims]
    stamp = (datetime.now(UTC) - 20 * DAY).timestamp()
    for path in victims:
        os.utime(path, (stamp, stamp))
    files = [replace(file, modified_us=int(Path(file.path).stat().st_mtime_ns // 1000)) for file in files]
    collector, planned_at = lake.collector(), datetime.now(UTC) - 2 * DAY
    collector.journal.open()
    collector.journal.record_files("p", files, "planned", planned_at)
    plan = OpenPlan("p", planned_at, planned_at + DAY, len(files), 3)
    rules = collector.rules.digest
    journaled = JournaledPlan(plan, plan_digest("h", rules, files), rules, "h")
    details = {"due_at": plan.due_at.isoformat()}
    collector.journal.record_event("x", "planned", planned_at, plan=journaled, details=details)
    (executed,) = lake.collector().run().executed
    assert (executed.state, executed.deleted, executed.kept) == ("executed", 0, 3)
    assert all(path.exists() for path in victims)


def test_a_plan_of_other_settings_is_abandoned(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    collector = lake.collector(horizons={"release-*": 365 * DAY})
    before = lake.files()
    result = collector.run()
    assert [each.state for each in result.executed] == ["outdated"]
    assert lake.files() == before


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.long
def test_a_pass_that_was_killed_anywhere_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each write to the journal, and before each deletion."""
    monkeypatch.setattr(collector_module, "BATCH_FILES", 2)
    # PyIceberg's own property copies all metadata each time.
    monkeypatch.setattr(Transaction, "_cached_metadata", None, raising=False)
    monkeypatch.setattr(Transaction, "table_metadata", _CachingTransaction.table_metadata)
    lake = open_lake(tmp_path)
    lake.create()
    lake.append(1)
    kept = lake.files()
    for number in range(3):
        lake.stray(file=f"{number}.parquet")
    lake.age()
    saved = SavedLake(lake)
    steps = []
    for ago, later in ((6 * DAY, (2 * DAY, 0 * DAY)), (4 * DAY, (0 * DAY,))):
        # a pass that plans, and then one that deletes
        for step in itertools.count():
            saved.restore()
            try:
                killed_at(step, lake.collector(ago=ago)).run()
            except Killed:
                for each in later:
                    lake.collector(ago=each).run()
                assert lake.files() == kept, (ago, step)
                assert lake.rows() == [1]
            else:
                steps.append(step)
                break
        saved = SavedLake(lake)  # the next pass begins where this one, which was not killed, ended
    assert lake.files() == kept
    assert lake.rows() == [1]
    assert min(steps) >= 4, steps
    assert max(steps) >= 8, steps


def killed_at(step: int, collector: FileCollector) -> FileCollector:
    """Let a collector end at the write to the journal, or before the deletion, with this number."""
    points = itertools.count()
    append, delete_file = collector.journal._append, collector._files._delete_file

    def point() -> None:
        if next(points) == step:
            raise Killed

    def append_or_die(*args: Any) -> None:
        append(*args)
        point()

    def delete_or_die(path: str) -> Deletion:
        point()
        return delete_file(path)

    collector.journal._append = append_or_die  # type: ignore[method-assign]
    collector._files._delete_file = delete_or_die  # type: ignore[method-assign]
    return collector


def test_a_deletion_whose_reply_is_lost_counts_as_done(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, refused, gone = lake.stray(), lake.stray(), lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    collector = lake.collector()
    delete_one = collector._files._delete_one

    def delete(path: str) -> None:
        if path == refused:
            raise PermissionError("no")
        delete_one(path)
        if path == lost:
            raise TimeoutError("no reply")

    monkeypatch.setattr(collector._files, "_delete_one", delete)
    result = collector.run()
    (executed,) = result.executed
    assert (executed.deleted, executed.failed, executed.state) == (2, 1, "executed")
    assert refused in executed.errors[0]
    assert not Path(gone).exists()
    assert Path(refused).exists()
    # It is still an orphan, so a later plan has it.
    assert lake.collect() == {refused}


def test_a_pass_ends_with_its_budget_and_the_next_one_continues(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "BATCH_FILES", 1)
    for name in ("u", "v"):
        lake.create(name)
    strays = {lake.stray(name) for name in ("t", "u", "v")}
    lake.age()
    planned = set()
    for number in range(8):
        result = lake.collector(ago=(5 - number / 10) * DAY, budget_s=1e-9).run()
        assert result.plan.metrics.listed_folders == 1
        planned |= {file.path for file in result.plan.sample}
        if planned == strays:
            break
    assert planned == strays
    assert number >= 2  # a pass has only one of the three folders
    before = lake.files()
    # One batch is deleted whatever the budget is, so that passes whose marking takes long get on.
    assert lake.collector(ago=DAY / 10, budget_s=1e-9).run().deleted == 1
    lake.collector().run()
    assert before - lake.files() == strays


def test_the_budget_begins_when_everything_is_marked(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("u", "v"):
        lake.create(name)
        lake.stray(name)
    lake.age()
    collector = lake.collector(budget_s=60.0)
    monotonic, passed = collector._monotonic, [0.0]
    collector._monotonic = lambda: monotonic() + sum(passed)
    add_states = ReachableFiles.add_states

    def add_slowly(self: ReachableFiles, states: Any) -> None:
        add_states(self, states)
        passed.append(1000.0)

    monkeypatch.setattr(ReachableFiles, "add_states", add_slowly)
    plan = collector.plan()
    assert (plan.metrics.skipped_folders, plan.file_count) == (0, 2)


def test_marking_ends_with_the_budget_although_commits_go_on(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.stray()
    lake.age()
    lake.collector(ago=2 * DAY).run()
    update, updates = LiveHistory.update, [0]

    def update_and_commit(self: LiveHistory) -> Any:
        lake.append(updates[0])
        updates[0] += 1
        return update(self)

    monkeypatch.setattr(LiveHistory, "update", update_and_commit)
    result = lake.collector(budget_s=1e-9).run()
    assert result.deleted == 1
    assert updates[0] == 3  # to begin with, after the listing, and before the batch


def test_a_plan_has_a_limit_and_the_next_pass_plans_the_rest(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    strays = {lake.stray(file=f"{number}.parquet") for number in range(5)}
    lake.age()
    monkeypatch.setattr(collector_module, "MAX_PLANNED_FILES", 2)
    plans = [lake.collector(ago=(3 - number / 10) * DAY).run().plan for number in range(3)]
    assert [(plan.file_count, plan.metrics.left_files) for plan in plans] == [(2, 3), (2, 1), (1, 0)]
    assert {file.path for plan in plans for file in plan.sample} == strays
    assert format_plan(plans[0])
    before = lake.files()
    lake.collector().run()
    assert before - lake.files() == strays


def test_old_rows_and_snapshots_of_the_journal_are_removed(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_KEPT_SNAPSHOTS", 2)
    lake.stray()
    lake.age(400)
    lake.at(datetime.now(UTC) - 200 * DAY)
    for number in range(4):
        lake.collector(ago=(200 - 2 * number) * DAY).run()
    lake.at(datetime.now(UTC))
    collector = lake.collector()
    collector.run()
    collector.run()
    journal = collector.journal
    assert journal.count_passes() >= 6
    assert [event for event in journal.load_events() if event["event"] == "planned"] == []
    assert all(
        len(journal._load_table(name).metadata.snapshots) <= 4
        for name in ("collections", "deleted_files", "table_folders")
    )
    collector.run()


# -- explanations and reports --------------------------------------------------------------------------


def test_two_passes_may_remove_snapshots_of_the_journal_at_once(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyIceberg repeats the removal on the newer state, which lacks these snapshots."""
    monkeypatch.setattr(journal_module, "_KEPT_SNAPSHOTS", 2)
    journal, other_journal = lake.collector().journal, lake.collector().journal
    journal.open()
    now = datetime.now(UTC)
    for event in ("started", "planned", "executed", "finished"):
        journal.record_event("pass", event, now)
    expire_snapshots = journal_module._expire_snapshots
    calls: list[str] = []

    def expire_late(table: Table) -> None:
        calls.append(table.name()[-1])
        if calls == ["deleted_files", "collections"]:
            other_journal.trim("other pass", now)
        expire_snapshots(table)

    monkeypatch.setattr(journal_module, "_expire_snapshots", expire_late)
    journal.trim("pass", now)
    table = lake.lake.catalog(JOURNAL_BRANCH).load_table(("branchlake", "collections"))
    assert len(table.metadata.snapshots) == 2
    events = [event["event"] for event in journal.load_events()]
    assert sorted(events) == ["executed", "finished", "planned", "started"]


def test_a_pass_may_start_while_another_one_removes_old_rows_of_the_journal(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, other_journal = lake.collector().journal, lake.collector().journal
    journal.open()
    other_journal.open()
    now = datetime.now(UTC)
    for days in (120, 110, 100, 1):
        journal.record_event(f"pass {days}", "started", now - timedelta(days=days))
    change = journal_module.CollectionJournal._change
    others: list[journal_module.CollectionJournal] = [other_journal]

    def start_another_pass_after(self: journal_module.CollectionJournal, name: str, *rest: Any) -> None:
        change(self, name, *rest)
        if self is journal and name == "collections" and others:
            others.pop().record_event("other pass", "started", now)

    monkeypatch.setattr(journal_module.CollectionJournal, "_change", start_another_pass_after)
    journal.trim("pass", now)
    assert not others
    marker = journal.read_marker()
    assert marker is not None
    assert journal.count_passes() == 5 == marker["passes"]
    journal.verify(marker)


def test_a_file_is_explained(lake: CollectedLake) -> None:
    lake.tag("release-1")
    old = lake.append(2)
    (first,) = lake.data_files(ref="release-1")
    stray = lake.stray()
    lake.age()
    found = lake.collector().explain(f"file:{first}")
    assert isinstance(found, FileExplanation)
    assert {holder.reference for holder in found.holders} >= {MAIN, "release-1"}
    assert all(holder.snapshot_ids for holder in found.holders)
    on_main = lake.collector().explain(old)
    assert isinstance(on_main, FileExplanation)
    assert {holder.reference for holder in on_main.holders} == {MAIN}
    nobody = lake.collector().explain(stray)
    assert isinstance(nobody, FileExplanation)
    assert (nobody.holders, nobody.exists, nobody.state, nobody.due_at) == ((), True, "", None)
    planned_at = lake.collector(ago=2 * DAY).run().started_at
    planned = lake.collector().explain(stray)
    assert isinstance(planned, FileExplanation)
    assert (planned.state, planned.unreachable_since, planned.due_at) == (
        "planned",
        planned_at,
        planned_at + DAY,
    )
    lake.collector().run()
    deleted = lake.collector().explain(stray)
    assert isinstance(deleted, FileExplanation)
    assert (deleted.exists, deleted.state, deleted.due_at) == (False, "deleted", None)
    for explanation in (found, nobody, planned, deleted):
        json.dumps(explanation_to_json(explanation))
        assert format_explanation(explanation)
    assert len(list_holder_rows(found)) == len(found.holders)


def test_a_file_is_explained_by_the_name_of_a_link_to_it(lake: CollectedLake, tmp_path: Path) -> None:
    file = lake.append(2)
    direct = lake.collector().explain(file)
    link = tmp_path / "link.parquet"
    link.symlink_to(file)
    found = lake.collector().explain(str(link))
    assert isinstance(found, FileExplanation)
    assert isinstance(direct, FileExplanation)
    assert (found.holders, found.size, found.modified_at) == (direct.holders, direct.size, direct.modified_at)
    # The table names a link: another disk has the file.
    moved = tmp_path / "moved.parquet"
    Path(file).rename(moved)
    Path(file).symlink_to(moved)
    for path in (file, f"file:{file}"):
        found = lake.collector().explain(path)
        assert isinstance(found, FileExplanation)
        assert (found.holders, found.exists, found.size) == (direct.holders, True, direct.size)


def test_what_is_no_file_of_the_warehouses_storage_is_not_explained(lake: CollectedLake) -> None:
    """An answer such as "no reference leads to it" would invite somebody to delete it."""
    for folder in (lake.table_folder(), lake.root, lake.table_folder() / "data"):
        with raising(ConfigurationError, str(folder), reason="not_a_file", subject=str(folder)):
            lake.collector().explain(str(folder))
    pipe = lake.root / "pipe"
    os.mkfifo(pipe)
    with raising(ConfigurationError, str(pipe), reason="not_a_file", subject=str(pipe)):
        lake.collector().explain(str(pipe))
    with raising(ConfigurationError, reason="not_unicode", subject="'/lake/\\udcff'"):
        lake.collector().explain("/lake/\udcff")
    for location in ("s3://bucket/k.parquet", "hdfs://host/k.parquet"):
        with raising(ConfigurationError, location, reason="other_storage", subject=location):
            lake.collector().explain(location)


@pytest.mark.parametrize("moment", ["", "x", "0001-01-01T00:00+05:00", "9999-12-31T23:59:59-05:00"])
def test_a_moment_that_is_none_is_refused(lake: CollectedLake, moment: str) -> None:
    with raising(ConfigurationError, reason="not_a_moment", subject=f"shop.t@{moment}"):
        lake.collector().explain(f"shop.t@{moment}")


def test_a_moment_of_the_future_is_refused(lake: CollectedLake) -> None:
    moment = (datetime.now(UTC) + DAY).isoformat()
    with raising(ConfigurationError, reason="moment_in_future", subject=f"shop.t@{moment}"):
        lake.collector().explain(f"shop.t@{moment}")


def test_a_moment_is_explained(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    lake.at(datetime.now(UTC) - 60 * DAY)
    lake.create()
    lake.append(1)
    lake.at(datetime.now(UTC) - 40 * DAY)
    lake.append(2)
    lake.at(datetime.now(UTC) - 5 * DAY)
    lake.append(3)

    def explain(days: float) -> MomentExplanation:
        moment = (datetime.now(UTC) - days * DAY).isoformat()
        found = lake.collector().explain(f"shop.t@{moment}")
        assert isinstance(found, MomentExplanation)
        json.dumps(explanation_to_json(found))
        assert format_explanation(found)
        return found

    assert [explain(days).expired for days in (55, 35, 1)] == [True, False, False]
    oldest = explain(55).oldest_moment
    assert oldest is not None
    assert abs(datetime.now(UTC) - oldest - 30 * DAY) < timedelta(minutes=5)


def test_plans_and_results_are_reported(lake: CollectedLake) -> None:
    lake.stray()
    lake.age()
    collector = lake.collector(ago=2 * DAY)
    plan = collector.plan()
    planned = collector.run()
    result = lake.collector().run()
    assert len(list_table_rows(plan)) == 1
    assert len(list_plan_rows(lake.collector().status().open_plans)) == 0
    assert format_plan(plan)
    assert format_result(result)
    json.dumps([plan_to_json(plan), result_to_json(planned), result_to_json(result)])


def test_progress_is_reported(lake: CollectedLake) -> None:
    sentences: list[str] = []
    lake.collector(progress=sentences.append).plan()
    assert len(sentences) >= 3


# -- expired moments -----------------------------------------------------------------------------------


def test_a_query_of_an_expired_moment_says_so(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    lake.at(datetime.now(UTC) - 60 * DAY)
    lake.create()
    lake.append(1)
    expired = lake.nessie.reference(MAIN).hash
    lake.at(datetime.now(UTC) - 40 * DAY)
    lake.append(2)
    at_horizon = lake.nessie.reference(MAIN).hash
    lake.at(datetime.now(UTC))
    lake.append(3)
    reader = LakeReader(lake.lake)
    assert len(reader.table("shop.t", at=expired).scan().to_arrow()) == 1
    lake.age(58)
    lake.collect()
    for read in (reader.table, lambda _, at: reader.sql("SELECT * FROM shop.t", at=at)):
        with pytest.raises(MomentExpired) as raised:
            read("shop.t", at=expired)
        assert raised.value.reason == "expired"
        assert abs(datetime.now(UTC) - raised.value.oldest_moment - 30 * DAY) < timedelta(minutes=1)
    assert len(reader.table("shop.t", at=at_horizon).scan().to_arrow()) == 2
    # A file that is missing at a moment that must be readable is no expiry.
    path = lake.table().metadata_location.removeprefix("file://")
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        reader.table("shop.t")
