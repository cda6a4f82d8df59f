"""Which process executes a run: recognised by any other of its machine, never mistaken for another."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from branchlake_dagster.embedded.process import find_start_s, is_same_start


def pid_namespace_name() -> str:
    """A name for the set of processes that are visible from here: this boot, and this container's."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class WorkerProcess:
    """A run's process. `started_s` is when it started, in seconds since boot: a pid alone is used again."""

    pid: int
    started_s: float
    place: str

    @classmethod
    def current(cls) -> WorkerProcess:
        """The calling process."""
        # A process that asks about itself runs, so it has a start.
        return cls(os.getpid(), find_start_s(os.getpid()) or 0.0, pid_namespace_name())

    @classmethod
    def from_tag(cls, tag: str | None) -> WorkerProcess | None:
        """What a run's tag says; None when it says nothing."""
        try:
            return cls(**json.loads(tag or ""))
        except (ValueError, TypeError):
            return None

    def to_tag(self) -> str:
        """For `WORKER_TAG`."""
        return json.dumps(asdict(self))

    def is_visible(self) -> bool:
        """Whether it can be seen from this process at all."""
        return self.place == pid_namespace_name()

    def is_running(self) -> bool:
        """Whether this very process runs; what has ended and was not collected yet does not."""
        current_start_s = find_start_s(self.pid)
        return current_start_s is not None and is_same_start(current_start_s, self.started_s)
