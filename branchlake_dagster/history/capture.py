"""Captures a table's change since a position: the snapshots in between, and the files they changed.

The ancestors of a snapshot are found from table metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.history.change import (
    ChangedFile,
    ChangeKind,
    ChangeLost,
    ChangeSet,
    LossReason,
    Position,
    Step,
    from_epoch_ms,
)
from branchlake_dagster.history.manifests import CACHE, OwnFiles, OwnFilesCache
from branchlake_dagster.stored_names import LakeProperty

T = TypeVar("T")


def follow_parents(
    newest_first: Iterable[tuple[int, int | None, T]], current_id: int | None, stop_id: int | None = None
) -> tuple[list[T], bool]:
    """Return the items after `stop_id` up to `current_id`, oldest first, and whether they reach `stop_id`.

    The item of `current_id` is included, the item of `stop_id` is not. Without `stop_id`, the second value is
    whether the oldest item has no parent. `newest_first` has the id, the parent's id and the item of each
    snapshot. It is read only as far as needed, so a long history costs nothing for two snapshots. A parent
    may also be listed before its child.
    """
    items: list[T] = []
    passed: dict[int, tuple[int | None, T]] = {}
    remaining = iter(newest_first)
    while current_id is not None and current_id != stop_id:
        if current_id in passed:
            parent_id, item = passed.pop(current_id)
        else:
            for snapshot_id, parent_id, item in remaining:
                if snapshot_id == current_id:
                    break
                passed[snapshot_id] = parent_id, item
            else:
                return items[::-1], False
        items.append(item)
        current_id = parent_id
    return items[::-1], current_id == stop_id


def snapshots_between(
    metadata: TableMetadata, stop_id: int | None, current_id: int | None
) -> tuple[list[Snapshot], bool]:
    """Return the snapshots after `stop_id` up to `current_id`, and whether they lead back to `stop_id`.

    The snapshots are in the order of `follow_parents`, oldest first. Without `stop_id`, the second value is
    whether they begin with the table's first snapshot: it is False if the parent of the oldest one has
    expired.
    """
    newest_first = (
        (snapshot.snapshot_id, snapshot.parent_snapshot_id, snapshot)
        for snapshot in reversed(metadata.snapshots)
    )
    snapshots, reached = follow_parents(newest_first, current_id, stop_id)
    if reached and stop_id is None and snapshots:
        reached = not _has_expired_parent(metadata, snapshots[0])
    return snapshots, reached


def _has_expired_parent(metadata: TableMetadata, oldest: Snapshot) -> bool:
    """Whether PyIceberg removed the parent id of a snapshot together with its parent.

    The first snapshot of a replaced table has no parent either, but then the snapshot before it exists.
    """
    number_before = (oldest.sequence_number or 0) - 1
    return (
        oldest.parent_snapshot_id is None
        and not is_first(oldest)
        and all(snapshot.sequence_number != number_before for snapshot in metadata.snapshots)
    )


def ancestors_after(metadata: TableMetadata, stop_id: int | None = None) -> tuple[list[Snapshot], bool]:
    """Return the snapshots after `stop_id` up to the current one, and whether they are complete.

    The oldest snapshot comes first. They are complete if the chain of parents reaches `stop_id` or, without
    `stop_id`, the table's first snapshot.
    """
    ancestors, reached = snapshots_between(metadata, stop_id, metadata.current_snapshot_id)
    return ancestors, reached and (stop_id is not None or not ancestors or is_first(ancestors[0]))


def is_first(snapshot: Snapshot) -> bool:
    """Whether the table had no snapshot before this one.

    A missing parent id is not enough: PyIceberg removes the parent id of a snapshot whose parent has expired.
    Format version 1 has no sequence numbers. There, the first snapshot has added all files that it has.
    """
    if snapshot.parent_snapshot_id is not None or (snapshot.sequence_number or 0) > 1:
        return False
    return snapshot.sequence_number == 1 or _adds_all_files(snapshot)


def _adds_all_files(snapshot: Snapshot) -> bool:
    """Whether a snapshot has added all its data files, by its summary. True if that is not known."""
    total = summary_value(snapshot, "total-data-files")
    return total is None or total == (summary_value(snapshot, "added-data-files") or "0")


def summary_value(snapshot: Snapshot, name: str) -> str | None:
    """Return the entry `name` of a snapshot's summary, or None if the summary lacks it."""
    # Compared with None, because the truth value of a summary checks each of its fields.
    return None if snapshot.summary is None else snapshot.summary.additional_properties.get(name)


def replayed_from(snapshot: Snapshot) -> int | None:
    """Return the id of the run-branch snapshot whose change this snapshot repeats on `main`, or None."""
    value = summary_value(snapshot, LakeProperty.REPLAYED_FROM) or ""
    return int(value) if value.isdigit() else None


def snapshots_since(metadata: TableMetadata, position: Position, *, table: str) -> list[Snapshot] | None:
    """Return the snapshots that the position has not consumed, oldest first.

    None means that the table had no snapshot at the position, so all its rows are new. Raises ChangeLost.
    """
    if replaced_columns := _find_replaced_columns(metadata, position):
        raise _column_replaced_error(replaced_columns, table)
    if position.unpublished_snapshots:
        # If the branch's last snapshot has the same id on `main`, all snapshots before it are on `main` too.
        snapshots, reached = ancestors_after(metadata, position.unpublished_snapshots[-1])
        if reached:
            return snapshots
    snapshots, reached = ancestors_after(metadata, position.snapshot_id)
    unpublished_ids = set(position.unpublished_snapshots)
    remaining = [
        snapshot
        for snapshot in snapshots
        if not unpublished_ids & {snapshot.snapshot_id, replayed_from(snapshot)}
    ]
    if str(metadata.table_uuid) != position.table_uuid and not (reached and len(remaining) < len(snapshots)):
        # If two runs both create the table, the rows of the second are replayed into the table of the first.
        raise _change_lost_error(LossReason.RECREATED, table)
    if reached:
        if unpublished_ids - {
            snapshot_id
            for snapshot in snapshots
            for snapshot_id in (snapshot.snapshot_id, replayed_from(snapshot))
        }:
            # The rollback removed snapshots that the consumer's own run had added.
            raise _change_lost_error(LossReason.ROLLED_BACK, table)
        return remaining
    if position.snapshot_id is None and not unpublished_ids:
        return None  # the table had no snapshot when it was consumed
    snapshot_ids = {snapshot.snapshot_id for snapshot in metadata.snapshots}
    if not snapshots or is_first(snapshots[0]) or position.snapshot_id in snapshot_ids:
        raise _change_lost_error(LossReason.ROLLED_BACK, table)
    raise _change_lost_error(LossReason.EXPIRED, table)


def _find_replaced_columns(metadata: TableMetadata, position: Position) -> dict[str, int]:
    """Return the columns of the position whose name belongs to another column of the same table now.

    The values are their field ids at the position.
    """
    if not position.column_ids or str(metadata.table_uuid) != position.table_uuid:
        return {}
    field_ids = {field.name: field.field_id for field in metadata.schema().fields}
    return {
        name: field_id for name, field_id in position.column_ids if field_ids.get(name, field_id) != field_id
    }


def runs_since(metadata: TableMetadata, position: Position | None, *, table: str) -> dict[int, str]:
    """Return the ids of the runs that made the snapshots since a position, by snapshot id.

    If `position` is None, all snapshots count. A snapshot without a run id in its summary is left out. Reads
    only the table metadata. Raises ChangeLost.
    """
    snapshots = snapshots_since(metadata, position, table=table) if position is not None else None
    if snapshots is None:
        snapshots, _ = ancestors_after(metadata)
    runs = {snapshot.snapshot_id: summary_value(snapshot, LakeProperty.RUN_ID) for snapshot in snapshots}
    return {snapshot_id: run_id for snapshot_id, run_id in runs.items() if run_id}


def _change_lost_error(loss: LossReason, table: str) -> ChangeLost:
    message = {
        LossReason.ROLLED_BACK: "The table was rolled back or replaced. Snapshots that the asset has consumed"
        " are no longer part of it.",
        LossReason.RECREATED: "The table was dropped and created again after the asset last consumed it.",
        LossReason.EXPIRED: "Snapshots since the asset last consumed the table have expired. Their changes"
        " are not known.",
        LossReason.DELETES_UNDONE: "The undo of a publication removed delete files. It is not certain which"
        " rows came back, because they are in no added file.",
        LossReason.FILES_GONE: "Files of snapshots since the asset last consumed the table were deleted.",
        LossReason.RESULT_ROLLED_BACK: "The asset's own table was rolled back. Rows that it had computed from"
        " consumed changes are gone.",
    }[loss]
    return ChangeLost(message, loss=loss, table=table)


def _column_replaced_error(columns: Mapping[str, int], table: str) -> ChangeLost:
    names = ", ".join(f"{name} (then field id {field_id})" for name, field_id in columns.items())
    return ChangeLost(
        f"The asset finds changes by {names}. Since it last consumed the table, the column was dropped or"
        " renamed, and another column has its name now.",
        loss=LossReason.COLUMN_REPLACED,
        columns=columns,
        table=table,
    )


def contains_snapshot(metadata: TableMetadata, snapshot_id: int | None) -> bool:
    """Whether the table's current state includes a snapshot, or the snapshot that repeats it on `main`.

    Also true if `snapshot_id` is None, or if the snapshots that would prove it have expired.
    """
    if snapshot_id is None:
        return True
    ancestors, reached = ancestors_after(metadata)
    if any(snapshot_id in (snapshot.snapshot_id, replayed_from(snapshot)) for snapshot in ancestors):
        return True
    return not reached and not any(
        snapshot_id in (snapshot.snapshot_id, replayed_from(snapshot)) for snapshot in metadata.snapshots
    )


def result_rolled_back_error(table: str) -> ChangeLost:
    """Return the error for a consumer whose own table has lost a recorded result by a rollback."""
    return _change_lost_error(LossReason.RESULT_ROLLED_BACK, table)


def files_gone_error(table: str) -> ChangeLost:
    """Return the error for a deleted manifest or data file of a snapshot that the consumer must read."""
    return _change_lost_error(LossReason.FILES_GONE, table)


_KINDS_BY_WRITE_MODE = {
    "append": ChangeKind.APPEND,
    "replace_partitions": ChangeKind.REPLACE_PARTITIONS,
    "replace_table": ChangeKind.REPLACE_TABLE,
    "upsert": ChangeKind.UPSERT,
}


def current_position(table: Table) -> Position:
    """Return the position of a consumer that has consumed all of `table`."""
    return Position(str(table.metadata.table_uuid), table.metadata.current_snapshot_id)


def position_on_branch(table: Table, main_table: Table | None) -> Position:
    """Return the position of a consumer that has consumed all of `table` on a run's branch.

    `main_table` is the table on `main` where the branch began, or None. Snapshots that the branch added are
    listed one by one, because they may get other ids when they reach `main`.
    """
    is_same_table = main_table is not None and main_table.metadata.table_uuid == table.metadata.table_uuid
    start_id = main_table.metadata.current_snapshot_id if main_table is not None and is_same_table else None
    branch_snapshots, reached = ancestors_after(table.metadata, start_id)
    if not reached:  # the branch rolled the table back, or replaced it
        return current_position(table)
    return Position(
        str(table.metadata.table_uuid), start_id, tuple(snapshot.snapshot_id for snapshot in branch_snapshots)
    )


def capture_change(
    table: Table,
    since: Position | None,
    *,
    name: str,
    up_to: Position | None = None,
    cache: OwnFilesCache = CACHE,
) -> ChangeSet:
    """Capture the change of `table` from a position to its current snapshot.

    If `since` is None, the change is the whole table. `up_to` is the end position to record in the change; it
    does not limit the snapshots. (default: the position of the current snapshot)

    Reads manifests only, not data. The cost grows with the change: it reads the manifests that the snapshots
    of the change wrote, each once per process. Raises ChangeLost.
    """
    metadata = table.metadata
    end = up_to or current_position(table)
    snapshots = snapshots_since(metadata, since, table=name) if since is not None else None
    try:
        if snapshots is None:
            return _capture_whole_table(table, name, end, cache)
        files = cache.load_files(snapshots, metadata.current_snapshot(), table.io)
    except FileNotFoundError as error:
        raise files_gone_error(name) from error
    steps = tuple(
        _build_step(snapshot, ordinal, files[snapshot.snapshot_id])
        for ordinal, snapshot in enumerate(snapshots)
    )
    _require_known_deletes(steps, name)
    added, removed, deletes = _net_files(steps)
    return ChangeSet(name, since, end, steps, added, removed, deletes)


def _capture_whole_table(table: Table, name: str, end: Position, cache: OwnFilesCache) -> ChangeSet:
    """Return the whole table as a change, as if its current snapshot had appended all its files.

    `name` is the table's name in the change, `end` the end position that the change records. The change of an
    empty table has no steps. Raises FileNotFoundError if a manifest is missing.
    """
    head = table.metadata.current_snapshot()
    if head is None:
        return ChangeSet(name, None, end, (), (), (), ())
    live = cache.load_live_files(head, table.io)
    data = tuple(
        ChangedFile(live_file.file, live_file.snapshot_id, 0) for live_file in live if live_file.is_data
    )
    deletes = tuple(
        ChangedFile(live_file.file, live_file.snapshot_id, 0) for live_file in live if not live_file.is_data
    )
    step = Step(
        head.snapshot_id, 0, ChangeKind.APPEND, from_epoch_ms(head.timestamp_ms), data, deletes=deletes
    )
    return ChangeSet(name, None, end, (step,), data, (), deletes)


def _build_step(snapshot: Snapshot, ordinal: int, files: OwnFiles) -> Step:
    def changed_files(data_files: Sequence[DataFile], *, data: bool) -> tuple[ChangedFile, ...]:
        return tuple(
            ChangedFile(file, snapshot.snapshot_id, ordinal)
            for file in data_files
            if (file.content == DataFileContent.DATA) is data
        )

    added, removed = changed_files(files.added, data=True), changed_files(files.removed, data=True)
    # Removed delete files do not count: their rows were removed too, or a larger delete file replaced them.
    deletes = changed_files(files.added, data=False)
    undone_deletes: tuple[ChangedFile, ...] = ()
    if summary_value(snapshot, LakeProperty.UNDONE_SNAPSHOTS) is not None:
        # Delete files that an undo adds are those that the removed ones had replaced.
        deletes, undone_deletes = (), changed_files(files.removed, data=False)
    kind = _change_kind(snapshot, added, removed, deletes or undone_deletes)
    removed_deletes = changed_files(files.removed, data=False)
    return Step(
        snapshot.snapshot_id,
        ordinal,
        kind,
        from_epoch_ms(snapshot.timestamp_ms),
        added,
        removed,
        deletes,
        summary_value(snapshot, LakeProperty.RUN_ID),
        replayed_from(snapshot),
        undone_deletes,
        replaces_deletes=bool(deletes and removed_deletes) and kind is not ChangeKind.COMPACT,
    )


def _change_kind(
    snapshot: Snapshot,
    added: Sequence[ChangedFile],
    removed: Sequence[ChangedFile],
    deletes: Sequence[ChangedFile],
) -> ChangeKind:
    if snapshot.summary is not None and snapshot.summary.operation is Operation.REPLACE:
        return ChangeKind.COMPACT
    if deletes:
        return ChangeKind.ROW_DELETES
    declared_kind = _KINDS_BY_WRITE_MODE.get(summary_value(snapshot, LakeProperty.WRITE_MODE) or "")
    if declared_kind is not None and not (declared_kind is ChangeKind.APPEND and removed):
        return declared_kind
    if not removed:
        return ChangeKind.APPEND
    return ChangeKind.UPDATE if added else ChangeKind.DELETE


NetFiles = tuple[tuple[ChangedFile, ...], tuple[ChangedFile, ...], tuple[ChangedFile, ...]]


def _require_known_deletes(steps: Sequence[Step], table: str) -> None:
    """Raise ChangeLost if an undo removed delete files, and it is not certain which rows came back.

    This is so for delete files that were added before the first step: the rows are in the table again, but
    the step has no added file with these rows. It is also so if a step replaced delete files before: a new
    delete file may repeat positions of an old one.
    """
    added_keys: set[str] = set()
    has_replaced_deletes = False
    for step in steps:
        added_keys |= {_delete_file_key(file) for file in step.deletes}
        has_replaced_deletes |= step.replaces_deletes
        undone_keys = {_delete_file_key(file) for file in step.undone_deletes}
        if undone_keys and (has_replaced_deletes or not undone_keys <= added_keys):
            raise _change_lost_error(LossReason.DELETES_UNDONE, table)


def _net_files(steps: Sequence[Step]) -> NetFiles:
    """Return the added files, removed files and delete files of all steps, without those that cancel out.

    A file that was added and later removed is in none of them. Compactions are skipped: the files that a
    compaction replaced keep representing their rows. If a later step removes a file that a compaction wrote,
    all rows of that file count as removed. Delete files that an undo removed again cancel out.
    """
    added: dict[str, ChangedFile] = {}
    removed: dict[str, ChangedFile] = {}
    deletes: dict[str, ChangedFile] = {}
    for step in steps:
        if step.kind is ChangeKind.COMPACT:
            continue
        for file in step.removed:
            if added.pop(file.path, None) is None:
                removed[file.path] = file
        for file in step.added:
            if removed.pop(file.path, None) is None:
                added[file.path] = file
        deletes |= {_delete_file_key(one): one for one in step.deletes}
        for file in step.undone_deletes:
            deletes.pop(_delete_file_key(file), None)
    return tuple(added.values()), tuple(removed.values()), tuple(deletes.values())


def _delete_file_key(delete_file: ChangedFile) -> str:
    """Return a key that identifies a delete file or one deletion vector.

    Several deletion vectors may be stored in one file; the bounds of each contain the path of its data file.
    """
    file = delete_file.file
    return f"{delete_file.path}#{file.lower_bounds}#{file.record_count}#{file.partition}"
