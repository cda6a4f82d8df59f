"""Inputs whose columns have other names than those of the asset's table: `rows(…)`, `keys(…)`, `range_(…)`."""

from datetime import date, datetime
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster import consumes, keys, range_, rows, table_metadata
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.declaration import ConsumedInput, parse_declaration
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.tables.errors import InputColumnGone
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05")
A, B = dg.AssetKey("a"), dg.AssetKey("b")


def orders_of(namespace: str) -> Source:
    found = Source(namespace)
    found.columns = {"customer_id": pl.Int64, "price": pl.Int64, "ordered_at": pl.Datetime("us")}
    return found


def customers_of(namespace: str) -> Source:
    found = Source(namespace, "customers", write_mode="upsert", keys=["id"])
    found.columns = {"id": pl.Int64, "name": pl.String}
    return found


def refunds_of(namespace: str) -> Source:
    found = Source(namespace, "refunds")
    found.columns = {"refunded_on": pl.Date, "refund": pl.Int64}
    return found


def at(day: int, hour: int = 3) -> datetime:
    return datetime(2026, 8, day, hour)


# -- declarations --------------------------------------------------------------------------------------


def test_what_was_declared_is_read_back() -> None:
    metadata = consumes({"a": keys("id", on="at"), "b": "keys"}, keys=["account"])
    found = parse_declaration(metadata, asset="x")
    assert found is not None
    assert found.inputs == {A: "keys", B: "keys"}
    assert found.column_overrides == {A: ConsumedInput("keys", ("id",), "at")}
    assert (found.key_columns_of(A), found.key_columns_of(B)) == (("id",), ("account",))
    assert (found.time_column_of(A), found.time_column_of(B)) == ("at", None)


def test_a_column_that_all_inputs_name_is_the_asset_s_too() -> None:
    alike = parse_declaration(consumes({"a": range_("at"), "b": range_("at")}), asset="x")
    apart = parse_declaration(consumes({"a": range_("at"), "b": range_("day")}), asset="x")
    partly = parse_declaration(consumes({"a": range_("at"), "b": "range"}), asset="x")
    assert alike is not None
    assert apart is not None
    assert partly is not None
    assert (alike.range_column, apart.range_column, partly.range_column) == ("at", None, None)


@pytest.mark.parametrize(
    ("inputs", "more"),
    [
        ({"a": keys("id")}, {}),
        ({"a": keys("id", "region")}, {"keys": ["account"]}),
        ({"a": rows(), "b": keys("id")}, {"keys": ["account"]}),
        ({"a": "keys"}, {"keys": ["account", "account"]}),
        ({"a": ConsumedInput("cells")}, {}),
    ],
    ids=["no keys of its own", "more keys than it has", "different patterns", "a key twice", "no pattern"],
)
def test_a_declaration_that_contradicts_itself_is_refused(
    inputs: dict[str, ConsumedInput], more: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError):
        consumes(inputs, **more)


# -- runs ----------------------------------------------------------------------------------------------


def spending(namespace: str, orders: Source, customers: Source) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "spending"],
        ins={"orders": dg.AssetIn(orders.key), "customers": dg.AssetIn(customers.key)},
        metadata=table_metadata(write_mode="upsert", keys=["customer"], **FREE)
        | consumes({orders.key: keys("customer_id"), customers.key: keys("id")}, keys=["customer"]),
    )
    def spending(orders: pl.DataFrame, customers: pl.DataFrame) -> pl.DataFrame:
        sums = orders.group_by(customer="customer_id").agg(pl.col("price").sum())
        return customers.rename({"id": "customer"}).join(sums, on="customer", how="left")

    return spending


def test_keys_have_the_names_of_each_input(lakehouse: Lakehouse, namespace: str) -> None:
    orders, customers = orders_of(namespace), customers_of(namespace)
    asset = spending(namespace, orders, customers)
    with project(lakehouse, orders.asset, customers.asset, asset) as p:
        customers.publish(p, (1, "one"), (2, "two"))
        orders.append(p, (1, 10, at(1)), (2, 20, at(1)))
        published(p, asset)
        assert values(p, asset) == [(1, "one", 10), (2, "two", 20)]
        orders.append(p, (1, 5, at(2)))
        published(p, asset)
        assert values(p, asset) == [(1, "one", 15), (2, "two", 20)]
        customers.publish(p, (2, "second"))
        published(p, asset)
        assert values(p, asset) == [(1, "one", 15), (2, "second", 20)]


def test_ranges_have_the_names_and_types_of_each_input(lakehouse: Lakehouse, namespace: str) -> None:
    orders, refunds = orders_of(namespace), refunds_of(namespace)
    seen: list[tuple[int, int]] = []

    @dg.asset(
        key=[namespace, "balance"],
        ins={"orders": dg.AssetIn(orders.key), "refunds": dg.AssetIn(refunds.key)},
        metadata=table_metadata(**FREE)
        | consumes({orders.key: range_("ordered_at"), refunds.key: range_("refunded_on")}, into="day"),
    )
    def balance(orders: pl.DataFrame, refunds: pl.DataFrame) -> pl.DataFrame:
        seen.append((orders.height, refunds.height))
        paid = orders.select(day=pl.col("ordered_at").dt.date(), amount="price")
        back = refunds.select(day="refunded_on", amount=-pl.col("refund"))
        return pl.concat([paid, back]).group_by("day").agg(pl.col("amount").sum())

    with project(lakehouse, orders.asset, refunds.asset, balance) as p:
        orders.append(p, (1, 10, at(1)), (1, 20, at(2)))
        refunds.append(p, (date(2026, 8, 2), 3))
        published(p, balance)
        assert [row[1] for row in values(p, balance)] == [10, 17]
        refunds.append(p, (date(2026, 8, 1), 4))
        published(p, balance)
        assert [row[1] for row in values(p, balance)] == [6, 17]
        orders.append(p, (1, 1, at(2, 23)))
        published(p, balance)
        assert [row[1] for row in values(p, balance)] == [6, 18]
        assert seen == [(2, 1), (1, 1), (2, 1)]  # of the other day nothing was read


def daily_balance(
    namespace: str, orders: Source, refunds: Source, refunded: str = "refunded_on"
) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "daily"],
        partitions_def=DAYS,
        ins={"orders": dg.AssetIn(orders.key), "refunds": dg.AssetIn(refunds.key)},
        metadata=table_metadata(partition_by="day", **FREE)
        | consumes({orders.key: range_("ordered_at"), refunds.key: range_(refunded)}),
    )
    def daily(orders: pl.DataFrame, refunds: pl.DataFrame) -> pl.DataFrame:
        paid = orders.select(day=pl.col("ordered_at").dt.date(), amount="price")
        back = refunds.select(day="refunded_on", amount=-pl.col("refund"))
        return pl.concat([paid, back]).group_by("day").agg(pl.col("amount").sum())

    return daily


def test_partitions_are_found_by_the_column_of_each_input(lakehouse: Lakehouse, namespace: str) -> None:
    orders, refunds = orders_of(namespace), refunds_of(namespace)
    daily = daily_balance(namespace, orders, refunds)
    with project(lakehouse, orders.asset, refunds.asset, daily) as p:
        orders.append(p, (1, 10, at(1)), (1, 20, at(2)))
        refunds.append(p, (date(2026, 8, 2), 3))
        for day in ("2026-08-01", "2026-08-02"):
            published(p, daily, partition=day)
        assert [row[1] for row in values(p, daily)] == [10, 17]
        refunds.append(p, (date(2026, 8, 1), 4))
        published(p, daily, partition="2026-08-02")
        assert [row[1] for row in values(p, daily)] == [10, 17]
        published(p, daily, partition="2026-08-01")
        assert [row[1] for row in values(p, daily)] == [6, 17]


def test_a_column_that_an_input_has_not_is_named(lakehouse: Lakehouse, namespace: str) -> None:
    orders, refunds = orders_of(namespace), refunds_of(namespace)
    daily = daily_balance(namespace, orders, refunds, refunded="refunded_at")
    with project(lakehouse, orders.asset, refunds.asset, daily) as p:
        orders.append(p, (1, 10, at(1)))
        refunds.append(p, (date(2026, 8, 1), 3))
        p.run(daily.key, partition="2026-08-01", ok=False)
        p.failed_with(InputColumnGone)


@pytest.mark.spark
def test_spark_frames_get_the_rows_of_the_same_keys_and_ranges(lakehouse: Lakehouse, namespace: str) -> None:
    orders, customers, refunds = orders_of(namespace), customers_of(namespace), refunds_of(namespace)

    @dg.asset(
        key=[namespace, "spending"],
        ins={"orders": dg.AssetIn(orders.key), "customers": dg.AssetIn(customers.key)},
        metadata=table_metadata(write_mode="upsert", keys=["customer"], **FREE)
        | consumes({orders.key: keys("customer_id"), customers.key: keys("id")}, keys=["customer"]),
    )
    def spending(orders: DataFrame, customers: DataFrame) -> DataFrame:
        sums = orders.groupBy(F.col("customer_id").alias("customer")).agg(F.sum("price").alias("price"))
        return customers.withColumnRenamed("id", "customer").join(sums, "customer", "left")

    @dg.asset(
        key=[namespace, "balance"],
        ins={"orders": dg.AssetIn(orders.key), "refunds": dg.AssetIn(refunds.key)},
        metadata=table_metadata(**FREE)
        | consumes({orders.key: range_("ordered_at"), refunds.key: range_("refunded_on")}, into="day"),
    )
    def balance(orders: DataFrame, refunds: DataFrame) -> DataFrame:
        paid = orders.select(F.to_date("ordered_at").alias("day"), F.col("price").alias("amount"))
        back = refunds.select(F.col("refunded_on").alias("day"), (-F.col("refund")).alias("amount"))
        return paid.union(back).groupBy("day").agg(F.sum("amount").alias("amount"))

    with project(lakehouse, orders.asset, customers.asset, refunds.asset, spending, balance) as p:
        customers.publish(p, (1, "one"), (2, "two"))
        orders.append(p, (1, 10, at(1)), (2, 20, at(2)))
        refunds.append(p, (date(2026, 8, 2), 3))

        def consumed() -> None:
            assert p.settle(p.run(spending.key, balance.key)).state is RunState.PUBLISHED

        consumed()
        assert values(p, spending) == [(1, "one", 10), (2, "two", 20)]
        assert [row[1] for row in values(p, balance)] == [10, 17]
        orders.append(p, (1, 5, at(2)))
        customers.publish(p, (2, "second"))
        refunds.append(p, (date(2026, 8, 1), 1))
        consumed()
        assert values(p, spending) == [(1, "one", 15), (2, "second", 20)]
        assert [row[1] for row in values(p, balance)] == [9, 22]
