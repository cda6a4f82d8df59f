"""Fixtures of pytest for throw-away lakes. Load them in `conftest.py`.

    pytest_plugins = ["branchlake_dagster.testing.fixtures"]

`lake` is empty in each test. The first test that uses it starts its server, once per session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from branchlake_dagster.testing import ThrowawayLake, ThrowawayServer, throwaway_server


@pytest.fixture(scope="session")
def branchlake_server() -> Iterator[ThrowawayServer]:
    """The server that all lakes of the test session share."""
    with throwaway_server() as server:
        yield server


@pytest.fixture
def lake_settings() -> Mapping[str, Any]:
    """The settings of `lake`, by field of `Settings`. Override the fixture to change them.

    For example: `return {"require_checks": False}`.
    """
    return {}


@pytest.fixture
def lake(branchlake_server: ThrowawayServer, lake_settings: Mapping[str, Any]) -> Iterator[ThrowawayLake]:
    """An empty lake for one test, with its own Dagster instance.

    Override the fixture `lake_settings` to change its settings. The server is shared with other tests.
    """
    with branchlake_server.lake(**lake_settings) as throwaway:
        yield throwaway
