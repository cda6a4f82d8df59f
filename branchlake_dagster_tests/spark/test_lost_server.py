"""A Spark server that does not answer any more: a typed error within a bounded time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.errors import AnalysisException

from branchlake_dagster.errors import OutcomeUnknown
from branchlake_dagster.internals.pyspark import limit_retry_time
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.spark.session import SparkGone, open_session
from branchlake_dagster_tests.suite.raised import raising

pytestmark = pytest.mark.spark


class Way:
    """A way to a server that can be closed."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._to)
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody answers at its address any more."""
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextmanager
def by_a_way(lakehouse: Lakehouse) -> Iterator[tuple[Any, Way]]:
    endpoints = lakehouse.endpoints()
    assert endpoints.spark_remote is not None
    server = urlsplit(endpoints.spark_remote)
    assert server.hostname is not None
    assert server.port is not None
    way = Way((server.hostname, server.port))
    there = replace(endpoints, spark_remote=f"sc://localhost:{way.port}")
    try:
        yield open_session(lakehouse.settings, there, ref="main", conf={}), way
    finally:
        way.close()


def test_a_server_that_is_gone_is_reported_without_waiting(lakehouse: Lakehouse, spark_session: Any) -> None:
    with by_a_way(lakehouse) as (session, way):
        assert session.range(3).count() == 3
        with pytest.raises(AnalysisException):
            session.table("nowhere").count()
        waits = session.client.get_retry_policies()[0]
        longest = sum(
            min(waits.initial_backoff * waits.backoff_multiplier**one, waits.max_backoff)
            for one in range(waits.max_retries)
        )
        assert 60_000 <= longest < 65_000, "pyspark's own is ten minutes"
        limit_retry_time(session.client, 0.1)
        way.close()
        with (
            pytest.warns(UserWarning, match="RETRIES_EXCEEDED"),
            raising(SparkGone, subject=f"localhost:{way.port}") as told,
        ):
            session.range(3).count()
    assert isinstance(told.value, OutcomeUnknown)
    assert "token" not in str(told.value)
