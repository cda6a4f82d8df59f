"""A lake whose Nessie is an in-memory implementation in this process. Its tables are real Iceberg tables in a temporary folder.

`nessie/test_simulated_server.py` compares the in-memory Nessie with the real one. A module's tests use it with

    lakehouse = memory.lakehouse

Tests of the module that are marked `nessie` or with a higher tier still use the real Nessie.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from branchlake_dagster.lakehouse import lakehouse as lakehouses
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import RetryBudget, RetryPolicy
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.simulation.history import Json
from branchlake_dagster_tests.simulation.nessie import Answer, InMemoryNessie
from branchlake_dagster_tests.simulation.transport import DirectTransport
from branchlake_dagster_tests.suite import tiers

ON_BOTH = pytest.mark.parametrize(
    "lakehouse", ["in-memory", pytest.param("real", marks=pytest.mark.nessie)], indirect=True
)
"""Runs a test on the in-memory and on the real Nessie."""


class SharedNessie(InMemoryNessie):
    """An in-memory Nessie for several threads, with the system's clock."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: datetime.now(UTC), seed=uuid.uuid4().int)
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, params: Mapping[str, str], body: Json | None) -> Answer:
        with self._lock:
            return super().answer(method, path, params, body)


class NamedTransport(DirectTransport):
    """The transport to an in-memory Nessie with its own address."""

    def __init__(self, server: InMemoryNessie, uri: str) -> None:
        super().__init__(server)
        self.uri = uri


@contextmanager
def serve(server: InMemoryNessie) -> Iterator[NessieClient]:
    """Return a client of an in-memory server. Every lake in this process with its URI uses this client."""
    uri = f"http://{uuid.uuid4().hex}.invalid/api/v2"
    client = NessieClient(uri, transport=NamedTransport(server, uri), retry=RetryPolicy(budget=RetryBudget()))
    key = (os.getpid(), uri, None, True)
    lakehouses._clients[key] = client
    yield client
    del lakehouses._clients[key]


def open_lake(client: NessieClient, folder: Path) -> Lakehouse:
    """Open a lake on an in-memory server with its files in `folder`. `main` has a first commit."""
    lake = Lakehouse(Settings(state_dir=folder, nessie_uri=client.uri), start=False)
    ensure_main_has_commit(lake.nessie)
    return lake


@pytest.fixture
def in_memory_nessie() -> Iterator[NessieClient]:
    """A client of an empty in-memory Nessie. Every lake in this process with its URI uses this client."""
    with serve(SharedNessie()) as client:
        yield client


@pytest.fixture
def lakehouse(request: pytest.FixtureRequest, in_memory_nessie: NessieClient, tmp_path: Path) -> Lakehouse:
    """A new in-memory lake for a test of tier `lake`; the session's real lake for a test of a higher tier."""
    if tiers.tier_of(request.node) != tiers.IN_MEMORY:
        found: Lakehouse = request.getfixturevalue("lakehouse")
        return found
    return open_lake(in_memory_nessie, tmp_path / "state")
