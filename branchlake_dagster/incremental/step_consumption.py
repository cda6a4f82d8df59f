"""The consumption of a step of a run, one for all who ask: its inputs, its output, the asset itself."""

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
from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import Declaration, parse_declaration
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import TableSpec, parse_table_spec, table_identifier

_MAX_LIVE = 16
_lock = threading.Lock()
_live: OrderedDict[tuple[int, str, str, int], Consumption] = OrderedDict()


def consumption_of(step: Any, lake: LakehouseResource) -> Consumption | None:
    """What the asset of a step consumes; None: no changes. `step` is Dagster's context of the step.

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
            f"{step.step.key} makes several assets, and one of them consumes changes.",
            hint="Let an asset that consumes changes be the only one of its function.",
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
    """The partitions of the run, of which one process may have a range."""
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
    """An asset with what it declares. Raises ConfigurationError when that does not fit its table.

    `mapping_of` is the partition mapping of an input.
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
            hint="Partition it by time, and name that dimension's column in partition_by; or leave its"
            " partitions out.",
        )
    return consumer


def _find_order_problem(consumer: Consumer) -> str | None:
    """What is wrong with partitions that would each be computed from the one before it."""
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
        "with from_start=True each partition is computed from the one before it, so exactly one dimension of"
        f" its partitions must be windows of time with a column, and {len(time_dimensions)} are."
    )


def _find_reach_problem(consumer: Consumer) -> str | None:
    """What is wrong with results that depend on rows beside their own."""
    if all(reach.is_own_window for reach in consumer.reaches.values()):
        return None
    if "rows" in consumer.declaration.patterns:
        return (
            "with the pattern `rows` each result comes from one row, so widen=… and a partition mapping with"
            " offsets have no meaning; use `range` or `keys`."
        )
    has_time_windows = consumer.definition is not None and any(
        isinstance(dimension_definitions(consumer.definition).get(name), TimeWindowPartitionsDefinition)
        for name in consumer.spec.columns_by_dimension
    )
    if not has_time_windows and (consumer.tracks_partitions or "range" not in consumer.declaration.patterns):
        return "widen=… is about time, and neither its partitions nor its ranges are."
    return None


def _find_mode_problem(declaration: Declaration, table: TableSpec, *, partitioned: bool) -> str | None:
    mode = table.write_mode
    if "rows" in declaration.patterns and mode == "replace_partitions":
        return f"changed rows are appended, merged or make a new table, and its write mode is {mode}."
    if declaration.when_removed == "apply" and mode != "upsert":
        return f"when_removed='apply' needs the keys of an upsert, and its write mode is {mode}."
    if "keys" in declaration.patterns:
        if mode != "upsert":
            return f"what is computed of changed keys is an upsert, and its write mode is {mode}."
        if not set(declaration.keys) <= set(table.keys):
            return "its keys are not all among the keys of the upsert, so old rows could not be found."
    if "range" in declaration.patterns:
        if mode in ("append", "upsert"):
            return f"what is computed of changed ranges replaces them, and its write mode is {mode}."
        if not partitioned and not declaration.range_column:
            return (
                "the pattern `range` of an asset without partitions needs on=…, or into=… where its inputs"
                " name different columns."
            )
    return None
