"""A lake whose Nessie is in this process's memory: the simulation's, which `nessie/test_simulated_server.py` holds to the real one.

Its tables are real Iceberg tables in a folder of the test's own. A module's tests use it with

    lakehouse = memory.lakehouse

and those of them that are marked `nessie`, `spark`, or with what needs more, use the real Nessie as before.
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
"""For a test that shall run on both."""


class SharedNessie(InMemoryNessie):
    """The in-memory Nessie for several threads, by the system's clock."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: datetime.now(UTC), seed=uuid.uuid4().int)
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, params: Mapping[str, str], body: Json | None) -> Answer:
        with self._lock:
            return super().answer(method, path, params, body)


class NamedTransport(DirectTransport):
    """The wire to an in-memory Nessie that has an address of its own."""

    def __init__(self, server: InMemoryNessie, uri: str) -> None:
        super().__init__(server)
        self.uri = uri


@contextmanager
def serve(server: InMemoryNessie) -> Iterator[NessieClient]:
    """A client of a server in memory, which all of this process have that name its address."""
    uri = f"http://{uuid.uuid4().hex}.invalid/api/v2"
    client = NessieClient(uri, transport=NamedTransport(server, uri), retry=RetryPolicy(budget=RetryBudget()))
    key = (os.getpid(), uri, None, True)
    lakehouses._clients[key] = client
    yield client
    del lakehouses._clients[key]


def open_lake(client: NessieClient, folder: Path) -> Lakehouse:
    """The lake of a server in memory, whose files are in `folder`; its `main` has a first commit."""
    lake = Lakehouse(Settings(state_dir=folder, nessie_uri=client.uri), start=False)
    ensure_main_has_commit(lake.nessie)
    return lake


@pytest.fixture
def in_memory_nessie() -> Iterator[NessieClient]:
    """A client of an empty Nessie in memory, which all of this process have that name its address."""
    with serve(SharedNessie()) as client:
        yield client


@pytest.fixture
def lakehouse(request: pytest.FixtureRequest, in_memory_nessie: NessieClient, tmp_path: Path) -> Lakehouse:
    """As the session's fixture of that name, unless the test is of tier `lake`: then a lake of its own, in memory."""
    if tiers.tier_of(request.node) != tiers.IN_MEMORY:
        found: Lakehouse = request.getfixturevalue("lakehouse")
        return found
    return open_lake(in_memory_nessie, tmp_path / "state")
