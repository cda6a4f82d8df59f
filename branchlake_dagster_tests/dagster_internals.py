"""What the tests use of Dagster beyond its public interface: retries of in-memory jobs, daemons' insides."""

import sys

from dagster._config.pythonic_config import config as _config_of_models
from dagster._config.pythonic_config import conversion_utils as _conversions_of_models
from dagster._config.pythonic_config import resource as _resources_of_models
from dagster._core.code_pointer import FileCodePointer
from dagster._core.definitions.asset_daemon_cursor import AssetDaemonCursor
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.execution.api import create_execution_plan, execute_plan_iterator, execute_run
from dagster._core.execution.asset_backfill import AssetBackfillData
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.execution.plan.state import KnownExecutionState
from dagster._core.execution.retries import RetryMode
from dagster._core.executor.base import Executor
from dagster._core.instance.types import DynamicPartitionsStore
from dagster._core.launcher.base import LaunchRunContext, WorkerStatus
from dagster._core.origin import RepositoryPythonOrigin
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData
from dagster._core.secrets.env_file import get_env_var_dict
from dagster._core.snap import snapshot_from_execution_plan
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value
from dagster._core.test_utils import create_run_for_test
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.asset_daemon import (
    asset_daemon_cursor_from_instigator_serialized_cursor,
    asset_daemon_cursor_to_instigator_serialized_cursor,
)
from dagster._daemon.monitoring.run_monitoring import execute_run_monitoring_iteration
from dagster._daemon.types import DaemonHeartbeat
from dagster._serdes import whitelist_for_serdes
from dagster._utils.interrupts import raise_interrupts_as, setup_interrupt_handlers

MODULES_WITH_MODEL_FIELDS = (_config_of_models, _conversions_of_models, _resources_of_models)
"""They have a name `model_fields`, the function that wraps the fields of a Pydantic class."""


def whitelisted_classes() -> set[str]:
    """The names under which Dagster reads stored objects, in this process."""
    known = sys.modules[whitelist_for_serdes.__module__]._WHITELIST_MAP
    return {*known.object_deserializers, *known.enum_serializers}


CONSOLIDATED_EVENT_LOG = {
    "module": "dagster._core.storage.event_log",
    "class": "ConsolidatedSqliteEventLogStorage",
}
"""An event log in one SQLite database, so with one counter, for all runs. The default has one for each run."""

__all__ = [
    "COMPUTE_LOGS",
    "CONSOLIDATED_EVENT_LOG",
    "MODULES_WITH_MODEL_FIELDS",
    "NO_COMPUTE_LOGS",
    "AssetBackfillData",
    "AssetDaemonCursor",
    "AssetGraphSubset",
    "BulkActionStatus",
    "DaemonHeartbeat",
    "DynamicPartitionsStore",
    "Executor",
    "FileCodePointer",
    "InMemoryJob",
    "InstigatorState",
    "InstigatorStatus",
    "InstigatorType",
    "KnownExecutionState",
    "LaunchRunContext",
    "LoadableTargetOrigin",
    "ManagedGrpcPythonEnvCodeLocationOrigin",
    "PartitionBackfill",
    "PythonFileTarget",
    "ReconstructableRepository",
    "RegisteredCodeLocationOrigin",
    "RemoteInstigatorOrigin",
    "RemoteJobOrigin",
    "RemoteRepositoryOrigin",
    "RepositoryPythonOrigin",
    "RetryMode",
    "SensorInstigatorData",
    "SqliteEventLogStorage",
    "WorkerStatus",
    "WorkspaceProcessContext",
    "asset_daemon_cursor_from_instigator_serialized_cursor",
    "asset_daemon_cursor_to_instigator_serialized_cursor",
    "create_execution_plan",
    "create_run_for_test",
    "execute_plan_iterator",
    "execute_run",
    "execute_run_monitoring_iteration",
    "get_and_update_asset_status_cache_value",
    "get_env_var_dict",
    "raise_interrupts_as",
    "setup_interrupt_handlers",
    "snapshot_from_execution_plan",
    "whitelisted_classes",
]

NO_COMPUTE_LOGS = {
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
}
"""Overrides of an instance's configuration: the output of steps is not kept."""
COMPUTE_LOGS = "compute_logs: {{module: {module}, class: {class}}}".format(**NO_COMPUTE_LOGS["compute_logs"])
"""The same as a line of `dagster.yaml`."""
