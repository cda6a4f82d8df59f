from collections.abc import Callable

import pytest

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.nessie import RetryPolicy
from branchlake_dagster.nessie.errors import (
    NessieAlreadyExists,
    NessieConflict,
    NessieOutcomeUnknown,
    NessieRefused,
    NessieUnavailable,
    ReferenceNotFound,
)

DOWN = NessieUnavailable("down")
LOST = NessieOutcomeUnknown("lost")


class Script:
    """Raises or returns what it is given, call by call, and remembers doubts and waits."""

    def __init__(self, *steps: BranchlakeError | str) -> None:
        self.steps = list(steps)
        self.doubts: list[bool] = []
        self.waits: list[float] = []

    def __call__(self, doubt: bool) -> str:
        self.doubts.append(doubt)
        step = self.steps.pop(0)
        if isinstance(step, BranchlakeError):
            raise step
        return step

    def run(self, *, repeatable: bool = False, policy: RetryPolicy | None = None) -> str:
        return (policy or RetryPolicy()).run_attempts(self, sleep=self.waits.append, repeatable=repeatable)


def test_transient_errors_are_repeated_after_one_two_and_four_seconds() -> None:
    script = Script(DOWN, DOWN, DOWN, "done")
    assert script.run() == "done"
    assert script.waits == [1.0, 2.0, 4.0]
    assert script.doubts == [False] * 4


def test_the_last_transient_error_is_raised() -> None:
    script = Script(DOWN, DOWN, DOWN, DOWN, "too late")
    with pytest.raises(NessieUnavailable):
        script.run()


@pytest.mark.parametrize("error", [NessieRefused("no"), NessieConflict("no"), ReferenceNotFound("no")])
def test_terminal_errors_are_not_repeated(error: BranchlakeError) -> None:
    script = Script(error, "never")
    with pytest.raises(type(error)):
        script.run(repeatable=True)
    assert script.waits == []


def test_the_text_does_not_matter() -> None:
    script = Script(NessieRefused("timeout, connection refused, 503, please retry"), "never")
    with pytest.raises(NessieRefused):
        script.run()


def test_unknown_outcomes_are_repeated_only_where_that_is_safe() -> None:
    with pytest.raises(NessieOutcomeUnknown):
        Script(LOST, "never").run()
    script = Script(LOST, DOWN, "done")
    assert script.run(repeatable=True) == "done"
    assert script.doubts == [False, True, True]


@pytest.mark.parametrize("later", [[DOWN] * 3, [ReferenceNotFound("gone")], [NessieRefused("no")]])
def test_a_failed_repeat_leaves_the_outcome_unknown(later: list[BranchlakeError]) -> None:
    with pytest.raises(NessieOutcomeUnknown) as caught:
        Script(LOST, *later).run(repeatable=True)
    assert caught.value is LOST


@pytest.mark.parametrize("settled", [NessieConflict("moved"), NessieAlreadyExists("there")])
def test_an_answer_about_the_present_state_settles_it(settled: BranchlakeError) -> None:
    with pytest.raises(type(settled)):
        Script(LOST, settled).run(repeatable=True)


def test_no_delays_mean_one_attempt() -> None:
    with pytest.raises(NessieUnavailable):
        Script(DOWN, "never").run(policy=RetryPolicy(()))


def test_foreign_errors_pass_through() -> None:
    def broken(_: bool) -> str:
        raise KeyError("bug")

    run: Callable[..., str] = RetryPolicy().run_attempts
    with pytest.raises(KeyError):
        run(broken, sleep=lambda _: None)
