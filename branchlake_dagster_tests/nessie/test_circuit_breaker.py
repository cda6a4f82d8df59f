"""How often a service in trouble is asked: the breaker, the budget, and both around Nessie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import Breaker, BreakerRule, NessieUnavailable, RetryBudget, RetryPolicy
from branchlake_dagster.nessie.transport import GuardedTransport
from branchlake_dagster_tests.suite.raised import raising


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A transport whose server is there or not."""

    uri = "http://nessie.example/api/v2"

    def __init__(self) -> None:
        self.up = False
        self.asked = 0

    def close(self) -> None:
        """Nothing is kept."""

    def send(
        self,
        method: str,
        path: str,
        decode: Callable[[Any], Any],
        *,
        action: str,
        changes: bool,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        self.asked += 1
        if not self.up:
            raise NessieUnavailable("No connection.")
        return decode(
            {
                "defaultBranch": "main",
                "minSupportedApiVersion": 1,
                "maxSupportedApiVersion": 2,
                "specVersion": "2.2.0",
                "noAncestorHash": "2e",
            }
        )


def test_a_breaker_opens_at_half_of_twenty_and_lets_one_call_try() -> None:
    clock = Clock()
    breaker = Breaker(BreakerRule(), clock=clock)
    for number in range(20):
        assert breaker.seconds_to_wait() == 0.0
        breaker.record_result(failed=number % 2 == 1)
    assert breaker.seconds_to_wait() == 5.0
    clock.now += 5.0
    assert breaker.seconds_to_wait() == 0.0  # the one that tries
    assert breaker.seconds_to_wait() > 0.0
    breaker.record_result(failed=True)
    assert breaker.seconds_to_wait() == 5.0
    clock.now += 5.0
    assert breaker.seconds_to_wait() == 0.0
    breaker.record_result(failed=False)
    assert [breaker.seconds_to_wait(), breaker.seconds_to_wait()] == [0.0, 0.0]


def test_old_failures_and_few_calls_open_nothing() -> None:
    clock = Clock()
    breaker = Breaker(BreakerRule(), clock=clock)
    for _ in range(19):
        breaker.record_result(failed=True)
    clock.now += 10.1
    for _ in range(19):
        breaker.record_result(failed=True)
    assert breaker.seconds_to_wait() == 0.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), max_size=200))
def test_an_open_breaker_always_closes_again(history: list[tuple[bool, float]]) -> None:
    clock = Clock()
    breaker = Breaker(BreakerRule(), clock=clock)
    for failed, wait in history:
        clock.now += wait
        if not breaker.seconds_to_wait():
            breaker.record_result(failed=failed)
    clock.now += 5.0
    assert breaker.seconds_to_wait() == 0.0
    breaker.record_result(failed=False)
    assert breaker.seconds_to_wait() == 0.0


def test_repeats_are_a_share_of_the_calls_and_some_are_always_left() -> None:
    clock = Clock()
    budget = RetryBudget(share=0.1, reserve=3, clock=clock)
    assert [budget.try_spend() for _ in range(4)] == [True, True, True, False]
    for _ in range(50):
        budget.record_call()
    assert [budget.try_spend() for _ in range(3)] == [True, True, False]
    clock.now += 60.1
    assert [budget.try_spend() for _ in range(4)] == [True, True, True, False]


def test_calls_to_a_nessie_that_is_away_are_few_and_end_with_a_sentence() -> None:
    clock, server = Clock(), Server()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    client = NessieClient(
        server.uri,
        transport=GuardedTransport(server, Breaker(clock=clock)),
        retry=RetryPolicy((0.1, 0.1), budget=RetryBudget(reserve=10, clock=clock)),
        sleep=sleep,
    )
    for _ in range(100):
        with pytest.raises(NessieUnavailable):
            client.config()
    assert server.asked < 30  # each of a hundred would have asked three times
    with raising(NessieUnavailable, reason="not_asked"):
        client.config()
    server.up = True
    clock.now += 5.0
    assert client.config().default_branch == "main"
