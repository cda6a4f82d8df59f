"""File locks between the processes and threads of one machine.

The kernel releases a lock when its process ends, even if the process is killed. A lock belongs to an open
file, so the threads of one process exclude each other too.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the exclusive lock on the file `path` while the context is open.

    Waits as long as another process or thread holds the lock. Creates the file if it does not exist.

    Raises:
        OSError: The file cannot be opened or locked.
    """
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def try_file_lock(descriptor: int) -> bool:
    """Lock an open file without waiting. Return True, or False if another process or thread has the lock.

    The lock ends when the descriptor is closed.

    Raises:
        OSError: The file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
