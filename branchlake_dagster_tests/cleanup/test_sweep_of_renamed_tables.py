"""Tables that a run only renamed, copied or borrowed files from: their files are not the run's own."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from dagster import AssetKey

from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.incremental.change_tables import ChangeTables
from branchlake_dagster.incremental.declaration import UpstreamTable
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster_tests.cleanup import sweeper_lake
from branchlake_dagster_tests.cleanup.sweeper_lake import ROWS, Lake, drop
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
lake = sweeper_lake.lake


def at(lake: Lake, ref: str = MAIN, name: str = "t") -> str:
    """The metadata file of a table."""
    return lake.table(ref, name).metadata_location


def register(lake: Lake, branch: str, name: str, location: str) -> None:
    lake.catalog(branch).register_table((lake.namespace, name), location)


def rename(lake: Lake, ref: str, old: str, new: str) -> None:
    lake.catalog(ref).rename_table((lake.namespace, old), (lake.namespace, new))


def clone(lake: Lake, branch: str) -> None:
    """(a) A copy of a table of `main` under another key, appended to."""
    register(lake, branch, "copy", at(lake))
    lake.table(branch, "copy").append(pa.table({"n": [10]}))


def restore(lake: Lake, branch: str) -> None:
    """(b) An older state of it under another key."""
    register(lake, branch, "copy", lake.table().metadata.metadata_log[0].metadata_file)
    lake.table(branch, "copy").append(pa.table({"n": [10]}))


def restore_in_place(lake: Lake, branch: str) -> None:
    """(b) And under its own, after a drop."""
    older = lake.table().metadata.metadata_log[-1].metadata_file
    drop(lake, branch)
    register(lake, branch, "t", older)
    lake.table(branch).append(pa.table({"n": [10]}))


def restore_over(lake: Lake, branch: str) -> None:
    """And without one, forth again to the state after it."""
    first, second = (entry.metadata_file for entry in lake.table().metadata.metadata_log[-2:])
    for location in (first, second):
        lake.catalog(branch).register_table((lake.namespace, "t"), location, overwrite=True)
    lake.table(branch).append(pa.table({"n": [10]}))


def data_files(lake: Lake, name: str = "t") -> list[str]:
    return [str(path) for path in lake.table(MAIN, name).inspect.data_files()["file_path"].to_pylist()]


def borrow(lake: Lake, branch: str) -> None:
    """(c) The data files of another table, which the run changes too, without copying them."""
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.create(branch, "zero")
    lake.table(branch, "zero").add_files(data_files(lake))
    lake.table(branch, "zero").append(pa.table({"n": [11]}))


def borrow_overwritten(lake: Lake, branch: str) -> None:
    """(c) Files that only an older snapshot of the table names: rows brought back."""
    gone = data_files(lake)
    lake.table().overwrite(pa.table({"n": [5]}))
    behind = lake.nessie.reference(branch)
    lake.nessie.delete_branch(branch, expected_hash=behind.hash)
    lake.nessie.create_branch(branch, from_ref=MAIN, from_hash=lake.nessie.reference(MAIN).hash)
    lake.table(branch).add_files(gone)


def renamed_on_branch(lake: Lake, branch: str) -> None:
    """(d) The base's state lived under another key: renamed by the run."""
    rename(lake, branch, "t", "u")
    lake.table(branch, "u").append(pa.table({"n": [10]}))


def renamed_on_main(lake: Lake, branch: str) -> None:
    """(d) Renamed on `main`."""
    lake.table(branch).append(pa.table({"n": [10]}))
    rename(lake, MAIN, "t", "u")
    lake.table(MAIN, "u").append(pa.table({"n": [20]}))


def dropped_on_main(lake: Lake, branch: str) -> None:
    """(e) Dropped from `main` since; `main` at the base still has it."""
    clone(lake, branch)
    drop(lake, MAIN)


def newer(lake: Lake, branch: str) -> None:
    """A copy of what `main` became after the run's base."""
    lake.table().append(pa.table({"n": [20]}))
    register(lake, branch, "copy", at(lake))
    lake.table().append(pa.table({"n": [30]}))
    lake.table(branch, "copy").append(pa.table({"n": [10]}))


LENT = [
    clone,
    restore,
    restore_in_place,
    restore_over,
    borrow,
    borrow_overwritten,
    renamed_on_branch,
    renamed_on_main,
    dropped_on_main,
    newer,
]


@pytest.mark.parametrize("does", LENT, ids=lambda does: does.__name__)
def test_what_a_run_gave_another_name_is_not_its_own(lake: Lake, does: Callable[[Lake, str], None]) -> None:
    """Every state that `main` ever had can be read after the sweep, and the run's own files are gone."""
    lake.table().append(pa.table({"n": [4]}))
    lake.table().append(pa.table({"n": [5]}))
    branch = lake.branch("lends")
    does(lake, branch)
    head = lake.nessie.reference(branch).hash
    mine = [tuple(entry.key) for entry in lake.nessie.diff(MAIN, f"@{head}") if entry.to_content]
    states: dict[str, dict[str, list[Any]]] = {}
    for entry in lake.nessie.log(MAIN):
        found = lake.nessie.entries(f"@{entry.commit.hash}", filter=f"entry.namespace == '{lake.namespace}'")
        names = [one.key[-1] for one in found if one.type == "ICEBERG_TABLE"]
        if not names:
            break
        states[entry.commit.hash] = {name: everything(lake, entry.commit.hash, name) for name in names}
    lake.discard(branch)
    before = lake.files()
    (done,) = lake.sweep()
    assert done.done
    assert done.files > 0
    assert lake.files() < before
    for at_hash, tables in states.items():
        for name, rows in tables.items():
            assert everything(lake, f"@{at_hash}", name) == rows
    # What it wrote itself is gone: its state cannot be read any more.
    past = lake.lake.catalog(f"@{head}")
    with pytest.raises(FileNotFoundError):
        assert [past.load_table(key).scan().to_arrow().num_rows for key in mine]


def test_a_change_table_that_was_left_behind_takes_no_file_of_its_input_along(lake: Lake) -> None:
    table = lake.table()
    start = current_position(table)
    table.overwrite(pa.table({"n": [5]}))
    for name in lake.files():  # a restored backup: all files are young, and one is in no state of today
        os.utime(lake.root / name, times=(2e9, 2e9))
    before = lake.files()
    branch = lake.branch("consumer")
    lake.table(branch).append(pa.table({"n": [10]}))
    run: Any = SimpleNamespace(lakehouse=lake.lake, own_catalog=lambda: lake.catalog(branch))
    name = lake.namespace, "t"
    change = capture_change(lake.table(branch), start, name=".".join(name))
    one = UpstreamTable(AssetKey(list(name)), ".".join(name), "rows", lake.table(branch), change.up_to)
    pair = ChangeTables(run).create_pair(one, name, (lake.namespace, "copy"), change)
    assert pair.added is not None
    assert pair.removed is not None
    made = [
        Path(lake.table(branch, found[-1]).location().removeprefix("file://"))
        for found in (pair.added, pair.removed)
    ]
    lake.discard(branch)
    (done,) = lake.sweep()
    assert done.done
    assert lake.files() == before
    assert not [path for folder in made for path in folder.rglob("*") if path.is_file()]


def everything(lake: Lake, ref: str, name: str) -> list[Any]:
    """The rows of each snapshot of a table, with time travel to those of the past."""
    table = lake.table(ref if ref == MAIN or ref.startswith("@") else f"@{ref}", name)
    return [
        sorted(table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()["n"].to_pylist())
        for snapshot in table.metadata.snapshots
    ]


@pytest.mark.spark
def test_what_spark_wrote_is_the_runs_and_what_it_copied_is_not(lake: Lake) -> None:
    """Spark's data files do not carry the name of their commit; the store's clock tells them apart."""
    session = lake.lake.spark_session(MAIN)
    session.sql(f"insert into nessie.{lake.namespace}.t values (4)")
    session.stop()
    branch = lake.branch("spark")
    before = lake.files()
    borrowed = data_files(lake)
    lake.record(branch, lake.nessie.reference(MAIN).hash)
    session = lake.lake.spark_session(branch)
    session.sql(f"insert into nessie.{lake.namespace}.t values (10)")
    session.sql(f"create table nessie.{lake.namespace}.made using iceberg as select 1L as n")
    session.stop()
    lake.create(branch, "zero").add_files(borrowed)
    assert lake.rows(branch, "zero") == [1, 2, 3, 4]
    lake.discard(branch)
    (done,) = lake.sweep()
    assert done.done
    assert {name for name in lake.files() if not name.endswith(".crc")} == {
        name for name in before if not name.endswith(".crc")
    }
    assert lake.rows() == [1, 2, 3, 4]


@pytest.mark.parametrize("owner", ["run", "mine", "tag"])
def test_a_copy_at_another_reference_keeps_the_runs_files(lake: Lake, owner: str) -> None:
    """(f) The run's uncommitted work, registered on a second branch under another key."""
    branch = lake.branch("blocked")
    lake.table(branch).append(pa.table({"n": [10]}))
    other = lake.branch("other") if owner != "mine" else f"mine-{lake.namespace}"
    if owner == "mine":
        lake.nessie.create_branch(other, from_ref=MAIN, from_hash=lake.nessie.reference(MAIN).hash)
    register(lake, other, "copy", at(lake, branch))
    lake.table(other, "copy").append(pa.table({"n": [12]}))
    if owner == "tag":
        name = f"keep_{lake.namespace}"
        lake.nessie.create_tag(name, from_ref=other, from_hash=lake.nessie.reference(other).hash)
        lake.nessie.delete_branch(other, expected_hash=lake.nessie.reference(other).hash)
        other = name
    lake.discard(branch)
    (told,) = lake.sweep()
    assert other in told.reason
    assert lake.rows(other, "copy") == [1, 2, 3, 10, 12]
    assert lake.rows() == [1, 2, 3]


@pytest.mark.parametrize("does", [clone, restore, renamed_on_main])
def test_a_sweep_costs_what_the_run_wrote(lake: Lake, does: Callable[[Lake, str], None]) -> None:
    """However long the history of the table is that the run copied, restored or lost the name of."""
    reads = []
    for snapshots in (3, 20):
        while len(lake.table().metadata.snapshots) < snapshots:
            lake.table().append(ROWS)
        branch = lake.branch(f"after {snapshots}")
        does(lake, branch)
        lake.discard(branch)
        with (
            patch.object(TableFiles, "manifests", autospec=True, side_effect=TableFiles.manifests) as lists,
            patch.object(
                TableFiles, "manifest_files", autospec=True, side_effect=TableFiles.manifest_files
            ) as manifests,
        ):
            (done,) = lake.sweep()
        assert done.done
        reads.append((lists.call_count, manifests.call_count))
        if does is renamed_on_main:
            rename(lake, MAIN, "u", "t")
    assert reads[0] == reads[1]


def test_two_runs_that_copied_one_table_leave_nothing_but_it(lake: Lake) -> None:
    before = lake.files()
    for name in ("one", "two"):
        branch = lake.branch(name)
        clone(lake, branch)
        lake.discard(branch)
    assert [one.done for one in lake.sweep()] == [True, True]
    assert lake.files() == before
    assert lake.rows() == [1, 2, 3]


def test_a_damaged_file_of_a_table_elsewhere_stops_no_sweep(lake: Lake) -> None:
    before = lake.files()
    lake.create(MAIN, "elsewhere").append(ROWS)
    mine = f"mine-{lake.namespace}"
    lake.nessie.create_branch(mine, from_ref=MAIN, from_hash=lake.nessie.reference(MAIN).hash)
    for name in ("missing", "empty"):
        lake.create(mine, name).append(ROWS)
    own = lake.branch("blocked")
    Path(at(lake, mine, "missing").removeprefix("file://")).unlink()
    Path(at(lake, mine, "empty").removeprefix("file://")).write_text("")
    here = lake.files()
    lake.table(own).append(pa.table({"n": [10]}))
    lake.discard(own)
    (done,) = lake.sweep()
    assert done.done
    assert lake.files() == here > before


def test_a_damaged_file_of_the_run_itself_keeps_its_state(lake: Lake) -> None:
    bad, good = lake.branch("bad"), lake.branch("good")
    for branch in (bad, good):
        lake.table(branch).append(pa.table({"n": [10]}))
    Path(at(lake, bad).removeprefix("file://")).write_text("{")
    for branch in (bad, good):
        lake.discard(branch)
    told = {run_branch_name(one.run_id): one for one in lake.sweep()}
    assert not told[bad].done
    assert told[bad].reason.code == "not_possible"
