"""Dagster 1.13 beyond what `import dagster` exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import (
    AssetKey,
    DagsterEvent,
    DagsterInstance,
    DagsterRun,
    Definitions,
    ExecutorDefinition,
    InputContext,
)
from dagster._core.asset_graph_view.entity_subset import EntitySubset
from dagster._core.asset_graph_view.timing_metadata import TimingMetadata
from dagster._core.definitions.asset_key import CoercibleToAssetKey
from dagster._core.definitions.asset_selection import CoercibleToAssetSelection
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.definitions.declarative_automation.operators import AndAutomationCondition
from dagster._core.definitions.events import AssetKeyPartitionKey
from dagster._core.definitions.reconstruct import ReconstructableJob
from dagster._core.definitions.target import ExecutableDefinition
from dagster._core.events import (
    AssetMaterializationPlannedData,
    EngineEventData,
    StepMaterializationData,
)
from dagster._core.execution.context.compute import current_execution_context
from dagster._core.storage.tags import ASSET_RESUME_RETRY_TAG, PARENT_RUN_ID_TAG, ROOT_RUN_ID_TAG
from dagster_shared.record import copy

__all__ = [
    "ASSET_RESUME_RETRY_TAG",
    "PARENT_RUN_ID_TAG",
    "ROOT_RUN_ID_TAG",
    "AndAutomationCondition",
    "AssetGraph",
    "AssetKeyPartitionKey",
    "CoercibleToAssetKey",
    "CoercibleToAssetSelection",
    "EntitySubset",
    "ExecutableDefinition",
    "StepMaterializationData",
    "TimingMetadata",
    "add_loaded_input_metadata",
    "asset_graph_of",
    "engine_event",
    "io_manager_key_of",
    "report_engine_event",
    "report_planned_again",
    "running_context",
    "with_executor",
]

AssetGraph = BaseAssetGraph[Any]
"""What a repository's `asset_graph` is. A repository gives it; only its class has no public name."""


def report_engine_event(
    instance: DagsterInstance,
    text: str,
    run: DagsterRun,
    metadata: Mapping[str, Any] | None = None,
    *,
    step_key: str | None = None,
) -> None:
    """A line with metadata in a run's log. Its method is public, the class of its data is not."""
    data = EngineEventData(metadata=dict(metadata or {}))
    instance.report_engine_event(text, run, data, step_key=step_key)


def report_planned_again(
    instance: DagsterInstance, run: DagsterRun, key: AssetKey, partition: str | None, step_key: str | None
) -> None:
    """Say once more that a run intends to materialise an asset, which takes its materialisation back.

    Dagster counts a partition as failed when its newest planned materialisation has none after it and that
    run failed. No public call logs that event.
    """
    data = AssetMaterializationPlannedData(key, partition=partition)
    event = DagsterEvent.build_asset_materialization_planned_event(run.job_name, step_key or "", data)
    instance.report_dagster_event(event, run.run_id)


def engine_event(plan_context: Any, text: str) -> DagsterEvent:
    """The same from inside an executor, which yields it."""
    return DagsterEvent.engine_event(plan_context, text, EngineEventData({}))


def asset_graph_of(job: Any) -> AssetGraph:
    """The assets and checks that a run's job stands among, as its executor is given it."""
    if isinstance(job, ReconstructableJob):
        return job.repository.get_definition().asset_graph
    graph: AssetGraph = job.get_definition().asset_layer.asset_graph
    return graph


def with_executor(definitions: Definitions, executor: ExecutorDefinition) -> Definitions:
    """The same definitions with another default executor. `Definitions.merge` refuses two of them."""
    return copy(definitions, executor=executor)


def io_manager_key_of(graph: AssetGraph, key: AssetKey) -> str | None:
    """The resource key of the IO manager that writes an asset."""
    found: str | None = graph.get(key).assets_def.get_io_manager_key_for_asset_key(key)
    return found


def running_context() -> Any:
    """The context of what executes in this thread, else None. `OpExecutionContext.get()` raises instead."""
    return current_execution_context.get()


def add_loaded_input_metadata(context: InputContext, metadata: Mapping[str, Any]) -> None:
    """Put metadata on the input's LOADED_INPUT event, and nothing else.

    `add_input_metadata` also reports an observation of the upstream asset, which Dagster takes for an update
    of an external asset, and it raises for an input of several partitions.
    """
    context._user_generated_metadata = {**context._user_generated_metadata, **metadata}
