"""Configure and rotate the log files of the embedded servers.

Spark's log format is the default, except that bearer tokens are replaced. Spark's Nessie client puts the text
of an error response into its exceptions, and some gateways repeat the refused header in it.

Rotation renames `spark.log.1` to `spark.log.2` and so on, and deletes the oldest file. A server keeps its log
open, so its log is copied to `spark.log.1` and then emptied. The server's descriptor is in append mode, so
its next line starts the emptied file. A log whose writers open it for each line is renamed instead, which
loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from branchlake_dagster.file_lock import try_file_lock

LIMIT_BYTES = 16 << 20
"""The size in bytes above which a log is rotated."""
EARLIER_FILES = 3
"""The number of earlier files: a log takes at most 64 MiB, plus the lines between two rotations."""
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def rotate_folder(folder: Path) -> None:
    """Rotate each `*.log` of a folder whose writers keep it open. Never raises.

    Costs 0.02 ms while no log is too large. Each use of the servers calls it.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        logs = [Path(entry.path) for entry in entries if entry.name.endswith(".log")]
        for log in logs:
            rotate_by_copy(log)


def rotate_by_copy(log: Path) -> bool:
    """Copy a log that is larger than `LIMIT_BYTES` to `<log>.1` and empty it; return whether that was done.

    For writers in append mode that keep the file open. A line that is written in the few microseconds between
    copying and emptying is lost. If the disk has no space for the copy, the log is emptied anyway. Of several
    processes only one rotates. Never raises.
    """
    with contextlib.suppress(OSError), _lock_large_log(log) as descriptor:
        if descriptor is None:
            return False
        scratch = log.with_name(f"{log.name}.copy")
        try:
            _shift_earlier_logs(log)
            with os.fdopen(os.dup(descriptor), "rb") as source, _open_private(scratch) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.ftruncate(descriptor, 0)
            scratch.replace(_numbered_log(log, 1))
        except OSError as error:
            scratch.unlink(missing_ok=True)
            if error.errno in _NOT_WRITABLE:
                raise
            os.ftruncate(descriptor, 0)
        return True
    return False


def rotate_by_rename(log: Path) -> bool:
    """Rename a log that is larger than `LIMIT_BYTES` to `<log>.1`; return whether that was done.

    For writers that open the file for each line, so that they create a new file. Of several processes only
    one rotates. Never raises.
    """
    with contextlib.suppress(OSError), _lock_large_log(log) as descriptor:
        if descriptor is None:
            return False
        _shift_earlier_logs(log)
        log.replace(_numbered_log(log, 1))
        return True
    return False


def earlier_log(log: Path) -> Path:
    """Return the path of the newest earlier file of a log, whether it exists or not."""
    return _numbered_log(log, 1)


@contextlib.contextmanager
def _lock_large_log(log: Path) -> Iterator[int | None]:
    """Lock a log that is too large and yield its descriptor; None if it is small or already locked.

    Raises OSError, also if the log does not exist.
    """
    if log.stat().st_size <= LIMIT_BYTES:
        yield None
        return
    descriptor = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor if _try_lock_log(log, descriptor) else None
    finally:
        os.close(descriptor)


def _try_lock_log(log: Path, descriptor: int) -> bool:
    if not try_file_lock(descriptor):
        return False
    # Another process may have rotated the log while this one opened and locked it.
    opened_stat = os.fstat(descriptor)
    return opened_stat.st_size > LIMIT_BYTES and os.path.samestat(opened_stat, log.stat())


def _shift_earlier_logs(log: Path) -> None:
    """Rename each earlier file to the next number, starting with the oldest, which is replaced."""
    for number in range(EARLIER_FILES - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            _numbered_log(log, number).replace(_numbered_log(log, number + 1))


def _numbered_log(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def _open_private(path: Path) -> BinaryIO:
    """Open a file for writing. Only its owner may read it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


_CONFIGURATION = r"""# Written by branchlake at each start of the server.
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
# Otherwise each stack trace is added a second time, outside the replacement.
appender.console.layout.alwaysWriteExceptions = false
appender.console.layout.pattern = \
  %replace{%d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex}{(?i)bearer(\\s|%20|\\+)+[^\\s'"),;]+}{Bearer ***}
"""


def write_log_config(folder: Path) -> Path:
    """Write the log configuration into `folder`, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "log4j2.properties"
    config_file.write_text(_CONFIGURATION)
    return config_file
