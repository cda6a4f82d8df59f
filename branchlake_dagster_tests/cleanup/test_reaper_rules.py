"""The reaper's rules one by one, and what holds in all of them."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.cleanup.reaper_rules import (
    BranchFacts,
    Limits,
    OwnerState,
    ReapingAction,
    decide_publication_branch,
    decide_reaping,
)
from branchlake_dagster.runs.branch_owner import UNKNOWN_ORIGIN, BranchOrigin, Maker
from branchlake_dagster.runs.failure_detector import Liveness

HOUR = timedelta(hours=1)
LIMITS = Limits(max_age=6 * HOUR, orphan_grace=HOUR)
KEEP, DELETE, DISCARD, GIVE_BACK = ReapingAction
ACTIVE, AWAITING, PUBLISHED, UNPUBLISHED, MISSING, ENDED = OwnerState
ALIVE, SUSPECT, DEAD = Liveness
OURS, THEIRS = BranchOrigin(Maker.HERE, ("here",)), BranchOrigin(Maker.ELSEWHERE, ("there",))


@pytest.mark.parametrize(
    ("state", "age", "action"),
    [
        (ACTIVE, HOUR, KEEP),
        (ACTIVE, 7 * HOUR, DISCARD),
        (ACTIVE, None, KEEP),
        (PUBLISHED, timedelta(0), DELETE),
        (PUBLISHED, None, DELETE),
        (UNPUBLISHED, timedelta(0), DISCARD),
        (UNPUBLISHED, None, DISCARD),
        (AWAITING, HOUR, KEEP),
        (AWAITING, 1000 * HOUR, KEEP),  # a run that passed is never lost
        (MISSING, timedelta(minutes=5), KEEP),
        (MISSING, 2 * HOUR, KEEP),  # another instance may know it
        (MISSING, None, KEEP),
    ],
)
def test_seed_000_rules_and_their_guards(
    state: OwnerState, age: timedelta | None, action: ReapingAction
) -> None:
    found, reason = decide_reaping(BranchFacts(state, age, is_on_main=True), LIMITS)
    assert found is action
    assert reason


def test_the_branch_of_a_published_run_whose_publication_main_lost_is_kept() -> None:
    assert decide_reaping(BranchFacts(PUBLISHED, HOUR, is_on_main=False), LIMITS)[0] is KEEP


@pytest.mark.parametrize(
    ("state", "age", "pulses", "action", "code"),
    [
        (ACTIVE, 7 * HOUR, {ALIVE}, KEEP, "writer_alive"),
        (ACTIVE, 7 * HOUR, {ALIVE, DEAD}, KEEP, "writer_alive"),
        (ACTIVE, 7 * HOUR, {SUSPECT}, KEEP, "writer_silent"),
        (ACTIVE, HOUR, {DEAD}, DISCARD, "writer_dead"),
        (MISSING, 7 * HOUR, {ALIVE}, KEEP, "writer_alive"),
        (MISSING, 7 * HOUR, {DEAD}, KEEP, "maker_unknown"),
        (MISSING, HOUR / 2, {DEAD}, KEEP, "written_recently"),
        # A writer that still beats for a run that ended is fenced all the same.
        (UNPUBLISHED, HOUR, {ALIVE}, DISCARD, "run_failed"),
        (AWAITING, HOUR, {DEAD}, KEEP, "awaiting_publication"),
    ],
)
def test_heartbeats_of_writers(
    state: OwnerState, age: timedelta, pulses: set[Liveness], action: ReapingAction, code: str
) -> None:
    found, reason = decide_reaping(BranchFacts(state, age, writers=frozenset(pulses)), LIMITS)
    assert found is action
    assert reason.code == code


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (False, "run_failed"),
        (True, "not_published"),
    ],
)
def test_a_failed_run_that_the_reaper_meets_before_the_publisher_gets_a_true_report(
    told: bool, code: str
) -> None:
    assert decide_reaping(BranchFacts(UNPUBLISHED, HOUR, has_verdict=told), LIMITS)[1].code == code


def test_a_run_that_still_reports_is_not_dead() -> None:
    facts = BranchFacts(ACTIVE, HOUR, writers=frozenset({DEAD}), still_reports=True)
    assert (decide_reaping(facts, LIMITS)[0], decide_reaping(facts, LIMITS)[1].code) == (
        KEEP,
        "run_still_reports",
    )


@pytest.mark.parametrize(
    ("since_end", "action", "code", "hours"),
    [
        (HOUR, KEEP, "kept_for_debugging", "23.0 h"),
        (None, KEEP, "kept_for_debugging", ""),
        (25 * HOUR, DISCARD, "kept_long_enough", "24.0 h"),
    ],
)
def test_what_was_not_published_is_kept_for_debugging(
    since_end: timedelta | None, action: ReapingAction, code: str, hours: str
) -> None:
    limits = Limits(max_age=6 * HOUR, orphan_grace=HOUR, keep_failed=24 * HOUR)
    found, reason = decide_reaping(BranchFacts(UNPUBLISHED, 100 * HOUR, since_end), limits)
    assert found is action
    assert (reason.code, hours in reason) == (code, True)


@pytest.mark.parametrize("state", [ACTIVE, UNPUBLISHED, AWAITING])
def test_a_publication_that_was_begun_is_left_to_the_publisher(state: OwnerState) -> None:
    """It may be on `main` already, and nobody has been told."""
    action, reason = decide_reaping(
        BranchFacts(state, 100 * HOUR, 100 * HOUR, frozenset({DEAD}), is_claimed=True), LIMITS
    )
    assert action is KEEP
    assert "claimed" in reason or "waits" in reason


@pytest.mark.parametrize(
    ("pulses", "exists", "action"),
    [(set(), True, KEEP), ({DEAD}, True, KEEP), ({DEAD}, False, DELETE), ({ALIVE}, False, KEEP)],
)
def test_publication_branches(pulses: set[Liveness], exists: bool, action: ReapingAction) -> None:
    for state, made in ((PUBLISHED, UNKNOWN_ORIGIN), (MISSING, OURS)):
        found, _ = decide_publication_branch(
            frozenset(pulses), run_branch_exists=exists, state=state, origin=made
        )
        assert found is action
    for made in (THEIRS, UNKNOWN_ORIGIN):
        found, _ = decide_publication_branch(
            frozenset(pulses), run_branch_exists=exists, state=MISSING, origin=made
        )
        assert found is KEEP


@pytest.mark.parametrize(
    ("age", "made", "action", "code"),
    [
        (HOUR / 2, OURS, KEEP, "written_recently"),
        (None, OURS, KEEP, "age_unknown"),
        (2 * HOUR, OURS, DISCARD, "run_unknown"),
        (1000 * HOUR, THEIRS, KEEP, "made_elsewhere"),
        (None, THEIRS, KEEP, "made_elsewhere"),
        (1000 * HOUR, UNKNOWN_ORIGIN, KEEP, "maker_unknown"),
    ],
)
def test_what_no_run_is_known_of_is_ended_by_its_own_instance(
    age: timedelta | None, made: BranchOrigin, action: ReapingAction, code: str
) -> None:
    found, reason = decide_reaping(BranchFacts(MISSING, age, origin=made), LIMITS)
    assert found is action
    assert reason.code == code


@pytest.mark.parametrize(
    ("age", "pulses", "action", "code"),
    [
        (2 * HOUR, set(), DISCARD, "live_run_ended"),
        (2 * HOUR, {DEAD}, DISCARD, "live_run_ended"),
        (HOUR / 2, {DEAD}, KEEP, "written_recently"),
        # Dagster was told that it has ended; its process was not.
        (100 * HOUR, {ALIVE}, KEEP, "writer_alive"),
        (100 * HOUR, {SUSPECT}, KEEP, "writer_silent"),
    ],
)
def test_a_batch_of_an_ended_live_run(
    age: timedelta, pulses: set[Liveness], action: ReapingAction, code: str
) -> None:
    found, reason = decide_reaping(BranchFacts(ENDED, age, writers=frozenset(pulses)), LIMITS)
    assert found is action
    assert reason.code == code


def test_a_waiting_run_says_for_how_long() -> None:
    assert decide_reaping(BranchFacts(AWAITING, HOUR, 30 * HOUR), LIMITS)[1].endswith("30.0 h")


ages = st.none() | st.integers(0, 10_000).map(lambda minutes: timedelta(minutes=minutes))
pulses = st.frozensets(st.sampled_from(list(Liveness)))


@given(
    st.builds(
        BranchFacts,
        st.sampled_from(list(OwnerState)),
        ages,
        ages,
        pulses,
        pulses,
        st.booleans(),
        st.booleans(),
        st.builds(BranchOrigin, st.sampled_from(list(Maker))),
    ),
    st.builds(Limits, *[st.integers(0, 600).map(lambda minutes: timedelta(minutes=minutes))] * 3),
)
def test_what_is_proven_neither_finished_nor_abandoned_is_kept(facts: BranchFacts, limits: Limits) -> None:
    """Invariant 6, whatever the settings are."""
    action, reason = decide_reaping(facts, limits)
    assert reason
    if facts.publishers & {ALIVE, SUSPECT} or facts.state is AWAITING:
        assert action is KEEP
    if facts.is_claimed and facts.state in (ACTIVE, UNPUBLISHED):
        assert action is KEEP
    if facts.state in (ACTIVE, MISSING, ENDED) and facts.writers & {ALIVE, SUSPECT}:
        assert action is KEEP
    if facts.state is MISSING and (facts.age is None or facts.origin.maker is not Maker.HERE):
        assert action is KEEP
    assert action is not GIVE_BACK  # that is for branches which are gone
    # Only what is on `main` goes without a tag that can bring it back.
    assert action is not DELETE or facts.state is PUBLISHED
