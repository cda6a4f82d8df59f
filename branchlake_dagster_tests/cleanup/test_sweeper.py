"""Deleting the files of discarded branches, with real Iceberg files."""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import AssetKey
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table
from pyiceberg.types import StringType

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.cleanup.reaper_rules import BranchOwner, MainHistory, OwnerState
from branchlake_dagster.cleanup.sweeper import Sweeper, Sweeping
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.incremental.change_tables import ChangeTables
from branchlake_dagster.incremental.declaration import UpstreamTable
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.nessie.model import ContentKey, Put, Reference, ReferenceType
from branchlake_dagster.runs.discarding import discard_branch, discarded_tag_name, take_over_branch
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.table_files import TableFiles, is_in_folders, normalize_location
from branchlake_dagster.undo.undrop import undrop_table
from branchlake_dagster_tests.harness import assign_main
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

HOUR = timedelta(hours=1)
ROWS = pa.table({"n": [1, 2, 3]})
_NAMES_RUN = f"{COMMIT_PROPERTY}{LakeProperty.RUN_ID}"


class Lake:
    """A namespace on `main` with one published table, and run branches beside it."""

    def __init__(self, lake: Lakehouse, namespace: str) -> None:
        self.lake, self.nessie, self.namespace = lake, lake.nessie, namespace
        catalog = lake.catalog()
        catalog.create_namespace(namespace)
        catalog.create_table((namespace, "t"), ROWS.schema)
        catalog.load_table((namespace, "t")).append(ROWS)
        self.root = Path(lake.settings.warehouse_uri.removeprefix("file://")) / namespace
        self.owners: dict[str, BranchOwner] = {}

    def named(self, name: str) -> str:
        """The branch of a run: its UUID ends in the namespace's."""
        return f"run-{crc32(name.encode()):08x}-0000-4000-8000-{self.namespace[1:]}"

    def branch(self, name: str) -> str:
        branch = self.named(name)
        head = self.nessie.reference(MAIN).hash
        self.nessie.create_branch(branch, from_ref=MAIN, from_hash=head)
        return branch

    def record(self, branch: str, base: str) -> None:
        """Let Dagster know the run of a branch, and its base."""
        self.owners[branch] = BranchOwner(run_id_of_branch(branch), OwnerState.UNPUBLISHED, base_hash=base)

    def catalog(self, ref: str) -> Catalog:
        """Whose commits name the run, on the branch of one."""
        own = ref.startswith("run-")
        return self.lake.catalog(ref, properties={_NAMES_RUN: run_id_of_branch(ref)} if own else {})

    def table(self, ref: str = MAIN, name: str = "t") -> Table:
        return self.catalog(ref).load_table((self.namespace, name))

    def rows(self, ref: str = MAIN, name: str = "t") -> list[int]:
        return sorted(self.table(ref, name).scan().to_arrow()["n"].to_pylist())

    def create(self, ref: str, name: str) -> Table:
        return self.catalog(ref).create_table((self.namespace, name), ROWS.schema)

    def discard(self, branch: str) -> str:
        discard_branch(self.nessie, self.nessie.reference(branch, fetch_metadata=True))
        return discarded_tag_name(branch)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def names(self) -> set[str]:
        found = self.nessie.references(filter=f"ref.name.contains('{self.namespace[1:]}')")
        return {ref.name for ref in found}

    def sweep(
        self, *, later: timedelta = 2 * HOUR, dry_run: bool = False, anyones: bool = True
    ) -> list[Sweeping]:
        def owners(branches: Collection[str]) -> Mapping[str, BranchOwner]:
            return {branch: self.owners[branch] for branch in branches if branch in self.owners}

        sweeper = Sweeper(
            self.nessie,
            TableFiles({}),
            owners,
            grace=HOUR,
            now=lambda: datetime.now(UTC) + later,
            anyones=anyones,
            instance="here",
            ref_filter=f"refType == 'TAG' && ref.name.contains('-{self.namespace[1:]}')",
        )
        return list(sweeper.run(dry_run=dry_run))


@pytest.fixture
def lake(lakehouse: Lakehouse, namespace: str) -> Iterator[Lake]:
    made = Lake(lakehouse, namespace)
    yield made
    for ref in list(made.nessie.references(filter=f"ref.name.contains('{namespace[1:]}')")):
        delete = made.nessie.delete_tag if ref.type is ReferenceType.TAG else made.nessie.delete_branch
        delete(ref.name, expected_hash=ref.hash)


def work(lake: Lake, branch: str) -> None:
    """What a run may do: append, replace, change the schema, create a table, create and drop another one."""
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.table(branch).overwrite(pa.table({"n": [20]}))
    with lake.table(branch).update_schema() as update:
        update.add_column("more", StringType())
    lake.create(branch, "made").append(ROWS)
    lake.create(branch, "dropped").append(ROWS)
    lake.catalog(branch).drop_table((lake.namespace, "dropped"))


@memory.ON_BOTH
def test_a_discarded_branch_leaves_no_file(lake: Lake) -> None:
    before = lake.files()
    branch = lake.branch("blocked")
    work(lake, branch)
    written = lake.files() - before
    tag = lake.discard(branch)
    (dry,) = lake.sweep(dry_run=True)
    assert lake.files() == before | written
    (done,) = lake.sweep()
    assert lake.files() == before
    assert (done.tag, done.done) == (tag.replace("discarded-", "sweeping-"), True)
    assert (done.files, done.size) == (dry.files, dry.size)
    assert done.files == len(written)
    assert f"{len(written)} files" in str(done)
    assert lake.rows() == [1, 2, 3]
    assert lake.names() == set()
    assert lake.sweep() == []


def test_the_reported_size_is_what_is_freed(lake: Lake) -> None:
    def used() -> int:
        return sum((lake.root / name).stat().st_size for name in lake.files())

    before = used()
    branch = lake.branch("blocked")
    work(lake, branch)
    freed = used() - before
    lake.discard(branch)
    (done,) = lake.sweep()
    assert done.size == freed
    assert used() == before


def test_what_a_passed_run_is_to_get_back_is_not_swept(lake: Lake) -> None:
    branch = lake.branch("awake")
    lake.table(branch).append(pa.table({"n": [10]}))
    tag = lake.discard(branch)
    waits = BranchOwner("x", OwnerState.AWAITING_PUBLICATION)
    lake.owners[branch] = waits
    (kept,) = lake.sweep(later=100 * HOUR)
    assert (kept.tag, kept.done) == (tag, False)
    assert kept.reason.code == "run_passed"
    lake.owners[branch] = replace(waits, is_continued=True)
    (swept,) = lake.sweep(later=100 * HOUR)
    assert swept.done


def test_a_tag_waits_for_its_grace_and_for_a_retry(lake: Lake) -> None:
    branch = lake.branch("failed")
    lake.table(branch).append(ROWS)
    tag = lake.discard(branch)
    (early,) = lake.sweep(later=HOUR / 2)
    assert (early.reason.code, "0.5 h" in early.reason) == ("retry_may_continue", True)
    now = datetime.now(UTC)
    lake.owners[branch] = BranchOwner("r", OwnerState.UNPUBLISHED, ended_at=now + 1.5 * HOUR)
    assert "0.5 h" in lake.sweep()[0].reason
    lake.owners[branch] = BranchOwner("r", OwnerState.ACTIVE)
    assert lake.sweep()[0].reason.code == "run_may_continue"
    assert lake.names() == {tag}


@pytest.mark.parametrize(("maker", "goes"), [("here", True), ("there", False), (None, False)])
def test_what_another_instance_discarded_is_left_to_it(lake: Lake, maker: str | None, goes: bool) -> None:
    branch = lake.branch("whose")
    told = {f"{COMMIT_PROPERTY}{LakeProperty.INSTANCE}": maker} if maker else {}
    properties = {_NAMES_RUN: run_id_of_branch(branch), **told}
    table = lake.lake.catalog(branch, properties=properties).load_table((lake.namespace, "t"))
    table.append(pa.table({"n": [10]}))
    before = lake.files()
    tag = lake.discard(branch)
    (found,) = lake.sweep(anyones=False)
    assert found.done is goes
    assert (lake.files() == before) is not goes
    if not goes:
        assert found.reason.code == ("made_elsewhere" if maker else "maker_unknown")
        assert (maker or "") in found.reason
        assert f"branchlake reap --branch {tag}" in found.reason
        assert lake.sweep()[0].done  # a person has named it


# -- what others need -----------------------------------------------------------------------------------


def test_somebodys_own_branch_keeps_what_it_sees(lake: Lake) -> None:
    branch = lake.branch("blocked")
    lake.table(branch).append(pa.table({"n": [10]}))
    seen = lake.nessie.reference(branch)
    lake.nessie.create_branch(f"mine-{lake.namespace}", from_ref=branch, from_hash=seen.hash)
    lake.table(branch).append(pa.table({"n": [11]}))
    tag = lake.discard(branch)
    (kept,) = lake.sweep()
    assert not kept.done
    assert (kept.reason.code, f"mine-{lake.namespace}" in kept.reason) == ("needed", True)
    assert kept.files == 4  # of the second append: data, manifest, manifest list, metadata
    assert lake.rows(f"mine-{lake.namespace}") == [1, 2, 3, 10]
    lake.nessie.delete_branch(f"mine-{lake.namespace}", expected_hash=seen.hash)
    (done,) = lake.sweep()
    assert (done.done, done.files) == (True, 4)
    assert tag not in lake.names()


def test_a_rename_does_not_hide_the_data(lake: Lake) -> None:
    branch = lake.branch("blocked")
    lake.table(branch).append(pa.table({"n": [10]}))
    head = lake.nessie.reference(branch).hash
    mine = f"mine-{lake.namespace}"
    lake.nessie.create_branch(mine, from_ref=branch, from_hash=head)
    lake.catalog(mine).rename_table((lake.namespace, "t"), (lake.namespace, "u"))
    lake.discard(branch)
    assert not lake.sweep()[0].done
    assert lake.rows(mine, "u") == [1, 2, 3, 10]


def test_a_snapshot_that_was_expired_elsewhere_still_has_its_files(lake: Lake) -> None:
    """Its id is gone from that metadata, its manifest is still in use there."""
    branch = lake.branch("blocked")
    lake.table(branch).append(pa.table({"n": [10]}))
    head = lake.nessie.reference(branch).hash
    mine = f"mine-{lake.namespace}"
    lake.nessie.create_branch(mine, from_ref=branch, from_hash=head)
    dead = lake.table(mine).current_snapshot()
    lake.table(mine).append(pa.table({"n": [30]}))
    lake.table(mine).maintenance.expire_snapshots().by_id(dead.snapshot_id).commit()
    lake.discard(branch)
    lake.sweep()
    assert lake.rows(mine) == [1, 2, 3, 10, 30]


@memory.ON_BOTH
def test_what_a_retry_took_over_goes_with_the_retry(lake: Lake) -> None:
    before = lake.files()
    branch = lake.branch("parent")
    lake.table(branch).append(pa.table({"n": [10]}))
    seen = lake.nessie.reference(branch)
    own = lake.named("child")
    lake.record(own, lake.nessie.reference(MAIN).hash)
    take_over_branch(lake.nessie, branch, own)
    # A clean-up that died left the parent's tag behind.
    lake.nessie.create_tag(discarded_tag_name(branch), from_ref=own, from_hash=seen.hash)
    lake.table(own).append(pa.table({"n": [11]}))
    (parents,) = lake.sweep()
    assert (parents.done, parents.files) == (True, 0)
    assert lake.rows(own) == [1, 2, 3, 10, 11]
    lake.discard(own)
    lake.sweep()
    assert lake.files() == before


def test_two_tags_with_the_same_files_do_not_wait_for_each_other(lake: Lake) -> None:
    before = lake.files()
    branch = lake.branch("parent")
    lake.table(branch).append(pa.table({"n": [10]}))
    head = lake.nessie.reference(branch).hash
    twin = lake.named("twin")
    lake.record(twin, lake.nessie.reference(MAIN).hash)
    lake.nessie.create_tag(discarded_tag_name(twin), from_ref=branch, from_hash=head)
    lake.discard(branch)
    assert [one.done for one in lake.sweep()] == [True, True]
    assert lake.files() == before


def test_two_half_done_sweeps_do_not_wait_for_each_other(lake: Lake) -> None:
    """Two sweepers at once, or one that died twice: what a sweep has claimed needs no file any more."""
    before = lake.files()
    branches = [lake.branch(name) for name in ("one", "two")]
    for branch in branches:
        lake.table(branch).append(pa.table({"n": [10]}))
    for branch in branches:
        head = lake.nessie.reference(lake.discard(branch))
        lake.nessie.create_tag(
            head.name.replace("discarded-", "sweeping-"), from_ref=MAIN, from_hash=head.hash
        )
        lake.nessie.delete_tag(head.name, expected_hash=head.hash)
    for name in lake.files() - before:
        (lake.root / name).unlink()
    assert [one.done for one in lake.sweep()] == [True, True]
    assert lake.names() == set()


def test_a_half_done_sweep_and_another_state_of_the_branch_do_not_wait_for_each_other(lake: Lake) -> None:
    """A clean-up that lost against a late write may tag the earlier state when the later one is swept."""
    before = lake.files()
    branch = lake.branch("twice")
    lake.table(branch).append(pa.table({"n": [10]}))
    earlier = lake.nessie.reference(branch).hash
    lake.table(branch).append(pa.table({"n": [11]}))
    later = lake.nessie.reference(lake.discard(branch))
    sweeping = later.name.replace("discarded-", "sweeping-")
    lake.nessie.create_tag(sweeping, from_ref=MAIN, from_hash=later.hash)
    lake.nessie.delete_tag(later.name, expected_hash=later.hash)
    lake.nessie.create_tag(later.name, from_ref=MAIN, from_hash=earlier)
    lake.sweep()
    assert lake.names() == {later.name}
    lake.sweep()
    assert (lake.names(), lake.files()) == (set(), before)


def test_a_branch_that_is_deleted_while_a_sweep_is_planned_does_not_stop_it(lake: Lake) -> None:
    before = lake.files()
    branch, other = lake.branch("blocked"), lake.branch("other")
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.table(other).append(pa.table({"n": [11]}))
    lake.discard(branch)
    real, seen = NessieClient.references, []

    def then_gone(self: NessieClient, **options: Any) -> Iterator[Reference]:
        found = list(real(self, **options))
        if "filter" not in options:
            seen.append(self.reference(other))
            self.delete_branch(other, expected_hash=seen[0].hash)
        return iter(found)

    with patch.object(NessieClient, "references", then_gone):
        (done,) = lake.sweep()
    assert done.done
    # As it was when it was listed, it needed its files.
    lake.nessie.create_branch(other, from_ref=MAIN, from_hash=seen[0].hash)
    assert lake.rows(other) == [1, 2, 3, 11]
    assert before < lake.files()


@memory.ON_BOTH
def test_data_files_that_a_rebase_brought_to_main_stay(lake: Lake) -> None:
    """The same files in another snapshot: main may hold them although the branch looks dead."""
    branch = lake.branch("replayed")
    lake.table(branch).append(pa.table({"n": [10]}))
    (manifest,) = [
        one
        for one in lake.table(branch).current_snapshot().manifests(lake.table().io)
        if one.added_snapshot_id == lake.table(branch).current_snapshot().snapshot_id
    ]
    (entry,) = manifest.fetch_manifest_entry(lake.table().io)
    lake.table().append(pa.table({"n": [99]}))
    main = lake.table()
    with main.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(entry.data_file)
    # Overwritten since; a reader of the snapshot in between still needs it.
    lake.table().overwrite(pa.table({"n": [7]}))
    lake.discard(branch)
    (done,) = lake.sweep()
    assert done.done
    assert (done.reason.code, MAIN in done.reason) == ("needed", True)
    assert Path(entry.data_file.file_path.removeprefix("file://")).exists()
    assert done.files == 3


def test_a_run_that_the_ledger_names_loses_no_file(lake: Lake) -> None:
    branch = lake.branch("published")
    lake.table(branch).append(pa.table({"n": [10]}))
    head = lake.nessie.reference(branch).hash
    lake.nessie.merge(
        from_name=branch,
        from_hash=head,
        into=MAIN,
        expected_hash=lake.nessie.reference(MAIN).hash,
        message="publish",
        properties={"branchlake.run_id": f"other,{branch.removeprefix('run-')}"},
    )
    lake.lake.catalog().drop_table((lake.namespace, "t"))
    files = lake.files()
    lake.discard(branch)
    (done,) = lake.sweep()
    assert done.reason.code == "published"
    assert lake.files() == files
    assert lake.names() == set()


def test_files_outside_of_the_tables_folder_are_not_touched(lake: Lake, tmp_path: Path) -> None:
    own = tmp_path / "own.parquet"
    pq.write_table(ROWS, own)
    branch = lake.branch("blocked")
    lake.table(branch).add_files([f"file://{own}"])
    lake.discard(branch)
    (done,) = lake.sweep()
    assert "1 file" in done.reason
    assert own.exists()


def test_the_files_of_other_keys_are_compared_by_one_spelling() -> None:
    assert normalize_location("file:/a/b") == normalize_location("file:///a/b")
    assert (
        normalize_location("s3a://bucket/x")
        == normalize_location("s3://bucket/x")
        != normalize_location("s3://other/x")
    )
    assert is_in_folders("file:/a/t_1/data/x", ["file:///a/t_1/"])
    assert not is_in_folders("file:/a/t_10/data/x", ["file:///a/t_1/"])


@pytest.mark.parametrize(
    "spell",
    [
        lambda folder, name, link: f"{folder}/{name}",
        lambda folder, name, link: f"file://{folder}//{name}",
        lambda folder, name, link: f"file://{folder}/../data/{name}",
        lambda folder, name, link: f"file://{link}/{name}",
    ],
    ids=["no scheme", "slashes", "dots", "link"],
)
def test_a_file_that_main_names_in_another_spelling_stays(
    lake: Lake, tmp_path: Path, spell: Callable[[Path, str, Path], str]
) -> None:
    """Somebody has added the data file of a blocked run to a table of main."""
    before = lake.files()
    branch = lake.branch("blocked")
    lake.table(branch).append(pa.table({"n": [7]}))
    (file,) = (lake.root / name for name in lake.files() - before if name.endswith(".parquet"))
    lake.discard(branch)
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    lake.create(MAIN, "u").add_files([spell(file.parent, file.name, link)])
    (done,) = lake.sweep()
    assert file.exists()
    assert lake.rows(MAIN, "u") == [7]
    assert done.done  # the other files of the run are gone, and so is its tag


@pytest.mark.parametrize("name", ["t", "made"])
def test_a_merged_table_that_main_dropped_since_can_come_back(lake: Lake, name: str) -> None:
    """Somebody has merged the branch of a blocked run into main, and then dropped a table."""
    branch = lake.branch("blocked")
    lake.table(branch).append(pa.table({"n": [7]}))
    lake.create(branch, "made").append(ROWS)
    head, base = lake.nessie.reference(branch).hash, lake.nessie.reference(MAIN).hash
    lake.nessie.merge(from_name=branch, from_hash=head, into=MAIN, expected_hash=base, message="by hand")
    merged, rows = lake.nessie.reference(MAIN).hash, lake.rows(name=name)
    lake.discard(branch)
    drop(lake, MAIN, name)
    (done,) = lake.sweep()
    assert done.done
    assert lake.rows(f"{MAIN}@{merged}", name) == rows
    assert undrop_table(lake.lake, f"{lake.namespace}.{name}").commit
    assert lake.rows(name=name) == rows


# -- what the run only gave another name ------------------------------------------------------------------


def at(lake: Lake, ref: str = MAIN, name: str = "t") -> str:
    """The metadata file of a table."""
    return lake.table(ref, name).metadata_location


def register(lake: Lake, branch: str, name: str, location: str) -> None:
    lake.catalog(branch).register_table((lake.namespace, name), location)


def drop(lake: Lake, ref: str, name: str = "t") -> None:
    lake.catalog(ref).drop_table((lake.namespace, name))


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


# -- sweeps that fail, die or meet others ----------------------------------------------------------------


class Died(BaseException):
    """The sweeper's process is killed."""


@pytest.mark.parametrize("survives", [0, 3, 8, 13, 18])
def test_a_sweep_that_died_is_finished_by_the_next(lake: Lake, survives: int) -> None:
    before = lake.files()
    branch = lake.branch("blocked")
    work(lake, branch)
    lake.discard(branch)
    real = Sweeper._delete_file
    calls = itertools.count()

    def dying(self: Sweeper, location: str) -> None:
        if next(calls) >= survives:
            raise Died
        real(self, location)

    with patch.object(Sweeper, "_delete_file", dying), pytest.raises(Died):
        lake.sweep()
    (done,) = lake.sweep()
    assert done.done
    assert lake.files() == before
    assert lake.names() == set()


@pytest.mark.parametrize("method", ["create_tag", "delete_tag", "references", "entries", "log"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_call_that_fails_is_repeated_later(lake: Lake, method: str, after: int) -> None:
    before = lake.files()
    branch = lake.branch("blocked")
    lake.table(branch).append(ROWS)
    written = lake.files()
    lake.discard(branch)
    real: Callable[..., Any] = getattr(NessieClient, method)
    calls = itertools.count()

    def failing(self: NessieClient, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise NessieUnavailable("planted")
        return real(self, *args, **kwargs)

    with patch.object(NessieClient, method, failing):
        try:
            lake.sweep()
        except NessieUnavailable:
            # The only call after the files are gone is the one that deletes the tag.
            assert lake.files() == (before if (method, after) == ("delete_tag", 1) else written)
    lake.sweep()
    assert lake.files() == before
    assert lake.names() == set()


def test_nothing_is_deleted_when_a_page_of_references_is_missing(lake: Lake) -> None:
    branch = lake.branch("blocked")
    lake.table(branch).append(ROWS)
    lake.discard(branch)
    files = lake.files()
    real = NessieClient.references

    def failing(self: NessieClient, **options: Any) -> Iterator[Reference]:
        if "filter" in options:
            yield from real(self, **options)
            return
        yield from itertools.islice(real(self, **options), 1)
        raise NessieUnavailable("the second page is missing")

    with patch.object(NessieClient, "references", failing), pytest.raises(NessieUnavailable):
        lake.sweep()
    assert lake.files() == files


def test_nothing_is_deleted_when_a_reference_cannot_be_understood(lake: Lake) -> None:
    """Its table's metadata is missing, so nobody knows which files it needs."""
    branch = lake.branch("blocked")
    lake.table(branch).append(ROWS)
    head = lake.nessie.reference(branch).hash
    mine = f"mine-{lake.namespace}"
    lake.nessie.create_branch(mine, from_ref=branch, from_hash=head)
    content = lake.nessie.content(mine, ContentKey([lake.namespace, "t"]))
    broken = replace(content, metadata_location=f"{lake.root.as_uri()}/nowhere.metadata.json")
    lake.nessie.commit(
        mine,
        expected_hash=head,
        operations=[Put(ContentKey([lake.namespace, "t"]), broken)],
        message="broken",
    )
    lake.discard(branch)
    files = lake.files()
    (kept,) = lake.sweep()
    assert not kept.done
    assert (kept.reason.code, "nowhere.metadata.json" in kept.reason) == ("not_possible", True)
    assert lake.files() == files


def test_a_retry_that_comes_first_keeps_everything(lake: Lake) -> None:
    branch = lake.branch("failed")
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.discard(branch)
    real = NessieClient.delete_tag
    own = lake.named("child")

    def retry_first(self: NessieClient, name: str, *, expected_hash: str) -> None:
        if name.startswith("discarded-") and own not in lake.names():
            take_over_branch(self, branch, own)
        real(self, name, expected_hash=expected_hash)

    with patch.object(NessieClient, "delete_tag", retry_first):
        (kept,) = lake.sweep()
    assert kept.reason.code == "claimed_meanwhile"
    assert lake.names() == {own}
    assert lake.rows(own) == [1, 2, 3, 10]


def test_a_retry_that_comes_later_gets_nothing(lake: Lake) -> None:
    branch = lake.branch("failed")
    lake.table(branch).append(pa.table({"n": [10]}))
    lake.discard(branch)
    with patch.object(Sweeper, "_delete_file", side_effect=Died), pytest.raises(Died):
        lake.sweep()
    assert take_over_branch(lake.nessie, branch, lake.named("child")) is None
    lake.sweep()
    assert lake.names() == set()


# -- where a branch left main -----------------------------------------------------------------------------


def test_the_base_is_found_behind_everything_that_happened_since(lake: Lake) -> None:
    base = lake.nessie.reference(MAIN).hash
    branch = lake.branch("long")
    for number in range(3):
        lake.table(branch).append(pa.table({"n": [number]}))
        lake.table().append(pa.table({"n": [number]}))
    with patch("branchlake_dagster.cleanup.reaper_rules._BATCH_SIZE", 1):
        history = MainHistory(lake.nessie)
        assert history.find_base(branch) == base
    assert history.run_ids_published_since(base) == set()
    assert MainHistory(lake.nessie).find_base(MAIN) == lake.nessie.reference(MAIN).hash


# -- main was set back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("publication", [True, False], ids=["published", "written to main directly"])
@pytest.mark.parametrize("recorded", ["by snapshots", "by Dagster", "nowhere"])
def test_what_main_has_lost_is_not_taken_for_the_work_of_a_discarded_run(
    lakehouse: Lakehouse, namespace: str, publication: bool, recorded: str
) -> None:
    """Set back, `main` shares only older commits with the branch. Those in between have one parent each."""
    lake = Lake(lakehouse, namespace)
    before = lake.nessie.reference(MAIN).hash
    properties = {"commit.property.branchlake.publication_id": "p"} if publication else {}
    lakehouse.catalog(MAIN, properties=properties).load_table((namespace, "t")).append(ROWS)
    on_main = lake.files()
    branch = lake.branch("discarded")
    base = lake.nessie.reference(MAIN).hash
    told = {"branchlake.run_id": run_id_of_branch(branch), "branchlake.base_hash": base}
    lake.table(branch).append(ROWS, snapshot_properties=told if recorded == "by snapshots" else {})
    if recorded == "by Dagster":
        lake.record(branch, base)
    lake.discard(branch)
    assign_main(lakehouse, before)
    (kept,) = lake.sweep()
    assert not kept.done
    assert on_main <= lake.files()
    assign_main(lakehouse, base)
    assert lake.rows() == [1, 1, 2, 2, 3, 3]
    (done,) = lake.sweep()
    assert done.done
    assert lake.files() == on_main
