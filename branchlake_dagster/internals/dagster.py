"""Uses parts of Dagster 1.13 that `import dagster` does not export.

`report_observations` stores many events that belong to no run. Dagster's public call stores each event in
separate transactions. With it, the observations of ten thousand partitions took a minute; here they take 3 s.
`CopiedByFields` copies a resource without validation. Dagster requests such copies for each run.

Importing this module replaces Dagster's `enter_execution_context` by one that also records which steps run in
this process, and calls the functions of `call_at_step_start`, `call_at_step_end` and `call_at_step_release`.
Dagster keeps the context of a step in a context variable, which the threads that a step starts do not have.
"""

from __future__ import annotations

import logging
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any

from dagster import (
    AssetCheckKey,
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    DagsterError,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    Definitions,
    EventLogEntry,
    ExecutorDefinition,
    InputContext,
    OpExecutionContext,
    RepositoryDefinition,
    ResourceDefinition,
)
from dagster._config.pythonic_config.resource import ConfigurableResourceFactory
from dagster._core.asset_graph_view.asset_graph_view import AssetGraphView
from dagster._core.asset_graph_view.entity_subset import EntitySubset
from dagster._core.asset_graph_view.timing_metadata import TimingMetadata
from dagster._core.definitions.asset_key import CoercibleToAssetKey
from dagster._core.definitions.asset_selection import CoercibleToAssetSelection
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.definitions.declarative_automation.operators import AndAutomationCondition
from dagster._core.definitions.events import AssetKeyPartitionKey
from dagster._core.definitions.reconstruct import ReconstructableJob, repository_def_from_target_def
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.definitions.target import ExecutableDefinition
from dagster._core.definitions.temporal_context import TemporalContext
from dagster._core.errors import DagsterImportError
from dagster._core.events import (
    AssetMaterializationPlannedData,
    AssetObservationData,
    EngineEventData,
    StepMaterializationData,
)
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus, PartitionBackfill
from dagster._core.execution.context.compute import current_execution_context, enter_execution_context
from dagster._core.execution.plan import execute_step
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._core.remote_origin import CodeLocationOrigin, GrpcServerCodeLocationOrigin
from dagster._core.scheduler.instigation import InstigatorStatus, SensorInstigatorData
from dagster._core.secrets.env_file import get_env_var_dict
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.sqlalchemy_compat import db_result
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG as RANGE_END_TAG
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_START_TAG as RANGE_START_TAG
from dagster._core.storage.tags import (
    ASSET_RESUME_RETRY_TAG,
    AUTOMATION_CONDITION_TAG,
    BACKFILL_ID_TAG,
    PARENT_RUN_ID_TAG,
    RETRY_NUMBER_TAG,
    ROOT_RUN_ID_TAG,
    RUN_KEY_TAG,
)
from dagster._core.storage.tags import PARTITION_NAME_TAG as PARTITION_TAG
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.utils import make_new_backfill_id
from dagster._core.workspace.load import location_origins_from_yaml_paths
from dagster._core.workspace.load_target import get_target_from_toml_data
from dagster._grpc.utils import get_loadable_targets
from dagster._time import get_current_timestamp

__all__ = [
    "ASSET_RESUME_RETRY_TAG",
    "AUTOMATION_CONDITION_TAG",
    "BACKFILL_ID_TAG",
    "PARENT_RUN_ID_TAG",
    "PARTITION_TAG",
    "RANGE_END_TAG",
    "RANGE_START_TAG",
    "RETRY_NUMBER_TAG",
    "ROOT_RUN_ID_TAG",
    "RUN_KEY_TAG",
    "AndAutomationCondition",
    "AssetGraph",
    "AssetKeyPartitionKey",
    "CoercibleToAssetKey",
    "CoercibleToAssetSelection",
    "CopiedByFields",
    "EntitySubset",
    "ExecutableDefinition",
    "NamedLocation",
    "PartitionBackfill",
    "PartitionMapper",
    "SensorTicks",
    "StepMaterializationData",
    "TimingMetadata",
    "add_asset_backfill",
    "add_loaded_input_metadata",
    "asset_graph_of",
    "build_engine_event",
    "call_at_step_end",
    "call_at_step_release",
    "call_at_step_start",
    "fail_backfill",
    "find_context_of_run",
    "find_function_assets",
    "find_job_resources",
    "find_output_assets",
    "find_repository",
    "get_running_context",
    "import_repository",
    "io_manager_key_of",
    "is_step_running",
    "load_backfill",
    "load_closed_backfills",
    "load_failed_keys",
    "load_planned_assets",
    "load_sensor_ticks",
    "load_tagged_backfills",
    "loaded_inputs",
    "module_location",
    "read_env_variables",
    "read_named_locations",
    "report_engine_event",
    "report_observations",
    "report_planned_again",
    "returns_frame",
    "with_executor",
]

AssetGraph = BaseAssetGraph[Any]
"""The type of a repository's `asset_graph`. Only this class has no public name."""


def report_engine_event(
    instance: DagsterInstance,
    message: str,
    run: DagsterRun,
    metadata: Mapping[str, Any] | None = None,
    *,
    step_key: str | None = None,
) -> None:
    """Write an engine event with a message and metadata to a run's log.

    `step_key` is the step to which the event belongs; None for the whole run. Dagster's own method takes
    event data of a class that is not public.
    """
    data = EngineEventData(metadata=dict(metadata or {}))
    instance.report_engine_event(message, run, data, step_key=step_key)


def report_planned_again(
    instance: DagsterInstance, run: DagsterRun, key: AssetKey, partition: str | None, step_key: str | None
) -> None:
    """Log again that a run plans to materialize an asset: its partition then has the state of this run.

    Dagster counts a partition as failed if its newest planned materialization has no materialization after
    it, and its run failed. No public call logs that event.
    """
    data = AssetMaterializationPlannedData(key, partition=partition)
    event = DagsterEvent.build_asset_materialization_planned_event(run.job_name, step_key or "", data)
    instance.report_dagster_event(event, run.run_id)


def load_planned_assets(instance: DagsterInstance, run_id: str) -> set[AssetKey]:
    """Load the keys of the assets that a run intends to materialize, from its log."""
    logged = instance.all_logs(run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    events = (entry.dagster_event for entry in logged)
    return {event.asset_key for event in events if event is not None and event.asset_key is not None}


def load_failed_keys(
    instance: DagsterInstance, run: DagsterRun
) -> tuple[Set[AssetKey], Set[AssetCheckKey]] | None:
    """Load the assets and checks that Dagster repeats if `run` is re-executed from its failed assets.

    None if Dagster does not know what the run planned.
    """
    if run.execution_plan_snapshot_id is None:
        return None
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    return instance.run_domain.get_keys_to_reexecute(run.run_id, plan)


def build_engine_event(plan_context: Any, message: str) -> DagsterEvent:
    """Return an engine event with a message, which an executor must yield to write it to the run's log.

    `plan_context` is the context of the executor's `execute` method.
    """
    return DagsterEvent.engine_event(plan_context, message, EngineEventData({}))


def asset_graph_of(job: Any) -> AssetGraph:
    """Return the asset graph of a run's job, from the job as its executor gets it."""
    if isinstance(job, ReconstructableJob):
        return job.repository.get_definition().asset_graph
    graph: AssetGraph = job.get_definition().asset_layer.asset_graph
    return graph


def find_repository(context: OpExecutionContext) -> RepositoryDefinition | None:
    """Return the code location of a run; None if its job is executed without one, as in tests."""
    return context.get_step_execution_context()._execution_data.repository_def


class PartitionMapper:
    """Maps partitions of assets to the partitions of other assets that depend on them."""

    def __init__(self, graph: AssetGraph, instance: DagsterInstance) -> None:
        self._graph = graph
        self._view = AssetGraphView(
            temporal_context=TemporalContext(
                effective_dt=datetime.now(UTC),
                last_event_id=instance.event_log_storage.get_maximum_record_id(),
            ),
            instance=instance,
            asset_graph=graph,
        )

    def map_downstream(
        self, key: AssetKey, partitions: Collection[str | None], child: AssetKey
    ) -> Set[str | None] | None:
        """Return the partitions of asset `child` that depend on `partitions` of its upstream asset `key`.

        None stands for an asset without partitions, in the argument and in the result. The result is None if
        `child` does not directly depend on `key`, or if its partition mapping cannot be evaluated in this
        direction.
        """
        graph = self._graph
        if not graph.has(child) or key not in graph.get(child).parent_keys or not graph.has(key):
            return None
        subset = self._view.get_asset_subset_from_asset_partitions(
            key, {AssetKeyPartitionKey(key, name) for name in partitions}, validate_existence=True
        )
        try:
            mapped = subset.compute_mapped_subset(child, direction="down")
        except (DagsterError, NotImplementedError):
            return None
        return {entry.partition_key for entry in mapped.expensively_compute_asset_partitions()}


def load_closed_backfills(
    instance: DagsterInstance, graph: AssetGraph, *, after: datetime, limit: int
) -> Sequence[PartitionBackfill]:
    """Load the newest `limit` successful backfills of assets of `graph`, newest first.

    Only backfills that were created after `after` count. At most `10 * limit` backfills are read: older ones
    are not found behind so many backfills of other code locations and of jobs.
    """
    backfill_filter = BulkActionsFilter(statuses=[BulkActionStatus.COMPLETED_SUCCESS], created_after=after)
    closed_backfills: list[PartitionBackfill] = []
    # Dagster's query with a cursor makes SQLAlchemy warn, so a larger number is read instead of a next page.
    for read_limit in (limit, 10 * limit):
        newest = instance.get_backfills(backfill_filter, limit=read_limit)
        closed_backfills = [
            backfill
            for backfill in newest
            if backfill.is_asset_backfill and any(map(graph.has, backfill.asset_selection or ()))
        ]
        if len(closed_backfills) >= limit or len(newest) < read_limit:
            break
    return closed_backfills[:limit]


def fail_backfill(
    instance: DagsterInstance,
    backfill: PartitionBackfill,
    graph: AssetGraph,
    missing: Iterable[tuple[AssetKey, str | None]],
) -> None:
    """Move the partitions `missing` of a successful asset backfill to the failed ones.

    The backfill then has the status COMPLETED_FAILED.
    """
    data = backfill.get_asset_backfill_data(graph)
    failed = AssetGraphSubset.from_asset_partition_set(
        {AssetKeyPartitionKey(*asset_partition) for asset_partition in missing}, graph
    )
    new_data = data._replace(
        materialized_subset=data.materialized_subset - failed,
        failed_and_downstream_subset=data.failed_and_downstream_subset | failed,
    )
    new_backfill = backfill.with_asset_backfill_data(new_data, instance, graph)
    failed_backfill: PartitionBackfill = new_backfill.with_status(BulkActionStatus.COMPLETED_FAILED)  # type: ignore[no-untyped-call]
    instance.update_backfill(failed_backfill)


def with_executor(definitions: Definitions, executor: ExecutorDefinition) -> Definitions:
    """Return the definitions with another default executor, because `Definitions.merge` refuses two."""
    return Definitions(
        assets=definitions.assets,
        asset_checks=definitions.asset_checks,
        schedules=definitions.schedules,
        sensors=definitions.sensors,
        jobs=definitions.jobs,
        resources=definitions.resources,
        loggers=definitions.loggers,
        metadata=definitions.metadata,
        component_tree=definitions.component_tree,
        executor=executor,
    )


def io_manager_key_of(graph: AssetGraph, key: AssetKey) -> str | None:
    """Return the resource key of the IO manager that writes an asset."""
    resource_key: str | None = graph.get(key).assets_def.get_io_manager_key_for_asset_key(key)
    return resource_key


def find_output_assets(step: Any) -> frozenset[AssetKey]:
    """Return the assets that are outputs of a step, also those that the run does not select.

    `step` is Dagster's StepExecutionContext.
    """
    keys = (output.properties.asset_key for output in step.step.step_outputs)
    return frozenset(key for key in keys if key is not None)


def find_function_assets(assets: AssetsDefinition) -> frozenset[AssetKey]:
    """Return the assets that are outputs of a function or graph, also those that the run does not select."""
    return frozenset(assets.node_keys_by_output_name.values())


def loaded_inputs(graph: AssetGraph, key: AssetKey) -> set[AssetKey]:
    """Return the assets that an asset's function gets as arguments from the IO manager that writes the asset.

    Without `deps`, whose values are not loaded, and without assets of the same function.
    """
    assets = graph.get(key).assets_def
    resource_key = io_manager_key_of(graph, key)
    inputs = assets.node_def.input_dict if assets.is_executable else {}
    loaded_keys = set()
    for name, input_key in assets.keys_by_input_name.items():
        definition = inputs.get(name)
        if definition is None or definition.dagster_type.is_nothing or input_key in assets.keys:
            continue
        source_key = definition.input_manager_key or (
            io_manager_key_of(graph, input_key) if graph.has(input_key) else None
        )
        if source_key == resource_key:
            loaded_keys.add(input_key)
    return loaded_keys


def returns_frame(graph: AssetGraph, key: AssetKey) -> bool:
    """Return whether an asset's function is annotated to return a value of a certain type.

    An asset that returns None, a MaterializeResult without type, or an unknown value may write no table.
    """
    assets = graph.get(key).assets_def
    if not assets.is_executable:
        return False
    output = assets.node_def.output_dict.get(assets.get_output_name_for_asset_key(key))
    return (
        output is not None
        and not output.dagster_type.is_nothing
        and output.dagster_type.typing_type not in (Any, None, NoneType)
    )


def get_running_context() -> Any:
    """Return the context of the step that executes in this thread, or None.

    `OpExecutionContext.get()` raises instead.
    """
    return current_execution_context.get()


_running_contexts: dict[int, Any] = {}
"""The contexts of all steps that execute in this process, by the context's `id`.

A process that was forked during steps has their contexts too.
"""
_step_processes: dict[int, int] = {}
"""The id of the process of each of these steps, by the same keys."""


@contextmanager
def _record_execution_context(step_context: Any) -> Iterator[Any]:
    """Enter the execution context of a step as Dagster does, and record it until the step ends."""
    with enter_execution_context(step_context) as context:
        running_context = get_running_context()
        _step_processes[id(running_context)] = os.getpid()
        _running_contexts[id(running_context)] = running_context
        try:
            for action in _start_actions:
                action(step_context.run_id)
            try:
                yield context
            except Exception:  # not BaseException: an interrupted step makes no call
                _call_all(_end_actions, step_context.run_id)
                raise
            _call_all(_end_actions, step_context.run_id)
        finally:
            _running_contexts.pop(id(running_context), None)
            _step_processes.pop(id(running_context), None)
            _call_all(_release_actions, step_context.run_id)


_start_actions: list[Callable[[str], None]] = []
_end_actions: list[Callable[[str], None]] = []
_release_actions: list[Callable[[str], None]] = []


def call_at_step_start(action: Callable[[str], None]) -> None:
    """Register a function that is called in each step's process, with the run's id, before the code runs.

    The step's resources exist then. An error that the function raises fails the step.
    """
    _start_actions.append(action)


def call_at_step_end(action: Callable[[str], None]) -> None:
    """Register a function that is called in the process of each step, with the run's id, when the step ends.

    The outputs are stored then, but Dagster has not reported the step's success or failure yet: no executor
    has started a step that depends on it. A step that is interrupted or killed makes no call. An error that
    the function raises fails the step, after the other functions were called.
    """
    _end_actions.append(action)


def call_at_step_release(action: Callable[[str], None]) -> None:
    """Register a function that releases what a step of a run has kept in its process.

    It is called with the run's id, after the functions of `call_at_step_end`, and after an interrupted step
    too. It should log its errors instead of raising them, because an error would replace an interrupt.
    """
    _release_actions.append(action)


def _call_all(actions: Iterable[Callable[[str], None]], run_id: str) -> None:
    """Call each action, even if another one raises. Raise the first error at the end."""
    first_error: Exception | None = None
    for action in actions:
        try:
            action(run_id)
        except Exception as error:  # noqa: BLE001 - raised below
            first_error = first_error or error
    if first_error is not None:
        raise first_error


execute_step.enter_execution_context = _record_execution_context  # type: ignore[attr-defined]


def find_context_of_run(run_id: str) -> Any:
    """Return the context of the step of a run that executes in this process, in whatever thread.

    None if none or several of the run's steps execute in this process. A process that was forked during a
    step has the context of that step.
    """
    contexts = [
        context
        for context in list(_running_contexts.values())
        if context.op_execution_context.run_id == run_id
    ]
    return contexts[0] if len(contexts) == 1 else None


def find_job_resources(step_context: Any) -> Iterator[Any]:
    """Yield the resources that the job of a step declares, and those that they contain.

    Values of `dg.EnvVar` are not resolved. Resources that are functions are left out.
    """
    pending_resources = [*step_context.job_def.resource_defs.values()]
    while pending_resources:
        resource = pending_resources.pop()
        if isinstance(resource, ResourceDefinition):
            declared_resource = getattr(resource.resource_fn, "__self__", None)
            if isinstance(declared_resource, ConfigurableResourceFactory):
                resource = declared_resource
        if isinstance(resource, ConfigurableResourceFactory):
            yield resource
        pending_resources += getattr(resource, "nested_resources", {}).values()


def is_step_running(run_id: str) -> bool:
    """Return whether a step of the run executes in this process, in whatever thread.

    False in a process that was forked by a step.
    """
    return any(
        context.op_execution_context.run_id == run_id and _step_processes.get(number) == os.getpid()
        for number, context in list(_running_contexts.items())
    )


def add_loaded_input_metadata(context: InputContext, metadata: Mapping[str, Any]) -> None:
    """Add metadata to the LOADED_INPUT event of an input, without other effects.

    `add_input_metadata` also reports an observation of the upstream asset, which Dagster treats as an update
    of an external asset. That method raises an error for an input of several partitions.
    """
    context._user_generated_metadata = {**context._user_generated_metadata, **metadata}


def add_asset_backfill(
    graph: AssetGraph,
    instance: DagsterInstance,
    key: AssetKey,
    partitions: Sequence[str] | None,
    *,
    tags: Mapping[str, str],
    title: str,
    description: str,
    requested_at: float,
) -> str:
    """Request a backfill of one asset, as the launch dialog of Dagster's page does. Returns its id.

    `partitions` is None for an asset without partitions. `requested_at` is a POSIX time in seconds.
    """
    names: Sequence[str | None] = [None] if partitions is None else partitions
    asset_partitions = {AssetKeyPartitionKey(key, name) for name in names}
    backfill = PartitionBackfill.from_asset_graph_subset(
        backfill_id=make_new_backfill_id(),
        backfill_timestamp=requested_at,
        tags=tags,
        dynamic_partitions_store=instance,
        asset_graph_subset=AssetGraphSubset.from_asset_partition_set(asset_partitions, graph),
        title=title,
        description=description,
        run_config=None,
    )
    instance.add_backfill(backfill)
    return str(backfill.backfill_id)


def load_backfill(instance: DagsterInstance, backfill_id: str, graph: AssetGraph) -> BackfillState | None:
    """Load the state of an asset backfill, by its first asset.

    None if the id does not exist or is not an asset backfill.
    """
    backfill = instance.get_backfill(backfill_id)
    if backfill is None or not backfill.asset_selection:
        return None
    key = backfill.asset_selection[0]
    return _build_backfill_state(backfill, key, graph)


def load_tagged_backfills(
    instance: DagsterInstance, graph: AssetGraph, tags: Mapping[str, str]
) -> list[BackfillState]:
    """Load the states of the asset backfills with all these tags, oldest first.

    The state is that of the backfill's first asset. Backfills of assets that `graph` lacks are left out.
    """
    backfills = instance.get_backfills(BulkActionsFilter(tags=tags))
    return [
        _build_backfill_state(backfill, backfill.asset_selection[0], graph)
        for backfill in sorted(backfills, key=lambda backfill: backfill.backfill_timestamp)
        if backfill.asset_selection and graph.has(backfill.asset_selection[0])
    ]


def _build_backfill_state(backfill: PartitionBackfill, key: AssetKey, graph: AssetGraph) -> BackfillState:
    data = backfill.get_asset_backfill_data(graph)
    partitioned = graph.get(key).partitions_def is not None

    def keys(subset: AssetGraphSubset) -> tuple[str, ...]:
        partition_subset = subset.partitions_subsets_by_asset_key.get(key)
        return tuple(partition_subset.get_partition_keys()) if partition_subset is not None else ()

    return BackfillState(
        key,
        backfill.status.value.lower(),
        keys(data.target_subset) if partitioned else None,
        keys(data.materialized_subset),
        keys(data.failed_and_downstream_subset),
        backfill.description or "",
        backfill.tags,
        backfill.backfill_timestamp,
        str(backfill.backfill_id),
    )


@dataclass(frozen=True)
class BackfillState:
    """The state of a backfill of one asset.

    `status` is Dagster's status in lower case, such as `completed_success`. `partitions` are the requested
    partitions; None if the asset has no partitions. `done` and `failed` are those that were materialized and
    those that failed. `why` is the description. `requested_at` is a POSIX time in seconds.
    """

    key: AssetKey
    status: str
    partitions: tuple[str, ...] | None
    done: tuple[str, ...]
    failed: tuple[str, ...]
    why: str
    tags: Mapping[str, str] = field(default_factory=dict)
    requested_at: float = 0.0
    backfill_id: str = ""


@dataclass(frozen=True)
class SensorTicks:
    """Whether a user has started or stopped a sensor, and whether the sensor has ticked.

    `started` is True or False if a user switched the sensor on or off, else None.
    """

    started: bool | None
    ticked: bool


def load_sensor_ticks(instance: DagsterInstance, name: str) -> SensorTicks | None:
    """Load the recorded state of a sensor of this name in any code location; None if there is no record.

    If several sensors have the name, the most active one counts.
    """
    ticks: list[SensorTicks] = []
    for state in instance.all_instigator_state(instigator_type=InstigatorType.SENSOR):
        if state.instigator_name == name:
            started = {InstigatorStatus.RUNNING: True, InstigatorStatus.STOPPED: False}.get(state.status)
            data = state.instigator_data
            ticked = isinstance(data, SensorInstigatorData) and data.last_tick_timestamp is not None
            ticks.append(SensorTicks(started, ticked))
    return max(ticks, key=lambda tick: (tick.started is not False, tick.ticked), default=None)


@dataclass(frozen=True)
class NamedLocation:
    """A code location that a project's file names. `target` is None if a gRPC server loads it."""

    name: str
    target: LoadableTargetOrigin | None


def module_location(module: str) -> NamedLocation:
    """Return the code location of a module, as `dagster dev -m` would load it."""
    return NamedLocation(module, LoadableTargetOrigin(module_name=module))


def read_named_locations(path: Path) -> list[NamedLocation]:
    """Read the code locations that `dg.toml`, `pyproject.toml` or `workspace.yaml` names.

    This uses Dagster's own reader, and raises what Dagster raises for a file that it cannot read.
    """
    if path.suffix in (".yaml", ".yml"):
        origins = location_origins_from_yaml_paths([str(path)])
    else:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        data = {"tool": {"dg": document}} if path.name == "dg.toml" else document
        toml_targets = get_target_from_toml_data(data)
        targets = (
            toml_targets
            if isinstance(toml_targets, list)
            else [toml_targets]
            if toml_targets is not None
            else []
        )
        origins = [origin for target in targets for origin in target.create_origins()]
    return [_to_named_location(origin) for origin in origins]


def _to_named_location(origin: CodeLocationOrigin) -> NamedLocation:
    if isinstance(origin, GrpcServerCodeLocationOrigin):
        return NamedLocation(origin.location_name, None)
    target = origin.loadable_target_origin
    names = (target.module_name, target.package_name, target.autoload_defs_module_name, target.python_file)
    return NamedLocation(next(filter(None, names)), target)


def import_repository(location: NamedLocation) -> RepositoryDefinition:
    """Load a code location into this process, from the working folder, as Dagster's code server does.

    Raises ImportError, ValueError, and what the code of the location raises.
    """
    target = location.target
    if target is None:
        raise ValueError("a gRPC server loads the code location")
    if target.executable_path not in (None, sys.executable):
        raise ValueError(f"the code location has its own Python, {target.executable_path}")
    try:
        targets = get_loadable_targets(
            python_file=target.python_file,
            module_name=target.module_name,
            package_name=target.package_name,
            autoload_defs_module_name=target.autoload_defs_module_name,
            working_directory=target.working_directory or str(Path.cwd()),
            attribute=target.attribute,
            resolve_lazy_defs=False,
        )
    except DagsterImportError as error:
        raise ImportError(str(error).split(" Local modules")[0]) from error
    repository = repository_def_from_target_def(targets[0].target_definition)
    if repository is None or len(targets) != 1:
        raise ValueError(f"{location.name} holds {len(targets)} code locations.")
    return repository


def read_env_variables(folder: str) -> dict[str, str]:
    """Read the `.env` file in a folder, which Dagster's own commands load into the environment."""
    variables: dict[str, str] = get_env_var_dict(folder)
    return variables


_log = logging.getLogger(__name__)


def report_observations(instance: DagsterInstance, observations: Sequence[AssetObservation]) -> None:
    """Report observations like `instance.report_runless_asset_event`, in their order, but in batches.

    Consecutive observations of one asset are one statement in Postgres, and one transaction for each of the
    two databases in SQLite. After an error, a batch may have been stored nevertheless, as with Dagster's own
    batches. Then its observations are stored twice, but none is lost.
    """
    storage = instance.event_log_storage
    for _, asset_observations in groupby(observations, key=_get_asset_key):
        entries = [_build_entry(observation) for observation in asset_observations]
        if type(storage) is SqliteEventLogStorage:
            _store_in_sqlite(storage, entries)
        else:
            try:
                storage.store_event_batch(entries)
            except Exception as error:  # noqa: BLE001 - as in Dagster: a batch may be too large
                _log.warning(
                    "%d observations are now stored one by one, because storing them together failed: %s",
                    len(entries),
                    error,
                )
                for entry in entries:
                    storage.store_event(entry)


def _get_asset_key(observation: AssetObservation) -> AssetKey:
    return observation.asset_key


def _build_entry(observation: AssetObservation) -> EventLogEntry:
    event = DagsterEvent(
        event_type_value=DagsterEventType.ASSET_OBSERVATION.value,
        event_specific_data=AssetObservationData(observation),
        job_name=RUNLESS_JOB_NAME,
    )
    return EventLogEntry(  # type: ignore[no-untyped-call]  # untyped upstream
        error_info=None,
        level=logging.INFO,
        user_message="",
        run_id=RUNLESS_RUN_ID,
        timestamp=get_current_timestamp(),
        job_name=RUNLESS_JOB_NAME,
        dagster_event=event,
    )


def _store_in_sqlite(storage: SqliteEventLogStorage, entries: Sequence[EventLogEntry]) -> None:
    """Store events like `store_event`, but in one transaction for each of two databases.

    These are the database of events without a run, and the index of all runs.
    """
    statements = [storage.prepare_insert_event(entry) for entry in entries]
    with storage.run_connection(RUNLESS_RUN_ID) as conn:
        for statement in statements:
            conn.execute(statement)
    with storage.index_transaction() as conn:
        ids = []
        for statement in statements:
            with db_result(conn, statement) as result:
                ids.append(result.inserted_primary_key[0])
        storage._store_asset_event_tags(conn, entries, ids)
        storage._store_asset_event(conn, entries[-1], ids[-1])  # the asset's newest


class CopiedByFields(ConfigurableResourceFactory[Any]):
    """A resource whose copies with unchanged values are not configured and validated again.

    For each run, Dagster copies a resource three times, and copies a nested resource once more for each
    resource that holds it: twelve times for an IO manager, its session and their lake. Each copy derives the
    configuration schema from all fields, which took 3 ms for the forty fields of the lake. Only a resolved
    `dg.EnvVar` and the nested resources can differ.
    """

    def _with_updated_values(self, values: Mapping[str, Any] | None) -> ConfigurableResourceFactory[Any]:
        current_values = dict(self)
        if any(
            name not in current_values or not _is_same_value(current_values[name], value)
            for name, value in (values or {}).items()
        ):
            return super()._with_updated_values(values)
        copy = type(self).model_construct(set(self.model_fields_set), **current_values)
        copy._state__internal__ = self._state__internal__
        return copy


def _is_same_value(current: Any, value: Any) -> bool:
    """Check whether two values of a field have the same type and are equal.

    The type counts because a `dg.EnvVar` is a subclass of str, and equals a string that is not a variable.
    """
    return current is value or (type(current) is type(value) and bool(current == value))
