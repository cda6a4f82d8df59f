"""Short histories with a fault at any step: each token is there exactly once.

`BRANCHLAKE_TEST_INGEST_SEED` sets the seed with which they begin. More of them:
`python -m branchlake_dagster_tests.ingest.histories SEED [COUNT]`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.ingest.histories.faults import Fault
from branchlake_dagster_tests.ingest.histories.play import History
from branchlake_dagster_tests.suite.kafka import Broker

FIRST_SEED = int(os.environ.get("BRANCHLAKE_TEST_INGEST_SEED", "0"))
HISTORIES = int(os.environ.get("BRANCHLAKE_TEST_INGEST_HISTORIES", "1"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 30 * HISTORIES)]


def test_each_token_exists_once_whatever_fails(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    seen: Counter[str] = Counter()
    failed = []
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        played = History(lakehouse, kafka, lambda: spark_session, seed).play()
        seen += played.seen
        if played.problems:
            failed.append(str(played))
    assert not failed, "\n\n".join(failed)
    if HISTORIES >= 30:
        missing = {*Fault} - {*seen} - {Fault.NONE}
        assert not missing, f"in no history: {missing}"
        assert {"Died", "Superseded"} <= seen.keys()
