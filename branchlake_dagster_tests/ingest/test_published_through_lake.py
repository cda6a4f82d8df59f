"""Up to which time ingested tables are published, on real servers: the condition and the check."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.ingest import batch_assets
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.published_through import PublishedTime, published_through, published_time
from branchlake_dagster.ingest.published_through_check import published_through_check
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.run_publication import RunOutcome, publish
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.kafka import Broker, Message

MIDNIGHT = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
"""The end of the partition that is waited for; records are in the hour before it and after it."""
DAY = MIDNIGHT - timedelta(days=1)
DAYS = dg.DailyPartitionsDefinition(DAY)


def an_ingestion(topic: str, **more: Any) -> Ingest:
    name = f"i{uuid.uuid4().hex[:8]}"
    tables = [IngestTable(key=[name, kind], columns={"id": "bigint"}, route=kind) for kind in ("a", "b")]
    return Ingest(name=name, topics=[topic], tables=tables, route_by="kind", **more)


def at(minutes: float, kind: str = "a", partition: int = 0) -> Message:
    """A record of so many minutes after midnight."""
    moment = MIDNIGHT + timedelta(minutes=minutes)
    value = json.dumps({"id": 1, "kind": kind}).encode()
    return Message(value, partition=partition, at=int(moment.timestamp() * 1000))


def time_of(lake: Lakehouse, ingest: Ingest, kind: str) -> PublishedTime:
    return published_time(lake.nessie, lake.catalog("main"), (ingest.name, kind), "lake")


def test_all_tables_of_an_ingestion_are_published_through_its_time(
    driving: Driving, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_assets, "ingests_by_name", declared := dict[str, Ingest]())
    monkeypatch.setattr("branchlake_dagster.ingest.published_through.ingests_by_name", declared)
    topic = kafka.topic(partitions=2)
    ingest = an_ingestion(topic)
    drive = driving(ingest)
    assert time_of(drive.lake, ingest, "a").at is None
    kafka.send(topic, [at(-50), at(-40), at(-30)])
    drive.batch()
    assert time_of(drive.lake, ingest, "a").at is None, "a partition has had no record"
    kafka.send(topic, [at(-35, partition=1)])
    drive.batch()
    assert time_of(drive.lake, ingest, "a").at == MIDNIGHT - timedelta(minutes=35)
    # A table without rows says nothing of itself: the declaration does.
    assert time_of(drive.lake, ingest, "b") == PublishedTime(
        None, time_of(drive.lake, ingest, "b").reason, False
    )
    declared[ingest.name] = ingest
    assert time_of(drive.lake, ingest, "b").at == MIDNIGHT - timedelta(minutes=35)
    # And a table without rows in the newest batches is as far as the others, in any code location.
    kafka.send(topic, [at(-20, "b"), at(-10, "b", partition=1)])
    drive.batch()
    declared.clear()
    for kind in ("a", "b"):
        assert time_of(drive.lake, ingest, kind).at == MIDNIGHT - timedelta(minutes=20)


def test_a_table_that_has_to_be_filled_again_is_published_through_no_time(
    driving: Driving, kafka: Broker
) -> None:
    topic = kafka.topic()
    ingest = an_ingestion(topic, on_rollback="replay")
    drive = driving(ingest)
    for minutes in (-50, -40):
        kafka.send(topic, [at(minutes), at(minutes, "b")])
        drive.batch()
    table = drive.table(0)
    table.manage_snapshots().rollback_to_snapshot(table.history()[0].snapshot_id).commit()
    assert time_of(drive.lake, ingest, "a").at is None
    assert time_of(drive.lake, ingest, "b").at == MIDNIGHT - timedelta(minutes=40)
    drive.batch()
    assert time_of(drive.lake, ingest, "a").at == MIDNIGHT - timedelta(minutes=40)


def test_an_idle_partition_does_not_hold_the_time_back(driving: Driving, kafka: Broker) -> None:
    topic = kafka.topic(partitions=2)
    drive = driving(an_ingestion(topic, idle_after=timedelta(days=365)))
    kafka.send(topic, [at(-50)])
    drive.batch()
    assert time_of(drive.lake, drive.ingest, "a").at == MIDNIGHT - timedelta(minutes=50)


def test_a_partition_is_requested_once_the_ingestion_has_passed_its_end(
    driving: Driving, kafka: Broker
) -> None:
    topic = kafka.topic()
    drive = driving(an_ingestion(topic))
    table, settings = f"{drive.ingest.name}.a", drive.lake.settings

    @dg.asset(partitions_def=DAYS, automation_condition=published_through(table, settings=settings))
    def daily() -> None: ...

    @dg.asset(automation_condition=published_through(table, MIDNIGHT, settings=settings))
    def at_midnight() -> None: ...

    def requested() -> set[Any]:
        with dg.DagsterInstance.ephemeral() as instance:
            defs = dg.Definitions(assets=[daily, at_midnight])
            found = dg.evaluate_automation_conditions(defs, instance, dg.AssetSelection.all())
            return {
                *found.get_requested_partitions(daily.key),
                *found.get_requested_partitions(at_midnight.key),
            }

    assert requested() == set()
    kafka.send(topic, [at(-50), at(-0.001)])
    drive.batch()
    assert requested() == set()
    kafka.send(topic, [at(0)])
    drive.batch()
    assert requested() == {None, DAY.strftime("%Y-%m-%d")}


@pytest.mark.parametrize("severity", ["error", "warn"])
def test_a_run_that_read_too_early_is_not_published(driving: Driving, kafka: Broker, severity: Any) -> None:
    topic = kafka.topic()
    drive = driving(an_ingestion(topic))
    name = drive.ingest.name

    @dg.asset(key=[name, "daily"], partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
    def daily(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_time_window.start.date()], "n": [1]})

    check = published_through_check(daily, f"{name}.a", severity=severity)
    defs = branchlake_definitions(
        lakehouse=LakehouseResource.from_settings(drive.lake.settings),
        definitions=dg.Definitions(assets=[daily], asset_checks=[check], executor=dg.in_process_executor),
    )
    with new_instance() as instance:

        def run() -> tuple[RunOutcome, dg.AssetCheckEvaluation]:
            job = defs.resolve_implicit_global_asset_job_def()
            result = job.execute_in_process(instance=instance, partition_key=DAY.strftime("%Y-%m-%d"))
            (evaluation,) = result.get_asset_check_evaluations()
            return publish(result, defs, instance=instance), evaluation

        kafka.send(topic, [at(-50)])
        drive.batch()
        outcome, evaluation = run()
        assert not evaluation.passed
        assert evaluation.metadata["branchlake/wanted_through"].value == MIDNIGHT.timestamp()
        assert (
            evaluation.metadata["branchlake/valid_through"].value
            == (MIDNIGHT - timedelta(minutes=50)).timestamp()
        )
        assert outcome.status == ("blocked" if severity == "error" else "published")
        kafka.send(topic, [at(0)])
        drive.batch()
        outcome, evaluation = run()
        assert evaluation.passed
        assert outcome.published
