"""The word that a run shows, and that docs/operations.md explains each word."""

import dagster as dg
import pytest

from branchlake_dagster.publication.verdict import Decision
from branchlake_dagster.runs.discarding import (
    FAILURE_REASON_TAG,
    fail_unpublished_run,
    status_without_verdict,
)
from branchlake_dagster.runs.run_tags import (
    PUBLISHER,
    RECORDED_STATES,
    UNJUDGED,
    RunLocation,
    RunState,
    build_opening_tags,
    build_status_tag,
)
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import create_run_for_test
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.raised import raising
from branchlake_dagster_tests.test_documents import ROOT

FAILURE, CANCELED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED
STARTED, SUCCESS = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.SUCCESS


@pytest.mark.parametrize(
    ("status", "tags", "word"),
    [
        (FAILURE, {FAILURE_REASON_TAG: "STEP_FAILURE"}, RunState.FAILED),
        (FAILURE, {FAILURE_REASON_TAG: "JOB_INITIALIZATION_FAILURE"}, RunState.FAILED),
        (FAILURE, {FAILURE_REASON_TAG: "RUN_WORKER_RESTART"}, RunState.INTERRUPTED),
        (FAILURE, {}, RunState.INTERRUPTED),
        (CANCELED, {}, RunState.CANCELED),
        (STARTED, {}, RunState.DISCARDED),
        (SUCCESS, {}, RunState.DISCARDED),
    ],
)
def test_a_run_without_verdict_shows_how_it_ended(
    status: dg.DagsterRunStatus, tags: dict[str, str], word: RunState
) -> None:
    assert status_without_verdict(dg.DagsterRun("job", status=status, tags=tags)) is word


def test_a_run_that_its_publisher_let_fail_was_not_interrupted() -> None:
    with new_instance() as instance:
        run = create_run_for_test(instance, status=SUCCESS)
        fail_unpublished_run(instance, run.run_id, "a check failed")
        failed = instance.get_run_by_id(run.run_id)
        assert failed is not None
        assert status_without_verdict(failed) is RunState.FAILED
        again = build_opening_tags("retry", RunLocation("run-retry", ""), failed.tags)
        assert again[RunTag.FAILED_BY] != PUBLISHER


@pytest.mark.parametrize("state", RunState)
def test_the_status_tag_holds_recorded_states_only(state: RunState) -> None:
    if state in RECORDED_STATES:
        assert build_status_tag(state) == {"branchlake": state.value}
    else:
        with raising(ValueError, str(state)):
            build_status_tag(state)


@pytest.mark.parametrize("word", sorted({*map(str, (*RunState, *Decision)), *UNJUDGED}), ids=str)
def test_the_page_explains_each_state(word: str) -> None:
    assert f"`{word}`" in (ROOT / "docs" / "operations.md").read_text()
