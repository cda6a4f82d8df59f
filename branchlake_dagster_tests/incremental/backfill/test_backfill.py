"""A backfill through three stages on real Iceberg tables: planned, launched, followed to its end."""

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from branchlake_dagster.automation.backfill_progress import StageProgress, load_consumer_progress
from branchlake_dagster.automation.backfill_stages import RetryPlan
from branchlake_dagster.automation.backlog import ConsumerBacklog, iter_consumers
from branchlake_dagster.automation.partition_backlog import InFlightRuns
from branchlake_dagster.cli import backfill
from branchlake_dagster.cli.main import main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import fail_backfill
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import BulkActionStatus
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline, follow, place
from branchlake_dagster_tests.incremental.sources import values
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.incremental.test_sensor_retries import launch
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse


def test_a_backfill_goes_through_all_stages(p: Project, pipeline: Pipeline) -> None:
    where, asset = place(p), pipeline.events.key.to_user_string()
    what = backfill.build_request(where, asset, ["2026-08-02"], everything=False)
    assert what is not None
    stages = backfill.plan_request(where, what)
    assert [(one.asset.path[-1], one.partitions, one.launches_itself) for one in stages] == [
        ("events", ("2026-08-02",), False),
        ("daily", ("2026-08-02",), True),
        ("report", None, False),
        ("total", None, True),
    ]
    assert [(one.number, one.rows) for one in stages] == [(0, 2), (1, 1), (2, 0), (2, 2)]
    number = backfill.launch_request(where, what, time.time())
    launched = p.instance.get_backfill(number)
    assert launched is not None
    assert launched.tags["branchlake/rebuild"] == "true"
    first, second, report, third = backfill.report_stage_progress(where, number)
    assert (first.planned_count, first.done_count, first.running_count) == (1, 0, 1)
    assert second.message == third.message
    assert second.message.startswith("waits")
    assert "launch it" in report.message
    # What Dagster's daemon does, and then what the sensor does.
    pipeline.factor = 7
    p.settle(p.run(pipeline.events.key, partition="2026-08-02", tags=dict(launched.tags)))
    _, second, _, _ = backfill.report_stage_progress(where, number)
    assert (second.done_count, second.left_count) == (0, 1)
    assert follow(p) == ["daily 2026-08-02", "total"]
    _, second, _, third = backfill.report_stage_progress(where, number)
    assert (second.left_count, third.left_count) == (0, 0)
    assert [row[1] for row in values(p, pipeline.total)] == [22, 154]


def test_partitions_of_an_older_code_version_are_stale(
    p: Project, pipeline: Pipeline, namespace: str
) -> None:
    asset = pipeline.events.key.to_user_string()
    assert backfill.build_request(place(p), asset, [], everything=False) is None
    newer = Pipeline(namespace, factor=2)
    with project(p.lake, *newer.assets) as again:
        where = backfill.LocationContext(
            again.graph, LakehouseResource.from_settings(p.lake.settings), p.instance
        )
        what = backfill.build_request(where, asset, [], everything=False)
        assert what is not None
        assert what.partitions == ("2026-08-01", "2026-08-02")
        assert "older code version than 2" in what.why
    with raising(ConfigurationError, reason="no_code_version", subject=pipeline.daily.key.to_user_string()):
        backfill.build_request(place(p), pipeline.daily.key.to_user_string(), [], everything=False)


def test_mistakes_are_reported(p: Project, pipeline: Pipeline) -> None:
    where = place(p)
    with raising(ConfigurationError, reason="unknown_asset", subject="nobody"):
        backfill.build_request(where, "nobody", ["x"], everything=False)
    wrong = backfill.build_request(
        where, pipeline.events.key.to_user_string(), ["1999-01-01"], everything=False
    )
    assert wrong is not None
    with raising(ConfigurationError, reason="unknown_partitions", partitions=("1999-01-01",)):
        backfill.plan_request(where, wrong)
    with raising(ConfigurationError, reason="unknown_backfill", subject="gone"):
        backfill.report_stage_progress(where, "gone")


MODULE = """
import dagster as dg
import polars as pl
from branchlake_dagster import table_metadata

@dg.asset(key=["{namespace}", "events"], metadata=table_metadata(require_checks=False))
def events() -> pl.DataFrame:
    return pl.DataFrame({{"n": [1]}})

defs = dg.Definitions(assets=[events])
"""


@pytest.mark.nessie
def test_the_commands(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"m_{namespace}.py").write_text(MODULE.format(namespace=namespace))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["backfill", *arguments, "-m", f"m_{namespace}"])
        assert result.exit_code == 0, result.output
        return result.output

    assert "requested" in call("plan", f"{namespace}/events", "--all")
    number = call("run", f"{namespace}/events", "--all", "--approval").split()[1].rstrip(".")
    assert f"{namespace}/events" in call("status", number)
    (stage,) = json.loads(call("status", number, "--json"))
    assert (stage["done"], stage["planned"]) == (0, 1)
    assert json.loads(call("retry", number, "--json")) == {"launched": [], "lost": []}
    assert number in call("retry", number)
    assert f"{namespace}/events" in call("compare", number)
    (compared,) = json.loads(call("compare", number, f"{namespace}/events", "--json"))
    assert compared["total"]["rows_after"] == 0
    (stage,) = json.loads(call("status", number, "--json"))
    assert (stage["held"], stage["comparison"]) == (0, None)
    approved = CliRunner().invoke(main, ["backfill", "approve", number, "--json"])
    assert json.loads(approved.output) == {"approved": [], "unpublished": []}
    missing = CliRunner().invoke(main, ["backfill", "plan", "x", "-m", "no_such_module"])
    assert missing.exit_code == 1
    assert "no_such_module" in missing.output


def stage_of(p: Project, pipeline: Pipeline, asset: dg.AssetsDefinition) -> StageProgress:
    """What a backfill of the events of two days says of a stage that launches itself."""
    where, days = place(p), ["2026-08-01", "2026-08-02"]
    what = backfill.build_request(where, pipeline.events.key.to_user_string(), days, everything=False)
    assert what is not None
    (stage,) = [one for one in backfill.plan_request(where, what) if one.asset == asset.key]
    in_flight = InFlightRuns(p.instance, datetime.now(UTC))
    return load_consumer_progress(stage, p.graph, where.lake, p.instance, in_flight, must_wait=False)


def test_a_follower_that_failed_is_not_to_do(p: Project, pipeline: Pipeline) -> None:
    """The sensor launches nothing twice for the same state, so it waits for a person."""
    pipeline.factor = 2
    for day in ("2026-08-01", "2026-08-02"):
        p.settle(p.run(pipeline.events.key, partition=day))
    before = stage_of(p, pipeline, pipeline.daily)
    assert (before.left_count, before.failed_count, before.done_count) == (2, 0, 0)
    (asset,) = iter_consumers(p.graph, "lake", [pipeline.daily.key])
    lake = LakehouseResource.from_settings(p.lake.settings)
    key = ConsumerBacklog(lake, asset.consumer, instance=p.instance).state_key("2026-08-01")
    pipeline.broken = True
    failed = p.run(pipeline.daily.key, partition="2026-08-01", tags={"dagster/run_key": key}, ok=False)
    p.settle(failed)
    after = stage_of(p, pipeline, pipeline.daily)
    assert (after.left_count, after.failed_count, after.done_count) == (1, 1, 0)
    pipeline.broken = False
    p.settle(p.run(pipeline.daily.key, partition="2026-08-01"))
    mended = stage_of(p, pipeline, pipeline.daily)
    assert (mended.left_count, mended.failed_count, mended.done_count) == (1, 0, 1)


def test_a_follower_whose_change_is_lost_is_not_done(p: Project, pipeline: Pipeline) -> None:
    table = p.lake.catalog().load_table(tuple(pipeline.daily.key.path))
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    lost = stage_of(p, pipeline, pipeline.total)
    assert (lost.lost_count, lost.done_count, lost.left_count) == (1, 0, 0)


DAYS = ["2026-08-01", "2026-08-02"]


def backfilled(p: Project, pipeline: Pipeline) -> str:
    """A backfill whose first stage is published, and not yet looked at by Dagster's daemon; its id."""
    where = place(p)
    what = backfill.build_request(where, pipeline.events.key.to_user_string(), DAYS, everything=False)
    assert what is not None
    number = backfill.launch_request(where, what, time.time())
    pipeline.factor = 2
    for day in DAYS:
        p.settle(p.run(pipeline.events.key, partition=day))
    return number


def retried(p: Project, number: str, *, rebuild_lost: bool = False) -> RetryPlan:
    return backfill.retry_backfill(place(p), number, time.time(), rebuild_lost=rebuild_lost)


def closed(p: Project, number: str | None) -> Mapping[str, str]:
    """The tags of a backfill, which is closed as Dagster's daemon would."""
    found = p.instance.get_backfill(number or "")
    assert found is not None
    p.instance.update_backfill(found.with_status(BulkActionStatus.COMPLETED_SUCCESS))
    return found.tags


def test_failed_partitions_are_launched_again_once(p: Project, pipeline: Pipeline) -> None:
    number = backfilled(p, pipeline)
    assert retried(p, number).launches == ()
    pipeline.broken = True
    for request in Ticks(p, target=[pipeline.daily]).tick():
        launch(p, request, ok=False)
    status = {one.stage.asset: one for one in backfill.report_stage_progress(place(p), number)}
    assert status[pipeline.daily.key].failed_partitions == tuple(DAYS)
    (launched,) = retried(p, number).launches
    assert (launched.number, launched.asset, launched.partitions, launched.rebuild) == (
        1,
        pipeline.daily.key,
        tuple(DAYS),
        False,
    )
    assert retried(p, number).launches == ()  # the daemon has not come to it yet
    status = {one.stage.asset: one for one in backfill.report_stage_progress(place(p), number)}
    assert (status[pipeline.daily.key].running_count, status[pipeline.daily.key].failed_count) == (2, 0)
    pipeline.broken = False
    tags = closed(p, launched.backfill_id)
    assert (tags[RunTag.RETRY_OF], RunTag.REBUILD in tags) == (number, False)
    for day in DAYS:
        p.settle(p.run(pipeline.daily.key, partition=day, tags=dict(tags)))
    closed(p, number)
    assert follow(p) == ["total"]
    assert [row[1] for row in values(p, pipeline.total)] == [44, 44]
    assert retried(p, number).launches == ()


def test_a_retry_that_fails_can_be_retried(p: Project, pipeline: Pipeline) -> None:
    number = backfilled(p, pipeline)
    pipeline.broken = True
    first, _ = Ticks(p, target=[pipeline.daily]).tick()
    launch(p, first, ok=False)
    (launched,) = retried(p, number).launches
    assert launched.partitions == (first.partition_key,)
    tags = closed(p, launched.backfill_id)
    second = p.run(pipeline.daily.key, partition=first.partition_key, tags=dict(tags), ok=False)
    p.settle(second)
    status = {one.stage.asset: one for one in backfill.report_stage_progress(place(p), number)}
    assert f"run {second[:8]}" in status[pipeline.daily.key].message
    (again,) = retried(p, number).launches
    assert again.partitions == launched.partitions
    assert again.backfill_id != launched.backfill_id


def test_failed_partitions_of_the_first_stage_are_computed_anew(p: Project, pipeline: Pipeline) -> None:
    number = backfilled(p, pipeline)
    found = p.instance.get_backfill(number)
    assert found is not None
    fail_backfill(p.instance, found, p.graph, [(pipeline.events.key, DAYS[1])])
    (launched,) = retried(p, number).launches
    assert (launched.number, launched.partitions, launched.rebuild) == (0, (DAYS[1],), True)
    tags = p.instance.get_backfill(launched.backfill_id or "").tags
    assert tags[RunTag.REBUILD] == "true"
    (first, *_) = backfill.report_stage_progress(place(p), number)
    assert (first.failed_count, first.running_count) == (0, 1)


def test_what_is_lost_is_rebuilt_only_when_it_is_asked_for(p: Project, pipeline: Pipeline) -> None:
    number = backfilled(p, pipeline)
    table = p.lake.catalog().load_table(tuple(pipeline.daily.key.path))
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    found = retried(p, number)
    assert found.launches == ()
    # The sums have lost their own rows, of days outside the backfill too, and the total their change.
    every = tuple(pipeline.days.get_partition_keys())
    assert [(one.asset, one.partitions) for one in found.lost_stages] == [
        (pipeline.daily.key, every),
        (pipeline.total.key, (None,)),
    ]
    found = retried(p, number, rebuild_lost=True)
    assert found.lost_stages == ()
    assert [(one.asset, one.partitions, one.rebuild) for one in found.launches] == [
        (pipeline.daily.key, every, True),
        (pipeline.total.key, (None,), True),
    ]
    assert retried(p, number, rebuild_lost=True) == RetryPlan()  # under way
    for one in found.launches:
        tags = closed(p, one.backfill_id)
        for day in one.partitions:
            p.settle(p.run(one.asset, partition=day, tags=dict(tags)))
    status = backfill.report_stage_progress(place(p), number)
    assert [one.lost_count for one in status] == [0, 0, 0, 0]
    assert [row[1] for row in values(p, pipeline.total)] == [44, 44]
