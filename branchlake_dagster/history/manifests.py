"""Reads the manifest lists and manifests of snapshots. All other modules read them through this one.

The functions that read entries are generators: they read the storage while the caller iterates, and no
further than the caller iterates. They cache nothing. All raise FileNotFoundError or another OSError with the
location as `filename`, and StoredFileDamaged if a file is truncated or cannot be parsed.

`column_facts` returns facts about one column in all rows of a data file, from the file's manifest entry. It
returns only proved facts. `reliable_metrics` decides which counts and bounds can be trusted. If a column is
an identity partition, the partition value is the value in every row of the file.

`OwnFilesCache` reads the files that snapshots added and removed. Manifests never change, so it reads each of
them once per process, as long as its memory suffices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from io import BytesIO
from typing import Any

import polars as pl
from cachetools import LRUCache
from pyiceberg import types as ice
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.transforms import IdentityTransform

from branchlake_dagster.catalog.stored_files import read_content, wrap_parse_errors
from branchlake_dagster.internals.column_metrics import bound_value, reliable_metrics
from branchlake_dagster.internals.manifest_files import iter_entries, iter_manifests

_FEW_ENTRIES = 500
"""Up to this many entries of other snapshots are parsed and skipped. Above it, entries are located first."""


def read_manifests(io: FileIO, snapshot: Snapshot | None) -> Iterator[ManifestFile]:
    """Yield the data and delete manifests of a snapshot from its manifest list; none if `snapshot` is None.

    Raises StoredFileDamaged or OSError, such as FileNotFoundError if snapshot expiry has removed the list.
    """
    location = snapshot.manifest_list if snapshot is not None else None
    if location:
        content = read_content(io, location)
        with wrap_parse_errors(location):
            yield from iter_manifests(content)


def read_manifest_entries(io: FileIO, manifest: ManifestFile) -> Iterator[ManifestEntry]:
    """Yield all entries of a manifest, including those of deleted files.

    `io` reads the manifest file. Raises StoredFileDamaged or OSError.
    """
    content = read_content(io, manifest.manifest_path, manifest.manifest_length)
    with wrap_parse_errors(manifest.manifest_path):
        yield from iter_entries(manifest, content)


def read_own_entries(io: FileIO, manifest: ManifestFile, snapshot_id: int) -> Iterator[ManifestEntry]:
    """Yield the entries of files that a snapshot itself added or removed.

    In a manifest with many files of other snapshots, only the blocks with these entries are parsed.
    """
    content = read_content(io, manifest.manifest_path, manifest.manifest_length)
    has_many_others = manifest.existing_files_count is None or manifest.existing_files_count > _FEW_ENTRIES
    positions = _find_own_entries(content, manifest, snapshot_id) if has_many_others else None
    with wrap_parse_errors(manifest.manifest_path):
        for entry in iter_entries(manifest, content, positions):
            if is_own_entry(entry, snapshot_id):
                yield entry


def is_own_entry(entry: ManifestEntry, snapshot_id: int) -> bool:
    """Whether a snapshot itself added or removed the file of an entry."""
    return entry.snapshot_id == snapshot_id and entry.status != ManifestEntryStatus.EXISTING


def _find_own_entries(content: bytes, manifest: ManifestFile, snapshot_id: int) -> list[int] | None:
    """Return the indexes of the snapshot's own entries in a manifest.

    None if Polars cannot read the manifest. A merged manifest may list all files of a table. Reading only its
    status and snapshot columns takes a tenth of the time.
    """
    try:
        columns = pl.read_avro(BytesIO(content), columns=["status", "snapshot_id"])
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):  # a codec that Polars does not support
        return None
    added_by = pl.col("snapshot_id").fill_null(manifest.added_snapshot_id)
    is_own = (pl.col("status") != ManifestEntryStatus.EXISTING.value) & (added_by == snapshot_id)
    return columns.select(is_own.arg_true()).to_series().to_list()


def read_entries(
    io: FileIO, snapshot: Snapshot | None, content: ManifestContent | None = None
) -> Iterator[ManifestEntry]:
    """Yield the entries of all manifests of a snapshot, or only of its data or its delete manifests.

    Entries of deleted files are included.
    """
    for manifest in read_manifests(io, snapshot):
        if content is None or manifest.content == content:
            yield from read_manifest_entries(io, manifest)


def read_live_files(
    io: FileIO, snapshot: Snapshot | None, content: ManifestContent | None = None
) -> Iterator[DataFile]:
    """Yield the files of a snapshot that are not deleted: data files and delete files, or those of `content`.

    Yields nothing if `snapshot` is None. Raises StoredFileDamaged or OSError.
    """
    for entry in read_entries(io, snapshot, content):
        if entry.status != ManifestEntryStatus.DELETED:
            yield entry.data_file


def read_added_files(io: FileIO, snapshot: Snapshot) -> Iterator[DataFile]:
    """Yield the data and delete files that a snapshot itself added. Reads only its own manifests.

    Raises StoredFileDamaged or OSError.
    """
    for manifest in read_manifests(io, snapshot):
        if manifest.added_snapshot_id == snapshot.snapshot_id:
            for entry in read_manifest_entries(io, manifest):
                if entry.status == ManifestEntryStatus.ADDED:
                    yield entry.data_file


_VALUES: dict[type[ice.IcebergType], type] = {
    ice.BooleanType: bool,
    ice.IntegerType: int,
    ice.LongType: int,
    ice.FloatType: float,
    ice.DoubleType: float,
    ice.DateType: int,
    ice.TimeType: int,
    ice.TimestampType: int,
    ice.TimestamptzType: int,
    ice.StringType: str,
    ice.BinaryType: bytes,
    ice.UUIDType: bytes,
    ice.DecimalType: Decimal,
}
"""The types whose bounds can be decoded, and their Python types.

Dates are days, times and time stamps are microseconds, a UUID is its 16 bytes.
"""


@dataclass(frozen=True)
class ColumnFacts:
    """Facts about one column that are true for all rows of a file. False and None mean "not known".

    Every value that is neither null nor NaN lies between `low` and `high`, both included.
    """

    no_null: bool = False
    all_null: bool = False
    no_nan: bool = False
    low: Any = None
    high: Any = None


def column_facts(
    file: DataFile,
    field: ice.NestedField,
    spec: PartitionSpec,
    is_complete: Callable[[DataFile, int], bool] = lambda *_: False,
) -> ColumnFacts:
    """Return the facts about a top-level column. `spec` is the partition spec that the file was written with.

    `is_complete(file, field_id)` is called for a text column whose manifest entry does not show that its
    bounds cover all row groups. It returns whether they do.
    """
    kind = field.field_type
    if not isinstance(kind, ice.PrimitiveType):
        return ColumnFacts()
    for index, part in enumerate(spec.fields):
        if part.source_id == field.field_id and isinstance(part.transform, IdentityTransform):
            return _constant_facts(file.partition[index], kind)
    metrics, field_id = reliable_metrics(file, [field], is_complete), field.field_id
    null_count = metrics.null_value_counts.get(field_id)
    floating = isinstance(kind, ice.FloatType | ice.DoubleType)
    return ColumnFacts(
        no_null=null_count == 0,
        all_null=null_count == file.record_count,
        no_nan=not floating or metrics.nan_value_counts.get(field_id) == 0,
        low=_decode_bound(metrics.lower_bounds.get(field_id), kind),
        high=_decode_bound(metrics.upper_bounds.get(field_id), kind),
    )


def _constant_facts(value: Any, kind: ice.PrimitiveType) -> ColumnFacts:
    """Return the facts about an identity partition column, which has the same value in the whole file.

    `value` is the value in the partition, as PyIceberg decodes it; None means that all rows are null. If its
    Python type is unexpected, or it is NaN, only the absence of nulls is known. `kind` is the column's type.
    """
    if value is None:
        return ColumnFacts(all_null=True, no_nan=True)
    if type(value) is not _VALUES.get(type(kind)) or value != value:
        return ColumnFacts(no_null=True)
    return ColumnFacts(no_null=True, no_nan=True, low=value, high=value)


def _decode_bound(stored: bytes | None, kind: ice.PrimitiveType) -> Any:
    """Decode a bound from the bytes of a manifest entry, for a column of type `kind`.

    Returns None if the bound is missing or cannot be decoded.
    """
    return None if stored is None or type(kind) not in _VALUES else bound_value(stored, kind)


_MAX_READERS = 8
"""How many manifests are read in parallel. Each is a request to the object store."""
_LIVE = -1
"""In keys of the cache, this value instead of a snapshot id means all live files of a manifest."""


@dataclass(frozen=True)
class OwnFiles:
    """The data and delete files that a snapshot added and removed."""

    added: tuple[DataFile, ...] = ()
    removed: tuple[DataFile, ...] = ()

    def __len__(self) -> int:
        return len(self.added) + len(self.removed)


@dataclass(frozen=True)
class LiveFile:
    """A data or delete file that a manifest lists and that was not removed.

    `snapshot_id` is the snapshot that added it. `is_data` is False for delete files.
    """

    file: DataFile
    snapshot_id: int
    is_data: bool


class OwnFilesCache:
    """A cache of the files that snapshots changed, and of the live files of manifests.

    Safe to share between threads. It keeps the entries that were used last, up to `max_bytes`, by an estimate
    of their size that is rather too large.
    """

    def __init__(self, *, max_bytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._cache: LRUCache[tuple[str, int], tuple[OwnFiles | tuple[LiveFile, ...], int]]
        self._cache = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])

    def load_files(
        self, snapshots: Sequence[Snapshot], head: Snapshot | None, io: FileIO
    ) -> dict[int, OwnFiles]:
        """Return the files that each snapshot added and removed, by snapshot id.

        `head` is the table's current snapshot, whose manifest list often replaces those of the others. Raises
        FileNotFoundError if a manifest is missing.
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
        """Return all data and delete files of a snapshot.

        Raises FileNotFoundError if a manifest is missing.
        """
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
        is_data = manifest.content == ManifestContent.DATA
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
"""Memory in bytes, in CPython 3.11: of a file without its columns, and of each column with its metrics."""


def _estimate_bytes(file: DataFile) -> int:
    """Estimate the memory in bytes of a DataFile object: 7 kB with 20 columns, 75 kB with 200."""
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

    `known_manifests` are those of the snapshot that a later manifest list still has. If they list all files
    of an append, the snapshot's own manifest list is not read.
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
    """Return whether `snapshot` is an append and these manifests list all data files that its summary counts.

    False also if the summary has no count, or if there are no manifests.
    """
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
