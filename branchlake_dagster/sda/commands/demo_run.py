"""Run the demo: the pipeline for a few partitions, each run on its branch, one of them blocked by checks."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console

from branchlake_dagster.cli.dagster_home import dagster_home
from branchlake_dagster.cli.server_starts import BackgroundServerStart
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster_sqlite import keep_sqlite_connections
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.reconciler import RUN_BRANCH_FILTER, Reconciler
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.alerts.entry_names import CANCELED, CORRECTED, INSERT, RETRACT
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.quarantine import of_tracked
from branchlake_dagster.sda.commands.simulated_window import land_simulated_window
from branchlake_dagster.sda.graph.code_location import build_definitions, gp_folder
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import FIRST_WINDOW, gp_snapshots, windows
from branchlake_dagster.sda.sources import DEFAULT_SNAPSHOT, snapshot_id, snapshot_time
from branchlake_dagster.sda.windows import to_microseconds
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag

BAD_SNAPSHOT = "sim-bad-20260808T0600Z"
INGEST_JOBS = ("ingest_radar_job", "ingest_optical_job", "ingest_links_job")
SEED = 2026
"""The seed of the simulated sensors: the same catalog and window give the same measurements."""
_INDENT = " " * 14
_INTERRUPTS = ("DagsterExecutionInterruptedError", "KeyboardInterrupt", "SystemExit")
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""Run configuration that silences Dagster, which prints every event of an in-process run."""


@dataclass(frozen=True)
class Plan:
    """One run of the demo: a job, its partition, and whether its checks are expected to block it.

    `partition` is None for a job without partitions. `ops` is the configuration of the job's ops.
    """

    job: str
    partition: str | None = None
    blocked: bool = False
    ops: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One row of the closing table.

    `rows` has the row counts of the run's tables on `main`. It is None if the run was not published; `reason`
    then says why.
    """

    run: str
    job: str
    partition: str | None
    branch: str
    checks: str
    verdict: str
    publication: str | None
    rows: dict[str, int] | None
    seconds: float
    reason: str | None = None


@dataclass
class DemoResult:
    """The results of the demo: its runs, counts of objects and alerts, and the remaining branches.

    `as_expected` is false if a run was published that should be blocked, or the reverse.
    """

    lines: list[Line] = field(default_factory=list)
    catalogue_objects: int = 0
    alerts: dict[str, int] = field(default_factory=dict)
    branches_left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    as_expected: bool = True
    dagster_home: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        return asdict(self)


def run_demo(
    settings: Settings,
    catalogue: Sequence[str],
    *,
    say: Callable[[str], None],
    starting: BackgroundServerStart | None = None,
) -> DemoResult:
    """Run the plan round after round, and publish or block the runs as the publication sensor does.

    Args:
        settings: The settings of the lake.
        catalogue: TLE or OMM files to ingest. If it is empty, a simulated snapshot is ingested.
        say: Called with lines of progress.
        starting: Servers whose start was already requested.
    """
    starting = starting or BackgroundServerStart(settings, say=say)
    began = starting.began
    home = dagster_home(settings)
    snapshots = _link_files(catalogue, gp_folder(settings))
    definitions = build_definitions(settings)
    starting.wait()
    lake = Lakehouse(settings, say=say)
    rounds = plan_for(snapshots)
    count = sum(map(len, rounds))
    result = DemoResult(dagster_home=str(home))
    keep_sqlite_connections()
    with dg.DagsterInstance.get() as instance:
        graph = definitions.get_repository_def().asset_graph
        reconciler = Reconciler.from_lake(lake, instance, graph)
        instance.add_dynamic_partitions(gp_snapshots.name or "", [*snapshots, BAD_SNAPSHOT])
        for plans in rounds:
            if any(plan.job in INGEST_JOBS for plan in plans):
                simulate_measurements(lake, snapshots, say)
            done = []
            for number, plan in enumerate(plans, start=len(result.lines) + 1):
                at = time.monotonic() - began
                say(f"[{number}/{count}] {_name_run(plan)} … (at {at:.0f} s)")
                done.append(_run(plan, definitions, instance))
                _stop_if_interrupted(done[-1][0])
            # One pass of the reconciler, as the publication sensor runs it.
            outcomes = {outcome.run_id: outcome for outcome in reconciler.reconcile_branches()}
            for plan, (run, seconds) in zip(plans, done, strict=True):
                line = _describe_run(plan, run, outcomes.get(run.run_id), instance, lake, seconds)
                outcome = f"published as {line.publication[:12]}" if line.publication else str(line.reason)
                say(f"      {plan.partition or plan.job}: {line.verdict}, {outcome} ({line.seconds:.1f} s)")
                result.lines.append(line)
                result.as_expected &= (line.publication is None) is plan.blocked
            if not all(run.success for run, _ in done):
                break  # the next rounds read the tables of these runs
    result.catalogue_objects = _catalogue_rows(lake)
    result.alerts = _count_alerts(lake)
    ours = {line.branch for line in result.lines}
    result.branches_left = [
        ref.name for ref in lake.nessie.references(filter=RUN_BRANCH_FILTER) if ref.name in ours
    ]
    kept = (
        [line.branch for line in result.lines if not line.publication] if settings.keep_failed_hours else []
    )
    result.as_expected &= set(result.branches_left) <= set(kept)
    starting.finish()
    result.seconds = round(time.monotonic() - began, 1)
    return result


def plan_for(snapshots: Sequence[str]) -> list[list[Plan]]:
    """Return the runs, round by round.

    First each snapshot is ingested, then a bad snapshot. Then follow one window's risks, measurements and
    tracks. The first alerts are derived from element sets alone. Then tracks change the risks, which corrects
    the alerts. The runs of one round start from the same `main` and are published together.
    """
    window = _find_window(snapshots)
    simulated = {"observations": {"config": {"data_mode": "SIMULATED"}}}
    return [
        *([Plan("catalogue_job", name)] for name in snapshots),
        [Plan("catalogue_job", BAD_SNAPSHOT, blocked=True)],
        [Plan("window_job", window), *(Plan(job) for job in INGEST_JOBS)],
        [Plan("alerts_job"), Plan("observations_job", window, ops=simulated)],
        [Plan("tracks_job", window)],
        [Plan("alerts_job")],
    ]


def _find_window(snapshots: Sequence[str]) -> str:
    """Return the partition key of the hour that contains the newest snapshot's time."""
    times = [moment for name in snapshots if (moment := snapshot_time(name))]
    return max(times).replace(minute=0).strftime(windows.fmt) if times else FIRST_WINDOW


def _name_run(plan: Plan) -> str:
    return plan.job if plan.partition is None else f"{plan.job} {plan.partition}"


def simulate_measurements(lake: Lakehouse, snapshots: Sequence[str], say: Callable[[str], None]) -> None:
    """Write an hour of simulated measurements of the objects on `main` to the landing folder.

    It is the hour of the newest of `snapshots`, as in `plan_for`. `say` is called with a line of progress.
    Raises ConfigurationError if the settings name a landing folder.
    """
    if lake.settings.landing is not None:
        raise ConfigurationError(
            "The demo would write simulated measurements into the landing folder of BRANCHLAKE_LANDING.",
            hint="Unset BRANCHLAKE_LANDING for the demo.",
            reason="configured_landing_folder",
            subject=str(lake.settings.landing),
        )
    catalogue = lake.catalog(MAIN).load_table(tuple(CATALOGUE.path)).scan().to_arrow()
    elements = Elements.from_arrow(of_tracked(catalogue).sort_by("sat_no"))
    start = to_microseconds(datetime.strptime(_find_window(snapshots), windows.fmt).replace(tzinfo=UTC))
    folder = lake.settings.landing_folder
    counts = land_simulated_window(folder, elements, start=start, end=start + 3_600_000_000, seed=SEED)
    by_kind = ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())
    say(f"Simulated sensors wrote an hour of measurements to the landing folder: {by_kind}.")


def _run(
    plan: Plan, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> tuple[dg.ExecuteInProcessResult, float]:
    started = time.monotonic()
    job = definitions.resolve_job_def(plan.job)
    done = job.execute_in_process(
        instance=instance,
        partition_key=plan.partition,
        run_config=_QUIET | ({"ops": dict(plan.ops)} if plan.ops else {}),
        raise_on_error=False,
    )
    return done, time.monotonic() - started


def _describe_run(
    plan: Plan,
    done: dg.ExecuteInProcessResult,
    outcome: Outcome | None,
    instance: dg.DagsterInstance,
    lake: Lakehouse,
    seconds: float,
) -> Line:
    run = instance.get_run_by_id(done.run_id)
    tags = run.tags if run else {}
    publication = tags.get(RunTag.PUBLICATION)
    return Line(
        run=done.run_id,
        job=plan.job,
        partition=plan.partition,
        branch=f"run-{done.run_id}",
        checks=_format_checks(outcome, done),
        verdict=tags.get(RunTag.VERDICT, "none"),
        publication=publication,
        rows=_count_rows(lake, outcome.tables) if publication and outcome else None,
        seconds=round(seconds, 1),
        reason=None if publication else _find_failure(done) or tags.get(RunTag.REASON),
    )


def _format_checks(outcome: Outcome | None, done: dg.ExecuteInProcessResult) -> str:
    if outcome is not None and outcome.verdict is not None and outcome.state is not RunState.WAITING:
        return f"{outcome.verdict.checks_passed}/{outcome.verdict.checks_total}"
    # The sensor of another process (`make dev`) has published the run. The run's events have the checks.
    found = done.get_asset_check_evaluations()
    return f"{sum(check.passed for check in found)}/{len(found)}"


def _find_failure(done: dg.ExecuteInProcessResult) -> str | None:
    """Return the first failed step with its original error; None if no step failed."""
    for event in done.all_events:
        error = event.step_failure_data.error if event.is_step_failure else None
        while error is not None and error.cause is not None:
            error = error.cause  # Dagster wraps what the step raised
        if error is not None:
            return f"step {event.step_key} failed: {error.message.strip()}"
    return None


def _count_rows(lake: Lakehouse, tables: Sequence[str]) -> dict[str, int]:
    """Return the number of rows of each table on `main`, from its metadata."""
    catalog = lake.catalog(MAIN)
    found = {}
    for name in tables:
        snapshot = catalog.load_table(tuple(name.split("."))).current_snapshot()
        summary = snapshot.summary if snapshot else None
        found[name] = int(summary.additional_properties.get("total-records", 0)) if summary else 0
    return found


def _catalogue_rows(lake: Lakehouse) -> int:
    name = ".".join(CATALOGUE.path)
    return _count_rows(lake, [name])[name] if lake.catalog(MAIN).table_exists(tuple(CATALOGUE.path)) else 0


def _count_alerts(lake: Lakehouse) -> dict[str, int]:
    """Count the alerts that are valid now, and the entries of the log that corrected or canceled an alert."""
    if not lake.catalog(MAIN).table_exists(tuple(CONJUNCTION_ALERTS.path)):
        return {}
    scan = (
        lake.catalog(MAIN).load_table(tuple(CONJUNCTION_ALERTS.path)).scan(selected_fields=("kind", "reason"))
    )
    counts = Counter(zip(*scan.to_arrow().to_pydict().values(), strict=True))
    inserted = sum(count for (kind, _), count in counts.items() if kind == INSERT)
    retracted = {reason: counts[RETRACT, reason] for reason in (CORRECTED, CANCELED)}
    return {"holding": inserted - sum(retracted.values()), **retracted}


def _stop_if_interrupted(done: dg.ExecuteInProcessResult) -> None:
    """Raise KeyboardInterrupt if the user interrupted the run, so that the whole demo ends.

    Dagster treats the interrupt as the failure of one run.
    """
    for event in done.all_events:
        error = event.step_failure_data.error if event.is_step_failure else None
        while error is not None:
            if error.cls_name in _INTERRUPTS:
                raise KeyboardInterrupt
            error = error.cause
        if event.event_type is dg.DagsterEventType.PIPELINE_CANCELED:
            raise KeyboardInterrupt


def _link_files(files: Sequence[str], folder: Path) -> list[str]:
    """Link the files into the folder of the GP source. Return their snapshot ids.

    Without files, the id of the simulated snapshot is returned.
    """
    names = []
    for text in files:
        source = Path(text).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / source.name
        if link.is_symlink() or not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(source)
        names.append(snapshot_id(source))
    return names or [DEFAULT_SNAPSHOT]


def print_result(result: DemoResult) -> None:
    """Print the closing table, why runs were blocked, and the next commands, in at most 80 columns."""
    console = Console(highlight=False)
    console.print(
        f"\n[bold]{'branch':14}{'partition':27}{'checks':8}{'verdict':22}publication[/]", soft_wrap=True
    )
    for line in result.lines:
        colour = "green" if line.publication else "red"
        hash_ = line.publication[:8] if line.publication else "none"
        what = line.partition or line.job
        console.print(
            f"{line.branch[:12]:14}{what:27}{line.checks:8}[{colour}]{line.verdict:22}[/]{hash_}",
            soft_wrap=True,
        )
        rows = ", ".join(f"{count:,} {name.split('.')[-1]}" for name, count in (line.rows or {}).items())
        outcome = f"rows on main: {rows}" if line.publication else str(line.reason)
        for text in textwrap.wrap(outcome, console.width - len(_INDENT) - 1):
            console.print(f"{_INDENT}{text}", style="dim", markup=False)
    console.print()
    console.print(f"{result.catalogue_objects:,} catalogue objects on main, {result.seconds:.0f} s in all.")
    if result.alerts:
        console.print(
            f"Alerts: {result.alerts['holding']} hold. Tracks corrected {result.alerts[CORRECTED]} alerts"
            f" and canceled {result.alerts[CANCELED]}.",
            soft_wrap=True,
        )
    if not result.as_expected:
        console.print("[red]Not as expected:[/] a run that should be published was not, or the reverse.")
    console.print(
        "Next:  make dev                      the same in the Dagster UI\n"
        "       .venv/bin/branchlake status   servers, run branches, last publications\n"
        "       .venv/bin/branchlake down     stop the servers; the data stays"
    )
