"""The same bytes in any order and in any cuts give the same observations, tracks, risks and net alerts.

`BRANCHLAKE_TEST_SHUFFLES` is the number of shuffles, and `BRANCHLAKE_TEST_SHUFFLE_SEED` is the seed.
"""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.sda.shuffled_bytes import Pipeline, crossing_objects, simulate_bytes
from branchlake_dagster_tests.sda.test_registry_lake import empty_lake
from branchlake_dagster_tests.suite.soak import soaking

__all__ = ["empty_lake"]

pytestmark = [pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(14_400)]

START = datetime(2026, 8, 8, 3, tzinfo=UTC)
SEED = int(os.environ.get("BRANCHLAKE_TEST_SHUFFLE_SEED", "0"))
SHUFFLES = int(os.environ.get("BRANCHLAKE_TEST_SHUFFLES", "1"))
HOURS, PIECES = (3, 3) if soaking() else (1, 2)


def test_shuffled_bytes_give_the_same_tables(empty_lake: Lakehouse, tmp_path: Path) -> None:
    print(f"seed {SEED}")  # noqa: T201 - a failure is repeated by it
    elements = crossing_objects(START, pairs=20, seed=SEED)
    rates = {"radar": 0.8, "optical": 0.1, "isl": 0.1}
    simulated = simulate_bytes(elements, START, hours=HOURS, per_s=rates, seed=SEED)
    totals = [
        sum(getattr(tally, name) for tally in simulated.tallies.values())
        for name in ("duplicates", "stragglers")
    ]
    damaged = sum(sum(tally.corrupted.values()) for tally in simulated.tallies.values())
    print(f"{len(simulated.records)} records, {totals} twice and late, {damaged} damaged")  # noqa: T201
    pipeline = Pipeline(empty_lake, tmp_path)
    pipeline.publish_catalog(elements, START)
    expected = pipeline.compute(simulated, None, 1)
    heights = {name: frame.height for name, frame in expected.frames.items()}
    print(heights)  # noqa: T201
    assert all(heights[name] for name in ("dead_letters", "observations", "tracks", "risks", "net_alerts")), (
        heights
    )
    assert heights["dead_letters"] == damaged
    assert expected.frames["tracks"]["is_preferred"].any()
    assert (expected.frames["risks"]["sat1_state_source"] == "track").any()
    differences = []
    for number in range(SHUFFLES):
        chance = random.Random(f"{SEED}/{number}")
        tables = pipeline.compute(simulated, chance, PIECES)
        differences += [f"shuffle {number}: {text}" for text in expected.differences(tables)]
        print(f"shuffle {number}: {pipeline.log().height} entries of the log")  # noqa: T201
    assert not differences, "\n".join([f"seed {SEED}", *differences])
