"""Retries of consumers whose runs failed, and what the asset's page says of them, on real Iceberg tables."""

import time
from datetime import date
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.automation.partition_backlog import SHOWN_PARTITIONS
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_sensor import DAYS, Ticks
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


class Daily:
    """A consumer by day whose steps fail for the days in `broken`."""

    def __init__(self, namespace: str, days: dg.PartitionsDefinition[str] = DAYS) -> None:
        self.broken: set[str] = set()
        self.events = Source(namespace, "events")
        self.events.columns = {"day": pl.Date, "price": pl.Int64}

        @dg.asset(
            key=[namespace, "daily"],
            partitions_def=days,
            ins={"events": dg.AssetIn(self.events.key)},
            metadata=table_metadata(partition_by="day", **FREE) | consumes({self.events.key: "range"}),
        )
        def daily(context: dg.AssetExecutionContext, events: pl.DataFrame) -> pl.DataFrame:
            if context.partition_key in self.broken:
                raise ValueError("It fails.")
            return events.group_by("day").agg(pl.col("price").sum())

        self.asset = daily


def launch(p: Project, request: dg.RunRequest, *, ok: bool = True) -> str:
    """What Dagster does with a request; the run's id."""
    (key,) = request.asset_selection or ()
    tags = {**request.tags, "dagster/run_key": str(request.run_key)}
    run = p.run(key, partition=request.partition_key, tags=tags, ok=ok)
    p.settle(run)
    return run


def table_of(observation: dg.AssetObservation) -> list[dict[str, Any]]:
    return [dict(one.data) for one in observation.metadata[EventMetadata.UNCONSUMED_PARTITIONS].value.records]


def test_a_failed_partition_is_launched_again_under_keys_of_its_own(
    lakehouse: Lakehouse, namespace: str
) -> None:
    daily = Daily(namespace)
    daily.broken = {"2026-08-01"}
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        for number in (1, 2):
            daily.events.append(p, (date(2026, 8, number), number))
        ticks = Ticks(p, target=[daily.asset], retries=2, retry_delay_seconds=0.0)
        first, second = ticks.tick()
        assert [one.partition_key for one in (first, second)] == ["2026-08-01", "2026-08-02"]
        launch(p, second)
        launch(p, first, ok=False)
        (again,) = ticks.tick()
        (repeated,) = ticks.tick()
        assert again.run_key == repeated.run_key != first.run_key
        assert (again.partition_key, again.tags[RunTag.RETRY]) == ("2026-08-01", "1")
        launch(p, again, ok=False)
        (last,) = ticks.tick()
        assert last.run_key not in (first.run_key, again.run_key)
        daily.broken.clear()
        launch(p, last)
        assert ticks.tick() == []
        assert "nothing to consume" in ticks.why
        assert [row[1] for row in values(p, daily.asset)] == [1, 2]


def test_no_more_than_the_retries_are_launched_and_the_next_change_is(
    lakehouse: Lakehouse, namespace: str
) -> None:
    daily = Daily(namespace)
    daily.broken = {"2026-08-01"}
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        daily.events.append(p, (date(2026, 8, 1), 1))
        ticks = Ticks(p, target=[daily.asset], retries=1, retry_delay_seconds=0.0)
        for _ in range(2):
            (request,) = ticks.tick()
            run = launch(p, request, ok=False)
        assert ticks.tick() == []
        (told,) = ticks.told
        (row,) = table_of(told)
        assert run[:8] in row["launch"]
        assert ticks.tick() == []
        assert ticks.told == []  # the page says it already
        daily.events.append(p, (date(2026, 8, 1), 1))
        assert len(ticks.tick()) == 1


def test_without_retries_or_before_the_delay_a_failed_run_waits(lakehouse: Lakehouse, namespace: str) -> None:
    daily = Daily(namespace)
    daily.broken = {"2026-08-01"}
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        daily.events.append(p, (date(2026, 8, 1), 1))
        (request,) = Ticks(p, target=[daily.asset]).tick()
        launch(p, request, ok=False)
        assert Ticks(p, target=[daily.asset]).tick() == []
        assert Ticks(p, target=[daily.asset], retries=3, retry_delay_seconds=3600.0).tick() == []
        assert len(Ticks(p, target=[daily.asset], retries=3, retry_delay_seconds=0.0).tick()) == 1


@pytest.mark.parametrize("fate", ["blocked", "refused"])
def test_a_refused_run_is_tried_again_and_a_blocked_one_is_not(
    lakehouse: Lakehouse, namespace: str, fate: str
) -> None:
    orders = Source(namespace)

    @dg.asset(
        key=[namespace, "spent"],
        ins={"orders": dg.AssetIn(orders.key)},
        metadata=table_metadata(write_mode="upsert", keys=["account"], require_checks=False)
        | consumes({orders.key: "keys"}, keys=["account"]),
        check_specs=[dg.AssetCheckSpec("good", asset=dg.AssetKey([namespace, "spent"]), blocking=False)],
    )
    def spent(orders: pl.DataFrame) -> Any:
        result = orders.group_by("account").agg(pl.col("price").sum())
        yield dg.Output(result)
        yield dg.AssetCheckResult(passed=fate != "blocked", check_name="good")

    with project(lakehouse, orders.asset, spent) as p:
        orders.append(p, ("a", 1))
        if fate == "refused":
            published(p, spent)
            orders.append(p, ("a", 2))
        ticks = Ticks(p, target=[spent], retries=1, retry_delay_seconds=0.0)
        (request,) = ticks.tick()
        run = p.run(spent.key, tags={"dagster/run_key": str(request.run_key)})
        if fate == "refused":  # somebody else has written to the table meanwhile
            lakehouse.catalog().load_table((namespace, "spent")).delete("account = 'a'")
        p.settle(run)
        record = p.instance.get_run_by_id(run)
        assert record is not None
        assert record.tags[RunTag.STATUS] == fate
        assert len(ticks.tick()) == (1 if fate == "refused" else 0)


def test_the_page_lists_each_partition_with_what_it_has_left(lakehouse: Lakehouse, namespace: str) -> None:
    daily = Daily(namespace, dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-09-01"))
    with project(lakehouse, daily.events.asset, daily.asset) as p:
        daily.events.append(p, (date(2026, 8, 1), 1))
        published(p, daily.asset, partition="2026-08-01")
        daily.events.append(p, (date(2026, 8, 1), 1), (date(2026, 8, 1), 2))
        daily.events.append(p, (date(2026, 8, 2), 3))
        time.sleep(1)  # ages are whole seconds
        ticks = Ticks(p, target=[daily.asset], min_rows=100)
        ticks.tick()
        (told,) = ticks.told
        rows = {row["partition"]: row for row in table_of(told)}
        assert {key: (row["rows"], row["files"]) for key, row in rows.items()} == {
            "2026-08-01": (2, 1),
            "2026-08-02": (1, 1),
        }
        assert all(row["age_s"] > 0 and "min_rows=100" in row["launch"] for row in rows.values())
        assert f"{namespace}.events@" in rows["2026-08-01"]["position"]
        daily.events.append(p, *((date(2026, 8, number), number) for number in range(1, 32)))
        ticks.tick()
        (told,) = ticks.told
        assert len(table_of(told)) == SHOWN_PARTITIONS
        assert told.metadata[EventMetadata.UNCONSUMED_PARTITION_COUNT].value == 31
