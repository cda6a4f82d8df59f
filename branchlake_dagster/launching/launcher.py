"""Launches Dagster runs by forking them from warm processes, as `WarmRunLauncher`.

`Templates` manages the warm processes of one launcher. Each code location gets one when its first run starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from dagster import DagsterRun, DefaultRunLauncher

from branchlake_dagster.errors import BranchlakeError, Transient
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
from branchlake_dagster.internals.json_channel import ChannelClosed, receive_message, send_message
from branchlake_dagster.launching.worker import WorkerProcess
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag

_MODULE = "branchlake_dagster.launching.template"
_FORK_TIMEOUT_S = 30.0
"""Seconds to wait for a fork. A fork takes milliseconds, but a machine that swaps may need longer."""
_RETRY_LOAD_AFTER_S = 60.0
"""Pause after a failed load. Repeating the load for each run would double the wait of each run."""


class NoWorker(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """No process executes the run, and none will. The run may be launched in another way."""


class _SourcesChanged(Exception):  # noqa: N818 - an answer, not an error
    """The source files differ from the code that the warm process has imported."""


@dataclass(frozen=True)
class LoadSpec:
    """The code location and Dagster instance that a warm process has loaded.

    Two runs with equal specs can share a warm process. `server` identifies the current load of the code
    server. `origin`, `load_data` and `instance` are serialized by Dagster.
    """

    location: str
    server: str
    origin: str
    load_data: str | None
    instance: str

    def to_message(self) -> dict[str, Any]:
        """Return the message that makes a new warm process load this code location and instance."""
        return asdict(self)


_DESCRIPTOR = 3
"""The descriptor of the warm process's end of the socket pair."""

_retiring_pids: list[int] = []
"""Process ids of warm processes that end by themselves. They are polled, so that no zombie remains."""


def _spawn_template(child_socket: socket.socket) -> int:
    """Start a warm process that inherits `child_socket`, and return its process id.

    Not by subprocess: its object warns about a process that outlives it, as a warm process with runs does.
    """
    # Only a duplicated descriptor stays open in the new program, and a descriptor cannot be duplicated onto
    # itself.
    descriptor = _DESCRIPTOR + (child_socket.fileno() == _DESCRIPTOR)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", _MODULE, str(descriptor)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, child_socket.fileno(), descriptor),
        ],
    )


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


class _TemplateHandle:
    """The connection to a warm process, which has loaded definitions and forks workers for runs.

    Two threads must not use it at the same time. The constructor starts the process and waits until it has
    loaded the definitions. It raises NoWorker if that fails or takes longer than `timeout_s` seconds.
    """

    def __init__(self, load_spec: LoadSpec, *, timeout_s: float) -> None:
        self.load_spec = load_spec
        self._channel, child_socket = socket.socketpair()
        with child_socket:
            self.pid = _spawn_template(child_socket)
        self._channel.settimeout(timeout_s)
        try:
            send_message(self._channel, load_spec.to_message())
            answer, _ = receive_message(self._channel)
        except (OSError, ChannelClosed) as error:
            self.kill()
            raise NoWorker(
                f"The warm process of code location {load_spec.location} did not start: {error}",
                reason="not_ready",
            ) from error
        if "failed" in answer:
            self.kill()
            raise NoWorker(
                f"Code location {load_spec.location} could not be loaded into a warm process:"
                f" {answer['failed']}",
                reason="load_failed",
            )

    def fork(self, run_id: str) -> int:
        """Fork a worker that executes the run, and return its process id.

        Raises NoWorker if no worker will execute the run. Raises _SourcesChanged if a source file has changed
        since the warm process imported it.
        """
        own_socket, child_socket = socket.socketpair()
        # The worker must not begin once the launcher has given up. It learns that from the closed socket.
        with own_socket:
            with child_socket:
                try:
                    message = {"run_id": run_id, "instance": self.load_spec.instance}
                    send_message(self._channel, message, descriptors=[child_socket.fileno()])
                except OSError as error:
                    self.kill()
                    raise NoWorker(
                        f"The warm process of code location {self.load_spec.location} has ended."
                    ) from error
            own_socket.settimeout(_FORK_TIMEOUT_S)
            try:
                answer, _ = receive_message(own_socket)
                if "changed" in answer:
                    raise _SourcesChanged
                if "failed" in answer:
                    self.retire()
                    raise NoWorker(
                        f"The warm process of code location {self.load_spec.location} failed:"
                        f" {answer['failed']}."
                    )
                send_message(own_socket, {"go": True})
            except (ChannelClosed, OSError) as error:
                self.kill()
                raise NoWorker(
                    f"The warm process of code location {self.load_spec.location} has ended or did not answer"
                    f" within {_FORK_TIMEOUT_S:.0f} s."
                ) from error
        return int(answer["worker"])

    def is_running(self) -> bool:
        """Return whether the process still runs. If it has ended, its exit status is collected."""
        return not _has_ended(self.pid)

    def retire(self) -> None:
        """Let the process end by itself, after its last worker."""
        self._channel.close()
        _retiring_pids[:] = [pid for pid in [*_retiring_pids, self.pid] if not _has_ended(pid)]

    def kill(self) -> None:
        """Kill the process now. Its workers continue without a parent."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the process has already ended
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@dataclass
class _TemplateSlot:
    """The warm process of one code location.

    `last_failure` is the last failed load: its spec, its time by the clock, and its error.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    template: _TemplateHandle | None = None
    last_failure: tuple[LoadSpec, float, NoWorker] | None = None


class Templates:
    """Starts, uses, replaces and ends the warm processes of one launcher. Threads may share it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: dict[str, _TemplateSlot] = {}

    def launch(self, load_spec: LoadSpec, run_id: str, *, timeout_s: float) -> int:
        """Fork a process for the run from a warm process that has loaded `load_spec`; return its process id.

        `timeout_s` is the largest time that a warm process may take to load. Raises NoWorker if no process
        executes the run and none will.
        """
        with self._lock:
            slot = self._slots.setdefault(load_spec.location, _TemplateSlot())
        with slot.lock:
            for is_last_attempt in (False, True):
                template = self._load_template(slot, load_spec, timeout_s)
                try:
                    return template.fork(run_id)
                except _SourcesChanged:
                    self._retire(slot)
                except NoWorker:
                    slot.template = None
                    if is_last_attempt:
                        raise
            raise NoWorker(
                f"The files of code location {load_spec.location} change faster than they can be loaded."
            )

    def _load_template(self, slot: _TemplateSlot, load_spec: LoadSpec, timeout_s: float) -> _TemplateHandle:
        if slot.template is not None and (
            slot.template.load_spec != load_spec or not slot.template.is_running()
        ):
            self._retire(slot)
        if slot.template is None:
            if slot.last_failure is not None:
                failed_spec, failed_at, error = slot.last_failure
                if failed_spec == load_spec and self._clock() - failed_at < _RETRY_LOAD_AFTER_S:
                    raise error
            try:
                slot.template = _TemplateHandle(load_spec, timeout_s=timeout_s)
            except NoWorker as error:
                slot.last_failure = (load_spec, self._clock(), error)
                raise
            slot.last_failure = None
        return slot.template

    def _retire(self, slot: _TemplateSlot) -> None:
        if slot.template is not None:
            slot.template.retire()
        slot.template = None

    def process_ids(self) -> dict[str, int]:
        """Return the process id of each warm process, by the name of its code location."""
        return {name: slot.template.pid for name, slot in self._slots.items() if slot.template}

    def close(self) -> None:
        """Let all warm processes end, each after its last worker."""
        for slot in list(self._slots.values()):
            with slot.lock:
                self._retire(slot)


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
        """Create the launcher. Dagster calls this with the launcher's entry in dagster.yaml.

        `inst_data` is the entry itself, `config_value` its validated options, which are empty.
        """
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
        """Interrupt the run's process, which then ends the run as canceled, and return True.

        If the process has already ended, report the run as canceled and return True. Return False if the run
        has finished, or if its process is on another machine or in another container. Runs that Dagster's own
        launcher started are terminated by it.
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
        """Return whether the process of a started run still runs: RUNNING or FAILED.

        A process that this machine or container cannot see counts as RUNNING.
        """
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
        """Return the process id of each warm process, by the name of its code location."""
        return self._templates.process_ids()

    def dispose(self) -> None:
        """End the warm processes, each after its last run."""
        self._templates.close()
        super().dispose()

    def _load_spec(self, context: LaunchRunContext) -> LoadSpec | str:
        """Return the spec that a warm process must load to fork this run, or why the run cannot be forked.

        The reason is part of a sentence in the log.
        """
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
