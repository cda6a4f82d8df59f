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
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message
from branchlake_dagster.internals.pyspark import load_daemon_manager

_IMPORTED_MODULES = (
    "pyspark.worker",
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pyiceberg.io.pyarrow",
)
_SWEEP_EVERY_S = 60.0
_REQUEST_TIMEOUT_S = 10.0
_IMPORT_VARIABLES = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS")
"""What counts on import: who has it otherwise needs a process of its own."""


class WarmProcess:
    """Forks daemons, and ends those whose sessions do nothing any more."""

    def __init__(self, listener: socket.socket, server: psutil.Process) -> None:
        self._listener = listener
        self._server = server
        # Not epoll: its list lies in the kernel and would be shared with the forks.
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._environment = {name: os.environ.get(name) for name in _IMPORT_VARIABLES}
        self._swept_s = time.monotonic()
        with contextlib.suppress(AttributeError, OSError):  # Linux tells when a process ends
            self._selector.register(os.pidfd_open(server.pid), selectors.EVENT_READ)

    def serve(self) -> Callable[[], None] | None:
        """Until Spark has ended: then None. In a fork: what that has to do."""
        while _is_running(self._server):
            for key, _ in self._selector.select(_SWEEP_EVERY_S):
                if key.fileobj is not self._listener:
                    return None
                if task := self._accept():
                    return task
            if time.monotonic() - self._swept_s >= _SWEEP_EVERY_S:
                self._swept_s = time.monotonic()
                self._end_idle_daemons()
        return None

    def _accept(self) -> Callable[[], None] | None:
        connection, _ = self._listener.accept()
        descriptors: list[int] = []
        try:
            with connection:
                connection.settimeout(_REQUEST_TIMEOUT_S)
                request, descriptors = receive_message(connection)
                connection.settimeout(None)
                if any(
                    request["environment"].get(name) != value for name, value in self._environment.items()
                ):
                    send_message(connection, {"declined": "another environment"})
                elif not os.fork():
                    # Whatever it raises: a fork must not go on as another warm process.
                    return partial(
                        _run_daemon, request, descriptors, socket.socket(fileno=connection.detach())
                    )
        except (OSError, ChannelClosed):
            traceback.print_exc()  # who asked becomes an ordinary daemon
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _end_idle_daemons(self) -> None:
        for daemon in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if time.time() - daemon.create_time() > IDLE_S and is_idle(daemon):
                    daemon.terminate()


def _is_running(server: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    return False


def _run_daemon(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> None:
    """The life of a daemon."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if not sys.flags.safe_path:
        sys.path[0] = request["folder"]
    sys.argv = ["pyspark.daemon", *request["arguments"]]
    os.register_at_fork(after_in_child=lambda: _reset_worker(connection))
    manager = load_daemon_manager(request["arguments"][0])
    send_message(connection, {"daemon": os.getpid()})
    receive_message(
        connection
    )  # who has given up has closed its end, and become a daemon with the same pipes
    manager()


def _reset_worker(connection: socket.socket) -> None:
    """What a worker must not have in common with others."""
    connection.close()  # its end tells when the daemon ends
    numpy.random.seed()


def _import_modules() -> None:
    for name in _IMPORTED_MODULES:
        import_module(name)


def main(listener_fd: int, server_pid: int) -> int:
    """The exit status, of the warm process and of each of its forks."""
    try:
        spark = psutil.Process(server_pid)
    except psutil.NoSuchProcess:
        return 0
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a daemon ended
    _import_modules()
    # What is there now stays for ever; the collector of a fork would otherwise touch, and so copy, all of it.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=listener_fd) as listener:
        task = WarmProcess(listener, spark).serve()
    if task:
        task()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
