"""Decide which Python daemons of Spark may be terminated."""

from __future__ import annotations

import psutil

IDLE_S = 180.0
"""The age in seconds from which an idle daemon is terminated. Spark terminates workers idle for a minute."""


def is_idle(daemon: psutil.Process) -> bool:
    """Return whether a daemon has no workers. Spark starts a new daemon when it needs one."""
    return not daemon.children()
