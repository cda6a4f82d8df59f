"""Whether somebody still works with the servers that `branchlake down` is about to stop."""

from __future__ import annotations

import os
import time
from pathlib import Path

from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted

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
