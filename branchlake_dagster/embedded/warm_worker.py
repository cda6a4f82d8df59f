"""A warm process: it has imported what workers import first, and forks a Python daemon for Spark on request.

Started by the first daemon of an embedded Spark server as `python -m … LISTENER SERVER_PID`; it ends with
that server. It runs no thread and opens no connection, since forks would share them. Modules of users are
not imported here: a session's workers import those anew, as they stand.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy
import psutil

from branchlake_dagster.embedded.idle_daemons import IDLE_S, is_idle
from branchlake_dagster.internals.json_channel import ChannelClosed, receive, send
from branchlake_dagster.internals.pyspark import daemon_manager

_IMPORTED = (
    "pyspark.worker",
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pyiceberg.io.pyarrow",
)
_LOOK_EVERY_S = 60.0
_ORDER_WITHIN_S = 10.0
_SAME = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS")
"""What counts on import: who has it otherwise needs a process of its own."""


class Warm:
    """Forks daemons, and ends those whose sessions do nothing any more."""

    def __init__(self, listener: socket.socket, server: psutil.Process) -> None:
        self._listener = listener
        self._server = server
        # Not epoll: its list lies in the kernel and would be shared with the forks.
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._environment = {name: os.environ.get(name) for name in _SAME}
        self._looked = time.monotonic()
        with contextlib.suppress(AttributeError, OSError):  # Linux tells when a process ends
            self._selector.register(os.pidfd_open(server.pid), selectors.EVENT_READ)

    def serve(self) -> Callable[[], None] | None:
        """Until Spark has ended: then None. In a fork: what that has to do."""
        while _runs(self._server):
            for key, _ in self._selector.select(_LOOK_EVERY_S):
                if key.fileobj is not self._listener:
                    return None
                if task := self._accept():
                    return task
            if time.monotonic() - self._looked >= _LOOK_EVERY_S:
                self._looked = time.monotonic()
                self._end_idle()
        return None

    def _accept(self) -> Callable[[], None] | None:
        asking, _ = self._listener.accept()
        passed: list[int] = []
        try:
            with asking:
                asking.settimeout(_ORDER_WITHIN_S)
                order, passed = receive(asking)
                asking.settimeout(None)
                if any(order["environment"].get(name) != it for name, it in self._environment.items()):
                    send(asking, {"declined": "another environment"})
                elif not os.fork():
                    # Whatever it raises: a fork must not go on as another warm process.
                    return partial(_in_fork, order, passed, socket.socket(fileno=asking.detach()))
        except (OSError, ChannelClosed):
            traceback.print_exc()  # who asked becomes an ordinary daemon
        for descriptor in passed:
            os.close(descriptor)
        return None

    def _end_idle(self) -> None:
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if time.time() - one.create_time() > IDLE_S and is_idle(one):
                    one.terminate()


def _runs(server: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    return False


def _in_fork(order: dict[str, Any], passed: list[int], asking: socket.socket) -> None:
    """The life of a daemon."""
    for number, descriptor in enumerate(passed):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    if not sys.flags.safe_path:
        sys.path[0] = order["folder"]
    sys.argv = ["pyspark.daemon", *order["arguments"]]
    os.register_at_fork(after_in_child=lambda: _own(asking))
    manager = daemon_manager(order["arguments"][0])
    send(asking, {"daemon": os.getpid()})
    receive(asking)  # who has given up has closed its end, and become a daemon with the same pipes
    manager()


def _own(asking: socket.socket) -> None:
    """What a worker must not have in common with others."""
    asking.close()  # its end tells when the daemon ends
    numpy.random.seed()


def _import() -> None:
    for name in _IMPORTED:
        import_module(name)


def main(listener: int, server: int) -> int:
    """The exit status, of the warm process and of each of its forks."""
    try:
        spark = psutil.Process(server)
    except psutil.NoSuchProcess:
        return 0
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a daemon ended
    _import()
    # What is there now stays for ever; the collector of a fork would otherwise touch, and so copy, all of it.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=listener) as listening:
        task = Warm(listening, spark).serve()
    if task:
        task()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
