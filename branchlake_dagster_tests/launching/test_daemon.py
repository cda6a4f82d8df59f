"""What becomes of forked runs when the process that launched them is killed. `test_one_daemon.py` ends a daemon with Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import psutil
import pytest

from branchlake_dagster.bench.launched_run import launch_run
from branchlake_dagster.cli.dagster_home import dagster_dev
from branchlake_dagster.launching.worker import WorkerProcess
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.launching.stack import CONFIGURATION, wait_for

pytestmark = pytest.mark.daemon

MODULE = "branchlake_dagster_tests.launching.project"


def at_work(
    url: str, instance: dg.DagsterInstance, release: Path
) -> tuple[str, WorkerProcess, psutil.Process]:
    """A run in the middle of its step, its process and the template that forked it."""
    run_id = launch_run(url, MODULE, "waiting")
    wait_for(Path(f"{release}.waiting").exists)
    run = instance.get_run_by_id(run_id)
    worker = WorkerProcess.from_tag(run.tags[RunTag.WORKER]) if run else None
    assert worker is not None
    return run_id, worker, psutil.Process(psutil.Process(worker.pid).ppid())


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def status(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRunStatus:
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return run.status


_LAUNCH = """
import sys
from pathlib import Path
from branchlake_dagster_tests.launching.stack import stack

with stack(Path(sys.argv[1])) as launching:
    run_id, worker = launching.waiting(Path(sys.argv[2]))
    print("launched", run_id, worker.pid, flush=True)
    sys.stdin.read()
"""


def test_runs_outlive_a_killed_launcher(tmp_path: Path) -> None:
    release = tmp_path / "release"
    command = [sys.executable, "-c", _LAUNCH, str(tmp_path), str(release)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as launching:
        try:
            assert launching.stdout is not None
            line = next(one for one in launching.stdout if one.startswith("launched "))  # among Dagster's own
            _, run_id, pid = line.split()
            worker = psutil.Process(int(pid))
            template = psutil.Process(worker.ppid())
            assert template.ppid() == launching.pid
            launching.kill()
            launching.wait()
            assert not ended(worker)
            assert not ended(template)
            release.touch()
            with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
                wait_for(lambda: status(instance, run_id) is dg.DagsterRunStatus.SUCCESS)
            wait_for(lambda: ended(template))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launching.pid, signal.SIGKILL)  # its code server


@pytest.mark.soak  # the test above, with the daemon of `dagster dev`
def test_runs_outlive_a_killed_daemon(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(CONFIGURATION + "run_queue: {dequeue_interval_seconds: 1}\n")
    release = tmp_path / "release"
    environment = {"LAUNCH_TEST_RELEASE": str(release)}
    with (
        dg.DagsterInstance.from_config(str(tmp_path)) as instance,
        dagster_dev(MODULE, home=tmp_path, environment=environment) as url,
    ):
        survivor, worker, template = at_work(url, instance, release)
        daemon = psutil.Process(template.ppid())
        assert "daemon" in " ".join(daemon.cmdline())
        os.kill(daemon.pid, signal.SIGKILL)
        wait_for(lambda: ended(daemon))
        assert worker.is_running()
        assert not ended(template)
        release.touch()
        wait_for(lambda: status(instance, survivor) is dg.DagsterRunStatus.SUCCESS)
        wait_for(lambda: ended(template))
