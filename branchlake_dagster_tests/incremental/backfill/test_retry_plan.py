"""What a retry of a backfill launches: decided from the progress of its stages."""

from __future__ import annotations

import io
from dataclasses import replace

import dagster as dg
import pytest
from rich.console import Console

from branchlake_dagster.automation.backfill_plan import Stage
from branchlake_dagster.automation.backfill_progress import (
    StageProgress,
    partition_states,
    requested_partitions,
)
from branchlake_dagster.automation.backfill_stages import LostStage, RetryPlan, StageRetry, plan_retry
from branchlake_dagster.cli.backfill import retry_to_dict, show_retry
from branchlake_dagster.internals.dagster import BackfillState

KEYS = [dg.AssetKey(name) for name in ("events", "daily", "total")]


def stage(number: int, failed: tuple[str | None, ...] = (), lost: int = 0) -> StageProgress:
    partitions = None if number == 2 else ("a", "b")
    its = Stage(number, KEYS[number], partitions, "why", launches_itself=number > 0)
    return StageProgress(its, 2, 0, 0, 0, len(failed), "told", lost, failed)


def test_a_backfill_without_failures_launches_nothing() -> None:
    plan = plan_retry([stage(0), stage(1), stage(2)], {}, rebuild_lost=True)
    assert (plan.launches, plan.lost_stages) == ((), ())


def test_failed_partitions_are_launched_stage_by_stage() -> None:
    plan = plan_retry([stage(0, ("b",)), stage(1, ("a",)), stage(2, (None,))], {}, rebuild_lost=False)
    assert [(one.number, one.asset, one.partitions, one.rebuild) for one in plan.launches] == [
        (0, KEYS[0], ("b",), True),  # as the first attempt of the first stage
        (1, KEYS[1], ("a",), False),
        (2, KEYS[2], (None,), False),
    ]


@pytest.mark.parametrize("rebuild", [True, False])
def test_what_is_lost_is_launched_only_when_it_is_asked_for(rebuild: bool) -> None:
    plan = plan_retry([stage(0), stage(1, lost=2)], {KEYS[1]: ["a", "b", "c"]}, rebuild_lost=rebuild)
    launched = [(one.asset, one.partitions, one.rebuild) for one in plan.launches]
    lost = [(one.asset, one.partitions) for one in plan.lost_stages]
    assert launched == ([(KEYS[1], ("a", "b", "c"), True)] if rebuild else [])
    assert lost == ([] if rebuild else [(KEYS[1], ("a", "b", "c"))])


def test_what_a_rebuild_does_not_help_stays_lost_and_what_is_rebuilt_is_left_alone() -> None:
    plan = plan_retry([stage(1, lost=2)], {KEYS[1]: []}, rebuild_lost=True)
    assert (plan.launches, [one.partitions for one in plan.lost_stages]) == ((), [()])
    plan = plan_retry([stage(1, lost=2)], {}, rebuild_lost=True)
    assert (plan.launches, plan.lost_stages) == ((), ())


FIRST = BackfillState(KEYS[0], "completed_failed", ("a", "b", "c"), ("a",), ("b", "c"), "")


def test_the_newest_backfill_of_a_partition_counts() -> None:
    again = BackfillState(KEYS[0], "requested", ("b", "c"), ("b",), (), "")
    assert partition_states([FIRST]) == {"a": "done", "b": "failed", "c": "failed"}
    assert partition_states([FIRST, again]) == {"a": "done", "b": "done", "c": "running"}
    failed = replace(again, status="completed_failed", failed=("c",))
    assert partition_states([FIRST, failed])["c"] == "failed"
    canceled = replace(again, status="canceled")
    assert partition_states([FIRST, canceled])["c"] == "failed"
    broken = replace(FIRST, status="failed", failed=())
    assert partition_states([broken]) == {"a": "done", "b": "failed", "c": "failed"}
    assert requested_partitions([again]) == {"c"}
    assert requested_partitions([canceled]) == set()


def test_a_backfill_without_partitions_is_reported_by_its_status() -> None:
    whole = BackfillState(KEYS[2], "completed_failed", None, (), (), "")
    assert partition_states([whole]) == {None: "failed"}
    assert partition_states([whole, replace(whole, status="requested")]) == {None: "running"}
    assert partition_states([whole, replace(whole, status="completed_success")]) == {None: "done"}


def test_what_was_launched_and_what_stays_lost_is_named() -> None:
    lost = [
        LostStage(1, KEYS[1], ("a",), "lost: It is gone. [table x.daily]"),
        LostStage(2, KEYS[2], (), "x"),
    ]
    done = RetryPlan((StageRetry(0, KEYS[0], ("b",), rebuild=True, backfill_id="abc"),), tuple(lost))
    console = Console(width=500, record=True, file=io.StringIO())
    show_retry(done, "first", "m.defs", console)
    shown = console.export_text()
    for part in ("events", "abc", "[table x.daily]", "--rebuild-lost", "backfill status first"):
        assert part in shown
    found = retry_to_dict(done)
    assert found["launched"][0]["partitions"] == ["b"]
    assert [one["asset"] for one in found["lost"]] == ["daily", "total"]
    console = Console(width=500, record=True, file=io.StringIO())
    show_retry(RetryPlan(), "first", "m.defs", console)
    assert "first" in console.export_text()
