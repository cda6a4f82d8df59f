"""Changed keys as Spark frames: which rows come, and whose place the result takes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.incremental import spark_inputs as spark_keys
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.errors import PartitionMismatch, UpsertKeyInvalid
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values

pytestmark = pytest.mark.spark


def asset_of(
    source: Source, namespace: str, *, keys: Sequence[str], upsert: Sequence[str]
) -> dg.AssetsDefinition:
    def spent(orders):  # annotated below: annotations here are text
        made = orders.groupBy(*upsert).agg(F.sum("price").alias("spent"))
        if source.drops_null:
            made = made.filter("account IS NOT NULL")
        return made.withColumn("account", F.lit("other")) if source.mistaken else made

    spent.__annotations__ = {"orders": DataFrame}
    return dg.asset(
        key=[namespace, "spent"],
        ins={"orders": dg.AssetIn(source.key)},
        metadata=table_metadata(write_mode="upsert", keys=upsert, **FREE)
        | consumes({source.key: "keys"}, keys=keys),
    )(spent)


class Orders(Source):
    """Orders of accounts; `mistaken` makes the asset of them return rows of another one, `drops_null` none of null."""

    mistaken = False
    drops_null = False

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.columns = {"account": pl.String, "kind": pl.String, "price": pl.Int64}

    def delete(self, lake: Lakehouse, what: str) -> None:
        lake.catalog().load_table(tuple(self.key.path)).delete(what)


def test_rows_of_changed_keys_are_replaced(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Orders(namespace)
    spent = asset_of(orders, namespace, keys=["account"], upsert=["account", "kind"])
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", "x", 1), ("a", "y", 2), ("b", "x", 3), ("gone", "x", 4))
        published(p, spent)
        orders.append(p, ("a", "x", 10), ("new", "x", 5))
        orders.delete(lakehouse, "account = 'gone' or kind = 'y'")
        published(p, spent)
        assert values(p, spent) == [("a", "x", 11), ("b", "x", 3), ("new", "x", 5)]


def test_keys_of_two_columns_are_looked_for_by_the_one_of_few_values(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of kind `x` more accounts have changed than are asked for one by one, of `y` and of none some."""
    monkeypatch.setattr(spark_keys, "MAX_VALUES_PER_PART", 2)
    orders = Orders(namespace)
    both = ["account", "kind"]
    spent = asset_of(orders, namespace, keys=both, upsert=both)
    accounts = "abcde"
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, *((one, kind, 1) for one in accounts for kind in "xyz"))
        published(p, spent)
        orders.append(p, *((one, "x", 10) for one in "abce"), ("b", "y", 10), ("new", "y", 7))
        orders.delete(lakehouse, "account = 'c' and kind = 'y'")
        published(p, spent)
        expected = {
            (one, kind): 11 if kind == "x" and one in "abce" else 1 for one in accounts for kind in "xyz"
        }
        expected |= {("b", "y"): 11, ("new", "y"): 7}
        del expected["c", "y"]
        assert {row[:2]: row[2] for row in values(p, spent)} == expected


def test_a_filter_of_rows_lets_all_keys_through(spark_session: SparkSession) -> None:
    keys = pa.table(
        {"day": [1, 1, 1, 2, None, 3, 3], "account": ["a", "b", "c", "b", "d", None, "a"], "f": [0.5] * 7}
    )
    rows = pa.table({"day": [1, 1, 2, 2, 3, None, 4], "account": ["a", "z", "b", "a", None, "d", "a"]})
    frame = spark_session.createDataFrame(rows.append_column("f", pa.array([0.5] * 7)))
    found = (
        frame.filter(spark_keys.row_prefilter(keys, lambda name: frame[name]))
        .select("day", "account")
        .collect()
    )
    kept = {(row["day"], row["account"]) for row in found}
    assert kept == {(1, "a"), (2, "b"), (3, None), (None, "d")}
    many = pa.table({"day": range(300), "account": range(300)})
    assert str(spark_keys.row_prefilter(many, lambda name: frame[name])) == str(F.lit(True))


def test_the_longest_filter_of_rows_is_still_compiled(
    spark_session: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = range(spark_keys.MAX_FILTER_PARTS)
    rows = [(day, f"a{number * 7}") for day in groups for number in range(300)]
    keys = pa.table(
        {"day": pa.array([row[0] for row in rows], pa.int64()), "account": [row[1] for row in rows]}
    )
    frame = spark_session.range(1000).select(
        F.col("id").alias("day"), F.concat(F.lit("a"), F.col("id").cast("string")).alias("account")
    )
    found = frame.filter(spark_keys.row_prefilter(keys, lambda name: frame[name]))
    assert found.count() == len([day for day in groups if day % 7 == 0])
    found.explain(mode="codegen")
    (size,) = re.findall(r"maxMethodCodeSize:(\d+)", capsys.readouterr().out)
    assert 1_000 < int(size) < 8_000


def test_rows_with_a_null_key_may_go_but_not_come(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Orders(namespace)
    spent = asset_of(orders, namespace, keys=["account"], upsert=["account"])
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", "x", 1), (None, "x", 2))
        p.run(spent.key, ok=False)  # everything is computed, and creates the table
        p.failed_with(UpsertKeyInvalid)
        orders.drops_null = True
        published(p, spent)
        orders.drops_null = False
        orders.delete(lakehouse, "account is null")
        orders.append(p, ("a", "x", 1))
        published(p, spent)
        assert values(p, spent) == [("a", 2)]
        orders.append(p, (None, "x", 3))
        p.run(spent.key, ok=False)
        p.failed_with(UpsertKeyInvalid)
        p.run(spent.key, ok=False, tags={"branchlake/rebuild": "true"})  # replaces the table's rows
        p.failed_with(UpsertKeyInvalid)
        assert values(p, spent) == [("a", 2)]


def test_a_result_of_everything_has_each_key_once(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Orders(namespace)

    def last(orders):  # annotated below: annotations here are text
        return orders

    last.__annotations__ = {"orders": DataFrame}
    asset = dg.asset(
        key=[namespace, "last"],
        ins={"orders": dg.AssetIn(orders.key)},
        partitions_def=dg.StaticPartitionsDefinition(["x", "y"]),
        metadata=table_metadata(write_mode="upsert", keys=["account"], partition_by="kind", **FREE)
        | consumes({orders.key: "rows"}),
    )(last)
    with project(lakehouse, orders.asset, asset) as p:
        orders.append(p, ("a", "x", 1), ("a", "x", 1), ("b", "y", 2))
        p.run(asset.key, partition="x", ok=False)
        p.failed_with(UpsertKeyInvalid)
        published(p, asset, partition="y")
        assert values(p, asset) == [("b", "y", 2)]


def test_a_result_of_other_keys_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Orders(namespace)
    spent = asset_of(orders, namespace, keys=["account"], upsert=["account"])
    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", "x", 1), ("other", "x", 9))
        published(p, spent)
        orders.append(p, ("a", "x", 2))
        orders.mistaken = True
        p.run(spent.key, ok=False)
        p.failed_with(PartitionMismatch, "have a key that has not changed")
