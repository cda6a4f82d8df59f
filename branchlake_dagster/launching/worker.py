"""Executes one run in a fork of a warm process, and ends the fork without the interpreter's cleanup.

A fork ends as the interpreter would, but it does not free the objects that it has inherited. Freeing a
quarter of a gigabyte of modules, each page copied from the warm process, was a fifth of the CPU time of a
small run. The kernel frees them at once.

`WorkerProcess` identifies the process that executes a run. Other processes of its machine can check it
safely, because the process id alone may be reused.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from dagster import DagsterInstance

from branchlake_dagster.embedded.process import find_start_s, is_same_start
from branchlake_dagster.internals.dagster_launching import (
    InstanceRef,
    capture_interrupts,
    deserialize_value,
    execute_launched_run,
    format_crash,
)
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message
from branchlake_dagster.stored_names import RunTag


def pid_namespace_name() -> str:
    """Return a name for the set of processes that this process can see: the boot id and the PID namespace.

    Returns the host name on systems without these.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class WorkerProcess:
    """The process of a run.

    `started_s` is its start in seconds since boot, because the system reuses process ids. `place` is the
    `pid_namespace_name` of the process.
    """

    pid: int
    started_s: float
    place: str

    @classmethod
    def current(cls) -> WorkerProcess:
        """Return the record of the calling process."""
        # The calling process runs, so it has a start time.
        return cls(os.getpid(), find_start_s(os.getpid()) or 0.0, pid_namespace_name())

    @classmethod
    def from_tag(cls, tag: str | None) -> WorkerProcess | None:
        """Parse the value of `to_tag`. Return None if `tag` is None or cannot be parsed."""
        try:
            return cls(**json.loads(tag or ""))
        except (ValueError, TypeError):
            return None

    def to_tag(self) -> str:
        """Return the process as JSON, the value of the run tag `RunTag.WORKER`."""
        return json.dumps(asdict(self))

    def is_visible(self) -> bool:
        """Return whether the calling process can see the run's process: same boot and same PID namespace."""
        return self.place == pid_namespace_name()

    def is_running(self) -> bool:
        """Return whether the process still runs.

        A zombie, which its parent has not yet collected, does not run.
        """
        current_start_s = find_start_s(self.pid)
        return current_start_s is not None and is_same_start(current_start_s, self.started_s)


RUN_ENDED_STATUS = 85
"""The exit status of a worker that leaves its run ended, or untouched. It is not 0, because code of a step
may call `os._exit(0)`."""


@dataclass(frozen=True)
class WorkerRun:
    """A run and its Dagster instance, serialized as the launcher sent it."""

    run_id: str
    instance: str

    def instance_ref(self) -> InstanceRef:
        """Return the reference of the Dagster instance."""
        return deserialize_value(self.instance, InstanceRef)


def execute_run(run: WorkerRun, launcher: socket.socket) -> int:
    """Execute the run in this process once the launcher agrees, and return the exit status.

    The status is `RUN_ENDED_STATUS` if the run has ended or was not started, and 1 if it has not ended.
    Before the launcher agrees, the run is untouched. A launcher that has given up closes its end of the
    socket and starts the run in another way. So a run never has two processes.
    """
    process = WorkerProcess.current()
    try:
        send_message(launcher, {"worker": process.pid})
        receive_message(launcher)
    except (ChannelClosed, OSError):
        return RUN_ENDED_STATUS
    finally:
        launcher.close()
    _differ_from_siblings()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with capture_interrupts(), DagsterInstance.from_ref(run.instance_ref()) as instance:
        # The worker writes this tag itself and first, because the launcher may have ended by now. Termination
        # of the run needs the tag.
        instance.add_run_tags(run.run_id, {RunTag.WORKER: process.to_tag()})
        execute_launched_run(instance, run.run_id)
        dagster_run = instance.get_run_by_id(run.run_id)
    return RUN_ENDED_STATUS if dagster_run is None or dagster_run.is_finished else 1


def report_crash(run: WorkerRun, exit_code: int) -> int:
    """Report a run as failed whose process ended without finishing it. Returns the exit status 0."""
    with DagsterInstance.from_ref(run.instance_ref()) as instance:
        dagster_run = instance.get_run_by_id(run.run_id)
        if dagster_run is not None and not dagster_run.is_finished:
            message = format_crash(run.run_id, exit_code)
            instance.report_engine_event(message, dagster_run)
            instance.report_run_failed(dagster_run, message)
    return 0


def _differ_from_siblings() -> None:
    """Seed numpy's global random numbers anew, because each fork inherits the same state.

    Python seeds its own random numbers in each fork.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


_FILE_BASE = io.IOBase.__mro__[1]
"""The base class of all file objects. Those implemented in C list only this class among their bases, not the
public one."""

_CLOSING_S = 30.0


def end_process(status: int, inherited: Iterable[Any] = ()) -> NoReturn:
    """End this process with `status`, after what user code relies on at the end of a process.

    First, threads other than daemons end. Then functions that are registered with `atexit` are called, the
    last one first. Then open files are closed, also the `inherited` ones, for at most 30 seconds. An object
    that completes its file only when it is freed, such as an open archive or Parquet writer, does not
    complete it.
    """
    closing = threading.Event()
    # A daemon thread may hold a file's lock for ever, for example while it waits for a reader that has ended.
    threading.Thread(target=_give_up, args=(closing, status), daemon=True).start()
    for last_act in (
        threading._shutdown,  # type: ignore[attr-defined]  # as multiprocessing does for its forks
        atexit._run_exitfuncs,
        closing.set,
        sys.stdout.flush,
        sys.stderr.flush,
        lambda: _close_files([*inherited, *list_open_files()]),
    ):
        _call_safely(last_act)
    os._exit(status)


def list_open_files() -> Sequence[Any]:
    """Return all file objects known to the garbage collector, except the three standard streams."""
    objects = gc.get_objects()
    # By type, because there are few types. `isinstance` would also call proxies of other libraries, with any
    # effect.
    file_types = {kind for kind in set(map(type, objects)) if _FILE_BASE in kind.__mro__}
    return [file for file in objects if type(file) in file_types and not _is_stream(file)]


def _is_stream(file: Any) -> bool:
    try:
        return bool(file.fileno() <= 2)
    except Exception:  # noqa: BLE001 - closed, or not a file of the system; other classes may raise anything
        return False


def _close_files(files: Iterable[Any]) -> None:
    """Close the files. A file that writes through another file is closed before that file."""
    for file in sorted(files, key=_layer_depth):
        with contextlib.suppress(Exception):  # the disk is full, or the reader has ended
            file.close()


def _layer_depth(file: Any) -> int:
    if isinstance(file, io.TextIOBase):
        return 0
    if type(file).__module__ != "_io":
        return 1  # compressed, remote or of another library
    return 2 if isinstance(file, io.BufferedIOBase) else 3


def _call_safely(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:  # noqa: BLE001 - the interpreter also prints the error and continues
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _give_up(closing: threading.Event, status: int) -> None:
    closing.wait()
    time.sleep(_CLOSING_S)
    os._exit(status)
