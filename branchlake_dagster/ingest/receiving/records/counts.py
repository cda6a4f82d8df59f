"""What a receiver has seen, as plain numbers; only the event loop's thread changes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_BEFORE_RECEIPT = frozenset({"kernel", "too_large"})
"""Drops of what this process never had, or refused to take."""

DELAYS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the classes of a delay; above the last there is one more."""


@dataclass
class Delays:
    """How many records took how long from receipt to durable, by class."""

    classes: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Count them."""
        found = np.bincount(np.searchsorted(DELAYS_S, seconds), minlength=len(self.classes))
        self.classes = [before + int(more) for before, more in zip(self.classes, found, strict=True)]
        self.total_s += float(seconds.sum())


@dataclass
class Counts:
    """Records of one source.

    Always ``received == handed_over + lost() + not_confirmed + not_handed_over + waiting``, where *waiting*
    is in the buffer or being written. ``not_confirmed`` and ``not_handed_over`` are what an end left: the
    sink's answer is missing, or it was never asked. ``events`` are the protocol's own.
    """

    received: int = 0
    received_bytes: int = 0
    handed_over: int = 0
    not_confirmed: int = 0
    not_handed_over: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    delays: Delays = field(default_factory=Delays)

    def dropped_in_all(self) -> int:
        """Drops of all reasons."""
        return self.dropped.total()

    def lost(self) -> int:
        """Received and then dropped."""
        return sum(n for reason, n in self.dropped.items() if reason not in _BEFORE_RECEIPT)
