"""Repeating a run's snapshots on a newer state of their table: new metadata, the run's own data files.

PyIceberg's snapshot producers write the manifests, and have the last word on whether what a step removes is
still there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

from cachetools import LRUCache
from pyiceberg.catalog import WAREHOUSE_LOCATION
from pyiceberg.exceptions import ValidationException
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.manifest import DataFileContent, ManifestEntry, ManifestEntryStatus
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.update import (
    AddSchemaUpdate,
    RemovePropertiesUpdate,
    SetCurrentSchemaUpdate,
    SetPropertiesUpdate,
    TableUpdate,
)

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.catalog.catalog import NO_SNAPSHOT, table_content
from branchlake_dagster.catalog.stored_files import (
    REQUESTS_AT_ONCE,
    StoredFile,
    file_errors,
    is_local,
    map_concurrently,
    read_metadata_fields,
    synchronize_files,
)
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.internals.pyiceberg import (
    add_log_entry,
    apply_updates,
    as_compaction,
    build_snapshot,
    metadata_version,
    write_metadata,
)
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication import table_history as manifests
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.publication.table_change import ChangeMode, SnapshotChange, TableChange
from branchlake_dagster.stored_names import LakeProperty

_log = logging.getLogger(__name__)

_METADATA_CACHED = 64
_FILE_IO_PROPERTIES = ("s3.", "hdfs.", "gcs.", "adls.", "oss.", "client.", "py-io-impl")

TableStates = tuple[ContentKey, IcebergTable | None, IcebergTable]
"""A table, what it was before a change (None: it is new), and what it is after it."""


class ReplayImpossible(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Iceberg's own validation refused the replay of a change that our rules allowed."""


@dataclass
class StagedState:
    """A table's state in memory: `base` as some reference has it, then what was replayed on it."""

    base: Table
    table: Table
    written_paths: list[str] = field(default_factory=list)
    """Files made for it, to be deleted if it is certainly not committed."""


@dataclass(frozen=True)
class _AddedFiles:
    """What a change adds to a table; its metadata files have been read."""

    unsynchronized: tuple[str, ...] = ()
    """Files whose writer may have left them to the kernel, the metadata file apart."""
    data_files: tuple[StoredFile, ...] = ()
    error: Exception | None = None


def _start_synchronizing(pool: Executor | None, locations: Sequence[str]) -> Callable[[], OSError | None]:
    """Make files durable in the pool. The result waits for that, and returns the error of the disk.

    Without a pool it does so when it is called: for one table a thread costs more than it saves.
    """
    if not any(map(is_local, locations)):
        return lambda: None
    if pool is None:
        return partial(_try_synchronize, locations)
    return pool.submit(_try_synchronize, locations).result


def _try_synchronize(locations: Sequence[str]) -> OSError | None:
    try:
        synchronize_files(locations)
    except OSError as error:
        return error
    return None


def _to_snapshot_id(snapshot_id: int | None) -> int | None:
    return None if snapshot_id == NO_SNAPSHOT else snapshot_id


def _is_written_by_java(snapshot: Snapshot) -> bool:
    """Whether an engine on Iceberg's Java library (Spark, Flink, Trino) has written the snapshot.

    It does not synchronize its files, `DurableFileIO` does. The library notes its version in each summary.
    """
    return snapshot.summary is not None and "iceberg-version" in snapshot.summary.additional_properties


def _track_data_files(
    data_files: dict[str, StoredFile], io: FileIO, entries: Iterable[ManifestEntry]
) -> None:
    """Follow in `data_files` what a snapshot did to files. A later snapshot of the run may remove a data file."""
    for entry in entries:
        file = entry.data_file
        if entry.status == ManifestEntryStatus.ADDED:
            data_files[file.file_path] = StoredFile(io, file.file_path, file.file_size_in_bytes)
        elif file.content == DataFileContent.DATA:
            data_files.pop(file.file_path, None)


class TableFormat(Protocol):
    """What the publisher needs of a table format. The simulation has another one than Iceberg."""

    def open(self, key: ContentKey, content: IcebergTable) -> StagedState:
        """The table as `content` has it."""

    def load_change(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable | StagedState,
        *,
        files: bool = True,
    ) -> TableChange:
        """What was done between two states; `before` None: since it was created."""

    def find_read_errors(self, states: Sequence[TableStates]) -> list[Exception | None]:
        """Open what a change adds to each table; None where everybody will be able to read it.

        The files are durable then. Nothing that was read before counts: every call asks the storage.
        """

    def replay(
        self, key: ContentKey, run_change: TableChange, after: IcebergTable, target: StagedState
    ) -> StagedState:
        """`target` plus the change `run_change`, which led to `after`; raises ReplayImpossible."""

    def write(self, staged: StagedState, content_id: str | None) -> IcebergTable:
        """Write the metadata file and say what Nessie shall hold."""

    def discard(self, staged: StagedState) -> None:
        """Delete the files made for a state that was certainly not committed."""


class IcebergTableFormat:
    """`TableFormat` for Iceberg through PyIceberg; safe to keep for long, it caches immutable metadata only."""

    def __init__(self, catalog: NessieCatalog, files: SnapshotFiles | None = None) -> None:
        self._catalog = catalog
        self._files = files or SnapshotFiles()
        self._opened: LRUCache[str, Table] = LRUCache(_METADATA_CACHED)
        self._io = load_file_io(catalog.properties, catalog.properties.get(WAREHOUSE_LOCATION))
        self._lock = threading.Lock()

    def open(self, key: ContentKey, content: IcebergTable) -> StagedState:
        """The table as `content` has it."""
        table = self._load_table(key, content)
        return StagedState(table, table)

    def _load_table(self, key: ContentKey, content: IcebergTable) -> Table:
        with self._lock:
            loaded_table = self._opened.get(content.metadata_location)
        if loaded_table is None:
            loaded_table = self._catalog.table_of(key, content)
            with self._lock:
                self._opened[content.metadata_location] = loaded_table
        return loaded_table

    def load_change(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable | StagedState,
        *,
        files: bool = True,
    ) -> TableChange:
        """What was done between two states, from manifests."""
        table = after.table if isinstance(after, StagedState) else self._load_table(key, after)
        read_files = self._files.reader_for(table) if files else None
        return manifests.load_table_change(
            self._load_table(key, before) if before else None, table, read_files
        )

    def find_read_errors(self, states: Sequence[TableStates]) -> list[Exception | None]:
        """The first error of each table among its metadata, manifests, data and delete files.

        Reads the metadata file of each table and, for each snapshot that the change adds, the manifest list
        and the manifests that it added; sends a request for each file of these (see `file_errors`).
        """
        several = len(states) > 1
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) if several else nullcontext() as pool:
            # The disk flushes while files are parsed, and once for requests that come together.
            metadata_files = [_start_synchronizing(pool, [state[2].metadata_location]) for state in states]
            added_files = map_concurrently(
                self._read_added_files, states, lambda state: state[2].metadata_location
            )
            answers = iter(file_errors([file for files in added_files for file in files.data_files]))
            errors: list[Exception | None] = []
            for files in added_files:
                data = [error for error in islice(answers, len(files.data_files)) if error is not None]
                errors.append(files.error or next(iter(data), None))
            other_files = [
                _start_synchronizing(pool, files.unsynchronized if error is None else ())
                for files, error in zip(added_files, errors, strict=True)
            ]
            return [
                error or metadata_file() or other_file()
                for error, metadata_file, other_file in zip(errors, metadata_files, other_files, strict=True)
            ]

    def _read_added_files(self, state: TableStates) -> _AddedFiles:
        """The files that a change adds to a table; the metadata files among them have been read."""
        key, before, after = state
        unsynchronized, data_files = list[str](), dict[str, StoredFile]()
        java_files: set[str] = set()
        try:
            fields = read_metadata_fields(self._io, after.metadata_location)
            io = self._file_io_for(fields.get("properties") or {}, after.metadata_location)
            for snapshot in self._unpublished_snapshots(key, before, fields):
                stored = self._files.load_stored(snapshot, io)
                _track_data_files(data_files, io, stored.entries)
                if _is_written_by_java(snapshot):
                    unsynchronized += [snapshot.manifest_list, *stored.manifests]
                    java_files |= {entry.data_file.file_path for entry in stored.entries}
        except Exception as error:  # noqa: BLE001 - it is the answer for this table, not for the others
            return _AddedFiles(error=error)
        unsynchronized += java_files & data_files.keys()
        return _AddedFiles(tuple(filter(None, unsynchronized)), tuple(data_files.values()))

    def _unpublished_snapshots(
        self, key: ContentKey, before: IcebergTable | None, after: Mapping[str, Any]
    ) -> list[Snapshot]:
        """The snapshots of `after`, the fields of its metadata file, that the table did not have `before`."""
        snapshots: list[dict[str, Any]] = after.get("snapshots") or []
        newest_first = (
            (fields["snapshot-id"], fields.get("parent-snapshot-id"), fields)
            for fields in reversed(snapshots)
        )
        start, current = before.snapshot_id if before else NO_SNAPSHOT, after.get("current-snapshot-id")
        new_snapshots, is_complete = manifests.follow_ancestors(
            _to_snapshot_id(start), _to_snapshot_id(current), newest_first
        )
        if not is_complete and before is not None:
            # It was rolled back, or snapshots have expired: only the older metadata tells which ones are new.
            old_ids = {snapshot.snapshot_id for snapshot in self._load_table(key, before).metadata.snapshots}
            new_snapshots = [fields for fields in snapshots if fields["snapshot-id"] not in old_ids]
        return [Snapshot.model_validate(fields) for fields in new_snapshots]

    def _file_io_for(self, properties: Mapping[str, str], location: str) -> FileIO:
        """The catalog's FileIO (one takes 0.4 ms to make), or one with the table's own properties."""
        io_properties = {
            name: value for name, value in properties.items() if name.startswith(_FILE_IO_PROPERTIES)
        }
        return (
            load_file_io({**self._catalog.properties, **io_properties}, location)
            if io_properties
            else self._io
        )

    def replay(
        self, key: ContentKey, run_change: TableChange, after: IcebergTable, target: StagedState
    ) -> StagedState:
        """`target` plus the steps of `run_change`, one snapshot each, with their summaries' own entries."""
        staged = StagedState(target.base, target.table, list(target.written_paths))
        self._apply_updates(
            staged,
            self._layout_updates(run_change, self._load_table(key, after).metadata, target.table.metadata),
        )
        try:
            for step in run_change.steps:
                self._apply_updates(staged, _snapshot_updates(staged, step))
        except Exception as error:
            # Nobody else will know of these files: a store that is full would only get fuller, pass by pass.
            _delete_existing_files(staged, staged.written_paths[len(target.written_paths) :])
            if isinstance(error, ValidationException):
                raise ReplayImpossible(str(error), table=key.name) from error
            raise
        return staged

    @staticmethod
    def _layout_updates(
        run_change: TableChange, after: TableMetadata, target: TableMetadata
    ) -> tuple[TableUpdate, ...]:
        updates: tuple[TableUpdate, ...] = ()
        is_evolved = run_change.before is not None and run_change.before.shape != run_change.after.shape
        if is_evolved and manifests.build_layout(target).shape != run_change.after.shape:
            updates += _schema_updates(target, after.schema())
        if run_change.properties_set:
            updates += (SetPropertiesUpdate(updates=dict(run_change.properties_set)),)
        if removed_names := [name for name in run_change.properties_removed if name in target.properties]:
            updates += (RemovePropertiesUpdate(removals=removed_names),)
        return updates

    @staticmethod
    def _apply_updates(staged: StagedState, updates: tuple[TableUpdate, ...]) -> None:
        if updates:
            table, metadata = staged.table, staged.table.metadata
            metadata = apply_updates(metadata, updates)
            staged.table = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)

    def write(self, staged: StagedState, content_id: str | None) -> IcebergTable:
        """Write the metadata file and say what Nessie shall hold."""
        base = staged.base
        metadata = add_log_entry(staged.table.metadata, base.metadata_location, base.metadata.last_updated_ms)
        version = metadata_version(base.metadata_location) + 1
        provider = load_location_provider(metadata.location, metadata.properties)
        location = provider.new_table_metadata_file_location(version)
        staged.written_paths.append(location)
        write_metadata(self._catalog, metadata, base.io, location)
        with self._lock:
            self._opened[location] = Table(base.name(), metadata, location, base.io, base.catalog)
        return table_content(content_id, location, metadata)

    def discard(self, staged: StagedState) -> None:
        """Delete the manifests and metadata made for it; the data files are the run's."""
        _delete_existing_files(staged, staged.written_paths)


def _schema_updates(target: TableMetadata, new_schema: Schema) -> tuple[TableUpdate, ...]:
    """Make `new_schema` the current schema: the table's own where it has it, else under an id of its own.

    The id it has on the run's branch may be that of another schema on main.
    """
    for schema in target.schemas:
        if schema == new_schema:
            return (SetCurrentSchemaUpdate(schema_id=schema.schema_id),)
    schema_id = max(schema.schema_id for schema in target.schemas) + 1
    added_schema = new_schema.model_copy(update={"schema_id": schema_id})
    return AddSchemaUpdate(schema_=added_schema), SetCurrentSchemaUpdate(schema_id=schema_id)


def _delete_existing_files(staged: StagedState, paths: Sequence[str]) -> None:
    """Delete files of which some may never have been written, on a store that may refuse that too."""
    for path in paths:
        try:
            staged.base.io.delete(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s was made for what is not published, and is still there: %s", path, error)


def _snapshot_updates(staged: StagedState, step: SnapshotChange) -> tuple[TableUpdate, ...]:
    table = staged.table
    removed_files = {file.handle for file in step.removed}
    if removed_files:
        # Of files that main has lost the producer tells, from manifests that it reads anyhow. PyIceberg's own
        # validation reads all of the snapshots since the base: of 120 runs that waited with a partition each,
        # it was 93 % of the pass.
        operation = Operation.OVERWRITE if step.added else Operation.DELETE
    else:
        operation = Operation.APPEND if step.mode is ChangeMode.APPEND else Operation.OVERWRITE
    updates = build_snapshot(
        table,
        added=[file.handle for file in step.added],
        removed=removed_files,
        operation=operation,
        properties={**step.properties, LakeProperty.REPLAYED_FROM: str(step.snapshot_id)},
        written_paths=staged.written_paths,
    )
    return tuple(map(as_compaction, updates)) if step.mode is ChangeMode.COMPACT else updates
