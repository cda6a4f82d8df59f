"""The identity of the process that executes a run. Other processes of its machine can check it safely."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from branchlake_dagster.embedded.process import find_start_s, is_same_start


def pid_namespace_name() -> str:
    """Return a name for the set of processes that this process can see: the boot id and the PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class WorkerProcess:
    """The process of a run.

    `started_s` is its start in seconds since boot, because the system reuses pids.
    """

    pid: int
    started_s: float
    place: str

    @classmethod
    def current(cls) -> WorkerProcess:
        """Return the calling process."""
        # The calling process runs, so it has a start time.
        return cls(os.getpid(), find_start_s(os.getpid()) or 0.0, pid_namespace_name())

    @classmethod
    def from_tag(cls, tag: str | None) -> WorkerProcess | None:
        """Parse a run's tag. Return None if the run has no such tag, or one that cannot be parsed."""
        try:
            return cls(**json.loads(tag or ""))
        except (ValueError, TypeError):
            return None

    def to_tag(self) -> str:
        """Return the value for the tag `WORKER_TAG`."""
        return json.dumps(asdict(self))

    def is_visible(self) -> bool:
        """Return whether this process could see the run's process if it ran."""
        return self.place == pid_namespace_name()

    def is_running(self) -> bool:
        """Return whether the process still runs.

        A zombie, which its parent has not yet collected, does not run.
        """
        current_start_s = find_start_s(self.pid)
        return current_start_s is not None and is_same_start(current_start_s, self.started_s)
