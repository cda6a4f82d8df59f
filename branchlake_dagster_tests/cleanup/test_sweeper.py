"""Deleting the files of discarded branches, and keeping what others need."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from branchlake_dagster.catalog.options import COMMIT_PROPERTY
from branchlake_dagster.cleanup.reaper_rules import BranchOwner, MainHistory, OwnerState
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.runs.discarding import discarded_tag_name, take_over_branch
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.table_files import is_in_folders, normalize_location
from branchlake_dagster.undo.undrop import undrop_table
from branchlake_dagster_tests.cleanup import sweeper_lake
from branchlake_dagster_tests.cleanup.sweeper_lake import HOUR, NAMES_RUN, ROWS, Lake, drop, work
from branchlake_dagster_tests.harness import assign_main
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
lake = sweeper_lake.lake


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
    properties = {NAMES_RUN: run_id_of_branch(branch), **told}
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
