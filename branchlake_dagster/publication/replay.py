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
    each_at_once,
    file_errors,
    is_local,
    read_metadata_fields,
    synchronize,
)
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.internals.pyiceberg import (
    applied,
    as_compaction,
    metadata_version,
    snapshot_of,
    with_log_entry,
    write_metadata,
)
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication import table_history as manifests
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.publication.table_change import Mode, SnapshotChange, TableChange
from branchlake_dagster.stored_names import LakeProperty

_log = logging.getLogger(__name__)

_METADATA_CACHED = 64
_FILE_IO_PROPERTIES = ("s3.", "hdfs.", "gcs.", "adls.", "oss.", "client.", "py-io-impl")

TableStates = tuple[ContentKey, IcebergTable | None, IcebergTable]
"""A table, what it was before a change (None: it is new), and what it is after it."""


class ReplayImpossible(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Iceberg's own validation refused the replay of a change that our rules allowed."""


@dataclass
class Staged:
    """A table's state in memory: `base` as some reference has it, then what was replayed on it."""

    base: Table
    table: Table
    written: list[str] = field(default_factory=list)
    """Files made for it, to be deleted if it is certainly not committed."""


@dataclass(frozen=True)
class _AddedFiles:
    """What a change adds to a table; its metadata files have been read."""

    unsynchronized: tuple[str, ...] = ()
    """Files whose writer may have left them to the kernel, the metadata file apart."""
    data: tuple[StoredFile, ...] = ()
    error: Exception | None = None


def _synchronizing(pool: Executor | None, locations: Sequence[str]) -> Callable[[], OSError | None]:
    """Make files durable in the pool. The result waits for that, and returns the error of the disk.

    Without a pool it does so when it is called: for one table a thread costs more than it saves.
    """
    if not any(map(is_local, locations)):
        return lambda: None
    if pool is None:
        return partial(_synchronize_error, locations)
    return pool.submit(_synchronize_error, locations).result


def _synchronize_error(locations: Sequence[str]) -> OSError | None:
    try:
        synchronize(locations)
    except OSError as error:
        return error
    return None


def _number(snapshot_id: int | None) -> int | None:
    return None if snapshot_id == NO_SNAPSHOT else snapshot_id


def _written_by_java(snapshot: Snapshot) -> bool:
    """Whether an engine on Iceberg's Java library (Spark, Flink, Trino) has written the snapshot.

    It does not synchronize its files, `DurableFileIO` does. The library notes its version in each summary.
    """
    return snapshot.summary is not None and "iceberg-version" in snapshot.summary.additional_properties


def _note(data: dict[str, StoredFile], io: FileIO, entries: Iterable[ManifestEntry]) -> None:
    """Follow in `data` what a snapshot did to files. A later snapshot of the run may remove a data file."""
    for entry in entries:
        file = entry.data_file
        if entry.status == ManifestEntryStatus.ADDED:
            data[file.file_path] = StoredFile(io, file.file_path, file.file_size_in_bytes)
        elif file.content == DataFileContent.DATA:
            data.pop(file.file_path, None)


class Tables(Protocol):
    """What the publisher needs of a table format. The simulation has another one than Iceberg."""

    def open(self, key: ContentKey, content: IcebergTable) -> Staged:
        """The table as `content` has it."""

    def change(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable | Staged,
        *,
        files: bool = True,
    ) -> TableChange:
        """What was done between two states; `before` None: since it was created."""

    def read_errors(self, states: Sequence[TableStates]) -> list[Exception | None]:
        """Open what a change adds to each table; None where everybody will be able to read it.

        The files are durable then. Nothing that was read before counts: every call asks the storage.
        """

    def replay(self, key: ContentKey, mine: TableChange, after: IcebergTable, onto: Staged) -> Staged:
        """`onto` plus the change `mine`, which led to `after`; raises ReplayImpossible."""

    def write(self, staged: Staged, content_id: str | None) -> IcebergTable:
        """Write the metadata file and say what Nessie shall hold."""

    def discard(self, staged: Staged) -> None:
        """Delete the files made for a state that was certainly not committed."""


class IcebergTables:
    """`Tables` for Iceberg through PyIceberg; safe to keep for long, it caches immutable metadata only."""

    def __init__(self, catalog: NessieCatalog, files: SnapshotFiles | None = None) -> None:
        self._catalog = catalog
        self._files = files or SnapshotFiles()
        self._opened: LRUCache[str, Table] = LRUCache(_METADATA_CACHED)
        self._io = load_file_io(catalog.properties, catalog.properties.get(WAREHOUSE_LOCATION))
        self._lock = threading.Lock()

    def open(self, key: ContentKey, content: IcebergTable) -> Staged:
        """The table as `content` has it."""
        table = self._open(key, content)
        return Staged(table, table)

    def _open(self, key: ContentKey, content: IcebergTable) -> Table:
        with self._lock:
            found = self._opened.get(content.metadata_location)
        if found is None:
            found = self._catalog.table_of(key, content)
            with self._lock:
                self._opened[content.metadata_location] = found
        return found

    def change(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable | Staged,
        *,
        files: bool = True,
    ) -> TableChange:
        """What was done between two states, from manifests."""
        table = after.table if isinstance(after, Staged) else self._open(key, after)
        read = self._files.of(table) if files else None
        return manifests.change(self._open(key, before) if before else None, table, read)

    def read_errors(self, states: Sequence[TableStates]) -> list[Exception | None]:
        """The first error of each table among its metadata, manifests, data and delete files.

        Reads the metadata file of each table and, for each snapshot that the change adds, the manifest list
        and the manifests that it added; sends a request for each file of these (see `file_errors`).
        """
        several = len(states) > 1
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) if several else nullcontext() as pool:
            # The disk flushes while files are parsed, and once for requests that come together.
            metadata_files = [_synchronizing(pool, [state[2].metadata_location]) for state in states]
            added = each_at_once(self._added_files, states, lambda state: state[2].metadata_location)
            answers = iter(file_errors([file for files in added for file in files.data]))
            errors: list[Exception | None] = []
            for files in added:
                data = [error for error in islice(answers, len(files.data)) if error is not None]
                errors.append(files.error or next(iter(data), None))
            other_files = [
                _synchronizing(pool, files.unsynchronized if error is None else ())
                for files, error in zip(added, errors, strict=True)
            ]
            return [
                error or metadata_file() or others()
                for error, metadata_file, others in zip(errors, metadata_files, other_files, strict=True)
            ]

    def _added_files(self, state: TableStates) -> _AddedFiles:
        """The files that a change adds to a table; the metadata files among them have been read."""
        key, before, after = state
        unsynchronized, data = list[str](), dict[str, StoredFile]()
        java_files: set[str] = set()
        try:
            fields = read_metadata_fields(self._io, after.metadata_location)
            io = self._io_of(fields.get("properties") or {}, after.metadata_location)
            for snapshot in self._unpublished_snapshots(key, before, fields):
                stored = self._files.stored(snapshot, io)
                _note(data, io, stored.entries)
                if _written_by_java(snapshot):
                    unsynchronized += [snapshot.manifest_list, *stored.manifests]
                    java_files |= {entry.data_file.file_path for entry in stored.entries}
        except Exception as error:  # noqa: BLE001 - it is the answer for this table, not for the others
            return _AddedFiles(error=error)
        unsynchronized += java_files & data.keys()
        return _AddedFiles(tuple(filter(None, unsynchronized)), tuple(data.values()))

    def _unpublished_snapshots(
        self, key: ContentKey, before: IcebergTable | None, after: Mapping[str, Any]
    ) -> list[Snapshot]:
        """The snapshots of `after`, the fields of its metadata file, that the table did not have `before`."""
        snapshots: list[dict[str, Any]] = after.get("snapshots") or []
        newest_first = (
            (one["snapshot-id"], one.get("parent-snapshot-id"), one) for one in reversed(snapshots)
        )
        start, current = before.snapshot_id if before else NO_SNAPSHOT, after.get("current-snapshot-id")
        found, complete = manifests.chain(_number(start), _number(current), newest_first)
        if not complete and before is not None:
            # It was rolled back, or snapshots have expired: only the older metadata tells which ones are new.
            old = {snapshot.snapshot_id for snapshot in self._open(key, before).metadata.snapshots}
            found = [one for one in snapshots if one["snapshot-id"] not in old]
        return [Snapshot.model_validate(one) for one in found]

    def _io_of(self, properties: Mapping[str, str], location: str) -> FileIO:
        """The catalog's FileIO (one takes 0.4 ms to make), or one with the table's own properties."""
        own = {name: value for name, value in properties.items() if name.startswith(_FILE_IO_PROPERTIES)}
        return load_file_io({**self._catalog.properties, **own}, location) if own else self._io

    def replay(self, key: ContentKey, mine: TableChange, after: IcebergTable, onto: Staged) -> Staged:
        """`onto` plus the steps of `mine`, one snapshot each, with their summaries' own entries."""
        staged = Staged(onto.base, onto.table, list(onto.written))
        self._advance(
            staged, self._layout_updates(mine, self._open(key, after).metadata, onto.table.metadata)
        )
        try:
            for step in mine.steps:
                self._advance(staged, _replayed(staged, step))
        except Exception as error:
            # Nobody else will know of these files: a store that is full would only get fuller, pass by pass.
            _delete_what_is_there(staged, staged.written[len(onto.written) :])
            if isinstance(error, ValidationException):
                raise ReplayImpossible(str(error), table=key.name) from error
            raise
        return staged

    @staticmethod
    def _layout_updates(
        mine: TableChange, after: TableMetadata, onto: TableMetadata
    ) -> tuple[TableUpdate, ...]:
        updates: tuple[TableUpdate, ...] = ()
        evolved = mine.before is not None and mine.before.shape != mine.after.shape
        if evolved and manifests.layout(onto).shape != mine.after.shape:
            updates += _with_schema(onto, after.schema())
        if mine.properties_set:
            updates += (SetPropertiesUpdate(updates=dict(mine.properties_set)),)
        if gone := [name for name in mine.properties_removed if name in onto.properties]:
            updates += (RemovePropertiesUpdate(removals=gone),)
        return updates

    @staticmethod
    def _advance(staged: Staged, updates: tuple[TableUpdate, ...]) -> None:
        if updates:
            table, metadata = staged.table, staged.table.metadata
            metadata = applied(metadata, updates)
            staged.table = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)

    def write(self, staged: Staged, content_id: str | None) -> IcebergTable:
        """Write the metadata file and say what Nessie shall hold."""
        base = staged.base
        metadata = with_log_entry(
            staged.table.metadata, base.metadata_location, base.metadata.last_updated_ms
        )
        version = metadata_version(base.metadata_location) + 1
        provider = load_location_provider(metadata.location, metadata.properties)
        location = provider.new_table_metadata_file_location(version)
        staged.written.append(location)
        write_metadata(self._catalog, metadata, base.io, location)
        with self._lock:
            self._opened[location] = Table(base.name(), metadata, location, base.io, base.catalog)
        return table_content(content_id, location, metadata)

    def discard(self, staged: Staged) -> None:
        """Delete the manifests and metadata made for it; the data files are the run's."""
        _delete_what_is_there(staged, staged.written)


def _with_schema(onto: TableMetadata, wanted: Schema) -> tuple[TableUpdate, ...]:
    """Make `wanted` the current schema: the table's own where it has it, else under an id of its own.

    The id it has on the run's branch may be that of another schema on main.
    """
    for schema in onto.schemas:
        if schema == wanted:
            return (SetCurrentSchemaUpdate(schema_id=schema.schema_id),)
    number = max(schema.schema_id for schema in onto.schemas) + 1
    added = wanted.model_copy(update={"schema_id": number})
    return AddSchemaUpdate(schema_=added), SetCurrentSchemaUpdate(schema_id=number)


def _delete_what_is_there(staged: Staged, paths: Sequence[str]) -> None:
    """Delete files of which some may never have been written, on a store that may refuse that too."""
    for path in paths:
        try:
            staged.base.io.delete(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s was made for what is not published, and is still there: %s", path, error)


def _replayed(staged: Staged, step: SnapshotChange) -> tuple[TableUpdate, ...]:
    table = staged.table
    removed = {file.handle for file in step.removed}
    if removed:
        # Of files that main has lost the producer tells, from manifests that it reads anyhow. PyIceberg's own
        # validation reads all of the snapshots since the base: of 120 runs that waited with a partition each,
        # it was 93 % of the pass.
        operation = Operation.OVERWRITE if step.added else Operation.DELETE
    else:
        operation = Operation.APPEND if step.mode is Mode.APPEND else Operation.OVERWRITE
    updates = snapshot_of(
        table,
        added=[file.handle for file in step.added],
        removed=removed,
        operation=operation,
        properties={**step.properties, LakeProperty.REPLAYED_FROM: str(step.snapshot_id)},
        written=staged.written,
    )
    return tuple(map(as_compaction, updates)) if step.mode is Mode.COMPACT else updates
