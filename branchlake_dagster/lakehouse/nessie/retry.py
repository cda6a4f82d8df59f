"""When a call to Nessie is made again. The decision asks the error's marker, never its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Transient
from branchlake_dagster.lakehouse.nessie.errors import (
    NessieAlreadyExists,
    NessieConflict,
    NessieOutcomeUnknown,
    NotNessie,
)

T = TypeVar("T")

# These two come from a server that looked at the present state, so they end the doubt about the past.
_SETTLED = (NessieConflict, NessieAlreadyExists)


@dataclass(frozen=True)
class RetryPolicy:
    """Waits between attempts in seconds. Empty means one attempt."""

    delays_s: tuple[float, ...] = (1.0, 2.0, 4.0)

    def run(
        self, attempt: Callable[[bool], T], *, sleep: Callable[[float], None], repeatable: bool = False
    ) -> T:
        """Call `attempt(doubt)` until it succeeds or may not be repeated.

        Transient errors are repeated, and answers that are not Nessie's. Unknown outcomes are repeated only
        when `repeatable`: the caller has proven that doing it twice is the same as once. `doubt` is True as
        soon as one attempt ended unknown. A repeat that then fails does not make the outcome known, so
        NessieOutcomeUnknown is raised even when the last failure was a harmless refused connection: telling
        the caller "certainly nothing happened" would make it publish twice or delete files that are in use.
        """
        lost: list[NessieOutcomeUnknown] = []

        def once() -> T:
            try:
                return attempt(bool(lost))
            except NessieOutcomeUnknown as failure:
                lost.append(failure)
                raise

        def again(failure: BaseException) -> bool:
            passing = isinstance(failure, Transient | NotNessie)
            return passing or (repeatable and isinstance(failure, OutcomeUnknown))

        delays = (*self.delays_s, 0.0)  # tenacity asks for the wait first, then whether to stop

        def delay(state: RetryCallState) -> float:
            return delays[state.attempt_number - 1]

        retrying = Retrying(
            retry=retry_if_exception(again),
            stop=stop_after_attempt(len(delays)),
            wait=delay,
            sleep=sleep,
            reraise=True,
        )
        try:
            return retrying(once)
        except BranchlakeError as failure:
            if not lost or lost[0] is failure or isinstance(failure, _SETTLED):
                raise
            raise lost[0] from failure
