"""Incremental assets of real Dagster runs beside expiries: each row is consumed once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.expiry.result import ExpiryPlan
from branchlake_dagster.expiry.retention import ExpiryPolicy
from branchlake_dagster.expiry.snapshot_expiry import SnapshotExpirer
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
STRICT = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=timedelta(0))


@pytest.fixture
def orders(namespace: str) -> Source:
    return Source(namespace)


def copy_of(source: Source, namespace: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "copy"],
        ins={"orders": dg.AssetIn(source.key)},
        metadata=table_metadata(write_mode="append", **FREE) | consumes({source.key: "rows"}),
    )
    def copy(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.with_columns(pl.lit(orders.height, pl.Int64).alias("batch"))

    return copy


def expired(lake: Lakehouse, namespace: str, policy: ExpiryPolicy = STRICT) -> ExpiryPlan:
    """Remove snapshots of the tables of a namespace; the plan."""
    expirer = SnapshotExpirer.of_lake(lake)
    tables = [".".join(one) for one in lake.catalog().list_tables((namespace,))]
    plan = expirer.plan(tables, policy)
    assert not expirer.run(plan).errors
    return plan


def snapshots(lake: Lakehouse, source: Source) -> int:
    return len(lake.catalog().load_table(tuple(source.key.path)).metadata.snapshots)


@pytest.mark.parametrize(
    "lakehouse",
    # `test_snapshot_expiry.py` has expiries on the real server, `test_incremental_assets.py` has consumers.
    ["in-memory", pytest.param("real", marks=[pytest.mark.nessie, pytest.mark.soak])],
    indirect=True,
)
def test_each_row_is_consumed_once(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        expected = []
        for number in range(6):
            orders.publish(p, (f"o{number}", number))
            expected.append(f"o{number}")
            if number % 3 == 1:
                published(p, copy)
            expired(lakehouse, namespace)
        published(p, copy)
        expired(lakehouse, namespace)
        published(p, copy)
        assert [row[0] for row in values(p, copy)] == expected
        assert snapshots(lakehouse, orders) == 1


def test_a_consumer_that_runs_during_an_expiry(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        for number in range(4):
            orders.publish(p, (f"o{number}", number))
        published(p, copy)
        orders.publish(p, ("o4", 4))
        run = p.run(copy.key)  # it has ended, and nobody has judged it
        orders.publish(p, ("o5", 5))
        expired(lakehouse, namespace)
        assert p.settle(run).state == RunState.PUBLISHED
        expired(lakehouse, namespace)
        published(p, copy)
        assert [row[0] for row in values(p, copy)] == [f"o{number}" for number in range(6)]


def test_rows_of_the_same_run_are_consumed_once(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.publish(p, ("a", 1))
        published(p, copy)
        orders.rows = [("own", 2)]
        both = p.run(orders.key, copy.key)
        orders.publish(p, ("main", 3))
        expired(lakehouse, namespace)
        assert p.settle(both).state == RunState.PUBLISHED
        expired(lakehouse, namespace)
        published(p, copy)
        assert [row[0] for row in values(p, copy)] == ["a", "main", "own"]


def test_an_undone_consumer_reads_again_what_it_had_read(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    """The undo sets the position back. Only the horizon of undo knows the earlier one."""
    copy = copy_of(orders, namespace)
    with project(lakehouse, orders.asset, copy) as p:
        orders.publish(p, ("a", 1))
        published(p, copy)
        horizon = datetime.now(UTC)
        orders.publish(p, ("b", 2))
        orders.publish(p, ("c", 3))
        run = p.run(copy.key)
        assert p.settle(run).state == RunState.PUBLISHED
        age = datetime.now(UTC) - horizon
        expirer = SnapshotExpirer(lakehouse.nessie, lakehouse.catalog(), clock=lambda: horizon + age)
        policy = ExpiryPolicy(keep_count=1, keep_age=timedelta(0), undo_age=age)
        assert not expirer.run(expirer.plan(policy=policy)).errors
        undoer = PublicationUndo(lakehouse.nessie, IcebergTableFormat(lakehouse.catalog()))
        undoer.undo(find_publication(lakehouse.nessie, run))
        assert [row[0] for row in values(p, copy)] == ["a"]
        published(p, copy)
        assert [row[0] for row in values(p, copy)] == ["a", "b", "c"]
