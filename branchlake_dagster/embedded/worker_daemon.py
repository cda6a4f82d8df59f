"""The process that the embedded Spark server starts as the Python daemon of a session.

Spark starts it as `python -m … pyspark.worker`, with the pipes for messages to a daemon. It passes these
pipes to the warm process, which forks the real daemon. Spark watches this process, so it lives as long as the
fork. It imports nothing slow. If there is no warm process, it becomes an ordinary daemon.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message

FOLDER_VARIABLE = "SPARK_WARM_PYTHON"
"""The environment variable with the folder of the warm process's socket, which only this user can read."""
_ANSWER_TIMEOUT_S = 60.0
"""The time for an answer in seconds. A new warm process first imports its libraries."""
_REPEAT_S = 1.0
"""The seconds between two SIGTERM to a forked daemon that has not ended yet."""
_SOCKET, _LOCK = "warm-python.sock", "warm-python.lock"
_MAX_PENDING = 64


def main() -> int:
    """Act as the daemon of a session until the forked daemon has ended, and return the exit status 0.

    Without a warm process it does not return: this process becomes an ordinary daemon.
    """
    try:
        connection = _connect_warm(Path(os.environ[FOLDER_VARIABLE]))
    except OSError as error:
        return _become_ordinary(error)
    with connection:
        try:
            _request_fork(connection)
        except (OSError, ChannelClosed) as error:
            connection.close()  # so that a late fork does not start to work
            return _become_ordinary(error)
        _wait_for_fork(connection)
    return 0


def _request_fork(connection: socket.socket) -> None:
    """Request a forked daemon, forward SIGTERM to it, and return when it listens.

    A forwarded SIGTERM is repeated until the daemon ends. PySpark's handler of it raises SystemExit, which
    Python ignores if the signal arrives inside a hook of `os.fork`. The next SIGTERM ends the daemon, because
    the handler has restored the default action.

    Raises OSError or ChannelClosed; then no forked daemon has written its port for Spark, or will write it.
    """
    connection.settimeout(_ANSWER_TIMEOUT_S)
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": str(Path.cwd())}
    send_message(connection, request, descriptors=[0, 1, 2])
    answer, _ = receive_message(connection)
    if "declined" in answer:
        raise ChannelClosed(answer["declined"])
    daemon = int(answer["daemon"])

    is_listening = False

    def forward_signal(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGTERM)
        if not is_listening:
            time.sleep(_REPEAT_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGTERM)
            sys.exit(128 + number)
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_S)

    # Set the handler before the daemon starts to work: the daemon must not outlive this process.
    signal.signal(signal.SIGALRM, forward_signal)
    signal.signal(signal.SIGTERM, forward_signal)
    send_message(connection, {"go": True})
    # A timeout could end the wait at the moment in which the daemon writes its port.
    connection.settimeout(None)
    receive_message(connection)
    is_listening = True


def _wait_for_fork(connection: socket.socket) -> None:
    """Wait until the forked daemon ends, which closes the other end of `connection`."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1):
            pass


def _become_ordinary(error: Exception) -> NoReturn:
    sys.stderr.write(f"The warm Python process is not available, so an ordinary daemon starts: {error!r}\n")
    os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])  # noqa: S606 - our own


def _connect_warm(folder: Path) -> socket.socket:
    """Connect to the warm process by its socket in `folder`; start it if it does not run.

    Raises OSError.
    """
    with file_lock(folder / _LOCK):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connect_socket(folder)
        _start_warm(folder)
        return _connect_socket(folder)


def _connect_socket(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.chdir(folder):  # the path of a socket may have about a hundred characters
            connection.connect(_SOCKET)
    except OSError:
        connection.close()
        raise
    return connection


def _start_warm(folder: Path) -> None:
    """Start the warm process without waiting for its imports.

    Its socket accepts connections on return, but the process answers only after its imports.
    """
    (folder / _SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(folder):
            listener.bind(_SOCKET)
        listener.listen(_MAX_PENDING)
        listener.set_inheritable(True)
        module = "branchlake_dagster.embedded.warm_worker"
        # Errors of the warm process go to Spark's log. It must not inherit Spark's pipes.
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
