"""Reads the data and delete files that snapshots added and removed from manifests. Opens no data file.

Each manifest is read once. A plan needs the snapshots of `main` since the base of each candidate, and needs
them again when `main` has changed. With sixty runs that waited beside a busy writer, reading the same
manifest lists took almost all of four minutes.

The module also decides whether a file can hold rows of a recorded predicate, by its partition and the bounds
of its columns. These answers are inclusive: False is a proof, True is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar
from urllib.parse import unquote_plus

from cachetools import LRUCache
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
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

from branchlake_dagster.history.manifests import (
    column_facts,
    is_own_entry,
    read_manifest_entries,
    read_manifests,
)
from branchlake_dagster.internals.column_metrics import ReliableInclusiveEvaluator, data_paths
from branchlake_dagster.publication.table_change import ChangeMode, DeleteFile, File, FileBounds, TouchedFiles
from branchlake_dagster.tables.replaced_rows import ReplacedCondition, ReplacedRows, ReplacedSlice, StringSet
from branchlake_dagster.tables.selection import match_any

_TYPES: dict[str, tuple[type[IcebergType], ...]] = {
    "string": (StringType,),
    "date": (DateType,),
    "time": (TimestampType, TimestamptzType),
}


def partition_filter(
    predicate: ReplacedRows, schema: Schema, spec: PartitionSpec
) -> Callable[[DataFile], bool]:
    """Return a function that checks whether a data file's partition can hold rows of the predicate.

    `schema` is the schema of the table, and `spec` the partition spec with which the checked files were
    written. Without partition fields, the function always returns True.
    """
    values = Schema(*spec.partition_type(schema).fields) if spec.fields else None
    if values is None:
        return lambda _: True
    projected = inclusive_projection(schema, spec)(to_expression(predicate, schema))
    evaluate = expression_evaluator(values, projected, case_sensitive=True)
    return lambda file: bool(evaluate(file.partition))


def bounds_filter(predicate: ReplacedRows, schema: Schema) -> Callable[[DataFile], bool]:
    """Return a function that checks whether a data file's bounds allow rows of the predicate.

    `schema` is the schema of the table. The function returns True for a file without reliable bounds.
    """
    evaluator = ReliableInclusiveEvaluator(schema, to_expression(predicate, schema))
    return lambda file: bool(evaluator.eval(file))


def to_expression(predicate: ReplacedRows, schema: Schema) -> BooleanExpression:
    """Convert the predicate to a PyIceberg expression.

    A condition on a column that was dropped, or has another type now, is always true in the expression.
    """
    return match_any(_slice_expression(conditions, schema) for conditions in predicate.slices)


def _slice_expression(conditions: ReplacedSlice, schema: Schema) -> BooleanExpression:
    return reduce(And, (_condition_expression(condition, schema) for condition in conditions), AlwaysTrue())


def _condition_expression(condition: ReplacedCondition, schema: Schema) -> BooleanExpression:
    name = schema.find_column_name(condition.field_id)
    kind = "string" if isinstance(condition, StringSet) else condition.kind
    if name is None or not isinstance(schema.find_type(name), _TYPES[kind]):
        return AlwaysTrue()
    if isinstance(condition, StringSet):
        return In(name, condition.values)
    end = LessThanOrEqual if kind == "string" else LessThan
    return And(GreaterThanOrEqual(name, condition.low), end(name, condition.high))


_MAX_LAYOUTS = 64
_MAX_COLUMNS, _FILE_OVERHEAD = 100_000, 4
"""Most columns of files in the cache, with bounds and counts: half a kilobyte each, so 50 MB in all. The
other data of a file is as large as four columns."""
_MAX_ENTRIES = 10_000
"""Most manifest entries that are kept between reading a run's files and planning it: 2 kB each."""
_MAX_ANSWERS = 10_000
"""The most cached filters, or answers per partition, for one layout."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredSnapshot:
    """A stored snapshot: the locations of the manifests that it added, and their entries."""

    manifests: tuple[str, ...]
    entries: tuple[ManifestEntry, ...]


class SnapshotFiles:
    """Reads the files of snapshots, with a bounded cache. Safe for several threads."""

    def __init__(self, max_columns: int = _MAX_COLUMNS) -> None:
        self._max_columns = max_columns
        self._lock = threading.Lock()
        self._converters: LRUCache[str, _FileConverter] = LRUCache(_MAX_LAYOUTS)
        self._touched_files: LRUCache[tuple[_FileConverter, str], tuple[TouchedFiles, int]]
        self._touched_files = LRUCache(max_columns, getsizeof=lambda cached: cached[1])
        self._stored_snapshots: LRUCache[str, StoredSnapshot]
        self._stored_snapshots = LRUCache(_MAX_ENTRIES, getsizeof=lambda stored: 1 + len(stored.entries))

    def load_stored(self, snapshot: Snapshot, io: FileIO) -> StoredSnapshot:
        """Load the snapshot's manifests from the storage, even if they are cached.

        The result is kept for the next call of a function of `reader_for`, which then does not read it again.
        Raises FileNotFoundError or another OSError if a manifest cannot be read.
        """
        stored = _load_snapshot(snapshot, io)
        if snapshot.manifest_list and len(stored.entries) < _MAX_ENTRIES:
            with self._lock:
                self._stored_snapshots[snapshot.manifest_list] = stored
        return stored

    def reader_for(self, table: Table) -> Callable[[Snapshot], TouchedFiles]:
        """Return a function that reads which files a snapshot of the table added and removed.

        Files are described by the table's current columns and partition fields.
        """
        metadata = table.metadata
        layout = _layout_key(metadata)
        with self._lock:
            files = self._converters.get(layout)
            if files is None:
                files = self._converters[layout] = _FileConverter(metadata)

        def read_files(snapshot: Snapshot) -> TouchedFiles:
            # Iceberg never writes another file under the same name.
            key = files, snapshot.manifest_list or ""
            with self._lock:
                cached = self._touched_files.get(key)
                stored = self._stored_snapshots.pop(key[1], None)
            if cached is not None:
                return cached[0]
            touched_files = _collect_files(stored or _load_snapshot(snapshot, table.io), snapshot, files)
            file_count = len(touched_files.added) + len(touched_files.removed)
            file_count += len(touched_files.deletes) + len(touched_files.removed_deletes)
            size = _FILE_OVERHEAD + file_count * (_FILE_OVERHEAD + files.column_count)
            if snapshot.manifest_list and size <= self._max_columns:
                with self._lock:
                    self._touched_files[key] = touched_files, size
            return touched_files

        return read_files


def _layout_key(metadata: TableMetadata) -> str:
    """Return a text that is equal for tables whose files are described alike: columns and partition specs.

    The schema's id is left out, because the same id stands for another schema on a run's branch.
    """
    specs = (spec.model_dump_json() for spec in metadata.partition_specs)
    return "\n".join((metadata.schema().model_dump_json(), str(metadata.default_spec_id), *specs))


def _collect_files(stored: StoredSnapshot, snapshot: Snapshot, files: _FileConverter) -> TouchedFiles:
    added: list[File] = []
    removed: list[File] = []
    deletes: list[DeleteFile] = []
    removed_deletes: list[DeleteFile] = []
    operation = snapshot.summary.operation if snapshot.summary else None
    is_compaction = operation == Operation.REPLACE
    mode = ChangeMode.COMPACT if is_compaction else None
    for entry in stored.entries:
        file = entry.data_file
        is_added = entry.status == ManifestEntryStatus.ADDED
        # Iceberg's compaction drops delete files that have nothing left to delete, whatever their spec.
        is_dangling = is_compaction and not is_added and file.content != DataFileContent.DATA
        if file.spec_id != files.default_spec and not is_dangling:
            mode = ChangeMode.OLD_LAYOUT
        if file.content == DataFileContent.DATA:
            (added if is_added else removed).append(files.to_data_file(file))
        elif not is_added:
            # The mode does not depend on it: if main still has it, it usually has nothing left to delete.
            removed_deletes.append(files.to_delete_file(file))
        else:
            deletes.append(files.to_delete_file(file))
            vector = file.file_format == FileFormat.PUFFIN
            mode = mode or (ChangeMode.DELETION_VECTORS if vector else ChangeMode.ROW_DELETES)
    return TouchedFiles(tuple(added), tuple(removed), tuple(deletes), mode, tuple(removed_deletes))


def _load_snapshot(snapshot: Snapshot, io: FileIO) -> StoredSnapshot:
    own_manifests = [
        manifest
        for manifest in read_manifests(io, snapshot)
        if manifest.added_snapshot_id == snapshot.snapshot_id
    ]
    entries = (
        entry
        for manifest in own_manifests
        for entry in read_manifest_entries(io, manifest)
        if is_own_entry(entry, snapshot.snapshot_id)
    )
    return StoredSnapshot(tuple(manifest.manifest_path for manifest in own_manifests), tuple(entries))


def convert_delete_files(metadata: TableMetadata, files: Iterable[DataFile]) -> list[DeleteFile]:
    """Convert PyIceberg's delete files of one table to `DeleteFile` objects, in the same order.

    `metadata` is the table's metadata; its current columns and partition specs describe the files.
    """
    converter = _FileConverter(metadata)
    return [converter.to_delete_file(file) for file in files]


def convert_data_files(metadata: TableMetadata, files: Iterable[DataFile]) -> list[File]:
    """Convert PyIceberg's data files of one table to `File` objects, in the same order.

    `metadata` is the table's metadata; its current columns and partition specs describe the files.
    """
    converter = _FileConverter(metadata)
    return [converter.to_data_file(file) for file in files]


class _FileConverter:
    """Converts PyIceberg's files of one table to `File` and `DeleteFile` objects.

    Predicates are bound to its columns once, not per file.
    """

    def __init__(self, metadata: TableMetadata) -> None:
        self._schema = metadata.schema()
        self._specs = metadata.specs()
        self.default_spec = metadata.default_spec_id
        # Nested columns count too, because their leaves have bounds.
        self.column_count = len(self._schema.field_ids)
        self._bounds_filters: dict[ReplacedRows, Callable[[DataFile], bool]] = {}
        self._partition_filters: dict[tuple[ReplacedRows, int], Callable[[DataFile], bool]] = {}
        self._partition_answers: dict[tuple[ReplacedRows, int, Record], bool] = {}

    def to_data_file(self, file: DataFile) -> File:
        """Convert a data file to a `File`."""

        def may_hold(predicate: ReplacedRows) -> bool:
            return self._may_partition_hold(predicate, file) and self._bounds_filter(predicate)(file)

        path = self._partition_path(file)
        return File(
            file.file_path,
            path,
            _column_bounds(file, self._schema, self._specs[file.spec_id]),
            file,
            may_hold,
            file.record_count,
        )

    def to_delete_file(self, file: DataFile) -> DeleteFile:
        """Convert a file of row-level deletes to a `DeleteFile`.

        `everywhere` is set for equality deletes without a partition.
        """

        def may_hold(predicate: ReplacedRows) -> bool:
            return everywhere or self._may_partition_hold(predicate, file)

        path = self._partition_path(file)
        equality = file.content == DataFileContent.EQUALITY_DELETES
        everywhere = equality and not self._specs[file.spec_id].fields
        return DeleteFile(
            file.file_path,
            path,
            None if equality else data_paths(file),
            everywhere,
            may_hold,
            equality,
            file,
        )

    def _partition_path(self, file: DataFile) -> str:
        spec = self._specs[file.spec_id]
        try:
            return unquote_plus(spec.partition_to_path(file.partition, self._schema)) if spec.fields else ""
        except (ValueError, KeyError, OverflowError):  # a dropped column, or a day after year 9999
            return str(file.partition)

    def _may_partition_hold(self, predicate: ReplacedRows, file: DataFile) -> bool:
        """Return whether the file's partition may contain rows of the predicate; cached by partition."""

        def build_filter() -> Callable[[DataFile], bool]:
            return partition_filter(predicate, self._schema, self._specs[file.spec_id])

        def evaluate() -> bool:
            return _get_or_build(self._partition_filters, (predicate, file.spec_id), build_filter)(file)

        return _get_or_build(self._partition_answers, (predicate, file.spec_id, file.partition), evaluate)

    def _bounds_filter(self, predicate: ReplacedRows) -> Callable[[DataFile], bool]:
        return _get_or_build(self._bounds_filters, predicate, lambda: bounds_filter(predicate, self._schema))


def _get_or_build(answers: dict[Any, _T], key: Hashable, build: Callable[[], _T]) -> _T:
    """Return the cached answer for `key`, or build it.

    The cache is bounded, because a server runs for days and gets other partitions each time.
    """
    answer = answers.get(key)
    if answer is None:
        if len(answers) >= _MAX_ANSWERS:
            answers.clear()
        answer = answers[key] = build()
    return answer


def _column_bounds(file: DataFile, schema: Schema, spec: PartitionSpec) -> Callable[[str], FileBounds | None]:
    """Return a function from a column name to the lowest and highest value of the column in a file.

    The function returns None if a bound is unknown, or if a row may be null or NaN.
    """

    def get_bounds(column: str) -> FileBounds | None:
        try:
            field = schema.find_field(column)
        except ValueError:  # renamed or dropped since the key was recorded
            return None
        file_facts = column_facts(file, field, spec)
        if (
            file_facts.low is None
            or file_facts.high is None
            or not (file_facts.no_null and file_facts.no_nan)
        ):
            return None
        return file_facts.low, file_facts.high

    return get_bounds
