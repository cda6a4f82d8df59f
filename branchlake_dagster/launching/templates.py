"""The warm processes of one launcher: one for each code location, started when first needed."""

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
from branchlake_dagster.internals.json_channel import ChannelClosed, receive, send

_MODULE = "branchlake_dagster.launching.template"
_ANSWER_S = 30.0
"""A fork takes milliseconds; a machine that swaps may take longer."""
_REST_S = 60.0
"""After a load that failed. Trying it again for each run would double the wait."""


class NoWorker(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """No process executes the run, and none will: it may be launched in another way."""


class _Changed(Exception):  # noqa: N818 - an answer, not an error
    """The template's code is not what the files say any more."""


@dataclass(frozen=True)
class Load:
    """What a warm process has loaded: equal loads may share one.

    `server` is the code server's name for its present load; the other fields are serialised.
    """

    location: str
    server: str
    origin: str
    load_data: str | None
    instance: str

    def order(self) -> dict[str, Any]:
        """For the template."""
        return asdict(self)


_DESCRIPTOR = 3
"""Of its end of the socket pair, in a template."""

_leaving: list[int] = []
"""Process ids of those that end by themselves; asked about now and then, so that they leave no zombie."""


def _start(theirs: socket.socket) -> int:
    """A template with this end; its process id.

    Not through subprocess, whose object warns about a process that outlives it, as a template with runs does.
    """
    # A duplicate is what a new program may keep, and a descriptor is none of itself.
    given = _DESCRIPTOR + (theirs.fileno() == _DESCRIPTOR)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", _MODULE, str(given)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), given),
        ],
    )


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


class _Template:
    """One warm process, seen from the launcher. Not to be used by two threads at once."""

    def __init__(self, load: Load, *, timeout_s: float) -> None:
        self.load = load
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.pid = _start(theirs)
        self._channel.settimeout(timeout_s)
        try:
            send(self._channel, load.order())
            answer, _ = receive(self._channel)
        except (OSError, ChannelClosed) as error:
            self.kill()
            raise NoWorker(
                f"The warm process of {load.location} did not get ready: {error}", reason="not_ready"
            ) from error
        if "failed" in answer:
            self.kill()
            raise NoWorker(
                f"{load.location} could not be loaded into a warm process: {answer['failed']}",
                reason="load_failed",
            )

    def fork(self, run_id: str) -> int:
        """A worker that executes the run. Raises NoWorker, when there will be none, or _Changed."""
        ours, theirs = socket.socketpair()
        # Closing our end is how a worker that we have given up learns that it must not begin.
        with ours:
            with theirs:
                try:
                    message = {"run_id": run_id, "instance": self.load.instance}
                    send(self._channel, message, passing=[theirs.fileno()])
                except OSError as error:
                    self.kill()
                    raise NoWorker(f"The warm process of {self.load.location} is gone.") from error
            ours.settimeout(_ANSWER_S)
            try:
                answer, _ = receive(ours)
                if "changed" in answer:
                    raise _Changed
                if "failed" in answer:
                    self.leave()
                    raise NoWorker(f"The warm process of {self.load.location}: {answer['failed']}.")
                send(ours, {"go": True})
            except (ChannelClosed, OSError) as error:
                self.kill()
                raise NoWorker(
                    f"The warm process of {self.load.location} is gone or did not answer within"
                    f" {_ANSWER_S:.0f} s."
                ) from error
        return int(answer["worker"])

    def alive(self) -> bool:
        """Whether it still runs. One that has ended is collected with the question."""
        return not _ended(self.pid)

    def leave(self) -> None:
        """Let it end by itself, with its last worker."""
        self._channel.close()
        _leaving[:] = [pid for pid in [*_leaving, self.pid] if not _ended(pid)]

    def kill(self) -> None:
        """End it now; its workers go on without a parent."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended already
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@dataclass
class _Place:
    """Where the template of one code location is kept."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    template: _Template | None = None
    failed: tuple[Load, float, NoWorker] | None = None


class Templates:
    """Starts, uses, replaces and ends the warm processes of one launcher. Any thread may use it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}

    def launch(self, load: Load, run_id: str, *, timeout_s: float) -> int:
        """The id of a process that executes the run, forked from a template with this load.

        `timeout_s` is how long a template may take to load. Raises NoWorker when there is no such process
        and will be none.
        """
        with self._lock:
            place = self._places.setdefault(load.location, _Place())
        with place.lock:
            for last in (False, True):
                template = self._ready(place, load, timeout_s)
                try:
                    return template.fork(run_id)
                except _Changed:
                    self._retire(place)
                except NoWorker:
                    place.template = None
                    if last:
                        raise
            raise NoWorker(f"The files of {load.location} change faster than they are loaded.")

    def _ready(self, place: _Place, load: Load, timeout_s: float) -> _Template:
        if place.template is not None and (place.template.load != load or not place.template.alive()):
            self._retire(place)
        if place.template is None:
            if place.failed is not None:
                failed, when, error = place.failed
                if failed == load and self._clock() - when < _REST_S:
                    raise error
            try:
                place.template = _Template(load, timeout_s=timeout_s)
            except NoWorker as error:
                place.failed = (load, self._clock(), error)
                raise
            place.failed = None
        return place.template

    def _retire(self, place: _Place) -> None:
        if place.template is not None:
            place.template.leave()
        place.template = None

    def processes(self) -> dict[str, int]:
        """The process id of each location's template."""
        return {name: place.template.pid for name, place in self._places.items() if place.template}

    def close(self) -> None:
        """Let all of them end, each with its last worker."""
        for place in list(self._places.values()):
            with place.lock:
                self._retire(place)
