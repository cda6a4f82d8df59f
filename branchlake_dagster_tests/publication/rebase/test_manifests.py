"""Which snapshots a change consists of, from metadata alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from branchlake_dagster.publication.table_history import _count_expired, snapshots_since


def history(*parents: tuple[int, int | None], current: int | None = None) -> Any:
    """Metadata with snapshots (id, parent), the last one current unless told otherwise."""
    snapshots = [SimpleNamespace(snapshot_id=one, parent_snapshot_id=parent) for one, parent in parents]
    last = snapshots[-1].snapshot_id if snapshots else None
    return cast(Any, SimpleNamespace(snapshots=snapshots, current_snapshot_id=current or last))


BASE = history((1, None), (2, 1))


@pytest.mark.parametrize(
    ("before", "after", "found", "complete"),
    [
        (BASE, BASE, [], True),
        (BASE, history((1, None), (2, 1), (3, 2), (4, 3)), [3, 4], True),
        (None, BASE, [1, 2], True),
        (None, history(), [], True),
        (history(), BASE, [1, 2], True),
        # Another attempt was undone: its snapshot is still listed.
        (BASE, history((1, None), (2, 1), (3, 2), (4, 2)), [4], True),
        (BASE, history((1, None), (2, 1), current=1), [1], False),
        (BASE, history((1, None), (2, 1), (3, 1)), [1, 3], False),
        (BASE, history((2, None), (3, 2)), [3], True),
        (BASE, history((3, 2), (4, 3)), [3, 4], True),
        (BASE, history((4, 3)), [4], False),
        (BASE, history((5, None)), [5], False),
    ],
)
def test_the_snapshots_since_a_base(before: Any, after: Any, found: list[int], complete: bool) -> None:
    snapshots, leads_back = snapshots_since(before.current_snapshot_id if before else None, after)
    assert ([one.snapshot_id for one in snapshots], leads_back) == (
        found,
        complete,
    )


@pytest.mark.parametrize(
    ("after", "expired"),
    [
        (BASE, 0),
        (history((1, None), (2, 1), (3, 2)), 0),
        (history((2, None)), 1),
        (history((2, None), (3, 2)), 1),
        (history((3, 2), (4, 3), (5, 4)), 2),
        (history((5, None)), 2),
    ],
)
def test_expired_snapshots_are_counted(after: Any, expired: int) -> None:
    assert _count_expired(BASE, after) == expired
    assert _count_expired(history(), after) == 0
