"""What the launcher is made of: messages, process identity, changed sources, templates that cannot be had."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from dagster import DagsterInstance, DefaultRunLauncher

from branchlake_dagster.embedded.process import find_start_s
from branchlake_dagster.internals.dagster_launching import serialize_value
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message
from branchlake_dagster.launching import launcher as templates_module
from branchlake_dagster.launching.launcher import LoadSpec, NoWorker, Templates
from branchlake_dagster.launching.template import changed_files, imported_sources
from branchlake_dagster.launching.worker import WorkerProcess
from branchlake_dagster_tests.dagster_internals import FileCodePointer, RepositoryPythonOrigin
from branchlake_dagster_tests.suite.raised import raising


def test_a_message_and_the_files_with_it_arrive() -> None:
    here, there = socket.socketpair()
    with here, there:
        mine, passed = socket.socketpair()
        with mine, passed:
            send_message(here, {"text": "x"}, descriptors=[passed.fileno(), mine.fileno()])
            message, received = receive_message(there)
        assert message == {"text": "x"}
        assert len(received) == 2
        for descriptor in received:
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)


def test_a_closed_end_is_reported() -> None:
    here, there = socket.socketpair()
    with there:
        here.close()
        with pytest.raises(ChannelClosed):
            receive_message(there)


def test_a_process_is_known_by_its_start() -> None:
    this = WorkerProcess.current()
    assert WorkerProcess.from_tag(this.to_tag()) == this
    assert this.is_visible()
    assert this.is_running()
    assert not replace(this, started_s=this.started_s - 1).is_running(), "its pid was used again"
    assert not replace(this, place="elsewhere").is_visible()


def test_a_process_that_nobody_collected_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = find_start_s(process.pid)
        assert started is not None
        assert process.stdin is not None
        worker = replace(WorkerProcess.current(), pid=process.pid, started_s=started)
        assert worker.is_running()
        process.stdin.close()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
        assert not worker.is_running()


@pytest.mark.parametrize("tag", [None, "", "{}", "not JSON", '{"pid": 1}'])
def test_a_tag_that_says_nothing_is_no_process(tag: str | None) -> None:
    assert WorkerProcess.from_tag(tag) is None


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    found = ModuleType("mine")
    path = tmp_path / "mine.py"
    path.write_text("one = 1\n")
    os.utime(path, ns=(1_000, 1_000))
    found.__file__ = str(path)
    return found


def test_an_edited_or_deleted_file_is_changed(module: ModuleType) -> None:
    path = Path(str(module.__file__))
    known = imported_sources([module, pytest], began_ns=2_000, ended_ns=3_000)
    assert list(known) == [path], "installed packages are not looked at"
    assert changed_files(known) == []
    path.write_text("two = 2\n")
    assert changed_files(known) == [path]
    path.unlink()
    assert changed_files(known) == [path]


def test_a_file_written_during_the_import_counts_as_changed(module: ModuleType) -> None:
    assert changed_files(imported_sources([module], began_ns=500, ended_ns=3_000)) == [
        Path(str(module.__file__))
    ]


@pytest.fixture
def loads(tmp_path: Path) -> Iterator[LoadSpec]:
    """A load of `code.py`, which the test writes."""
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        pointer = FileCodePointer(str(tmp_path / "code.py"), "defs", str(tmp_path))
        origin = RepositoryPythonOrigin(sys.executable, pointer)
        yield LoadSpec("place", "server", serialize_value(origin), None, serialize_value(instance.get_ref()))


DEFS = "import dagster as dg\ndefs = dg.Definitions()\n"
NOT_FORKABLE = {
    "raise ValueError('a bad start')": ("load_failed", ["ValueError: a bad start"]),
    "raise SystemExit(3)": ("load_failed", ["SystemExit: 3"]),
    "import threading; threading.Thread(target=threading.Event().wait, name='mine', daemon=True).start()": (
        "load_failed",
        ["threads", "mine"],
    ),
    "import socket; pair = socket.socketpair()": ("load_failed", ["2", "network"]),
    "import polars; polars.DataFrame({'n': [1]}).select(polars.col('n').sum())": (
        "load_failed",
        ["threads", "polars"],
    ),
    "import os; os.kill(os.getpid(), 9)": ("not_ready", []),
}


@pytest.mark.chaos
@pytest.mark.parametrize("code", NOT_FORKABLE)
def test_code_that_cannot_be_forked_is_refused_with_a_reason(
    code: str, loads: LoadSpec, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text(DEFS + code)
    templates = Templates()
    reason, names = NOT_FORKABLE[code]
    with raising(NoWorker, *names, reason=reason):
        templates.launch(loads, "a run", timeout_s=60)
    assert templates.process_ids() == {}


@pytest.mark.long
def test_the_space_pipeline_can_be_forked() -> None:
    code = (
        "import branchlake_dagster.definitions as location;"
        "from branchlake_dagster.launching.template import list_thread_pools;"
        "location.defs.get_repository_def(); print(list_thread_pools())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.chaos
def test_a_load_that_failed_is_tried_again_after_a_rest_or_a_reload(loads: LoadSpec, tmp_path: Path) -> None:
    now = 0.0
    attempts = tmp_path / "attempts"
    (tmp_path / "code.py").write_text(f"open({str(attempts)!r}, 'a').write('x')\nraise ValueError\n")
    templates = Templates(clock=lambda: now)

    def tries(load: LoadSpec) -> int:
        with pytest.raises(NoWorker):
            templates.launch(load, "a run", timeout_s=60)
        return len(attempts.read_text())

    assert tries(loads) == 1
    assert tries(loads) == 1
    assert tries(replace(loads, server="reloaded")) == 2
    now += 61
    assert tries(replace(loads, server="reloaded")) == 3


@pytest.mark.chaos
def test_a_process_that_does_not_get_ready_is_ended(
    loads: LoadSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code.py").write_text("import time; time.sleep(600)")
    began: list[int] = []
    start = templates_module._spawn_template
    monkeypatch.setattr(
        templates_module, "_spawn_template", lambda end: began.append(start(end)) or began[-1]
    )
    with raising(NoWorker, reason="not_ready") as late:
        Templates().launch(loads, "a run", timeout_s=0.5)
    assert isinstance(late.value.__cause__, TimeoutError)
    assert not psutil.pid_exists(began[0])


def test_the_launcher_extends_dagsters() -> None:
    assert {"launch_run", "terminate", "join", "_run_ids"} <= {
        *vars(DefaultRunLauncher),
        *vars(DefaultRunLauncher()),
    }
