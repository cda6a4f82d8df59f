"""`WarmRunLauncher`, a run launcher for Dagster that forks runs from warm processes."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Self

from dagster import DagsterRun, DefaultRunLauncher

from branchlake_dagster.internals.dagster_launching import (
    CheckRunHealthResult,
    ConfigurableClassData,
    LaunchRunContext,
    UserConfigSchema,
    WorkerStatus,
    find_code_location,
    load_repository_data,
    load_server_id,
    serialize_value,
    shares_our_environment,
)
from branchlake_dagster.launching.process import WorkerProcess
from branchlake_dagster.launching.templates import LoadSpec, NoWorker, Templates
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag

_log = logging.getLogger(__name__)


class WarmRunLauncher(DefaultRunLauncher):
    """Launches a run by forking a process that has already imported the code location.

    A code location that Dagster serves from this machine and environment gets a warm process with its first
    run. The warm process is replaced when the location is reloaded or a source file changes.

    Other runs start as with Dagster's own launcher: runs of any other location, and all runs with
    `BRANCHLAKE_RUN_LAUNCHER=dagster`. If no warm process can be used, the run starts in the same way, and its
    event log gets a line with the reason.

    Examples:
        .. code-block:: python

            from branchlake_dagster import WarmRunLauncher

            # In dagster.yaml:
            # run_launcher:
            #   module: branchlake_dagster
            #   class: WarmRunLauncher
    """

    def __init__(self, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__(inst_data)
        self._templates = Templates()
        self._logged_reasons: set[tuple[str, str]] = set()

    @classmethod
    def config_type(cls) -> UserConfigSchema:
        """Return the configuration schema, which has no options."""
        return {}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        """Create the launcher as Dagster does."""
        return cls(inst_data, **config_value)

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start the run's process by a fork, or by Dagster's own launcher if a fork is not possible."""
        run = context.dagster_run
        load_spec = self._load_spec(context)
        if isinstance(load_spec, str):
            self._log_reason_once(run, load_spec)
        else:
            try:
                self._templates.launch(
                    load_spec, run.run_id, timeout_s=self._instance.code_server_process_startup_timeout
                )
            except NoWorker as error:
                _log.warning("%s Run %s starts with Dagster's own launcher.", error, run.run_id)
                self._instance.report_engine_event(
                    f"{error} The run starts with Dagster's own launcher.", run
                )
            else:
                self._run_ids.add(run.run_id)
                return
        super().launch_run(context)

    def terminate(self, run_id: str) -> bool:
        """Interrupt the run's process, which then ends the run as canceled.

        If the process has already ended, report the run as canceled. Return False if the run has finished, or
        if its process is on another machine or in another container.
        """
        run = self._instance.get_run_by_id(run_id)
        worker = WorkerProcess.from_tag(run.tags.get(RunTag.WORKER)) if run else None
        if run is None or run.is_finished or worker is None:
            return bool(super().terminate(run_id))  # type: ignore[no-untyped-call]  # untyped upstream
        self._instance.report_run_canceling(run)
        if not worker.is_visible():
            self._instance.report_engine_event(
                f"Process {worker.pid} of the run is on another machine or in another container. Terminate"
                " the run on the machine of the Dagster daemon that launched it.",
                run,
            )
            return False
        try:
            if worker.is_running():
                os.kill(worker.pid, signal.SIGINT)
                return True
        except ProcessLookupError:
            pass  # the process has ended meanwhile
        if not (current_run := self._instance.get_run_by_id(run_id)) or current_run.is_finished:
            return False
        self._instance.report_run_canceled(run, f"Process {worker.pid} of the run has already ended.")
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Return True: Dagster's run monitoring may check the runs of this launcher."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Return whether the process of a started run still runs."""
        worker = WorkerProcess.from_tag(run.tags.get(RunTag.WORKER))
        if worker is None or not worker.is_visible():
            # The run was launched by Dagster's own launcher, or its process is on another machine or in
            # another container. Any status but RUNNING would fail the run.
            return CheckRunHealthResult(
                WorkerStatus.RUNNING, "The run's process is not visible from this machine or container."
            )
        if worker.is_running():
            return CheckRunHealthResult(WorkerStatus.RUNNING, run_worker_id=str(worker.pid))
        return CheckRunHealthResult(
            WorkerStatus.FAILED, f"Process {worker.pid} of the run has ended.", run_worker_id=str(worker.pid)
        )

    def warm_processes(self) -> dict[str, int]:
        """Return the process id of each warm process, by code location."""
        return self._templates.process_ids()

    def dispose(self) -> None:
        """End the warm processes, each after its last run."""
        self._templates.close()
        super().dispose()

    def _load_spec(self, context: LaunchRunContext) -> LoadSpec | str:
        """Return what a warm process must load before it can fork this run, or the reason why it cannot."""
        run = context.dagster_run
        if Settings().run_launcher == "dagster":
            return "BRANCHLAKE_RUN_LAUNCHER is dagster"
        if sys.platform != "linux":
            return f"on {sys.platform} a process that has imported libraries cannot be forked safely"
        location = find_code_location(context)
        if location is None or run.job_code_origin is None:
            return "no code server serves it"
        origin = run.job_code_origin.repository_origin
        if not shares_our_environment(location):
            return "its code server was not started by this Dagster, so it may have another environment"
        if origin.executable_path != sys.executable:
            return f"it runs with another Python, {origin.executable_path}"
        return LoadSpec(
            location=location.name,
            server=load_server_id(location),
            origin=serialize_value(origin),
            load_data=load_repository_data(self._instance, run),
            instance=serialize_value(self._instance.get_ref()),
        )

    def _log_reason_once(self, run: DagsterRun, reason: str) -> None:
        name = run.remote_job_origin.location_name if run.remote_job_origin else run.job_name
        if (name, reason) not in self._logged_reasons:
            self._logged_reasons.add((name, reason))
            _log.info("Runs of %s start with Dagster's own launcher: %s.", name, reason)
