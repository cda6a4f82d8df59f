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
    crash_text,
    deserialize_value,
    execute_run_here,
)
from branchlake_dagster.internals.json_channel import ChannelClosed, receive, send
from branchlake_dagster.launching.process import WorkerProcess
from branchlake_dagster.stored_names import RunTag

SETTLED = 85
"""The exit status of a worker that leaves its run ended, or untouched. No other way to end has this one: code
of a step may call `os._exit(0)`."""


@dataclass(frozen=True)
class Run:
    """A run and the instance that knows it, serialised as the launcher sent it."""

    run_id: str
    instance: str

    def instance_ref(self) -> InstanceRef:
        """Which Dagster instance it is."""
        return deserialize_value(self.instance, InstanceRef)


def execute(run: Run, launcher: socket.socket) -> int:
    """Execute the run in this process, once the launcher has agreed; the exit status.

    Until then nothing was touched: a launcher that has given up starts the run in another way, and closes
    its end, so that there are never two.
    """
    process = WorkerProcess.this()
    try:
        send(launcher, {"worker": process.pid})
        receive(launcher)
    except (ChannelClosed, OSError):
        return SETTLED
    finally:
        launcher.close()
    _differ_from_siblings()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with capture_interrupts(), DagsterInstance.from_ref(run.instance_ref()) as instance:
        # Its own first act, because the launcher may be gone by now, and who ends the run needs it.
        instance.add_run_tags(run.run_id, {RunTag.WORKER: process.tag()})
        execute_run_here(instance, run.run_id)
        ended = instance.get_run_by_id(run.run_id)
    return SETTLED if ended is None or ended.is_finished else 1


def report_crash(run: Run, exit_code: int) -> int:
    """Fail the run of a process that has ended without finishing it; the exit status."""
    with DagsterInstance.from_ref(run.instance_ref()) as instance:
        found = instance.get_run_by_id(run.run_id)
        if found is not None and not found.is_finished:
            text = crash_text(run.run_id, exit_code)
            instance.report_engine_event(text, found)
            instance.report_run_failed(found, text)
    return 0


def _differ_from_siblings() -> None:
    """Each fork starts with its parent's random numbers; Python's own are seeded anew by the fork itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


_FILE = io.IOBase.__mro__[1]
"""What all files are made from, those of C too, which only say that they are of the class that has a name."""

_CLOSING_S = 30.0


def leave(status: int, inherited: Iterable[Any] = ()) -> NoReturn:
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
        lambda: _close([*inherited, *open_files()]),
    ):
        _tried(last_act)
    os._exit(status)


def open_files() -> Sequence[Any]:
    """Every file object that the garbage collector lists, but for the process's own three streams."""
    listed = gc.get_objects()
    # By their types, which are few: `isinstance` asks proxies of others too, and they answer as they like.
    kinds = {kind for kind in set(map(type, listed)) if _FILE in kind.__mro__}
    return [one for one in listed if type(one) in kinds and not _is_stream(one)]


def _is_stream(file: Any) -> bool:
    try:
        return bool(file.fileno() <= 2)
    except Exception:  # noqa: BLE001 - it is closed, or none of the system's; whatever the class of it says
        return False


def _close(files: Iterable[Any]) -> None:
    """Close the files, what is written through others before those."""
    for file in sorted(files, key=_depth):
        with contextlib.suppress(Exception):  # its disk is full, or nobody reads it any more
            file.close()


def _depth(file: Any) -> int:
    if isinstance(file, io.TextIOBase):
        return 0
    if type(file).__module__ != "_io":
        return 1  # compressed, remote or somebody's own
    return 2 if isinstance(file, io.BufferedIOBase) else 3


def _tried(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:  # noqa: BLE001 - the interpreter, too, tells of it and goes on
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _give_up(closing: threading.Event, status: int) -> None:
    closing.wait()
    time.sleep(_CLOSING_S)
    os._exit(status)
