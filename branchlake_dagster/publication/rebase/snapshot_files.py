"""What snapshots did to files, from their manifests, each read once. No data file is opened.

A plan asks for the snapshots of `main` since the base of each of its candidates, and again when `main` has
moved: of sixty runs that waited beside a busy writer, all but some seconds of four minutes went into reading
the same manifest lists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote_plus

from cachetools import LRUCache
from pyiceberg.conversions import from_bytes
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry, ManifestEntryStatus
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from branchlake_dagster.branching.table.replaced import Replaced
from branchlake_dagster.library_internals.manifests import entries_of
from branchlake_dagster.publication.rebase import file_bounds
from branchlake_dagster.publication.rebase.changes import Bounds, DeleteFile, File, Mode

_DATA_PATH = 2147483546
"""The field id of `file_path` in files of position deletes."""
_LAYOUTS = 64
_MOST, _OF_A_FILE = 100_000, 4
"""Columns of files that are kept, each with its bounds and counts: half a kilobyte, so 50 MB in all. What a
file has beside them is as much as four."""
_ANSWERS = 10_000
"""Most answers of one kind that are kept for a layout."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Touched:
    """The files of one snapshot."""

    added: tuple[File, ...] = ()
    removed: tuple[File, ...] = ()
    deletes: tuple[DeleteFile, ...] = ()
    mode: Mode | None = None
    """How it changed the table, where its operation and its files tell."""


class SnapshotFiles:
    """Reads snapshots; keeps what it has read, within a bound. Several threads may ask."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._layouts: LRUCache[str, _Files] = LRUCache(_LAYOUTS)
        self._read: LRUCache[tuple[_Files, str], tuple[Touched, int]]
        self._read = LRUCache(most, getsizeof=lambda kept: kept[1])

    def of(self, table: Table) -> Callable[[Snapshot], Touched]:
        """What tells of a snapshot of the table, in words of its present columns and partition fields."""
        metadata = table.metadata
        layout = _layout(metadata)
        with self._lock:
            files = self._layouts.get(layout)
            if files is None:
                files = self._layouts[layout] = _Files(metadata)

        def read(snapshot: Snapshot) -> Touched:
            # Files of Iceberg are never written again under the same name.
            key = files, snapshot.manifest_list or ""
            with self._lock:
                known = self._read.get(key)
            if known is not None:
                return known[0]
            found = _read(snapshot, files, table.io)
            touched = len(found.added) + len(found.removed) + len(found.deletes)
            size = _OF_A_FILE + touched * (_OF_A_FILE + files.columns)
            if snapshot.manifest_list and size <= self._most:
                with self._lock:
                    self._read[key] = found, size
            return found

        return read


def _layout(metadata: TableMetadata) -> str:
    """All that tells how a file is looked at. Ids do not: a run's branch has its own schemas under them."""
    specs = (spec.model_dump_json() for spec in metadata.partition_specs)
    return "\n".join((metadata.schema().model_dump_json(), str(metadata.default_spec_id), *specs))


def _read(snapshot: Snapshot, files: _Files, io: FileIO) -> Touched:
    added: list[File] = []
    removed: list[File] = []
    deletes: list[DeleteFile] = []
    operation = snapshot.summary.operation if snapshot.summary else None
    mode = Mode.COMPACT if operation == Operation.REPLACE else None
    for entry in _entries(snapshot, io):
        file = entry.data_file
        if file.spec_id != files.default_spec:
            mode = Mode.OLD_LAYOUT
        new = entry.status == ManifestEntryStatus.ADDED
        if file.content == DataFileContent.DATA:
            (added if new else removed).append(files.data(file))
        elif new:
            # One that is taken out is not kept: where it stays, it has nothing left to delete.
            deletes.append(files.deletes(file))
            vector = file.file_format == FileFormat.PUFFIN
            mode = mode or (Mode.DELETION_VECTORS if vector else Mode.ROW_DELETES)
    return Touched(tuple(added), tuple(removed), tuple(deletes), mode)


def _entries(snapshot: Snapshot, io: FileIO) -> Iterator[ManifestEntry]:
    """What the snapshot itself added and removed."""
    for manifest in snapshot.manifests(io):
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            continue
        with io.new_input(manifest.manifest_path).open() as stream:
            content = stream.read()
        for entry in entries_of(manifest, content):
            if entry.snapshot_id == snapshot.snapshot_id and entry.status != ManifestEntryStatus.EXISTING:
                yield entry


class _Files:
    """The files of one table as plain values; predicates are bound to its columns once, not per file."""

    def __init__(self, metadata: TableMetadata) -> None:
        self._schema = metadata.schema()
        self._specs = metadata.specs()
        self.default_spec = metadata.default_spec_id
        self.columns = len(self._schema.field_ids)  # of nested ones too: their leaves have bounds
        self._rows: dict[Replaced, Callable[[DataFile], bool]] = {}
        self._partitions: dict[tuple[Replaced, int], Callable[[DataFile], bool]] = {}
        self._known: dict[tuple[Replaced, int, Record], bool] = {}

    def data(self, file: DataFile) -> File:
        """A data file."""

        def may_hold(predicate: Replaced) -> bool:
            return self._partition(predicate, file) and self._row(predicate)(file)

        path = self._path(file)
        return File(
            file.file_path,
            path,
            _bounds(file, self._schema),
            file,
            may_hold,
            file.record_count,
        )

    def deletes(self, file: DataFile) -> DeleteFile:
        """A file of row-level deletes."""

        def may_hold(predicate: Replaced) -> bool:
            return everywhere or self._partition(predicate, file)

        path = self._path(file)
        equality = file.content == DataFileContent.EQUALITY_DELETES
        everywhere = equality and not self._specs[file.spec_id].fields
        return DeleteFile(
            file.file_path,
            path,
            None if equality else _data_paths(file),
            everywhere,
            may_hold,
        )

    def _path(self, file: DataFile) -> str:
        spec = self._specs[file.spec_id]
        try:
            return unquote_plus(spec.partition_to_path(file.partition, self._schema)) if spec.fields else ""
        except (ValueError, KeyError):  # an older spec of a column that has been dropped since
            return str(file.partition)

    def _partition(self, predicate: Replaced, file: DataFile) -> bool:
        """Asked once per partition: a thousand files of one day are of one day."""

        def bound() -> Callable[[DataFile], bool]:
            return file_bounds.in_partition(predicate, self._schema, self._specs[file.spec_id])

        def asked() -> bool:
            return _kept(self._partitions, (predicate, file.spec_id), bound)(file)

        return _kept(self._known, (predicate, file.spec_id, file.partition), asked)

    def _row(self, predicate: Replaced) -> Callable[[DataFile], bool]:
        return _kept(self._rows, predicate, lambda: file_bounds.in_bounds(predicate, self._schema))


def _kept(answers: dict[Any, _T], key: Hashable, make: Callable[[], _T]) -> _T:
    """What is known of `key`. A server asks for days, each time of other partitions."""
    found = answers.get(key)
    if found is None:
        if len(answers) >= _ANSWERS:
            answers.clear()
        found = answers[key] = make()
    return found


def _data_paths(file: DataFile) -> tuple[str, str] | None:
    """The range of data file paths that a file of position deletes speaks of.

    PyIceberg does not read the field that names the one data file; the bounds say the same.
    """
    low = (file.lower_bounds or {}).get(_DATA_PATH)
    high = (file.upper_bounds or {}).get(_DATA_PATH)
    if low is None or high is None:
        return None
    try:
        return low.decode(), high.decode()
    except UnicodeDecodeError:  # cut within a character
        return None


def _bounds(data_file: DataFile, schema: Schema) -> Callable[[str], Bounds | None]:
    def of(column: str) -> Bounds | None:
        try:
            field = schema.find_field(column)
        except ValueError:  # renamed or dropped since the key was recorded
            return None
        low = (data_file.lower_bounds or {}).get(field.field_id)
        high = (data_file.upper_bounds or {}).get(field.field_id)
        nulls = (data_file.null_value_counts or {}).get(field.field_id, 0)
        if low is None or high is None or nulls or not isinstance(field.field_type, PrimitiveType):
            return None
        return from_bytes(field.field_type, low), from_bytes(field.field_type, high)

    return of
