"""A retry budget: repeated calls are a small share of all, so that a service in trouble meets no storm."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


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

    def called(self) -> None:
        """A call begins, for the first time."""
        with self._lock:
            self._calls.append(self._clock())
            self._forget()

    def spend(self) -> bool:
        """Whether a call may be repeated; it is counted as repeated then."""
        with self._lock:
            self._forget()
            if len(self._repeats) >= max(self._reserve, self._share * len(self._calls)):
                return False
            self._repeats.append(self._clock())
            return True

    def _forget(self) -> None:
        since = self._clock() - self._window_s
        for times in (self._calls, self._repeats):
            while times and times[0] < since:
                times.popleft()
