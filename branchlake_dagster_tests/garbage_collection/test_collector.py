"""What a pass deletes, in an in-memory lake with real files."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.stored_names import JOURNAL_BRANCH
from branchlake_dagster_tests.garbage_collection.collected_lake import (
    DAY,
    CollectedLake,
    Killed,
)

pytestmark = pytest.mark.lake


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
    old_id = table.current_snapshot().snapshot_id
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
