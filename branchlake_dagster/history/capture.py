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
    Loss,
    Position,
    Step,
    moment,
)
from branchlake_dagster.history.snapshot_files import CACHE, OwnFiles, OwnFilesCache
from branchlake_dagster.stored_names import LakeProperty


def told(snapshot: Snapshot, name: str) -> str | None:
    """An entry of a snapshot's summary."""
    return snapshot.summary.additional_properties.get(name) if snapshot.summary else None


def replayed_from(snapshot: Snapshot) -> int | None:
    """The snapshot on a run's branch that this one repeats on `main`."""
    found = told(snapshot, LakeProperty.REPLAYED_FROM) or ""
    return int(found) if found.isdigit() else None


def line(metadata: TableMetadata, stop: int | None = None) -> tuple[list[Snapshot], bool]:
    """The snapshots after `stop` up to the current one, oldest first, and whether the line reaches it.

    Without `stop`: to the table's first snapshot.
    """
    known = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    found: list[Snapshot] = []
    current = metadata.current_snapshot_id
    while current is not None and current != stop and current in known:
        found.append(known[current])
        current = known[current].parent_snapshot_id
    reached = current == stop and (stop is not None or not found or _is_first(found[-1]))
    return found[::-1], reached


def _is_first(snapshot: Snapshot) -> bool:
    """Whether none was before it. PyIceberg takes the parent out of one whose parent has expired."""
    return snapshot.parent_snapshot_id is None and (snapshot.sequence_number or 0) <= 1


def snapshots_since(metadata: TableMetadata, position: Position, *, table: str) -> list[Snapshot] | None:
    """The snapshots that the position has not consumed, oldest first; None: everything there is.

    Raises ChangeLost.
    """
    if position.beyond:
        # Under its own id, the branch's last snapshot is on `main` with all that was before it there.
        found, reached = line(metadata, position.beyond[-1])
        if reached:
            return found
    found, reached = line(metadata, position.snapshot_id)
    beyond = set(position.beyond)
    rest = [one for one in found if not beyond & {one.snapshot_id, replayed_from(one)}]
    if str(metadata.table_uuid) != position.table_uuid and not (reached and len(rest) < len(found)):
        # Two runs may both create a table: the second one's rows are replayed into the first one's.
        raise _lost(Loss.RECREATED, table)
    if reached:
        if beyond - {number for one in found for number in (one.snapshot_id, replayed_from(one))}:
            raise _lost(Loss.ROLLED_BACK, table)  # below what the consumer's own run had added
        return rest
    if position.snapshot_id is None and not beyond:
        return None  # nothing had been there to consume
    known = {snapshot.snapshot_id for snapshot in metadata.snapshots}
    if not found or _is_first(found[0]) or position.snapshot_id in known:
        raise _lost(Loss.ROLLED_BACK, table)
    raise _lost(Loss.EXPIRED, table)


def runs_since(metadata: TableMetadata, position: Position | None, *, table: str) -> dict[int, str]:
    """The runs that say they made the snapshots since a position, by snapshot; None: those of all snapshots.

    Reads the metadata alone. Raises ChangeLost.
    """
    snapshots = snapshots_since(metadata, position, table=table) if position is not None else None
    if snapshots is None:
        snapshots, _ = line(metadata)
    runs = {snapshot.snapshot_id: told(snapshot, LakeProperty.RUN_ID) for snapshot in snapshots}
    return {snapshot_id: run_id for snapshot_id, run_id in runs.items() if run_id}


def _lost(loss: Loss, table: str) -> ChangeLost:
    what = {
        Loss.ROLLED_BACK: "The table was rolled back, or replaced, below what was consumed of it.",
        Loss.RECREATED: "The table was dropped and created again since it was consumed.",
        Loss.EXPIRED: "Snapshots since it was last consumed have expired, so what they changed is not known.",
        Loss.FILES_GONE: "Files of snapshots since it was last consumed have been deleted.",
        Loss.RESULT_ROLLED_BACK: "The asset's own table was rolled back: rows that were computed from what it"
        " says it has consumed are gone.",
    }[loss]
    return ChangeLost(what, loss=loss, table=table)


def holds(metadata: TableMetadata, snapshot_id: int | None) -> bool:
    """Whether the table's current state was made from a snapshot, or from one that repeats it.

    True as well where that is not known any more, because snapshots have expired.
    """
    if snapshot_id is None:
        return True
    found, reached = line(metadata)
    if any(snapshot_id in (one.snapshot_id, replayed_from(one)) for one in found):
        return True
    return not reached and not any(
        snapshot_id in (one.snapshot_id, replayed_from(one)) for one in metadata.snapshots
    )


def rolled_back(table: str) -> ChangeLost:
    """The error for a consumer whose own table does not hold what it says it was computed from."""
    return _lost(Loss.RESULT_ROLLED_BACK, table)


def files_gone(table: str) -> ChangeLost:
    """The error for a manifest that is missing."""
    return _lost(Loss.FILES_GONE, table)


_RECORDED = {
    "append": ChangeKind.APPEND,
    "replace_partitions": ChangeKind.REPLACE_PARTITIONS,
    "replace_table": ChangeKind.REPLACE_TABLE,
    "upsert": ChangeKind.UPSERT,
}


def position_of(table: Table) -> Position:
    """Where somebody stands who has consumed all of `table`."""
    return Position(str(table.metadata.table_uuid), table.metadata.current_snapshot_id)


def position_on_branch(table: Table, base: Table | None) -> Position:
    """The same for a table as a run's branch has it; `base` is what it was on `main` where the branch began.

    What the branch added to it comes to `main` later, perhaps under other ids, so it is named by itself.
    """
    same = base is not None and base.metadata.table_uuid == table.metadata.table_uuid
    start = base.metadata.current_snapshot_id if base is not None and same else None
    own, reached = line(table.metadata, start)
    if not reached:  # the branch set it back, or replaced it
        return position_of(table)
    return Position(str(table.metadata.table_uuid), start, tuple(one.snapshot_id for one in own))


def capture(
    table: Table,
    since: Position | None,
    *,
    name: str,
    upto: Position | None = None,
    cache: OwnFilesCache = CACHE,
) -> ChangeSet:
    """The change of `table` since a position, from manifests alone; None: everything in it.

    What it reads grows with the change: the manifests that its snapshots wrote, each once per process.
    `upto` is the position that it leads to, when that is not simply the table's head. Raises ChangeLost.
    """
    metadata = table.metadata
    end = upto or position_of(table)
    snapshots = snapshots_since(metadata, since, table=name) if since is not None else None
    try:
        if snapshots is None:
            return _everything(table, name, end, cache)
        files = cache.of(snapshots, metadata.current_snapshot(), table.io)
    except FileNotFoundError as error:
        raise files_gone(name) from error
    steps = tuple(
        _step(snapshot, ordinal, files[snapshot.snapshot_id]) for ordinal, snapshot in enumerate(snapshots)
    )
    added, removed, deletes = _net(steps)
    return ChangeSet(name, since, end, steps, added, removed, deletes)


def _everything(table: Table, name: str, end: Position, cache: OwnFilesCache) -> ChangeSet:
    """All that the table holds, as though it had just been appended."""
    head = table.metadata.current_snapshot()
    if head is None:
        return ChangeSet(name, None, end, (), (), (), ())
    live = cache.live(head, table.io)
    data = tuple(ChangedFile(one.file, one.snapshot_id, 0) for one in live if one.is_data)
    deletes = tuple(ChangedFile(one.file, one.snapshot_id, 0) for one in live if not one.is_data)
    step = Step(head.snapshot_id, 0, ChangeKind.APPEND, moment(head.timestamp_ms), data, deletes=deletes)
    return ChangeSet(name, None, end, (step,), data, (), deletes)


def _step(snapshot: Snapshot, ordinal: int, files: OwnFiles) -> Step:
    def changed(some: Sequence[DataFile], *, data: bool) -> tuple[ChangedFile, ...]:
        return tuple(
            ChangedFile(file, snapshot.snapshot_id, ordinal)
            for file in some
            if (file.content is DataFileContent.DATA) is data
        )

    added, removed = changed(files.added, data=True), changed(files.removed, data=True)
    # A delete file that is taken out goes with the rows that it hit, or for one that says more.
    deletes = changed(files.added, data=False)
    return Step(
        snapshot.snapshot_id,
        ordinal,
        _kind(snapshot, added, removed, deletes),
        moment(snapshot.timestamp_ms),
        added,
        removed,
        deletes,
        told(snapshot, LakeProperty.RUN_ID),
        replayed_from(snapshot),
    )


def _kind(
    snapshot: Snapshot,
    added: Sequence[ChangedFile],
    removed: Sequence[ChangedFile],
    deletes: Sequence[ChangedFile],
) -> ChangeKind:
    if snapshot.summary is not None and snapshot.summary.operation is Operation.REPLACE:
        return ChangeKind.COMPACT
    if deletes:
        return ChangeKind.ROW_DELETES
    recorded = _RECORDED.get(told(snapshot, LakeProperty.WRITE_MODE) or "")
    if recorded is not None and not (recorded is ChangeKind.APPEND and removed):
        return recorded
    if not removed:
        return ChangeKind.APPEND
    return ChangeKind.UPDATE if added else ChangeKind.DELETE


Net = tuple[tuple[ChangedFile, ...], tuple[ChangedFile, ...], tuple[ChangedFile, ...]]


def _net(steps: Sequence[Step]) -> Net:
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
        for one in step.removed:
            if added.pop(one.path, None) is None:
                removed[one.path] = one
        for one in step.added:
            if removed.pop(one.path, None) is None:
                added[one.path] = one
        deletes |= {_delete_key(one): one for one in step.deletes}
    return tuple(added.values()), tuple(removed.values()), tuple(deletes.values())


def _delete_key(one: ChangedFile) -> str:
    """Several deletion vectors may lie in one file; their bounds name the data file of each."""
    return f"{one.path}#{one.file.lower_bounds}#{one.file.record_count}#{one.file.partition}"
