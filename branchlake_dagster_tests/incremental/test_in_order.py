"""Partitions that are computed from the one before them: `from_start=True`, on real Iceberg tables without Spark."""

from datetime import UTC, date, datetime
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import consumes, table_metadata, unconsumed_change
from branchlake_dagster.automation.backfill_plan import plan_stages
from branchlake_dagster.automation.backfill_progress import load_consumer_progress
from branchlake_dagster.automation.backlog import ConsumerBacklog, iter_consumers
from branchlake_dagster.automation.launch_decision import LaunchPolicy, LaunchState
from branchlake_dagster.automation.partition_backlog import InFlightRuns, launch_decisions
from branchlake_dagster.internals.dagster import RANGE_END_TAG, RANGE_START_TAG, RUN_KEY_TAG
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.approval import Approvals, approve_run
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import APPROVAL_REQUIRED
from branchlake_dagster.stored_names import EventMetadata, RunTag
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.sources import FREE, Source, published, values
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-04")
BETA = pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")
DAY_BEFORE = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)


@pytest.fixture
def events(namespace: str) -> Source:
    found = Source(namespace, "events")
    found.columns = {"day": pl.Date, "price": pl.Int64}
    return found


def at(day: int) -> date:
    return date(2026, 8, day)


def totals_of(namespace: str, events: Source, **options: Any) -> dg.AssetsDefinition:
    """A running total: of each day that of the day before it, and the prices of the day."""

    @dg.asset(
        key=[namespace, "totals"],
        partitions_def=DAYS,
        ins={
            "events": dg.AssetIn(events.key),
            "before": dg.AssetIn([namespace, "totals"], partition_mapping=DAY_BEFORE),
        },
        metadata=table_metadata(partition_by="day", **FREE)
        | consumes({events.key: "range"}, from_start=True),
        **options,
    )
    def totals(context: dg.AssetExecutionContext, events: pl.DataFrame, before: pl.DataFrame) -> pl.DataFrame:
        total = before["total"].sum() if before.height else 0
        rows: list[tuple[date, int]] = []
        for key in context.partition_keys:
            day = date.fromisoformat(key)
            total += events.filter(pl.col("day") == day)["price"].sum()
            rows.append((day, total))
        return pl.DataFrame(rows, schema={"day": pl.Date, "total": pl.Int64}, orient="row")

    return totals


def launch(p: Project, asset: dg.AssetsDefinition, request: dg.RunRequest) -> None:
    published(p, asset, partition=request.partition_key, tags=dict(request.tags))


def launched(p: Project, asset: dg.AssetsDefinition, ticks: Ticks) -> list[str | None]:
    """The partitions of the runs that one tick after the other launches, one each, until nothing is left."""
    seen: list[str | None] = []
    while requests := ticks.tick():
        (request,) = requests
        seen.append(request.partition_key)
        launch(p, asset, request)
    return seen


def by_day(p: Project, asset: dg.AssetsDefinition) -> list[int]:
    return [row[1] for row in values(p, asset)]


def test_a_late_row_is_followed_day_by_day(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    totals = totals_of(namespace, events)

    with project(lakehouse, events.asset, totals) as p:
        ticks = Ticks(p, target=[totals])
        events.append(p, (at(1), 1), (at(2), 2), (at(3), 4))
        assert launched(p, totals, ticks) == ["2026-08-01", "2026-08-02", "2026-08-03"]
        assert by_day(p, totals) == [1, 3, 7]
        events.append(p, (at(1), 10))
        assert launched(p, totals, ticks) == ["2026-08-01", "2026-08-02", "2026-08-03"]
        assert by_day(p, totals) == [11, 13, 17]
        events.append(p, (at(2), 100))
        assert launched(p, totals, ticks) == ["2026-08-02", "2026-08-03"]
        assert by_day(p, totals) == [11, 113, 117]


def test_each_day_waits_for_the_one_before_it(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    totals = totals_of(namespace, events)
    with project(lakehouse, events.asset, totals) as p:
        events.append(p, (at(1), 1), (at(2), 2), (at(3), 4))
        (asset,) = iter_consumers(p.graph, "default", [totals.key])
        standing = ConsumerBacklog(
            LakehouseResource.from_settings(lakehouse.settings), asset.consumer, instance=p.instance
        )
        now = datetime.now(UTC)
        found = launch_decisions(
            totals.key,
            standing,
            p.instance,
            InFlightRuns(p.instance, now),
            LaunchPolicy(),
            now,
            approvals=Approvals(p.instance),
        )
        assert [(one, its.state, its.earlier_partition) for one, its in found] == [
            ("2026-08-01", LaunchState.DUE, ""),
            ("2026-08-02", LaunchState.WAITS_FOR_EARLIER, "2026-08-01"),
            ("2026-08-03", LaunchState.WAITS_FOR_EARLIER, "2026-08-01"),
        ]
        stages = plan_stages(p.graph, lakehouse, totals.key, ["2026-08-02"], reason="asked for")
        assert [(one.number, one.asset, one.partitions, one.launches_itself) for one in stages] == [
            (0, totals.key, ("2026-08-02",), False),
            (1, totals.key, ("2026-08-03",), True),
        ]


@BETA
def test_one_run_computes_all_days_that_follow(lakehouse: Lakehouse, namespace: str, events: Source) -> None:
    totals = totals_of(namespace, events, backfill_policy=dg.BackfillPolicy.single_run())
    with project(lakehouse, events.asset, totals) as p:
        ticks = Ticks(p, target=[totals])
        for rows in ([(at(1), 1), (at(2), 2), (at(3), 4)], [(at(2), 10)]):
            events.append(p, *rows)
            (request,) = ticks.tick()
            launch(p, totals, request)
            assert ticks.tick() == []
        assert (request.tags[RANGE_START_TAG], request.tags[RANGE_END_TAG]) == ("2026-08-02", "2026-08-03")
        assert by_day(p, totals) == [1, 13, 17]


@BETA
@pytest.mark.parametrize(("policy", "count"), [(None, 1), (dg.BackfillPolicy.single_run(), 3)])
def test_the_condition_is_true_for_the_days_that_one_run_can_compute(
    lakehouse: Lakehouse, namespace: str, events: Source, policy: dg.BackfillPolicy | None, count: int
) -> None:
    condition = unconsumed_change(lakehouse.settings)
    totals = totals_of(namespace, events, backfill_policy=policy, automation_condition=condition)
    with project(lakehouse, events.asset, totals) as p:
        events.append(p, (at(1), 1), (at(2), 2), (at(3), 4))
        found = dg.evaluate_automation_conditions(
            defs=[events.asset, totals],
            instance=p.instance,
            asset_selection=dg.AssetSelection.assets(totals.key),
        )
        assert found.total_requested == count


@BETA
def test_all_days_of_a_run_that_fails_have_failed(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    totals = totals_of(namespace, events, backfill_policy=dg.BackfillPolicy.single_run())
    with project(lakehouse, events.asset, totals) as p:
        lake = LakehouseResource.from_settings(lakehouse.settings)
        events.append(p, (at(1), 1), (at(2), 2), (at(3), 4))
        (request,) = Ticks(p, target=[totals]).tick()
        _, stage = plan_stages(p.graph, lakehouse, events.key, None, reason="asked for")

        def found() -> tuple[int, int, int]:
            in_flight = InFlightRuns(p.instance, datetime.now(UTC))
            its = load_consumer_progress(stage, p.graph, lake, p.instance, in_flight, must_wait=False)
            return its.left_count, its.running_count, len(its.failed_partitions)

        job = p.definitions.resolve_implicit_global_asset_job_def()
        tags = {**request.tags, RUN_KEY_TAG: str(request.run_key)}
        assert found() == (3, 0, 0)
        run = p.instance.create_run_for_job(job, asset_selection={totals.key}, tags=tags)
        assert found() == (0, 3, 0)
        p.instance.report_run_failed(run)
        assert found() == (0, 0, 3)


def test_a_day_that_is_computed_too_early_is_computed_again(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    totals = totals_of(namespace, events)

    with project(lakehouse, events.asset, totals) as p:
        ticks = Ticks(p, target=[totals])
        events.append(p, (at(1), 1), (at(2), 2), (at(3), 4))
        assert launched(p, totals, ticks) == ["2026-08-01", "2026-08-02", "2026-08-03"]
        events.append(p, (at(1), 10))
        published(p, totals, partition="2026-08-03")
        (event,) = p.last.get_asset_materialization_events()
        assert EventMetadata.WAITS_FOR_PARTITION in event.materialization.metadata
        first, second = p.run(totals.key, partition="2026-08-01"), p.run(totals.key, partition="2026-08-02")
        p.settle(second)
        p.settle(first)
        assert launched(p, totals, ticks) == ["2026-08-02", "2026-08-03"]
        assert by_day(p, totals) == [11, 13, 17]
        # A result that is computed anew leads to those after it, although no input has changed.
        published(p, totals, partition="2026-08-02", tags={RunTag.REBUILD: "true"})
        assert launched(p, totals, ticks) == ["2026-08-03"]
        assert by_day(p, totals) == [11, 13, 17]


def test_a_day_whose_change_waits_for_approval_holds_up_those_after_it(
    lakehouse: Lakehouse, namespace: str, events: Source
) -> None:
    totals = totals_of(namespace, events)
    with project(lakehouse, events.asset, totals) as p:
        ticks = Ticks(p, target=[totals])
        events.append(p, (at(1), 1), (at(2), 2), (at(3), 4))
        assert launched(p, totals, ticks) == ["2026-08-01", "2026-08-02", "2026-08-03"]
        events.rows = [(at(2), 10)]
        run_id = p.run(events.key, tags={RunTag.APPROVAL: APPROVAL_REQUIRED})
        p.settle(run_id)
        events.append(p, (at(1), 100))
        assert launched(p, totals, ticks) == ["2026-08-01"]
        assert by_day(p, totals) == [101, 3, 7]
        run = p.instance.get_run_by_id(run_id)
        assert run is not None
        approve_run(p.instance, run)
        assert launched(p, totals, ticks) == ["2026-08-02", "2026-08-03"]
        assert by_day(p, totals) == [101, 113, 117]
