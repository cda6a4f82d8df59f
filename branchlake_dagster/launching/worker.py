"""What a fork of the template does: execute one run, or report that the process of one has died."""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import dataclass

from dagster import DagsterInstance

from branchlake_dagster.internals.dagster_launching import (
    InstanceRef,
    capture_interrupts,
    crash_text,
    deserialize_value,
    execute_run_here,
)
from branchlake_dagster.internals.json_channel import ChannelClosed, receive, send
from branchlake_dagster.launching.process import WORKER_TAG, WorkerProcess

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
        instance.add_run_tags(run.run_id, {WORKER_TAG: process.tag()})
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
