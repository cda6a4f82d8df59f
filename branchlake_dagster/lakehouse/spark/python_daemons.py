"""The Python processes that Spark's server leaves behind.

For each Connect session whose frames run Python (`mapInArrow`, UDFs) Spark 4.1 starts a daemon that forks
the workers, and keeps it when the session is over, for as long as the server lives: seventy of them after an
hour of tests. One that has no worker any more may be ended: Spark starts another when it needs one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import psutil

from branchlake_dagster.lakehouse.embedded.process import ProcessRecord
from branchlake_dagster.lakehouse.python_workers.idle import IDLE_S, is_idle

_EVERY_S = 60.0
_looked = threading.Lock()
_last: dict[int, float] = {}


def end_idle_daemons(server: ProcessRecord, *, now: Callable[[], float] = time.time) -> int:
    """End the ordinary daemons of a Spark server on this machine that have no worker, and are minutes old.

    How many. Looks once a minute and process, whoever asks; touches only children of the server. Those that
    were forked from the warm process are ended by it.
    """
    with _looked:
        if now() - _last.get(server.pid, 0.0) < _EVERY_S or not server.alive():
            return 0
        _last[server.pid] = now()
    ended = 0
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        for one in psutil.Process(server.pid).children():
            with contextlib.suppress(psutil.Error):
                old = now() - one.create_time() > IDLE_S
                if old and "pyspark.daemon" in one.cmdline() and is_idle(one):
                    one.terminate()
                    ended += 1
    return ended
