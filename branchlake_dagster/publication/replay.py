"""Read the files of a table's changes, and replay a run's snapshots on a newer state of their table.

A replay writes new metadata, with the run's own data files. PyIceberg's snapshot producers write the
manifests. They also decide whether the table still has the files that a step removes.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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
    StoredFileDamaged,
    file_errors,
    is_local,
    map_concurrently,
    read_metadata_fields,
    synchronize_files,
)
from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.history.capture import follow_parents
from branchlake_dagster.internals.pyiceberg import (
    add_log_entry,
    apply_updates,
    as_compaction,
    build_snapshot,
    metadata_version,
    write_metadata,
)
from branchlake_dagster.nessie.model import (
    ContentKey,
    DiffEntry,
    IcebergTable,
)
from branchlake_dagster.publication.ledger import (
    Candidate,
)
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.publication.table_change import (
    ChangeMode,
    SnapshotChange,
    TableChange,
    build_layout,
    load_table_change,
)
from branchlake_dagster.publication.table_graft import graft_run_state
from branchlake_dagster.stored_names import LakeProperty

_log = logging.getLogger(__name__)

_METADATA_CACHED = 64
_FILE_IO_PROPERTIES = ("s3.", "hdfs.", "gcs.", "adls.", "oss.", "client.", "py-io-impl")

TableStates = tuple[ContentKey, IcebergTable | None, IcebergTable]
"""A table, its state before a change (None for a new table), and its state after the change."""


class ReplayImpossible(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """PyIceberg's validation refused the replay of a change that `find_overlap` allowed."""


@dataclass
class StagedState:
    """A table's state in memory. `base` is the stored table, `table` the state after the replay."""

    base: Table
    table: Table
    written_paths: list[str] = field(default_factory=list)
    """Files that were written for the state. They are deleted if it is certainly not committed."""


@dataclass(frozen=True)
class _AddedFiles:
    """The files that a change adds to a table, found by reading its metadata file and manifests."""

    unsynchronized: tuple[str, ...] = ()
    """Manifest lists, manifests and data files that their writer may not have synchronized to disk."""
    data_files: tuple[StoredFile, ...] = ()
    """The added data and delete files, which have not been opened yet."""
    error: Exception | None = None
    """The error of reading the metadata file or a manifest; the other fields are empty then."""


def _start_synchronizing(pool: Executor | None, locations: Sequence[str]) -> Callable[[], OSError | None]:
    """Start to flush local files to disk in the pool.

    Returns a function that waits for the flush and returns its OSError, or None. Without a pool, that
    function flushes the files itself: for one table, a thread costs more than it saves.
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
    """Check whether an engine on Iceberg's Java library (Spark, Flink, Trino) wrote the snapshot.

    Such an engine does not synchronize its files; `DurableFileIO` does. The library records its version in
    each summary.
    """
    return snapshot.summary is not None and "iceberg-version" in snapshot.summary.additional_properties


def _track_data_files(
    data_files: dict[str, StoredFile], io: FileIO, entries: Iterable[ManifestEntry]
) -> None:
    """Add the files that a snapshot added to `data_files` (by path), and remove its removed data files.

    Call it for the snapshots from old to new: a later snapshot may remove a data file of an earlier snapshot.
    """
    for entry in entries:
        file = entry.data_file
        if entry.status == ManifestEntryStatus.ADDED:
            data_files[file.file_path] = StoredFile(io, file.file_path, file.file_size_in_bytes)
        elif file.content == DataFileContent.DATA:
            data_files.pop(file.file_path, None)


class TableFormat(Protocol):
    """The operations on tables that the publisher uses.

    `IcebergTableFormat` implements them for Iceberg, and the simulation in the tests without Iceberg.
    """

    def open(self, key: ContentKey, content: IcebergTable) -> StagedState:
        """Open the table in the state that `content` names."""

    def load_change(
        self,
        key: ContentKey,
        before: IcebergTable | None,
        after: IcebergTable | StagedState,
        *,
        files: bool = True,
    ) -> TableChange:
        """Load the change between two states of a table.

        If `before` is None, the change starts with the creation of the table. With `files=False`, no manifest
        is read and the steps have no files.
        """

    def find_read_errors(self, states: Sequence[TableStates]) -> list[Exception | None]:
        """Check that the files that a change adds to each table can be read and survive a power cut.

        Files on a local disk are synchronized (fsync) if their writer may not have done so. Returns one
        result per table, in the order of `states`: the first error, or None if all files can be read. Every
        call asks the storage, without a cache.
        """

    def replay(
        self, key: ContentKey, run_change: TableChange, after: IcebergTable, target: StagedState
    ) -> StagedState:
        """Apply `run_change` to `target` and return the resulting state, which is not committed.

        `after` is the table as `run_change` left it on the run's branch. Raises ReplayImpossible if Iceberg
        refuses a step of the change.
        """

    def graft(
        self, key: ContentKey, before: IcebergTable, after: IcebergTable, target: StagedState
    ) -> StagedState | None:
        """Return the run's state `after`, with the compactions of `target` since `before` in its history.

        Returns None if one side does not have format version 2. See `graft_run_state`.
        """

    def write(self, staged: StagedState, content_id: str | None) -> IcebergTable:
        """Write the metadata file of a replayed state, and return the content to commit to Nessie.

        `content_id` is the id of the table's content on `main`; None if the commit creates the table. Nothing
        is committed.
        """

    def discard(self, staged: StagedState) -> None:
        """Delete the files that were written for a state that was certainly not committed.

        Errors of the storage are logged, not raised.
        """


class IcebergTableFormat:
    """`TableFormat` for Iceberg, through PyIceberg.

    Instances may live long: they cache only metadata that does not change.
    """

    def __init__(self, catalog: NessieCatalog, files: SnapshotFiles | None = None) -> None:
        self._catalog = catalog
        self._files = files or SnapshotFiles()
        self._opened: LRUCache[str, Table] = LRUCache(_METADATA_CACHED)
        self._io = load_file_io(catalog.properties, catalog.properties.get(WAREHOUSE_LOCATION))
        self._lock = threading.Lock()

    def open(self, key: ContentKey, content: IcebergTable) -> StagedState:
        """Open the table in the state that `content` names."""
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
        """Load the change of a table between two states, from `before` to `after`.

        If `before` is None, the change starts with the creation of the table. `key` is the table's name. With
        `files=False`, no manifest is read: the steps have no files, and their mode is UNKNOWN.
        """
        table = after.table if isinstance(after, StagedState) else self._load_table(key, after)
        read_files = self._files.reader_for(table) if files else None
        return load_table_change(self._load_table(key, before) if before else None, table, read_files)

    def find_read_errors(self, states: Sequence[TableStates]) -> list[Exception | None]:
        """Find the first error of each table among its metadata, manifests, data and delete files.

        Returns one result per table, in the order of `states`; None if there is no error. For each table this
        reads the metadata file. For each snapshot that the change adds, it reads the manifest list and the
        added manifests, and sends a request for each file that they name (see `file_errors`).
        """
        several = len(states) > 1
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) if several else nullcontext() as pool:
            # The disk flushes while files are parsed, and combines requests that arrive together.
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
        """Read the metadata file and manifests of a change, and list the files that it adds to the table.

        Raises no error: the result has it.
        """
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
        except Exception as error:  # noqa: BLE001 - the error is the answer for this table alone
            return _AddedFiles(error=error)
        unsynchronized += java_files & data_files.keys()
        return _AddedFiles(tuple(filter(None, unsynchronized)), tuple(data_files.values()))

    def _unpublished_snapshots(
        self, key: ContentKey, before: IcebergTable | None, after: Mapping[str, Any]
    ) -> list[Snapshot]:
        """Return the snapshots that the change added to the table.

        `after` are the fields of the table's metadata file after the change.
        """
        snapshots: list[dict[str, Any]] = after.get("snapshots") or []
        newest_first = (
            (fields["snapshot-id"], fields.get("parent-snapshot-id"), fields)
            for fields in reversed(snapshots)
        )
        start, current = before.snapshot_id if before else NO_SNAPSHOT, after.get("current-snapshot-id")
        new_snapshots, is_complete = follow_parents(
            newest_first, _to_snapshot_id(current), _to_snapshot_id(start)
        )
        if not is_complete and before is not None:
            # The table was rolled back, or snapshots expired: only the older metadata shows which ones are
            # new.
            old_ids = {snapshot.snapshot_id for snapshot in self._load_table(key, before).metadata.snapshots}
            new_snapshots = [fields for fields in snapshots if fields["snapshot-id"] not in old_ids]
        return [Snapshot.model_validate(fields) for fields in new_snapshots]

    def _file_io_for(self, properties: Mapping[str, str], location: str) -> FileIO:
        """Return the catalog's FileIO, or one with the table's own properties.

        Creating a FileIO takes 0.4 ms.
        """
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
        """Return `target` with the steps of `run_change`, one snapshot each, with their summaries.

        `after` is the table as the run left it; it gives the columns of schema changes.

        Writes manifests, and deletes them after an error. Raises ReplayImpossible if PyIceberg refuses a
        step.
        """
        staged = StagedState(target.base, target.table, list(target.written_paths))
        self._apply_updates(
            staged,
            self._layout_updates(run_change, self._load_table(key, after).metadata, target.table.metadata),
        )
        try:
            for step in run_change.steps:
                self._apply_updates(staged, build_step_updates(staged, step))
        except Exception as error:
            # Only this state refers to these files. Every pass would leave more of them in a full store.
            delete_existing_files(staged, staged.written_paths[len(target.written_paths) :])
            if isinstance(error, ValidationException):
                raise ReplayImpossible(str(error), table=key.name) from error
            raise
        return staged

    def graft(
        self, key: ContentKey, before: IcebergTable, after: IcebergTable, target: StagedState
    ) -> StagedState | None:
        """Return the run's state with the compactions of `main` in its history. Writes no file.

        Returns None if one side does not have format version 2.
        """
        base_id = self._load_table(key, before).metadata.current_snapshot_id
        run_metadata = self._load_table(key, after).metadata
        metadata = graft_run_state(target.table.metadata, run_metadata, base_id)
        if metadata is None:
            return None
        base = target.base
        return StagedState(base, Table(base.name(), metadata, base.metadata_location, base.io, base.catalog))

    @staticmethod
    def _layout_updates(
        run_change: TableChange, after: TableMetadata, target: TableMetadata
    ) -> tuple[TableUpdate, ...]:
        updates: tuple[TableUpdate, ...] = ()
        is_evolved = run_change.before is not None and run_change.before.shape != run_change.after.shape
        if is_evolved and build_layout(target).shape != run_change.after.shape:
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
        """Write the metadata file of a replayed state, and return the content to commit to Nessie.

        `content_id` is the id of the table's content on `main`; None if the commit creates the table.
        """
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
        """Delete the manifests and metadata files that the replay of a state wrote.

        The data files stay, because they belong to the run. Errors of the storage are logged, not raised.
        """
        delete_existing_files(staged, staged.written_paths)


def _schema_updates(target: TableMetadata, new_schema: Schema) -> tuple[TableUpdate, ...]:
    """Return the updates that make `new_schema` current, under the id that `target` has for an equal schema.

    Without an equal schema, the updates add `new_schema` under a free id.

    The id of the schema on the run's branch may belong to another schema on `main`.
    """
    for schema in target.schemas:
        if schema == new_schema:
            return (SetCurrentSchemaUpdate(schema_id=schema.schema_id),)
    schema_id = max(schema.schema_id for schema in target.schemas) + 1
    added_schema = new_schema.model_copy(update={"schema_id": schema_id})
    return AddSchemaUpdate(schema_=added_schema), SetCurrentSchemaUpdate(schema_id=schema_id)


def delete_existing_files(staged: StagedState, paths: Sequence[str]) -> None:
    """Delete the files that exist among `paths`. Errors of the storage are logged, not raised.

    The files belong to `staged`, whose FileIO is used.
    """
    for path in paths:
        try:
            staged.base.io.delete(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning(
                "%s was written for a state that is not published, and could not be deleted: %s", path, error
            )


def build_step_updates(staged: StagedState, step: SnapshotChange) -> tuple[TableUpdate, ...]:
    """Return the updates that add one step as a snapshot to the state's table.

    Writes the snapshot's manifests and records them in `staged.written_paths`. Commits nothing.
    """
    table = staged.table
    removed_files = {file.handle for file in step.removed}
    if removed_files:
        # The producer notices files that main has lost, from manifests that it reads anyway. PyIceberg's own
        # validation reads all snapshots since the base. With 120 waiting runs of one partition each,
        # it took 93 % of the pass.
        operation = Operation.OVERWRITE if step.added else Operation.DELETE
    else:
        operation = Operation.APPEND if step.mode is ChangeMode.APPEND else Operation.OVERWRITE
    origin = {} if step.is_reversal else {LakeProperty.REPLAYED_FROM: str(step.snapshot_id)}
    updates = build_snapshot(
        table,
        added=[file.handle for file in step.added],
        removed=removed_files,
        operation=operation,
        properties={**step.properties, **origin},
        written_paths=staged.written_paths,
    )
    return tuple(map(as_compaction, updates)) if step.mode is ChangeMode.COMPACT else updates


class _FileError(BranchlakeError):
    """An error of one file. `file` is its location; None if it is not known."""

    def __init__(self, message: str, *, file: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.file = file


class TableFilesMissing(_FileError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file that a publication needs does not exist; nothing was published."""


class TableFilesDamaged(_FileError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file that a publication needs is empty, truncated or has another content; nothing was published."""


class TableFilesUnreadable(_FileError, Transient):  # noqa: N818 - named like the other outcomes
    """The storage refused to read or write files of a table; nothing was published."""


def find_unreadable_candidates(tables: TableFormat, candidates: Sequence[Candidate]) -> dict[str, Exception]:
    """Return, by branch name, the errors of candidates whose own files cannot be read.

    Reads the metadata, manifest lists and manifests of the snapshots that a candidate adds to `main`, and
    asks for the size of their data and delete files. Files with `file://` locations are flushed to disk.
    """
    states = [(candidate, state) for candidate in candidates for state in table_states(candidate.changes)]
    errors: dict[str, Exception] = {}
    for (candidate, state), error in zip(
        states, tables.find_read_errors([state for _, state in states]), strict=True
    ):
        if error is not None and candidate.branch not in errors:
            errors[candidate.branch] = _to_file_error(error, candidate, state[0].name)
    return errors


def table_states(changes: Sequence[DiffEntry]) -> list[TableStates]:
    """Return the tables that the changes write, each with its content before and after.

    Dropped tables are left out. A table whose content id the changes move to another key is a renamed table:
    it is returned under its new key, with the content that it had under the old key.
    """
    old_tables = {
        entry.from_content.content_id: entry.from_content
        for entry in changes
        if isinstance(entry.from_content, IcebergTable)
    }
    return [
        (entry.key, old_tables.get(entry.to_content.content_id), entry.to_content)
        for entry in changes
        if isinstance(entry.to_content, IcebergTable)
    ]


@contextmanager
def wrap_file_errors(candidate: Candidate) -> Iterator[None]:
    """Raise errors of files in the body as `TableFiles…` errors that name the candidate's branch and run.

    Such an error concerns one candidate alone, so it does not block others in every tick.
    """
    try:
        yield
    except (OSError, StoredFileDamaged) as error:
        raise _to_file_error(error, candidate, ", ".join(candidate.tables)) from error


def _to_file_error(error: Exception, candidate: Candidate, table: str) -> Exception:
    """Return the `TableFiles…` error with table, branch, run and file for an error of the storage.

    Errors of other classes are returned unchanged.
    """
    context = {"table": table, "branch": candidate.branch, "run_id": candidate.run_id}
    hint = "Nothing was published. Restore the file, or launch the run again."
    file_error: BranchlakeError
    if isinstance(error, StoredFileDamaged):
        file_error = TableFilesDamaged(error.message, file=error.file, **context, hint=hint)
    elif isinstance(error, FileNotFoundError):
        missing_message = f"A file of the table does not exist: {error.filename or error}."
        file_error = TableFilesMissing(missing_message, file=error.filename, **context, hint=hint)
    elif isinstance(error, OSError):
        error_name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        file_error = TableFilesUnreadable(
            f"The storage refused to read or write a file of the table ({error_name}): {error}.",
            file=error.filename,
            **context,
            hint="Nothing was published. The next ticks try again until the storage answers.",
        )
    else:
        return error
    file_error.__cause__ = error
    return file_error
