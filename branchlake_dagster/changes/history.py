"""The line of snapshots from a table's head back to a position."""

from __future__ import annotations

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.changes.errors import ChangeLost, Loss
from branchlake_dagster.changes.model import Position
from branchlake_dagster.changes.summary import REPLAYED_FROM, RUN_ID


def told(snapshot: Snapshot, name: str) -> str | None:
    """An entry of a snapshot's summary."""
    return snapshot.summary.additional_properties.get(name) if snapshot.summary else None


def replayed_from(snapshot: Snapshot) -> int | None:
    """The snapshot on a run's branch that this one repeats on `main`."""
    found = told(snapshot, REPLAYED_FROM) or ""
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


def since(metadata: TableMetadata, position: Position, *, table: str) -> list[Snapshot] | None:
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
    snapshots = since(metadata, position, table=table) if position is not None else None
    if snapshots is None:
        snapshots, _ = line(metadata)
    runs = {snapshot.snapshot_id: told(snapshot, RUN_ID) for snapshot in snapshots}
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
