"""Dagster's own storage for the embedded lakehouse, and a `dagster dev` for measurements."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import requests

from branchlake_dagster.embedded.process import LOOPBACK, ServerDidNotStart, choose_port
from branchlake_dagster.embedded.state_folder import make_state_folder
from branchlake_dagster.extras import require_modules
from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within

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
    make_state_folder(settings.state_dir)
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
    config, lock_path = home / "dagster.yaml", home / ".preparing"
    if config.exists() and not lock_path.exists():
        return
    with file_lock(lock_path):
        if not config.exists():
            config.write_text(_DAGSTER_YAML)
        _create_databases(home)
        lock_path.unlink(missing_ok=True)


def _create_databases(home: Path) -> None:
    """Dagster makes each when it is first used; several processes that do so at once leave it broken."""
    from dagster import AssetKey, DagsterInstance

    with DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs(limit=1)
        instance.fetch_observations(AssetKey("none"), limit=1)
        instance.all_instigator_state()


_EXIT_GRACE_S = 5.0
_LOCATIONS_QUERY = """
{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError {
    __typename ... on PythonError { message cause { message } }
} } } } }
"""


@contextmanager
def dagster_dev(
    module: str, *, home: Path, environment: Mapping[str, str], timeout_s: float = 120.0
) -> Iterator[str]:
    """Webserver, daemon and code server for `module`; gives the UI's address and ends all on leaving.

    `home` is Dagster's home. Output goes to `dev.log` in it. Raises ServerDidNotStart or MissingExtra.
    """
    require_modules("ui", "dagster_webserver", needed_by="dagster dev")
    port = choose_port(0, setting="the port of dagster dev")
    url = f"http://{LOOPBACK}:{port}"
    log = home / "dev.log"
    command = [sys.executable, "-m", "dagster", "dev", "-m", module, "-h", LOOPBACK, "-p", str(port)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, "DAGSTER_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_loaded(url, process, log, timeout_s)
        yield url
    finally:
        _end_session(process)


def _wait_until_loaded(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    def has_answered() -> bool:
        try:
            return requests.get(f"{url}/server_info", timeout=2.0).ok
        except requests.RequestException:
            return False

    # Whichever comes first: a process that has ended answers no more.
    in_time = holds_within(timeout_s, lambda: has_answered() or process.poll() is not None, every_s=0.2)
    if not in_time or process.poll() is not None:
        raise ServerDidNotStart("dagster dev did not start.", hint=f"Its log: {log}")
    _require_loaded(url, log)


def _require_loaded(url: str, log: Path) -> None:
    """The UI answers although the code location failed to load; every launch would then fail obscurely."""
    reply = requests.post(f"{url}/graphql", json={"query": _LOCATIONS_QUERY}, timeout=60.0).json()
    for entry in reply["data"]["workspaceOrError"].get("locationEntries", []):
        load_result = entry["locationOrLoadError"] or {}
        if load_result.get("__typename") == "PythonError":
            # Dagster's own error says only where it was; the cause has what the code location raised.
            cause = (load_result["cause"] or load_result)["message"].strip().splitlines()[0]
            raise ServerDidNotStart(
                f"Code location {entry['name']} failed to load: {cause}", hint=f"Its log: {log}"
            )


def _end_session(process: subprocess.Popen[bytes], *, grace_s: float = 20.0) -> None:
    """End the whole session: the daemon and code servers are children that would outlive the parent.

    Those that are at work, runs above all, have `grace_s` to write down how they ended.
    """
    deadline = time.monotonic() + grace_s
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        left_s = min(_EXIT_GRACE_S, deadline - time.monotonic())
        holds_within(left_s, lambda: _is_empty_group(process.pid), every_s=0.05)


def _is_empty_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
