"""Mistakes in a lake's assets, found when their definitions load instead of when their runs are blocked."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from dagster import (
    AssetKey,
    Definitions,
    IdentityPartitionMapping,
    MultiPartitionsDefinition,
    MultiToSingleDimensionPartitionMapping,
    PartitionMapping,
    PartitionsDefinition,
    TimeWindowPartitionMapping,
    TimeWindowPartitionsDefinition,
)

from branchlake_dagster.errors import ConfigurationError, format_first_values
from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetGraph, io_manager_key_of
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.specification import (
    TableSpec,
    format_table_name,
    parse_table_spec,
    unwrap_metadata,
)
from branchlake_dagster.wording import format_names, pluralize

_PREFIX = "branchlake/"
_METADATA_KEYS = frozenset(
    (
        AssetMetadata.WRITE_MODE,
        AssetMetadata.KEYS,
        AssetMetadata.REQUIRE_CHECKS,
        AssetMetadata.ISOLATION,
        AssetMetadata.COLUMNS,
        AssetMetadata.EXCLUSIVE,
        AssetMetadata.PREVIEW_ROWS,
        AssetMetadata.LAYOUT,
        AssetMetadata.PROPERTIES,
        AssetMetadata.CONSUMES,
        AssetMetadata.LIVE_INGESTION,
    )
)
"""The metadata keys of assets that are read."""
_ARGUMENTS = frozenset(("write_mode", "partition_by", "require_checks"))
"""Of `table_metadata`; the others are words that other metadata may use."""


class DefinitionsWarning(UserWarning):
    """Something in the definitions is probably not meant so.

    A check of a partitioned asset reads the whole table on every run; or an asset has a metadata key that
    nobody reads. Python's own filters decide whether it is shown.

    Examples:
        .. code-block:: python

            import warnings

            from branchlake_dagster import DefinitionsWarning

            warnings.simplefilter("error", DefinitionsWarning)  # as in tests
    """


def validate_definitions(
    definitions: Definitions,
    *,
    io_manager_key: str,
    default_namespace: str,
    require_checks: bool,
    unpartitioned_checks: Literal["warn", "error", "allow"] = "error",
) -> None:
    """Raise one ConfigurationError that names every asset that could not be written or published.

    Looked at are the assets of the IO manager: the table's name, write mode, keys, partition columns,
    isolation; two assets of one table; with `require_checks` an asset without any check; checks of a
    partitioned asset that have no partitions, for which `unpartitioned_checks` may ask for a
    DefinitionsWarning instead, or nothing. Metadata keys that look like arguments of `table_metadata` are a
    DefinitionsWarning. And the tables of ingestions that have a live run: checks
    of the user's on them, which that run would not make.
    """
    graph = definitions.resolve_asset_graph()
    mistakes = [*_find_mistakes(graph, io_manager_key, default_namespace, require_checks)]
    check_mistakes = [*_find_unscoped_checks(graph, io_manager_key)]
    if unpartitioned_checks == "error":
        mistakes += check_mistakes
    elif unpartitioned_checks == "warn":
        for key, why in check_mistakes:
            warnings.warn(f"{key.to_user_string()}: {why}", DefinitionsWarning, stacklevel=3)
    for key, why in _find_bare_metadata(graph, io_manager_key):
        warnings.warn(f"{key.to_user_string()}: {why}", DefinitionsWarning, stacklevel=3)
    lines = [f"- {key.to_user_string()}: {why}" for key, why in mistakes]
    if lines:
        assets = len({key for key, _ in mistakes})
        count = "one asset" if assets == 1 else f"{assets} assets"
        raise ConfigurationError(
            "\n".join([f"The definitions have mistakes in {count}.", *lines]),
            reason="definitions",
            subject=", ".join(dict.fromkeys(key.to_user_string() for key, _ in mistakes)),
        )


def _find_mistakes(
    graph: AssetGraph, io_manager_key: str, default_namespace: str, require_checks: bool
) -> Iterator[tuple[AssetKey, str]]:
    checked = {key.asset_key for key in graph.asset_check_keys}
    tables: dict[tuple[str, ...], AssetKey] = {}
    for key in sorted(graph.materializable_asset_keys):
        node = graph.get(key)
        if why := _find_unchecked(graph, key):
            yield key, why
        if io_manager_key_of(graph, key) != io_manager_key:
            continue
        try:
            spec = parse_table_spec(
                key,
                node.metadata,
                default_namespace=default_namespace,
                partitioned=node.partitions_def is not None,
            )
        except ConfigurationError as error:
            yield key, f"{error.message} {error.hint or ''}".rstrip()
            continue
        if why := _find_dimension_mistake(spec, node.partitions_def):
            yield key, why
        for name in sorted(
            metadata_key for metadata_key in node.metadata if metadata_key.startswith(_PREFIX)
        ):
            if name not in _METADATA_KEYS:
                yield key, f"its metadata key {name} is read by nobody{_suggest_key(name)}"
        if why := _find_consumer_mistake(graph, key, default_namespace):
            yield key, why
        if (other := tables.setdefault(spec.identifier, key)) != key:
            table = format_table_name(spec.identifier)
            yield key, f"its table {table} is {other.to_user_string()}'s too; rename one of them."
        demands_checks = unwrap_metadata(node.metadata.get(AssetMetadata.REQUIRE_CHECKS))
        if key not in checked and (require_checks if demands_checks is None else demands_checks):
            yield key, _NO_CHECK


def _find_unscoped_checks(graph: AssetGraph, io_manager_key: str) -> Iterator[tuple[AssetKey, str]]:
    """The checks that read all partitions although nobody has said that they should."""
    for key in sorted(graph.materializable_asset_keys):
        node = graph.get(key)
        if node.partitions_def is None or io_manager_key_of(graph, key) != io_manager_key:
            continue
        for check in sorted(node.check_keys, key=lambda check_key: check_key.name):
            check_node = graph.get(check)
            if check_node.partitions_def is None and AssetMetadata.CHECK_SCOPE not in (
                check_node.metadata or {}
            ):
                yield key, _NO_PARTITIONS.format(check=check.name)


def _find_bare_metadata(graph: AssetGraph, io_manager_key: str) -> Iterator[tuple[AssetKey, str]]:
    """Metadata keys that are arguments of `table_metadata`, written as they are."""
    for key in sorted(graph.materializable_asset_keys):
        if io_manager_key_of(graph, key) != io_manager_key:
            continue
        for name in sorted(_ARGUMENTS & graph.get(key).metadata.keys()):
            yield key, f"its metadata key {name} is read by nobody. Write metadata=table_metadata({name}=…)."


def _suggest_key(name: str) -> str:
    close = difflib.get_close_matches(name, _METADATA_KEYS, n=1)
    return f". Did you mean {close[0]}?" if close else ". Its own keys are set by table_metadata(…)."


_NO_PARTITIONS = (
    "its check {check} has no partitions_def, so it reads the whole table on every run, and one bad row of an"
    " old partition blocks every new one. Add partitions_def=… to @dg.asset_check, the same as the asset's;"
    ' or metadata={{"branchlake/scope": "table"}} if the check is about the whole table.'
)


def _find_unchecked(graph: AssetGraph, key: AssetKey) -> str | None:
    """Which checks of an asset a live ingestion would publish rows without: it runs none but its own."""
    node = graph.get(key)
    ingestion = unwrap_metadata(node.metadata.get(AssetMetadata.LIVE_INGESTION))
    other_checks = {check_key for check_key in graph.asset_check_keys if check_key.asset_key == key} - {
        *node.assets_def.check_keys
    }
    if ingestion is None or not other_checks:
        return None
    names = sorted(check_key.name for check_key in other_checks)
    return (
        f"the live run of ingestion {ingestion} would publish its rows without"
        f" {format_names('check', names)}. Leave"
        " that run out with ingest_definitions(…, live=False), which leaves one batch a run; or declare the"
        " promise as the table's contract, which both ways hold."
    )


_NO_CHECK = (
    "no check is defined for it, so no run of it would be published. Add one (pandera_checks, sql_check or"
    " Dagster's own), or say table_metadata(require_checks=False)."
)


def _find_consumer_mistake(graph: AssetGraph, key: AssetKey, default_namespace: str) -> str | None:
    """What is wrong with the changes that an asset says it consumes."""
    node = graph.get(key)
    try:
        declaration = parse_declaration(node.metadata, asset=key.to_user_string())
        if declaration is None:
            return None
        consumer = build_consumer(
            node.to_asset_spec(),
            declaration,
            node.partitions_def,
            default_namespace,
            node.assets_def.get_partition_mapping,
        )
    except ConfigurationError as error:
        return error.message
    mappings = {
        input_key: node.assets_def.get_partition_mapping(input_key) for input_key in declaration.inputs
    }
    untraceable_inputs = sorted(
        input_key.to_user_string()
        for input_key, mapping in mappings.items()
        if not _can_be_inverted(
            mapping, consumer, graph.get(input_key).partitions_def if graph.has(input_key) else None
        )
    )
    if consumer.tracks_partitions and untraceable_inputs:
        return (
            f"it consumes changes of {format_first_values(tuple(untraceable_inputs))} by a partition mapping"
            " that does not tell which of"
            " its partitions a changed row affects, so results that depend on it would stay as they are."
            " Leave the mapping out, say widen=… in consumes(), or do not name the input there: then it is"
            " read as usual."
        )
    unrelated_inputs = sorted(
        input_key.to_user_string() for input_key in declaration.inputs.keys() - node.parent_keys
    )
    if unrelated_inputs:
        input_names = format_first_values(tuple(unrelated_inputs))
        return f"it consumes changes of {input_names}, on which it does not depend; name them in deps."
    if len(node.assets_def.keys) > 1:
        return "it consumes changes, and its function makes other assets too; give it a function of its own."
    return None


def _can_be_inverted(
    mapping: PartitionMapping | None, consumer: Consumer, upstream: PartitionsDefinition[str] | None
) -> bool:
    """Whether the values of a changed row tell which partitions depend on it.

    Offsets count the input's partitions. They can be followed where those are the asset's own windows.
    """
    if isinstance(mapping, TimeWindowPartitionMapping):
        return (mapping.start_offset == 0 and mapping.end_offset == 0) or _has_same_windows(
            consumer.definition, upstream
        )
    by_value = IdentityPartitionMapping | MultiToSingleDimensionPartitionMapping
    return mapping is None or isinstance(mapping, by_value)


def _has_same_windows(
    consumer_windows: PartitionsDefinition[str] | None, input_windows: PartitionsDefinition[str] | None
) -> bool:
    if not isinstance(consumer_windows, TimeWindowPartitionsDefinition):
        return False
    return isinstance(input_windows, TimeWindowPartitionsDefinition) and (
        consumer_windows.cron_schedule,
        consumer_windows.timezone,
    ) == (
        input_windows.cron_schedule,
        input_windows.timezone,
    )


def _find_dimension_mistake(spec: TableSpec, definition: Any) -> str | None:
    """What does not fit between the asset's partitions and its columns."""
    if not spec.columns_by_dimension or definition is None:
        return None
    columns = spec.columns_by_dimension.keys()
    if not isinstance(definition, MultiPartitionsDefinition):
        if "" in columns:
            return None
        return "it names columns by dimension, but its partitions have one dimension; name the column alone."
    names = {dimension.name for dimension in definition.partitions_defs}
    listed = format_first_values(tuple(sorted(names)))
    if "" in columns:
        return (
            f"its partitions have the dimensions {listed}, but partition_by names one column alone;"
            " say partition_by={dimension: column}."
        )
    if unknown := columns - names:
        return f"its partitions have no dimension {format_first_values(tuple(sorted(unknown)))}; they have {listed}."
    if missing := names - columns:
        verb, pronoun = pluralize(len(missing), "has", "have"), pluralize(len(missing), "it", "them")
        return f"its {format_names('dimension', sorted(missing))} {verb} no column; name {pronoun} in partition_by."
    return None
