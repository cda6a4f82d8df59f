"""A server of others is not stopped because it accepted one connection late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchlake_dagster.embedded import process, servers
from branchlake_dagster.embedded.process import ProcessRecord, choose_port, find_start_s
from branchlake_dagster.embedded.servers import NESSIE, EmbeddedServers
from branchlake_dagster.settings import Settings

LISTENS_LATE = """
import socket, sys, time
time.sleep(float(sys.argv[2]))
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(60)
"""
pytestmark = pytest.mark.long


class Started(Exception):  # noqa: N818 - what the test waits for, not an error
    """A server would have been started now."""


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedServers:
    def start(*_: object) -> dict[str, ProcessRecord]:
        raise Started

    found = EmbeddedServers(Settings(state_dir=tmp_path / "state"))
    monkeypatch.setattr(found, "_start_servers", lambda names: start() if names else {})
    (tmp_path / "state" / "run").mkdir(parents=True, mode=0o700)
    return found


def listens_after(embedded: EmbeddedServers, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """A recorded process that begins to accept connections after some seconds."""
    port = choose_port(0, setting="none")
    with subprocess.Popen([sys.executable, "-c", LISTENS_LATE, str(port), str(seconds)]) as server:
        started = find_start_s(server.pid)
        assert started is not None
        ProcessRecord(NESSIE, server.pid, started, port).save(embedded._record_path(NESSIE))
        yield server
        server.kill()


@pytest.mark.parametrize("start", [True, False])
def test_a_server_that_accepts_late_is_used(embedded: EmbeddedServers, *, start: bool) -> None:
    for server in listens_after(embedded, 1.5):
        record = ProcessRecord.load(embedded._record_path(NESSIE))
        assert record is not None
        assert not process.is_listening(record.port)
        assert str(record.port) in embedded.endpoints(spark=False, start=start).nessie_uri
        assert server.poll() is None


def test_a_server_that_never_accepts_is_started_again(
    embedded: EmbeddedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_BUSY_S", 0.5)
    for _ in listens_after(embedded, 60):
        with pytest.raises(Started):
            embedded.endpoints(spark=False)


def test_a_server_that_ends_meanwhile_is_started_again_at_once(embedded: EmbeddedServers) -> None:
    for server in listens_after(embedded, 60):
        server.kill()
        server.wait()
        with pytest.raises(Started):
            embedded.endpoints(spark=False)
