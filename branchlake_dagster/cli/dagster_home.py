"""Dagster's home folder for the embedded lakehouse, and `dagster dev` as a child process for benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from branchlake_dagster.embedded.process import LOOPBACK, ServerDidNotStart, choose_port
from branchlake_dagster.embedded.state_folder import make_state_folder
from branchlake_dagster.errors import ConfigurationError, format_first_line
from branchlake_dagster.extras import require_modules
from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within

if TYPE_CHECKING:
    from dagster import DagsterInstance

_DAGSTER_YAML = """\
telemetry:
  enabled: false

nux:
  enabled: false

# A run's process is forked from a warm process that has imported the code: 0.1 s instead of several seconds.
run_launcher:
  module: branchlake_dagster
  class: WarmRunLauncher

# Dagster's default polls the queue of launched runs every 5 s. A poll is one query.
# Threads, because the first run after a reload waits for imports, and other runs need not wait for that run.
run_queue:
  dequeue_interval_seconds: 1
  dequeue_use_threads: true

# Fails runs that never start or never stop, and runs without a process. The process that starts a run reports
# its death at once. This check is needed if both processes die. dead_writer_sensor finds runs on other
# machines.
run_monitoring:
  enabled: true
  poll_interval_seconds: 30

# The publication sensor must not wait behind another sensor.
sensors:
  use_threads: true
  num_workers: 4
"""


def dagster_home(settings: Settings) -> Path:
    """Return Dagster's home: the folder in `DAGSTER_HOME`, or else `dagster` in the state folder.

    Creates and configures the folder if needed. Sets `DAGSTER_HOME` and `BRANCHLAKE_STATE_DIR` in the
    environment, so that processes that Dagster starts use the same folders.
    """
    make_state_folder(settings.state_dir)
    home = dagster_home_path(settings)
    home.mkdir(parents=True, exist_ok=True)
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ["BRANCHLAKE_STATE_DIR"] = str(settings.state_dir)
    prepare_home(home)
    return home


@contextmanager
def open_instance(settings: Settings, *, read_only: bool = False) -> Iterator[DagsterInstance]:
    """Open the Dagster instance with which a command works.

    The folder in `DAGSTER_HOME` is used as it is: only `dagster_home` configures it, for `branchlake up` and
    the demo. The default home, `dagster` in the state folder, is created and configured if needed. With
    `read_only` it is not. With `read_only`, a folder that holds no instance yet is not changed either: the
    instance is an empty one in memory, and no variable is set. Otherwise sets the same variables as
    `dagster_home`.

    Raises ConfigurationError if the folder does not exist, or if Dagster cannot open its instance.
    """
    from dagster import DagsterInstance

    home = dagster_home_path(settings)
    is_default = home.resolve() == (settings.state_dir / "dagster").resolve()
    if not is_default and not home.is_dir():
        raise ConfigurationError(
            f"DAGSTER_HOME is {home}, which is not a folder.",
            hint="Correct DAGSTER_HOME, or let `branchlake up` create the folder.",
            reason="dagster_home_missing",
            subject=str(home),
        )
    if read_only and not _is_used_home(home):
        with DagsterInstance.ephemeral() as empty_instance:
            yield empty_instance
        return
    if is_default and not read_only:
        dagster_home(settings)
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ["BRANCHLAKE_STATE_DIR"] = str(settings.state_dir)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dagster warns of a folder without dagster.yaml
            opened_instance = DagsterInstance.get()
    except Exception as error:
        raise build_not_opened(home, error) from error
    with opened_instance as instance:
        yield instance


def build_not_opened(home: Path, error: Exception) -> ConfigurationError:
    """Return the error for a home whose instance Dagster cannot open, which raised `error`.

    YAML, SQLite, Dagster's checks and the classes that a `dagster.yaml` names raise errors of many kinds.
    """
    return ConfigurationError(
        f"Dagster's instance in {home} cannot be opened: {format_first_line(error)}.",
        hint=f"Correct {home / 'dagster.yaml'}, or start the database that it names.",
        reason="dagster_unavailable",
        subject=str(home),
    )


def dagster_home_path(settings: Settings) -> Path:
    """Return the absolute path of Dagster's home. The folder need not exist, and is not created."""
    return Path(os.environ.get("DAGSTER_HOME") or settings.state_dir / "dagster").absolute()


def _is_used_home(home: Path) -> bool:
    """Return whether a folder holds a Dagster instance, so that opening it creates nothing."""
    return (home / "dagster.yaml").exists() or (home / "history").is_dir()


def prepare_home(home: Path) -> None:
    """Write `dagster.yaml` and create the databases in an existing folder that has no `dagster.yaml`.

    Does not change a folder with a `dagster.yaml`. Several processes may call this at the same time. Takes
    two seconds the first time.
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
    """Create all databases of Dagster's home, whose folder `home` has a `dagster.yaml`.

    Must run in one process: several processes that create a database at the same time corrupt it.
    """
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
    """Run webserver, daemon and code server for `module`, and stop them at the end of the block.

    Args:
        module: The module of the code location.
        home: Dagster's home. The output of the processes goes to `dev.log` in this folder.
        environment: Additional environment variables.
        timeout_s: Seconds until the UI must answer.

    Yields:
        The address of the UI.

    Raises:
        ServerDidNotStart: The UI did not answer in time, or the code location failed to load.
        MissingExtra: `dagster-webserver` is not installed.
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

    # Stop waiting if the process has ended, because it will not answer any more.
    in_time = holds_within(timeout_s, lambda: has_answered() or process.poll() is not None, every_s=0.2)
    if not in_time or process.poll() is not None:
        raise ServerDidNotStart("dagster dev did not start.", hint=f"Read its log: {log}.")
    _require_loaded(url, log)


def _require_loaded(url: str, log: Path) -> None:
    """Raise ServerDidNotStart if the code location failed to load. The UI answers in that case, too.

    `url` is the address of the UI, without a final slash. `log` is the log file, which the error names.
    """
    reply = requests.post(f"{url}/graphql", json={"query": _LOCATIONS_QUERY}, timeout=60.0).json()
    for entry in reply["data"]["workspaceOrError"].get("locationEntries", []):
        load_result = entry["locationOrLoadError"] or {}
        if load_result.get("__typename") == "PythonError":
            # Dagster's error names only the location. Its cause is the error that the code location raised.
            cause = (load_result["cause"] or load_result)["message"].strip().splitlines()[0]
            raise ServerDidNotStart(
                f"Code location {entry['name']} failed to load: {cause}",
                hint=f"Read the log of dagster dev: {log}.",
            )


def _end_session(process: subprocess.Popen[bytes], *, grace_s: float = 20.0) -> None:
    """End all processes of the session, because the daemon and code servers would outlive their parent.

    Running processes, such as runs, have `grace_s` seconds to record their end before they are killed.
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
