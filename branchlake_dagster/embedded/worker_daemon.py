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
from branchlake_dagster.internals.json_channel import ChannelClosed, receive, send

FOLDER = "SPARK_WARM_PYTHON"
"""The environment variable with the folder of the warm process's socket, of this user alone."""
_PATIENCE_S = 60.0
"""Until a warm process that imports has answered."""
_SOCKET, _LOCK = "warm-python.sock", "warm-python.lock"
_WAITING = 64


def main() -> int:
    """The exit status: 0 when the daemon has ended."""
    try:
        warm = _warm(Path(os.environ[FOLDER]))
    except OSError as error:
        return _ordinary(error)
    with warm:
        try:
            _fork(warm)
        except (OSError, ChannelClosed) as error:
            warm.close()  # a fork that comes later must not begin
            return _ordinary(error)
        _stand_in(warm)
    return 0


def _fork(warm: socket.socket) -> None:
    """Let a fork begin, and pass SIGTERM on to it. Raises OSError or ChannelClosed, and then none does."""
    warm.settimeout(_PATIENCE_S)
    order = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": str(Path.cwd())}
    send(warm, order, passing=[0, 1, 2])
    answer, _ = receive(warm)
    if "declined" in answer:
        raise ChannelClosed(answer["declined"])
    daemon = int(answer["daemon"])

    begun = False

    def ended_by(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, number)
        if not begun:
            sys.exit(128 + number)

    # Before it begins: one that works must not outlive who stands for it.
    signal.signal(signal.SIGTERM, ended_by)
    send(warm, {"go": True})
    begun = True


def _stand_in(warm: socket.socket) -> None:
    """Until the fork has ended: then its end of the socket is closed."""
    warm.settimeout(None)
    with contextlib.suppress(ConnectionError):
        while warm.recv(1):
            pass


def _ordinary(error: Exception) -> NoReturn:
    sys.stderr.write(f"No warm Python process, so an ordinary daemon: {error!r}\n")
    os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])  # noqa: S606 - our own


def _warm(folder: Path) -> socket.socket:
    """A connection to the warm process, which is started where there is none. Raises OSError."""
    with file_lock(folder / _LOCK):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected(folder)
        _start(folder)
        return _connected(folder)


def _connected(folder: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.chdir(folder):  # a socket's path has a hundred characters at most
            found.connect(_SOCKET)
    except OSError:
        found.close()
        raise
    return found


def _start(folder: Path) -> None:
    """It listens when this returns: its socket is made here, and it answers as soon as it has imported."""
    (folder / _SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(folder):
            listener.bind(_SOCKET)
        listener.listen(_WAITING)
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
