"""Manifests and their entries, compared with those that PyIceberg reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField

from branchlake_dagster.catalog.stored_files import StoredFileDamaged, read_content
from branchlake_dagster.history import manifests
from branchlake_dagster.history.manifests import (
    read_added_files,
    read_entries,
    read_live_files,
    read_manifest_entries,
    read_manifests,
    read_own_entries,
)
from branchlake_dagster_tests.history.snapshot_tables import BY_DAY, SCHEMA, append, catalogue, replace_day

ROWS = Schema(NestedField(1, "n", LongType()))


def write_snapshot(folder: Path) -> Snapshot:
    """A snapshot whose one manifest names 200 files."""
    io = PyArrowFileIO()
    path = f"file://{folder}/m0.avro"
    with write_manifest(2, UNPARTITIONED_PARTITION_SPEC, ROWS, io.new_output(path), 1, "deflate") as writer:
        for number in range(200):
            file = DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=f"s3://lake/{number}",
                file_format=FileFormat.PARQUET,
                partition=Record(),
                record_count=number,
                file_size_in_bytes=100,
            )
            writer.add_entry(
                ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file, snapshot_id=1)
            )
    manifests = f"file://{folder}/snap.avro"
    with write_manifest_list(2, io.new_output(manifests), 1, None, 1, "deflate") as lists:
        lists.add_manifests([writer.to_manifest_file()])
    return Snapshot(snapshot_id=1, manifest_list=manifests, timestamp_ms=1)


def test_manifests_and_entries_are_those_of_pyiceberg(tmp_path: Path) -> None:
    io, snapshot = PyArrowFileIO(), write_snapshot(tmp_path)
    (manifest,) = read_manifests(io, snapshot)
    (expected,) = snapshot.manifests(io)
    assert manifest == expected
    assert manifest.added_files_count == 200
    assert list(read_manifest_entries(io, manifest)) == expected.fetch_manifest_entry(
        io, discard_deleted=False
    )


def test_a_truncated_manifest_or_manifest_list_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    io, snapshot = PyArrowFileIO(), write_snapshot(tmp_path)
    (manifest,) = read_manifests(io, snapshot)
    reads: dict[str, Callable[[], object]] = {
        "m0.avro": lambda: list(read_manifest_entries(io, manifest)),
        "snap.avro": lambda: list(read_manifests(io, snapshot)),
    }
    for name, read in reads.items():
        content = (tmp_path / name).read_bytes()
        for size in {*range(0, len(content), 97), *range(len(content) - 40, len(content))}:
            (tmp_path / name).write_bytes(content[:size])
            with pytest.raises(StoredFileDamaged) as raised:
                read()
            assert raised.value.file == f"file://{tmp_path}/{name}"
        (tmp_path / name).write_bytes(content)
        read()


def test_a_missing_file_is_reported_with_its_location(tmp_path: Path) -> None:
    io, snapshot = PyArrowFileIO(), write_snapshot(tmp_path)
    (manifest,) = read_manifests(io, snapshot)
    reads: dict[str, Callable[[], object]] = {
        "m0.avro": lambda: list(read_own_entries(io, manifest, 1)),
        "snap.avro": lambda: list(read_live_files(io, snapshot)),
    }
    for name, read in reads.items():
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError) as raised:
            read()
        assert raised.value.filename == f"file://{tmp_path}/{name}"


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    """A table of two appends, of which a third snapshot replaced one day."""
    with catalogue(tmp_path) as catalog:
        table = catalog.create_table("shop.t", SCHEMA, partition_spec=BY_DAY)
        append(table, [("a", 1), ("b", 2)])
        append(table, [("c", 3)])
        replace_day(table, "a", [("a", 4)])
        yield table


def test_the_files_of_snapshots(table: Table) -> None:
    io = table.io
    for snapshot in table.snapshots():
        live_paths = [file.file_path for file in read_live_files(io, snapshot)]
        tasks = table.scan(snapshot_id=snapshot.snapshot_id).plan_files()
        assert sorted(live_paths) == sorted(task.file.file_path for task in tasks)
        assert [file.file_path for file in read_live_files(io, snapshot, ManifestContent.DATA)] == live_paths
        assert not list(read_live_files(io, snapshot, ManifestContent.DELETES))
        expected = [
            entry
            for manifest in snapshot.manifests(io)
            for entry in manifest.fetch_manifest_entry(io, discard_deleted=False)
        ]
        assert list(read_entries(io, snapshot)) == expected
        assert [file.file_path for file in read_added_files(io, snapshot)] == [
            entry.data_file.file_path
            for entry in expected
            if entry.snapshot_id == snapshot.snapshot_id and entry.status == ManifestEntryStatus.ADDED
        ]
        own_entries = [
            entry
            for manifest in read_manifests(io, snapshot)
            for entry in read_own_entries(io, manifest, snapshot.snapshot_id)
        ]
        assert own_entries == [
            entry
            for entry in expected
            if entry.snapshot_id == snapshot.snapshot_id and entry.status != ManifestEntryStatus.EXISTING
        ]
    assert list(read_manifests(io, None)) == list(read_live_files(io, None)) == []


def test_no_manifest_is_read_before_its_files_are_needed(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def recorded_content(io: FileIO, location: str, size: int = 0) -> bytes:
        read.append(location)
        return read_content(io, location, size)

    monkeypatch.setattr(manifests, "read_content", recorded_content)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    files = read_live_files(table.io, snapshot)
    assert not read
    next(files)
    assert read == [snapshot.manifest_list, snapshot.manifests(table.io)[0].manifest_path]
    list(files)
    assert len(read) == len(set(read)) == 1 + len(snapshot.manifests(table.io))
