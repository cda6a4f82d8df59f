"""Whether a table still holds what a snapshot wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.table import Table

from branchlake_dagster.history.capture import contains_snapshot
from branchlake_dagster_tests.history.snapshot_tables import SCHEMA, append, catalogue, compact


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with catalogue(tmp_path) as catalog:
        made = catalog.create_table("shop.t", SCHEMA)
        for value in (1, 2):
            append(made, [("a", value)])
        yield made


def ids(table: Table) -> list[int]:
    return [one.snapshot_id for one in table.metadata.snapshots]


def expire(table: Table, snapshot_id: int) -> None:
    table.maintenance.expire_snapshots().by_id(snapshot_id).commit()


def roll_back(table: Table, snapshot_id: int) -> None:
    table.manage_snapshots().rollback_to_snapshot(snapshot_id).commit()


def test_ancestors_are_held_and_unreported_snapshots_too(table: Table) -> None:
    first, second = ids(table)
    append(table, [("b", 3)], replayed_from="77")
    compact(table)
    assert all(contains_snapshot(table.metadata, one) for one in (first, second, 77, None))
    assert not contains_snapshot(table.metadata, 78)


def test_what_was_rolled_back_is_not_held(table: Table) -> None:
    first, second = ids(table)
    append(table, [("b", 3)], replayed_from="77")
    roll_back(table, first)
    assert contains_snapshot(table.metadata, first)
    assert not contains_snapshot(table.metadata, second)
    assert not contains_snapshot(table.metadata, 77)
    append(table, [("c", 4)])
    assert not contains_snapshot(table.metadata, second)
    expire(table, second)
    assert not contains_snapshot(
        table.metadata, second
    )  # the line leads back to the first snapshot, and it is not in it


def test_with_expired_snapshots_only_what_is_still_known_is_missed(table: Table) -> None:
    first, second = ids(table)
    append(table, [("b", 3)])
    third = ids(table)[-1]
    expire(table, first)
    assert all(contains_snapshot(table.metadata, one) for one in (first, second, third))
    roll_back(table, second)
    assert not contains_snapshot(table.metadata, third)
    append(table, [("c", 4)])
    expire(table, third)
    assert contains_snapshot(table.metadata, third)  # which is not so, and nothing tells it any more
