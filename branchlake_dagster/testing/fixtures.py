"""pytest's fixtures for throw-away lakes, loaded in `conftest.py`.

    pytest_plugins = ["branchlake_dagster.testing.fixtures"]

`lake` is empty in each test; its server is started once per session, by the first test that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from branchlake_dagster.testing import ThrowawayLake, ThrowawayServer, throwaway_server


@pytest.fixture(scope="session")
def branchlake_server() -> Iterator[ThrowawayServer]:
    """The server that the session's lakes share."""
    with throwaway_server() as server:
        yield server


@pytest.fixture
def lake_settings() -> Mapping[str, Any]:
    """Settings of the lake that a project or a test overrides: `return {"require_checks": False}`."""
    return {}


@pytest.fixture
def lake(branchlake_server: ThrowawayServer, lake_settings: Mapping[str, Any]) -> Iterator[ThrowawayLake]:
    """An empty lake with a Dagster instance of its own."""
    with branchlake_server.lake(**lake_settings) as throwaway:
        yield throwaway
