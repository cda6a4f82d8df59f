"""Dagster's own storage for the embedded lakehouse: one folder inside the state folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from branchlake_dagster.embedded.state_folder import state_folder
from branchlake_dagster.settings import Settings

_DAGSTER_YAML = """\
telemetry:
  enabled: false

nux:
  enabled: false

# A run's process is forked from one that has imported the code: a tenth of a second instead of several.
run_launcher:
  module: branchlake_dagster
  class: WarmRunLauncher

# A launched run waits for the next look at the queue; Dagster's own distance is 5 s. A look is one query.
# Threads, because the first run after a reload waits for imports, and others need not wait with it.
run_queue:
  dequeue_interval_seconds: 1
  dequeue_use_threads: true

# Fails runs that never start or never stop, and those whose process is gone. (The process that started a
# worker tells at once; this is for when that is gone too. From elsewhere, dead_writer_sensor sees it.)
run_monitoring:
  enabled: true
  poll_interval_seconds: 30

# The publication sensor must not wait behind another sensor.
sensors:
  use_threads: true
  num_workers: 4
"""


def dagster_home(settings: Settings) -> Path:
    """The folder named by `DAGSTER_HOME`, else one in the state folder; made and configured if needed.

    Exports `DAGSTER_HOME` and `BRANCHLAKE_STATE_DIR`, so that this process and the ones Dagster starts
    agree.
    """
    state_folder(settings.state_dir)
    home = Path(os.environ.get("DAGSTER_HOME") or settings.state_dir / "dagster").absolute()
    home.mkdir(parents=True, exist_ok=True)
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ["BRANCHLAKE_STATE_DIR"] = str(settings.state_dir)
    prepare_home(home)
    return home


def prepare_home(home: Path) -> None:
    """Write `dagster.yaml` and create the databases in an existing folder that has no `dagster.yaml`.

    A folder that somebody configured is left as it is. Safe when several processes do it at once. Takes two
    seconds the first time.
    """
    config, preparing = home / "dagster.yaml", home / ".preparing"
    if config.exists() and not preparing.exists():
        return
    with preparing.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not config.exists():
            config.write_text(_DAGSTER_YAML)
        _make_databases(home)
        preparing.unlink(missing_ok=True)


def _make_databases(home: Path) -> None:
    """Dagster makes each when it is first used; several processes that do so at once leave it broken."""
    from dagster import AssetKey, DagsterInstance

    with DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs(limit=1)
        instance.fetch_observations(AssetKey("none"), limit=1)
        instance.all_instigator_state()
