"""Builds the state of a run's table on a `main` that only compacted the table since the run's base.

A rebase cannot replay everything: delete files, a new sort order, a replaced table. A run with such a change
is refused if another run changed its table. A compaction changes no row, so it must not be the cause. Then
the run's own state becomes current, as if the compaction had never been: it lists the old files, which exist
as long as the run's branch. The history keeps the compaction's snapshots, because consumers may have recorded
them as their position. The first snapshot of the run follows them and records in its summary that it reverses
them.
"""

from __future__ import annotations

from pyiceberg.table.metadata import TableMetadata, TableMetadataV2
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot, SnapshotLogEntry, Summary

from branchlake_dagster.stored_names import LakeProperty


def graft_run_state(main: TableMetadata, run: TableMetadata, base_id: int | None) -> TableMetadata | None:
    """Return the run's table metadata with the history of `main` inserted after the common base.

    `base_id` is the id of the current snapshot at the run's base; None if there was none. The caller ensures
    that `main` only compacted the table since the base, and that the run's snapshots lead back to the base.
    Returns None if one side does not have format version 2.
    """
    if not isinstance(main, TableMetadataV2) or not isinstance(run, TableMetadataV2):
        return None
    main_ids = {snapshot.snapshot_id for snapshot in main.snapshots}
    base = run.snapshot_by_id(base_id) if base_id is not None else None
    base_number = base.sequence_number or 0 if base is not None else 0
    referenced_ids = {reference.snapshot_id for reference in run.refs.values()}
    # Snapshots of the run that `main` lacks are its own, or older than the base and expired on `main`. Of the
    # latter, only those stay to which a tag or branch of the table refers.
    own_snapshots = [
        snapshot
        for snapshot in run.snapshots
        if snapshot.snapshot_id not in main_ids
        and ((snapshot.sequence_number or 0) > base_number or snapshot.snapshot_id in referenced_ids)
    ]
    # A referenced snapshot from before the base was never current since then, so the log leaves it out.
    own_ids = {one.snapshot_id for one in own_snapshots if (one.sequence_number or 0) > base_number}
    snapshots = [*main.snapshots, *(_follow_main(snapshot, main, base_id) for snapshot in own_snapshots)]
    snapshot_log, last_updated_ms = list(main.snapshot_log), max(main.last_updated_ms, run.last_updated_ms)
    for entry in run.snapshot_log:
        if entry.snapshot_id in own_ids:
            # Iceberg's Java library refuses a log whose times decrease.
            moment_ms = max(entry.timestamp_ms, snapshot_log[-1].timestamp_ms if snapshot_log else 0)
            snapshot_log.append(SnapshotLogEntry(snapshot_id=entry.snapshot_id, timestamp_ms=moment_ms))
            last_updated_ms = max(last_updated_ms, moment_ms)
    update = {
        "snapshots": snapshots,
        "snapshot_log": snapshot_log,
        "metadata_log": main.metadata_log,
        "last_sequence_number": max(main.last_sequence_number, run.last_sequence_number),
        "last_updated_ms": last_updated_ms,
    }
    if run.current_snapshot_id in main_ids:
        # The run did not change the current rows: the state of `main` stays current.
        main_branch = {name: ref for name, ref in main.refs.items() if name == MAIN_BRANCH}
        refs = {**run.refs, **main_branch}
        update |= {"current_snapshot_id": main.current_snapshot_id, "refs": refs}
    return run.model_copy(update=update)


def _follow_main(snapshot: Snapshot, main: TableMetadata, base_id: int | None) -> Snapshot:
    """Return a snapshot of the run, adapted to follow the history of `main`.

    Only the run's first snapshot after the base changes: its parent becomes `main`'s current snapshot, and
    its summary records the ids of `main`'s snapshots since the base, which it reverses.
    """
    is_first = snapshot.parent_snapshot_id == base_id and main.current_snapshot_id != base_id
    if not is_first or snapshot.summary is None:
        return snapshot
    reversed_ids: list[int] = []
    current = main.current_snapshot()
    while current is not None and current.snapshot_id != base_id:
        reversed_ids.append(current.snapshot_id)
        parent_id = current.parent_snapshot_id
        current = main.snapshot_by_id(parent_id) if parent_id is not None else None
    entries = {
        **snapshot.summary.additional_properties,
        LakeProperty.REVERSED_SNAPSHOTS: ",".join(map(str, reversed_ids)),
    }
    return snapshot.model_copy(
        update={
            "parent_snapshot_id": main.current_snapshot_id,
            "summary": Summary(snapshot.summary.operation, **entries),
        }
    )
