"""A backfill whose stages wait until the results before them are approved, on real Iceberg tables."""

import time
from collections.abc import Sequence
from typing import Any

import dagster as dg
import pytest

from branchlake_dagster import approve_backfill_job
from branchlake_dagster.automation.backfill_progress import StageProgress
from branchlake_dagster.automation.backfill_stages import approve_results
from branchlake_dagster.cli import backfill
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import fail_backfill
from branchlake_dagster.runs.run_tags import APPROVAL_GIVEN, APPROVAL_REQUIRED
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import NotApproved
from branchlake_dagster_tests.harness import Project, retry
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline, place, requested
from branchlake_dagster_tests.incremental.sources import values
from branchlake_dagster_tests.incremental.test_incremental_sensor import Ticks
from branchlake_dagster_tests.incremental.test_sensor_retries import launch
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

DAYS = ("2026-08-01", "2026-08-02")


def wanted(requests: Sequence[dg.RunRequest]) -> list[tuple[str, str | None]]:
    """The assets and partitions of runs that a tick requests."""
    return sorted((one.asset_selection[0].path[-1], one.partition_key) for one in requests)


def approval_of(p: Project, run_id: str) -> str | None:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return run.tags.get(RunTag.APPROVAL)


def status_of(p: Project, number: str, asset: dg.AssetsDefinition) -> StageProgress:
    (found,) = [
        one for one in backfill.report_stage_progress(place(p), number) if one.stage.asset == asset.key
    ]
    return found


def backfilled(p: Project, pipeline: Pipeline, *days: str) -> str:
    """A backfill that wants approval, with its first stage published; its id."""
    number, tags = requested(p, pipeline, *days, approval=True)
    pipeline.factor = 7
    for day in days:
        p.settle(p.run(pipeline.events.key, partition=day, tags=dict(tags)))
    return number


def in_dagster(p: Project, number: str, *assets: str) -> Any:
    """What the job on Dagster's page does."""
    config = {"ops": {"approve_backfill_op": {"config": {"backfill": number, "assets": [*assets]}}}}
    return approve_backfill_job().execute_in_process(config, instance=p.instance, raise_on_error=False)


def test_each_stage_waits_until_the_one_before_it_is_approved(p: Project, pipeline: Pipeline) -> None:
    number = backfilled(p, pipeline, *DAYS)
    ticks = Ticks(p)
    assert ticks.tick() == []
    assert f"branchlake backfill approve {number}" in ticks.why
    assert Ticks(p).tick() == []  # a sensor that was started again
    daily = status_of(p, number, pipeline.daily)
    assert (daily.left_count, daily.held_partitions, daily.approval_ids) == (2, DAYS, (number,))
    (compared,) = backfill.compare_held_stages(
        place(p), number, backfill.report_stage_progress(place(p), number)
    )
    whole = compared.total
    assert (compared.asset, whole.before.rows, whole.after.rows) == (pipeline.events.key, 4, 4)
    assert (whole.share, whole.sums["price"]) == (1.0, (22, 154))

    assert len(approve_results(p.instance, number).approved_runs) == 2
    requests = ticks.tick()
    assert wanted(requests) == [("daily", DAYS[0]), ("daily", DAYS[1])]
    runs = [launch(p, one) for one in requests]
    for run_id in runs:
        run = p.instance.get_run_by_id(run_id)
        assert run is not None
        assert (run.tags[RunTag.APPROVAL], run.tags[RunTag.FOLLOWS]) == (APPROVAL_REQUIRED, number)
    assert ticks.tick() == []
    assert status_of(p, number, pipeline.daily).left_count == 0
    assert status_of(p, number, pipeline.total).held_partitions == (None,)

    assert in_dagster(p, number, "another/asset").success
    assert ticks.tick() == []
    assert in_dagster(p, number, pipeline.daily.key.to_user_string()).success
    assert [approval_of(p, one) for one in runs] == [APPROVAL_GIVEN, APPROVAL_GIVEN]
    (last,) = ticks.tick()
    launch(p, last)
    assert ticks.tick() == []
    assert [row[1] for row in values(p, pipeline.total)] == [154, 154]
    assert status_of(p, number, pipeline.total).left_count == 0


def test_other_partitions_go_on_while_one_waits(p: Project, pipeline: Pipeline) -> None:
    number = backfilled(p, pipeline, DAYS[0])
    p.settle(p.run(pipeline.events.key, partition="2026-08-03"))
    ticks = Ticks(p, target=[pipeline.daily])
    (request,) = ticks.tick()
    assert request.partition_key == "2026-08-03"
    assert approval_of(p, launch(p, request)) is None
    assert ticks.tick() == []
    assert number in ticks.why
    # What was published since the last approval has been seen by nobody.
    approve_results(p.instance, number)
    (request,) = ticks.tick()
    tags = {"dagster/backfill": number, RunTag.APPROVAL: APPROVAL_REQUIRED}
    p.settle(p.run(pipeline.events.key, partition=DAYS[0], tags=tags))
    assert ticks.tick() == []
    # A run that was launched before that does not take it along either.
    late = {**request.tags, "dagster/run_key": str(request.run_key)}
    failed = p.run(pipeline.daily.key, partition=DAYS[0], tags=late, ok=False)
    p.failed_with(NotApproved)
    p.settle(failed)
    approve_results(p.instance, number)
    (request,) = ticks.tick()
    launch(p, request)
    assert [row[1] for row in values(p, pipeline.daily)] == [77, 11, 77]


def test_a_re_execution_of_a_run_that_the_sensor_launched_does_not_wait(
    p: Project, pipeline: Pipeline
) -> None:
    backfilled(p, pipeline, DAYS[0])
    failed = p.run(pipeline.daily.key, partition=DAYS[0], tags={RunTag.HELD_UNTIL_APPROVED: "true"}, ok=False)
    p.failed_with(NotApproved)
    again = retry(p, failed)
    p.settle(again)
    assert approval_of(p, again) == APPROVAL_REQUIRED
    assert [row[1] for row in values(p, pipeline.daily)] == [77, 11]


def test_what_is_not_approved_can_be_rolled_back(p: Project, pipeline: Pipeline) -> None:
    table = p.lake.catalog().load_table(tuple(pipeline.events.key.path))
    before = table.metadata.current_snapshot_id
    assert before is not None
    number = backfilled(p, pipeline, DAYS[0])
    ticks = Ticks(p)
    assert ticks.tick() == []
    table.refresh().manage_snapshots().rollback_to_snapshot(before).commit()
    assert ticks.tick() == []
    assert "nothing to consume" in ticks.why
    assert status_of(p, number, pipeline.daily).held_partitions == ()
    with pytest.raises(ConfigurationError):
        approve_results(p.instance, "nobody")


def test_what_is_launched_again_of_such_a_backfill_waits_too(p: Project, pipeline: Pipeline) -> None:
    number, _ = requested(p, pipeline, DAYS[0], approval=True)
    found = p.instance.get_backfill(number)
    assert found is not None
    fail_backfill(p.instance, found, p.graph, [(pipeline.events.key, DAYS[0])])
    (launched,) = backfill.retry_backfill(place(p), number, time.time(), rebuild_lost=False).launches
    again = p.instance.get_backfill(launched.backfill_id or "")
    assert again is not None
    assert (again.tags[RunTag.APPROVAL], again.tags[RunTag.FOLLOWS]) == (APPROVAL_REQUIRED, number)
