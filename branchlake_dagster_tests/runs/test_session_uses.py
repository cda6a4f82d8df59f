"""Which steps can have made a commit that names no step; positions are (run, event), heads name commits."""

from __future__ import annotations

import pytest

from branchlake_dagster.runs.run_events import EventPosition, RecordedHead
from branchlake_dagster.runs.session_uses import BranchTimeline, SessionUse, StepFinder

NUMBERS = {"base": 0, "a": 1, "b": 2, "c": 3}
NEVER = EventPosition.end_of_run(0)


def use(step: str | None, start: int, end: EventPosition | int, application: str = "x") -> SessionUse:
    last = EventPosition(0, end) if isinstance(end, int) else end
    return SessionUse(application, step, EventPosition(0, start), last)


def possible(number: int, *uses: SessionUse, heads: dict[int, str]) -> set[str | None]:
    recorded_heads = tuple(RecordedHead(head, EventPosition(0, position)) for position, head in heads.items())
    return set(StepFinder(BranchTimeline(uses, recorded_heads), NUMBERS).find_possible_steps("x", number))


def test_steps_that_follow_each_other_are_distinguished_by_the_heads_at_their_ends() -> None:
    uses, heads = (use("one", 1, 5), use("two", 10, 15)), {5: "a", 15: "c"}
    assert possible(1, *uses, heads=heads) == {"one"}
    assert possible(2, *uses, heads=heads) == {"two"}
    assert possible(3, *uses, heads=heads) == {"two"}


def test_a_step_that_only_read_is_excluded_by_its_head() -> None:
    assert possible(1, use("one", 1, 5), use("two", 10, 15), heads={5: "base", 15: "a"}) == {"two"}


def test_a_killed_step_made_what_no_head_contains() -> None:
    assert possible(2, use("one", 1, 5), use("two", 10, NEVER), heads={5: "a"}) == {"two"}
    assert possible(1, use("one", 1, NEVER), heads={}) == {"one"}


@pytest.mark.parametrize("heads", [{20: "b"}, {18: "a", 20: "b"}, {20: "b", 21: "a"}])
def test_steps_in_parallel_are_not_distinguished(heads: dict[int, str]) -> None:
    uses = use("one", 1, 21 if 21 in heads else 18 if 18 in heads else 20), use("two", 2, 20)
    assert possible(1, *uses, heads=heads) == {"one", "two"}


def test_an_older_head_that_is_stored_after_a_newer_one_excludes_no_step() -> None:
    uses, heads = (use("one", 1, 21), use("two", 2, 20)), {20: "b", 21: "a"}
    assert possible(2, *uses, heads=heads) == {"one", "two"}


def test_code_of_an_unknown_step_may_have_made_each_commit() -> None:
    assert possible(1, use(None, 1, NEVER), use("one", 2, 5), heads={5: "a"}) == {None, "one"}


def test_other_applications_and_lost_heads_do_not_count() -> None:
    uses = use("one", 1, 5, "other"), use("two", 2, 6)
    assert possible(1, *uses, heads={4: "lost", 6: "a"}) == {"two"}
    assert possible(1, use("one", 1, 5, "other"), heads={6: "a"}) == set()
