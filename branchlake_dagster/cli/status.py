"""`branchlake status`, and who still uses the servers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from dagster import DagsterInstance
from rich.console import Console
from rich.table import Table

from branchlake_dagster.cli.command_settings import ENVIRONMENT
from branchlake_dagster.cli.dagster_home import dagster_home
from branchlake_dagster.embedded.servers import NESSIE, SPARK
from branchlake_dagster.ingest.embedded_kafka import KAFKA, EmbeddedKafka
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.lakehouse.web_page import nessie_page
from branchlake_dagster.publication.ledger import publications
from branchlake_dagster.publication.reconciler import RUN_BRANCHES
from branchlake_dagster.runs.branch_owner import BatchBranch, at_work_on, owners
from branchlake_dagster.runs.discarding import DISCARDED_TAGS
from branchlake_dagster.runs.failure_detector import by_timestamp
from branchlake_dagster.runs.heartbeats import HeartbeatStore, HeartbeatsUnreadable
from branchlake_dagster.runs.origin import Makers, instance_id
from branchlake_dagster.runs.run_branch import run_id_of
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.wording import agree, counted, named

_LAST = 5
_NAMED = 20
_ROOMY = 100
"""Columns from which on a table has room for whole ids; a narrower terminal gets two lines for each."""
_WIDE = 200
"""Columns when nobody watches: a line per branch, for grep."""


def gather(settings: Settings, source: str = ENVIRONMENT) -> dict[str, Any]:
    """Servers, `main`, run branches (run, state, age in seconds, commits) and the last publications.

    Starts nothing: with the embedded Nessie down, only the servers are told. `source` says where the settings
    come from.
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
        if name in lake.servers.wanted()
    }
    if (broker := EmbeddedKafka(settings)).record_path.exists():
        kafka = broker.record
        servers[KAFKA] = {
            "running": kafka is not None,
            "pid": kafka.pid if kafka else None,
            "port": kafka.port if kafka else None,
        }
    found: dict[str, Any] = {
        "settings_source": source,
        "state_dir": str(settings.state_dir),
        "warehouse": settings.warehouse_uri,
        "discard_grace_h": settings.discard_grace_h,
        "servers": servers,
        "page": None,
    }
    if settings.embedded_nessie and records[NESSIE] is None:
        return {**found, "discarded": [], "main": None, "branches": [], "publications": []}
    found["page"] = nessie_page(lake.endpoints(spark=False), settings)
    now = datetime.now(UTC)
    dagster_home(settings)
    branches = []
    with DagsterInstance.get() as instance:
        refs = list(lake.nessie.references(filter=RUN_BRANCHES, fetch_metadata=True))
        holders = owners(instance, [at_work_on(ref.name) for ref in refs])
        try:
            pulses, unknown = _pulses(settings, now), "none"
        except HeartbeatsUnreadable:
            pulses, unknown = {}, "unreadable"
        makers = Makers(lake.nessie, instance_id(instance), TableFiles(settings.file_io_properties()))
        for ref in refs:
            home, batch = at_work_on(ref.name), BatchBranch.of(ref.name)
            record = holders[home]
            head = ref.metadata.head_commit if ref.metadata else None
            born = record.create_timestamp if record else (head.commit_time if head else None)
            born = batch.began if batch else born
            branches.append(
                {
                    "branch": ref.name,
                    "run_id": record.dagster_run.run_id if record else run_id_of(home),
                    "state": record.dagster_run.status.value.lower() if record else "unknown",
                    "age_s": round((now - born).total_seconds()) if born else None,
                    "commits": ref.metadata.commits_ahead if ref.metadata else None,
                    "heartbeat": pulses.get(home, unknown),
                    "instances": [] if record else list(makers.of(ref).by),
                }
            )
    ledger = [
        {
            "publication": entry.hash,
            "run_id": entry.run_id,
            "verdict": entry.verdict,
            "tables": list(entry.tables),
            "time": entry.time.isoformat() if entry.time else None,
        }
        for entry in islice(publications(lake.nessie, limit=_LAST), _LAST)
    ]
    tags = lake.nessie.references(filter=DISCARDED_TAGS)
    found["discarded"] = sorted(tag.name for tag in tags)
    return {**found, "main": lake.nessie.reference(MAIN).hash, "branches": branches, "publications": ledger}


def _pulses(settings: Settings, now: datetime) -> dict[str, str]:
    """What the heartbeats on each branch look like at a glance."""
    found: dict[str, set[str]] = {}
    for beat, pulse in by_timestamp(HeartbeatStore.of(settings).all(), now).items():
        found.setdefault(beat.branch, set()).add(pulse)
    return {branch: ", ".join(sorted(pulses)) for branch, pulses in found.items()}


def show(found: dict[str, Any], console: Console | None = None) -> None:
    """The same for people, with whole ids on every width."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE))
    names = {NESSIE: "Nessie", SPARK: "Spark Connect", KAFKA: "Kafka"}
    for name, server in found["servers"].items():
        state = f"port {server['port']}, pid {server['pid']}" if server["running"] else "not running"
        console.print(f"{names[name]:14} {state}")
    if found["page"]:
        console.print(f"{'Nessie page':14} {found['page']}", soft_wrap=True)
    console.print(f"{'Warehouse':14} {found['warehouse']}", soft_wrap=True)
    console.print(f"{'Settings':14} {found['settings_source']}", soft_wrap=True, markup=False)
    if found["main"] is None:
        console.print("Start the servers with `branchlake up` to see branches.")
        return
    console.print(f"{'main':14} {found['main'][:16]}")
    _show_branches(console, found["branches"])
    if found["discarded"]:
        hours, count = found["discard_grace_h"], len(found["discarded"])
        them = agree(count, "it", "them")
        told = f"{counted(count, 'discarded run')}; a retry can continue {them} for {hours:g} h:"
        console.print(told)
        for name in found["discarded"][:_NAMED]:
            console.print(f"  {name}", soft_wrap=True)
        if (more := len(found["discarded"]) - _NAMED) > 0:
            console.print(f"  and {more} more (`branchlake status --json`)")
        console.print('Look at one: branchlake sql "FROM namespace.table" --run ID')
    _show_publications(console, found["publications"])


def _show_branches(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    title = counted(len(rows), "run branch", "run branches")
    table = Table("run branch", "state", "age", "commits", "heartbeat", title=title)
    if console.width < _ROOMY:
        console.print(title)
    for row in rows:
        age = "?" if row["age_s"] is None else f"{row['age_s'] // 60} min {row['age_s'] % 60} s"
        of = f", of {named('instance', row['instances'])}" if row["instances"] else ""
        state, commits = row["state"] + of, str(row["commits"])
        ahead = "commits unknown" if row["commits"] is None else counted(row["commits"], "commit")
        if console.width < _ROOMY:
            told = f"{state}, {age} old, {ahead}, heartbeat {row['heartbeat']}"
            console.print(f"  {row['branch']}\n    {told}", soft_wrap=True, highlight=False)
        table.add_row(row["branch"], state, age, commits, row["heartbeat"])
    if console.width >= _ROOMY:
        console.print(table)


def _show_publications(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("publication", "run", "verdict", "tables", title="last publications")
    if console.width < _ROOMY:
        console.print("Last publications")
    for row in rows:
        tables = ", ".join(row["tables"])
        if console.width < _ROOMY:
            told = f"{row['verdict']}, commit {row['publication'][:16]}: {tables}"
            console.print(f"  {row['run_id']}\n    {told}", soft_wrap=True, highlight=False)
        table.add_row(row["publication"][:16], row["run_id"], row["verdict"], tables)
    if console.width >= _ROOMY:
        console.print(table)


_RECENT_S = 45.0
"""Dagster's daemon writes a heartbeat every 30 s."""


def still_used(settings: Settings) -> str | None:
    """What will happen to a Dagster daemon that works on this lake, in words; None if none does.

    It is known by its heartbeat in Dagster's storage, wherever it runs; so one that ended less than 45 s ago
    may still run as far as this can tell, and the text says so. No Dagster home is made here.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or settings.state_dir / "dagster")
    if not (home / "dagster.yaml").exists():
        return None
    os.environ["DAGSTER_HOME"] = str(home.absolute())
    from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

    with DagsterInstance.get() as instance:
        beats = [beat.timestamp for beat in instance.get_daemon_heartbeats().values()]
        running = instance.get_runs_count(RunsFilter(statuses=[DagsterRunStatus.STARTED]))
    ages = [time.time() - beat for beat in beats]
    if not ages or min(ages) > _RECENT_S:
        return None
    runs = f" Its {counted(running, 'running run')} will fail." if running else ""
    return (
        f"A Dagster daemon worked on this lake {min(ages):.0f} s ago.{runs} If you have not ended it since,"
        " its publication sensor and its runs start the servers again within seconds: end `dagster dev` first"
        " for them to stay down."
    )
