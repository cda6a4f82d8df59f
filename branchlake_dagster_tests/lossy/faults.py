"""What a lossy network does to a request, and the dice that say when."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """One thing that goes wrong. The names are what the command prints."""

    REFUSED = "connection refused for a while"
    RESET = "reset before it was sent on"
    LOST = "applied, reply lost"
    LATE = "applied after the client gave up"
    BUSY = "429"
    AWAY = "503, not applied"
    FELL_OVER = "500, applied"
    CUT = "body cut off"
    GARBLED = "body ends early, in good order"
    SLOW = "slow"


_READS = (Fault.REFUSED, Fault.RESET, Fault.BUSY, Fault.AWAY, Fault.CUT, Fault.GARBLED, Fault.SLOW)
_CHANGES = (
    Fault.REFUSED,
    Fault.RESET,
    Fault.LOST,
    Fault.LOST,
    Fault.LATE,
    Fault.LATE,
    Fault.BUSY,
    Fault.AWAY,
    Fault.FELL_OVER,
    Fault.SLOW,
)


@dataclass(frozen=True)
class Draw:
    """What happens to one request. `delay_s` is how long a slow, late or refusing one takes."""

    fault: Fault | None
    delay_s: float = 0.0
    part: float = 1.0
    """How much of a body that is cut off arrives."""


class Dice:
    """Draws by a seed, one request after the other; which request meets which draw is up to the processes.

    `rate`: the share of requests to which something happens. Safe to share between threads.
    """

    def __init__(self, seed: int, rate: float) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self.rate = rate
        self.requests = 0
        self.counts: Counter[Fault] = Counter()

    def draw(self, *, changes: bool) -> Draw:
        """The fate of the next request; `changes`: whether it asks for a change."""
        with self._lock:
            self.requests += 1
            if self._chance.random() >= self.rate:
                return Draw(None)
            fault = self._chance.choice(_CHANGES if changes else _READS)
            self.counts[fault] += 1
            # The client's first retry comes after a second.
            late = fault is Fault.LATE
            delay = self._chance.uniform(1.2, 8.0) if late else self._chance.uniform(0.2, 2.0)
            return Draw(fault, delay, self._chance.uniform(0, 0.95))
