"""Consumers by keys: which values are one key, and keys by which PyIceberg cannot select rows."""

from __future__ import annotations

import math
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


def totals_of(orders: Source, namespace: str, keys: list[str]) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "totals"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=keys, **FREE)
        | consumes({orders.key: "keys"}, keys=keys),
    )
    def totals(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.group_by(keys).agg(pl.col("price").sum())

    return totals


@pytest.mark.parametrize("second_key", [None, "x"], ids=["one key column", "two key columns"])
def test_nan_is_a_key_and_both_zeros_are_one(
    lakehouse: Lakehouse, namespace: str, second_key: str | None
) -> None:
    orders = Source(namespace)
    keys = {"level": pl.Float64} | ({"name": pl.String} if second_key else {})
    orders.columns = {**keys, "price": pl.Int64}
    totals = totals_of(orders, namespace, [*keys])
    names = (second_key,) if second_key else ()

    def rows(*pairs: tuple[float, int]) -> list[tuple[Any, ...]]:
        return [(level, *names, price) for level, price in pairs]

    with project(lakehouse, orders.asset, totals) as p:
        orders.append(p, *rows((math.nan, 1), (0.0, 2), (1.5, 3), (7.0, 4)))
        published(p, totals)
        orders.append(p, *rows((math.nan, 10), (-0.0, 20), (1.5, 30)))
        published(p, totals)
        assert {str(abs(row[0])): row[-1] for row in values(p, totals)} == {
            "nan": 11,
            "0.0": 22,
            "1.5": 33,
            "7.0": 4,
        }
        assert len(values(p, totals)) == 4


@pytest.mark.parametrize(
    "kind", [pa.uuid(), pa.struct([("x", pa.int64())]), pa.list_(pa.int64())], ids=["UUID", "struct", "list"]
)
def test_keys_by_which_rows_cannot_be_selected(
    lakehouse: Lakehouse, namespace: str, kind: pa.DataType
) -> None:
    orders = Source(namespace)
    totals = totals_of(orders, namespace, ["account"])
    with project(lakehouse, orders.asset, totals) as p:
        catalog = p.lake.catalog()
        catalog.create_namespace(namespace)
        catalog.create_table(tuple(orders.key.path), pa.schema([("account", kind)]))
        p.run(totals.key, ok=False)
        p.failed_with(SchemaMismatch, "account", f"{namespace}.orders")
