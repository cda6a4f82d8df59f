"""Waiting for the valid-through time of consumers on real Iceberg tables, without Spark and without Kafka."""

from datetime import UTC, date, datetime
from typing import Any

import dagster as dg
import polars as pl

from branchlake_dagster import consumes, table_metadata
from branchlake_dagster.cli.consumers import gather_consumers
from branchlake_dagster.ingest.offsets import TableProgress, TopicPartition
from branchlake_dagster.ingest.published_through import published_through
from branchlake_dagster.ingest.published_through_check import published_through_check
from branchlake_dagster.internals.pyiceberg import open_transaction
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-08-02", end_date="2026-08-09")


def day(number: int) -> date:
    return date(2026, 8, number)


def copy_of(key: dg.AssetKey, namespace: str, name: str) -> dg.AssetsDefinition:
    """The rows of an input, by day."""

    @dg.asset(
        key=[namespace, name],
        partitions_def=DAYS,
        ins={"rows": dg.AssetIn(key)},
        metadata=table_metadata(write_mode="append", partition_by="day", **FREE) | consumes({key: "rows"}),
    )
    def copy(rows: pl.DataFrame) -> pl.DataFrame:
        return rows

    return copy


def test_a_condition_and_a_check_wait_for_two_stages_of_consumers(
    lakehouse: Lakehouse, namespace: str
) -> None:
    orders = Source(namespace)
    orders.columns = {"day": pl.Date, "price": pl.Int64}
    silver = copy_of(orders.key, namespace, "silver")
    gold = copy_of(silver.key, namespace, "gold")

    @dg.asset(
        key=[namespace, "revenue"],
        partitions_def=DAYS,
        deps=[gold],
        metadata=table_metadata(partition_by="day"),
        automation_condition=published_through(gold.key, settings=lakehouse.settings),
    )
    def revenue(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_time_window.start.date()], "n": [1]})

    check = published_through_check(revenue, gold.key)

    def ingest(p: Project, through: datetime, *rows: Any) -> None:
        """What an ingestion does to its table: rows, and then its property."""
        orders.publish(p, *rows)
        table = lakehouse.catalog().load_table(tuple(orders.key.path))
        snapshot = table.metadata.current_snapshot_id
        ms = int(through.timestamp() * 1000)
        recorded = TableProgress({TopicPartition("orders", "id", 0): ms}, "commit", "run", ms, snapshot)
        with open_transaction(table) as transaction:
            transaction.set_properties({f"{LakeProperty.OFFSETS_PREFIX}orders": recorded.to_json()})

    def requested(p: Project) -> set[Any]:
        found = dg.evaluate_automation_conditions(
            p.definitions, p.instance, dg.AssetSelection.assets(revenue)
        )
        return {*found.get_requested_partitions(revenue.key)}

    def evaluation(p: Project) -> dg.AssetCheckEvaluation:
        (found,) = p.last.get_asset_check_evaluations()
        return found

    noon, midnight = datetime(2026, 8, 3, 12, tzinfo=UTC), datetime(2026, 8, 4, tzinfo=UTC)
    with project(lakehouse, orders.asset, silver, gold, revenue, check) as p:
        ingest(p, noon, (day(2), 1), (day(3), 2))
        assert requested(p) == set()
        for asset in (silver, gold):
            published(p, asset, partition="2026-08-02")
            published(p, asset, partition="2026-08-03")
        assert requested(p) == {"2026-08-02"}

        ingest(p, midnight, (day(3), 3))
        assert requested(p) == {"2026-08-02"}
        published(p, silver, partition="2026-08-03")
        assert requested(p) == {"2026-08-02"}, "the second stage has not consumed them yet"
        early = p.run(revenue.key, partition="2026-08-03")
        assert not evaluation(p).passed
        assert evaluation(p).metadata["branchlake/valid_through"].value == noon.timestamp()
        assert p.settle(early).state == RunState.BLOCKED
        published(p, gold, partition="2026-08-03")
        assert requested(p) == {"2026-08-02", "2026-08-03"}
        in_time = p.run(revenue.key, partition="2026-08-03")
        assert evaluation(p).passed
        assert p.settle(in_time).state == RunState.PUBLISHED

        ingest(p, datetime(2026, 8, 5, 1, tzinfo=UTC), (day(4), 4))
        together = p.run(silver.key, gold.key, revenue.key, partition="2026-08-04")
        assert evaluation(p).passed, "the run sees what its own steps have consumed"
        assert p.settle(together).state == RunState.PUBLISHED
        assert requested(p) == {"2026-08-02", "2026-08-03", "2026-08-04"}

        (event,) = p.instance.fetch_materializations(gold.key, limit=1).records
        assert event.asset_materialization is not None
        through = datetime(2026, 8, 5, 1, tzinfo=UTC)
        assert event.asset_materialization.metadata["branchlake/valid_through"].value == through.timestamp()
        shown = {
            one["table"]: one["valid_through"] for one in gather_consumers(lakehouse.settings)["consumers"]
        }
        assert shown[f"{namespace}.gold"] == through.isoformat()
