"""One pass over a lake at a time, on one machine; a pass that stands still does not stop the others.

Dagster gives a tick 60 s, then starts the next one and lets the old one run on beside it. Passes may meet:
what they do to the lake is exactly once. But they do it all twice, and four publications were told twice.

The lock is held through calls to Nessie, the storage and Dagster's database. A process that is stopped, or
waits for a disk, holds it for as long as it lives. So it records its holder and the time, and a later pass
goes on beside a holder that is older than any pass should be.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from branchlake_dagster.file_lock import try_file_lock
from branchlake_dagster.settings import Settings

_POLL_S = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassHolder:
    """The process whose pass holds the lock, and since when (Unix seconds)."""

    pid: int
    since: float


def longest_pass_s(settings: Settings) -> float:
    """Seconds after which a pass is taken to stand still: its budget, and Dagster's minute for a tick."""
    return settings.publish_budget_s + 60.0


@contextmanager
def acquire_pass_lock(
    settings: Settings,
    *,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Whether the pass is ours; another one of this machine may be at work, in this process or elsewhere.

    It waits `patience_s` seconds for that other one, and not at all for one that began `longest_pass_s`
    ago. The lock is the kernel's, so it ends with its process, however that ends. `clock` counts seconds,
    `now` is the wall clock.
    """
    folder = settings.state_dir / "run"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"publication-{settings.lake_id}.lock"
    deadline = clock() + patience_s
    while True:
        with path.open("a+b", buffering=0) as handle:
            if try_file_lock(handle.fileno()):
                if _is_current(path, handle):
                    _write_holder(handle, PassHolder(os.getpid(), now()))
                    yield True
                    return
                continue  # another pass has abandoned this file between its opening and its lock
            _abandon_stale(path, handle, now=now(), longest_s=longest_pass_s(settings))
            if _is_current(path, handle):
                if clock() >= deadline:
                    yield False
                    return
                sleep(_POLL_S)


def read_pass_holder(settings: Settings) -> PassHolder | None:
    """The process that has taken the lock last; None if no process has."""
    path = settings.state_dir / "run" / f"publication-{settings.lake_id}.lock"
    try:
        with path.open("rb", buffering=0) as handle:
            return _read_holder(handle)
    except FileNotFoundError:
        return None


def _abandon_stale(path: Path, handle: IO[bytes], *, now: float, longest_s: float) -> None:
    """Leave the lock file to a holder that stands still: later passes make a new one.

    Two passes may do so at the same moment, and then work at the same time: they may.
    """
    holder = _read_holder(handle)
    since = holder.since if holder else os.fstat(handle.fileno()).st_mtime
    if since <= now - longest_s and _is_current(path, handle):
        path.unlink(missing_ok=True)
        pid = holder.pid if holder else "an unknown process"
        _log.warning(
            "The publication pass of process %s began %.0f s ago and stands still; going on beside it.",
            pid,
            now - since,
        )


def _is_current(path: Path, handle: IO[bytes]) -> bool:
    """Whether the opened file still is the lock."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False


def _write_holder(handle: IO[bytes], holder: PassHolder) -> None:
    os.truncate(handle.fileno(), 0)
    handle.write(json.dumps(asdict(holder)).encode())


def _read_holder(handle: IO[bytes]) -> PassHolder | None:
    """The record in a lock file; None if the holder has not written it yet."""
    handle.seek(0)
    try:
        return PassHolder(**json.loads(handle.read() or b""))
    except (ValueError, TypeError):
        return None
