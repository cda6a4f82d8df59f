"""docs/assets.md#adopting-an-existing-table: the table is registered, replaced by partition, read, and stays whole."""

import datetime as dt
from pathlib import Path

import dagster as dg
import polars as pl
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

from branchlake_dagster import table_metadata
from branchlake_dagster.testing import ThrowawayLake

DAYS = dg.DailyPartitionsDefinition("2026-11-01")
FOURTH, FIFTH = dt.date(2026, 11, 4), dt.date(2026, 11, 5)


@dg.asset(key=["shop", "stock"], partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
def stock(context: dg.AssetExecutionContext) -> pl.DataFrame:
    day = context.partition_time_window.start.date()
    return pl.DataFrame({"day": [day], "item": ["bolt"], "pieces": [7]})


@dg.asset_check(asset=stock)
def none_negative(stock: pl.DataFrame) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=stock.filter(pl.col("pieces") < 0).is_empty())


@dg.asset(
    key=["shop", "seen"],
    ins={"stock": dg.AssetIn(key=["shop", "stock"])},
    metadata=table_metadata(require_checks=False),
)
def read(stock: pl.DataFrame) -> pl.DataFrame:
    return pl.DataFrame({"pieces": [stock["pieces"].sum()]})


def adopt(lake: ThrowawayLake, folder: Path, pieces: list[int]) -> SqlCatalog:
    """A table with both days in one file, outside of the warehouse, registered as the page says."""
    (folder / "old").mkdir()
    old = SqlCatalog("old", uri=f"sqlite:///{folder}/old.db", warehouse=f"file://{folder}/old")
    rows = pa.table({"day": [FOURTH, FIFTH], "item": ["bolt", "nut"], "pieces": pieces})
    old.create_namespace("shop")
    old.create_table("shop.stock", schema=rows.schema).append(rows)
    catalog = lake.lakehouse.catalog()
    catalog.create_namespace_if_not_exists("shop")
    table = catalog.register_table("shop.stock", old.load_table("shop.stock").metadata_location)
    with table.transaction() as change:
        change.set_properties({"gc.enabled": "false"})
    return old


def test_a_partition_is_replaced_and_the_rest_stays(lake: ThrowawayLake, tmp_path: Path) -> None:
    old = adopt(lake, tmp_path, [1, 2])
    assert lake.table("shop.stock").num_rows == 2

    outcome = lake.publish(lake.run(stock, none_negative, partition="2026-11-05"))

    assert outcome.published, outcome
    rows = lake.polars("shop.stock").sort("day")
    assert rows.rows() == [(FOURTH, "bolt", 1), (FIFTH, "bolt", 7)]
    assert lake.lakehouse.catalog().load_table("shop.stock").properties["gc.enabled"] == "false"
    assert old.load_table("shop.stock").scan().to_arrow().column("pieces").to_pylist() == [1, 2]


def test_old_rows_that_fail_a_check_of_the_table_block_the_run(lake: ThrowawayLake, tmp_path: Path) -> None:
    adopt(lake, tmp_path, [-1, 2])
    outcome = lake.publish(lake.run(stock, none_negative, partition="2026-11-05"))
    assert outcome.status == "blocked"
    assert lake.polars("shop.stock")["pieces"].to_list() == [-1, 2]


def test_one_that_is_only_read_needs_a_spec_and_no_check(lake: ThrowawayLake, tmp_path: Path) -> None:
    adopt(lake, tmp_path, [1, 2])
    outcome = lake.publish(
        lake.run(dg.Definitions(assets=[dg.AssetSpec(["shop", "stock"]), read]), select="shop/seen")
    )
    assert outcome.published, outcome
    assert lake.polars("shop.seen")["pieces"].to_list() == [3]
