"""Copy Nessie's RocksDB store while Nessie runs. The copy is like the store after a power cut.

RocksDB writes each change to its log before it answers, and repairs itself from the log at its next start.
So all files at one moment are a complete store. To get the files of one moment, the Nessie process is
suspended while its files are linked. The large table files are never changed, so a hard link is enough; the
logs and the manifest are copied. This takes milliseconds, during which Nessie does not answer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from branchlake_dagster.backup.errors import BackupFailed
from branchlake_dagster.embedded.process import ProcessRecord
from branchlake_dagster.waiting import holds_within

SUSPENSION_LIMIT_S = 10.0
"""The longest suspension, in seconds.

Then Nessie continues, even if the backup is not finished or was killed.
"""
_POLL_S = 0.0005
_STOPPED_STATES = frozenset("TtZX")
"""States of Linux threads in which they cannot write: stopped, stopped by a debugger, or ended."""
_TABLE_FILE = ".sst"
_UNUSED_FILES = ("LOCK", "LOG")


def copy_database(
    store: Path,
    target: Path,
    *,
    server: ProcessRecord | None,
    limit_s: float = SUSPENSION_LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Copy the store into the new folder `target`. Return how many seconds Nessie was suspended.

    `server` is the process of the running Nessie; None if Nessie is stopped. `target` should be in the file
    system of `store`, otherwise table files are copied, not linked, while Nessie is suspended. Raises
    OSError, and BackupFailed if Nessie ends, if it cannot be suspended, or if the copy takes longer than
    `limit_s` seconds.
    """
    target.mkdir(mode=0o700, parents=True)
    shutil.copymode(store, target)
    if server is None:
        _link_files(store, target)
        return 0.0
    start_s = clock()
    with _suspended(server, limit_s):
        _link_files(store, target)
        suspended_s = clock() - start_s
    if suspended_s >= limit_s:
        raise BackupFailed(
            f"The files of Nessie's store in {store} could not be copied within {limit_s:g} s. Nessie was not"
            " suspended any longer, so the copy may be inconsistent.",
            hint="Stop the servers during the backup: branchlake down.",
            reason="too_slow",
            subject=str(store),
        )
    return suspended_s


@contextmanager
def _suspended(server: ProcessRecord, limit_s: float) -> Iterator[None]:
    """Suspend all threads of the server's process while the context is open.

    The server continues when the context ends, also after an error. If this process is killed, the server
    continues after `limit_s` seconds. Raises BackupFailed.
    """
    script = f"sleep {limit_s}; kill -CONT {server.pid}"
    guard = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    try:
        _stop_threads(server, limit_s)
        yield
    finally:
        # The guard lives until Nessie continues, because this block may be interrupted, too.
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGCONT)
        with suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()


def _stop_threads(server: ProcessRecord, limit_s: float) -> None:
    """Suspend a process, and wait until all its threads have stopped.

    Raises BackupFailed if the process ends, or if a thread still runs after `limit_s` seconds.
    """
    try:
        if not server.is_alive():
            raise ProcessLookupError
        os.kill(server.pid, signal.SIGSTOP)
        if holds_within(limit_s, lambda: _is_stopped(server.pid), every_s=_POLL_S):
            return
        if not server.is_alive():
            raise ProcessLookupError
    except (ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess) as error:
        raise BackupFailed(
            f"Nessie (pid {server.pid}) ended when the backup began.",
            hint="Run the command again.",
            reason="server_ended",
        ) from error
    raise BackupFailed(
        f"Nessie (pid {server.pid}) could not be suspended within {limit_s:g} s.",
        hint="Stop the servers during the backup: branchlake down.",
        reason="not_suspended",
    )


def _is_stopped(pid: int) -> bool:
    """Return whether each thread of a process is suspended. Raises FileNotFoundError and NoSuchProcess.

    A thread stops when it leaves the kernel. Until then it may finish a write. Without /proc, only the state
    of the whole process is known.
    """
    threads = Path(f"/proc/{pid}/task")
    if not threads.is_dir():
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    states = []
    for thread in threads.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended since it was listed
            # The name of the program, in parentheses, may itself contain parentheses and spaces.
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return "T" in states and all(state in _STOPPED_STATES for state in states)


def _link_files(store: Path, target: Path) -> None:
    for path in store.iterdir():
        if path.name.startswith(_UNUSED_FILES) or not path.is_file():
            continue
        if path.suffix == _TABLE_FILE:
            try:
                os.link(path, target / path.name)
                continue
            except OSError:  # another file system, or one without hard links
                pass
        shutil.copy2(path, target / path.name)
