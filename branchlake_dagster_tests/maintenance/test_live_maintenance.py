"""Live ingestion and queries beside compaction, expiry and collection: nothing is lost, refused or wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from multiprocessing.synchronize import Event

import pytest

from branchlake_dagster.bench.lake_processes import LakeProcess, TableReader
from branchlake_dagster.bench.launched_run import BenchFailed
from branchlake_dagster.bench.live_maintenance import MOST_MINUTES_WITHOUT, measure_live_maintenance
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.json_contract import check_output

MINUTES = float(os.environ.get("BRANCHLAKE_TEST_LIVE_MINUTES", "5"))
"""Minutes of the phase with maintenance."""
NEVER = (
    "live_lost",
    "live_doubled",
    "live_refused",
    "failed_reads",
    "wrong_reads",
    "maintenance_failed",
)


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(1_800 + 300 * MINUTES)
def test_maintenance_beside_live_ingestion_and_queries(
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    figures = measure_live_maintenance(Settings(), minutes=MINUTES, say=lambda _: None)
    for name, value in figures.items():
        record_testsuite_property(name, value)
    check_output(["bench", "maintenance", "--json"], json.dumps(figures))
    assert figures["problems"] == []
    assert {name: figures[name] for name in NEVER} == dict.fromkeys(NEVER, 0)
    minutes_without = min(MINUTES, MOST_MINUTES_WITHOUT)
    assert (figures["live_minutes_without"], figures["live_minutes"]) == (minutes_without, MINUTES)
    assert figures["live_records"] >= 500 * int(60 * (minutes_without + MINUTES))
    for phase in ("without", "with"):
        assert figures[f"queries_{phase}"] > 0
        assert figures[f"spark_reads_{phase}"] > 0
        assert figures[f"query_p95_{phase}_s"] > 0
        assert figures[f"live_p99_{phase}_s"] >= figures[f"live_p50_{phase}_s"] > 0
    assert figures["compactions"] > 0
    assert figures["expired_snapshots"] > 0
    assert figures["collected_files"] >= 100  # those that were never committed
    assert figures["files_after_hour_of_live"] < figures["files_without_maintenance"]


# -- what the trial would notice -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(3, 3), (3, 3), (5, 5)], [True, True, True]),
        ([(3, 3), (4, 3)], [True, False]),
        ([(3, 3), (2, 2), (2, 2)], [True, False, True]),
    ],
    ids=["rows come", "a row twice", "a row missing"],
)
def test_a_reader_notices_rows_that_are_doubled_or_gone(
    answers: list[tuple[int, int]], expected: list[bool]
) -> None:
    remaining = iter(answers)
    reader = TableReader(lambda: next(remaining))
    assert [reader.check() for _ in answers] == expected


def work_until_stopped(settings: Settings, ready: Event, stop: Event, fate: str) -> int:
    if fate == "fails early":
        raise ValueError(fate)
    ready.set()
    if fate == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    stop.wait()
    if fate == "fails late":
        raise ValueError(fate)
    return 7


def run_process(fate: str) -> int:
    process = LakeProcess(work_until_stopped, Settings(), fate)
    try:
        process.wait_until_ready()
        return process.finish()
    finally:
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    "fate",
    [
        "is killed",
        "fails late",
        pytest.param("fails early", marks=pytest.mark.soak),  # the same error, which comes sooner
    ],
)
def test_the_failure_of_a_process_fails_the_trial(fate: str) -> None:
    with pytest.raises(BenchFailed):
        run_process(fate)


@pytest.mark.long
def test_a_process_returns_its_result_after_its_stop() -> None:
    assert run_process("works") == 7
