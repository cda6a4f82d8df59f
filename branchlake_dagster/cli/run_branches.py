"""The output of the commands on run branches: `branchlake status`, `set-aside` and `reap`.

`branchlake set-aside` lists, retries and ends parked runs. A run is parked after several failed attempts to
judge or publish it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from dagster import DagsterInstance, DagsterRun
from rich.console import Console
from rich.table import Table

from branchlake_dagster.cleanup.reaper_rules import Reaping
from branchlake_dagster.cleanup.sweeper import Sweeping
from branchlake_dagster.cli.command_settings import ENVIRONMENT
from branchlake_dagster.cli.consoles import open_console
from branchlake_dagster.cli.dagster_home import dagster_home_path, open_instance
from branchlake_dagster.embedded.servers import NESSIE, SPARK
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.embedded_kafka import KAFKA, EmbeddedKafka
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse, nessie_page_url
from branchlake_dagster.publication.ledger import iter_publications
from branchlake_dagster.publication.parked_runs import discard_parked_run, iter_parked_runs, retry_parked_run
from branchlake_dagster.publication.reconciler import RUN_BRANCH_FILTER
from branchlake_dagster.runs.branch_owner import (
    BatchBranch,
    OriginFinder,
    load_branch_owners,
    load_instance_id,
    writer_branch,
)
from branchlake_dagster.runs.discarding import DISCARDED_TAG_FILTER
from branchlake_dagster.runs.failure_detector import judge_by_timestamp
from branchlake_dagster.runs.heartbeats import HeartbeatStore, HeartbeatsUnreadable
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.wording import format_count, format_names, pluralize

_WIDE = 200
"""Width of a table, in characters, if the output is not a terminal: one line per branch, for grep."""


def show_reaping(reapings: Sequence[Reaping], sweepings: Sequence[Sweeping], *, dry_run: bool) -> None:
    """Print a table of run branches with the decisions on them, and a table of the swept or kept tags.

    The tags keep the states of discarded branches. With `dry_run`, the text says that branches and files
    would be deleted.
    """
    console = open_console(_WIDE)
    would = "would be " if dry_run else ""
    if reapings:
        table = Table("branch", "run", "age", "heartbeat", "decision", "reason")
        for reaping in reapings:
            decision = f"{would}{reaping.action}" if reaping.deletes_branch else str(reaping.action)
            table.add_row(
                reaping.branch,
                str(reaping.state),
                _format_age(reaping.age),
                reaping.heartbeat,
                decision,
                reaping.reason,
            )
        console.print(table)
    else:
        console.print("No run branches.")
    if sweepings:
        table = Table("discarded", "decision", "files", "size", "reason")
        for sweeping in sweepings:
            decision = f"{would}swept" if sweeping.done else "kept"
            table.add_row(
                sweeping.tag, decision, str(sweeping.files), f"{sweeping.size / 1e6:.1f} MB", sweeping.reason
            )
        console.print(table)
        freed_bytes = sum(tag.size for tag in sweepings)
        console.print(
            f"{format_count(sum(tag.files for tag in sweepings), 'file')}, {freed_bytes / 1e6:.1f} MB"
            f" {would}freed."
        )


def _format_age(age: timedelta | None) -> str:
    if age is None:
        return "?"
    hours, rest = divmod(int(age.total_seconds()), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def gather_parked_runs(settings: Settings) -> list[dict[str, Any]]:
    """Return the parked runs as dicts with `run_id`, `branch`, `attempts` and `reason`. Starts nothing."""
    with open_instance(settings, read_only=True) as instance:
        return [
            {
                "run_id": run.run_id,
                "branch": run.tags.get(RunTag.BRANCH),
                "attempts": int(run.tags.get(RunTag.ATTEMPTS, "0")),
                "reason": run.tags.get(RunTag.REASON, ""),
            }
            for run in iter_parked_runs(instance)
        ]


def show_parked_runs(runs: list[dict[str, Any]]) -> None:
    """Print the parked runs, as `gather_parked_runs` returns them, as a table with the next commands."""
    console = open_console(_WIDE)
    if not runs:
        console.print("No run is set aside.")
        return
    table = Table("run", "branch", "attempts", "reason", title=f"{format_count(len(runs), 'run')} set aside")
    for run in runs:
        table.add_row(run["run_id"], run["branch"], str(run["attempts"]), run["reason"])
    console.print(table)
    console.print(
        "To try a run again: branchlake set-aside retry RUN. To discard its branch: branchlake set-aside"
        " end RUN."
    )


def retry_run(settings: Settings, run_id: str) -> str:
    """Let the publication sensor try a parked run again. Return a message for the user.

    Raises ConfigurationError if `run_id` is not the start of the id of one parked run.
    """
    with open_instance(settings) as instance:
        retry_parked_run(instance, _find_parked_run(instance, run_id))
    return f"The next tick of the publication sensor tries run {run_id} again."


def end_run(settings: Settings, run_id: str) -> str:
    """Discard the branch of a parked run and publish nothing. Return a message for the user.

    Raises ConfigurationError if `run_id` is not the start of the id of one parked run.
    """
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    with open_instance(settings) as instance:
        return discard_parked_run(lake.nessie, instance, _find_parked_run(instance, run_id))


def _find_parked_run(instance: DagsterInstance, run_id: str) -> DagsterRun:
    runs_by_id = {run.run_id: run for run in iter_parked_runs(instance)}
    matches = [run for key, run in runs_by_id.items() if run_id and key.startswith(run_id)]
    if len(matches) != 1:
        raise ConfigurationError(
            f"{'Several runs' if matches else 'No run'} with the id {run_id!r}…"
            f" {'are' if matches else 'is'} set aside.",
            hint="List the runs and their ids: branchlake set-aside.",
        )
    return matches[0]


_SHOWN_PUBLICATIONS = 5
_SHOWN_DISCARDED = 20
_WIDE_ENOUGH = 100
"""Width in characters that a table with whole ids needs. A narrower terminal gets two lines per entry."""


def gather_status(settings: Settings, source: str = ENVIRONMENT) -> dict[str, Any]:
    """Collect the servers, `main`, the run branches, the discarded tags and the last five publications.

    Starts nothing. If the embedded Nessie does not run, only the servers and settings are reported, and the
    other fields are None or empty. `source` describes the source of the settings.

    Returns the JSON object of `branchlake status --json`.
    """
    lake = Lakehouse(settings, start=False)
    records = lake.servers.status()
    servers: dict[str, Any] = {
        name: {
            "running": record is not None,
            "pid": record.pid if record else None,
            "port": record.port if record else None,
        }
        for name, record in records.items()
        if name in lake.servers.server_names()
    }
    if (broker := EmbeddedKafka(settings)).record_path.exists():
        kafka = broker.record
        servers[KAFKA] = {
            "running": kafka is not None,
            "pid": kafka.pid if kafka else None,
            "port": kafka.port if kafka else None,
        }
    report: dict[str, Any] = {
        "settings_source": source,
        "state_dir": str(settings.state_dir),
        "warehouse": settings.warehouse_uri,
        "discard_grace_h": settings.discard_grace_h,
        "servers": servers,
        "page": None,
    }
    if settings.embedded_nessie and records[NESSIE] is None:
        return {**report, "discarded": [], "main": None, "branches": [], "publications": []}
    report["page"] = nessie_page_url(lake.endpoints(spark=False), settings)
    now = datetime.now(UTC)
    branches = []
    with open_instance(settings, read_only=True) as instance:
        refs = list(lake.nessie.references(filter=RUN_BRANCH_FILTER, fetch_metadata=True))
        owner_records = load_branch_owners(instance, [writer_branch(ref.name) for ref in refs])
        try:
            heartbeats, no_heartbeat = _format_heartbeats(settings, now), "none"
        except HeartbeatsUnreadable:
            heartbeats, no_heartbeat = {}, "unreadable"
        makers = OriginFinder(
            lake.nessie, load_instance_id(instance), TableFiles(settings.file_io_properties())
        )
        for ref in refs:
            owner_branch, batch = writer_branch(ref.name), BatchBranch.from_name(ref.name)
            record = owner_records[owner_branch]
            head_commit = ref.metadata.head_commit if ref.metadata else None
            began_at = (
                record.create_timestamp if record else (head_commit.commit_time if head_commit else None)
            )
            began_at = batch.created_at if batch else began_at
            branches.append(
                {
                    "branch": ref.name,
                    "run_id": record.dagster_run.run_id if record else run_id_of_branch(owner_branch),
                    "state": record.dagster_run.status.value.lower() if record else "unknown",
                    "age_s": round((now - began_at).total_seconds()) if began_at else None,
                    "commits": ref.metadata.commits_ahead if ref.metadata else None,
                    "heartbeat": heartbeats.get(owner_branch, no_heartbeat),
                    "instances": [] if record else list(makers.find_origin(ref).instance_ids),
                }
            )
    ledger = [
        {
            "publication": entry.hash,
            "run_id": entry.run_id,
            "verdict": entry.verdict,
            "tables": list(entry.tables),
            "time": entry.time.isoformat() if entry.time else None,
            "damaged_properties": list(entry.damaged_properties),
        }
        for entry in islice(iter_publications(lake.nessie, limit=_SHOWN_PUBLICATIONS), _SHOWN_PUBLICATIONS)
    ]
    tags = lake.nessie.references(filter=DISCARDED_TAG_FILTER)
    report["discarded"] = sorted(tag.name for tag in tags)
    return {**report, "main": lake.nessie.reference(MAIN).hash, "branches": branches, "publications": ledger}


def _format_heartbeats(settings: Settings, now: datetime) -> dict[str, str]:
    """Map each branch to the states of its writers' heartbeats as text, such as `beating`.

    The states come from the times of the heartbeats alone, so no writer is reported as `dead`.
    """
    pulses_by_branch: dict[str, set[str]] = {}
    for beat, pulse in judge_by_timestamp(HeartbeatStore.from_settings(settings).all(), now).items():
        pulses_by_branch.setdefault(beat.branch, set()).add(pulse)
    return {branch: ", ".join(sorted(pulses)) for branch, pulses in pulses_by_branch.items()}


def show_status(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of `gather_status`, with whole ids at every width of the terminal.

    `console` is None for standard output.
    """
    console = console or open_console(_WIDE)
    names = {NESSIE: "Nessie", SPARK: "Spark Connect", KAFKA: "Kafka"}
    for name, server in report["servers"].items():
        state = f"port {server['port']}, pid {server['pid']}" if server["running"] else "not running"
        console.print(f"{names[name]:14} {state}")
    if report["page"]:
        console.print(f"{'Nessie page':14} {report['page']}", soft_wrap=True)
    console.print(f"{'Warehouse':14} {report['warehouse']}", soft_wrap=True)
    console.print(f"{'Settings':14} {report['settings_source']}", soft_wrap=True)
    if report["main"] is None:
        console.print("To see branches, start the servers: branchlake up")
        return
    console.print(f"{'main':14} {report['main'][:16]}")
    _show_branches(console, report["branches"])
    if report["discarded"]:
        hours, count = report["discard_grace_h"], len(report["discarded"])
        pronoun = pluralize(count, "it", "them")
        message = f"{format_count(count, 'discarded run')}; a retry can continue {pronoun} for {hours:g} h:"
        console.print(message)
        for name in report["discarded"][:_SHOWN_DISCARDED]:
            console.print(f"  {name}", soft_wrap=True)
        if (more := len(report["discarded"]) - _SHOWN_DISCARDED) > 0:
            console.print(f"  and {more} more (`branchlake status --json`)")
        console.print('To read one: branchlake sql "FROM namespace.table" --run ID')
    _show_publications(console, report["publications"])


def _show_branches(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    title = format_count(len(rows), "run branch", "run branches")
    table = Table("run branch", "state", "age", "commits", "heartbeat", title=title)
    if console.width < _WIDE_ENOUGH:
        console.print(title)
    for row in rows:
        age = "?" if row["age_s"] is None else f"{row['age_s'] // 60} min {row['age_s'] % 60} s"
        owner_note = f", of {format_names('instance', row['instances'])}" if row["instances"] else ""
        state, commits = row["state"] + owner_note, str(row["commits"])
        ahead = "commits unknown" if row["commits"] is None else format_count(row["commits"], "commit")
        if console.width < _WIDE_ENOUGH:
            details = f"{state}, {age} old, {ahead}, heartbeat {row['heartbeat']}"
            console.print(f"  {row['branch']}\n    {details}", soft_wrap=True, highlight=False)
        table.add_row(row["branch"], state, age, commits, row["heartbeat"])
    if console.width >= _WIDE_ENOUGH:
        console.print(table)


def _show_publications(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("publication", "run", "verdict", "tables", title="last publications")
    if console.width < _WIDE_ENOUGH:
        console.print("Last publications")
    for row in rows:
        tables = ", ".join(row["tables"])
        if damaged_properties := row.get("damaged_properties"):
            tables = f"{tables} (damaged record: {', '.join(damaged_properties)})".lstrip()
        if console.width < _WIDE_ENOUGH:
            details = f"{row['verdict']}, commit {row['publication'][:16]}: {tables}"
            console.print(f"  {row['run_id']}\n    {details}", soft_wrap=True, highlight=False)
        table.add_row(row["publication"][:16], row["run_id"], row["verdict"], tables)
    if console.width >= _WIDE_ENOUGH:
        console.print(table)


_RECENT_S = 45.0
"""Maximum age of a running daemon's heartbeat. Dagster's daemon writes one every 30 s."""


def find_daemon_warning(settings: Settings) -> str | None:
    """Return a warning if a Dagster daemon may still use the servers of this lake, or else None.

    Reads the daemon's heartbeat in Dagster's storage, so the daemon may run on any machine. A daemon that
    ended less than 45 s ago cannot be distinguished from a running one. Does not create a Dagster home.

    Raises ConfigurationError, and errors of Dagster's storage, if the home cannot be read.
    """
    from dagster import DagsterRunStatus, RunsFilter

    if not (dagster_home_path(settings) / "dagster.yaml").exists():
        return None
    with open_instance(settings, read_only=True) as instance:
        heartbeat_times = [beat.timestamp for beat in instance.get_daemon_heartbeats().values()]
        running = instance.get_runs_count(RunsFilter(statuses=[DagsterRunStatus.STARTED]))
    heartbeat_ages = [time.time() - beat for beat in heartbeat_times]
    if not heartbeat_ages or min(heartbeat_ages) > _RECENT_S:
        return None
    runs = f" Its {format_count(running, 'running run')} will fail." if running else ""
    return (
        f"A Dagster daemon used this lake {min(heartbeat_ages):.0f} s ago.{runs} If it still runs, its"
        " publication sensor and its runs start the servers again within seconds. To keep the servers"
        " stopped, end `dagster dev` first."
    )
