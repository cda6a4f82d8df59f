"""What happened to a table since a position: the snapshots in between, and what they did to files."""

from __future__ import annotations

from collections.abc import Sequence

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
from branchlake_dagster.history.snapshot_files import CACHE, OwnFiles, OwnFilesCache
from branchlake_dagster.stored_names import LakeProperty


def summary_value(snapshot: Snapshot, name: str) -> str | None:
    """An entry of a snapshot's summary."""
    return snapshot.summary.additional_properties.get(name) if snapshot.summary else None


def replayed_from(snapshot: Snapshot) -> int | None:
    """The snapshot on a run's branch that this one repeats on `main`."""
    value = summary_value(snapshot, LakeProperty.REPLAYED_FROM) or ""
    return int(value) if value.isdigit() else None


def ancestors_after(metadata: TableMetadata, stop_id: int | None = None) -> tuple[list[Snapshot], bool]:
    """The snapshots after `stop_id` up to the current one, oldest first, and whether the line reaches it.

    Without `stop_id`: to the table's first snapshot.
    """
    snapshots_by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    ancestors: list[Snapshot] = []
    current = metadata.current_snapshot_id
    while current is not None and current != stop_id and current in snapshots_by_id:
        ancestors.append(snapshots_by_id[current])
        current = snapshots_by_id[current].parent_snapshot_id
    reached = current == stop_id and (stop_id is not None or not ancestors or _is_first(ancestors[-1]))
    return ancestors[::-1], reached


def _is_first(snapshot: Snapshot) -> bool:
    """Whether none was before it. PyIceberg takes the parent out of one whose parent has expired."""
    return snapshot.parent_snapshot_id is None and (snapshot.sequence_number or 0) <= 1


def snapshots_since(metadata: TableMetadata, position: Position, *, table: str) -> list[Snapshot] | None:
    """The snapshots that the position has not consumed, oldest first; None: everything there is.

    Raises ChangeLost.
    """
    if position.unpublished_snapshots:
        # Under its own id, the branch's last snapshot is on `main` with all that was before it there.
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
        # Two runs may both create a table: the second one's rows are replayed into the first one's.
        raise _change_lost_error(LossReason.RECREATED, table)
    if reached:
        if unpublished_ids - {
            snapshot_id
            for snapshot in snapshots
            for snapshot_id in (snapshot.snapshot_id, replayed_from(snapshot))
        }:
            raise _change_lost_error(
                LossReason.ROLLED_BACK, table
            )  # below what the consumer's own run had added
        return remaining
    if position.snapshot_id is None and not unpublished_ids:
        return None  # nothing had been there to consume
    snapshot_ids = {snapshot.snapshot_id for snapshot in metadata.snapshots}
    if not snapshots or _is_first(snapshots[0]) or position.snapshot_id in snapshot_ids:
        raise _change_lost_error(LossReason.ROLLED_BACK, table)
    raise _change_lost_error(LossReason.EXPIRED, table)


def runs_since(metadata: TableMetadata, position: Position | None, *, table: str) -> dict[int, str]:
    """The runs that say they made the snapshots since a position, by snapshot; None: those of all snapshots.

    Reads the metadata alone. Raises ChangeLost.
    """
    snapshots = snapshots_since(metadata, position, table=table) if position is not None else None
    if snapshots is None:
        snapshots, _ = ancestors_after(metadata)
    runs = {snapshot.snapshot_id: summary_value(snapshot, LakeProperty.RUN_ID) for snapshot in snapshots}
    return {snapshot_id: run_id for snapshot_id, run_id in runs.items() if run_id}


def _change_lost_error(loss: LossReason, table: str) -> ChangeLost:
    message = {
        LossReason.ROLLED_BACK: "The table was rolled back, or replaced, below what was consumed of it.",
        LossReason.RECREATED: "The table was dropped and created again since it was consumed.",
        LossReason.EXPIRED: "Snapshots since it was last consumed have expired, so what they changed is not known.",
        LossReason.FILES_GONE: "Files of snapshots since it was last consumed have been deleted.",
        LossReason.RESULT_ROLLED_BACK: "The asset's own table was rolled back: rows that were computed from what it"
        " says it has consumed are gone.",
    }[loss]
    return ChangeLost(message, loss=loss, table=table)


def contains_snapshot(metadata: TableMetadata, snapshot_id: int | None) -> bool:
    """Whether the table's current state was made from a snapshot, or from one that repeats it.

    True as well where that is not known any more, because snapshots have expired.
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
    """The error for a consumer whose own table does not hold what it says it was computed from."""
    return _change_lost_error(LossReason.RESULT_ROLLED_BACK, table)


def files_gone_error(table: str) -> ChangeLost:
    """The error for a manifest that is missing."""
    return _change_lost_error(LossReason.FILES_GONE, table)


_KINDS_BY_WRITE_MODE = {
    "append": ChangeKind.APPEND,
    "replace_partitions": ChangeKind.REPLACE_PARTITIONS,
    "replace_table": ChangeKind.REPLACE_TABLE,
    "upsert": ChangeKind.UPSERT,
}


def current_position(table: Table) -> Position:
    """Where somebody stands who has consumed all of `table`."""
    return Position(str(table.metadata.table_uuid), table.metadata.current_snapshot_id)


def position_on_branch(table: Table, main_table: Table | None) -> Position:
    """The same for a table as a run's branch has it; `main_table` is what it was on `main` where the branch began.

    What the branch added to it comes to `main` later, perhaps under other ids, so it is named by itself.
    """
    is_same_table = main_table is not None and main_table.metadata.table_uuid == table.metadata.table_uuid
    start_id = main_table.metadata.current_snapshot_id if main_table is not None and is_same_table else None
    branch_snapshots, reached = ancestors_after(table.metadata, start_id)
    if not reached:  # the branch set it back, or replaced it
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
    """The change of `table` since a position, from manifests alone; None: everything in it.

    What it reads grows with the change: the manifests that its snapshots wrote, each once per process.
    `up_to` is the position that it leads to, when that is not simply the table's head. Raises ChangeLost.
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
    added, removed, deletes = _net_files(steps)
    return ChangeSet(name, since, end, steps, added, removed, deletes)


def _capture_whole_table(table: Table, name: str, end: Position, cache: OwnFilesCache) -> ChangeSet:
    """All that the table holds, as though it had just been appended."""
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
            if (file.content is DataFileContent.DATA) is data
        )

    added, removed = changed_files(files.added, data=True), changed_files(files.removed, data=True)
    # A delete file that is taken out goes with the rows that it hit, or for one that says more.
    deletes = changed_files(files.added, data=False)
    return Step(
        snapshot.snapshot_id,
        ordinal,
        _change_kind(snapshot, added, removed, deletes),
        from_epoch_ms(snapshot.timestamp_ms),
        added,
        removed,
        deletes,
        summary_value(snapshot, LakeProperty.RUN_ID),
        replayed_from(snapshot),
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


def _net_files(steps: Sequence[Step]) -> NetFiles:
    """What was added, removed, and deleted by row, after what cancels out.

    A compaction is passed over: the files that it read still stand for their rows, and one that it made
    and that is removed later takes all its rows with it.
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
    return tuple(added.values()), tuple(removed.values()), tuple(deletes.values())


def _delete_file_key(delete_file: ChangedFile) -> str:
    """Several deletion vectors may lie in one file; their bounds name the data file of each."""
    return f"{delete_file.path}#{delete_file.file.lower_bounds}#{delete_file.file.record_count}#{delete_file.file.partition}"
