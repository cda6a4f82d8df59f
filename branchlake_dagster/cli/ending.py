"""Being ended from outside: what was begun is cleaned up first."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave through the `finally` clauses, as Ctrl-C does; the exit code is 128 + n.

    Without it a bench that a job scheduler ends leaves its servers and its folder behind.
    """

    def leave(number: int, _: FrameType | None) -> None:
        # Once: a second signal must not break off the cleaning up.
        for one in _ENDINGS:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {one: signal.signal(one, leave) for one in _ENDINGS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
