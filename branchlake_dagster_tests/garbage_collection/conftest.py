"""All tests here age files by `os.utime`, except those that are marked `real_file_times`."""

from __future__ import annotations

import pytest

from branchlake_dagster_tests.garbage_collection.collected_lake import trust_modification_times


@pytest.fixture(autouse=True)
def file_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `os.utime` age files."""
    if "real_file_times" not in request.fixturenames:
        trust_modification_times(monkeypatch)


@pytest.fixture
def real_file_times() -> None:
    """Let a test see the times of files as they are."""
