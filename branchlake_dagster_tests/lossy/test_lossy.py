"""A few runs behind a lossy network with the daemon: tokens exact, nothing left.

`BRANCHLAKE_TEST_LOSSY_RUNS` says how many runs (3), `BRANCHLAKE_TEST_LOSSY_SEED` repeats the faults that are drawn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNS = int(os.environ.get("BRANCHLAKE_TEST_LOSSY_RUNS", "3"))
SEED = int(os.environ.get("BRANCHLAKE_TEST_LOSSY_SEED") or time.time_ns() % 1_000_000)
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200 + 60 * RUNS)]


def test_rows_are_exact_and_nothing_is_left_behind_a_lossy_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A rate at which a handful of runs meets something too.
    command = [sys.executable, "-m", "branchlake_dagster_tests.lossy", str(SEED), "--runs", str(RUNS)]
    process = subprocess.Popen(
        [*command, "--rate", "0.08"], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    try:
        printed, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()  # it ends what it has started
            process.wait(60)
    with capsys.disabled():
        print(f"\nBRANCHLAKE_TEST_LOSSY_SEED={SEED}\n{printed}")  # noqa: T201 - what was hit is part of the result
    assert process.returncode == 0, printed
