"""The ancestors of a snapshot, from metadata alone."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from branchlake_dagster.history.capture import ancestors_after, follow_parents, snapshots_between


def history(*parents: tuple[int, int | None], current: int | None = None) -> Any:
    """Metadata with snapshots (id, parent), the last one current unless `current` is given. The ids are the sequence numbers."""
    snapshots = [
        SimpleNamespace(snapshot_id=number, parent_snapshot_id=parent, sequence_number=number)
        for number, parent in parents
    ]
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
        (BASE, history((4, 3), (3, 2), (1, None), (2, 1), current=4), [3, 4], True),  # in another order
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
    start = before.current_snapshot_id if before else None
    snapshots, leads_back = snapshots_between(after, start, after.current_snapshot_id)
    assert ([snapshot.snapshot_id for snapshot in snapshots], leads_back) == (found, complete)


def test_the_history_is_read_only_as_far_as_needed() -> None:
    read: list[int] = []

    def newest_first() -> Any:
        for number in range(100, 0, -1):
            read.append(number)
            yield number, number - 1, f"snapshot {number}"

    assert follow_parents(newest_first(), 100, 98) == (["snapshot 99", "snapshot 100"], True)
    assert follow_parents(newest_first(), 98, 98) == ([], True)
    assert read == [100, 99]


@pytest.mark.parametrize("seed", range(20))
def test_ancestors_are_those_of_a_walk_through_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    parents: list[tuple[int, int | None]] = [(1, None)]
    parents += [(number, rng.choice([number - 1, rng.randrange(1, number)])) for number in range(2, 30)]
    kept = [snapshot for snapshot in parents if rng.random() < 0.9]
    rng.shuffle(kept)
    by_id = dict(kept)
    for current, stop in (
        (rng.choice(parents)[0], rng.choice([None, rng.choice(parents)[0]])) for _ in range(50)
    ):
        expected: list[int] = []
        number: int | None = current
        while number is not None and number != stop and number in by_id:
            expected.insert(0, number)
            number = by_id[number]
        snapshots, leads_back = snapshots_between(history(*kept), stop, current)
        assert [snapshot.snapshot_id for snapshot in snapshots] == expected, f"seed {seed}"
        assert leads_back == (number == stop), f"seed {seed}"


@pytest.mark.parametrize(
    ("metadata", "stop_id", "ancestors", "complete"),
    [
        (history(), None, [], True),
        (BASE, None, [1, 2], True),
        (history((2, None), (3, 2)), None, [2, 3], False),  # snapshot 1 has expired
        (history((2, 1), (3, 2)), None, [2, 3], False),
        (history((2, None), (3, 2)), 2, [3], True),
        (history((3, 2)), 2, [3], True),
        (history((3, 2)), 1, [3], False),
    ],
)
def test_without_a_stop_the_oldest_ancestor_must_be_the_first_snapshot(
    metadata: Any, stop_id: int | None, ancestors: list[int], complete: bool
) -> None:
    snapshots, is_complete = ancestors_after(metadata, stop_id)
    assert ([snapshot.snapshot_id for snapshot in snapshots], is_complete) == (ancestors, complete)
