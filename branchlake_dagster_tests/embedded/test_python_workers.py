"""The Python daemons of an embedded Spark server are forked from a warm process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy
import psutil
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from branchlake_dagster.embedded import warm_worker as warm
from branchlake_dagster.embedded import worker_daemon as daemon
from branchlake_dagster.internals.json_channel import receive_message, send_message
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.waiting import holds_within

MODULE = daemon.__name__


class Server:
    """Plays Spark's part: starts daemons and asks them for workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = uuid.uuid4().hex
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.connections: list[socket.socket] = []

    def daemon(self, **environment: str) -> tuple[subprocess.Popen[bytes], int]:
        """One and the port that it listens at, as `PythonWorkerFactory` starts it."""
        place = self.folder / f"session-{len(self.daemons)}"
        place.mkdir()
        made = subprocess.Popen(
            [sys.executable, "-m", MODULE, "pyspark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=place,
            env={
                **os.environ,
                daemon.FOLDER_VARIABLE: str(self.folder),
                "PYTHON_WORKER_FACTORY_SECRET": self.secret,
                **environment,
            },
        )
        self.daemons.append(made)
        assert made.stdout is not None
        (port,) = struct.unpack("!i", made.stdout.read(4))
        return made, port

    def worker(self, port: int) -> int:
        """The process id of a worker that has been forked, and waits for a task until the end."""
        connection = socket.create_connection(("127.0.0.1", port))
        self.connections.append(connection)  # it would end with it, now and then before it was looked at
        (pid,) = struct.unpack("!i", connection.recv(4))
        secret = self.secret.encode()
        connection.sendall(struct.pack("!i", len(secret)) + secret)
        assert connection.recv(6) == struct.pack("!i", 2) + b"ok"
        # PySpark ends workers by SIGHUP. A new worker ignores it for a moment, and would outlive its daemon.
        assert holds_within(30.0, lambda: not ignores_hangup(pid), every_s=0.01)
        return pid

    def end(self) -> None:
        for connection in self.connections:
            connection.close()
        for one in self.daemons:
            assert one.stdin is not None
            assert one.stdout is not None
            one.stdin.close()
            one.stdout.close()
            one.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for the module: to import what its warm process imports takes seconds."""
    # The path of a socket may have a hundred characters; a state folder's may be longer.
    folder = tmp_path_factory.mktemp("workers") / ("deep" * 30)
    folder.mkdir()
    made = Server(folder)
    try:
        yield made
    finally:
        made.end()
        for one in warm_processes(folder):
            with contextlib.suppress(psutil.NoSuchProcess):  # a fork of it that ends by itself
                one.kill()


def ignores_hangup(pid: int) -> bool:
    """Whether a process ignores SIGHUP, as a daemon does, and its worker until it is ready for a task."""
    (mask,) = re.findall(r"SigIgn:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) & 1 << (signal.SIGHUP - 1))


def warm_processes(folder: Path) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if warm.__name__ in one.cmdline() and one.environ().get(daemon.FOLDER_VARIABLE) == str(folder):
                found.append(one)
    return found


@pytest.mark.long
def test_daemons_are_forked_from_one_warm_process(server: Server) -> None:
    first, port = server.daemon()
    second, other = server.daemon(SPARK_JOB="second")
    parents = {psutil.Process(server.worker(one)).parent().ppid() for one in (port, other)}
    assert len(parents) == 1
    (parent,) = parents
    assert warm.__name__ in psutil.Process(parent).cmdline()
    assert first.poll() is None
    assert second.poll() is None


def test_a_daemon_has_its_own_environment_and_folder(server: Server) -> None:
    server.daemon()
    _, port = server.daemon(OF_THE_SECOND="yes")
    forked = psutil.Process(server.worker(port)).parent()
    assert forked is not None
    assert Path(forked.cwd()).name == f"session-{len(server.daemons) - 1}"


@pytest.mark.long
def test_it_ends_when_spark_closes_its_pipe(server: Server) -> None:
    made, port = server.daemon()
    worker = server.worker(port)
    server.end()
    assert made.returncode == 0
    assert holds_within(30.0, lambda: not psutil.pid_exists(worker), every_s=0.05)


@pytest.mark.long
def test_the_parent_process_passes_the_end_on(server: Server) -> None:
    made, port = server.daemon()
    worker = server.worker(port)
    made.send_signal(signal.SIGTERM)
    made.wait(30)
    assert holds_within(30.0, lambda: not psutil.pid_exists(worker), every_s=0.05)


@pytest.mark.long
def test_a_killed_warm_process_is_followed_by_another(server: Server) -> None:
    server.daemon()
    for one in warm_processes(server.folder):
        one.kill()
    _, port = server.daemon()
    assert server.worker(port)


@pytest.mark.long
@pytest.mark.parametrize(
    "environment", [{"PYTHONHASHSEED": "7"}, {"OMP_NUM_THREADS": "11"}], ids=lambda one: next(iter(one))
)
def test_who_imports_otherwise_is_an_ordinary_daemon(server: Server, environment: dict[str, str]) -> None:
    server.daemon()
    made, port = server.daemon(**environment)
    assert server.worker(port)
    assert "pyspark.daemon" in psutil.Process(made.pid).cmdline()


def test_without_a_folder_of_its_own_it_is_an_ordinary_daemon(server: Server, tmp_path: Path) -> None:
    made, port = server.daemon(**{daemon.FOLDER_VARIABLE: str(tmp_path / "not there")})
    assert server.worker(port)
    assert "pyspark.daemon" in psutil.Process(made.pid).cmdline()


def test_a_fork_that_dies_before_it_listens_is_replaced_by_an_ordinary_daemon(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(tmp_path):
            listener.bind("warm-python.sock")
        listener.listen()
        dying = threading.Thread(target=_play_dying_fork, args=(listener,))
        dying.start()
        try:
            made, port = server.daemon()
            assert server.worker(port)
            assert "pyspark.daemon" in psutil.Process(made.pid).cmdline()
        finally:
            server.end()
            dying.join(30)


def _play_dying_fork(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection, subprocess.Popen(["sleep", "60"]) as fork:
        _, descriptors = receive_message(connection)
        for descriptor in descriptors:
            os.close(descriptor)
        send_message(connection, {"daemon": fork.pid})
        receive_message(connection)
        fork.kill()


_LOSES_ONE_SIGNAL = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_a_fork_that_loses_a_signal_gets_another(tmp_path: Path) -> None:
    """Python ignores the exception of a signal handler inside a hook of `os.fork`."""
    server = Server(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(tmp_path):
            listener.bind("warm-python.sock")
        listener.listen()
        forks: list[subprocess.Popen[bytes]] = []
        playing = threading.Thread(target=_play_deaf_fork, args=(listener, forks))
        playing.start()
        try:
            made, _ = server.daemon()
            playing.join(30)
            made.send_signal(signal.SIGTERM)
            assert forks[0].wait(20) == -signal.SIGTERM
            # The second status if the signal comes before the message that the fork listens.
            assert made.wait(20) in (0, 128 + signal.SIGTERM)
        finally:
            for fork in forks:
                fork.kill()
                fork.wait(30)
                assert fork.stdout is not None
                fork.stdout.close()
            server.end()


def _play_deaf_fork(listener: socket.socket, forks: list[subprocess.Popen[bytes]]) -> None:
    connection, _ = listener.accept()
    with connection:
        _, descriptors = receive_message(connection)
        fork = subprocess.Popen(
            [sys.executable, "-c", _LOSES_ONE_SIGNAL],
            stdout=subprocess.PIPE,
            pass_fds=[connection.fileno()],  # its end signals the end of the fork
        )
        forks.append(fork)
        assert fork.stdout is not None
        assert fork.stdout.readline() == b"ready\n"
        send_message(connection, {"daemon": fork.pid})
        receive_message(connection)
        send_message(connection, {"listening": True})
        os.write(descriptors[1], struct.pack("!i", 1))
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.long
def test_the_warm_process_ends_with_spark(tmp_path: Path) -> None:
    """Spark is the process that starts the daemon; here one that is killed."""
    start = (
        "import subprocess, sys;"
        f"subprocess.Popen([sys.executable, '-m', {MODULE!r}, 'pyspark.worker'],"
        " stdin=subprocess.PIPE, stdout=sys.stdout).wait()"
    )
    environment = {**os.environ, daemon.FOLDER_VARIABLE: str(tmp_path), "PYTHON_WORKER_FACTORY_SECRET": "x"}
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, env=environment) as spark:
        assert spark.stdout is not None
        assert len(spark.stdout.read(4)) == 4
        assert warm_processes(tmp_path)
        spark.kill()
        assert holds_within(30.0, lambda: not warm_processes(tmp_path), every_s=0.1)


@pytest.mark.spark
def test_sessions_of_spark_share_what_is_imported_and_no_workers(lakehouse: Lakehouse) -> None:
    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        imported = "pyiceberg.io.pyarrow" in sys.modules
        daemon = psutil.Process().parent()
        told = {
            "worker": os.getpid(),
            "daemon": daemon.pid,
            "warm": daemon.ppid(),
            "imported": imported,
            "drawn": numpy.random.random(),
        }
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"told": [json.dumps(told)]})

    found = []
    for _ in range(2):
        session = lakehouse.spark_session()
        try:
            rows = session.range(0, 40, 1, 2).mapInArrow(tell, "told string").toArrow()
        finally:
            session.stop()
        found += [json.loads(one) for one in set(rows["told"].to_pylist())]
    assert len({one["warm"] for one in found}) == 1
    assert len({one["daemon"] for one in found}) == 2
    assert all(one["imported"] for one in found)
    # A worker that serves two tasks draws twice, and other numbers.
    assert len({one["drawn"] for one in found}) == len(found), "they draw the same numbers"


@pytest.mark.spark
def test_a_session_works_on_after_spark_deleted_its_folder(spark_session: SparkSession) -> None:
    # Spark does so when a hundred other sessions have run tasks since.
    def find_folder(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"folder": [str(Path.cwd())]})

    rows = spark_session.range(0, 4, 1, 2).mapInArrow(find_folder, "folder string")
    (folder,) = set(rows.toArrow()["folder"].to_pylist())
    for _ in range(2):  # the idle workers of the earlier tasks, and new ones
        shutil.rmtree(folder)
        assert {*rows.toArrow()["folder"].to_pylist()} == {folder}
        killed = []
        for worker in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # The daemon works in this folder, too. It has no children once its workers have ended.
                parent = worker.parent()
                if worker.cwd() == folder and parent is not None and parent.cwd() == folder:
                    worker.kill()
                    killed.append(worker)
        # Until its parent knows, Spark takes a killed worker for an idle one.
        assert not psutil.wait_procs(killed, timeout=30)[1]
