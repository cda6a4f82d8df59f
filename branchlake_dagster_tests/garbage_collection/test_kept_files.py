"""Which files a pass keeps, in an in-memory lake with real files."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table.statistics import StatisticsFile

from branchlake_dagster.errors import (
    HeartbeatsUnreadable,
    StoredFileDamaged,
)
from branchlake_dagster.garbage_collection import warehouse_files
from branchlake_dagster.garbage_collection.reachable_files import (
    read_manifest_list,
    read_manifest_paths,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.model import ContentKey, OtherContent, Put
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
)

pytestmark = pytest.mark.lake


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
    assert any(expected[2])


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
