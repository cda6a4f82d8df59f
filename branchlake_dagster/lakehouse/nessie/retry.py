"""When a call to Nessie is made again. The decision asks the error's marker, never its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Transient
from branchlake_dagster.lakehouse.calls.budget import RetryBudget
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
    """Waits between attempts in seconds; empty: one attempt. A `budget` is that of all calls together."""

    delays_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    budget: RetryBudget | None = None

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
        lost: NessieOutcomeUnknown | None = None
        if self.budget is not None:
            self.budget.called()
        # A plain loop: nearly every call succeeds at once, and a retrying library's state costs as much CPU
        # as the request.
        for delay in (*self.delays_s, None):
            try:
                return attempt(lost is not None)
            except BranchlakeError as failure:
                if lost is None and isinstance(failure, NessieOutcomeUnknown):
                    lost = failure
                passing = isinstance(failure, Transient | NotNessie)
                again = passing or (repeatable and isinstance(failure, OutcomeUnknown))
                if delay is None or not again or not self._affordable():
                    if lost is None or lost is failure or isinstance(failure, _SETTLED):
                        raise
                    raise lost from failure
            sleep(delay)
        raise AssertionError  # the last delay is None

    def _affordable(self) -> bool:
        return self.budget is None or self.budget.spend()
