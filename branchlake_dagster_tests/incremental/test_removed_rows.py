"""Rows that go from the input of a consumer of `rows`: what an upsert and an append make of it."""

from datetime import date
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.errors import RowsRemoved
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

APPEND = {"write_mode": "append"}
UPSERT = {"write_mode": "upsert", "keys": ["name"]}
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")


@pytest.fixture
def orders(namespace: str) -> Source:
    return Source(namespace)


def cents_of(source: Source, namespace: str, *, spark: bool = False, **how: Any) -> dg.AssetsDefinition:
    """A row for each row of the input, by its account."""

    def cents(orders):  # annotated below: annotations here are text
        if spark:
            return orders.withColumn("price", F.col("price") * 100)
        return orders.with_columns(pl.col("price") * 100)

    cents.__annotations__ = {"orders": DataFrame if spark else pl.DataFrame}
    return dg.asset(
        key=[namespace, "cents"],
        ins={"orders": dg.AssetIn(source.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({source.key: "rows"}, **how),
    )(cents)


def delete(lake: Lakehouse, source: Source, which: str) -> None:
    lake.catalog().load_table(tuple(source.key.path)).delete(which)


def append(lake: Lakehouse, source: Source, *rows: tuple[Any, ...]) -> None:
    frame = pl.DataFrame(list(rows), schema=source.columns, orient="row").to_arrow()
    table = lake.catalog().load_table(tuple(source.key.path))
    table.append(frame.cast(table.schema().as_arrow()))


@pytest.mark.parametrize("spark", [False, pytest.param(True, marks=pytest.mark.spark)])
def test_an_upsert_follows_updates_and_deletes(
    lakehouse: Lakehouse, namespace: str, orders: Source, spark: bool
) -> None:
    cents = cents_of(orders, namespace, spark=spark)
    with project(lakehouse, orders.asset, cents) as p:
        orders.append(p, ("a", 1), ("b", 2), ("c", 3))
        published(p, cents)
        delete(lakehouse, orders, "account = 'a' or account = 'b'")
        append(lakehouse, orders, ("b", 20), ("d", 4))
        published(p, cents)
        assert values(p, cents) == [("b", 2000), ("c", 300), ("d", 400)]
        delete(lakehouse, orders, "account = 'd'")
        published(p, cents)
        assert values(p, cents) == [("b", 2000), ("c", 300)]


def test_rows_that_a_rewritten_file_carries_along_are_not_computed_again(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    seen: list[list[str]] = []

    @dg.asset(
        key=[namespace, "cents"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "rows"}),
    )
    def cents(orders: pl.DataFrame) -> pl.DataFrame:
        seen.append(sorted(orders["account"]))
        return orders

    with project(lakehouse, orders.asset, cents) as p:
        orders.append(p, ("a", 1), ("b", 2), ("c", 3))
        published(p, cents)
        delete(lakehouse, orders, "account = 'a'")  # writes the file of all three again
        append(lakehouse, orders, ("d", 5))
        published(p, cents)
        assert seen == [["a", "b", "c"], ["d"]]
        assert [row[0] for row in values(p, cents)] == ["b", "c", "d"]


def test_a_row_that_another_one_of_its_key_outlives(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    cents = cents_of(orders, namespace)
    with project(lakehouse, orders.asset, cents) as p:
        orders.append(p, ("a", 1))
        published(p, cents)
        append(lakehouse, orders, ("a", 2))
        published(p, cents)
        delete(lakehouse, orders, "price = 2")
        published(p, cents)
        assert values(p, cents) == [("a", 100)]


def test_a_backfilled_partition_goes_through_an_upsert(lakehouse: Lakehouse, namespace: str) -> None:
    rows = {"2026-01-01": [("a", 1)], "2026-01-02": [("b", 2), ("c", 3)]}

    @dg.asset(
        key=[namespace, "orders"],
        partitions_def=DAYS,
        metadata=table_metadata(partition_by="day", **FREE),
    )
    def orders(context: dg.AssetExecutionContext) -> pl.DataFrame:
        day = date.fromisoformat(context.partition_key)
        found = [(day, *row) for row in rows[context.partition_key]]
        return pl.DataFrame(
            found, schema={"day": pl.Date, "account": pl.String, "price": pl.Int64}, orient="row"
        )

    @dg.asset(
        key=[namespace, "cents"],
        ins={"orders": dg.AssetIn(orders.key, partition_mapping=dg.AllPartitionMapping())},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "rows"}),
    )
    def cents(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.select("account", pl.col("price") * 100)

    with project(lakehouse, orders, cents) as p:
        for day in rows:
            published(p, orders, partition=day)
        published(p, cents)
        rows["2026-01-02"] = [("b", 20)]
        published(p, orders, partition="2026-01-02")
        published(p, cents)
        assert values(p, cents) == [("a", 100), ("b", 2000)]


@pytest.mark.parametrize("pattern", ["rows", "keys"])
@pytest.mark.parametrize("spark", [False, pytest.param(True, marks=pytest.mark.spark)])
@pytest.mark.parametrize("first", ["2026-01-01", pytest.param("2026-01-02", marks=pytest.mark.soak)])
def test_a_row_that_moves_to_another_partition(
    lakehouse: Lakehouse, namespace: str, orders: Source, pattern: str, spark: bool, first: str
) -> None:
    """Whichever partition's run is first: it takes no row of the other one's away."""
    orders.columns = {"day": pl.Date, "account": pl.String, "price": pl.Int64}

    def own(orders):  # annotated below: annotations here are text
        return orders

    own.__annotations__ = {"orders": DataFrame if spark else pl.DataFrame}
    how = {"keys": ["account"]} if pattern == "keys" else {}
    asset = dg.asset(
        key=[namespace, "own"],
        ins={"orders": dg.AssetIn(orders.key)},
        partitions_def=DAYS,
        metadata=table_metadata(write_mode="upsert", keys=["account"], partition_by="day", **FREE)
        | consumes({orders.key: pattern}, **how),
    )(own)
    days = ["2026-01-01", "2026-01-02"]
    one, two = map(date.fromisoformat, days)
    with project(lakehouse, orders.asset, asset) as p:
        orders.append(p, (one, "a", 1), (one, "b", 2), (two, "c", 3))
        for day in days:
            published(p, asset, partition=day)
        delete(lakehouse, orders, "account = 'a'")
        append(lakehouse, orders, (two, "a", 5))
        for day in sorted(days, key=lambda day: day != first):
            published(p, asset, partition=day)
        assert values(p, asset) == [(one, "b", 2), (two, "a", 5), (two, "c", 3)]


def test_an_input_without_the_keys_stops_the_consumer(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    @dg.asset(
        key=[namespace, "lines"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["name"], **FREE) | consumes({orders.key: "rows"}),
    )
    def lines(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.rename({"account": "name"})

    with project(lakehouse, orders.asset, lines) as p:
        orders.append(p, ("a", 1), ("b", 2))
        published(p, lines)
        delete(lakehouse, orders, "account = 'a'")
        p.run(lines.key, ok=False)
        p.failed_with(RowsRemoved)


@pytest.mark.parametrize(
    ("how", "left"), [pytest.param("ignore", ["a", "b", "c"], marks=pytest.mark.spark), ("fail", None)]
)
def test_an_upsert_may_choose_otherwise(
    lakehouse: Lakehouse, namespace: str, orders: Source, how: Any, left: list[str] | None
) -> None:
    cents = cents_of(orders, namespace, when_removed=how)
    with project(lakehouse, orders.asset, cents) as p:
        orders.append(p, ("a", 1), ("b", 2))
        published(p, cents)
        delete(lakehouse, orders, "account = 'a'")
        append(lakehouse, orders, ("c", 3))
        p.settle(p.run(cents.key, ok=left is not None))
        if left is None:
            p.failed_with(RowsRemoved)
        else:
            assert [row[0] for row in values(p, cents)] == left


@pytest.mark.parametrize(
    ("table", "how"),
    [
        ({"write_mode": "append"}, {}),
        ({"write_mode": "replace_table"}, {}),
        ({"write_mode": "upsert", "keys": ["account"]}, {"commits": True}),
    ],
)
def test_only_an_upsert_can_apply_what_has_gone(
    orders: Source, namespace: str, table: dict[str, Any], how: dict[str, Any]
) -> None:
    def declare() -> None:
        metadata = table_metadata(**table, **FREE)
        metadata |= consumes({orders.key: "rows"}, when_removed="apply", **how)
        declaration = parse_declaration(metadata, asset="lines")
        assert declaration is not None
        build_consumer(dg.AssetSpec([namespace, "lines"], metadata=metadata), declaration, None, "lake")

    with pytest.raises(ConfigurationError):
        declare()


@pytest.mark.parametrize(
    ("spark", "mode"),
    [
        (False, APPEND),
        (False, UPSERT),
        # An append without Spark shows what this one does.
        pytest.param(True, APPEND, marks=[pytest.mark.spark, pytest.mark.soak]),
        pytest.param(True, UPSERT, marks=pytest.mark.spark),
    ],
)
def test_removed_rows_rebuild_a_table(
    lakehouse: Lakehouse, namespace: str, orders: Source, spark: bool, mode: dict[str, Any]
) -> None:
    """Nothing in the asset's own table identifies the removed row."""

    def lines(orders):  # annotated below: annotations here are text
        if spark:
            return orders.select(F.concat("account", F.lit("!")).alias("name"))
        return orders.select((pl.col("account") + "!").alias("name"))

    lines.__annotations__ = {"orders": DataFrame if spark else pl.DataFrame}
    asset = dg.asset(
        key=[namespace, "lines"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(**mode, **FREE) | consumes({orders.key: "rows"}, when_removed="rebuild"),
    )(lines)
    with project(lakehouse, orders.asset, asset) as p:
        orders.append(p, ("a", 1), ("b", 2))
        published(p, asset)
        append(lakehouse, orders, ("c", 3))
        published(p, asset)
        delete(lakehouse, orders, "account = 'a'")
        append(lakehouse, orders, ("d", 4))
        published(p, asset)
        assert values(p, asset) == [("b!",), ("c!",), ("d!",)]


def test_only_partitions_with_removed_rows_are_rebuilt(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    orders.columns = {"day": pl.Date, "account": pl.String, "price": pl.Int64}
    seen: list[tuple[str, list[str]]] = []

    @dg.asset(
        key=[namespace, "lines"],
        ins={"orders": dg.AssetIn(orders.key)},
        partitions_def=DAYS,
        metadata=table_metadata(
            write_mode="upsert", keys=["day", "name"], when_matched="keep", partition_by="day", **FREE
        )
        | consumes({orders.key: "rows"}, when_removed="rebuild"),
    )
    def lines(context: dg.AssetExecutionContext, orders: pl.DataFrame) -> pl.DataFrame:
        seen.append((context.partition_key, sorted(orders["account"])))
        return orders.select("day", pl.col("account").alias("name"), "price")

    one, two = (date.fromisoformat(day) for day in ("2026-01-01", "2026-01-02"))
    with project(lakehouse, orders.asset, lines) as p:
        orders.append(p, (one, "a", 1), (one, "b", 2))
        orders.append(p, (two, "c", 3))
        for day in ("2026-01-01", "2026-01-02"):
            published(p, lines, partition=day)
        seen.clear()
        # An update of one day, whose row moves to the other one; the other day also has a new row.
        delete(lakehouse, orders, "account = 'a'")
        append(lakehouse, orders, (two, "a", 5), (one, "b2", 6))
        for day in ("2026-01-01", "2026-01-02"):
            published(p, lines, partition=day)
        assert seen == [("2026-01-01", ["b", "b2"]), ("2026-01-02", ["a"])]
        assert values(p, lines) == [(one, "b", 2), (one, "b2", 6), (two, "a", 5), (two, "c", 3)]
        for day in ("2026-01-01", "2026-01-02"):
            published(p, lines, partition=day)
        assert seen[2:] == [("2026-01-01", []), ("2026-01-02", [])]
