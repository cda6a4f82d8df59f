"""The order in which the record of a partitioned consumer is computed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.incremental import consumption_update
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")


def test_the_end_of_the_windows_is_read_before_the_partitions_are_listed(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that begins in between is listed then, and does not count as computed."""
    orders = Source(namespace)
    orders.columns = {"at": pl.Datetime("us"), "price": pl.Int64}

    @dg.asset(
        key=[namespace, "daily"],
        partitions_def=DAYS,
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(partition_by="at", **FREE) | consumes({orders.key: "range"}, on="at"),
    )
    def daily(orders: pl.DataFrame) -> pl.DataFrame:
        return orders

    calls: list[str] = []

    def record(name: str) -> None:
        function = getattr(consumption_update, name)

        def recorded(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(consumption_update, name, recorded)

    record("windows_end_ms")
    record("find_pending_or_none")
    with project(lakehouse, orders.asset, daily) as p:
        orders.append(p, (datetime(2026, 1, 1, 6), 1))
        published(p, daily, partition="2026-01-01")
    assert calls == ["windows_end_ms", "find_pending_or_none"]
