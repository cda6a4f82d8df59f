"""What goes wrong on the wire, and when."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from random import Random


class Fault(StrEnum):
    """One way in which a request to Nessie fails."""

    NONE = "ok"
    REFUSED = "connection refused"
    """Never sent."""
    LOST = "reply lost"
    """Applied, and nobody was told."""
    DELAYED = "delayed"
    """The reply is lost now, and the request is applied later."""
    OVERLOADED = "429"
    CONTENTION = "409 without a reason"
    """The server gave up on an internal race."""
    FAILED = "503, not applied"
    FAILED_LATE = "500, applied"
    SLOW = "slow"
    DEATH_BEFORE = "caller dies before it is sent"
    DEATH_AFTER = "caller dies before the reply"


ALL = tuple(fault for fault in Fault if fault is not Fault.NONE)
ON_READS = (Fault.REFUSED, Fault.LOST, Fault.OVERLOADED, Fault.FAILED, Fault.SLOW, Fault.DEATH_AFTER)


LONGEST_DELAY_S = 25.0
"""Less than a client's patience with a silent server: nothing arrives after that."""


class Faults:
    """Draws a fault for each request. `rate` is the share of requests that fail, of those that change
    something; reading fails a fifth as often, because nothing depends on it but time."""

    def __init__(self, random: Random, *, rate: float, kinds: Sequence[Fault] = ALL) -> None:
        self._random = random
        self._rate = rate
        self._on_changes = tuple(kinds)
        self._on_reads = tuple(fault for fault in kinds if fault in ON_READS)

    def heal(self) -> None:
        """From now on nothing fails."""
        self._rate = 0.0

    def draw(self, *, changes: bool) -> Fault:
        """The fate of the next request."""
        kinds = self._on_changes if changes else self._on_reads
        if not kinds or self._random.random() >= (self._rate if changes else self._rate / 5):
            return Fault.NONE
        return kinds[int(self._random.random() * len(kinds))]

    def delay(self) -> float:
        """For how many seconds a delayed request is under way."""
        return self._random.random() ** 2 * LONGEST_DELAY_S
