"""Which Python daemons of Spark may be ended."""

from __future__ import annotations

import psutil

IDLE_S = 180.0
"""As old is a daemon before it is ended. Spark itself ends workers that did nothing for a minute."""


def is_idle(daemon: psutil.Process) -> bool:
    """Whether it has no worker: Spark starts another daemon when it needs one."""
    return not daemon.children()
