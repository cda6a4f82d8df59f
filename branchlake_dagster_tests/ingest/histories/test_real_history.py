"""One history with servers of its own, in which processes and servers are killed.

`BRANCHLAKE_TEST_INGEST_SEED` is its seed. More of them: `python -m branchlake_dagster_tests.ingest.histories SEED [COUNT]`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from branchlake_dagster_tests.ingest.histories.real import RealHistory, stack

SEED = int(os.environ.get("BRANCHLAKE_TEST_INGEST_SEED", "0"))
ONE_KILL_OF_EACH = ("kill Spark", "kill Nessie", "kill Kafka")
OF_THE_LIVE_RUN = (
    *("kill the live run", "pause it while another one works"),
    *("kill it before its publication", "kill it after its publication"),
)
"""`test_one_daemon.py` kills a live run as well."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param(ONE_KILL_OF_EACH, id="servers"),
        pytest.param(OF_THE_LIVE_RUN, id="live run", marks=pytest.mark.soak),
    ],
)
def test_each_token_exists_once_after_kills_of_processes_and_servers(
    tmp_path: Path, state_dir: Path, actions: tuple[str, ...]
) -> None:
    """One history of `python -m branchlake_dagster_tests.ingest.histories`, shorter than those."""
    with stack(tmp_path, state_dir) as (lake, broker, environment):
        told: list[str] = []
        played = RealHistory(lake, broker, environment, SEED, say=told.append).play(actions)
    assert not played.problems, f"{played}\n{told}"
