"""When a call to a service is repeated: the retry policy, the retry budget and the circuit breaker.

The policy decides by the marker of the error, never by its text. The budget keeps repeated calls a small
share of all calls, so that a service in trouble is not flooded. The breaker leaves a service that fails alone
for a moment, and then lets one call through.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Transient
from branchlake_dagster.nessie.errors import (
    NessieAlreadyExists,
    NessieConflict,
    NessieOutcomeUnknown,
    NotNessie,
)


class RetryBudget:
    """Repeats within `window_s` are at most `share` of the calls, and always `reserve`; thread-safe.

    `clock` counts seconds.
    """

    def __init__(
        self,
        *,
        share: float = 0.1,
        reserve: int = 30,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._reserve = reserve
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: deque[float] = deque()
        self._repeats: deque[float] = deque()

    def record_call(self) -> None:
        """A call begins, for the first time."""
        with self._lock:
            self._calls.append(self._clock())
            self._drop_old_calls()

    def try_spend(self) -> bool:
        """Whether a call may be repeated; it is counted as repeated then."""
        with self._lock:
            self._drop_old_calls()
            if len(self._repeats) >= max(self._reserve, self._share * len(self._calls)):
                return False
            self._repeats.append(self._clock())
            return True

    def _drop_old_calls(self) -> None:
        window_start = self._clock() - self._window_s
        for times in (self._calls, self._repeats):
            while times and times[0] < window_start:
                times.popleft()


@dataclass(frozen=True)
class BreakerRule:
    """When it opens: so large a share of at least `min_calls` within `window_s` has failed.

    Open, it lets nothing through for `open_s`; then one call, whose end decides. Seconds of the clock.
    """

    share: float = 0.5
    min_calls: int = 20
    window_s: float = 10.0
    open_s: float = 5.0


class Breaker:
    """The calls to one service; safe to share between threads. `clock` counts seconds."""

    def __init__(
        self, rule: BreakerRule | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rule = rule or BreakerRule()
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: deque[tuple[float, bool]] = deque()
        self._open_until: float | None = None
        self._probing = False

    def seconds_to_wait(self) -> float:
        """Seconds until the service may be asked; 0: now. Whoever gets 0 asks, and then says how it ended."""
        with self._lock:
            if self._open_until is None:
                return 0.0
            remaining = self._open_until - self._clock()
            if remaining > 0:
                return remaining
            if self._probing:
                return self._rule.open_s
            self._probing = True
            return 0.0

    def record_result(self, *, failed: bool) -> None:
        """How a call ended: whether the service gave no answer, or one that says that it is in trouble."""
        with self._lock:
            now = self._clock()
            if self._probing:
                self._probing = False
                self._open_until = now + self._rule.open_s if failed else None
                self._calls.clear()
                return
            if self._open_until is not None:
                return  # it was on its way when the breaker opened
            self._calls.append((now, failed))
            while self._calls and self._calls[0][0] < now - self._rule.window_s:
                self._calls.popleft()
            count, failures = len(self._calls), sum(bad for _, bad in self._calls)
            if failed and count >= self._rule.min_calls and failures >= self._rule.share * count:
                self._open_until = now + self._rule.open_s
                self._calls.clear()


T = TypeVar("T")

# These two come from a server that looked at the present state, so they end the doubt about the past.
_DEFINITE_ERRORS = (NessieConflict, NessieAlreadyExists)


@dataclass(frozen=True)
class RetryPolicy:
    """Waits between attempts in seconds; empty: one attempt. A `budget` is that of all calls together."""

    delays_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    budget: RetryBudget | None = None

    def run_attempts(
        self, attempt: Callable[[bool], T], *, sleep: Callable[[float], None], repeatable: bool = False
    ) -> T:
        """Call `attempt(doubt)` until it succeeds or may not be repeated.

        Transient errors are repeated, and answers that are not Nessie's. Unknown outcomes are repeated only
        when `repeatable`: the caller has proven that doing it twice is the same as once. `doubt` is True as
        soon as one attempt ended unknown. A repeat that then fails does not make the outcome known, so
        NessieOutcomeUnknown is raised even when the last failure was a harmless refused connection: telling
        the caller "certainly nothing happened" would make it publish twice or delete files that are in use.
        """
        unknown_outcome: NessieOutcomeUnknown | None = None
        if self.budget is not None:
            self.budget.record_call()
        # A plain loop: nearly every call succeeds at once, and a retrying library's state costs as much CPU
        # as the request.
        for delay in (*self.delays_s, None):
            try:
                return attempt(unknown_outcome is not None)
            except BranchlakeError as failure:
                if unknown_outcome is None and isinstance(failure, NessieOutcomeUnknown):
                    unknown_outcome = failure
                is_transient = isinstance(failure, Transient | NotNessie)
                is_repeatable = is_transient or (repeatable and isinstance(failure, OutcomeUnknown))
                if delay is None or not is_repeatable or not self._may_repeat():
                    if (
                        unknown_outcome is None
                        or unknown_outcome is failure
                        or isinstance(failure, _DEFINITE_ERRORS)
                    ):
                        raise
                    raise unknown_outcome from failure
            sleep(delay)
        raise AssertionError  # the last delay is None

    def _may_repeat(self) -> bool:
        return self.budget is None or self.budget.try_spend()
