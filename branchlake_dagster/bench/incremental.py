"""The benchmark `branchlake bench incremental`: a pipeline with a look-back of 14 days, and with changes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench import change_capture as capture_speed
from branchlake_dagster.bench.change_capture import ExecutorMetrics, write_spark_conf
from branchlake_dagster.bench.incremental_feed import SIZES, WINDOW, FeedSize
from branchlake_dagster.bench.incremental_simulation import STAGES, WAYS, Simulation, StageRun
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import Position
from branchlake_dagster.history.manifests import OwnFilesCache
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings

_CONF = "SPARK_CONF_DIR"


def measure_incremental(
    settings: Settings, *, rounds: int, sizes: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure both ways on the same days, and change capture alone, in a temporary state folder.

    For each size, 14 days exist before, one day warms up, and `rounds` days are measured. A figure is the
    mean over the measured days. Executor seconds are the sum of the tasks' run times in Spark's event log.

    `sizes` contains the figures of each size. The other keys are the figures of the largest size:

    - `lookback_s`, `incremental_s`: executor seconds of both stages.
    - `ratio`, `cpu_ratio`, `wall_ratio`, `bytes_ratio`: changes divided by look-back. Bytes are the sizes
      of the files that scans planned.
    - `equal`: whether both ways wrote the same rows, in both stages and all sizes.
    - `capture_ms`, `changelog_view_ms`: the last day's events as a change from manifests, and by Iceberg's
      changelog view in Spark.
    - the figures of `measure_capture`.
    """
    with own_lake(settings) as bench_settings:
        folder = bench_settings.state_dir.parent
        with _log_spark_events(folder):
            lake = Lakehouse(bench_settings, say=say)
            try:
                lake.endpoints()
                ensure_main_has_commit(lake.nessie)
                metrics = ExecutorMetrics(folder)
                figures_by_size = {
                    name: _measure_size(lake, SIZES[name], metrics, rounds=rounds, say=say) for name in sizes
                }
                return {
                    **_figures_of_largest(figures_by_size),
                    "sizes": figures_by_size,
                    **capture_speed.measure_capture(lake, say=say),
                }
            finally:
                lake.servers.stop_all()


@contextmanager
def _log_spark_events(folder: Path) -> Iterator[None]:
    """Let Spark servers that start in the block log their events."""
    old_folder = os.environ.get(_CONF)
    os.environ[_CONF] = str(write_spark_conf(folder))
    try:
        yield
    finally:
        if old_folder is None:
            del os.environ[_CONF]
        else:
            os.environ[_CONF] = old_folder


def _figures_of_largest(figures_by_size: dict[str, dict[str, Any]]) -> dict[str, Any]:
    largest = max(figures_by_size, key=lambda name: SIZES[name].events_a_day)
    figures = {key: value for key, value in figures_by_size[largest].items() if key != "stages"}
    return {**figures, "equal": all(size_figures["equal"] for size_figures in figures_by_size.values())}


def _measure_size(
    lake: Lakehouse, size: FeedSize, metrics: ExecutorMetrics, *, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    namespace = f"bench_{size.name}"
    simulation = Simulation(lake, namespace, size, read_usage=metrics.since_last)
    runs: list[StageRun] = []
    with dg.DagsterInstance.local_temp() as instance:
        say(f"{size.name}: {WINDOW} days of {size.events_a_day:,} events …")
        simulation.run_first_days(instance)
        for number in range(WINDOW, WINDOW + rounds + 1):
            day_runs = simulation.run_day(instance, number)
            runs += day_runs if number > WINDOW else []
            executor_s = {way: sum(run.usage.run_s for run in day_runs if run.way == way) for way in WAYS}
            say(
                f"{size.name}, day {number}: "
                + ", ".join(f"{way} {s:.1f} s" for way, s in executor_s.items())
            )
    differences = simulation.count_differences()
    return {
        "events_a_day": size.events_a_day,
        **_compare_ways(runs, rounds),
        "equal": not any(differences.values()),
        **_measure_one_day(lake, namespace),
        "stages": [
            {"way": way, "stage": stage, **_mean_usage(runs, rounds, way, stage)}
            for way in WAYS
            for stage in STAGES
        ],
    }


def _mean_usage(
    runs: Sequence[StageRun], rounds: int, way: str, stage: str | None = None
) -> dict[str, float]:
    """Return the mean usage per day of one way, for one stage or for both."""
    matching_runs = [run for run in runs if run.way == way and stage in (None, run.stage)]
    return {
        "executor_s": round(sum(run.usage.run_s for run in matching_runs) / rounds, 2),
        "executor_cpu_s": round(sum(run.usage.cpu_s for run in matching_runs) / rounds, 2),
        "wall_s": round(sum(run.wall_s for run in matching_runs) / rounds, 2),
        "megabytes_scanned": round(sum(run.usage.bytes_scanned for run in matching_runs) / rounds / 1e6, 2),
    }


def _compare_ways(runs: Sequence[StageRun], rounds: int) -> dict[str, float]:
    lookback, changes = (_mean_usage(runs, rounds, way) for way in WAYS)
    ratio = {key: round(changes[key] / lookback[key], 3) for key in lookback}
    return {
        "lookback_s": lookback["executor_s"],
        "incremental_s": changes["executor_s"],
        "ratio": ratio["executor_s"],
        "cpu_ratio": ratio["executor_cpu_s"],
        "wall_ratio": ratio["wall_s"],
        "bytes_ratio": ratio["megabytes_scanned"],
    }


def _measure_one_day(lake: Lakehouse, namespace: str, *, rounds: int = 5) -> dict[str, float]:
    """Capture the last day's events as a change from manifests, and count them in a changelog view."""
    table = lake.catalog(MAIN).load_table((namespace, "playback"))
    snapshot = table.current_snapshot()
    assert snapshot is not None and snapshot.parent_snapshot_id is not None  # noqa: S101, PT018 - several days were written
    before = Position(current_position(table).table_uuid, snapshot.parent_snapshot_id)
    capture_s, view_s = [], []
    session = lake.spark_session(MAIN)
    try:
        for _ in range(rounds + 1):
            began = time.perf_counter()
            change = capture_change(table, before, name="playback", cache=OwnFilesCache())
            capture_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            session.sql(
                f"CALL nessie.system.create_changelog_view(table => 'nessie.{namespace}.playback',"
                f" changelog_view => 'bench_changes', options => map('start-snapshot-id',"
                f" '{before.snapshot_id}', 'end-snapshot-id', '{snapshot.snapshot_id}'))"
            ).collect()
            days = session.sql("SELECT day, count(*) AS n FROM bench_changes GROUP BY day").collect()
            view_s.append(time.perf_counter() - began)
            if sum(row["n"] for row in days) != change.rows_added:
                raise RuntimeError(f"The changelog view and the captured change differ: {change.label()}.")
    finally:
        session.stop()
    return {
        "capture_ms": round(1000 * statistics.median(capture_s[1:]), 2),
        "changelog_view_ms": round(1000 * statistics.median(view_s[1:]), 2),
    }


def show_incremental(figures: dict[str, Any]) -> None:
    """Print the stages of each size, and the figures of change capture, as tables."""
    for name, size in figures["sizes"].items():
        title = f"{name}: {size['events_a_day']:,} events a day, {size['ratio']:.0%} of the executor time"
        table = Table("stage", "way", "executor s", "executor CPU s", "wall s", "MB scanned", title=title)
        for stage in sorted(size["stages"], key=lambda stage: (stage["stage"], stage["way"]), reverse=False):
            column_keys = ("executor_s", "executor_cpu_s", "wall_s", "megabytes_scanned")
            table.add_row(stage["stage"], stage["way"], *(f"{stage[key]:.2f}" for key in column_keys))
        Console().print(table)
    table = Table("capture", "ms", title="Capture of ten files")
    for key, value in figures.items():
        if key.startswith(("capture_", "changelog_")):
            table.add_row(key, f"{value:.2f}")
    Console().print(table)
    Console().print("Both ways wrote the same rows." if figures["equal"] else "THE ROWS DIFFER.")
