"""Which results wait for approval, and what an approval is about: decided from tags alone."""

from __future__ import annotations

from typing import Any

import dagster as dg

from branchlake_dagster.automation.backfill_stages import plan_approval
from branchlake_dagster.internals.dagster import (
    AUTOMATION_CONDITION_TAG,
    BACKFILL_ID_TAG,
    PARTITION_TAG,
    RETRY_NUMBER_TAG,
)
from branchlake_dagster.runs.approval import approval_names, inherited_approval_tags, requires_approval
from branchlake_dagster.runs.run_tags import (
    APPROVAL_GIVEN,
    APPROVAL_REQUIRED,
    RunLocation,
    build_opening_tags,
)
from branchlake_dagster.stored_names import RunTag

WAITS = {RunTag.APPROVAL: APPROVAL_REQUIRED}
DAILY = dg.AssetKey("daily")


def run(run_id: str, *, published: bool = True, **options: Any) -> dg.DagsterRun:
    tags = {RunTag.BRANCH: f"run-{run_id}", RunTag.OPENED_BY: run_id, **WAITS, **options.pop("tags", {})}
    if published:
        tags[RunTag.PUBLICATION] = "abc"
    return dg.DagsterRun("job", run_id, tags=tags, **options)


def test_a_result_is_approved_as_its_backfills_or_as_its_run() -> None:
    assert approval_names("r", WAITS) == ("r",)
    assert approval_names("r", {**WAITS, BACKFILL_ID_TAG: "b"}) == ("b",)
    assert approval_names("r", {**WAITS, BACKFILL_ID_TAG: "b", RunTag.FOLLOWS: "first,second"}) == (
        "first",
        "second",
    )


def test_the_result_of_what_consumes_it_waits_too() -> None:
    assert inherited_approval_tags({}, []) == {}
    assert inherited_approval_tags({}, [("r", {BACKFILL_ID_TAG: "b"})]) == {}
    approved = {RunTag.APPROVAL: APPROVAL_GIVEN, BACKFILL_ID_TAG: "b"}
    new = {RunTag.APPROVAL: APPROVAL_REQUIRED, RunTag.FOLLOWS: "b"}
    assert inherited_approval_tags({}, [("r", approved), ("s", approved)]) == new
    assert inherited_approval_tags(new, [("r", approved)]) == {}  # a second step of the same run
    both = [("r", approved), ("s", {**WAITS, BACKFILL_ID_TAG: "c"})]
    assert inherited_approval_tags({}, both)[RunTag.FOLLOWS] == "b,c"


def test_a_run_of_two_backfills_belongs_to_both() -> None:
    own = {**WAITS, BACKFILL_ID_TAG: "c"}
    assert inherited_approval_tags(own, [("r", {**WAITS, BACKFILL_ID_TAG: "b"})]) == {RunTag.FOLLOWS: "c,b"}


def test_an_approval_is_not_inherited_by_a_re_execution() -> None:
    again = build_opening_tags(
        "two", RunLocation("run-two", "0"), {RunTag.APPROVAL: APPROVAL_GIVEN, RunTag.OPENED_BY: "one"}
    )
    assert again[RunTag.APPROVAL] == APPROVAL_REQUIRED
    assert RunTag.APPROVAL not in build_opening_tags("two", RunLocation("run-two", "0"), {})


def test_a_run_of_the_sensor_requires_approval_and_its_re_execution_by_a_person_does_not() -> None:
    held = {RunTag.HELD_UNTIL_APPROVED: "true"}
    assert requires_approval(run("one", tags=held))
    assert not requires_approval(run("two"))
    assert not requires_approval(run("three", tags=held, root_run_id="one", parent_run_id="one"))
    assert requires_approval(run("five", tags={AUTOMATION_CONDITION_TAG: "true"}))
    by_dagster = {**held, RETRY_NUMBER_TAG: "1"}
    assert requires_approval(run("four", tags=by_dagster, root_run_id="one", parent_run_id="one"))


def test_only_what_is_on_main_is_approved() -> None:
    of_backfill = {BACKFILL_ID_TAG: "b"}
    there = run("one", tags=of_backfill)
    started = run("two", tags=of_backfill, published=False)
    failed = run("three", tags=of_backfill, published=False, status=dg.DagsterRunStatus.FAILURE)
    follower = run("four", tags={RunTag.FOLLOWS: "a,b"})
    unbranched = run("five", tags={**of_backfill, RunTag.UNBRANCHED: "true"}, published=False)
    inherited = run("six", tags={**of_backfill, RunTag.OPENED_BY: "another"})
    other = run("seven", tags={BACKFILL_ID_TAG: "c"})
    found = plan_approval([there, started, failed, follower, unbranched, inherited, other], "b")
    assert found.approved_runs == (there, follower, unbranched)
    assert found.unpublished_runs == (started, inherited)
    assert plan_approval([other], "seven").approved_runs == ()
    alone = run("eight")
    assert plan_approval([alone], "eight").approved_runs == (alone,)


def test_an_approval_may_be_about_some_assets_alone() -> None:
    daily = run("one", tags={RunTag.FOLLOWS: "b", PARTITION_TAG: "2026-08-01"}, asset_selection={DAILY})
    total = run("two", tags={RunTag.FOLLOWS: "b"}, asset_selection={dg.AssetKey("total")})
    found = plan_approval([daily, total], "b", [DAILY])
    assert found.approved_runs == (daily,)
    assert "daily 2026-08-01" in found.format_summary()
    assert plan_approval([daily], "b", [dg.AssetKey("total")]).format_summary()
