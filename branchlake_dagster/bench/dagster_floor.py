"""Benchmark of Dagster alone: a run that does nothing, in a `dagster dev` without branchlake."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg

from branchlake_dagster.bench.launched_run import BenchFailed, launch_run
from branchlake_dagster.cli.dagster_home import dagster_dev
from branchlake_dagster.waiting import holds_within

_MODULE = "branchlake_dagster.bench.trivial_project"


def measure_trivial_runs(home: Path, *, rounds: int, say: Callable[[str], None]) -> float:
    """Measure trivial runs with Dagster's own launcher, queue and settings: median seconds to success.

    Args:
        home: An empty folder for Dagster's home.
        rounds: The number of measured runs. One more run before them is not counted.
        say: Receives a line after each run.

    Raises:
        BenchFailed: A run did not succeed.
    """
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    durations = []
    with (
        dagster_dev(_MODULE, home=home, environment={}) as url,
        dg.DagsterInstance.from_config(str(home)) as instance,
    ):
        for number in range(rounds + 1):
            durations.append(_time_trivial_run(url, instance))
            say(f"trivial asset with Dagster's own launcher, round {number}/{rounds}: {durations[-1]:.1f} s")
    return statistics.median(durations[1:])


def _time_trivial_run(url: str, instance: dg.DagsterInstance, *, timeout_s: float = 120.0) -> float:
    began = time.time()
    run_id = launch_run(url, _MODULE, "trivial_job")

    def has_finished() -> bool:
        run = instance.get_run_by_id(run_id)
        return run is not None and run.is_finished

    holds_within(timeout_s, has_finished, every_s=0.1)
    success_times = [
        record.timestamp for record in instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_SUCCESS)
    ]
    if not success_times:
        raise BenchFailed("The run of a trivial asset did not succeed.", run_id=run_id)
    return success_times[0] - began
