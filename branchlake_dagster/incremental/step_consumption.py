"""The consumption of a step: one object that the step's inputs, its output and the asset share."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from dagster import (
    AssetKey,
    AssetSpec,
    PartitionMapping,
    PartitionsDefinition,
    TimeWindowPartitionsDefinition,
    partition_loading_context,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.incremental.affected_partitions import build_reach, dimension_definitions
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import Consumer, Declaration, parse_declaration
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import TableSpec, parse_table_spec, table_identifier

_MAX_LIVE = 16
_lock = threading.Lock()
_live: OrderedDict[tuple[int, str, str, int], Consumption] = OrderedDict()


def consumption_of(step: Any, lake: LakehouseResource) -> Consumption | None:
    """Return the consumption of a step; None if its asset consumes no changes.

    Each call in one attempt of a step returns the same object. `step` is Dagster's StepExecutionContext.
    Raises ConfigurationError.
    """
    assets = step.assets_def
    if assets is None:
        return None
    declarations = [
        (spec, candidate)
        for spec in assets.specs
        if (candidate := parse_declaration(spec.metadata, asset=spec.key.to_user_string())) is not None
    ]
    if not declarations:
        return None
    if len(declarations) > 1 or len(assets.keys) > 1:
        raise ConfigurationError(
            f"Step {step.step.key} materializes several assets, and one of them consumes changes.",
            hint="Define an asset that consumes changes in a function of its own.",
        )
    cache_key = os.getpid(), step.run_id, step.step.key, step.previous_attempt_count
    with _lock:
        if cache_key not in _live:
            spec, declaration = declarations[0]
            consumer = build_consumer(
                spec,
                declaration,
                assets.partitions_def,
                _default_namespace(lake),
                assets.get_partition_mapping,
            )
            partitions = _run_partitions(step, assets.partitions_def) if consumer.tracks_partitions else ()
            _live[cache_key] = Consumption(
                lake,
                consumer,
                partitions=tuple(partitions),
                rebuild=step.dagster_run.tags.get(RunTag.REBUILD, "").lower() in ("true", "1", "yes"),
                instance=step.instance,
            )
            while len(_live) > _MAX_LIVE:
                _live.popitem(last=False)
        return _live[cache_key]


def _run_partitions(step: Any, definition: PartitionsDefinition[str]) -> Sequence[str]:
    """Return the partitions of the run: one partition, or all of a range.

    `step` is Dagster's StepExecutionContext. `definition` is the partition definition of the step's asset.
    """
    with partition_loading_context(dynamic_partitions_store=step.instance):
        return definition.get_partition_keys_in_range(step.partition_key_range)


def _default_namespace(lake: LakehouseResource) -> str:
    return lake.lakehouse.settings.default_namespace


def build_consumer(
    spec: AssetSpec,
    declaration: Declaration,
    definition: PartitionsDefinition[str] | None,
    default_namespace: str,
    mapping_of: Callable[[AssetKey], PartitionMapping | None] = lambda _: None,
) -> Consumer:
    """Combine an asset and its declaration into a `Consumer`.

    `mapping_of` returns the partition mapping of an input. Raises ConfigurationError if the declaration does
    not fit the asset's write mode, keys or partitions.
    """
    asset = spec.key.to_user_string()
    table = parse_table_spec(
        spec.key, spec.metadata, default_namespace=default_namespace, partitioned=definition is not None
    )
    if problem := _find_mode_problem(declaration, table, partitioned=definition is not None):
        raise ConfigurationError(f"consumes() of {asset}: {problem}", table=table.name)
    inputs = {key: table_identifier(key, default_namespace) for key in declaration.inputs}
    reaches = {key: build_reach(mapping_of(key), declaration.widen) for key in inputs}
    consumer = Consumer(asset, table, declaration, inputs, definition, reaches)
    if problem := _find_reach_problem(consumer):
        raise ConfigurationError(f"consumes() of {asset}: {problem}", table=table.name)
    if problem := _find_order_problem(consumer):
        raise ConfigurationError(
            f"consumes() of {asset}: {problem}",
            table=table.name,
            hint="Partition the asset by time, and name the column of that dimension in partition_by. Or"
            " remove its partitions.",
        )
    return consumer


def _find_order_problem(consumer: Consumer) -> str | None:
    """Return why the partitions cannot be computed in order; None if they can or need not.

    The reason is part of a sentence.
    """
    if not consumer.declaration.from_start or consumer.definition is None:
        return None
    time_dimensions = [
        name
        for name, part in dimension_definitions(consumer.definition).items()
        if isinstance(part, TimeWindowPartitionsDefinition) and name in consumer.spec.columns_by_dimension
    ]
    if len(time_dimensions) == 1:
        return None
    return (
        "with from_start=True each partition is computed from the one before it, so exactly one partition"
        f" dimension must have time windows and a column. This asset has {len(time_dimensions)}."
    )


def _find_reach_problem(consumer: Consumer) -> str | None:
    """Return why results cannot depend on rows outside their own window, as a sentence; None if they can."""
    if all(reach.is_own_window for reach in consumer.reaches.values()):
        return None
    if "rows" in consumer.declaration.patterns:
        return (
            "the pattern `rows` does not work with widen=… or a partition mapping with offsets, because each"
            " result comes from one row. Use `range` or `keys`."
        )
    has_time_windows = consumer.definition is not None and any(
        isinstance(dimension_definitions(consumer.definition).get(name), TimeWindowPartitionsDefinition)
        for name in consumer.spec.columns_by_dimension
    )
    if not has_time_windows and (consumer.tracks_partitions or "range" not in consumer.declaration.patterns):
        return "widen=… needs partitions or ranges by time, and the asset has neither."
    return None


def _find_mode_problem(declaration: Declaration, table: TableSpec, *, partitioned: bool) -> str | None:
    mode = table.write_mode
    if "rows" in declaration.patterns and mode == "replace_partitions":
        return f"the pattern `rows` does not work with the write mode {mode}. Append, upsert or replace."
    if declaration.when_removed == "apply" and mode != "upsert":
        return f"when_removed='apply' needs the write mode upsert, but the asset has {mode}."
    if "keys" in declaration.patterns:
        if mode != "upsert":
            return f"the pattern `keys` needs the write mode upsert, but the asset has {mode}."
        if not set(declaration.keys) <= set(table.keys):
            return "some of its keys are not keys of the upsert, so old rows could not be found."
    if "range" in declaration.patterns:
        if mode in ("append", "upsert"):
            return f"the pattern `range` replaces rows, so it does not work with the write mode {mode}."
        if not partitioned and not declaration.range_column:
            return (
                "the pattern `range` of an asset without partitions needs on=…, or into=… if its inputs name"
                " different columns."
            )
    return None
