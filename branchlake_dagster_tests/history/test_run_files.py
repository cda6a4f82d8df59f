"""A snapshot's own files among those of others, in manifests as an engine that merges them writes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.typedef import Record

from branchlake_dagster.history.manifests import OwnFilesCache
from branchlake_dagster.internals.manifest_files import iter_entries
from branchlake_dagster_tests.history.snapshot_tables import BY_DAY, SCHEMA

OTHER, OWN = 11, 12
REMOVED = [0, 500, 999]
IO = PyArrowFileIO()
_BLOCK = 64


def file(number: int) -> DataFile:
    found = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"file:///nowhere/{number}.parquet",
        file_format=FileFormat.PARQUET,
        partition=Record(f"day {number}"),
        record_count=number,
        file_size_in_bytes=1,
        column_sizes={1: number, 2: 7},
        value_counts={1: number},
        null_value_counts={1: 0},
        nan_value_counts={},
        lower_bounds={1: b"a"},
        upper_bounds={1: b"b"},
        split_offsets=[4],
    )
    found.spec_id = 0
    return found


def entry(number: int, status: ManifestEntryStatus, snapshot_id: int | None) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=status,
        snapshot_id=snapshot_id,
        sequence_number=1,
        file_sequence_number=1,
        data_file=file(number),
    )


def write(writer: ManifestWriter, entries: Sequence[ManifestEntry]) -> None:
    """Many entries in one block, as Java's writer has them. PyIceberg's gives each a block of its own."""
    for start in range(0, len(entries), _BLOCK):
        block = [writer.prepare_entry(one) for one in entries[start : start + _BLOCK]]
        writer._writer.write_block(block)
    writer._existing_files += len(entries)


def merged(folder: Path, codec: str) -> ManifestFile:
    """A manifest of snapshot OWN: 1,000 files of another one, of which it removed three, and two of its own."""
    path = (folder / f"merged-{codec}.avro").as_uri()
    existing, added, deleted = (
        ManifestEntryStatus.EXISTING,
        ManifestEntryStatus.ADDED,
        ManifestEntryStatus.DELETED,
    )
    entries = [entry(5000, added, OWN)]
    entries += [
        entry(number, deleted, OWN) if number in REMOVED else entry(number, existing, OTHER)
        for number in range(1000)
    ]
    entries += [entry(5001, added, None), entry(5002, deleted, OTHER)]
    with write_manifest(2, BY_DAY, SCHEMA, IO.new_output(path), OWN, codec) as writer:
        write(writer, entries)
    return ManifestFile.from_args(
        manifest_path=path,
        manifest_length=1,
        partition_spec_id=0,
        content=0,
        sequence_number=2,
        min_sequence_number=1,
        added_snapshot_id=OWN,
        added_files_count=2,
        existing_files_count=997,
        deleted_files_count=4,
        added_rows_count=1,
        existing_rows_count=1,
        deleted_rows_count=1,
        partitions=[],
    )


@pytest.fixture(params=["deflate", "zstandard", "null"])
def manifest(request: pytest.FixtureRequest, tmp_path: Path) -> ManifestFile:
    return merged(tmp_path, request.param)


def paths(numbers: Sequence[int]) -> list[str]:
    return [f"file:///nowhere/{number}.parquet" for number in numbers]


def test_a_snapshots_own_files_are_found_in_a_merged_manifest(tmp_path: Path, manifest: ManifestFile) -> None:
    lists = (tmp_path / "list.avro").as_uri()
    with write_manifest_list(2, IO.new_output(lists), OWN, OTHER, 2, "deflate") as writer:
        writer.add_manifests([manifest])
    snapshot = Snapshot(
        snapshot_id=OWN, parent_snapshot_id=OTHER, manifest_list=lists, summary=Summary(Operation.OVERWRITE)
    )
    found = OwnFilesCache().load_files([snapshot], snapshot, IO)[OWN]
    assert [one.file_path for one in found.added] == paths([5000, 5001])
    assert [one.file_path for one in found.removed] == paths(REMOVED)
    assert [one.record_count for one in found.removed] == REMOVED
    assert [one.partition[0] for one in found.added] == ["day 5000", "day 5001"]
    assert {one.spec_id for one in (*found.added, *found.removed)} == {0}


def test_entries_at_places_are_those_that_pyiceberg_reads(manifest: ManifestFile) -> None:
    every = manifest.fetch_manifest_entry(IO, discard_deleted=False)
    content = Path(manifest.manifest_path.removeprefix("file://")).read_bytes()

    def told(entries: Sequence[ManifestEntry]) -> list[object]:
        return [(one._data[:4], one.data_file._data, one.data_file.spec_id) for one in entries]

    assert len(every) == 1003
    assert told(list(iter_entries(manifest, content))) == told(every)
    last = len(every) - 1
    for places in itertools.chain.from_iterable(
        itertools.combinations((0, 1, _BLOCK - 1, _BLOCK, 700, last), size) for size in range(4)
    ):
        found = list(iter_entries(manifest, content, places))
        assert told(found) == told([every[place] for place in places])
