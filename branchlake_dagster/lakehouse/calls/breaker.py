"""A circuit breaker: a service that fails is left alone for a moment, then asked by one call."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BreakerRule:
    """When it opens: so large a share of at least `least_calls` within `window_s` has failed.

    Open, it lets nothing through for `open_s`; then one call, whose end decides. Seconds of the clock.
    """

    share: float = 0.5
    least_calls: int = 20
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

    def closed_in(self) -> float:
        """Seconds until the service may be asked; 0: now. Whoever gets 0 asks, and then says how it ended."""
        with self._lock:
            if self._open_until is None:
                return 0.0
            left = self._open_until - self._clock()
            if left > 0:
                return left
            if self._probing:
                return self._rule.open_s
            self._probing = True
            return 0.0

    def ended(self, *, failed: bool) -> None:
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
            count, bad = len(self._calls), sum(bad for _, bad in self._calls)
            if failed and count >= self._rule.least_calls and bad >= self._rule.share * count:
                self._open_until = now + self._rule.open_s
                self._calls.clear()
