"""Uses the parts of Dagster 1.13 for launching runs that `import dagster` does not export.

Only the base class of a run launcher is public. Its arguments, the code location of a run, and how a run's
process executes the run have no public names.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from dagster import DagsterInstance, DagsterRun, RepositoryDefinition
from dagster._config.config_schema import UserConfigSchema
from dagster._core.definitions.repository_definition import RepositoryLoadData
from dagster._core.instance import InstanceRef
from dagster._core.launcher.base import CheckRunHealthResult, LaunchRunContext, WorkerStatus
from dagster._core.origin import RepositoryPythonOrigin
from dagster._serdes import ConfigurableClass, ConfigurableClassData, deserialize_value, serialize_value
from dagster._utils import get_run_crash_explanation
from dagster._utils.hosted_user_process import recon_repository_from_origin
from dagster._utils.interrupts import capture_interrupts

if TYPE_CHECKING:
    from dagster._core.remote_representation.code_location import GrpcServerCodeLocation


__all__ = [
    "CheckRunHealthResult",
    "ConfigurableClass",
    "ConfigurableClassData",
    "GrpcServerCodeLocation",
    "InstanceRef",
    "LaunchRunContext",
    "RepositoryPythonOrigin",
    "UserConfigSchema",
    "WorkerStatus",
    "capture_interrupts",
    "deserialize_value",
    "execute_launched_run",
    "find_code_location",
    "format_crash",
    "inject_secrets",
    "load_repository",
    "load_repository_data",
    "load_server_id",
    "preload_execution",
    "serialize_value",
    "shares_our_environment",
]


def find_code_location(context: LaunchRunContext) -> GrpcServerCodeLocation | None:
    """Return the code location of a run; None if it is not served by a separate code server process."""
    from dagster._core.remote_representation.code_location import GrpcServerCodeLocation

    run = context.dagster_run
    if context.workspace is None or run.remote_job_origin is None:
        return None
    location = context.workspace.get_code_location(run.remote_job_origin.location_name)
    return location if isinstance(location, GrpcServerCodeLocation) else None


def shares_our_environment(location: GrpcServerCodeLocation) -> bool:
    """Check whether Dagster started the code server on this machine with this process's environment.

    Dagster does so for a location that a workspace names by module or file. `dagster dev` does it for its
    daemon and web server, and passes them the socket together with the names of the loaded modules or files.
    Any other server may have another environment, file system or machine.
    """
    from dagster._core.remote_origin import (
        GrpcServerCodeLocationOrigin,
        ManagedGrpcPythonEnvCodeLocationOrigin,
    )
    from dagster._utils.env import using_dagster_dev

    origin = location.origin
    if isinstance(origin, ManagedGrpcPythonEnvCodeLocationOrigin):
        return True
    return (
        isinstance(origin, GrpcServerCodeLocationOrigin)
        and bool(origin.socket)
        and bool(origin.additional_metadata)
        and using_dagster_dev()
    )


def load_server_id(location: GrpcServerCodeLocation) -> str:
    """Request the id of the current load of a location's code server. It changes with each reload.

    Raises Dagster's errors if the server does not answer.
    """
    from dagster._api.get_server_id import sync_get_server_id

    return str(sync_get_server_id(location.client))


def load_repository_data(instance: DagsterInstance, run: DagsterRun) -> str | None:
    """Return the serialized data that a run's process needs to load the definitions; None if it needs none.

    The data has the name of the code location, and what definitions computed while they were loaded: assets
    of integrations, or components with state.
    """
    if not run.has_repository_load_data or run.execution_plan_snapshot_id is None:
        return None
    data = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id).repository_load_data
    return None if data is None else serialize_value(data)


def inject_secrets(instance_ref: InstanceRef, location_name: str | None) -> None:
    """Set this process's environment variables from Dagster's `.env` file, as a code server does.

    `location_name` selects the file of one code location, if Dagster is configured with several; None selects
    the default file. The instance's storage is not opened.
    """
    loader = instance_ref.secrets_loader
    if loader is not None:
        os.environ.update(loader.get_secrets_for_environment(location_name))


def load_repository(origin: RepositoryPythonOrigin, load_data: str | None) -> RepositoryDefinition:
    """Import the code and build all its definitions, so that `execute_launched_run` need not build them.

    `load_data` is the result of `load_repository_data`.
    """
    data = None if load_data is None else deserialize_value(load_data, RepositoryLoadData)
    repository = recon_repository_from_origin(origin).with_repository_load_data(data).get_definition()
    repository.load_all_definitions()
    return repository


_LATE_IMPORTS = (
    "dagster._cli.api",
    "dagster._core.execution.api",
    "dagster._core.execution.plan.active",
    "dagster._core.executor.in_process",
    "dagster._core.instance.factory",
    "dagster._core.storage.event_log.sqlite.sqlite_event_log",
    "dagster._core.storage.migration",
    "dagster._core.storage.runs.sqlite.sqlite_run_storage",
    "dagster._core.storage.schedules.sqlite.sqlite_schedule_storage",
    "dagster._core.system_config.composite_descent",
    "sqlalchemy.dialects.sqlite",
    "upath.implementations.local",
)


def preload_execution(instance_ref: InstanceRef) -> None:
    """Import the modules that Dagster imports only during a run, and the classes of the instance."""
    instance_modules = [data.module_name for data in instance_ref if isinstance(data, ConfigurableClassData)]
    for module in (*_LATE_IMPORTS, *instance_modules):
        import_module(module)


def execute_launched_run(instance: DagsterInstance, run_id: str) -> None:
    """Execute a launched run in this process, as `dagster api execute_run` does.

    Errors of the run are in its log.
    """
    from dagster._cli.api import _execute_run_command_body

    _execute_run_command_body(run_id, instance, lambda _: None, set_exit_code_on_failure=False)


def format_crash(run_id: str, exit_code: int) -> str:
    """Return Dagster's sentence on how the process of a run ended. A negative exit code is a signal."""
    return get_run_crash_explanation(f"Run execution process for {run_id}", exit_code)
