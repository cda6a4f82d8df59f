"""The errors of calls to Nessie, and what limits repeated calls: policy, budget and circuit breaker.

The policy decides by the marker class of the error, never by its message. The budget keeps repeated calls a
small share of all calls, so that they do not flood a service in trouble. The breaker blocks all calls to a
failing service for some seconds and then lets one call through.
"""

# The class names are terms of the design ("refused", "conflict", "outcome unknown") without the suffix Error.
# ruff: noqa: N818

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from branchlake_dagster.errors import (
    BranchlakeError,
    OutcomeUnknown,
    Terminal,
    Transient,
    format_first_values,
)

if TYPE_CHECKING:
    from branchlake_dagster.nessie.model import KeyConflict


class NessieError(BranchlakeError):
    """A call to Nessie failed.

    `status` is the HTTP status, or None if no answer came. `code` is the server's `errorCode`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.status = status
        self.code = code


class NessieRefused(NessieError, Terminal):
    """The request is refused, and there is no more specific class.

    Usually Nessie answered with a 4xx status and a reason. Also raised for an invalid reference name (nothing
    is sent then), an untrusted certificate, and an unexpected status below 400.
    """


class NotNessie(NessieRefused):
    """The answer is complete, but not from Nessie: a proxy's page, or a 4xx status without a reason.

    The request is repeated by the retry policy before this error is raised.
    """


class NessieUnauthorized(NessieError, Terminal):
    """The token is missing, expired or lacks the permission (401, 403)."""


class NessieNotFound(NessieError, Terminal):
    """A reference or content that the request names does not exist (404)."""


class ReferenceNotFound(NessieNotFound):
    """The branch, tag or hash does not exist."""


class ContentNotFound(NessieNotFound):
    """The reference exists, but it has no content under that key."""


class NessieAlreadyExists(NessieError, Terminal):
    """A branch or tag of that name exists already."""


class NessieConflict(NessieError, Terminal):
    """The change conflicts with other changes since its expected hash (409).

    `conflicts` lists the keys and the reasons. A conflict without a key concerns the reference itself
    (`UNEXPECTED_HASH`: the reference has moved).
    """

    def __init__(
        self,
        message: str,
        *,
        conflicts: Iterable[KeyConflict] = (),
        status: int | None = 409,
        code: str | None = None,
        **where: Any,
    ) -> None:
        self.conflicts = tuple(conflicts)
        conflict_list = format_first_values(tuple(str(conflict) for conflict in self.conflicts))
        super().__init__(
            f"{message} Conflicts: {conflict_list}." if conflict_list else message,
            status=status,
            code=code,
            **where,
        )


class NessieUnavailable(NessieError, Transient):
    """The request was certainly not applied: no connection, status 429, or a read that failed."""


class NessieOutcomeUnknown(NessieError, OutcomeUnknown):
    """A change was sent, but its answer was lost, came too late, was unreadable or had a 5xx status."""


def may_succeed_later(error: BaseException) -> bool:
    """Return whether the same work may succeed later without a change of code or settings.

    True for lost answers, because callers read the present state before they repeat a change. True as well
    for answers about a state that other writers changed meanwhile, and for a refused token, which an operator
    can renew.
    """
    if isinstance(error, NessieError):
        return not isinstance(error, NessieRefused)
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return isinstance(error, Transient | OutcomeUnknown)


class RetryBudget:
    """A limit on the number of repeated calls within `window_s` seconds.

    The limit is `share` of the calls in that time, but at least `reserve`. Threads may share a budget.
    `clock` returns seconds.
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
        # Reentrant: a finalizer that runs while this thread holds the lock may call Nessie.
        self._lock = threading.RLock()
        self._calls: deque[float] = deque()
        self._repeats: deque[float] = deque()

    def record_call(self) -> None:
        """Record the first attempt of a call."""
        with self._lock:
            self._calls.append(self._clock())
            self._drop_old_calls()

    def try_spend(self) -> bool:
        """Return whether a call may be repeated. If so, count it as repeated."""
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
    """The rule by which a breaker opens and closes. Times are in seconds of the breaker's clock.

    The breaker opens if at least `min_calls` calls ended within `window_s` and at least `share` of them
    failed. For `open_s` it then blocks every call. Afterwards it lets one call through. If that call
    succeeds, the breaker closes; otherwise it blocks for another `open_s`.
    """

    share: float = 0.5
    min_calls: int = 20
    window_s: float = 10.0
    open_s: float = 5.0


class Breaker:
    """A circuit breaker for one service. Threads may share it. `clock` returns seconds."""

    def __init__(
        self, rule: BreakerRule | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rule = rule or BreakerRule()
        self._clock = clock
        # Reentrant: a finalizer that runs while this thread holds the lock may call Nessie.
        self._lock = threading.RLock()
        self._calls: deque[tuple[float, bool]] = deque()
        self._open_until: float | None = None
        self._probing = False

    def seconds_to_wait(self) -> float:
        """Return the seconds until the next call is allowed, or 0 if it is allowed now.

        A caller that gets 0 must make its call and then call `record_result`.
        """
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
        """Record the result of a call that `seconds_to_wait` has allowed.

        `failed` is True if the service did not answer, or if its answer shows a failure.
        """
        with self._lock:
            now = self._clock()
            if self._probing:
                self._probing = False
                self._open_until = now + self._rule.open_s if failed else None
                self._calls.clear()
                return
            if self._open_until is not None:
                return  # the call started before the breaker opened
            self._calls.append((now, failed))
            while self._calls and self._calls[0][0] < now - self._rule.window_s:
                self._calls.popleft()
            count, failures = len(self._calls), sum(bad for _, bad in self._calls)
            if failed and count >= self._rule.min_calls and failures >= self._rule.share * count:
                self._open_until = now + self._rule.open_s
                self._calls.clear()


T = TypeVar("T")

# The server raised these two after it read the present state, so they end the doubt about earlier attempts.
_DEFINITE_ERRORS = (NessieConflict, NessieAlreadyExists)


@dataclass(frozen=True)
class RetryPolicy:
    """The delays between attempts in seconds; without delays there is one attempt.

    All calls together share `budget`. If it is None, repeats are not limited.
    """

    delays_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    budget: RetryBudget | None = None

    def run_attempts(
        self, attempt: Callable[[bool], T], *, sleep: Callable[[float], None], repeatable: bool = False
    ) -> T:
        """Call `attempt(doubt)` until it succeeds or must not be repeated, and return its result.

        Transient errors are repeated, and so are answers that do not come from Nessie. Unknown outcomes are
        repeated only if `repeatable`: then repeating the call must have the same effect as one call. `doubt`
        is True after an attempt with an unknown outcome. `sleep` waits for a number of seconds.

        A failed repeat does not make the first outcome known. So NessieOutcomeUnknown is raised even if the
        last failure was a refused connection. Otherwise the caller would treat the change as not applied, and
        publish twice or delete files that are in use.
        """
        unknown_outcome: NessieOutcomeUnknown | None = None
        if self.budget is not None:
            self.budget.record_call()
        # Nearly every call succeeds at once, and the state of a retrying library costs as much CPU as the
        # request. So this is a plain loop.
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
