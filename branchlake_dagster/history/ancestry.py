"""The ancestors of a snapshot: its parent, the parent's parent, and so on, from table metadata alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

T = TypeVar("T")


def follow_parents(
    newest_first: Iterable[tuple[int, int | None, T]], current_id: int | None, stop_id: int | None = None
) -> tuple[list[T], bool]:
    """Return the items after `stop_id` up to `current_id`, oldest first, and whether they reach `stop_id`.

    Without `stop_id`, the second value is whether the oldest item has no parent. `newest_first` has the id,
    the parent's id and the item of each snapshot. It is read only as far as needed, so a long history costs
    nothing for two snapshots. A parent may also be listed before its child.
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

    As `follow_parents`.
    """
    newest_first = (
        (snapshot.snapshot_id, snapshot.parent_snapshot_id, snapshot)
        for snapshot in reversed(metadata.snapshots)
    )
    return follow_parents(newest_first, current_id, stop_id)


def ancestors_after(metadata: TableMetadata, stop_id: int | None = None) -> tuple[list[Snapshot], bool]:
    """Return the snapshots after `stop_id`, oldest first, and whether none of them is missing.

    The snapshots end with the current one. None is missing if the chain of parents reaches `stop_id` or,
    without `stop_id`, the table's first snapshot.
    """
    ancestors, reached = snapshots_between(metadata, stop_id, metadata.current_snapshot_id)
    return ancestors, reached and (stop_id is not None or not ancestors or is_first(ancestors[0]))


def is_first(snapshot: Snapshot) -> bool:
    """Whether the table had no snapshot before this one.

    A missing parent id is not enough: PyIceberg removes the parent id of a snapshot whose parent has expired.
    """
    return snapshot.parent_snapshot_id is None and (snapshot.sequence_number or 0) <= 1
