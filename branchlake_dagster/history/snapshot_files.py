"""Reads the files that snapshots added and removed, or that a snapshot has.

Manifests never change, so each is read once per process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cachetools import LRUCache
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntryStatus, ManifestFile
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.history.manifests import read_manifest_entries, read_manifests, read_own_entries

_MAX_READERS = 8
"""How many manifests are read in parallel. Each is a request to the object store."""
_LIVE = -1
"""Stands for a snapshot id in keys of the cache: all files in a manifest."""


@dataclass(frozen=True)
class OwnFiles:
    """The data and delete files that a snapshot added and removed."""

    added: tuple[DataFile, ...] = ()
    removed: tuple[DataFile, ...] = ()

    def __len__(self) -> int:
        return len(self.added) + len(self.removed)


@dataclass(frozen=True)
class LiveFile:
    """A file that a manifest lists and that was not removed, with the snapshot that added it."""

    file: DataFile
    snapshot_id: int
    is_data: bool


class OwnFilesCache:
    """A cache of files by snapshot and of files by manifest. Safe to share between threads.

    It keeps the entries that were used last, up to `max_bytes`. The estimate of their size is rather too
    large.
    """

    def __init__(self, *, max_bytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._cache: LRUCache[tuple[str, int], tuple[OwnFiles | tuple[LiveFile, ...], int]]
        self._cache = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])

    def load_files(
        self, snapshots: Sequence[Snapshot], head: Snapshot | None, io: FileIO
    ) -> dict[int, OwnFiles]:
        """Return the files that each snapshot added and removed, by snapshot id.

        `head` is the table's current snapshot. Raises FileNotFoundError if a manifest is missing.
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
        """Return all files of a snapshot. Raises FileNotFoundError if a manifest is missing."""
        manifests = list(read_manifests(io, snapshot))
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
        files = tuple(
            LiveFile(entry.data_file, entry.snapshot_id or manifest.added_snapshot_id or 0, is_data)
            for entry in read_manifest_entries(io, manifest)
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
"""Memory in CPython 3.11: of a file without its columns, and of a column with counts and short bounds."""


def _estimate_bytes(file: DataFile) -> int:
    """Estimate the memory of a file's description: 7 kB with 20 columns, 75 kB with 200."""
    bounds = [values for values in (file.lower_bounds, file.upper_bounds) if values is not None]
    columns = max(len(file.value_counts or ()), *map(len, bounds), 0)
    lengths = sum(len(bound) for values in bounds for bound in values.values())
    return _BYTES_OF_A_FILE + columns * _BYTES_OF_A_COLUMN + lengths


CACHE = OwnFilesCache()
"""The cache of this process."""


def _read_snapshots(
    snapshots: Sequence[Snapshot], head: Snapshot | None, io: FileIO
) -> list[tuple[Snapshot, OwnFiles]]:
    by_snapshot: dict[int, list[ManifestFile]] = {}
    if head is not None and len(snapshots) > 1:
        # Read one manifest list instead of one per snapshot: later lists keep the manifests of an append.
        wanted = {one.snapshot_id for one in snapshots}
        for manifest in read_manifests(io, head):
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
    """Return the manifests that list the files which the snapshot added or removed.

    `known_manifests` are those of the snapshot that a later manifest list still has.
    """
    if _is_whole_append(snapshot, known_manifests):
        return known_manifests
    own_manifests: list[ManifestFile] = []
    for manifest in read_manifests(io, snapshot):
        if manifest.added_snapshot_id == snapshot.snapshot_id and _has_changes(manifest):
            own_manifests.append(manifest)
            if _is_whole_append(snapshot, own_manifests):
                break  # engines list new manifests first, and the list grows with the table's age
    return own_manifests


def _has_changes(manifest: ManifestFile) -> bool:
    """Whether a manifest lists added or removed files.

    A merged manifest may list only existing files, and may be large.
    """
    counts = manifest.added_files_count, manifest.deleted_files_count
    return None in counts or any(counts)


def _is_whole_append(snapshot: Snapshot, manifests: list[ManifestFile]) -> bool:
    """Whether these manifests list all files that an append's summary counts."""
    summary = snapshot.summary
    if summary is None or summary.operation is not Operation.APPEND or not manifests:
        return False
    added_count = summary.additional_properties.get("added-data-files", "")
    return added_count.isdigit() and int(added_count) == sum(
        manifest.added_files_count or 0 for manifest in manifests
    )


def _read_own_entries(manifest: ManifestFile, snapshot_id: int, io: FileIO) -> OwnFiles:
    own_entries = list(read_own_entries(io, manifest, snapshot_id))
    files_by_status: Callable[[bool], tuple[DataFile, ...]] = lambda is_new: tuple(  # noqa: E731
        entry.data_file for entry in own_entries if (entry.status == ManifestEntryStatus.ADDED) is is_new
    )
    return OwnFiles(files_by_status(True), files_by_status(False))


def _merge_files(parts: Sequence[OwnFiles]) -> OwnFiles:
    return OwnFiles(
        tuple(file for part in parts for file in part.added),
        tuple(file for part in parts for file in part.removed),
    )
