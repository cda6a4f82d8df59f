"""Inputs whose changes are lost: what partitioned consumers, and their sensor, do by `when_lost`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import consumer_backlog, consumes, table_metadata
from branchlake_dagster.history.change import ChangeLost
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
PATTERNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "range": ({}, {}),
    "rows": ({"write_mode": "append"}, {}),
    "keys": ({"write_mode": "upsert", "keys": ["at", "account"]}, {"keys": ["at", "account"]}),
}


def at(day: int) -> datetime:
    return datetime(2026, 1, day, 6)


@pytest.fixture
def orders(namespace: str) -> Source:
    source = Source(namespace)
    source.columns = {"at": pl.Datetime("us"), "account": pl.String, "price": pl.Int64}
    return source


def daily_of(
    orders: Source,
    namespace: str,
    pattern: str,
    when_lost: str,
    partitions: dg.PartitionsDefinition[str] | None = DAYS,
) -> dg.AssetsDefinition:
    write, options = PATTERNS[pattern]
    by = {} if partitions is None else {"partition_by": "at"}
    declaration: Any = {"on": "at", "when_lost": when_lost, **options}

    @dg.asset(
        key=[namespace, "daily"],
        partitions_def=partitions,
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(**by, **write, **FREE) | consumes({orders.key: pattern}, **declaration),
    )
    def daily(orders: pl.DataFrame) -> pl.DataFrame:
        return orders

    return daily


def recreate(p: Project, orders: Source) -> None:
    p.lake.catalog().drop_table(tuple(orders.key.path))
    orders.append(p, (at(2), "a", 5), (at(3), "c", 6))


def expire(p: Project, orders: Source) -> None:
    orders.append(p, (at(3), "b", 7))
    orders.append(p, (at(3), "c", 6))
    table = p.lake.catalog().load_table(tuple(orders.key.path))
    *older, _ = (snapshot.snapshot_id for snapshot in table.metadata.snapshots)
    table.maintenance.expire_snapshots().by_ids(older).commit()


def launch_all(p: Project, ticks: Ticks, asset: dg.AssetsDefinition) -> list[str | None]:
    """Compute what the sensor launches until it launches nothing, and return the partitions in order."""
    launched: list[str | None] = []
    while requests := ticks.tick():
        for request in requests:
            launched.append(request.partition_key)
            published(p, asset, partition=request.partition_key)
        assert len(launched) < 20
    return launched


def prices(p: Project, asset: dg.AssetsDefinition) -> list[tuple[int, int]]:
    return [(row[0].day, row[2]) for row in values(p, asset)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("lose", "rows"),
    [(recreate, [(2, 5), (3, 6)]), (expire, [(1, 1), (2, 2), (3, 6), (3, 7)])],
    ids=["recreated", "expired"],
)
def test_partitions_are_computed_anew_after_a_change_was_lost(
    lakehouse: Lakehouse,
    namespace: str,
    orders: Source,
    pattern: str,
    lose: Callable[[Project, Source], None],
    rows: list[tuple[int, int]],
) -> None:
    daily = daily_of(orders, namespace, pattern, "rebuild")
    with project(lakehouse, orders.asset, daily) as p:
        ticks = Ticks(p)
        orders.append(p, (at(1), "a", 1), (at(2), "b", 2))
        launch_all(p, ticks, daily)
        lose(p, orders)
        assert sorted(map(str, launch_all(p, ticks, daily))) == DAYS.get_partition_keys()
        assert sorted(prices(p, daily)) == rows
        orders.append(p, (at(1), "d", 9))
        assert launch_all(p, ticks, daily) == ["2026-01-01"]
        assert sorted(prices(p, daily)) == sorted([*rows, (1, 9)])


def test_each_partition_can_be_rebuilt_after_a_change_was_lost(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    daily = daily_of(orders, namespace, "range", "fail")
    with project(lakehouse, orders.asset, daily) as p:
        ticks = Ticks(p)
        orders.append(p, (at(1), "a", 1), (at(2), "b", 2))
        launch_all(p, ticks, daily)
        recreate(p, orders)
        assert ticks.tick() == []
        p.run(daily.key, partition="2026-01-02", ok=False)
        p.failed_with(ChangeLost)
        for day in DAYS.get_partition_keys():
            published(p, daily, partition=day, tags={RunTag.REBUILD: "true"})
        assert prices(p, daily) == [(2, 5), (3, 6)]
        orders.append(p, (at(1), "d", 9))
        assert launch_all(p, ticks, daily) == ["2026-01-01"]


@pytest.mark.parametrize(
    ("partitions", "launched"),
    [(DAYS, ["2026-01-03"]), (None, [None])],
    ids=["by day", "without partitions"],
)
def test_a_consumer_that_skips_a_lost_change_is_launched_to_record_it_and_continues(
    lakehouse: Lakehouse,
    namespace: str,
    orders: Source,
    partitions: dg.PartitionsDefinition[str] | None,
    launched: list[str | None],
) -> None:
    daily = daily_of(orders, namespace, "rows", "skip", partitions)
    with project(lakehouse, orders.asset, daily) as p:
        lake, ticks = LakehouseResource.from_settings(p.lake.settings), Ticks(p)
        orders.append(p, (at(1), "a", 1), (at(2), "b", 2))
        launch_all(p, ticks, daily)
        recreate(p, orders)
        assert consumer_backlog(daily, lake).has_any
        assert launch_all(p, ticks, daily)
        assert not consumer_backlog(daily, lake).has_any
        assert prices(p, daily) == [(1, 1), (2, 2)]
        orders.append(p, (at(3), "d", 9))
        assert launch_all(p, ticks, daily) == launched
        assert prices(p, daily) == [(1, 1), (2, 2), (3, 9)]
