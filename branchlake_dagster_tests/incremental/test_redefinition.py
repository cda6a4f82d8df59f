"""Consumers stay right when their partitions, inputs or `main` change; on real Iceberg tables without Spark."""

from datetime import date, datetime
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import consumer_backlog, consumes, read_changes, table_metadata
from branchlake_dagster.automation.backlog import iter_consumers
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.tables.errors import InputColumnGone
from branchlake_dagster_tests.harness import Project, assign_main, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

# The second of August 2026 is a Sunday, on which weeks begin: its key is that of a day and of a week.
DAYS = dg.DailyPartitionsDefinition("2026-08-02", end_date="2026-08-09")
WEEKS = dg.WeeklyPartitionsDefinition("2026-08-02", end_date="2026-08-09")


def day(number: int) -> date:
    return date(2026, 8, number)


@pytest.fixture
def events(namespace: str) -> Source:
    found = Source(namespace, "events")
    found.columns = {"day": pl.Date, "price": pl.Int64}
    return found


def lines_of(
    events: Source, namespace: str, partitions: dg.PartitionsDefinition[str] | None, **how: Any
) -> dg.AssetsDefinition:
    """The rows of the input, appended."""
    by = {"partition_by": "day"} if partitions is not None else {}

    @dg.asset(
        key=[namespace, "lines"],
        partitions_def=partitions,
        ins={"events": dg.AssetIn(events.key)},
        metadata=table_metadata(write_mode="append", **by, **FREE) | consumes({events.key: "rows"}, **how),
    )
    def lines(events: pl.DataFrame) -> pl.DataFrame:
        return events

    return lines


def catch_up(p: Project, asset: dg.AssetsDefinition) -> None:
    """Run what the sensor launches until it launches nothing."""
    for _ in range(10):
        requests = Ticks(p, target=[asset]).tick()
        if not requests:
            return
        for one in requests:
            tags = {"dagster/run_key": one.run_key or ""}
            published(p, asset, tags=tags, **({"partition": one.partition_key} if one.partition_key else {}))
    pytest.fail("it never catches up")


def test_days_become_weeks(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    """The week whose key is that of a day, which was ahead of the others, has not consumed the others."""
    by_day, by_week = lines_of(events, namespace, DAYS), lines_of(events, namespace, WEEKS)
    with project(lakehouse, events.asset, by_day) as p:
        events.append(p, (day(2), 1), (day(3), 2))
        published(p, by_day, partition="2026-08-02")
        assert values(p, by_day) == [(day(2), 1)]
    with project(lakehouse, events.asset, by_week) as p:
        catch_up(p, by_week)
        assert values(p, by_week) == [(day(2), 1), (day(3), 2)]


def test_days_ahead_of_the_others_become_weeks(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    by_day, by_week = lines_of(events, namespace, DAYS), lines_of(events, namespace, WEEKS)
    with project(lakehouse, events.asset, by_day) as p:
        events.append(p, (day(2), 1), (day(3), 2))
        catch_up(p, by_day)
        events.append(p, (day(3), 3), (day(4), 4))
        published(p, by_day, partition="2026-08-03")
    with project(lakehouse, events.asset, by_week) as p:
        catch_up(p, by_week)
        assert values(p, by_week) == [(day(2), 1), (day(3), 2), (day(3), 3), (day(4), 4)]


def test_days_become_a_table_without_partitions(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    by_day, whole = lines_of(events, namespace, DAYS), lines_of(events, namespace, None)
    with project(lakehouse, events.asset, by_day) as p:
        events.append(p, (day(1), 0), (day(2), 1), (day(3), 2))
        catch_up(p, by_day)
        events.append(p, (day(3), 3), (day(4), 4))
        published(p, by_day, partition="2026-08-03")
    with project(lakehouse, events.asset, whole) as p:
        catch_up(p, whole)
        expected = [(day(1), 0), (day(2), 1), (day(3), 2), (day(3), 3), (day(4), 4)]
        assert values(p, whole) == expected


def test_a_table_without_partitions_gets_days(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    by_day, whole = lines_of(events, namespace, DAYS), lines_of(events, namespace, None)
    with project(lakehouse, events.asset, whole) as p:
        events.append(p, (day(2), 1), (day(3), 2))
        catch_up(p, whole)
    with project(lakehouse, events.asset, by_day) as p:
        catch_up(p, by_day)
        assert values(p, by_day) == [(day(2), 1), (day(3), 2)]


def test_another_time_zone(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    events.columns = {"day": pl.Datetime("us", "UTC"), "price": pl.Int64}
    there = dg.DailyPartitionsDefinition("2026-08-02", end_date="2026-08-09", timezone="Asia/Tokyo")
    here, moved = lines_of(events, namespace, DAYS), lines_of(events, namespace, there)
    with project(lakehouse, events.asset, here) as p:
        events.append(p, (datetime(2026, 8, 2, 3), 1), (datetime(2026, 8, 3, 22), 2))
        published(p, here, partition="2026-08-02")
        published(p, here, partition="2026-08-03")
        events.append(p, (datetime(2026, 8, 3, 23), 3))
        published(p, here, partition="2026-08-03")
    with project(lakehouse, events.asset, moved) as p:
        catch_up(p, moved)
        assert [row[1] for row in values(p, moved)] == [1, 2, 3]


def test_the_own_table_is_rolled_back_between_two_runs_of_a_partition(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    lines = lines_of(events, namespace, DAYS, when_lost="rebuild")
    with project(lakehouse, events.asset, lines) as p:
        events.append(p, (day(2), 1), (day(3), 1))
        catch_up(p, lines)
        events.append(p, (day(2), 2))
        published(p, lines, partition="2026-08-02")
        table = lakehouse.catalog().load_table((namespace, "lines"))
        line = [one.snapshot_id for one in table.metadata.snapshots]
        for to in line[:-1][::-1]:
            table = lakehouse.catalog().load_table((namespace, "lines"))
            table.manage_snapshots().rollback_to_snapshot(to).commit()
            events.append(p, (day(2), 3))
            catch_up(p, lines)
            rows = sorted(tuple(one.values()) for one in p.rows(*events.key.path))
            assert values(p, lines) == rows


@pytest.mark.parametrize("partition", ["2026-08-02", None])
def test_the_own_table_is_rolled_back_while_a_run_is_at_work(
    lakehouse: Lakehouse, namespace: str, events: Source, partition: str | None
) -> None:
    """What the run records as consumed would hide the rows that are gone: it is refused."""
    lines = lines_of(events, namespace, DAYS if partition else None, when_lost="rebuild")
    with project(lakehouse, events.asset, lines) as p:
        events.append(p, (day(2), 1), (day(3), 1))
        catch_up(p, lines)
        to = lakehouse.catalog().load_table((namespace, "lines")).metadata.snapshots[-1].snapshot_id
        events.append(p, (day(2), 2))
        p.settle(p.run(lines.key, partition=partition))
        events.append(p, (day(2), 3))
        at_work = p.run(lines.key, partition=partition)
        table = lakehouse.catalog().load_table((namespace, "lines"))
        table.manage_snapshots().rollback_to_snapshot(to).commit()
        assert p.settle(at_work).state == RunState.REFUSED
        catch_up(p, lines)
        rows = sorted(tuple(one.values()) for one in p.rows(*events.key.path))
        assert values(p, lines) == rows


def test_rows_of_a_day_that_is_no_partition_yet(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    short = dg.DailyPartitionsDefinition("2026-08-02", end_date="2026-08-04")
    before, after = lines_of(events, namespace, short), lines_of(events, namespace, DAYS)
    with project(lakehouse, events.asset, before) as p:
        events.append(p, (day(2), 1), (day(5), 5))
        catch_up(p, before)
        assert values(p, before) == [(day(2), 1)]
        events.append(p, (day(6), 6))
        catch_up(p, before)
        assert not consumer_backlog(before, LakehouseResource.from_settings(lakehouse.settings)).has_any
    with project(lakehouse, events.asset, after) as p:
        assert consumer_backlog(after, LakehouseResource.from_settings(lakehouse.settings)).has_any
        catch_up(p, after)
        assert values(p, after) == [(day(2), 1), (day(5), 5), (day(6), 6)]


def test_a_dynamic_partition_that_is_added_later(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    events.columns = {"day": pl.String, "price": pl.Int64}
    parts = dg.DynamicPartitionsDefinition(name=f"parts_{namespace}")
    lines = lines_of(events, namespace, parts)
    with project(lakehouse, events.asset, lines) as p:
        p.instance.add_dynamic_partitions(parts.name or "", ["a"])
        events.append(p, ("a", 1), ("b", 2))
        catch_up(p, lines)
        assert values(p, lines) == [("a", 1)]
        p.instance.add_dynamic_partitions(parts.name or "", ["b"])
        catch_up(p, lines)
        assert values(p, lines) == [("a", 1), ("b", 2)]


def test_a_day_that_leaves_the_partitions_and_comes_back_without_rows(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    """Its rows in the consumer's table have to go, though its input has none by which it could be found."""
    short = dg.DailyPartitionsDefinition("2026-08-02", end_date="2026-08-04")
    before, without, after = (lines_of(events, namespace, days) for days in (DAYS, short, DAYS))
    with project(lakehouse, events.asset, before) as p:
        events.append(p, (day(2), 1), (day(5), 5))
        catch_up(p, before)
    with project(lakehouse, events.asset, without) as p:
        lakehouse.catalog().load_table(tuple(events.key.path)).delete("price = 5")
        events.append(p, (day(2), 2))
        catch_up(p, without)
    with project(lakehouse, events.asset, after) as p:
        assert consumer_backlog(after, LakehouseResource.from_settings(lakehouse.settings)).has_any
        catch_up(p, after)
        assert values(p, after) == [(day(2), 1), (day(2), 2)]


def test_a_dynamic_partition_that_is_removed_and_added_again(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    events.columns = {"day": pl.String, "price": pl.Int64}
    parts = dg.DynamicPartitionsDefinition(name=f"parts_{namespace}")
    lines = lines_of(events, namespace, parts)
    with project(lakehouse, events.asset, lines) as p:
        p.instance.add_dynamic_partitions(parts.name or "", ["a", "b"])
        events.append(p, ("a", 1), ("b", 2))
        catch_up(p, lines)
        p.instance.delete_dynamic_partition(parts.name or "", "b")
        lakehouse.catalog().load_table(tuple(events.key.path)).delete("price = 2")
        events.append(p, ("a", 3))
        catch_up(p, lines)
        p.instance.add_dynamic_partitions(parts.name or "", ["b"])
        catch_up(p, lines)
        assert values(p, lines) == [("a", 1), ("a", 3)]


@pytest.mark.nessie
def test_main_is_set_back_to_before_the_consumers_run(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    """Only commits of this test are taken from `main`, which other tests of the worker use as well."""
    lines = lines_of(events, namespace, None)
    with project(lakehouse, events.asset, lines) as p:
        events.append(p, (day(2), 1))
        catch_up(p, lines)
        events.append(p, (day(3), 2))
        before = lakehouse.nessie.reference(MAIN).hash
        catch_up(p, lines)
        assign_main(lakehouse, before)
        assert values(p, lines) == [(day(2), 1)]
        catch_up(p, lines)
        assert values(p, lines) == [(day(2), 1), (day(3), 2)]


def test_the_first_snapshot_of_an_input_of_the_same_run_expires(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    lines = lines_of(events, namespace, None)
    with project(lakehouse, events.asset, lines) as p:
        for number in (2, 3):
            events.rows = [(day(number), 1)]
            p.settle(p.run(events.key, lines.key))
        table = lakehouse.catalog().load_table(tuple(events.key.path))
        first = table.metadata.snapshots[0].snapshot_id
        events.append(p, (day(4), 1))
        table = lakehouse.catalog().load_table(tuple(events.key.path))
        table.maintenance.expire_snapshots().by_id(first).commit()
        catch_up(p, lines)
        assert values(p, lines) == [(day(number), 1) for number in (2, 3, 4)]


def test_ranges_over_dates_and_time_stamps(lakehouse: Lakehouse, namespace: str) -> None:
    days, moments, local = (Source(namespace, name) for name in ("days", "moments", "local"))
    days.columns = {"at": pl.Date, "price": pl.Int64}
    moments.columns = {"at": pl.Datetime("us", "UTC"), "price": pl.Int64}
    local.columns = {"at": pl.Datetime("us"), "price": pl.Int64}

    @dg.asset(
        key=[namespace, "sums"],
        ins={name: dg.AssetIn([namespace, name]) for name in ("days", "moments", "local")},
        metadata=table_metadata(**FREE)
        | consumes({one.key: "range" for one in (days, moments, local)}, on="at", into="day"),
    )
    def sums(days: pl.DataFrame, moments: pl.DataFrame, local: pl.DataFrame) -> pl.DataFrame:
        every = [one.with_columns(day=pl.col("at").cast(pl.Date)) for one in (days, moments, local)]
        rows = pl.concat([one.select("day", "price") for one in every])
        return rows.group_by("day").agg(pl.col("price").sum())

    with project(lakehouse, days.asset, moments.asset, local.asset, sums) as p:
        days.append(p, (day(2), 1), (day(3), 1))
        moments.append(p, (datetime(2026, 8, 2, 12), 10))
        local.append(p, (datetime(2026, 8, 3, 12), 100))
        catch_up(p, sums)
        days.append(p, (day(4), 1))
        moments.append(p, (datetime(2026, 8, 3, 1), 10))
        local.append(p, (datetime(2026, 8, 4, 1), 100))
        catch_up(p, sums)
        assert values(p, sums) == [(day(2), 11), (day(3), 111), (day(4), 101)]


def sums_of(source: Source, namespace: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "sums"],
        ins={"orders": dg.AssetIn(source.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], **FREE)
        | consumes({source.key: "keys"}, keys=["account"]),
    )
    def sums(orders: pl.DataFrame) -> pl.DataFrame:
        return orders.group_by("account").agg(pl.col("price").sum())

    return sums


def test_a_run_without_changed_keys_opens_no_data_file(lakehouse: Lakehouse, namespace: str) -> None:
    orders = Source(namespace)
    sums = sums_of(orders, namespace)
    with project(lakehouse, orders.asset, sums) as p:
        orders.append(p, ("a", 1))
        published(p, sums)
        table = lakehouse.catalog().load_table(tuple(orders.key.path))
        for task in table.scan().plan_files():
            table.io.delete(task.file.file_path)
        published(p, sums)
        assert values(p, sums) == [("a", 1)]


@pytest.mark.parametrize("pattern", ["keys", "range"])
def test_a_column_that_decides_what_changed_is_renamed(
    lakehouse: Lakehouse, namespace: str, pattern: str
) -> None:
    orders = Source(namespace)
    orders.columns = {"account": pl.String, "day": pl.Date, "price": pl.Int64}

    @dg.asset(
        key=[namespace, "sums"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=(
            table_metadata(write_mode="upsert", keys=["account"], **FREE)
            | consumes({orders.key: "keys"}, keys=["account"])
            if pattern == "keys"
            else table_metadata(**FREE) | consumes({orders.key: "range"}, on="day")
        ),
    )
    def sums(orders: pl.DataFrame) -> pl.DataFrame:
        by = "account" if pattern == "keys" else "day"
        return orders.group_by(by).agg(pl.col("price").sum())

    renamed = "account" if pattern == "keys" else "day"
    with project(lakehouse, orders.asset, sums) as p:
        orders.append(p, ("a", day(2), 1))
        published(p, sums)
        orders.append(p, ("a", day(3), 1))
        with lakehouse.catalog().load_table(tuple(orders.key.path)).update_schema() as update:
            update.rename_column(renamed, "other")
        p.run(sums.key, ok=False)
        p.failed_with(InputColumnGone)
        (asset,) = iter_consumers(p.graph, "lake", [sums.key])
        with pytest.raises(InputColumnGone) as caught:
            _ = Consumption(LakehouseResource.from_settings(lakehouse.settings), asset.consumer).inputs
        assert (caught.value.column, caught.value.renamed_to) == (renamed, "other")


def test_an_asset_that_writes_its_partitions_by_itself(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    """The change tables of a run hold the rows of its partitions, also for a first run."""

    @dg.asset(
        key=[namespace, "lines"],
        partitions_def=DAYS,
        deps=[events.key],
        metadata=table_metadata(write_mode="append", partition_by="day", **FREE)
        | consumes({events.key: "rows"}, when_removed="deliver"),
    )
    def lines(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> None:
        catalog = lakehouse.catalog()

        def rows(name: str) -> pa.Table:
            return catalog.load_table(tuple(name.replace("`", "").split(".")[1:])).scan().to_arrow()

        with read_changes(context, lakehouse) as changes:
            added = rows(changes.added(events.key))
            table = catalog.create_table_if_not_exists((namespace, "lines"), schema=added.schema)
            own = f"day = '{context.partition_key}'"
            if changes.whole and table.scan(row_filter=own).count():
                table.delete(own)
            if not changes.whole:
                for gone in rows(changes.removed(events.key)).to_pylist():
                    table.delete(f"day = '{gone['day']}' and price = {gone['price']}")
            table.append(added)

    with project(lakehouse, events.asset, lines) as p:
        events.append(p, (day(2), 1), (day(3), 1))
        catch_up(p, lines)
        events.append(p, (day(2), 2), (day(3), 3), (day(4), 4))
        catch_up(p, lines)
        expected = [(day(2), 1), (day(2), 2), (day(3), 1), (day(3), 3), (day(4), 4)]
        assert values(p, lines) == expected
        lakehouse.catalog().load_table(tuple(events.key.path)).delete("price = 3 or price = 2")
        catch_up(p, lines)
        assert values(p, lines) == [(day(2), 1), (day(3), 1), (day(4), 4)]


def test_a_new_partition_is_computed_from_an_input_without_its_column(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    """Such an input may have rows for each partition, also for one that comes later."""
    rates = Source(namespace, "rates")
    rates.columns = {"rate": pl.Int64}

    def paid_of(days: dg.PartitionsDefinition[str]) -> dg.AssetsDefinition:
        @dg.asset(
            key=[namespace, "paid"],
            partitions_def=days,
            ins={name: dg.AssetIn([namespace, name]) for name in ("events", "rates")},
            metadata=table_metadata(partition_by="day", **FREE)
            | consumes({events.key: "range", rates.key: "range"}),
        )
        def paid(events: pl.DataFrame, rates: pl.DataFrame) -> pl.DataFrame:
            return events.with_columns(price=pl.col("price") * rates["rate"].sum())

        return paid

    short = dg.DailyPartitionsDefinition("2026-08-02", end_date="2026-08-04")
    before, after = paid_of(short), paid_of(DAYS)
    with project(lakehouse, events.asset, rates.asset, before) as p:
        events.append(p, (day(2), 1), (day(5), 5))
        rates.append(p, (10,))
        catch_up(p, before)
        assert values(p, before) == [(day(2), 10)]
    with project(lakehouse, events.asset, rates.asset, after) as p:
        catch_up(p, after)
        assert values(p, after) == [(day(2), 10), (day(5), 50)]
