"""What snapshots did to files, from their manifests, each read once. No data file is opened.

A plan asks for the snapshots of `main` since the base of each of its candidates, and again when `main` has
moved: of sixty runs that waited beside a busy writer, all but some seconds of four minutes went into reading
the same manifest lists.

Whether a file can hold rows of a recorded predicate: by its partition and by the bounds of its columns.

Both answers are inclusive: False is a proof, True is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar
from urllib.parse import unquote_plus

from cachetools import LRUCache
from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Or,
)
from pyiceberg.expressions.visitors import expression_evaluator, inclusive_projection
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry, ManifestEntryStatus
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, IcebergType, StringType, TimestampType, TimestamptzType

from branchlake_dagster.catalog.stored_files import read_entries, read_manifests
from branchlake_dagster.history.file_facts import facts
from branchlake_dagster.internals.column_metrics import ReliableInclusiveEvaluator, data_paths
from branchlake_dagster.publication.table_change import Bounds, DeleteFile, File, Mode
from branchlake_dagster.tables.replaced_rows import Among, Condition, Replaced, Slice

_TYPES: dict[str, tuple[type[IcebergType], ...]] = {
    "string": (StringType,),
    "date": (DateType,),
    "time": (TimestampType, TimestamptzType),
}


def in_partition(predicate: Replaced, schema: Schema, spec: PartitionSpec) -> Callable[[DataFile], bool]:
    """Whether a data file's partition can have rows of the predicate."""
    values = Schema(*spec.partition_type(schema).fields) if spec.fields else None
    if values is None:
        return lambda _: True
    projected = inclusive_projection(schema, spec)(expression(predicate, schema))
    evaluate = expression_evaluator(values, projected, case_sensitive=True)
    return lambda file: bool(evaluate(file.partition))


def in_bounds(predicate: Replaced, schema: Schema) -> Callable[[DataFile], bool]:
    """Whether a data file's bounds leave room for rows of the predicate."""
    evaluator = ReliableInclusiveEvaluator(schema, expression(predicate, schema))
    return lambda file: bool(evaluator.eval(file))


def expression(predicate: Replaced, schema: Schema) -> BooleanExpression:
    """The predicate as PyIceberg's; wider where a column is gone or has another type now."""
    return _balanced([_slice(one, schema) for one in predicate.slices])


def _balanced(parts: list[BooleanExpression]) -> BooleanExpression:
    """Their union as a tree of little depth: visitors recurse."""
    if len(parts) < 2:
        return parts[0] if parts else AlwaysFalse()
    middle = len(parts) // 2
    return Or(_balanced(parts[:middle]), _balanced(parts[middle:]))


def _slice(conditions: Slice, schema: Schema) -> BooleanExpression:
    return reduce(And, (_condition(one, schema) for one in conditions), AlwaysTrue())


def _condition(condition: Condition, schema: Schema) -> BooleanExpression:
    name = schema.find_column_name(condition.column)
    kind = "string" if isinstance(condition, Among) else condition.kind
    if name is None or not isinstance(schema.find_type(name), _TYPES[kind]):
        return AlwaysTrue()
    if isinstance(condition, Among):
        return In(name, condition.values)
    end = LessThanOrEqual if kind == "string" else LessThan
    return And(GreaterThanOrEqual(name, condition.low), end(name, condition.high))


_LAYOUTS = 64
_MOST, _OF_A_FILE = 100_000, 4
"""Columns of files that are kept, each with its bounds and counts: half a kilobyte, so 50 MB in all. What a
file has beside them is as much as four."""
_STORED = 10_000
"""Manifest entries that are kept between the opening of a run's files and its plan: 2 kB each."""
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


@dataclass(frozen=True)
class StoredSnapshot:
    """What the storage holds of one snapshot: its own manifests by location, and what they did to files."""

    manifests: tuple[str, ...]
    entries: tuple[ManifestEntry, ...]


class SnapshotFiles:
    """Reads snapshots; keeps what it has read, within a bound. Several threads may ask."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._layouts: LRUCache[str, _Files] = LRUCache(_LAYOUTS)
        self._read: LRUCache[tuple[_Files, str], tuple[Touched, int]]
        self._read = LRUCache(most, getsizeof=lambda kept: kept[1])
        self._stored: LRUCache[str, StoredSnapshot]
        self._stored = LRUCache(_STORED, getsizeof=lambda stored: 1 + len(stored.entries))

    def stored(self, snapshot: Snapshot, io: FileIO) -> StoredSnapshot:
        """The snapshot as the storage holds it now, whatever was read before.

        A plan that needs the snapshot next does not read it again. Raises as `stored_files.read_metadata`.
        """
        stored = _stored_snapshot(snapshot, io)
        if snapshot.manifest_list and len(stored.entries) < _STORED:
            with self._lock:
                self._stored[snapshot.manifest_list] = stored
        return stored

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
                stored = self._stored.pop(key[1], None)
            if known is not None:
                return known[0]
            found = _read(stored or _stored_snapshot(snapshot, table.io), snapshot, files)
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


def _read(stored: StoredSnapshot, snapshot: Snapshot, files: _Files) -> Touched:
    added: list[File] = []
    removed: list[File] = []
    deletes: list[DeleteFile] = []
    operation = snapshot.summary.operation if snapshot.summary else None
    mode = Mode.COMPACT if operation == Operation.REPLACE else None
    for entry in stored.entries:
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


def _stored_snapshot(snapshot: Snapshot, io: FileIO) -> StoredSnapshot:
    own = [one for one in read_manifests(io, snapshot) if one.added_snapshot_id == snapshot.snapshot_id]
    entries = (
        entry
        for manifest in own
        for entry in read_entries(io, manifest)
        if entry.snapshot_id == snapshot.snapshot_id and entry.status != ManifestEntryStatus.EXISTING
    )
    return StoredSnapshot(tuple(manifest.manifest_path for manifest in own), tuple(entries))


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
            _bounds(file, self._schema, self._specs[file.spec_id]),
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
            None if equality else data_paths(file),
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
            return in_partition(predicate, self._schema, self._specs[file.spec_id])

        def asked() -> bool:
            return _kept(self._partitions, (predicate, file.spec_id), bound)(file)

        return _kept(self._known, (predicate, file.spec_id, file.partition), asked)

    def _row(self, predicate: Replaced) -> Callable[[DataFile], bool]:
        return _kept(self._rows, predicate, lambda: in_bounds(predicate, self._schema))


def _kept(answers: dict[Any, _T], key: Hashable, make: Callable[[], _T]) -> _T:
    """What is known of `key`. A server asks for days, each time of other partitions."""
    found = answers.get(key)
    if found is None:
        if len(answers) >= _ANSWERS:
            answers.clear()
        found = answers[key] = make()
    return found


def _bounds(file: DataFile, schema: Schema, spec: PartitionSpec) -> Callable[[str], Bounds | None]:
    """The lowest and highest value of a column by name; None if not known, or if a row may be null or NaN."""

    def of(column: str) -> Bounds | None:
        try:
            field = schema.find_field(column)
        except ValueError:  # renamed or dropped since the key was recorded
            return None
        known = facts(file, field, spec)
        if known.low is None or known.high is None or not (known.no_null and known.no_nan):
            return None
        return known.low, known.high

    return of
