"""What a fork of the template does: execute one run, and end without the template's clean-up.

How a fork ends: as the interpreter would, but for taking apart all that it has inherited.

Freeing a quarter of a gigabyte of modules, page by page copied from the template, was a fifth of the CPU time
of a small run. The kernel does it at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dagster import DagsterInstance

from branchlake_dagster.internals.dagster_launching import (
    InstanceRef,
    capture_interrupts,
    deserialize_value,
    execute_launched_run,
    format_crash,
)
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message
from branchlake_dagster.launching.process import WorkerProcess
from branchlake_dagster.stored_names import RunTag

RUN_ENDED_STATUS = 85
"""The exit status of a worker that leaves its run ended, or untouched. No other way to end has this one: code
of a step may call `os._exit(0)`."""


@dataclass(frozen=True)
class WorkerRun:
    """A run and the instance that knows it, serialised as the launcher sent it."""

    run_id: str
    instance: str

    def instance_ref(self) -> InstanceRef:
        """Which Dagster instance it is."""
        return deserialize_value(self.instance, InstanceRef)


def execute_run(run: WorkerRun, launcher: socket.socket) -> int:
    """Execute the run in this process, once the launcher has agreed; the exit status.

    Until then nothing was touched: a launcher that has given up starts the run in another way, and closes
    its end, so that there are never two.
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
        # Its own first act, because the launcher may be gone by now, and who ends the run needs it.
        instance.add_run_tags(run.run_id, {RunTag.WORKER: process.to_tag()})
        execute_launched_run(instance, run.run_id)
        dagster_run = instance.get_run_by_id(run.run_id)
    return RUN_ENDED_STATUS if dagster_run is None or dagster_run.is_finished else 1


def report_crash(run: WorkerRun, exit_code: int) -> int:
    """Fail the run of a process that has ended without finishing it; the exit status."""
    with DagsterInstance.from_ref(run.instance_ref()) as instance:
        dagster_run = instance.get_run_by_id(run.run_id)
        if dagster_run is not None and not dagster_run.is_finished:
            message = format_crash(run.run_id, exit_code)
            instance.report_engine_event(message, dagster_run)
            instance.report_run_failed(dagster_run, message)
    return 0


def _differ_from_siblings() -> None:
    """Each fork starts with its parent's random numbers; Python's own are seeded anew by the fork itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


_FILE_BASE = io.IOBase.__mro__[1]
"""What all files are made from, those of C too, which only say that they are of the class that has a name."""

_CLOSING_S = 30.0


def end_process(status: int, inherited: Iterable[Any] = ()) -> NoReturn:
    """End this process with `status`, after what whoever wrote the code of its run may rely on.

    Its threads have ended, except daemons; what is registered with `atexit` was called, the last one first;
    files that nobody closed are closed, `inherited` ones too. What completes its file only when it is freed,
    as an archive or a Parquet writer that was left open, does not.
    """
    closing = threading.Event()
    # A daemon's thread may hold a file's lock for ever, and be waiting for a reader that is gone.
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
    """Every file object that the garbage collector lists, but for the process's own three streams."""
    objects = gc.get_objects()
    # By their types, which are few: `isinstance` asks proxies of others too, and they answer as they like.
    file_types = {kind for kind in set(map(type, objects)) if _FILE_BASE in kind.__mro__}
    return [file for file in objects if type(file) in file_types and not _is_stream(file)]


def _is_stream(file: Any) -> bool:
    try:
        return bool(file.fileno() <= 2)
    except Exception:  # noqa: BLE001 - it is closed, or none of the system's; whatever the class of it says
        return False


def _close_files(files: Iterable[Any]) -> None:
    """Close the files, what is written through others before those."""
    for file in sorted(files, key=_layer_depth):
        with contextlib.suppress(Exception):  # its disk is full, or nobody reads it any more
            file.close()


def _layer_depth(file: Any) -> int:
    if isinstance(file, io.TextIOBase):
        return 0
    if type(file).__module__ != "_io":
        return 1  # compressed, remote or somebody's own
    return 2 if isinstance(file, io.BufferedIOBase) else 3


def _call_safely(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:  # noqa: BLE001 - the interpreter, too, tells of it and goes on
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _give_up(closing: threading.Event, status: int) -> None:
    closing.wait()
    time.sleep(_CLOSING_S)
    os._exit(status)
