"""The memory of a process tree while a benchmark works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import psutil

_EVERY_S = 0.5


@dataclass
class PeakMemory:
    """The largest memory so far, in MB, and whether sampling has ended."""

    peak_mb: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def watch_memory(server_pids: Iterable[int]) -> Iterator[PeakMemory]:
    """Sample the memory of this process, of servers, and of all their children while the block runs.

    Memory that processes share is divided among them (the proportional set size of Linux), so that forked
    workers do not count it again.
    """
    peak = PeakMemory()
    roots = [psutil.Process()]
    for pid in server_pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            roots.append(psutil.Process(pid))

    def sample() -> None:
        while True:
            peak.peak_mb = max(peak.peak_mb, _memory_of(roots) / 1e6)
            if peak.stopped.wait(_EVERY_S):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak.stopped.set()
        thread.join()


def _memory_of(roots: Iterable[psutil.Process]) -> int:
    processes: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.Error):
            processes |= {process.pid: process for process in [root, *root.children(recursive=True)]}
    return sum(_proportional_size(process) for process in processes.values())


def _proportional_size(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
