"""What the embedded Spark server starts for a session's Python: it has a daemon forked, and stands for it.

Started by Spark as `python -m … pyspark.worker`, with the pipes through which Spark speaks with a daemon.
Those go to the warm process, whose fork speaks for itself from then on. This process lives as long as that
fork, because Spark watches it; it imports nothing that takes time. Where there is no warm process to be had,
it becomes the ordinary daemon.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message

FOLDER_VARIABLE = "SPARK_WARM_PYTHON"
"""The environment variable with the folder of the warm process's socket, of this user alone."""
_ANSWER_TIMEOUT_S = 60.0
"""Until a warm process that imports has answered."""
_SOCKET, _LOCK = "warm-python.sock", "warm-python.lock"
_MAX_PENDING = 64


def main() -> int:
    """The exit status: 0 when the daemon has ended."""
    try:
        connection = _connect_warm(Path(os.environ[FOLDER_VARIABLE]))
    except OSError as error:
        return _become_ordinary(error)
    with connection:
        try:
            _request_fork(connection)
        except (OSError, ChannelClosed) as error:
            connection.close()  # a fork that comes later must not begin
            return _become_ordinary(error)
        _wait_for_fork(connection)
    return 0


def _request_fork(connection: socket.socket) -> None:
    """Let a fork begin, and pass SIGTERM on to it. Raises OSError or ChannelClosed, and then none does."""
    connection.settimeout(_ANSWER_TIMEOUT_S)
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": str(Path.cwd())}
    send_message(connection, request, descriptors=[0, 1, 2])
    answer, _ = receive_message(connection)
    if "declined" in answer:
        raise ChannelClosed(answer["declined"])
    daemon = int(answer["daemon"])

    has_begun = False

    def forward_signal(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, number)
        if not has_begun:
            sys.exit(128 + number)

    # Before it begins: one that works must not outlive who stands for it.
    signal.signal(signal.SIGTERM, forward_signal)
    send_message(connection, {"go": True})
    has_begun = True


def _wait_for_fork(connection: socket.socket) -> None:
    """Until the fork has ended: then its end of the socket is closed."""
    connection.settimeout(None)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1):
            pass


def _become_ordinary(error: Exception) -> NoReturn:
    sys.stderr.write(f"No warm Python process, so an ordinary daemon: {error!r}\n")
    os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])  # noqa: S606 - our own


def _connect_warm(folder: Path) -> socket.socket:
    """A connection to the warm process, which is started where there is none. Raises OSError."""
    with file_lock(folder / _LOCK):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connect_socket(folder)
        _start_warm(folder)
        return _connect_socket(folder)


def _connect_socket(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.chdir(folder):  # a socket's path has a hundred characters at most
            connection.connect(_SOCKET)
    except OSError:
        connection.close()
        raise
    return connection


def _start_warm(folder: Path) -> None:
    """It listens when this returns: its socket is made here, and it answers as soon as it has imported."""
    (folder / _SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(folder):
            listener.bind(_SOCKET)
        listener.listen(_MAX_PENDING)
        listener.set_inheritable(True)
        module = "branchlake_dagster.embedded.warm_worker"
        # Of our errors, Spark's log is told; its pipes are not for the warm process.
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", module, str(listener.fileno()), str(os.getppid())],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
            ],
            setsid=True,
        )


if __name__ == "__main__":
    sys.exit(main())
