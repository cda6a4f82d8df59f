"""A lock that allows one pass over a lake at a time on one machine, but never waits for a stuck pass.

Dagster gives a tick 60 s, then starts the next one while the old one goes on. Passes may overlap: each change
of the lake happens exactly once. But overlapping passes do the work twice, and once reported four
publications twice.

A pass holds the lock during calls to Nessie, the storage and Dagster's database. A process that is stopped,
or waits for a disk, would hold it as long as it lives. Therefore the lock file records its holder and the
start time. A later pass ignores a holder that is older than any pass should be.
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
    """The process whose pass holds the lock. `since` is the start of the pass in Unix seconds."""

    pid: int
    since: float


def longest_pass_s(settings: Settings) -> float:
    """Return the seconds after which a pass counts as stuck.

    That is the time budget of a pass plus the minute that Dagster gives a tick.
    """
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
    """Acquire the lock for one pass; the context value is False if another pass of this machine holds it.

    The call waits up to `patience_s` seconds for the other pass. It does not wait for a pass that began more
    than `longest_pass_s` ago. The kernel releases the lock when the process ends, however it ends. `clock`
    counts seconds, `now` is the wall clock.
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
                continue  # another pass deleted this file before we locked it
            _abandon_stale(path, handle, now=now(), longest_s=longest_pass_s(settings))
            if _is_current(path, handle):
                if clock() >= deadline:
                    yield False
                    return
                sleep(_POLL_S)


def read_pass_holder(settings: Settings) -> PassHolder | None:
    """Read which process acquired the lock last; None if there was no pass yet."""
    path = settings.state_dir / "run" / f"publication-{settings.lake_id}.lock"
    try:
        with path.open("rb", buffering=0) as handle:
            return _read_holder(handle)
    except FileNotFoundError:
        return None


def _abandon_stale(path: Path, handle: IO[bytes], *, now: float, longest_s: float) -> None:
    """Delete the lock file of a stuck holder, so that later passes create a new one.

    Two passes may do so at the same moment and then work at the same time. That is allowed.
    """
    holder = _read_holder(handle)
    since = holder.since if holder else os.fstat(handle.fileno()).st_mtime
    if since <= now - longest_s and _is_current(path, handle):
        path.unlink(missing_ok=True)
        pid = holder.pid if holder else "an unknown process"
        _log.warning(
            "The publication pass of process %s began %.0f s ago and is stuck. This pass ignores its lock.",
            pid,
            now - since,
        )


def _is_current(path: Path, handle: IO[bytes]) -> bool:
    """Check whether the opened file is still the lock file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False


def _write_holder(handle: IO[bytes], holder: PassHolder) -> None:
    os.truncate(handle.fileno(), 0)
    handle.write(json.dumps(asdict(holder)).encode())


def _read_holder(handle: IO[bytes]) -> PassHolder | None:
    """Read the record in a lock file; None if the holder has not written it yet."""
    handle.seek(0)
    try:
        return PassHolder(**json.loads(handle.read() or b""))
    except (ValueError, TypeError):
        return None
