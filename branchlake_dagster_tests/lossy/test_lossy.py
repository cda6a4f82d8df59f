"""A few runs behind a lossy network: tokens exact, nothing left. In this process, and with a daemon and processes.

`BRANCHLAKE_TEST_LOSSY_RUNS` says how many runs, `BRANCHLAKE_TEST_LOSSY_SEED` which faults are drawn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.lossy.faults import Fault
from branchlake_dagster_tests.lossy.in_process import play
from branchlake_dagster_tests.suite.lakes import copy_jar_lists

KINDS, FIXED_SEED = 8, 2
RUNS = int(os.environ.get("BRANCHLAKE_TEST_LOSSY_RUNS", "3"))
SEED = int(os.environ.get("BRANCHLAKE_TEST_LOSSY_SEED") or time.time_ns() % 1_000_000)
RATE = 0.08
"""A rate at which a handful of runs meets something too."""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200 + 60 * RUNS)]


def test_rows_are_exact_and_nothing_is_left_behind_a_lossy_network(
    lakehouse: Lakehouse, tmp_path: Path
) -> None:
    """One run of each kind; some changes are applied without a word to who has asked for them."""
    copy_jar_lists(lakehouse.settings.state_dir, tmp_path)
    problems, dice = play(tmp_path, FIXED_SEED, runs=KINDS, rate=RATE)
    assert not problems
    assert {Fault.LOST, Fault.LATE, Fault.FELL_OVER} & dice.counts.keys()


@pytest.mark.soak  # the test above, with processes that meet
def test_rows_are_exact_behind_a_lossy_network_with_a_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "branchlake_dagster_tests.lossy", str(SEED), "--runs", str(RUNS)]
    process = subprocess.Popen(
        [*command, "--rate", str(RATE)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
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
