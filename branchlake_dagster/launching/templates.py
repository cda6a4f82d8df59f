"""The warm processes of one launcher. Each code location gets one when its first run starts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message

_MODULE = "branchlake_dagster.launching.template"
_FORK_TIMEOUT_S = 30.0
"""A fork takes milliseconds, but a machine that swaps may need longer."""
_RETRY_LOAD_AFTER_S = 60.0
"""Pause after a failed load. Repeating the load for each run would double the wait of each run."""


class NoWorker(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """No process executes the run, and none will. The run may be launched in another way."""


class _SourcesChanged(Exception):  # noqa: N818 - an answer, not an error
    """The source files differ from the code that the template has imported."""


@dataclass(frozen=True)
class LoadSpec:
    """What a warm process has loaded. Two runs with equal specs can share a warm process.

    `server` identifies the current load of the code server. The other fields except `location` are
    serialized.
    """

    location: str
    server: str
    origin: str
    load_data: str | None
    instance: str

    def to_message(self) -> dict[str, Any]:
        """Return the message that makes a template load this spec."""
        return asdict(self)


_DESCRIPTOR = 3
"""The descriptor of the template's end of the socket pair."""

_retiring_pids: list[int] = []
"""Process ids of templates that end by themselves. They are polled now and then, so that no zombie remains.
"""


def _spawn_template(child_socket: socket.socket) -> int:
    """Start a template process that inherits `child_socket`, and return its process id.

    Not by subprocess: its object warns about a process that outlives it, as a template with runs does.
    """
    # Only a duplicated descriptor stays open in the new program, and a descriptor cannot be duplicated onto
    # itself.
    descriptor = _DESCRIPTOR + (child_socket.fileno() == _DESCRIPTOR)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", _MODULE, str(descriptor)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, child_socket.fileno(), descriptor),
        ],
    )


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


class _TemplateHandle:
    """The launcher's view of one warm process. Two threads must not use it at the same time."""

    def __init__(self, load_spec: LoadSpec, *, timeout_s: float) -> None:
        self.load_spec = load_spec
        self._channel, child_socket = socket.socketpair()
        with child_socket:
            self.pid = _spawn_template(child_socket)
        self._channel.settimeout(timeout_s)
        try:
            send_message(self._channel, load_spec.to_message())
            answer, _ = receive_message(self._channel)
        except (OSError, ChannelClosed) as error:
            self.kill()
            raise NoWorker(
                f"The warm process of code location {load_spec.location} did not start: {error}",
                reason="not_ready",
            ) from error
        if "failed" in answer:
            self.kill()
            raise NoWorker(
                f"Code location {load_spec.location} could not be loaded into a warm process:"
                f" {answer['failed']}",
                reason="load_failed",
            )

    def fork(self, run_id: str) -> int:
        """Fork a worker that executes the run, and return its process id.

        Raises NoWorker if no worker will execute the run, or _SourcesChanged.
        """
        own_socket, child_socket = socket.socketpair()
        # The worker must not begin once the launcher has given up. It learns that from the closed socket.
        with own_socket:
            with child_socket:
                try:
                    message = {"run_id": run_id, "instance": self.load_spec.instance}
                    send_message(self._channel, message, descriptors=[child_socket.fileno()])
                except OSError as error:
                    self.kill()
                    raise NoWorker(
                        f"The warm process of code location {self.load_spec.location} has ended."
                    ) from error
            own_socket.settimeout(_FORK_TIMEOUT_S)
            try:
                answer, _ = receive_message(own_socket)
                if "changed" in answer:
                    raise _SourcesChanged
                if "failed" in answer:
                    self.retire()
                    raise NoWorker(
                        f"The warm process of code location {self.load_spec.location} failed:"
                        f" {answer['failed']}."
                    )
                send_message(own_socket, {"go": True})
            except (ChannelClosed, OSError) as error:
                self.kill()
                raise NoWorker(
                    f"The warm process of code location {self.load_spec.location} has ended or did not answer"
                    f" within {_FORK_TIMEOUT_S:.0f} s."
                ) from error
        return int(answer["worker"])

    def is_running(self) -> bool:
        """Return whether the process still runs. If it has ended, its exit status is collected."""
        return not _has_ended(self.pid)

    def retire(self) -> None:
        """Let the process end by itself, after its last worker."""
        self._channel.close()
        _retiring_pids[:] = [pid for pid in [*_retiring_pids, self.pid] if not _has_ended(pid)]

    def kill(self) -> None:
        """Kill the process now. Its workers continue without a parent."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the process has already ended
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@dataclass
class _TemplateSlot:
    """The template of one code location, and its last failed load."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    template: _TemplateHandle | None = None
    last_failure: tuple[LoadSpec, float, NoWorker] | None = None


class Templates:
    """Starts, uses, replaces and ends the warm processes of one launcher. Threads may share it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: dict[str, _TemplateSlot] = {}

    def launch(self, load_spec: LoadSpec, run_id: str, *, timeout_s: float) -> int:
        """Fork a process that executes the run from a template with this spec, and return its process id.

        `timeout_s` is the largest time that a template may take to load. Raises NoWorker if no process
        executes the run and none will.
        """
        with self._lock:
            slot = self._slots.setdefault(load_spec.location, _TemplateSlot())
        with slot.lock:
            for is_last_attempt in (False, True):
                template = self._load_template(slot, load_spec, timeout_s)
                try:
                    return template.fork(run_id)
                except _SourcesChanged:
                    self._retire(slot)
                except NoWorker:
                    slot.template = None
                    if is_last_attempt:
                        raise
            raise NoWorker(
                f"The files of code location {load_spec.location} change faster than they can be loaded."
            )

    def _load_template(self, slot: _TemplateSlot, load_spec: LoadSpec, timeout_s: float) -> _TemplateHandle:
        if slot.template is not None and (
            slot.template.load_spec != load_spec or not slot.template.is_running()
        ):
            self._retire(slot)
        if slot.template is None:
            if slot.last_failure is not None:
                failed_spec, failed_at, error = slot.last_failure
                if failed_spec == load_spec and self._clock() - failed_at < _RETRY_LOAD_AFTER_S:
                    raise error
            try:
                slot.template = _TemplateHandle(load_spec, timeout_s=timeout_s)
            except NoWorker as error:
                slot.last_failure = (load_spec, self._clock(), error)
                raise
            slot.last_failure = None
        return slot.template

    def _retire(self, slot: _TemplateSlot) -> None:
        if slot.template is not None:
            slot.template.retire()
        slot.template = None

    def process_ids(self) -> dict[str, int]:
        """Return the process id of each template, by code location."""
        return {name: slot.template.pid for name, slot in self._slots.items() if slot.template}

    def close(self) -> None:
        """Let all templates end, each after its last worker."""
        for slot in list(self._slots.values()):
            with slot.lock:
                self._retire(slot)
