"""`branchlake bench lifecycle`: measure the time from the launch of a run until its tables are on `main`.

The runs are launched through Dagster's API, with a real daemon and publication sensor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dagster as dg
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.daemon_backfills import measure_backfill_ratios
from branchlake_dagster.bench.dagster_floor import measure_trivial_runs
from branchlake_dagster.bench.launched_run import BenchFailed, launch_run
from branchlake_dagster.bench.materialization import measure_materialization as materialise_figures
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.cli.dagster_home import dagster_dev, dagster_home
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.ledger import Publication, iter_publications
from branchlake_dagster.sda.commands.demo_run import INGEST_JOBS, plan_for, simulate_measurements
from branchlake_dagster.sda.partitions import gp_snapshots
from branchlake_dagster.sda.sources import DEFAULT_SNAPSHOT
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import EventMetadata, RunTag

PHASES = ("process_start", "session", "compute", "checks", "waiting", "publication")
_MODULE = "branchlake_dagster.sda.benchmarks.project"


@dataclass(frozen=True)
class Timed:
    """The times of one run: seconds from its launch until its tables are visible on `main`, also by phase."""

    total_s: float
    phases: dict[str, float]


def measure_lifecycle(settings: Settings, *, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the times of a small asset (medians), the whole graph (sums), and their parts, in seconds.

    The benchmark uses a separate state folder, running servers, a daemon and the publication sensor. The
    first run of the small asset warms the servers and is not counted. For comparison it measures an asset in
    plain Dagster without branchlake (``floor_one_asset_s``), backfills, and single writes beside those of a
    plain IO manager. Raises BenchFailed if a run was not published.
    """
    with own_lake(settings) as bench:
        lake = Lakehouse(bench, say=say)
        environment = {"BRANCHLAKE_STATE_DIR": str(bench.state_dir)}
        try:
            lake.endpoints()
            home = dagster_home(bench)
            with (
                dagster_dev(_MODULE, home=home, environment=environment) as url,
                dg.DagsterInstance.get() as instance,
            ):
                stack = _Stack(lake, instance, url)
                instance.add_dynamic_partitions(gp_snapshots.name or "", [DEFAULT_SNAPSHOT])
                say("Warming up …")
                stack.time_run("small_job", None)
                small = []
                for number in range(rounds):
                    small.append(stack.time_run("small_job", None))
                    say(f"small asset {number + 1}/{rounds}: {small[-1].total_s:.1f} s")
                graph = []
                for plans in plan_for([DEFAULT_SNAPSHOT]):
                    if any(plan.job in INGEST_JOBS for plan in plans):
                        simulate_measurements(lake, [DEFAULT_SNAPSHOT], say)
                    for plan in (plan for plan in plans if not plan.blocked):
                        graph.append(stack.time_run(plan.job, plan.partition))
                        say(f"{plan.job} {plan.partition}: {graph[-1].total_s:.1f} s")
                backfills = measure_backfill_ratios(lake, instance, url, say=say)
            floor_home = bench.state_dir.parent / "floor"
            floor_home.mkdir()
            floor = measure_trivial_runs(floor_home, rounds=rounds, say=say)
            single = materialise_figures(lake, say=say)
        finally:
            lake.servers.stop_all()
    return {
        "one_asset_s": round(statistics.median(run.total_s for run in small), 2),
        "floor_one_asset_s": round(floor, 2),
        "graph_s": round(sum(run.total_s for run in graph), 2),
        "phases": {
            "one_asset": {
                phase: round(statistics.median(run.phases[phase] for run in small), 2) for phase in PHASES
            },
            "graph": {phase: round(sum(run.phases[phase] for run in graph), 2) for phase in PHASES},
        },
        **backfills,
        **single,
        "runs": {"one_asset": rounds, "graph": len(graph)},
    }


class _Stack:
    """Launches runs through Dagster's API, and reads their times from Dagster and Nessie."""

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance, url: str) -> None:
        self._lake = lake
        self._instance = instance
        self._url = url

    def time_run(self, job: str, partition: str | None, *, timeout_s: float = 240.0) -> Timed:
        launched = time.time()
        run_id = self._launch(job, partition)
        deadline = launched + timeout_s
        while not (entry := self._publication(run_id)):
            run = self._instance.get_run_by_id(run_id)
            verdict = (run.tags.get(RunTag.REASON) if run else None) or ""
            if time.time() > deadline or (run and run.is_failure) or verdict:
                raise BenchFailed(
                    f"{job} was not published: {verdict or 'it failed or took too long'}", run_id=run_id
                )
            time.sleep(0.1)
        return self._split(run_id, launched, entry)

    def _launch(self, job: str, partition: str | None) -> str:
        tags = {"dagster/partition": partition} if partition else {}
        if partition and "|" in partition:
            kind, window = partition.split("|")
            tags |= {"dagster/partition/source_kind": kind, "dagster/partition/window": window}
        return launch_run(self._url, _MODULE, job, tags=tags)

    def _publication(self, run_id: str) -> Publication | None:
        head = iter_publications(self._lake.nessie, limit=1)
        return next((one for one in head if one.run_id == run_id), None)

    def _split(self, run_id: str, launched: float, entry: Publication) -> Timed:
        visible = entry.time.timestamp() if entry.time else time.time()
        times: dict[str, list[tuple[float, str]]] = {}
        for record in self._instance.all_logs(run_id):
            event = record.dagster_event
            if event is not None:
                times.setdefault(event.event_type_value, []).append((record.timestamp, record.step_key or ""))
        while not (settled := self._find_publication_seconds(run_id)):
            time.sleep(0.1)
        worker = times["PIPELINE_START"][0][0]
        first_step = times["STEP_START"][0][0]
        # A run that publishes itself is visible before it ends.
        ended = max(moment for moment, _ in times["STEP_SUCCESS"])
        starts = {step: moment for moment, step in times["STEP_START"]}
        spans = [(step, moment - starts[step]) for moment, step in times["STEP_SUCCESS"]]
        checks = {step for _, step in times.get("ASSET_CHECK_EVALUATION", [])}
        publication = min(settled, visible - ended)
        return Timed(
            total_s=visible - launched,
            phases={
                "process_start": worker - launched,
                "session": first_step - worker,
                "compute": sum(span for step, span in spans if step not in checks),
                "checks": sum(span for step, span in spans if step in checks),
                "waiting": visible - ended - publication,
                "publication": publication,
            },
        )

    def _find_publication_seconds(self, run_id: str) -> float | None:
        """Return the seconds that the publisher spent on the run, as logged in the run's events.

        None if the publisher has not logged them yet.
        """
        for record in self._instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
            event = record.dagster_event
            metadata = event.engine_event_data.metadata if event else {}
            if EventMetadata.PUBLISHER_S in metadata:
                value = metadata[EventMetadata.PUBLISHER_S].value
                return float(value) if isinstance(value, int | float) else 0.0
        return None


def print_lifecycle(found: dict[str, Any]) -> None:
    """Print the phases of the small asset and of the whole graph in a table, then the other figures."""
    table = Table("phase", "one asset, s", "whole graph, s", title="From launch to visible on main")
    for phase in PHASES:
        table.add_row(
            phase.replace("_", " "),
            f"{found['phases']['one_asset'][phase]:.2f}",
            f"{found['phases']['graph'][phase]:.2f}",
        )
    table.add_row("total", f"{found['one_asset_s']:.2f}", f"{found['graph_s']:.2f}", style="bold")
    console = Console()
    console.print(table)
    beside = Table("beside what it stands on", "")
    for name, value in found.items():
        if name not in ("one_asset_s", "graph_s", "phases", "runs"):
            beside.add_row(name.replace("_", " "), f"{value:.2f}")
    console.print(beside)
