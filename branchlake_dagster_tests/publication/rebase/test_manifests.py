"""Which snapshots a table has lost, from metadata alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from branchlake_dagster.publication.table_change import _count_expired


def history(*parents: tuple[int, int | None], current: int | None = None) -> Any:
    """Metadata with snapshots (id, parent), the last one current unless told otherwise."""
    snapshots = [SimpleNamespace(snapshot_id=one, parent_snapshot_id=parent) for one, parent in parents]
    last = snapshots[-1].snapshot_id if snapshots else None
    return cast(Any, SimpleNamespace(snapshots=snapshots, current_snapshot_id=current or last))


BASE = history((1, None), (2, 1))


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
