"""What becomes of forked runs when a real daemon is killed. `test_one_daemon.py` ends one with Ctrl-C."""

from __future__ import annotations

import os
import signal
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
