"""Locks between the processes of this machine, on files.

The kernel releases a lock when its process ends, however it ends. A lock belongs to an open file, so threads
of one process exclude each other too.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the exclusive lock on the file `path`, which is created if needed. Waits for another holder.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def try_file_lock(descriptor: int) -> bool:
    """Lock an open file without waiting; False if another process or thread holds the lock.

    The lock ends when the descriptor is closed.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
