"""One history with servers of its own, in which processes and servers are killed.

`BRANCHLAKE_TEST_INGEST_SEED` is its seed. More of them: `python -m branchlake_dagster_tests.ingest.histories SEED [COUNT]`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from branchlake_dagster_tests.ingest.histories.real import RealHistory, stack

SEED = int(os.environ.get("BRANCHLAKE_TEST_INGEST_SEED", "0"))
SHORT = (
    "kill the live run",
    "kill Kafka",
    "kill it before its publication",
    "kill Nessie",
    "pause it while another one works",
    "kill Spark",
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


def test_each_token_is_there_once_after_kills_of_processes_and_servers(tmp_path: Path) -> None:
    """One history of `python -m branchlake_dagster_tests.ingest.histories`, shorter than those."""
    with stack(tmp_path) as (lake, broker, environment):
        told: list[str] = []
        played = RealHistory(lake, broker, environment, SEED, say=told.append).play(SHORT)
    assert not played.problems, f"{played}\n{told}"
