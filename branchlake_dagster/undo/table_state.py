"""Builds the state of a table after an undo, in memory. Reads and writes only metadata and manifests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pyiceberg.exceptions import ValidationException
from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update import (
    RemovePropertiesUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSpecUpdate,
    SetPropertiesUpdate,
    TableUpdate,
)

from branchlake_dagster.catalog.stored_files import StoredFile, file_errors
from branchlake_dagster.history.manifests import read_live_files
from branchlake_dagster.internals.pyiceberg import apply_updates, build_snapshot
from branchlake_dagster.publication.replay import StagedState, build_step_updates, delete_existing_files
from branchlake_dagster.publication.snapshot_files import convert_delete_files
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.undo.table_undo import find_returning_deletes
from branchlake_dagster.undo.undo_plan import Dependency, DependencyFound, TableUndo
from branchlake_dagster.wording import CodedReason


def require_restorable(name: str, undo: TableUndo, old_table: Table) -> None:
    """Raise DependencyFound if a file to restore is missing, or if rows of a data file had been deleted.

    The deleted rows would come back. `name` is the table's dotted name, and `old_table` the table before the
    undone publications.
    """
    delete_files = read_live_files(old_table.io, old_table.current_snapshot(), ManifestContent.DELETES)
    old_deletes = convert_delete_files(old_table.metadata, delete_files)
    if dependency := find_returning_deletes(undo, old_deletes, name):
        raise DependencyFound(dependency)
    handles = [file.handle for file in undo.restored.values()]
    handles += [file.handle for file in undo.restored_deletes.values()]
    stored_files = [
        StoredFile(old_table.io, handle.file_path, handle.file_size_in_bytes) for handle in handles
    ]
    _require_readable(name, stored_files)


def require_reversible(name: str, undo: TableUndo, table: Table) -> None:
    """Raise DependencyFound if a file is missing that a reversal of a compaction of `table` adds again."""
    _require_readable(
        name,
        [
            StoredFile(table.io, file.path, file.handle.file_size_in_bytes)
            for reversal in undo.reversals
            for file in reversal.added
            if file.path not in undo.removed
        ],
    )


def _require_readable(name: str, stored_files: Sequence[StoredFile]) -> None:
    if error := next(filter(None, file_errors(stored_files)), None):
        reason = CodedReason(f"a file of its earlier rows cannot be read any more ({error})", "files_gone")
        raise DependencyFound(Dependency(name, reason))


def find_missing_file(table: Table) -> Exception | None:
    """Return the first error among the files of the table's current snapshot; None if all files exist.

    Raises the error if the manifest list or a manifest itself cannot be read.
    """
    live_files = read_live_files(table.io, table.current_snapshot())
    stored_files = [StoredFile(table.io, file.file_path, file.file_size_in_bytes) for file in live_files]
    return next(filter(None, file_errors(stored_files)), None)


def build_undone_state(
    name: str, target: StagedState, undo: TableUndo, old_table: Table | None, properties: Mapping[str, str]
) -> StagedState:
    """Return the table's state after the undo, in memory. Its manifests are written.

    `name` is the table's dotted name, `target` its current state, and `old_table` the table before the undone
    publications. `properties` go into the summary of the new snapshot. Raises DependencyFound if Iceberg
    refuses the snapshot; the written manifests are deleted then.
    """
    state = StagedState(target.base, target.table, list(target.written_paths))
    _apply(state, _metadata_updates(name, undo, old_table, target.table))
    if undo.changes_files:
        ids = ",".join(map(str, undo.snapshot_ids))
        try:
            for reversal in undo.reversals:
                _apply(state, build_step_updates(state, reversal))
            updates = _build_undo_snapshot(state, undo, {**properties, LakeProperty.UNDONE_SNAPSHOTS: ids})
        except Exception as error:
            delete_existing_files(state, state.written_paths)
            if isinstance(error, ValidationException):
                reason = CodedReason(f"Iceberg refuses the undo ({error})", "refused_by_iceberg")
                raise DependencyFound(Dependency(name, reason)) from error
            raise
        _apply(state, updates)
    return state


def _build_undo_snapshot(
    state: StagedState, undo: TableUndo, properties: Mapping[str, str]
) -> tuple[TableUpdate, ...]:
    """Return the updates that add the undo's snapshot.

    First only the manifests of the undone snapshots are searched for the files to remove. All manifests are
    read only if the files are in other manifests by now.
    """

    def build(manifests_of: Collection[int] | None) -> tuple[TableUpdate, ...]:
        return build_snapshot(
            state.table,
            added=[file.handle for file in undo.restored.values()],
            removed=[file.handle for file in undo.removed.values()],
            operation=Operation.OVERWRITE if undo.restored or undo.removed_deletes else Operation.DELETE,
            properties=dict(properties),
            written_paths=state.written_paths,
            manifests_of=manifests_of,
            added_deletes=[file.handle for file in undo.restored_deletes.values()],
            removed_deletes=[file.handle for file in undo.removed_deletes.values()],
        )

    if undo.reversals:
        return build(None)  # the files are in the manifests of the reversal
    try:
        return build(undo.snapshot_ids)
    except ValidationException:
        delete_existing_files(state, state.written_paths)
        state.written_paths.clear()
        return build(None)


def _metadata_updates(
    name: str, undo: TableUndo, old_table: Table | None, table: Table
) -> tuple[TableUpdate, ...]:
    """Return the updates of columns, partition spec and properties of `table`.

    Raises DependencyFound if the table no longer has the partition spec from before the publications.
    """
    updates: tuple[TableUpdate, ...] = ()
    if undo.restores_spec and old_table is not None:
        old_spec = old_table.metadata.spec()
        if table.metadata.specs().get(old_spec.spec_id) != old_spec:
            reason = CodedReason("its earlier partition spec was removed", "partition_spec")
            raise DependencyFound(Dependency(name, reason))
        updates += (SetDefaultSpecUpdate(spec_id=old_spec.spec_id),)
    if undo.old_layout is not None and old_table is not None:
        updates += (SetCurrentSchemaUpdate(schema_id=old_table.metadata.current_schema_id),)
    if undo.properties_set:
        updates += (SetPropertiesUpdate(updates=undo.properties_set),)
    if undo.properties_removed:
        updates += (RemovePropertiesUpdate(removals=list(undo.properties_removed)),)
    return updates


def _apply(state: StagedState, updates: tuple[TableUpdate, ...]) -> None:
    if updates:
        table = state.table
        metadata = apply_updates(table.metadata, updates)
        state.table = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)
