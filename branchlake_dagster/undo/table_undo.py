"""Plans what the undo of publications changes in one table. Pure functions over a table's steps.

The undo of a step removes the files that the step added, and adds the files that it removed. Later steps of
other publications stay. The result must be the table that a history without the undone steps would have.
If the files do not prove that, `DependencyFound` is raised, with a `Dependency` that names the later
publications. They can be undone as well.

| a later step | the undo |
|---|---|
| appended rows | is independent of it |
| replaced the whole table, or the partitions that the undone step had replaced | has nothing to do |
| compacted exactly the files of the undone step | removes the compacted files |
| compacted them together with other files | restores the old files first, if the rows are the same |
| removed or rewrote a file that the undone step added | depends on it |
| updated or deleted rows where files would be restored | depends on it, unless keys are certainly different |
| removed, rewrote or compacted a file whose rows the undone step deleted by delete files | depends on it |
| removed or replaced these delete files | depends on it |
| wrote files with the partition spec that the undone step set | depends on it |
| updated or deleted rows where these rows come back | depends on it, except an upsert with deletes by value |

The delete files of an undone step are removed, so that the rows that they deleted come back in their files.
If the step had replaced older files of position deletes, the older ones are added again. Deletes by value
(equality deletes) apply to all older rows, whether other delete files had deleted them or not. So those of a
later upsert are independent of the undone step. Those of a statement may have only the values of rows that
it saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from branchlake_dagster.incremental.positions import ConsumptionRecord
from branchlake_dagster.publication.compaction_reversal import drop_reversed_compactions
from branchlake_dagster.publication.conflicts import find_hit_files
from branchlake_dagster.publication.table_change import ChangeMode, DeleteFile, SnapshotChange, TableChange
from branchlake_dagster.stored_names import LakeProperty, MaintenanceKind, find_exclusive_property
from branchlake_dagster.undo.later_steps import follow_later_step, require_whole_compactions
from branchlake_dagster.undo.superseding_steps import find_superseding_steps
from branchlake_dagster.undo.undo_plan import (
    Dependency,
    DependencyFound,
    OwnChange,
    TableUndo,
    list_partitions,
    list_run_ids,
)
from branchlake_dagster.wording import CodedReason

_NOT_INVERTIBLE = {
    ChangeMode.UNKNOWN: CodedReason("its history does not lead back to the publication", "history_lost"),
    ChangeMode.OLD_LAYOUT: CodedReason("it has files of an older partition spec", "older_partition_spec"),
    ChangeMode.DELETION_VECTORS: CodedReason(
        "the publication wrote deletion vectors, which cannot be undone", "wrote_deletion_vectors"
    ),
}
_WROTE_DELETE_FILES = CodedReason(
    "the publication replaced delete files in a way that cannot be undone", "wrote_delete_files"
)
_DELETED_ROWS = CodedReason("rows that were deleted before the publication would come back", "deleted_rows")
SPEC_CHANGED = CodedReason("its partition spec was changed since", "partition_spec_changed_since")
_MAX_FORMAT_VERSION = 2
"""The newest format version whose manifests PyIceberg writes."""


def plan_table_undo(
    table: str,
    change: TableChange,
    own: OwnChange,
    current_properties: Mapping[str, str],
    *,
    keep_positions: bool = False,
) -> TableUndo:
    """Plan the undo in one table. Reads and writes no file.

    `change` leads from the state before the first undone publication to the current state of `main`. `own`
    are the parts of it that the undone publications made. `current_properties` are the table's properties on
    `main`. With `keep_positions`, the positions of consumers and the offsets of ingestions stay as they are,
    so that no record is read again. Raises DependencyFound if the undo is not possible without others.
    """
    if not own.snapshot_ids <= {step.snapshot_id for step in change.steps}:
        reason = CodedReason("the publication's snapshots have expired or were rolled back", "history_lost")
        raise DependencyFound(Dependency(table, reason))
    # The undo of a run does not repeat a compaction that was reversed for the run.
    own = replace(own, snapshot_ids=own.snapshot_ids - _find_reversals(change.steps))
    steps = _drop_undone_steps(drop_reversed_compactions(change.steps))
    superseding_steps = find_superseding_steps(steps, own.snapshot_ids, change.after)
    own_steps, undo = list[SnapshotChange](), TableUndo()
    later_deletes: list[DeleteFile] = []
    for step in steps:
        if step.snapshot_id in superseding_steps:
            continue
        if step.snapshot_id in own.snapshot_ids:
            _require_invertible(table, step)
            _require_no_deleted_rows(table, step, later_deletes)
            require_whole_compactions(table, undo, step)
            own_steps.append(step)
            _add_own_step(undo, step)
            continue
        later_deletes += step.deletes
        is_comparable = step.mode not in (ChangeMode.UNKNOWN, ChangeMode.OLD_LAYOUT)
        if not is_comparable and own.snapshot_ids:
            raise DependencyFound(Dependency(table, _NOT_INVERTIBLE[step.mode], run_ids=list_run_ids(step)))
        if own_steps:
            follow_later_step(table, undo, step, change)
            undo.newer_paths |= {file.path for file in step.added}
    _require_separate_files(table, steps, own_steps, superseding_steps)
    undo.snapshot_ids = tuple(step.snapshot_id for step in own_steps)
    replacing_steps = superseding_steps.values()
    undo.superseded_by = tuple(dict.fromkeys(step.run_id for step in replacing_steps if step.run_id))
    undo.superseding_ids = tuple({step.snapshot_id for step in replacing_steps})
    undo.is_superseded = bool(own.snapshot_ids) and not own_steps
    _require_known_layout(table, undo, change, own)
    _plan_spec(table, undo, steps, change, own)
    _plan_columns(table, undo, steps, change, own)
    if not (keep_positions or undo.is_superseded):
        _require_own_positions(table, change, own, current_properties)
    _plan_properties(undo, own, current_properties, keep_positions)
    return undo


def _find_reversals(steps: Sequence[SnapshotChange]) -> frozenset[int]:
    """Return the ids of the snapshots by which rebases restored compacted files."""
    return frozenset(
        step.snapshot_id
        for step in steps
        if step.properties.get(LakeProperty.MAINTENANCE) == MaintenanceKind.COMPACTION_REVERSED
    )


def _drop_undone_steps(steps: Sequence[SnapshotChange]) -> list[SnapshotChange]:
    """Return the steps without those that an earlier undo reversed, and without the step of that undo."""
    undone_ids: set[int] = set()
    kept_steps = []
    for step in reversed(steps):
        if undone_snapshots := step.properties.get(LakeProperty.UNDONE_SNAPSHOTS):
            undone_ids |= {int(snapshot_id) for snapshot_id in undone_snapshots.split(",")}
        elif step.snapshot_id not in undone_ids:
            kept_steps.append(step)
    return kept_steps[::-1]


def _require_separate_files(
    table: str,
    steps: Sequence[SnapshotChange],
    own_steps: Sequence[SnapshotChange],
    superseding_steps: Mapping[int, SnapshotChange],
) -> None:
    """Raise DependencyFound if an own step rewrote files of a superseded step.

    The undo would restore these files, and with them rows that a later step has replaced. `own_steps` are the
    undone steps that no later step supersedes.
    """
    replaced_paths = {
        file.path for step in steps if step.snapshot_id in superseding_steps for file in step.added
    }
    mixed_files = [file for step in own_steps for file in step.removed if file.path in replaced_paths]
    if mixed_files:
        reason = CodedReason("later changes replaced a part of the rows in the same files", "partly_replaced")
        raise DependencyFound(Dependency(table, reason, list_partitions(mixed_files)))


def _require_invertible(table: str, step: SnapshotChange) -> None:
    """Raise DependencyFound if the undo of a step cannot be written, whatever the later steps are.

    A step that replaced files of equality deletes cannot be undone: these files apply to older data files
    only. If they were added again, they would also delete rows of newer files.
    """
    reason = _NOT_INVERTIBLE.get(step.mode)
    if reason is None and step.deletes:
        replaced_by_value = any(file.by_value for file in step.removed_deletes)
        if step.mode is not ChangeMode.ROW_DELETES or replaced_by_value:
            reason = _WROTE_DELETE_FILES
    if reason is not None:
        raise DependencyFound(Dependency(table, reason, tuple(sorted(step.partitions))))


def _require_no_deleted_rows(table: str, step: SnapshotChange, deletes: Sequence[DeleteFile]) -> None:
    """Raise DependencyFound if delete files had deleted rows of the files that an undone step removed.

    The undo would restore these files, and with them the deleted rows.
    """
    if hit_files := find_hit_files(deletes, step.removed):
        raise DependencyFound(Dependency(table, _DELETED_ROWS, list_partitions(hit_files)))


def _add_own_step(undo: TableUndo, step: SnapshotChange) -> None:
    for file in step.removed:
        if undo.removed.pop(file.path, None) is None:
            undo.restored[file.path] = file
    for file in step.added:
        if undo.restored.pop(file.path, None) is None:
            undo.removed[file.path] = file
    for delete_file in step.removed_deletes:
        # Without new delete files, the step removed only those that had nothing left to delete.
        if undo.removed_deletes.pop(delete_file.path, None) is None and step.deletes:
            undo.restored_deletes[delete_file.path] = delete_file
    for delete_file in step.deletes:
        if undo.restored_deletes.pop(delete_file.path, None) is None:
            undo.removed_deletes[delete_file.path] = delete_file
    if step.deletes:
        undo.newer_paths.clear()
    undo.newer_paths |= {file.path for file in step.added}


def _require_known_layout(table: str, undo: TableUndo, change: TableChange, own: OwnChange) -> None:
    """Raise DependencyFound if the undo would have to change more than rows, columns and properties.

    This is so if the publication changed metadata of the table other than the partition spec, if the undo
    restores files and the spec was changed by the publication or later, or if the format version is above 2.
    """
    if change.after.format_version > _MAX_FORMAT_VERSION:
        reason = CodedReason(
            f"its format version is {change.after.format_version}; an undo writes version"
            f" {_MAX_FORMAT_VERSION} at most",
            "format_version",
        )
        raise DependencyFound(Dependency(table, reason))
    old_layout = own.old_layout
    if old_layout is None:
        return
    has_restored_files = bool(undo.restored or undo.restored_deletes)
    if has_restored_files and change.before is not None and change.before.spec != change.after.spec:
        reason = CodedReason("its partition spec has changed, and files would be restored", "partition_spec")
        raise DependencyFound(Dependency(table, reason))
    old_others = dict(old_layout.others)
    for name, value in own.new_layout.others:
        if value != old_others.get(name):
            reason = CodedReason(f"the publication changed its {name}", f"{name.replace(' ', '_')}_changed")
            raise DependencyFound(Dependency(table, reason))


def _plan_spec(
    table: str, undo: TableUndo, steps: Sequence[SnapshotChange], change: TableChange, own: OwnChange
) -> None:
    """Plan to make the earlier partition spec the default again, if the undone publications changed it.

    `steps` are those of `change` that no earlier undo has reversed. Raises DependencyFound if the
    publications also changed the columns, if the spec or the columns were changed since, or if a later step
    added data or delete files: without the publications, these would be partitioned otherwise.
    """
    old_layout = own.old_layout
    if old_layout is None or old_layout.spec == own.new_layout.spec:
        return
    if old_layout.shape != own.new_layout.shape:
        # The spec stays in the metadata, and readers of the metadata may need its column.
        reason = CodedReason("the publication changed its columns and its partition spec", "partition_spec")
        raise DependencyFound(Dependency(table, reason))
    if change.after.spec != own.new_layout.spec:
        raise DependencyFound(Dependency(table, SPEC_CHANGED))
    if change.after.shape != own.new_layout.shape:
        # A later publication may have dropped a column of the old spec, or given its name to another one.
        reason = CodedReason("its columns were changed later", "columns_used")
        raise DependencyFound(Dependency(table, reason))
    later_steps = [step for step in steps if step.snapshot_id not in own.snapshot_ids]
    if any(step.mode is ChangeMode.UNKNOWN for step in later_steps):
        raise DependencyFound(Dependency(table, _NOT_INVERTIBLE[ChangeMode.UNKNOWN]))
    if writers := [step for step in later_steps if step.added or step.deletes]:
        reason = CodedReason(
            "later changes were written with the partition spec of the publication", "partition_spec_used"
        )
        partitions = tuple(sorted({name for step in writers for name in step.partitions if name}))
        run_ids = tuple(dict.fromkeys(run_id for step in writers for run_id in list_run_ids(step)))
        if any(not step.run_id for step in writers):
            run_ids = ()  # a writer that is not a run cannot be undone
        raise DependencyFound(Dependency(table, reason, partitions, run_ids))
    undo.restores_spec = True


def _plan_columns(
    table: str, undo: TableUndo, steps: Sequence[SnapshotChange], change: TableChange, own: OwnChange
) -> None:
    """Plan to restore the earlier columns in `undo`, if the undone publications changed the columns.

    `steps` are those of `change` that no earlier undo has reversed. Raises DependencyFound if a later
    publication has added data or delete files, or has changed the columns,
    the partition spec or the sort order since: these may use a column that the undo would remove.
    """
    old_layout = own.old_layout
    if old_layout is None or old_layout.shape == own.new_layout.shape:
        return
    own_ids = own.snapshot_ids
    others = [step for step in steps if step.snapshot_id not in own_ids]
    writers = [step for step in others if step.added or step.deletes]
    present, new = change.after, own.new_layout
    has_changed = (present.shape, present.spec, present.sort_order) != (new.shape, new.spec, new.sort_order)
    if has_changed or writers:
        reason = CodedReason("later changes were written with the columns of the publication", "columns_used")
        run_ids = tuple(dict.fromkeys(run_id for step in writers for run_id in list_run_ids(step)))
        raise DependencyFound(Dependency(table, reason, run_ids=run_ids))
    undo.old_layout = old_layout


def _require_own_positions(
    table: str, change: TableChange, own: OwnChange, current_properties: Mapping[str, str]
) -> None:
    """Raise DependencyFound if a later run started from positions that the undone publications recorded.

    The positions of a consumer and the offsets of an ingestion record which input was read. If a later
    publication has moved them on, the input of the undone publication would never be read again.
    """
    moved_names = [
        name
        for name, value in own.new_properties.items()
        if find_exclusive_property(name) is not None and current_properties.get(name) != value
    ]
    for name in moved_names:
        reason = CodedReason(
            "a later run of the same ingestion or consumer started from the positions of the publication",
            "positions_moved",
        )
        steps = [
            step
            for step in change.steps
            if step.snapshot_id not in own.snapshot_ids and name in step.properties
        ]
        run_ids = [run_id for step in steps for run_id in list_run_ids(step)]
        run_ids += recorded_run_ids(name, current_properties.get(name))
        raise DependencyFound(Dependency(table, reason, run_ids=tuple(dict.fromkeys(run_ids))))


def recorded_run_ids(name: str, value: str | None) -> list[str]:
    """Return a list with the id of the run that a consumer's position names; empty for other properties."""
    if value is None or not name.startswith(LakeProperty.CONSUMED):
        return []
    try:
        return [ConsumptionRecord.from_json(value).run_id]
    except (ValueError, KeyError, TypeError):
        return []


def _plan_properties(
    undo: TableUndo, own: OwnChange, current_properties: Mapping[str, str], keep_positions: bool
) -> None:
    """Plan to restore the earlier values of properties in `undo`, except those changed again since."""
    removed_names = []
    for name, old_value in own.old_properties.items():
        exclusive = find_exclusive_property(name)
        is_kept = keep_positions and exclusive is not None and exclusive.is_position
        current_value = current_properties.get(name)
        if is_kept or current_value != own.new_properties.get(name) or current_value == old_value:
            continue
        if old_value is None:
            removed_names.append(name)
        else:
            undo.properties_set[name] = old_value
    undo.properties_removed = tuple(removed_names)


def find_returning_deletes(
    undo: TableUndo, old_deletes: Sequence[DeleteFile], table: str
) -> Dependency | None:
    """Return a dependency if delete files had deleted rows of the restored files; else None.

    `old_deletes` are the delete files before the undone publications. They do not apply to a restored file,
    because it gets a new sequence number, so the deleted rows would come back.
    """
    hit_files = find_hit_files(old_deletes, list(undo.restored.values()))
    if not hit_files:
        return None
    return Dependency(table, _DELETED_ROWS, list_partitions(hit_files))
