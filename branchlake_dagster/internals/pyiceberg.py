"""Uses parts of PyIceberg 0.12 that it does not export, for snapshots of given files, metadata and manifests.

PyIceberg exports no way to build a snapshot of given files, or to write metadata before a commit.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.exceptions import ValidationException
from pyiceberg.expressions import BooleanExpression
from pyiceberg.expressions.visitors import _ManifestEvalVisitor
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import _dataframe_to_data_files, _read_deletes
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import (
    ALWAYS_TRUE,
    CreateTableTransaction,
    DataScan,
    StagedTable,
    Table,
    TableProperties,
    Transaction,
)
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    TableUpdate,
    _apply_table_update,
    _TableMetadataUpdateContext,
    _update_table_metadata_log,
)
from pyiceberg.table.update import snapshot as snapshot_producers
from pyiceberg.table.update.snapshot import (
    UpdateSnapshot,
    _FastAppendFiles,
    _ManifestMergeManager,
    _MergeAppendFiles,
    _OverwriteFiles,
)
from pyiceberg.typedef import EMPTY_DICT, TableVersion
from pyiceberg.types import IntegerType, ListType, NestedField, StructType
from pyiceberg.utils.concurrent import ExecutorFactory
from pyiceberg.utils.lazydict import LazyDict
from pyiceberg.utils.properties import property_as_bool, property_as_int

from branchlake_dagster.internals import field_paths as field_paths  # replaces a function of PyIceberg
from branchlake_dagster.internals import null_lists as null_lists  # replaces two functions of PyIceberg
from branchlake_dagster.internals import null_structs as null_structs  # replaces a function of PyIceberg
from branchlake_dagster.internals.column_metrics import ReliableStrictEvaluator
from branchlake_dagster.internals.manifest_files import iter_entries, iter_manifests

__all__ = [
    "CachingTransaction",
    "DeleteManifestWriter",
    "add_log_entry",
    "apply_updates",
    "as_compaction",
    "build_manifest_rewrite",
    "build_snapshot",
    "commit_compaction",
    "commit_files",
    "metadata_version",
    "open_creation",
    "open_transaction",
    "read_deleted_positions",
    "rows_all_match",
    "to_iceberg_schema",
    "write_data_files",
    "write_metadata",
]


class _FixedTransaction(Transaction):
    """A transaction whose metadata is always that of the table, without its own updates.

    PyIceberg's snapshot producers read the metadata often, and PyIceberg's own transaction copies all of it
    each time.
    """

    @property
    def table_metadata(self) -> TableMetadata:
        return self._table.metadata


class CachingTransaction(Transaction):
    """A transaction that computes its metadata once for each change.

    PyIceberg's own transaction computes the metadata whenever a snapshot producer reads it, forty times for
    one overwrite, and copies all snapshots of the table each time. That was half the cost of a small write,
    and grew with each write.
    """

    reads_data = False
    """Whether a write reads data files at present. It does not while it writes and commits manifests."""

    _cached_metadata: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata with the updates of this transaction."""
        base, updates, cached = self._table.metadata, self._updates, self._cached_metadata
        if cached is None or cached[0] is not base or cached[1] is not updates:
            cached = self._cached_metadata = (base, updates, apply_updates(base, updates))
        return cached[2]

    def update_snapshot(
        self, snapshot_properties: dict[str, str] = EMPTY_DICT, branch: str | None = MAIN_BRANCH
    ) -> UpdateSnapshot:
        """Start a snapshot, as PyIceberg's `Transaction.update_snapshot`. Data files have been read then."""
        self.reads_data = False
        return super().update_snapshot(snapshot_properties, branch)

    def _scan(
        self, row_filter: str | BooleanExpression = ALWAYS_TRUE, case_sensitive: bool = True
    ) -> DataScan:
        # PyIceberg's `delete` calls this before it reads the files that have other rows too.
        self.reads_data = True
        return super()._scan(row_filter, case_sensitive)


class _CachingCreate(CachingTransaction, CreateTableTransaction):
    """A caching transaction that creates a table. The table that its commit returns can be read."""

    table_class: type[Table] = Table

    def commit_transaction(self) -> Table:
        table = super().commit_transaction()
        return self.table_class(
            table.name(), table.metadata, table.metadata_location, table.io, table.catalog
        )


def open_transaction(table: Table) -> Transaction:
    """Open a transaction like `table.transaction()`, but with cached metadata."""
    transaction = table.transaction()
    return transaction if isinstance(transaction, CachingTransaction) else CachingTransaction(table)


def open_creation(table: StagedTable, table_class: type[Table]) -> CreateTableTransaction:
    """Open the transaction that creates a table, like `Catalog.create_table_transaction`.

    Its commit returns a table of `table_class`.
    """
    creation = _CachingCreate(table)
    creation.table_class = table_class
    return creation


def build_snapshot(
    table: Table,
    *,
    added: Iterable[DataFile],
    removed: Iterable[DataFile],
    operation: Operation,
    properties: dict[str, str],
    written_paths: list[str],
    manifests_of: Collection[int] | None = None,
    added_deletes: Collection[DataFile] = (),
    removed_deletes: Collection[DataFile] = (),
) -> tuple[TableUpdate, ...]:
    """Build a snapshot on `table` from existing files, and return its updates. Nothing is committed.

    `added` and `removed` are data files. `added_deletes` are files of position deletes, which get the new
    snapshot's sequence number; `removed_deletes` are delete files of any kind. Other delete files stay, and
    keep their sequence numbers.

    This uses the producers of PyIceberg's own `append` and `overwrite`; PyIceberg exports none that takes
    both added and removed files. The paths of the manifests that it writes are added to `written_paths`, also
    after an error. Raises ValidationException if `table` no longer has one of the removed files, data or
    delete files.

    With `manifests_of`, removed files are searched only in the manifests that these snapshots added, so that
    the cost does not grow with the table. ValidationException can then also mean that a file is in another
    manifest.
    """
    removed_files = list(removed)
    producer_class = _OverwriteFiles if removed_files else _FastAppendFiles
    if (removed_files and manifests_of is not None) or added_deletes or removed_deletes:
        producer_class = _OverwriteInManifests
    producer = producer_class(operation, _FixedTransaction(table), table.io, snapshot_properties=properties)
    if isinstance(producer, _OverwriteInManifests):
        producer.snapshot_ids = None if manifests_of is None else frozenset(manifests_of)
        producer.added_deletes, producer.removed_deletes = tuple(added_deletes), frozenset(removed_deletes)
    for file in removed_files:
        producer.delete_data_file(file)
    for file in added:
        producer.append_data_file(file)
    try:
        with _wait_for_tasks():
            updates, _ = producer._commit()
    finally:
        written_paths += [*producer._written_manifests, *producer._written_manifest_lists]
    return updates


def build_manifest_rewrite(table: Table, *, written_paths: list[str]) -> tuple[TableUpdate, ...]:
    """Build a snapshot with merged data manifests, and return its updates. Nothing is committed.

    Manifests are merged up to `commit.manifest.target-size-bytes`. The operation of the snapshot is
    `replace`. The entries keep their snapshots and sequence numbers, so no file counts as added. Manifests of
    deletes are not merged. The paths of the files that it writes are added to `written_paths`, also after an
    error.
    """
    producer = _MergeAppendFiles(Operation.APPEND, _FixedTransaction(table), table.io)
    producer._merge_enabled, producer._min_count_to_merge = True, 2
    try:
        with _wait_for_tasks():
            updates, _ = producer._commit()
    finally:
        written_paths += [*producer._written_manifests, *producer._written_manifest_lists]
    return tuple(map(as_compaction, updates))


class DeleteManifestWriter(ManifestWriterV2):
    """Writes a manifest of delete files in format version 2. PyIceberg writes only manifests of data."""

    def content(self) -> ManifestContent:
        """Return the kind of files that the manifest lists."""
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}

    def _with_partition(self, format_version: TableVersion) -> Schema:
        """Return the schema of entries with `equality_ids` as integers.

        PyIceberg declares them as longs, which Iceberg's Java library cannot read.
        """
        fields = []
        for field in super()._with_partition(format_version).fields:
            if isinstance(field.field_type, StructType):
                inner_fields = [_with_integer_ids(inner) for inner in field.field_type.fields]
                field = field.model_copy(update={"field_type": StructType(*inner_fields)})
            fields.append(field)
        return Schema(*fields)


def _with_integer_ids(field: NestedField) -> NestedField:
    if field.name != "equality_ids":
        return field
    return field.model_copy(update={"field_type": ListType(136, IntegerType(), element_required=True)})


class _OverwriteInManifests(_OverwriteFiles):
    """An overwrite that may also add and remove delete files, and reads each manifest once.

    PyIceberg's own overwrite reads the manifest list and the manifests twice, and waits for threads that all
    producers of the process share. If `snapshot_ids` is not None, all removed data files must be in the
    manifests that these snapshots added.
    """

    snapshot_ids: frozenset[int] | None = None
    added_deletes: tuple[DataFile, ...] = ()
    removed_deletes: frozenset[DataFile] = frozenset()

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        snapshot_ids = self.snapshot_ids
        if snapshot_ids is None:
            return super()._build_manifest_evaluator(spec_id)
        return lambda manifest: manifest.added_snapshot_id in snapshot_ids

    def _manifests(self) -> list[ManifestFile]:
        unchanged_manifests, removed_entries, kept_entries = self._divide_entries()
        added_entries = [
            ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file)
            for file in (*self._added_data_files, *self.added_deletes)
        ]
        return [
            *(self._write_entries(entries, "add") for entries in self._group_added(added_entries)),
            *(self._write_entries(entries, "delete") for entries in _group_entries(removed_entries)),
            *unchanged_manifests,
            *(self._write_entries(entries, "existing") for entries in kept_entries),
        ]

    def _divide_entries(self) -> tuple[list[ManifestFile], list[ManifestEntry], list[list[ManifestEntry]]]:
        """Return the unchanged manifests, the entries of removed files, and the other entries by manifest.

        The other entries are those of manifests with a removed file. All manifests are read before any is
        written, so nothing is left behind if a file is missing. Raises ValidationException then.
        """
        self._build_delete_files_partition_predicate()
        evaluators: dict[int, Callable[[ManifestFile], bool]] = {}
        unchanged_manifests: list[ManifestFile] = []
        removed_entries: list[ManifestEntry] = []
        kept_entries: list[list[ManifestEntry]] = []
        for manifest in self._read_manifests():
            removed_files: Collection[DataFile] = self.removed_deletes
            is_searched = bool(removed_files)
            if manifest.content == ManifestContent.DATA:
                removed_files, spec_id = self._deleted_data_files, manifest.partition_spec_id
                if spec_id not in evaluators:
                    evaluators[spec_id] = self._build_manifest_evaluator(spec_id)
                is_searched = bool(removed_files) and evaluators[spec_id](manifest)
            entries = list(self._read_live_entries(manifest)) if is_searched else []
            found_entries = [entry for entry in entries if entry.data_file in removed_files]
            if not found_entries:
                unchanged_manifests.append(manifest)
                continue
            removed_entries += found_entries
            if len(found_entries) < len(entries):
                kept_entries.append([entry for entry in entries if entry.data_file not in removed_files])
        missing_files = self._deleted_data_files | self.removed_deletes
        missing_files -= {entry.data_file for entry in removed_entries}
        if missing_files:
            paths = ", ".join(sorted(file.file_path for file in missing_files))
            raise ValidationException(f"Missing required files to delete: {paths}")
        return unchanged_manifests, removed_entries, kept_entries

    def _read_manifests(self) -> Iterator[ManifestFile]:
        snapshot = self._transaction.table_metadata.snapshot_by_name(self._target_branch or MAIN_BRANCH)
        if snapshot is not None:
            with self._io.new_input(snapshot.manifest_list).open() as stream:
                yield from iter_manifests(stream.read())

    def _read_live_entries(self, manifest: ManifestFile) -> Iterator[ManifestEntry]:
        with self._io.new_input(manifest.manifest_path).open() as stream:
            content = stream.read()
        for entry in iter_entries(manifest, content):
            if entry.status != ManifestEntryStatus.DELETED:
                yield entry

    def _group_added(self, entries: list[ManifestEntry]) -> Iterator[list[ManifestEntry]]:
        """Yield the entries of data files, then those of delete files by partition spec.

        Data files get the default spec, as in PyIceberg.
        """
        data_entries = [entry for entry in entries if entry.data_file.content == DataFileContent.DATA]
        if data_entries:
            yield data_entries
        yield from _group_entries(
            [entry for entry in entries if entry.data_file.content != DataFileContent.DATA]
        )

    def _write_entries(self, entries: list[ManifestEntry], status: str) -> ManifestFile:
        """Write a manifest of files that all have the same kind of content and the same partition spec.

        `status` is `add`, `existing` or `delete`.
        """
        file, metadata = entries[0].data_file, self._transaction.table_metadata
        is_data = file.content == DataFileContent.DATA
        spec = metadata.spec() if is_data and status == "add" else self.spec(file.spec_id)
        with self.new_manifest_writer(spec) if is_data else self._new_delete_writer(spec) as writer:
            for entry in entries:
                getattr(writer, status)(entry)
        return writer.to_manifest_file()

    def _new_delete_writer(self, spec: PartitionSpec) -> DeleteManifestWriter:
        return DeleteManifestWriter(
            spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression
        )

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        added_files, removed_files = self._added_data_files, self._deleted_data_files
        # PyIceberg counts the files in these collections by their content, so it also counts delete files.
        self._added_data_files = [*added_files, *self.added_deletes]
        self._deleted_data_files = {*removed_files, *self.removed_deletes}
        try:
            return super()._summary(snapshot_properties)
        finally:
            self._added_data_files, self._deleted_data_files = added_files, removed_files


def _group_entries(entries: Iterable[ManifestEntry]) -> list[list[ManifestEntry]]:
    """Group entries by the kind of content, data or deletes, and the partition spec of their files."""
    groups: dict[tuple[bool, int], list[ManifestEntry]] = {}
    for entry in entries:
        file = entry.data_file
        groups.setdefault((file.content == DataFileContent.DATA, file.spec_id), []).append(entry)
    return list(groups.values())


def _build_manifest_evaluator(
    partition_spec: PartitionSpec,
    schema: Schema,
    partition_filter: BooleanExpression,
    case_sensitive: bool = True,
) -> Callable[[ManifestFile], bool]:
    """Return a function like PyIceberg's `manifest_evaluator`, but safe for several threads.

    PyIceberg's visitor keeps the manifest that it evaluates, and a snapshot producer calls one visitor from
    several threads. Then a manifest with a file to remove could be skipped, and the snapshot was refused
    because files seemed to be missing.
    """
    partition_schema = Schema(*partition_spec.partition_type(schema).fields)
    visitor = _ManifestEvalVisitor(partition_schema, partition_filter, case_sensitive)
    return lambda manifest: bool(copy(visitor).eval(manifest))


snapshot_producers.manifest_evaluator = _build_manifest_evaluator  # type: ignore[attr-defined]


def _build_whole_dict(lazy_dict: LazyDict[Any, Any]) -> dict[Any, Any]:
    """Build the dictionary of a `LazyDict`, as PyIceberg does, but assign it only when it is complete.

    PyIceberg assigns an empty dictionary first. Another thread then found no metrics in a data file that both
    share, and a manifest writer counted no entries and wrote some.
    """
    items = (item for pairs in lazy_dict._contents for item in zip(pairs[::2], pairs[1::2], strict=True))
    complete_dict = dict(items)
    lazy_dict._dict = complete_dict
    return complete_dict


LazyDict._build_dict = _build_whole_dict  # type: ignore[method-assign, assignment]


class _TrackingExecutors(ExecutorFactory):
    """Tracks tasks that start within `_wait_for_tasks`.

    PyIceberg writes a snapshot's manifests concurrently and returns at the first error. Once, a manifest was
    written after all of them had been deleted.
    """

    @staticmethod
    def get_or_create() -> Executor:
        executor, tasks = ExecutorFactory.get_or_create(), _current_tasks.get()
        return executor if tasks is None else _TrackingExecutor(executor, tasks)


class _TrackingExecutor(Executor):
    def __init__(self, executor: Executor, tasks: list[Future[Any]]) -> None:
        self._executor = executor
        self._tasks = tasks

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._tasks.append(self._executor.submit(fn, *args, **kwargs))
        return self._tasks[-1]

    def map(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._executor.map(*args, **kwargs)


_current_tasks: ContextVar[list[Future[Any]] | None] = ContextVar("begun", default=None)
snapshot_producers.ExecutorFactory = _TrackingExecutors  # type: ignore[attr-defined]  # its only access to threads


@contextmanager
def _wait_for_tasks() -> Iterator[None]:
    """Wait at the end, also after an error, for all tasks that started within the context."""
    tasks: list[Future[Any]] = []
    token = _current_tasks.set(tasks)
    try:
        yield
    finally:
        _current_tasks.reset(token)
        wait(tasks)


def commit_files(
    table: Table,
    *,
    added: Iterable[DataFile],
    removed: Iterable[DataFile],
    properties: Mapping[str, str],
) -> Table:
    """Remove data files and add others in one snapshot, and return the table.

    If the table has changed meanwhile, nothing is committed, and CommitFailedException is raised. PyIceberg's
    own producers would repeat the commit then, and do not compare an append with the new changes. Manifests
    are merged as by Iceberg's Java library: if there are at least `commit.manifest.min-count-to-merge`,
    unless `commit.manifest-merge.enabled` is false. `properties` are the properties of the snapshot's
    summary.
    """
    transaction, removed_files = open_transaction(table), list(removed)
    operation = Operation.OVERWRITE if removed_files else Operation.APPEND
    producer_class = _MergingOverwrite if removed_files else _MergeAppendFiles
    producer = producer_class(operation, transaction, table.io, snapshot_properties=dict(properties))
    if isinstance(producer, _MergeAppendFiles):
        producer._merge_enabled = _is_merging_enabled(table.metadata)
    for file in removed_files:
        producer.delete_data_file(file)
    for file in added:
        producer.append_data_file(file)
    transaction._apply(*producer._commit())
    return transaction.commit_transaction()


class _MergingOverwrite(_OverwriteFiles):
    """An overwrite that merges manifests. PyIceberg's own adds two more each time."""

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        metadata = self._transaction.table_metadata
        merge_manager = _ManifestMergeManager(
            target_size_bytes=_get_int_property(
                metadata,
                TableProperties.MANIFEST_TARGET_SIZE_BYTES,
                TableProperties.MANIFEST_TARGET_SIZE_BYTES_DEFAULT,
            ),
            min_count_to_merge=_get_int_property(
                metadata,
                TableProperties.MANIFEST_MIN_MERGE_COUNT,
                TableProperties.MANIFEST_MIN_MERGE_COUNT_DEFAULT,
            ),
            merge_enabled=_is_merging_enabled(metadata),
            snapshot_producer=self,
        )
        delete_manifests = [manifest for manifest in manifests if manifest.content == ManifestContent.DELETES]
        data_manifests = [
            manifest
            for manifest in manifests
            if manifest.content == ManifestContent.DATA and self._is_needed(manifest)
        ]
        return [*merge_manager.merge_manifests(data_manifests), *delete_manifests]

    def _is_needed(self, manifest: ManifestFile) -> bool:
        """Check whether the manifest names an existing file, or a file that this snapshot removes."""
        counts = (manifest.added_files_count, manifest.existing_files_count)
        return manifest.added_snapshot_id == self._snapshot_id or any(count != 0 for count in counts)


def _get_int_property(metadata: TableMetadata, name: str, default: int) -> int:
    value = property_as_int(metadata.properties, name, default)
    return default if value is None else value


def _is_merging_enabled(metadata: TableMetadata) -> bool:
    return property_as_bool(metadata.properties, TableProperties.MANIFEST_MERGE_ENABLED, True)


def commit_compaction(transaction: Transaction, producer: Any) -> Table:
    """Commit collected files as a snapshot with the operation `replace`, and return the new table.

    `producer` is a snapshot producer of `transaction`, such as `update_snapshot().overwrite()`, that has
    collected added and deleted files but was not committed. Raises CommitFailedException.
    """
    updates, requirements = producer._commit()
    transaction._apply(tuple(map(as_compaction, updates)), requirements)
    return transaction.commit_transaction()


def as_compaction(update: TableUpdate) -> TableUpdate:
    """Return an update with the operation `replace`, which readers of change sets need.

    Only updates that add a snapshot are changed. PyIceberg's producers do not support that operation.
    """
    if not isinstance(update, AddSnapshotUpdate) or update.snapshot.summary is None:
        return update
    summary = Summary(Operation.REPLACE, **update.snapshot.summary.additional_properties)
    return AddSnapshotUpdate(snapshot=update.snapshot.model_copy(update={"summary": summary}))


def apply_updates(metadata: TableMetadata, updates: Iterable[TableUpdate]) -> TableMetadata:
    """Return table metadata after the updates.

    It works as PyIceberg's `update_table_metadata`, but does not copy all snapshots at the end. With that
    copy, a replay took time in proportion to the table's history.
    """
    context = _TableMetadataUpdateContext()
    for update in updates:
        metadata = _apply_table_update(update, metadata, context)
    return metadata


def add_log_entry(metadata: TableMetadata, before: str, updated_ms: int) -> TableMetadata:
    """Return the metadata with the previous metadata file `before` in its log, as after every commit.

    `updated_ms` is the time of the update in ms since 1970.
    """
    return _update_table_metadata_log(metadata, before, updated_ms)


def metadata_version(location: str) -> int:
    """Return the number at the beginning of a metadata file's name.

    It is 1 for `00001-<uuid>.metadata.json`, and -1 if the name has another form, as that of a file from
    another catalog may have.
    """
    return MetastoreCatalog._parse_metadata_version(location)


def write_metadata(catalog: MetastoreCatalog, metadata: TableMetadata, io: FileIO, location: str) -> None:
    """Write a new metadata file at `location`, through `io`. The caller commits the location later.

    Raises FileExistsError if the file exists, or another OSError.
    """
    catalog._write_metadata(metadata, io, location)


def to_iceberg_schema(schema: pa.Schema, format_version: int) -> Schema:
    """Convert an Arrow schema to an Iceberg schema, by the rules of PyIceberg's `create_table`.

    `format_version` is that of the table; it decides which types are allowed. All fields have the id -1.
    Raises PyIceberg's errors for types that Iceberg lacks.
    """
    converted = MetastoreCatalog._convert_schema_if_needed(schema, format_version)  # type: ignore[arg-type]
    assert isinstance(converted, Schema)  # noqa: S101 - an Arrow schema always converts to one
    return converted


def rows_all_match(schema: Schema, row_filter: BooleanExpression, file: DataFile) -> bool:
    """Return whether every row of a file certainly matches, by the file's statistics. False proves nothing.

    PyIceberg uses the same check to delete whole files.
    """
    return bool(ReliableStrictEvaluator(schema, row_filter).eval(file))


def write_data_files(
    metadata: TableMetadata, rows: pa.Table, io: FileIO, *, commit: uuid.UUID, numbers: itertools.count[int]
) -> Iterator[DataFile]:
    """Write rows as data files of a table, and yield these files with their statistics.

    Nothing is committed; `Table.append` would also commit. `numbers` gives each file a number for its name.
    """
    yield from _dataframe_to_data_files(
        table_metadata=metadata, df=rows, io=io, write_uuid=commit, counter=numbers
    )


def read_deleted_positions(io: FileIO, file: DataFile) -> dict[str, pa.ChunkedArray]:
    """Return the deleted row positions in a position delete file or deletion vector, by data file path.

    `io` reads the file. Positions count from 0 in each data file. Raises ValueError for a file of another
    format.
    """
    return _read_deletes(io, file)
