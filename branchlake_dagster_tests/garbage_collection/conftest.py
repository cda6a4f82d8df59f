"""All tests here age files by `os.utime`, except those that are marked `real_file_times`."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchlake_dagster_tests.garbage_collection.collected_lake import (
    CollectedLake,
    open_lake,
    trust_modification_times,
)


@pytest.fixture(autouse=True)
def file_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `os.utime` age files."""
    if "real_file_times" not in request.fixturenames:
        trust_modification_times(monkeypatch)


@pytest.fixture
def real_file_times() -> None:
    """Let a test see the times of files as they are."""


@pytest.fixture
def lake(tmp_path: Path) -> CollectedLake:
    """A lake in memory with a table that has one row."""
    lake = open_lake(tmp_path)
    lake.create()
    lake.append(1)
    return lake
