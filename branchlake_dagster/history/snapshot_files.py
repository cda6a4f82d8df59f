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

from branchlake_dagster.internals.pyiceberg_manifests import entries_of

_READERS = 8
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

    def __init__(self, *, most_bytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._found: LRUCache[tuple[str, int], tuple[OwnFiles | tuple[LiveFile, ...], int]]
        self._found = LRUCache(most_bytes, getsizeof=lambda kept: kept[1])

    def of(self, snapshots: Sequence[Snapshot], head: Snapshot | None, io: FileIO) -> dict[int, OwnFiles]:
        """The files of each snapshot by its id; `head` is the table's current one.

        Raises FileNotFoundError when a manifest is gone.
        """
        found: dict[int, OwnFiles] = {}
        missing: list[Snapshot] = []
        for one in snapshots:
            held = self._held_for((one.manifest_list, one.snapshot_id))
            if isinstance(held, OwnFiles):
                found[one.snapshot_id] = held
            else:
                missing.append(one)
        if missing:
            for one, files in _read(missing, head, io):
                found[one.snapshot_id] = files
                self._keep((one.manifest_list, one.snapshot_id), files)
        return found

    def live(self, snapshot: Snapshot, io: FileIO) -> list[LiveFile]:
        """All files that a snapshot has. Raises FileNotFoundError when a manifest is gone."""
        manifests = snapshot.manifests(io)
        with ThreadPoolExecutor(min(_READERS, len(manifests)) or 1) as pool:
            return [
                file for files in pool.map(lambda one: self._live_in(one, io), manifests) for file in files
            ]

    def _live_in(self, manifest: ManifestFile, io: FileIO) -> tuple[LiveFile, ...]:
        key = manifest.manifest_path, _LIVE
        held = self._held_for(key)
        if isinstance(held, tuple):
            return held
        is_data = manifest.content is ManifestContent.DATA
        with io.new_input(manifest.manifest_path).open() as stream:
            content = stream.read()
        files = tuple(
            LiveFile(entry.data_file, entry.snapshot_id or manifest.added_snapshot_id or 0, is_data)
            for entry in entries_of(manifest, content)
            if entry.status != ManifestEntryStatus.DELETED
        )
        self._keep(key, files)
        return files

    def _held_for(self, key: tuple[str, int]) -> OwnFiles | tuple[LiveFile, ...] | None:
        with self._lock:
            kept = self._found.get(key)
        return None if kept is None else kept[0]

    def _keep(self, key: tuple[str, int], files: OwnFiles | tuple[LiveFile, ...]) -> None:
        held = (*files.added, *files.removed) if isinstance(files, OwnFiles) else [one.file for one in files]
        size = _BYTES_OF_A_FILE + sum(map(_bytes_of, held))
        with self._lock:
            if size <= self._found.maxsize:
                self._found[key] = files, size


_BYTES_OF_A_FILE, _BYTES_OF_A_COLUMN = 2_000, 350
"""In CPython 3.11: what a file takes without its columns, and a column with its counts and short bounds."""


def _bytes_of(file: DataFile) -> int:
    """The memory that the description of a file takes: 7 kB with 20 columns, 75 kB with 200."""
    bounds = [one for one in (file.lower_bounds, file.upper_bounds) if one is not None]
    columns = max(len(file.value_counts or ()), *map(len, bounds), 0)
    lengths = sum(len(bound) for one in bounds for bound in one.values())
    return _BYTES_OF_A_FILE + columns * _BYTES_OF_A_COLUMN + lengths


CACHE = OwnFilesCache()
"""Of this process."""


def _read(
    snapshots: Sequence[Snapshot], head: Snapshot | None, io: FileIO
) -> list[tuple[Snapshot, OwnFiles]]:
    by_snapshot: dict[int, list[ManifestFile]] = {}
    if head is not None and len(snapshots) > 1:
        # One list instead of one for each: an append's manifests stay in the lists of those after it.
        wanted = {one.snapshot_id for one in snapshots}
        for manifest in head.manifests(io):
            if manifest.added_snapshot_id in wanted:
                by_snapshot.setdefault(manifest.added_snapshot_id, []).append(manifest)
    with ThreadPoolExecutor(min(_READERS, len(snapshots))) as pool:
        lists = list(
            pool.map(lambda one: _manifests(one, by_snapshot.get(one.snapshot_id, []), io), snapshots)
        )
        reads = [
            [pool.submit(_entries, manifest, one.snapshot_id, io) for manifest in manifests]
            for one, manifests in zip(snapshots, lists, strict=True)
        ]
        return [
            (one, _joined([read.result() for read in each]))
            for one, each in zip(snapshots, reads, strict=True)
        ]


def _manifests(snapshot: Snapshot, kept: list[ManifestFile], io: FileIO) -> list[ManifestFile]:
    """The manifests that name what the snapshot changed."""
    if _is_whole_append(snapshot, kept):
        return kept
    own: list[ManifestFile] = []
    for manifest in read_manifest_list(io.new_input(snapshot.manifest_list)):
        if manifest.added_snapshot_id == snapshot.snapshot_id and _has_changes(manifest):
            own.append(manifest)
            if _is_whole_append(snapshot, own):
                break  # engines put the new ones first, and the list is as long as the table is old
    return own


def _has_changes(manifest: ManifestFile) -> bool:
    """False for one that only gathers what others had named: a merged manifest may be large."""
    counts = manifest.added_files_count, manifest.deleted_files_count
    return None in counts or any(counts)


def _is_whole_append(snapshot: Snapshot, manifests: list[ManifestFile]) -> bool:
    """Whether these manifests, found in a later list, name all that the snapshot says it added."""
    summary = snapshot.summary
    if summary is None or summary.operation is not Operation.APPEND or not manifests:
        return False
    told = summary.additional_properties.get("added-data-files", "")
    return told.isdigit() and int(told) == sum(one.added_files_count or 0 for one in manifests)


def _entries(manifest: ManifestFile, snapshot_id: int, io: FileIO) -> OwnFiles:
    with io.new_input(manifest.manifest_path).open() as stream:
        content = stream.read()
    places = _places(content, manifest, snapshot_id) if _mostly_others(manifest) else None
    own = [
        entry
        for entry in entries_of(manifest, content, places)
        if entry.snapshot_id == snapshot_id and entry.status != ManifestEntryStatus.EXISTING
    ]
    of: Callable[[bool], tuple[DataFile, ...]] = lambda new: tuple(  # noqa: E731
        one.data_file for one in own if (one.status == ManifestEntryStatus.ADDED) is new
    )
    return OwnFiles(of(True), of(False))


def _mostly_others(manifest: ManifestFile) -> bool:
    """Whether it pays to look for a snapshot's own entries first."""
    return manifest.existing_files_count is None or manifest.existing_files_count > _FEW_ENTRIES


def _places(content: bytes, manifest: ManifestFile, snapshot_id: int) -> list[int] | None:
    """Where in a manifest the snapshot's own entries are; None: not known.

    A merged manifest may name all the files of a table, and its status column alone is read in a tenth of
    the time.
    """
    try:
        columns = pl.read_avro(BytesIO(content), columns=["status", "snapshot_id"])
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):  # a codec that it does not know
        return None
    by = pl.col("snapshot_id").fill_null(manifest.added_snapshot_id)
    mine = (pl.col("status") != ManifestEntryStatus.EXISTING.value) & (by == snapshot_id)
    return columns.select(mine.arg_true()).to_series().to_list()


def _joined(parts: Sequence[OwnFiles]) -> OwnFiles:
    return OwnFiles(
        tuple(file for part in parts for file in part.added),
        tuple(file for part in parts for file in part.removed),
    )
