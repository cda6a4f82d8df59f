"""Which process executes a run: recognised by any other of its machine, never mistaken for another."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from branchlake_dagster.embedded.process import same_start, started_s


def this_place() -> str:
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
    def this(cls) -> WorkerProcess:
        """The calling process."""
        # A process that asks about itself runs, so it has a start.
        return cls(os.getpid(), started_s(os.getpid()) or 0.0, this_place())

    @classmethod
    def of(cls, tag: str | None) -> WorkerProcess | None:
        """What a run's tag says; None when it says nothing."""
        try:
            return cls(**json.loads(tag or ""))
        except (ValueError, TypeError):
            return None

    def tag(self) -> str:
        """For `WORKER_TAG`."""
        return json.dumps(asdict(self))

    def here(self) -> bool:
        """Whether it can be seen from this process at all."""
        return self.place == this_place()

    def alive(self) -> bool:
        """Whether this very process runs; what has ended and was not collected yet does not."""
        now = started_s(self.pid)
        return now is not None and same_start(now, self.started_s)
