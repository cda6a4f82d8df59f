"""Starts, finds and stops detached server processes, chooses their ports, and rotates their logs.

A process id alone proves nothing after a reboot or an unclean stop, because the id may be reused. So a record
also has the start time of the process. The start time counts from the machine's boot, because the wall clock
may be set while a server runs.

A server gets the configured port, else its previous port, else a free port.

Spark writes its logs in its default format, except that bearer tokens are replaced. Spark's Nessie client
puts the text of an error response into its exceptions, and some gateways repeat the refused header in it.

Rotation renames `spark.log.1` to `spark.log.2` and so on, and deletes the oldest file. A server keeps its log
open, so its log is copied to `spark.log.1` and then emptied. The server's descriptor is in append mode, so
its next line starts the emptied file. A log whose writers open it for each line is renamed instead, which
loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import operator
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from branchlake_dagster.embedded.state_folder import make_private_folder
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.file_lock import try_file_lock
from branchlake_dagster.waiting import holds_within

LIMIT_BYTES = 16 << 20
"""The size in bytes above which a log is rotated."""
EARLIER_FILES = 3
"""The number of rotated files of a log: a log takes at most 64 MiB, plus the lines between two rotations."""
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
    """Rename each earlier file of `log` to the next number, starting with the oldest, which is replaced.

    The log itself keeps its name. Afterwards number 1 is free.
    """
    for number in range(EARLIER_FILES - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            _numbered_log(log, number).replace(_numbered_log(log, number + 1))


def _numbered_log(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def _open_private(path: Path) -> BinaryIO:
    """Open a file for writing, and empty it. A new file can be read only by its owner."""
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
    """Write Spark's log configuration, which replaces bearer tokens, into `folder`, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "log4j2.properties"
    config_file.write_text(_CONFIGURATION)
    return config_file


IDLE_S = 180.0
"""The age in seconds from which an idle daemon is terminated. Spark terminates workers idle for a minute."""


def is_idle(daemon: psutil.Process) -> bool:
    """Return whether a Python daemon of Spark has no workers. It may be ended: Spark starts another."""
    return not daemon.children()


LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS, _TRIES = 20_000, 12_000, 50
"""Below Linux's range for clients, which begins at 32,768."""
_PORT_TIMEOUT_S = 1.0
_END_OF_PORTS = 1 << 16
_END_OF_PIDS = 1 << 31


def choose_port(wanted: int, *, setting: str) -> int:
    """Return port `wanted`, or any free port if it is 0. Raises ConfigurationError if `wanted` is in use.

    `setting` is the setting of the port, for the error message.
    """
    if not wanted:
        # Not from the kernel's range for clients: a client could take the port before the JVM listens.
        candidates = (_FIRST_PORT + secrets.randbelow(_PORTS) for _ in range(_TRIES))
        return next((port for port in candidates if _is_free(port)), 0) or _any_port()
    if not _is_free(wanted):
        raise ConfigurationError(
            f"Port {wanted} on {LOOPBACK} is in use by another program.",
            hint=f"Stop that program, or set {setting} to another port (0 means any free port).",
            reason="port_in_use",
            subject=setting,
        )
    return wanted


def keep_port(wanted: int, path: Path, *, setting: str) -> int:
    """Choose a server's port like `choose_port`, but prefer the port that is stored at `path`.

    So addresses that users have copied stay valid. If `wanted` is 0, the stored port is used if it becomes
    free within a second. The chosen port is stored. `setting` is the setting of the port, for the error
    message. Raises ConfigurationError and OSError.
    """
    stored_port = 0 if wanted else _load_port(path)
    # The kernel needs some milliseconds to close the socket of a killed process.
    if stored_port and holds_within(_PORT_TIMEOUT_S, lambda: _is_free(stored_port), every_s=0.02):
        wanted = stored_port
    port = choose_port(wanted, setting=setting)
    (make_private_folder(path.parent) / path.name).write_text(f"{port}\n")
    return port


def _load_port(path: Path) -> int:
    try:
        port = int(path.read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < _END_OF_PORTS else 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


_MARK = "==== started"
"""Separates the runs of a server in its log, so that messages do not quote errors of an earlier run."""
_SAME_START_S = 0.005
"""Half of the kernel's clock tick, the unit in which Linux keeps start times."""


class ServerDidNotStart(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """An embedded server ended or did not answer in time. The message quotes its log."""


@dataclass(frozen=True)
class ProcessRecord:
    """The record of a started server.

    `pid` and `started_s`, its start time in seconds since the machine's boot, together identify the process.
    `port` is the port at which it listens.
    """

    name: str
    pid: int
    started_s: float
    port: int

    def is_alive(self) -> bool:
        """Return whether this process still runs. Another process with the same id does not count."""
        start_s = find_start_s(self.pid)
        return start_s is not None and is_same_start(start_s, self.started_s)

    def save(self, path: Path) -> None:
        """Atomic: write the record to a file. A reader never sees a part of it."""
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(asdict(self)))
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> ProcessRecord | None:
        """Return the record at `path`; None if it does not exist or is damaged, as after an unclean stop."""
        try:
            record = cls(**json.loads(path.read_text()))
            pid, port, started_s = operator.index(record.pid), operator.index(record.port), record.started_s
            is_valid = 0 < pid < _END_OF_PIDS and 0 <= port < _END_OF_PORTS and math.isfinite(started_s)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            return None
        return record if is_valid else None


def is_same_start(first: float, second: float) -> bool:
    """Return whether two results of `find_start_s` mean the start of the same process.

    They may differ by less than `_SAME_START_S` seconds.
    """
    return abs(first - second) < _SAME_START_S


def find_start_s(pid: int) -> float | None:
    """Return when the process with the id `pid` was started, in seconds since boot.

    None if no such process runs, or if it is a zombie.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        while True:
            # Both values are wall clock times, and the clock may be set between the two calls.
            boot = psutil.boot_time()
            since = process.create_time() - boot
            if psutil.boot_time() == boot:
                return since
            process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def launch_server(
    name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str], port: int
) -> ProcessRecord:
    """Start `command` in its own session, so that Ctrl-C in the caller's terminal does not reach it.

    Returns the record of the process without waiting until the server answers (see `wait_until`).
    `environment` is added to that of this process. Output goes to `log`, in append mode, because its rotation
    needs that. Raises ServerDidNotStart if the process ends at once.

    Does not use subprocess: the server outlives this process on purpose, and a Popen object would warn about
    that. The server does not inherit ignored signals: a shell ignores Ctrl-C in processes in the background,
    Dagster ignores SIGTERM then too, and a JVM that inherits this cannot be stopped but by a kill.
    """
    make_private_folder(log.parent)
    rotate_by_copy(log)
    with log.open("a") as output:
        output.write(f"{_MARK} {name}\n")
    pid = os.posix_spawn(
        command[0],
        list(command),
        {**os.environ, **environment},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=(signal.SIGINT, signal.SIGTERM),
    )
    start_s = find_start_s(pid)
    if start_s is None:
        raise ServerDidNotStart(f"The server {name} ended at once.", hint=f"Read its log: {log}")
    return ProcessRecord(name, pid, start_s, port)


def wait_until(ready: Callable[[], bool], record: ProcessRecord, *, log: Path, timeout_s: float) -> None:
    """Wait until `ready()` is True.

    Raises ServerDidNotStart with the end of `log` if the process ends or `timeout_s` seconds pass. After the
    timeout the process is stopped.
    """

    def check_ready() -> bool:
        if ready():
            return True
        if not record.is_alive():
            raise ServerDidNotStart(
                f"The server {record.name} ended: {_format_log_tail(log)}",
                hint=f"Read its log: {log}",
                reason="ended",
                subject=record.name,
            )
        return False

    if not holds_within(timeout_s, check_ready, every_s=0.1):
        stop_process(record)
        raise ServerDidNotStart(
            f"The server {record.name} did not answer within {timeout_s:.0f} s: {_format_log_tail(log)}",
            hint=f"Read its log: {log}. On a slow machine, increase BRANCHLAKE_STARTUP_TIMEOUT_S.",
            reason="no_answer",
            subject=record.name,
        )


def stop_process(record: ProcessRecord, *, grace_s: float = 15.0) -> bool:
    """Terminate the process, and kill it after `grace_s` seconds. Return True if it was running.

    Returns after the process has ended, at the latest `grace_s` seconds after the kill.
    """
    if not record.is_alive():
        return False
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # the process ended meanwhile
            os.kill(record.pid, signal_number)
        # Wait after the kill, too: until the process ends, it holds its port and the lock of its store.
        if holds_within(grace_s, lambda: _has_ended(record), every_s=0.05):
            break
    return True


def _has_ended(record: ProcessRecord) -> bool:
    _reap_child(record.pid)
    return not record.is_alive()


def _reap_child(pid: int) -> None:
    """Collect the exit status of process `pid`, if it is an ended child of this process, as in tests.

    Otherwise it would remain as a zombie. Does not wait, and ignores other processes.
    """
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def is_listening(port: int) -> bool:
    """Return whether a process accepts connections on the loopback port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((LOOPBACK, port)) == 0


def _format_log_tail(log: Path) -> str:
    latest = log.read_text(errors="replace").rpartition(_MARK)[2]
    lines = [line.strip() for line in latest.splitlines()[1:] if line.strip()]
    error_lines = [
        line for line in lines[-200:] if "ERROR" in line or "Exception" in line or "Caused by" in line
    ]
    return " | ".join((error_lines or lines)[-3:])[:600] or "its log is empty"
