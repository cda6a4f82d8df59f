"""The files that a snapshot added and removed, or has. Manifests never change, so each is read once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO

import polars as pl
from cachetools import LRUCache
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntryStatus,
    ManifestFile,
    read_manifest_list,
)
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.internals.pyiceberg_manifests import iter_entries

_MAX_READERS = 8
"""Manifests that are read side by side: each is a request to the store."""
_LIVE = -1
"""In the place of a snapshot's id: all that is in a manifest."""
_FEW_ENTRIES = 500
"""Entries of other snapshots that are read with a snapshot's own, rather than being left out."""


@dataclass(frozen=True)
class OwnFiles:
    """The data and delete files that a snapshot added and removed."""

    added: tuple[DataFile, ...] = ()
    removed: tuple[DataFile, ...] = ()

    def __len__(self) -> int:
        return len(self.added) + len(self.removed)


@dataclass(frozen=True)
class LiveFile:
    """A file that is in a manifest and was not taken out, and the snapshot that added it."""

    file: DataFile
    snapshot_id: int
    is_data: bool


class OwnFilesCache:
    """By snapshot and manifest. Safe to share between threads.

    Holds what was used last, at most `most_bytes` by an estimate that is rather too large.
    """

    def __init__(self, *, max_bytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._cache: LRUCache[tuple[str, int], tuple[OwnFiles | tuple[LiveFile, ...], int]]
        self._cache = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])

    def load_files(
        self, snapshots: Sequence[Snapshot], head: Snapshot | None, io: FileIO
    ) -> dict[int, OwnFiles]:
        """The files of each snapshot by its id; `head` is the table's current one.

        Raises FileNotFoundError when a manifest is gone.
        """
        files_by_snapshot: dict[int, OwnFiles] = {}
        missing: list[Snapshot] = []
        for snapshot in snapshots:
            cached_files = self._find_cached((snapshot.manifest_list, snapshot.snapshot_id))
            if isinstance(cached_files, OwnFiles):
                files_by_snapshot[snapshot.snapshot_id] = cached_files
            else:
                missing.append(snapshot)
        if missing:
            for snapshot, files in _read_snapshots(missing, head, io):
                files_by_snapshot[snapshot.snapshot_id] = files
                self._store_files((snapshot.manifest_list, snapshot.snapshot_id), files)
        return files_by_snapshot

    def load_live_files(self, snapshot: Snapshot, io: FileIO) -> list[LiveFile]:
        """All files that a snapshot has. Raises FileNotFoundError when a manifest is gone."""
        manifests = snapshot.manifests(io)
        with ThreadPoolExecutor(min(_MAX_READERS, len(manifests)) or 1) as pool:
            return [
                file
                for files in pool.map(lambda manifest: self._load_live_manifest(manifest, io), manifests)
                for file in files
            ]

    def _load_live_manifest(self, manifest: ManifestFile, io: FileIO) -> tuple[LiveFile, ...]:
        key = manifest.manifest_path, _LIVE
        cached_files = self._find_cached(key)
        if isinstance(cached_files, tuple):
            return cached_files
        is_data = manifest.content is ManifestContent.DATA
        with io.new_input(manifest.manifest_path).open() as stream:
            content = stream.read()
        files = tuple(
            LiveFile(entry.data_file, entry.snapshot_id or manifest.added_snapshot_id or 0, is_data)
            for entry in iter_entries(manifest, content)
            if entry.status != ManifestEntryStatus.DELETED
        )
        self._store_files(key, files)
        return files

    def _find_cached(self, key: tuple[str, int]) -> OwnFiles | tuple[LiveFile, ...] | None:
        with self._lock:
            entry = self._cache.get(key)
        return None if entry is None else entry[0]

    def _store_files(self, key: tuple[str, int], files: OwnFiles | tuple[LiveFile, ...]) -> None:
        data_files = (
            (*files.added, *files.removed)
            if isinstance(files, OwnFiles)
            else [live_file.file for live_file in files]
        )
        size = _BYTES_OF_A_FILE + sum(map(_estimate_bytes, data_files))
        with self._lock:
            if size <= self._cache.maxsize:
                self._cache[key] = files, size


_BYTES_OF_A_FILE, _BYTES_OF_A_COLUMN = 2_000, 350
"""In CPython 3.11: what a file takes without its columns, and a column with its counts and short bounds."""


def _estimate_bytes(file: DataFile) -> int:
    """The memory that the description of a file takes: 7 kB with 20 columns, 75 kB with 200."""
    bounds = [values for values in (file.lower_bounds, file.upper_bounds) if values is not None]
    columns = max(len(file.value_counts or ()), *map(len, bounds), 0)
    lengths = sum(len(bound) for values in bounds for bound in values.values())
    return _BYTES_OF_A_FILE + columns * _BYTES_OF_A_COLUMN + lengths


CACHE = OwnFilesCache()
"""Of this process."""


def _read_snapshots(
    snapshots: Sequence[Snapshot], head: Snapshot | None, io: FileIO
) -> list[tuple[Snapshot, OwnFiles]]:
    by_snapshot: dict[int, list[ManifestFile]] = {}
    if head is not None and len(snapshots) > 1:
        # One list instead of one for each: an append's manifests stay in the lists of those after it.
        wanted = {one.snapshot_id for one in snapshots}
        for manifest in head.manifests(io):
            if manifest.added_snapshot_id in wanted:
                by_snapshot.setdefault(manifest.added_snapshot_id, []).append(manifest)
    with ThreadPoolExecutor(min(_MAX_READERS, len(snapshots))) as pool:
        lists = list(
            pool.map(lambda one: _own_manifests(one, by_snapshot.get(one.snapshot_id, []), io), snapshots)
        )
        reads = [
            [pool.submit(_read_own_entries, manifest, one.snapshot_id, io) for manifest in manifests]
            for one, manifests in zip(snapshots, lists, strict=True)
        ]
        return [
            (one, _merge_files([read.result() for read in each]))
            for one, each in zip(snapshots, reads, strict=True)
        ]


def _own_manifests(snapshot: Snapshot, known_manifests: list[ManifestFile], io: FileIO) -> list[ManifestFile]:
    """The manifests that name what the snapshot changed."""
    if _is_whole_append(snapshot, known_manifests):
        return known_manifests
    own_manifests: list[ManifestFile] = []
    for manifest in read_manifest_list(io.new_input(snapshot.manifest_list)):
        if manifest.added_snapshot_id == snapshot.snapshot_id and _has_changes(manifest):
            own_manifests.append(manifest)
            if _is_whole_append(snapshot, own_manifests):
                break  # engines put the new ones first, and the list is as long as the table is old
    return own_manifests


def _has_changes(manifest: ManifestFile) -> bool:
    """False for one that only gathers what others had named: a merged manifest may be large."""
    counts = manifest.added_files_count, manifest.deleted_files_count
    return None in counts or any(counts)


def _is_whole_append(snapshot: Snapshot, manifests: list[ManifestFile]) -> bool:
    """Whether these manifests, found in a later list, name all that the snapshot says it added."""
    summary = snapshot.summary
    if summary is None or summary.operation is not Operation.APPEND or not manifests:
        return False
    added_count = summary.additional_properties.get("added-data-files", "")
    return added_count.isdigit() and int(added_count) == sum(
        manifest.added_files_count or 0 for manifest in manifests
    )


def _read_own_entries(manifest: ManifestFile, snapshot_id: int, io: FileIO) -> OwnFiles:
    with io.new_input(manifest.manifest_path).open() as stream:
        content = stream.read()
    entry_indexes = _find_entry_indexes(content, manifest, snapshot_id) if _mostly_others(manifest) else None
    own_entries = [
        entry
        for entry in iter_entries(manifest, content, entry_indexes)
        if entry.snapshot_id == snapshot_id and entry.status != ManifestEntryStatus.EXISTING
    ]
    files_by_status: Callable[[bool], tuple[DataFile, ...]] = lambda is_new: tuple(  # noqa: E731
        entry.data_file for entry in own_entries if (entry.status == ManifestEntryStatus.ADDED) is is_new
    )
    return OwnFiles(files_by_status(True), files_by_status(False))


def _mostly_others(manifest: ManifestFile) -> bool:
    """Whether it pays to look for a snapshot's own entries first."""
    return manifest.existing_files_count is None or manifest.existing_files_count > _FEW_ENTRIES


def _find_entry_indexes(content: bytes, manifest: ManifestFile, snapshot_id: int) -> list[int] | None:
    """Where in a manifest the snapshot's own entries are; None: not known.

    A merged manifest may name all the files of a table, and its status column alone is read in a tenth of
    the time.
    """
    try:
        columns = pl.read_avro(BytesIO(content), columns=["status", "snapshot_id"])
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):  # a codec that it does not know
        return None
    added_by = pl.col("snapshot_id").fill_null(manifest.added_snapshot_id)
    is_own = (pl.col("status") != ManifestEntryStatus.EXISTING.value) & (added_by == snapshot_id)
    return columns.select(is_own.arg_true()).to_series().to_list()


def _merge_files(parts: Sequence[OwnFiles]) -> OwnFiles:
    return OwnFiles(
        tuple(file for part in parts for file in part.added),
        tuple(file for part in parts for file in part.removed),
    )
