"""A warm process has imported the libraries of workers, and forks a Python daemon for Spark on request.

The first daemon of an embedded Spark server starts it as `python -m … LISTENER SERVER_PID`. It ends with that
server. It runs no thread and opens no connection, because forks would share them. It does not import users'
modules: the workers of each session import their present version.
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
from pathlib import Path
from typing import Any

import numpy
import psutil

from branchlake_dagster.embedded.process import IDLE_S, is_idle
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
"""Variables that affect imports. A daemon with other values cannot be forked from this process."""


class WarmProcess:
    """Forks daemons on request, and terminates daemons that have no workers.

    `listener` is the socket of the requests. `server` is the Spark server, with which this process ends.
    """

    def __init__(self, listener: socket.socket, server: psutil.Process) -> None:
        self._listener = listener
        self._server = server
        # Not epoll: its list is in the kernel, and the forks would share it.
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._environment = {name: os.environ.get(name) for name in _IMPORT_VARIABLES}
        self._swept_s = time.monotonic()
        with contextlib.suppress(AttributeError, OSError):  # only Linux signals the end of a process
            self._selector.register(os.pidfd_open(server.pid), selectors.EVENT_READ)

    def serve(self) -> Callable[[], None] | None:
        """Serve requests until Spark's server ends, then return None.

        In a fork, return the function that the fork must execute.
        """
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
                    # The fork returns at once: even after an error it must not continue as a warm process.
                    return partial(
                        _run_daemon, request, descriptors, socket.socket(fileno=connection.detach())
                    )
        except (OSError, ChannelClosed):
            traceback.print_exc()  # the requesting process becomes an ordinary daemon
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _end_idle_daemons(self) -> None:
        for daemon in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # the daemon ended meanwhile
                if time.time() - daemon.create_time() > IDLE_S and is_idle(daemon):
                    daemon.terminate()


def _is_running(server: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    return False


def _run_daemon(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> None:
    """Run this forked process as Spark's daemon until the daemon ends.

    `request` has the requesting process's `arguments`, `environment` and `folder`, which replace those of
    this process. `descriptors` become its standard input, output and error. `connection` leads to the
    requesting process; the daemon works only after that process has answered. Raises OSError or
    ChannelClosed.
    """
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
    manager = load_daemon_manager(
        request["arguments"][0],
        before_task=partial(_restore_folder, request["folder"]),
        before_port=partial(send_message, connection, {"listening": True}),
    )
    send_message(connection, {"daemon": os.getpid()})
    # If the requesting process gave up, it closed the connection and became a daemon with the same pipes.
    # Then this call raises ChannelClosed.
    receive_message(connection)
    manager()


def _restore_folder(folder: str) -> None:
    """Create and enter the session's folder again if Spark has deleted it.

    An executor keeps the folders of the 100 sessions that ran a task last. It deletes the folder of another
    session even if the session continues. Then `os.getcwd`, and so the import of many libraries, would fail.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.chdir(folder)


def _reset_worker(connection: socket.socket) -> None:
    """Separate a forked worker from its daemon and from other workers.

    Closes its copy of `connection`, the daemon's socket to the requesting process, and seeds NumPy anew.
    """
    connection.close()  # only the daemon may hold it: its end signals the end of the daemon
    numpy.random.seed()


def _import_modules() -> None:
    for name in _IMPORTED_MODULES:
        import_module(name)


def main(listener_fd: int, server_pid: int) -> int:
    """Run the warm process until Spark's server ends, and each of its forks. Return the exit status 0.

    `listener_fd` is the inherited file descriptor of the listening socket, `server_pid` the process id of
    Spark's server. If that process does not exist, returns at once.
    """
    try:
        spark = psutil.Process(server_pid)
    except psutil.NoSuchProcess:
        return 0
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the exit status of daemons is not needed
    _import_modules()
    # The present objects are never freed. Otherwise the garbage collector of a fork would touch, and so copy,
    # all of them.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=listener_fd) as listener:
        task = WarmProcess(listener, spark).serve()
    if task:
        task()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
