"""When a call to Nessie is made again. The decision asks the error's marker, never its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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
    """Waits between attempts in seconds; seed 000 asks for 1, 2 and 4. Empty means one attempt."""

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
        doubt: NessieOutcomeUnknown | None = None
        delays = iter(self.delays_s)
        while True:
            try:
                return attempt(doubt is not None)
            except BranchlakeError as failure:
                passing = isinstance(failure, Transient | NotNessie)
                if isinstance(failure, NessieOutcomeUnknown) and doubt is None:
                    doubt = failure
                again = passing or (repeatable and isinstance(failure, OutcomeUnknown))
                delay = next(delays, None) if again else None
                if delay is None:
                    if doubt is None or doubt is failure or isinstance(failure, _SETTLED):
                        raise
                    raise doubt from failure
            sleep(delay)
