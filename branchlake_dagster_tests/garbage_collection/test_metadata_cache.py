"""A collection with the cache of metadata files makes the same plan as one that reads all files."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem
from pyiceberg.table import Table

from branchlake_dagster.garbage_collection import reachable_files, warehouse_files
from branchlake_dagster.garbage_collection.collection_plan import CollectionPlan
from branchlake_dagster.garbage_collection.metadata_cache import (
    CACHE_FILE,
    ManifestKeys,
    MetadataCache,
    StateFiles,
)
from branchlake_dagster.garbage_collection.reachable_files import ReachableFiles
from branchlake_dagster.garbage_collection.warehouse_files import WarehouseFiles
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.tables.location_keys import LocationKeyer
from branchlake_dagster_tests.garbage_collection.collected_lake import DAY, CollectedLake, open_lake

pytestmark = pytest.mark.lake


STEPS = 20
"""The number of steps of a random history. They are spread over 70 days; the horizon is 30 days."""
SEED = 3
"""In this history files are deleted with the cache, and metadata goes away and comes back."""


class PlanDiffers(Exception):  # noqa: N818 - an outcome of the comparison
    """A plan with the cache is not the plan without it."""


def cache_file(lake: CollectedLake) -> Path:
    return lake.lake.settings.state_dir / CACHE_FILE


def plan(lake: CollectedLake, *, with_cache: bool) -> CollectionPlan:
    collector = lake.collector()
    if not with_cache:
        collector._cache_file = None
    return collector.plan()


def describe(made: CollectionPlan) -> tuple[object, ...]:
    """Return all of a plan that does not depend on the clock."""
    metrics = replace(made.metrics, walk_s=0.0, mark_s=0.0, list_s=0.0, delete_s=0.0)
    return made.digest, made.file_count, made.size_bytes, dict(made.files_by_table), made.sample, metrics


def require_equal_plans(lake: CollectedLake) -> None:
    """Compare a plan by the present cache file, a plan without it, and a plan by the new cache file."""
    plans = [describe(plan(lake, with_cache=with_cache)) for with_cache in (True, False, True)]
    if plans[0] != plans[1] or plans[2] != plans[1]:
        raise PlanDiffers(plans)


def age_new_files(lake: CollectedLake) -> None:
    """Let files that were written since the last call look old. Other files keep their times."""
    limit = datetime.now(UTC).timestamp() - DAY.total_seconds()
    young = [str(path) for path in lake.root.rglob("*") if path.is_file() and path.stat().st_mtime > limit]
    lake.age(only=young)


class RandomHistory:
    """Random changes of a lake with two tables: rows, references, snapshots, and damage of metadata."""

    def __init__(self, folder: Path, seed: int, steps: int = STEPS) -> None:
        self.random = random.Random(seed)
        self.lake = open_lake(folder)
        self.copies = folder / "copies"
        self.copies.mkdir()
        self.removed: dict[Path, Path] = {}
        """Metadata files that are missing -> their copies."""
        self.references: list[str] = []
        self.steps = steps
        self.deleted_count = self.restored_count = 0
        self.days_ago = 70.0
        self.lake.at(datetime.now(UTC) - self.days_ago * DAY)
        for name in ("t", "u"):
            self.lake.create(name)
            self.lake.append(1, name=name)
            self.lake.append(2, name=name)
        self.folders = [self.lake.table_folder(name) / "data" for name in ("t", "u")]
        age_new_files(self.lake)

    def step(self) -> None:
        """Change something some days later than the last step, and let the new files look old."""
        self.days_ago -= 70 / self.steps
        self.lake.at(datetime.now(UTC) - self.days_ago * DAY)
        choices = [self.append, self.append, self.remove_rows, self.refer, self.forget_reference]
        choices += [self.expire, self.write_stray, self.remove_metadata, self.restore_metadata, self.collect]
        self.random.choice(choices)()
        age_new_files(self.lake)

    def append(self) -> None:
        self.change(lambda table: table.append(pa.table({"n": [self.random.randrange(9)]})))

    def remove_rows(self) -> None:
        def remove_rows_of_one_number(table: Table) -> None:
            numbers = table.scan().to_arrow()["n"].to_pylist()
            if numbers:
                table.delete(f"n = {self.random.choice(numbers)}")

        self.change(remove_rows_of_one_number)

    def expire(self) -> None:
        def remove_all_but_two(table: Table) -> None:
            old_ids = [snapshot.snapshot_id for snapshot in table.metadata.snapshots[:-2]]
            if old_ids:
                table.maintenance.expire_snapshots().by_ids(old_ids).commit()

        self.change(remove_all_but_two)

    def change(self, change: Callable[[Table], object]) -> None:
        branches = [MAIN, *(name for name in self.references if name.startswith("branch"))]
        name, branch = self.random.choice("tu"), self.random.choice(branches)
        if not self.removed:  # a damaged table cannot be changed
            change(self.lake.table(name, branch))

    def refer(self) -> None:
        kind = self.random.choice([self.lake.branch, self.lake.tag])
        name = f"{'branch' if kind == self.lake.branch else 'tag'}-{len(self.references)}"
        if name not in self.references:
            self.references.append(kind(name))

    def forget_reference(self) -> None:
        if self.references:
            self.lake.delete(self.references.pop())

    def write_stray(self) -> None:
        self.lake.write(self.random.choice(self.folders) / f"stray-{self.random.random()}.parquet")

    def collect(self) -> None:
        """Delete orphans by two passes with the cache. All rows must be readable before and after."""
        if self.removed:
            return
        branches = [MAIN, *self.references]
        before = [self.lake.rows(name, ref) for name in "tu" for ref in branches]
        self.deleted_count += len(self.lake.collect())
        assert [self.lake.rows(name, ref) for name in "tu" for ref in branches] == before

    def metadata_files(self) -> list[Path]:
        return sorted(self.lake.root.glob("shop/*/metadata/*"))

    def remove_metadata(self) -> None:
        self.remove_file(self.random.choice(self.metadata_files()))

    def remove_file(self, path: Path) -> None:
        self.removed[path] = Path(shutil.copy2(path, self.copies))
        path.unlink()

    def restore_metadata(self) -> None:
        """Copy the missing files back, as a restored backup does."""
        for path, copy in self.removed.items():
            shutil.copy2(copy, path)
        self.restored_count += len(self.removed)
        self.removed = {}


def newest_manifest(lake: CollectedLake, name: str = "t") -> Path:
    table = lake.table(name)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return Path(snapshot.manifests(table.io)[0].manifest_path.removeprefix("file://"))


# -- equal plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (SEED, 10),
        *(
            pytest.param(None, STEPS, marks=pytest.mark.soak, id=f"random {number}")  # more of the same
            for number in range(3)
        ),
    ],
)
def test_plans_are_equal_with_and_without_the_cache(tmp_path: Path, seed: int | None, steps: int) -> None:
    played_seed = random.randrange(1 << 32) if seed is None else seed
    history = RandomHistory(tmp_path, played_seed, steps)
    try:
        for _ in range(steps):
            history.step()
            require_equal_plans(history.lake)
    except Exception as error:
        error.add_note(f"seed {played_seed}")
        raise
    assert seed is None or (history.deleted_count and history.restored_count)


def play_scenes(folder: Path) -> None:
    """Compare plans in scenes that show how a cache can be wrong."""
    history = RandomHistory(folder, 0)
    lake = history.lake
    lake.branch("kept")
    lake.append(3)
    lake.table().overwrite(pa.table({"n": [4]}))
    age_new_files(lake)
    require_equal_plans(lake)
    history.expire()  # some snapshots are only in a branch and in history
    lake.at(datetime.now(UTC) - 40 * DAY)
    lake.append(5)
    age_new_files(lake)
    require_equal_plans(lake)
    lake.write(lake.table_folder() / "data" / "stray.parquet")
    age_new_files(lake)
    require_equal_plans(lake)
    history.remove_file(newest_manifest(lake))
    require_equal_plans(lake)
    history.restore_metadata()
    require_equal_plans(lake)
    lake.branch("gone")
    lake.append(6, ref="gone")
    age_new_files(lake)
    require_equal_plans(lake)
    lake.delete("gone")
    require_equal_plans(lake)


def test_plans_are_equal_in_scenes_that_show_errors(tmp_path: Path) -> None:
    play_scenes(tmp_path)


def forget_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    find = MetadataCache.find_list
    monkeypatch.setattr(MetadataCache, "find_list", lambda *a: (rows := find(*a)) and rows[1:])


def forget_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    find = MetadataCache.find_state

    def find_without_one(self: MetadataCache, location: str) -> StateFiles | None:
        files = find(self, location)
        return files and replace(files, manifest_lists=files.manifest_lists[:-1])

    monkeypatch.setattr(MetadataCache, "find_state", find_without_one)


def mark_all_files_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ReachableFiles.add_states

    def add_all(self: ReachableFiles, states: Any) -> None:
        add(self, states)
        for location in self._cache._load()["manifests"].rows:
            keys = self._cache.find_manifest(location, 0)
            assert keys is not None
            self.keys.add(keys.live)

    monkeypatch.setattr(ReachableFiles, "add_states", add_all)


def ignore_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_all(self: MetadataCache) -> None:
        for entries in self._entries.values():
            entries.rows = {location: row for row, location in enumerate(entries.locations)}

    monkeypatch.setattr(MetadataCache, "_select_usable", use_all)


@pytest.mark.parametrize(
    "plant", [forget_a_manifest, forget_a_snapshot, mark_all_files_of_the_cache, ignore_stamps]
)
def test_a_planted_bug_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(PlanDiffers):
        play_scenes(tmp_path)


# -- what is read and written --------------------------------------------------------------------------


@pytest.fixture
def lake(tmp_path: Path) -> CollectedLake:
    """A lake with two snapshots and a stray file, all old."""
    made = open_lake(tmp_path)
    made.create()
    made.append(1)
    made.append(2)
    made.stray()
    made.age()
    return made


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The locations of the metadata files that collections have read."""
    locations: list[str] = []
    for name in ("read_metadata_fields", "read_manifest_list", "read_manifest_paths"):

        def read(io: Any, location: str, *rest: Any, original: Any) -> Any:
            locations.append(location)
            return original(io, location, *rest)

        monkeypatch.setattr(reachable_files, name, partial(read, original=getattr(reachable_files, name)))
    return locations


def test_an_unchanged_lake_is_not_read_again(lake: CollectedLake, read_files: list[str]) -> None:
    first = plan(lake, with_cache=True)
    assert len(read_files) == 3 + 2 + 2  # states, manifest lists and manifests
    written = cache_file(lake).stat()
    read_files.clear()
    second = plan(lake, with_cache=True)
    assert (read_files, describe(second)) == ([], describe(first))
    assert cache_file(lake).stat().st_ino == written.st_ino
    assert written.st_mode & 0o777 == 0o600


def test_only_new_files_are_read(lake: CollectedLake, read_files: list[str]) -> None:
    plan(lake, with_cache=True)
    read_files.clear()
    lake.append(3)
    age_new_files(lake)
    plan(lake, with_cache=True)
    assert len(read_files) == 3


def test_entries_that_a_pass_does_not_need_are_dropped(lake: CollectedLake) -> None:
    lake.branch("other")
    lake.append(3, ref="other")
    lake.age()
    plan(lake, with_cache=True)
    size = cache_file(lake).stat().st_size
    lake.delete("other")
    plan(lake, with_cache=True)
    assert cache_file(lake).stat().st_size < size


def test_files_of_a_young_table_are_read_again(lake: CollectedLake, read_files: list[str]) -> None:
    """A store that reports whole seconds may give the same time to a file that is written again."""
    plan(lake, with_cache=True)
    lake.append(3)
    plan(lake, with_cache=True)
    read_files.clear()
    plan(lake, with_cache=True)
    assert len(read_files) == 3


def test_a_damaged_cache_is_reported_and_a_missing_one_is_not(lake: CollectedLake) -> None:
    sentences: list[str] = []
    lake.collector(progress=sentences.append).plan()
    assert not any("metadata cache" in sentence for sentence in sentences)
    cache_file(lake).write_bytes(b"damaged")
    lake.collector(progress=sentences.append).plan()
    assert any("metadata cache" in sentence for sentence in sentences)


def test_a_cache_that_cannot_be_written_is_reported(lake: CollectedLake) -> None:
    cache_file(lake).with_name(f"{CACHE_FILE}.new").mkdir()
    sentences: list[str] = []
    made = lake.collector(progress=sentences.append).plan()
    assert describe(made) == describe(plan(lake, with_cache=False))
    assert any("metadata cache" in sentence for sentence in sentences)
    assert not cache_file(lake).exists()


@pytest.mark.parametrize("max_bytes", [0, 600, 1_500])
def test_a_full_cache_keeps_what_fits(
    lake: CollectedLake, monkeypatch: pytest.MonkeyPatch, read_files: list[str], max_bytes: int
) -> None:
    original = MetadataCache.__init__

    def limit(self: MetadataCache, *args: Any, **options: Any) -> None:
        original(self, *args, **options, max_bytes=max_bytes)

    monkeypatch.setattr(MetadataCache, "__init__", limit)
    for _ in range(2):
        require_equal_plans(lake)
    cache = open_cache(lake)
    size = sum(
        len(entries.locations[row]) + 32
        for entries in cache._load().values()
        for row in entries.rows.values()
    )
    assert size <= max_bytes
    read_files.clear()
    plan(lake, with_cache=True)
    assert 0 < len(read_files) <= 7


# -- caches that are not used --------------------------------------------------------------------------


def open_cache(
    lake: CollectedLake, *, identity: str | None = None, now: datetime | None = None
) -> MetadataCache:
    return MetadataCache(
        cache_file(lake),
        WarehouseFiles.from_settings(lake.lake.settings),
        LocationKeyer(),
        now or datetime.now(UTC),
        lake_identity='{"s3.endpoint": null, "s3.region": null}' if identity is None else identity,
    )


def count_entries(cache: MetadataCache) -> int:
    return sum(len(entries.rows) for entries in cache._load().values())


def test_a_damaged_cache_is_ignored_and_replaced(lake: CollectedLake) -> None:
    plan(lake, with_cache=True)
    content = cache_file(lake).read_bytes()
    assert count_entries(open_cache(lake)) == 7
    seed = random.randrange(1 << 32)
    numbers = random.Random(seed)
    damaged = [b"", b"x", content[:-1], content[: len(content) // 2], content + b"x", os.urandom(2_000)]
    for _ in range(60):
        position = numbers.randrange(len(content))
        flipped = bytes([content[position] ^ (1 << numbers.randrange(8))])
        damaged.append(content[:position] + flipped + content[position + 1 :])
    for each in damaged:
        cache_file(lake).write_bytes(each)
        assert count_entries(open_cache(lake)) == 0, seed
    require_equal_plans(lake)
    assert count_entries(open_cache(lake)) == 7


def test_a_cache_that_lacks_a_section_is_ignored(lake: CollectedLake) -> None:
    """Its checksum is right, as of a cache that another version wrote."""
    plan(lake, with_cache=True)
    content = cache_file(lake).read_bytes()[:-32].replace(b'"manifests": [', b'"manifest_": [')
    cache_file(lake).write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())
    assert count_entries(open_cache(lake)) == 0
    require_equal_plans(lake)


def test_a_cache_of_another_lake_is_ignored(lake: CollectedLake, tmp_path: Path) -> None:
    other = open_lake(tmp_path / "other")
    other.create()
    other.append(7)
    other.age()
    plan(lake, with_cache=True)
    plan(other, with_cache=True)
    shutil.copy(cache_file(other), cache_file(lake))
    assert count_entries(open_cache(lake)) == 0
    require_equal_plans(lake)
    assert count_entries(open_cache(lake)) == 7
    assert count_entries(open_cache(lake, identity="another endpoint")) == 0


def test_a_cache_with_other_keys_is_ignored(lake: CollectedLake, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(lake, with_cache=True)
    original = LocationKeyer.keys
    monkeypatch.setattr(LocationKeyer, "keys", lambda *args: original(*args) + np.uint64(1))
    assert count_entries(open_cache(lake)) == 0


# -- files that were written again ---------------------------------------------------------------------

MANIFEST = "01234567-89ab-cdef-0123-456789abcdef-m0.avro"
FILES = StateFiles(("list",), (("manifest", 0),), ("statistics",), ("folder/",))


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    folder = tmp_path / "warehouse" / "t" / "metadata"
    folder.mkdir(parents=True)
    path = folder / MANIFEST
    path.write_bytes(b"12345678")
    return path


def new_cache(
    path: Path, *, now: timedelta = DAY, identity: str = "", keyer: LocationKeyer | None = None
) -> MetadataCache:
    """A cache of the warehouse of `one_file`, at a moment after now."""
    root = next(parent for parent in path.parents if parent.name == "warehouse")
    files = WarehouseFiles(f"file://{root}", {})
    return MetadataCache(
        root.parent / "cache",
        files,
        keyer or LocationKeyer(),
        datetime.now(UTC) + now,
        lake_identity=identity,
    )


def keep_manifest(path: Path, data: str = "file:///data/x.parquet", **options: Any) -> ManifestKeys:
    keyer = LocationKeyer()
    keys = ManifestKeys(keyer.keys([data]), keyer.keys([f"{data}2"]), np.array([5], np.int64))
    cache = new_cache(path, keyer=keyer, **options)
    cache.note_reading([f"file://{path}"])
    cache.add_manifest(f"file://{path}", keys, [data.rpartition("/")[0]])
    cache.save()
    return keys


def find_manifest(path: Path, length: int = 8) -> ManifestKeys | None:
    return new_cache(path).find_manifest(f"file://{path}", length)


@pytest.mark.usefixtures("real_file_times")
def test_an_entry_comes_back_as_it_was_added(one_file: Path) -> None:
    keys = keep_manifest(one_file)
    found = find_manifest(one_file)
    assert found is not None
    for name in ("live", "removed", "removed_by"):
        assert getattr(found, name).tolist() == getattr(keys, name).tolist()
        assert getattr(found, name).dtype == getattr(keys, name).dtype
    assert find_manifest(one_file, 9) is None
    cache = new_cache(one_file)
    location = f"file://{one_file}"
    assert cache.find_manifest(location, 8) is not None
    cache.note_reading([location])
    cache.add_state(location, FILES)
    cache.add_list(location, [("m1", 1), ("m2", 1 << 40)])
    cache.save()
    cache = new_cache(one_file)
    assert cache.find_state(location) == FILES
    assert cache.find_list(location) == [("m1", 1), ("m2", 1 << 40)]
    assert find_manifest(one_file) is not None


def rewrite_in_place(path: Path) -> None:
    status = path.stat()
    path.write_bytes(b"87654321")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_by_another(path: Path) -> None:
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"87654321")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def restore_from_a_backup(path: Path) -> None:
    copy = shutil.copy2(path, path.with_name("copy"))
    path.unlink()
    shutil.copy2(copy, path)


def truncate(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.usefixtures("real_file_times")
@pytest.mark.parametrize(
    "change",
    [
        rewrite_in_place,
        replace_by_another,
        restore_from_a_backup,
        truncate,
        replace_by_a_folder,
        Path.unlink,
    ],
)
def test_a_file_that_was_written_again_is_read(one_file: Path, change: Callable[[Path], None]) -> None:
    keep_manifest(one_file)
    assert find_manifest(one_file) is not None
    change(one_file)
    assert find_manifest(one_file) is None


@pytest.mark.usefixtures("real_file_times")
def test_a_file_that_changes_while_it_is_read_is_not_kept(one_file: Path) -> None:
    keyer = LocationKeyer()
    cache = new_cache(one_file, keyer=keyer)
    location = f"file://{one_file}"
    cache.note_reading([location])
    rewrite_in_place(one_file)
    cache.add_manifest(location, ManifestKeys(*2 * [keyer.keys([])], np.empty(0, np.int64)), [])
    cache.save()
    assert find_manifest(one_file) is None
    keep_manifest(one_file)
    assert find_manifest(one_file) is not None


@pytest.mark.usefixtures("real_file_times")
def test_young_files_are_not_kept(one_file: Path) -> None:
    keep_manifest(one_file, now=timedelta(seconds=9))
    assert find_manifest(one_file) is None
    keep_manifest(one_file, now=timedelta(seconds=20))
    assert find_manifest(one_file) is not None


@pytest.mark.usefixtures("real_file_times")
@pytest.mark.parametrize("name", ["v3.metadata.json", "manifest.avro", f"{MANIFEST}/x.avro", f"a#{MANIFEST}"])
def test_files_with_other_names_are_not_kept(one_file: Path, name: str) -> None:
    """Hadoop's catalog writes `v3.metadata.json` again after a table was dropped."""
    path = one_file.parent / "a" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"12345678")
    keep_manifest(path)
    assert find_manifest(path) is None
    keep_manifest(one_file)
    assert find_manifest(one_file) is not None


@pytest.mark.usefixtures("real_file_times")
def test_files_outside_the_warehouse_are_not_kept(one_file: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere" / MANIFEST
    outside.parent.mkdir()
    outside.write_bytes(b"12345678")
    linked = one_file.parent / "linked"
    linked.symlink_to(outside.parent)
    for location in (f"file://{outside}", f"file://{linked / MANIFEST}"):
        cache = new_cache(one_file)
        cache.note_reading([location])
        cache.add_state(location, FILES)
        cache.save()
        assert new_cache(one_file).find_state(location) is None


@pytest.mark.usefixtures("real_file_times")
def test_keys_are_computed_again_if_a_link_leads_elsewhere(one_file: Path, tmp_path: Path) -> None:
    """The data lies behind a link, which leads to another disk after the first pass."""
    disks = tmp_path / "disk1", tmp_path / "disk2"
    for disk in disks:
        disk.mkdir()
    link = tmp_path / "link"
    link.symlink_to(disks[0])
    keys = keep_manifest(one_file, data=f"file://{link}/x.parquet")
    assert find_manifest(one_file) is not None
    link.unlink()
    link.symlink_to(disks[1])
    assert LocationKeyer().keys([f"file://{link}/x.parquet"]) != keys.live
    assert find_manifest(one_file) is None


def test_stamps_of_a_remote_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By listings and by single requests; both notice files that are missing."""
    files = WarehouseFiles(f"file://{tmp_path}", {})
    files.is_local = False
    system = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    requests: list[object] = []

    class Counting:
        def get_file_info(self, what: Any) -> Any:
            requests.append(what)
            return FileSystem.get_file_info(system, what)

    files._system = Counting()
    for folder, count in (("large", 30), ("small", 3)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number}.avro").write_bytes(bytes(number))
    paths = [f"large/{number}.avro" for number in range(40)] + [f"small/{number}.avro" for number in range(5)]
    single = files.read_stamps(paths)
    assert len(requests) == 45
    requests.clear()
    monkeypatch.setattr(warehouse_files, "MIN_LISTED_FILES", 20)
    assert files.read_stamps(paths) == single
    assert len(requests) == 1 + 5
    sizes = [stamp.size if stamp is not None else None for stamp in single]
    assert sizes == [*range(30), *10 * [None], 0, 1, 2, None, None]
    assert all(stamp.inode == 0 and stamp.modified_ns > 0 for stamp in single if stamp is not None)
