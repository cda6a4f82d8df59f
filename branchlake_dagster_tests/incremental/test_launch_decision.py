"""When a consumer's run is launched, and launched again: decided from plain values."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from branchlake_dagster import incremental_sensor
from branchlake_dagster.automation.launch_decision import (
    Attempt,
    AttemptHistory,
    LaunchOutcome,
    LaunchPolicy,
    LaunchState,
    RunUnderWay,
    apply_sensor_state,
    attempt_key,
    decide_launch,
    launch_outcome,
)
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.positions import Unconsumed
from branchlake_dagster.runs.run_tags import PENDING, RunState
from branchlake_dagster.stored_names import RunTag

T = datetime(2026, 11, 24, 12, tzinfo=UTC)
LEFT = Unconsumed(files=1, rows=5, oldest=T)
POLICY = LaunchPolicy(retries=3, retry_delay_s=60.0)


def failed(number: int, after_s: float, outcome: LaunchOutcome = LaunchOutcome.FAILED) -> Attempt:
    return Attempt(number, f"run{number}", outcome, T + timedelta(seconds=after_s))


def at(seconds: float, *attempts: Attempt, policy: LaunchPolicy = POLICY) -> tuple[LaunchState, str | None]:
    decision = decide_launch(
        LEFT, AttemptHistory("key", attempts), None, policy, T + timedelta(seconds=seconds)
    )
    return decision.state, decision.run_key


def test_a_state_without_a_run_is_launched_under_its_own_key() -> None:
    assert at(0) == (LaunchState.DUE, "key")
    assert at(9, policy=LaunchPolicy()) == (LaunchState.DUE, "key")


def test_without_retries_a_failed_run_waits_for_the_next_change() -> None:
    assert at(10**6, failed(0, 0), policy=LaunchPolicy()) == (LaunchState.NOT_RETRIED, None)


def test_a_retry_waits_for_its_delay_and_the_delay_doubles() -> None:
    assert at(59, failed(0, 0)) == (LaunchState.WAITS_FOR_RETRY, None)
    assert at(60, failed(0, 0)) == (LaunchState.DUE, attempt_key("key", 1))
    history = failed(0, 0), failed(1, 100)
    assert at(100 + 119, *history) == (LaunchState.WAITS_FOR_RETRY, None)
    assert at(100 + 120, *history) == (LaunchState.DUE, attempt_key("key", 2))
    history = *history, failed(2, 300)
    assert at(300 + 239, *history) == (LaunchState.WAITS_FOR_RETRY, None)
    assert at(300 + 240, *history) == (LaunchState.DUE, attempt_key("key", 3))
    assert at(10**9, *history, failed(3, 600)) == (LaunchState.NOT_RETRIED, None)


def test_a_repeated_tick_gives_the_same_key_and_every_attempt_another_one() -> None:
    assert at(60, failed(0, 0)) == at(61, failed(0, 0))
    keys = {attempt_key("key", number) for number in range(1, 4)} | {"key"}
    assert len(keys) == 4


def test_the_decision_says_when_the_retry_is_due_and_how_many_are_left() -> None:
    decision = decide_launch(LEFT, AttemptHistory("key", (failed(0, 0), failed(1, 10))), None, POLICY, T)
    assert decision.due_at == T + timedelta(seconds=10 + 120)
    assert decision.retries_left == 2
    assert decision.run_id == "run1"


def test_a_delay_grows_to_a_day_at_most_and_a_longer_first_one_stays() -> None:
    assert POLICY.delay_before_retry(1) == timedelta(seconds=60)
    assert POLICY.delay_before_retry(500) == timedelta(days=1)
    assert replace(POLICY, retry_delay_s=10**6).delay_before_retry(3) == timedelta(seconds=10**6)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (LaunchOutcome.FAILED, LaunchState.DUE),
        (LaunchOutcome.REFUSED, LaunchState.DUE),
        (LaunchOutcome.BLOCKED, LaunchState.NOT_RETRIED),
        (LaunchOutcome.CANCELED, LaunchState.NOT_RETRIED),
        (LaunchOutcome.UNDONE, LaunchState.NOT_RETRIED),
        (LaunchOutcome.ENDED, LaunchState.NOT_RETRIED),
        (LaunchOutcome.UNFINISHED, LaunchState.BEING_COMPUTED),
        (LaunchOutcome.AWAITS_VERDICT, LaunchState.AWAITS_VERDICT),
    ],
)
def test_only_what_another_attempt_may_change_is_tried_again(
    outcome: LaunchOutcome, state: LaunchState
) -> None:
    assert at(10**4, failed(0, 0, outcome))[0] == state


@pytest.mark.parametrize("finished", [True, False])
def test_what_a_run_computes_is_not_launched_beside_it(finished: bool) -> None:
    other = RunUnderWay("other", is_finished=finished)
    decision = decide_launch(
        LEFT, AttemptHistory("key", (failed(0, 0),)), other, POLICY, T + timedelta(hours=1)
    )
    wanted = LaunchState.AWAITS_VERDICT if finished else LaunchState.BEING_COMPUTED
    assert (decision.state, decision.run_key, decision.run_id) == (wanted, None, "other")


def test_nothing_left_too_little_and_trouble_launch_nothing() -> None:
    def state(found: Unconsumed, policy: LaunchPolicy = POLICY) -> LaunchState:
        return decide_launch(found, AttemptHistory("key", ()), None, policy, T).state

    assert state(Unconsumed()) == LaunchState.NOTHING_LEFT
    assert state(LEFT, LaunchPolicy(min_rows=6)) == LaunchState.WAITS_FOR_MORE
    assert state(LEFT, LaunchPolicy(min_rows=6, max_age_s=0)) == LaunchState.DUE
    assert state(Unconsumed(trouble="The change is lost.")) == LaunchState.UNKNOWN
    assert state(Unconsumed(missing_input="No table.")) == LaunchState.WAITS_FOR_INPUT
    assert state(Unconsumed(whole=True), LaunchPolicy(min_rows=6)) == LaunchState.DUE
    eager = LaunchPolicy(min_rows=6, min_files=9, when_inputs_idle=True)
    assert state(LEFT, eager.while_inputs_are(idle=False)) == LaunchState.WAITS_FOR_MORE
    assert state(LEFT, eager.while_inputs_are(idle=True)) == LaunchState.DUE
    assert state(Unconsumed(), eager.while_inputs_are(idle=True)) == LaunchState.NOTHING_LEFT
    patient = LaunchPolicy(min_rows=6)
    assert patient.while_inputs_are(idle=True) == patient


def test_a_partition_waits_for_the_one_before_it_unless_it_is_being_computed() -> None:
    def decided(under_way: RunUnderWay | None = None) -> tuple[LaunchState, str | None, str]:
        found = decide_launch(
            LEFT, AttemptHistory("key"), under_way, POLICY, T, earlier_partition="2026-11-23"
        )
        return found.state, found.run_key, found.earlier_partition

    assert decided() == (LaunchState.WAITS_FOR_EARLIER, None, "2026-11-23")
    assert decided(RunUnderWay("r", is_finished=False))[0] == LaunchState.BEING_COMPUTED


@pytest.mark.parametrize("state", [*LaunchState])
def test_every_state_has_a_sentence(state: LaunchState) -> None:
    decision = decide_launch(LEFT, AttemptHistory("key", (failed(0, 0),)), None, POLICY, T)
    assert replace(decision, state=state).format_state(POLICY)


def test_a_delay_that_is_negative_is_refused_with_the_sensor() -> None:
    with pytest.raises(ConfigurationError):
        incremental_sensor(retries=-1)
    with pytest.raises(ConfigurationError):
        incremental_sensor(retries=1, retry_delay_seconds=-1.0)


def run(status: dg.DagsterRunStatus, word: RunState | None = None, **tags: str) -> dg.DagsterRun:
    own = {RunTag.OPENED_BY: "r", RunTag.BRANCH: "run-r", RunTag.STATUS: str(word)} if word else {}
    return dg.DagsterRun(job_name="j", run_id="r", status=status, tags={**own, **tags})


SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


@pytest.mark.parametrize(
    ("of", "outcome"),
    [
        (run(dg.DagsterRunStatus.NOT_STARTED), LaunchOutcome.UNFINISHED),
        (run(dg.DagsterRunStatus.STARTED, RunState.PENDING), LaunchOutcome.UNFINISHED),
        (run(FAILURE), LaunchOutcome.FAILED),
        (run(FAILURE, RunState.DISCARDED), LaunchOutcome.FAILED),
        (run(FAILURE, RunState.PENDING), LaunchOutcome.FAILED),
        (run(FAILURE, RunState.REFUSED), LaunchOutcome.REFUSED),
        (run(FAILURE, RunState.BLOCKED), LaunchOutcome.BLOCKED),
        (run(FAILURE, RunState.UNBRANCHED), LaunchOutcome.ENDED),
        (run(FAILURE, RunState.CONTINUED), LaunchOutcome.ENDED),
        (run(dg.DagsterRunStatus.CANCELED, RunState.DISCARDED), LaunchOutcome.CANCELED),
        (run(SUCCESS, RunState.UNCHANGED), LaunchOutcome.ENDED),
        (run(SUCCESS, RunState.UNDONE, **{RunTag.PUBLICATION: "c0ffee"}), LaunchOutcome.UNDONE),
        (run(SUCCESS), LaunchOutcome.ENDED),
    ],
)
def test_the_outcome_of_a_run(of: dg.DagsterRun, outcome: LaunchOutcome) -> None:
    assert launch_outcome(of) is outcome


def test_a_pending_run_awaits_its_verdict() -> None:
    assert (
        launch_outcome(run(SUCCESS, RunState.PENDING, **{RunTag.VERDICT: PENDING}))
        is LaunchOutcome.AWAITS_VERDICT
    )


def test_a_published_run_is_published_and_inherited_tags_are_not_its_own() -> None:
    tags = {RunTag.PUBLICATION: "0123456789abcdef0123"}
    assert launch_outcome(run(SUCCESS, RunState.PUBLISHED, **tags)) is LaunchOutcome.PUBLISHED
    assert (
        launch_outcome(run(FAILURE, RunState.BLOCKED, **{RunTag.OPENED_BY: "its parent"}))
        is LaunchOutcome.FAILED
    )


def test_a_sensor_that_does_not_tick_is_why_a_due_run_is_not_launched() -> None:
    due = decide_launch(LEFT, AttemptHistory("key"), None, POLICY, T)
    stopped = apply_sensor_state(due, LaunchState.SENSOR_STOPPED)
    assert (stopped.state, stopped.run_key) == (LaunchState.SENSOR_STOPPED, None)
    assert apply_sensor_state(due, None) == due
    computed = decide_launch(LEFT, AttemptHistory("key"), RunUnderWay("r", is_finished=False), POLICY, T)
    assert apply_sensor_state(computed, LaunchState.NO_SENSOR) == computed


def test_what_waits_for_approval_has_no_run_and_names_the_command() -> None:
    decision = decide_launch(
        LEFT, AttemptHistory("key"), None, POLICY, T, approval_ids=("abcdefgh", "ijklmnop")
    )
    assert (decision.state, decision.run_key) == (LaunchState.WAITS_FOR_APPROVAL, None)
    assert "branchlake backfill approve abcdefgh" in decision.format_state(POLICY)
    under_way = decide_launch(
        LEFT, AttemptHistory("key"), RunUnderWay("run", is_finished=False), POLICY, T, approval_ids=("a",)
    )
    assert under_way.state is LaunchState.BEING_COMPUTED
    assert (
        decide_launch(Unconsumed(), AttemptHistory("key"), None, POLICY, T, approval_ids=("a",)).state
        is LaunchState.NOTHING_LEFT
    )
