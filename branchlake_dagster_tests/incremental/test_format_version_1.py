"""Inputs of format version 1, whose manifests and snapshots lack the fields of later versions."""

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.table import Table

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.upserts import count_live_files
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


@pytest.fixture
def orders(namespace: str) -> Source:
    return Source(namespace)


def lines_of(orders: Source, namespace: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "lines"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "rows"}),
    )
    def lines(orders: pl.DataFrame) -> pl.DataFrame:
        return orders

    return lines


def create(p: Project, orders: Source) -> None:
    catalog = p.lake.catalog()
    catalog.create_namespace(orders.key.path[0])
    schema = pa.schema([("account", pa.string()), ("price", pa.int64())])
    catalog.create_table(tuple(orders.key.path), schema, properties={"format-version": "1"})


def load(p: Project, orders: Source) -> Table:
    return p.lake.catalog().load_table(tuple(orders.key.path))


def test_changes_are_consumed(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    lines = lines_of(orders, namespace)
    with project(lakehouse, orders.asset, lines) as p:
        create(p, orders)
        orders.append(p, ("a", 1), ("b", 2))
        published(p, lines)
        orders.append(p, ("c", 3))
        published(p, lines)
        assert values(p, lines) == [("a", 1), ("b", 2), ("c", 3)]
        load(p, orders).delete("account = 'a'")
        published(p, lines)
        assert values(p, lines) == [("b", 2), ("c", 3)]
        assert count_live_files(load(p, orders)) == (2, False)


def test_rows_of_expired_snapshots_are_consumed(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    lines = lines_of(orders, namespace)
    with project(lakehouse, orders.asset, lines) as p:
        create(p, orders)
        published(p, lines)
        orders.append(p, ("a", 1))
        orders.append(p, ("b", 2))
        table = load(p, orders)
        table.maintenance.expire_snapshots().by_id(table.metadata.snapshots[0].snapshot_id).commit()
        published(p, lines)
        assert values(p, lines) == [("a", 1), ("b", 2)]
