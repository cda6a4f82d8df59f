"""A Dagster instance with our launcher and the project behind a code server, without daemon or web server."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import psutil

from branchlake_dagster.launching.launcher import WarmRunLauncher
from branchlake_dagster.launching.worker import WorkerProcess
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.dagster_internals import (
    LaunchRunContext,
    PythonFileTarget,
    WorkspaceProcessContext,
    execute_run_monitoring_iteration,
)

LOCATION = "project"
CONFIGURATION = """
telemetry: {enabled: false}
run_launcher: {module: branchlake_dagster, class: WarmRunLauncher}
"""


def wait_for(what: Callable[[], Any], *, seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)  # asking more often takes computing time from the processes that are waited for
    return found


class Stack:
    """Launches runs of the project as a daemon would, and looks at them."""

    def __init__(self, instance: dg.DagsterInstance, context: Any, file: Path) -> None:
        self.instance = instance
        self.file = file
        self._context = context

    @property
    def launcher(self) -> WarmRunLauncher:
        found = self.instance.run_launcher
        assert isinstance(found, WarmRunLauncher)
        return found

    def template(self) -> psutil.Process:
        return psutil.Process(self.launcher.warm_processes()[LOCATION])

    def create(self, job: str, config: Mapping[str, Any] | None = None) -> str:
        """A run as it comes out of the queue."""
        location = self._context.create_request_context().get_code_location(LOCATION)
        repository = location.get_repository("__repository__")
        found = repository.get_full_job(job)
        plan = location.get_execution_plan(found, config or {}, None, None).execution_plan_snapshot
        run = self.instance.create_run(
            job_name=job,
            run_id=None,
            run_config=config or {},
            status=None,
            tags={},
            root_run_id=None,
            parent_run_id=None,
            step_keys_to_execute=None,
            execution_plan_snapshot=plan,
            job_snapshot=found.job_snapshot,
            parent_job_snapshot=None,
            asset_selection=None,
            asset_check_selection=None,
            resolved_op_selection=None,
            op_selection=None,
            remote_job_origin=found.get_remote_origin(),
            job_code_origin=found.get_python_origin(),
            asset_graph=repository.asset_graph,
        )
        return run.run_id

    def launch(self, job: str, config: Mapping[str, Any] | None = None) -> str:
        run_id = self.create(job, config)
        self.start(run_id)
        return run_id

    def start(self, run_id: str) -> None:
        self.instance.launch_run(run_id, self._context.create_request_context())

    def context(self, run_id: str) -> LaunchRunContext:
        """As Dagster gives it to a launcher."""
        return LaunchRunContext(self.run(run_id), self._context.create_request_context())

    def waiting(self, release: Path) -> tuple[str, WorkerProcess]:
        """A run that is in the middle of its step until `release` exists, and its process."""
        run_id = self.launch("waiting", {"ops": {"wait": {"config": {"release": str(release)}}}})
        wait_for(Path(f"{release}.waiting").exists)
        worker = WorkerProcess.from_tag(self.run(run_id).tags.get(RunTag.WORKER))
        assert worker is not None
        return run_id, worker

    def run(self, run_id: str) -> dg.DagsterRun:
        found = self.instance.get_run_by_id(run_id)
        assert found is not None
        return found

    def finished(self, run_id: str) -> dg.DagsterRun:
        wait_for(lambda: self.run(run_id).is_finished)
        return self.run(run_id)

    def messages(self, run_id: str) -> list[str]:
        return [entry.message for entry in self.instance.all_logs(run_id)]

    def workers(self, run_id: str) -> int:
        """How many processes began with the run."""
        return sum(text.startswith("Started process for run") for text in self.messages(run_id))

    def monitor(self) -> None:
        """One look of the daemon's run monitoring."""
        errors = list(execute_run_monitoring_iteration(self._context, logging.getLogger(__name__)))
        assert not any(errors), errors

    def reload(self) -> None:
        """As the UI's button does."""
        self._context.reload_code_location(LOCATION)


@contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    home, code = folder / "home", folder / "code"
    home.mkdir()
    code.mkdir()
    (home / "dagster.yaml").write_text(CONFIGURATION)
    file = Path(shutil.copy(Path(__file__).with_name("project.py"), code / "project.py"))
    target = PythonFileTarget(str(file), None, str(code), LOCATION)
    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        WorkspaceProcessContext(instance, target) as context,
    ):
        yield Stack(instance, context, file)
