"""The command line in wrong places and at wrong moments: one sentence each, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import dagster as dg
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from branchlake_dagster.cli import main
from branchlake_dagster.cli.main import _Commands
from branchlake_dagster.cli.registry import exit_on_signals
from branchlake_dagster.cli.run_branches import find_daemon_warning, show_status
from branchlake_dagster.embedded import jars
from branchlake_dagster.embedded.jars import ICEBERG_SPARK, DownloadFailed, resolve_jars
from branchlake_dagster.embedded.state_folder import (
    LakeMoved,
    make_state_folder,
    record_location,
    require_location,
)
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.publication_sensor import PassReport
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.sda.commands import demo_run as demo
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Commands export DAGSTER_HOME and the state folder."""
    before = dict(os.environ)
    os.environ.pop("DAGSTER_HOME", None)
    yield
    os.environ.clear()
    os.environ.update(before)


def call(*arguments: str, state_dir: Path, **settings: str) -> Result:
    named = {f"BRANCHLAKE_{name.upper()}": value for name, value in settings.items()}
    return CliRunner().invoke(main, arguments, env={"BRANCHLAKE_STATE_DIR": str(state_dir), **named})


def sentence(done: Result) -> str:
    assert done.exit_code == 1, done.output
    assert done.output.startswith("Error: ")
    assert len(done.output.splitlines()) == 1
    return done.output


# -- folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "down", "status", "sql", "reap"])
@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_a_state_folder_that_is_a_file(tmp_path: Path, command: str, inside: str) -> None:
    file = tmp_path / "file"
    file.touch()
    told = sentence(call(command, state_dir=file / inside))
    assert str(file) in told
    assert "BRANCHLAKE_STATE_DIR" in told


def test_a_state_folder_that_cannot_be_made(tmp_path: Path) -> None:
    assert "/proc/branchlake" in sentence(call("up", state_dir=Path("/proc/branchlake")))
    with raising(ConfigurationError, reason="not_made", subject="/proc/branchlake"):
        make_state_folder(Path("/proc/branchlake"))


def test_a_state_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write everywhere, so the answer of the system is what is changed.
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert str(tmp_path) in sentence(call("up", state_dir=tmp_path))
    with raising(ConfigurationError, reason="not_writable", subject=str(tmp_path)):
        make_state_folder(tmp_path)


@pytest.mark.parametrize("command", ["up", "down", "status", "sql", "reap"])
def test_a_copied_state_folder_is_refused_by_every_command(tmp_path: Path, command: str) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    record_location(original)
    copy.mkdir()
    (copy / "lake.json").write_text((original / "lake.json").read_text())
    told = sentence(call(command, state_dir=copy))
    assert str(copy) in told
    assert f"BRANCHLAKE_STATE_DIR={original}" in told


def test_a_moved_state_folder_works_again_with_the_link_that_it_asks_for(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    record_location(old)
    old.rename(new)
    with raising(LakeMoved, f"ln -s {new} {old};", reason="moved", subject=str(new)):
        require_location(new, tables_elsewhere=False)
    require_location(new, tables_elsewhere=True)
    old.symlink_to(new)
    require_location(old, tables_elsewhere=False)
    require_location(new, tables_elsewhere=False)


@pytest.mark.parametrize(
    "warehouse", ["/data/lake", "data/lake", "file://data/lake", "file:/data/lake", "s3:"]
)
def test_a_warehouse_without_scheme(tmp_path: Path, warehouse: str) -> None:
    told = sentence(call("status", state_dir=tmp_path, warehouse=warehouse))
    assert told.startswith("Error: A setting is invalid: BRANCHLAKE_WAREHOUSE: ")
    assert "or s3://bucket/folder" in told


@pytest.mark.parametrize("warehouse", ["file:///data/lake", "s3://bucket", "s3://bucket/lake"])
def test_a_warehouse_with_one(warehouse: str) -> None:
    assert Settings(warehouse=warehouse).warehouse_uri == warehouse


def test_reading_commands_start_nothing_in_an_empty_folder(tmp_path: Path) -> None:
    root = tmp_path / "state"
    for command in (("reap", "--dry-run"), ("set-aside", "end", "x"), ("sql",)):
        assert str(root) in sentence(call(*command, state_dir=root))
    assert not root.exists()


# -- what is said --------------------------------------------------------------------------------------


def test_a_download_is_announced_only_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(jars, "user_java", lambda: Path("/bin/false"))
    folder = tmp_path / ".ivy2" / "cache" / ICEBERG_SPARK.org / ICEBERG_SPARK.name / "jars"

    def told() -> list[str]:
        lines: list[str] = []
        with pytest.raises(DownloadFailed):
            resolve_jars([ICEBERG_SPARK], tmp_path / "jars", ivy_settings=None, notify=lines.append)
        return lines

    assert told() == ["Downloading iceberg-spark-runtime-4.1_2.13 1.12.0 (about 48 MB) …"]
    folder.mkdir(parents=True)
    (folder / "iceberg-spark-runtime-4.1_2.13-1.12.0.jar").touch()
    assert told() == []


def test_kept_branches_are_not_at_work() -> None:
    tick = PassReport()
    for number in range(3):
        assert not tick.add(Outcome(f"run-{number}", str(number), RunState.KEPT, "kept"))
    assert "3" in tick.format_message()
    assert len(tick.format_message().splitlines()) == 1


RUN = "0f2f4a54-3f0e-4b45-9d0e-2f1c3e1f7a10"


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_status_shows_whole_ids_and_names_what_was_discarded(columns: int) -> None:
    screen = Console(width=columns, file=io.StringIO())
    branch: dict[str, Any] = {"branch": f"run-{RUN}", "state": "failure", "age_s": 61, "commits": 2}
    publication = {"publication": "ab" * 32, "run_id": RUN, "verdict": "passed", "tables": ["shop.prices"]}
    show_status(
        {
            "servers": {},
            "page": "http://127.0.0.1:1/",
            "warehouse": "s3://lake",
            "main": "cd" * 32,
            "discard_grace_h": 24.0,
            "settings_source": "the environment",
            "branches": [{**branch, "heartbeat": "none", "instances": []}],
            "discarded": [f"discarded-{RUN}"],
            "publications": [publication, {**publication, "damaged_properties": ["branchlake.x"]}],
        },
        screen,
    )
    told = screen.file.getvalue()
    for text in (
        f"run-{RUN}",
        f"discarded-{RUN}",
        "http://127.0.0.1:1/",
        "shop.prices",
        "1 min 1 s",
        "none",
        "branchlake.x",
    ):
        assert text in told


def test_down_says_that_a_daemon_starts_the_servers_again(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    assert find_daemon_warning(settings) is None
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    assert find_daemon_warning(settings) is None
    with dg.DagsterInstance.get() as instance:
        heartbeat(instance, time.time())
        assert "end `dagster dev` first" in (find_daemon_warning(settings) or "")
        heartbeat(instance, time.time() - 600)
        assert find_daemon_warning(settings) is None


def heartbeat(instance: dg.DagsterInstance, at: float) -> None:
    from branchlake_dagster_tests.dagster_internals import DaemonHeartbeat

    instance.add_daemon_heartbeat(DaemonHeartbeat(at, "SENSOR", "me", []))


# -- being ended ---------------------------------------------------------------------------------------


def test_a_signal_leaves_through_the_clean_up() -> None:
    cleaned = []
    before = signal.getsignal(signal.SIGTERM)  # Dagster sets one of its own when it is imported

    def work() -> None:
        with exit_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                cleaned.append(True)

    with pytest.raises(SystemExit) as ended:
        work()
    assert (ended.value.code, cleaned) == (128 + signal.SIGTERM, [True])
    assert signal.getsignal(signal.SIGTERM) is before


def run_command(callback: Callable[[], None]) -> int:
    """Run a callback as a command of the group, and return the exit code."""
    group = _Commands(commands={"work": click.Command("work", callback=callback)})
    with pytest.raises(SystemExit) as ended:
        group.main(["work"])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Handlers as in a new process. Dagster sets one of SIGTERM when it is imported."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("imports_dagster", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_command_ends_through_its_clean_up(number: signal.Signals, *, imports_dagster: bool) -> None:
    cleaned = []

    def work() -> None:
        if imports_dagster:
            from branchlake_dagster_tests.dagster_internals import setup_interrupt_handlers

            setup_interrupt_handlers()
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            cleaned.append(True)

    assert (run_command(work), cleaned) == (128 + number, [True])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_dagster_handles_in_a_step_has_its_own_exit_code(number: signal.Signals) -> None:
    from branchlake_dagster_tests.dagster_internals import raise_interrupts_as

    def work() -> None:
        try:
            with raise_interrupts_as(dg.DagsterExecutionInterruptedError):
                os.kill(os.getpid(), number)
                time.sleep(5)
        except dg.DagsterExecutionInterruptedError as error:
            raise KeyboardInterrupt from error  # as the demo does

    assert run_command(work) == 128 + number


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_lets_the_interrupt_of_a_run_pass_ends_alike(number: signal.Signals) -> None:
    from branchlake_dagster_tests.dagster_internals import raise_interrupts_as

    def work() -> None:
        with raise_interrupts_as(dg.DagsterExecutionInterruptedError):
            os.kill(os.getpid(), number)
            time.sleep(5)

    assert run_command(work) == 128 + number


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_whose_exception_is_lost_ends_the_command_later(number: signal.Signals) -> None:
    """Dagster takes the exception for a failure of the step, and Python drops it in a finalizer."""
    done = []

    def work() -> None:
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), number)
            time.sleep(5)
        os.kill(os.getpid(), number)  # ignored for some seconds
        done.append(True)

    assert (run_command(work), done) == (128 + number, [True])


@pytest.mark.usefixtures("default_signals")
def test_a_repeated_signal_counts_after_some_seconds() -> None:
    times = iter([0.0, 9.0, 11.0, 11.0])
    codes = []

    def play() -> None:
        with exit_on_signals(clock=lambda: next(times)):
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):  # the second one after 9 s
                try:
                    os.kill(os.getpid(), number)
                except SystemExit as error:
                    codes.append(error.code)
                else:
                    codes.append(None)

    with pytest.raises(SystemExit) as ended:
        play()
    assert codes == [128 + signal.SIGHUP, None, 128 + signal.SIGTERM]
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.usefixtures("default_signals")
def test_sigterm_ends_a_command_that_a_script_has_put_in_the_background() -> None:
    """Such a command ignores SIGINT, and Dagster would give SIGTERM the same handler."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    going_on = []

    def work() -> None:
        from branchlake_dagster_tests.dagster_internals import setup_interrupt_handlers

        setup_interrupt_handlers()
        os.kill(os.getpid(), signal.SIGINT)
        going_on.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    assert (run_command(work), going_on) == (128 + signal.SIGTERM, [True])


@pytest.mark.usefixtures("default_signals")
def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = []

    def work() -> None:
        handlers.append(signal.getsignal(signal.SIGHUP))

    assert run_command(work) == 0
    assert handlers == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_command_outside_of_the_main_thread_leaves_signals_alone() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_command(lambda: None)))
    thread.start()
    thread.join()
    assert codes == [0]


_IMPORTING = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "pydantic":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from branchlake_dagster.cli import main
"""


def test_an_interrupt_during_the_imports_leaves_no_stack_trace() -> None:
    ended = subprocess.run([sys.executable, "-c", _IMPORTING], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


_CLOSING = """
import os, signal, sqlite3, sys, time
import sqlalchemy
from branchlake_dagster.cli.registry import interrupts_for_us_alone

class Connection(sqlite3.Connection):
    def close(self):
        if sys.argv[1] == "unblocked":  # as a library may do in a thread of its own
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

engine = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.NullPool, connect_args={"factory": Connection})
with interrupts_for_us_alone():
    engine.connect().close()
"""


@pytest.mark.parametrize("delivery", ["relayed", "unblocked"])
def test_an_interrupt_in_a_library_s_clean_up_leaves_no_stack_trace(delivery: str) -> None:
    command = [sys.executable, "-c", _CLOSING, delivery]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "branchlake down" in ended.stderr


@pytest.mark.spark
def test_ctrl_c_ends_the_demo_at_once(lakehouse: Lakehouse, tmp_path: Path) -> None:
    lakehouse.endpoints()
    environment = {
        **os.environ,
        "BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir),
        "DAGSTER_HOME": str(tmp_path / "dagster"),
    }
    command = [sys.executable, "-c", "from branchlake_dagster.cli import main; main()", "demo"]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("[1/"):
                break
        time.sleep(1.0)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: the helpers too
        told = running.stderr.read()
        assert running.wait(120) == 130
    assert "Traceback" not in told
    assert "[2/" not in told


# -- the demo's end ------------------------------------------------------------------------------------


@dg.op
def breaks() -> None:
    raise ValueError("the source is empty")


@dg.job
def breaking() -> None:
    breaks()


@pytest.mark.spark
def test_a_failed_first_run_ends_the_demo_with_its_error(
    lakehouse: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ["DAGSTER_HOME"] = str(tmp_path / "dagster")

    def run(plan: demo.Plan, _: dg.Definitions, instance: dg.DagsterInstance) -> tuple[Any, float]:
        return breaking.execute_in_process(instance=instance, raise_on_error=False), 0.1

    monkeypatch.setattr(demo, "_run", run)
    result = demo.run_demo(lakehouse.settings, [], say=lambda _: None)
    (line,) = result.lines
    assert (result.as_expected, line.publication) == (False, None)
    assert line.reason == "step breaks failed: ValueError: the source is empty"
    assert json.dumps(result.as_dict())
