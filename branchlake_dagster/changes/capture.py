"""Change capture: what happened to a table since a position."""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot

from branchlake_dagster.changes import history
from branchlake_dagster.changes.model import ChangedFile, ChangeKind, ChangeSet, Position, Step, moment
from branchlake_dagster.changes.own_files import CACHE, OwnFiles, OwnFilesCache
from branchlake_dagster.changes.summary import RUN_ID, WRITE_MODE

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
    own, reached = history.line(table.metadata, start)
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
    snapshots = history.since(metadata, since, table=name) if since is not None else None
    try:
        if snapshots is None:
            return _everything(table, name, end, cache)
        files = cache.of(snapshots, metadata.current_snapshot(), table.io)
    except FileNotFoundError as error:
        raise history.files_gone(name) from error
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
        history.told(snapshot, RUN_ID),
        history.replayed_from(snapshot),
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
    recorded = _RECORDED.get(history.told(snapshot, WRITE_MODE) or "")
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
