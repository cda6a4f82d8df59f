"""A warm process: it has loaded one code location, and forks a worker for each run.

The launcher starts it as `python -m branchlake_dagster.launching.template DESCRIPTOR`, with one end of a
socket pair. The process opens no storage and no connection and starts no thread, because its forks would
share them. It ends when the launcher's end is closed, which also happens if the launcher dies, and when its
last worker has ended. It must wait for its workers: only the parent gets the exit status of a worker.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import selectors
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from branchlake_dagster.internals.dagster_launching import (
    InstanceRef,
    RepositoryPythonOrigin,
    deserialize_value,
    inject_secrets,
    load_repository,
    preload_execution,
)
from branchlake_dagster.internals.dagster_sqlite import install_revision_cache, keep_sqlite_connections
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message
from branchlake_dagster.launching.worker import (
    RUN_ENDED_STATUS,
    WorkerRun,
    end_process,
    execute_run,
    list_open_files,
    report_crash,
)

Stamp = tuple[int, int]
"""The time of the last change in nanoseconds, and the size in bytes."""

_INSTALLED_FOLDERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def imported_sources(
    modules: Iterable[ModuleType], *, began_ns: int, ended_ns: int
) -> dict[Path, Stamp | None]:
    """Return the stamp (time and size) of each module's source file; None if it changed during the import.

    `began_ns` and `ended_ns` are the times of `time.time_ns` around the imports. It is unknown which version
    of a file that was written between them was imported. Files of installed packages are omitted.
    """
    stamps: dict[Path, Stamp | None] = {}
    for module in modules:
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py") and not name.startswith(_INSTALLED_FOLDERS):
            stamp = _file_stamp(path := Path(name))
            if stamp is not None:
                stamps[path] = None if began_ns <= stamp[0] <= ended_ns else stamp
    return stamps


def changed_files(stamps: Mapping[Path, Stamp | None]) -> list[Path]:
    """Return the files that were written or deleted after the import, and those with the stamp None."""
    return [path for path, stamp in stamps.items() if stamp is None or _file_stamp(path) != stamp]


def _file_stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


_LATE_IMPORTS = {
    "branchlake_dagster.nessie": ("branchlake_dagster.nessie.json_codec",),
    "pyiceberg": ("pyiceberg.io.pyarrow",),
    "pyspark.sql": ("pyspark.sql.connect.session", "grpc_status.rpc_status"),
}
"""Modules that the first calls of a run import late, by the package that needs them. Each costs half a
second."""

_DESCRIPTORS_FOLDER = Path("/proc/self/fd")
_THREADS_FOLDER = Path("/proc/self/task")
_POOL_THREAD = re.compile(r"(polars|rayon|tokio)-(?:\d|rt-|runtime)")
"""The names of native threads that wait for work of a pool: `polars-0`, `tokio-rt-worker`. The other threads
of these libraries, which start with the import, are no loss in a fork."""


class NotForkable(Exception):  # noqa: N818 - the name describes the code location
    """The import of the code location did something that a fork must not inherit."""


def load_code_location(message: Mapping[str, Any]) -> dict[Path, Stamp | None]:
    """Import and build everything that a run needs, and return the stamps of the imported source files.

    `message` is that of `LoadSpec.to_message`. Raises the errors of the imports. Raises NotForkable if they
    have started threads or opened network connections.
    """
    start_ns = time.time_ns()
    sockets_before = _list_sockets()
    instance_ref = deserialize_value(message["instance"], InstanceRef)
    inject_secrets(instance_ref, message["location"])
    load_repository(deserialize_value(message["origin"], RepositoryPythonOrigin), message["load_data"])
    preload_execution(instance_ref)
    keep_sqlite_connections()
    install_revision_cache()
    _preload_late_imports()
    if other_threads := [
        thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
    ]:
        raise NotForkable(f"importing the code started threads: {', '.join(other_threads)}")
    if pools := list_thread_pools():
        raise NotForkable(
            f"importing the code started threads of {', '.join(pools)}, which a fork does not have"
        )
    if new_sockets := _list_sockets() - sockets_before:
        raise NotForkable(f"importing the code opened {len(new_sockets)} network connections")
    return imported_sources(list(sys.modules.values()), began_ns=start_ns, ended_ns=time.time_ns())


def _preload_late_imports() -> None:
    for imported, modules in _LATE_IMPORTS.items():
        if imported in sys.modules:
            for module in modules:
                with contextlib.suppress(ImportError):  # an extra that is not installed
                    import_module(module)


def list_thread_pools() -> list[str]:
    """Return the names of libraries with a running pool of native threads, sorted.

    In a fork of this process their first call would hang.
    """
    names = set()
    for entry in _THREADS_FOLDER.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            names.add((entry / "comm").read_text().strip())
    return sorted({pool[1] for name in names if (pool := _POOL_THREAD.match(name))})


def _list_sockets() -> set[str]:
    sockets = set()
    for entry in _DESCRIPTORS_FOLDER.iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is already closed
            target = str(entry.readlink())
            if target.startswith("socket:"):
                sockets.add(target)
    return sockets


class Template:
    """The main loop of a warm process: forks workers on request and waits for them.

    `launcher` is the socket of the requests. `sources` are the stamps of the imported files: a request is
    refused if one of them has changed.
    """

    def __init__(self, launcher: socket.socket, sources: Mapping[Path, Stamp | None]) -> None:
        self._launcher: socket.socket | None = launcher
        self._sources = sources
        self._asked_to_end = False
        self._children: dict[int, WorkerRun | None] = {}
        """The run that each child executes, by process id. None for a child that only reports a crash."""
        # Not epoll: its list of descriptors is in the kernel, and the forks would share it.
        self._selector = selectors.PollSelector()
        self._selector.register(launcher, selectors.EVENT_READ)
        self._wake_reader, wake_writer = socket.socketpair()
        self._wake_writer = wake_writer
        for end in (self._wake_reader, wake_writer):
            end.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, _only_wake_up)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)

    def serve(self) -> Callable[[], int] | None:
        """Serve until the launcher is gone and all children have ended, then return None.

        In a fork, return the function that the fork must execute. It returns the fork's exit status.
        """
        while self._launcher is not None or self._children:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_reader:
                    self._wake_reader.recv(4096)
                elif self._launcher is not None and (task := self._handle_request(self._launcher)):
                    return task
            if task := self._collect_children():
                return task
            if self._asked_to_end:
                self._stop_requests()
        return None

    def _handle_request(self, launcher: socket.socket) -> Callable[[], int] | None:
        """Answer one request of the launcher, and return None. In the new worker, return its task."""
        try:
            request, descriptors = receive_message(launcher)
        except ChannelClosed:
            self._stop_requests()
            return None
        if len(descriptors) != 1:
            raise ValueError("A request must pass exactly one socket, for its answer.")
        reply = socket.socket(fileno=descriptors[0])
        if files := changed_files(self._sources):
            _send_refusal(reply, {"changed": [str(path) for path in files[:3]]})
            return None
        run = WorkerRun(request["run_id"], request["instance"])
        try:
            in_template = self._fork(run)
        except OSError as error:
            _send_refusal(reply, {"failed": f"it could not be forked: {error}"})
            return None
        if in_template:
            reply.close()
            return None
        return lambda: execute_run(run, reply)

    def _collect_children(self) -> Callable[[], int] | None:
        """Collect the children that have ended. If one has crashed, fork a process that reports the crash.

        Returns None, or in that fork its task.
        """
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return None
            run = self._children.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if run is not None and code != RUN_ENDED_STATUS and not self._fork(None):
                return lambda: report_crash(run, code)
        return None

    def _fork(self, run: WorkerRun | None) -> bool:
        """Fork this process. `run` is the run of the fork, or None for a fork that only reports a crash.

        Returns True in this process and False in its fork, which closes everything of this process.
        """
        # Both processes would write text that was printed but not yet flushed.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._children[pid] = run
            return True
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._stop_requests()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        return False

    def _stop_requests(self) -> None:
        if self._launcher is not None:
            self._selector.unregister(self._launcher)
            self._launcher.close()
            self._launcher = None

    def _on_term(self, *_: object) -> None:
        """Stop accepting requests. The warm process still waits for its workers."""
        self._asked_to_end = True


def _send_refusal(reply: socket.socket, answer: dict[str, Any]) -> None:
    with reply, contextlib.suppress(OSError):  # the launcher may have given up
        send_message(reply, answer)


def _only_wake_up(*_: object) -> None:
    """Do nothing: the signal only has to interrupt the wait."""


def main(descriptor: int) -> int:
    """Load the code location, then serve requests. Return the exit status of the warm process.

    The status is 0, or 1 if the code location cannot be loaded. Forks do not return: they end with
    `end_process`.
    """
    launcher = socket.socket(fileno=descriptor)
    launcher.set_inheritable(False)
    # Ctrl-C reaches all processes of the terminal. It interrupts the workers, but this process must still
    # wait for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        message, _ = receive_message(launcher)
        sources = load_code_location(message)
    except ChannelClosed:
        return 0
    except BaseException as error:  # noqa: BLE001 - the launcher gets every failure of the code
        traceback.print_exc()
        send_message(launcher, {"failed": f"{type(error).__name__}: {error}"})
        return 1
    # All present objects stay alive for ever. Without the freeze, the garbage collector of a fork would touch
    # them all, and so copy their pages.
    gc.collect()
    files = list_open_files()
    for file in files:
        with contextlib.suppress(Exception):  # not writable
            file.flush()  # otherwise each fork would write the buffer
    gc.freeze()
    send_message(launcher, {"ready": os.getpid()})
    task = Template(launcher, sources).serve()
    if task is not None:
        end_process(task(), files)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
