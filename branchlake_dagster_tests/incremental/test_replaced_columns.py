"""Columns of an input that were dropped and added again: the table has another column of the same name."""

from __future__ import annotations

import json
from datetime import datetime
from hashlib import sha256
from operator import itemgetter
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyiceberg.types import StringType

from branchlake_dagster import consumer_backlog, consumes, rows, table_metadata
from branchlake_dagster.automation.backlog import ConsumerBacklog, iter_consumers
from branchlake_dagster.history.capture import snapshots_since
from branchlake_dagster.history.change import ChangeLost, LossReason, Position
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.positions import ConsumptionRecord, Unconsumed
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.incremental.test_lost_changes import launch_all
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")


def at(day: int) -> datetime:
    return datetime(2026, 1, day, 6)


@pytest.fixture
def orders(namespace: str) -> Source:
    source = Source(namespace)
    source.columns = {"at": pl.Datetime("us"), "account": pl.String, "price": pl.Int64}
    return source


def replace_column(p: Project, orders: Source, column: str) -> None:
    """Drop a column of the input and add a column with the same name and type, which is null in all rows."""
    table = p.lake.catalog().load_table(tuple(orders.key.path))
    kind = table.schema().find_type(column)
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column(column)
    with table.update_schema() as update:
        update.add_column(column, kind)
    moved = orders.columns.pop(column)
    orders.columns[column] = moved


def recorded_input(p: Project, asset: dg.AssetsDefinition) -> Position:
    table = p.lake.catalog().load_table(tuple(asset.key.path))
    (position,) = ConsumptionRecord.from_json(table.properties[LakeProperty.CONSUMED]).inputs.values()
    return position


def forget_columns(p: Project, asset: dg.AssetsDefinition) -> None:
    """Change the common position of the asset to what a version recorded that did not know of columns."""
    table = p.lake.catalog().load_table(tuple(asset.key.path))
    record = json.loads(table.properties[LakeProperty.CONSUMED])
    for position in record["inputs"].values():
        del position["columns"]
    with table.transaction() as transaction:
        transaction.set_properties({LakeProperty.CONSUMED: json.dumps(record)})


def consumption_of(p: Project, asset: dg.AssetsDefinition, *partitions: str) -> Consumption:
    (consuming,) = iter_consumers(p.definitions.get_repository_def().asset_graph, "default", [asset.key])
    lake = LakehouseResource.from_settings(p.lake.settings)
    return Consumption(lake, consuming.consumer, partitions=partitions)


def state_key_of(p: Project, asset: dg.AssetsDefinition) -> str:
    (consuming,) = iter_consumers(p.definitions.get_repository_def().asset_graph, "default", [asset.key])
    return ConsumerBacklog(LakehouseResource.from_settings(p.lake.settings), consuming.consumer).state_key()


def totals_of(orders: Source, namespace: str, when_lost: str = "rebuild") -> dg.AssetsDefinition:
    declaration: Any = {"keys": ["account"], "when_lost": when_lost}

    @dg.asset(
        key=[namespace, "totals"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "keys"}, **declaration),
    )
    def totals(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.drop_nulls("account").group_by("account").agg(pl.col("price").sum())

    return totals


def copies_of(
    orders: Source, namespace: str, pattern: Any, *, partitioned: bool = False, write: Any = None, **how: Any
) -> dg.AssetsDefinition:
    by = {"partition_by": "at"} if partitioned else {}

    @dg.asset(
        key=[namespace, "copies"],
        partitions_def=DAYS if partitioned else None,
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(**(write or {}), **by, **FREE) | consumes({orders.key: pattern}, **how),
    )
    def copies(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.select("at", "account", "price").drop_nulls("account")

    return copies


def test_results_of_the_former_keys_are_computed_anew(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    totals = totals_of(orders, namespace)
    with project(lakehouse, orders.asset, totals) as p:
        orders.append(p, (at(1), "a", 1), (at(2), "b", 2))
        published(p, totals)
        replace_column(p, orders, "account")
        orders.append(p, (at(3), 6, "c"))
        published(p, totals)
        assert values(p, totals) == [("c", 6)]
        orders.append(p, (at(3), 7, "c"))
        published(p, totals)
        assert values(p, totals) == [("c", 13)]


def test_the_sensor_launches_a_consumer_whose_key_column_was_replaced(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    """Once: the input has no snapshot since then, by whose schema the column could be known."""
    totals = totals_of(orders, namespace)
    with project(lakehouse, orders.asset, totals) as p:
        lake = LakehouseResource.from_settings(p.lake.settings)
        orders.append(p, (at(1), "a", 1))
        published(p, totals)
        replace_column(p, orders, "account")
        assert consumer_backlog(totals, lake).has_any
        assert launch_all(p, Ticks(p), totals) == [None]
        assert values(p, totals) == []
        assert not consumer_backlog(totals, lake).has_any


def test_a_replaced_key_column_fails_the_run_by_default(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    totals = totals_of(orders, namespace, "fail")
    with project(lakehouse, orders.asset, totals) as p:
        orders.append(p, (at(1), "a", 1))
        published(p, totals)
        replace_column(p, orders, "account")
        p.run(totals.key, ok=False)
        p.failed_with(ChangeLost)
        metadata = p.lake.catalog().load_table(tuple(orders.key.path)).metadata
        with pytest.raises(ChangeLost) as lost:
            snapshots_since(metadata, recorded_input(p, totals), table="orders")
        assert lost.value.loss is LossReason.COLUMN_REPLACED
        assert lost.value.columns == {"account": 2}


def test_a_position_without_columns_goes_on(lakehouse: Lakehouse, namespace: str, orders: Source) -> None:
    """Former versions recorded no columns."""
    totals = totals_of(orders, namespace, "fail")
    with project(lakehouse, orders.asset, totals) as p:
        orders.append(p, (at(1), "a", 1))
        published(p, totals)
        forget_columns(p, totals)
        replace_column(p, orders, "account")
        orders.append(p, (at(3), 6, "c"))
        published(p, totals)
        assert values(p, totals) == [("a", 1), ("c", 6)]
        replace_column(p, orders, "account")
        p.run(totals.key, ok=False)
        p.failed_with(ChangeLost)


@pytest.mark.parametrize(
    ("pattern", "write", "how"),
    [
        ("range", {}, {}),
        ("rows", {"write_mode": "append"}, {}),
        ("keys", {"write_mode": "upsert", "keys": ["at", "account"]}, {"keys": ["account"], "on": "at"}),
    ],
    ids=["range", "rows", "keys"],
)
def test_all_partitions_are_computed_anew_if_their_column_was_replaced(
    lakehouse: Lakehouse, namespace: str, orders: Source, pattern: str, write: Any, how: Any
) -> None:
    copies = copies_of(orders, namespace, pattern, partitioned=True, write=write, when_lost="rebuild", **how)
    with project(lakehouse, orders.asset, copies) as p:
        ticks = Ticks(p)
        orders.append(p, (at(1), "a", 1), (at(2), "b", 2))
        launch_all(p, ticks, copies)
        assert len(values(p, copies)) == 2
        replace_column(p, orders, "at")
        assert sorted(map(str, launch_all(p, ticks, copies))) == DAYS.get_partition_keys()
        assert values(p, copies) == []
        orders.append(p, ("c", 3, at(2)))
        assert launch_all(p, ticks, copies) == ["2026-01-02"]
        assert values(p, copies) == [(at(2), "c", 3)]


def test_ranges_are_computed_anew_if_their_column_was_replaced(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    copies = copies_of(orders, namespace, "range", on="at", when_lost="rebuild")
    with project(lakehouse, orders.asset, copies) as p:
        orders.append(p, (at(1), "a", 1))
        published(p, copies)
        replace_column(p, orders, "at")
        orders.append(p, ("b", 2, at(2)))
        published(p, copies)
        stored = [tuple(row.values()) for row in p.rows(*copies.key.path)]
        assert sorted(stored, key=itemgetter(1)) == [(None, "a", 1), (at(2), "b", 2)]


def test_an_upsert_of_rows_is_computed_anew_if_its_key_column_was_replaced(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    """Removed rows have null in the new column, by which the results of the former keys cannot be found."""
    upsert = {"write_mode": "upsert", "keys": ["account"]}
    copies = copies_of(orders, namespace, "rows", write=upsert, when_lost="rebuild")
    with project(lakehouse, orders.asset, copies) as p:
        orders.append(p, (at(1), "a", 1))
        orders.append(p, (at(1), "b", 2))
        published(p, copies)
        replace_column(p, orders, "account")
        p.lake.catalog().load_table(tuple(orders.key.path)).delete("price = 1")
        published(p, copies)
        assert values(p, copies) == []


def test_appended_rows_stay_if_another_column_was_replaced(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    """As if the column was dropped: it does not decide what has changed."""
    copies = copies_of(orders, namespace, "rows", write={"write_mode": "append"})
    with project(lakehouse, orders.asset, copies) as p:
        lake = LakehouseResource.from_settings(p.lake.settings)
        orders.append(p, (at(1), "a", 1))
        published(p, copies)
        replace_column(p, orders, "account")
        assert not consumer_backlog(copies, lake).has_any
        orders.append(p, (at(2), 2, "b"))
        published(p, copies)
        assert values(p, copies) == [(at(1), "a", 1), (at(2), "b", 2)]


@pytest.mark.parametrize("partition_by", ["account", {"x": "account"}], ids=["column", "dimension"])
@pytest.mark.parametrize("on", [None, "account"])
def test_a_partition_column_of_a_table_without_partitions_of_its_asset_decides_nothing(
    lakehouse: Lakehouse, namespace: str, orders: Source, partition_by: Any, on: str | None
) -> None:
    write = {"write_mode": "append", "partition_by": partition_by}
    copies = copies_of(orders, namespace, rows(on=on), write=write)
    with project(lakehouse, orders.asset, copies) as p:
        lake = LakehouseResource.from_settings(p.lake.settings)
        orders.append(p, (at(1), "a", 1))
        published(p, copies)
        assert not recorded_input(p, copies).column_ids
        replace_column(p, orders, "account")
        assert consumer_backlog(copies, lake) == Unconsumed()


def test_an_upsert_of_rows_notices_a_key_column_that_was_missing_in_a_run(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    """The run between the drop and the addition keeps the id of the former column."""

    @dg.asset(
        key=[namespace, "copies"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({orders.key: "rows"}, when_lost="rebuild"),
    )
    def copies(orders: pl.DataFrame) -> pl.DataFrame:
        if "account" not in orders.columns:
            orders = orders.with_columns(account=pl.lit("unknown"))
        return orders.select("at", "account", "price").drop_nulls("account")

    with project(lakehouse, orders.asset, copies) as p:
        orders.append(p, (at(1), "a", 1))
        orders.append(p, (at(1), "b", 2))
        published(p, copies)
        table = p.lake.catalog().load_table(tuple(orders.key.path))
        with table.update_schema(allow_incompatible_changes=True) as update:
            update.delete_column("account")
        del orders.columns["account"]
        orders.append(p, (at(2), 9))
        published(p, copies)
        assert values(p, copies) == [(at(1), "a", 1), (at(1), "b", 2), (at(2), "unknown", 9)]
        table = p.lake.catalog().load_table(tuple(orders.key.path))
        with table.update_schema() as update:
            update.add_column("account", StringType())
        table.delete("price = 1")
        published(p, copies)
        assert values(p, copies) == []


def test_a_column_that_is_no_longer_declared_does_not_count(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    upsert: Any = {"write_mode": "upsert", "keys": ["account"]}
    copies = copies_of(orders, namespace, "rows", write=upsert)
    with project(lakehouse, orders.asset, copies) as p:
        orders.append(p, (at(1), "a", 1))
        published(p, copies)
    copies = copies_of(orders, namespace, "rows", write=upsert | {"keys": ["price"]})
    with project(lakehouse, orders.asset, copies) as p:
        lake = LakehouseResource.from_settings(p.lake.settings)
        replace_column(p, orders, "account")
        assert consumer_backlog(copies, lake) == Unconsumed()
        orders.append(p, (at(2), 2, "b"))
        published(p, copies)
        assert values(p, copies) == [(at(1), "a", 1), (at(2), "b", 2)]
        assert [name for name, _ in recorded_input(p, copies).column_ids] == ["price"]


def test_partitions_are_one_group_if_only_one_position_has_columns(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    copies = copies_of(orders, namespace, "rows", partitioned=True, write={"write_mode": "append"})
    with project(lakehouse, orders.asset, copies) as p:
        orders.append(p, (at(1), "a", 1), (at(2), "b", 2))
        published(p, copies, partition="2026-01-01")
        published(p, copies, partition="2026-01-02")
        forget_columns(p, copies)
        orders.append(p, (at(1), "a", 1), (at(2), "b", 2))
        consumption = consumption_of(p, copies, *DAYS.get_partition_keys())
        recorded = [consumption.find_record(partition) for partition in consumption.partitions]
        positions = {position for record in recorded if record for position in record.inputs.values()}
        assert len({position.snapshot_id for position in positions}) == 1 < len(positions)
        assert [group.partitions for group in consumption.groups] == [(*DAYS.get_partition_keys(),)]
        assert not consumption.skips_lost_changes


def test_run_keys_are_those_of_earlier_versions_until_a_column_is_replaced(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    totals = totals_of(orders, namespace)
    with project(lakehouse, orders.asset, totals) as p:
        orders.append(p, (at(1), "a", 1))
        metadata = p.lake.catalog().load_table(tuple(orders.key.path)).metadata
        position = f'{{"snapshot":{metadata.current_snapshot_id},"table":"{metadata.table_uuid}"}}'
        parts = ["", totals.key.to_user_string(), ".".join(orders.key.path), position, "", ""]
        assert state_key_of(p, totals) == sha256("|".join(parts).encode()).hexdigest()[:32]
        published(p, totals)
        key = state_key_of(p, totals)
        replace_column(p, orders, "account")
        assert state_key_of(p, totals) != key


def test_a_column_that_took_the_name_of_a_renamed_one_is_another_column(
    lakehouse: Lakehouse, namespace: str, orders: Source
) -> None:
    totals = totals_of(orders, namespace, "fail")
    with project(lakehouse, orders.asset, totals) as p:
        orders.append(p, (at(1), "a", 1))
        published(p, totals)
        table = p.lake.catalog().load_table(tuple(orders.key.path))
        with table.update_schema() as update:
            update.rename_column("account", "former_account")
        with table.update_schema() as update:
            update.add_column("account", StringType())
        with pytest.raises(ChangeLost) as lost:
            snapshots_since(table.metadata, recorded_input(p, totals), table="orders")
        assert lost.value.columns == {"account": 2}
