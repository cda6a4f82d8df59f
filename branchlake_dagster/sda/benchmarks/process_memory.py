"""Measure the memory of a process tree while a benchmark runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import psutil

_EVERY_S = 0.5


@dataclass
class PeakMemory:
    """The largest memory so far in MB, or None if it is unknown. `stopped` ends the sampling."""

    peak_mb: float | None = None
    stopped: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def watch_memory(server_pids: Iterable[int]) -> Iterator[PeakMemory]:
    """Sample the memory of this process, of servers, and of all their children while the block runs.

    Memory that processes share is divided among them (the proportional set size of Linux), so that forked
    workers do not count it several times.
    """
    peak = PeakMemory()
    roots = [psutil.Process()]
    for pid in server_pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            roots.append(psutil.Process(pid))

    def sample() -> None:
        while True:
            if (size := _memory_of(roots)) is not None:
                peak.peak_mb = max(peak.peak_mb or 0.0, size / 1e6)
            if peak.stopped.wait(_EVERY_S):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak.stopped.set()
        thread.join()


def _memory_of(roots: Iterable[psutil.Process]) -> int | None:
    processes: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.Error):
            processes |= {process.pid: process for process in [root, *root.children(recursive=True)]}
    sizes = [_proportional_size(process) for process in processes.values()]
    known_sizes = [size for size in sizes if size is not None]
    return sum(known_sizes) if known_sizes else None


def _proportional_size(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        size: int | None = getattr(process.memory_full_info(), "pss", None)
        return size
    return None
