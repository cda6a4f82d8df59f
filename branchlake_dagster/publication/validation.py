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

from branchlake_dagster.errors import ConfigurationError, some
from branchlake_dagster.incremental.consumer import Consumer
from branchlake_dagster.incremental.declaration import declared
from branchlake_dagster.incremental.step_consumption import consumer_of
from branchlake_dagster.internals.dagster import AssetGraph, io_manager_key_of
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.specification import TableSpec, plain, table_name, table_spec
from branchlake_dagster.wording import agree, named

_PREFIX = "branchlake/"
_KNOWN = frozenset(
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


def validate(
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
    mistakes = [*_mistakes(graph, io_manager_key, default_namespace, require_checks)]
    unpartitioned = [*_unpartitioned_checks(graph, io_manager_key)]
    if unpartitioned_checks == "error":
        mistakes += unpartitioned
    elif unpartitioned_checks == "warn":
        for key, why in unpartitioned:
            warnings.warn(f"{key.to_user_string()}: {why}", DefinitionsWarning, stacklevel=3)
    for key, why in _bare_metadata(graph, io_manager_key):
        warnings.warn(f"{key.to_user_string()}: {why}", DefinitionsWarning, stacklevel=3)
    found = [f"- {key.to_user_string()}: {why}" for key, why in mistakes]
    if found:
        assets = len({key for key, _ in mistakes})
        count = "one asset" if assets == 1 else f"{assets} assets"
        raise ConfigurationError(
            "\n".join([f"The definitions have mistakes in {count}.", *found]),
            reason="definitions",
            subject=", ".join(dict.fromkeys(key.to_user_string() for key, _ in mistakes)),
        )


def _mistakes(
    graph: AssetGraph, io_manager_key: str, default_namespace: str, require_checks: bool
) -> Iterator[tuple[AssetKey, str]]:
    checked = {key.asset_key for key in graph.asset_check_keys}
    tables: dict[tuple[str, ...], AssetKey] = {}
    for key in sorted(graph.materializable_asset_keys):
        node = graph.get(key)
        if why := _unchecked(graph, key):
            yield key, why
        if io_manager_key_of(graph, key) != io_manager_key:
            continue
        try:
            spec = table_spec(
                key,
                node.metadata,
                default_namespace=default_namespace,
                partitioned=node.partitions_def is not None,
            )
        except ConfigurationError as error:
            yield key, f"{error.message} {error.hint or ''}".rstrip()
            continue
        if why := _dimensions(spec, node.partitions_def):
            yield key, why
        for name in sorted(one for one in node.metadata if one.startswith(_PREFIX)):
            if name not in _KNOWN:
                yield key, f"its metadata key {name} is read by nobody{_did_you_mean(name)}"
        if why := _consumed(graph, key, default_namespace):
            yield key, why
        if (other := tables.setdefault(spec.identifier, key)) != key:
            table = table_name(spec.identifier)
            yield key, f"its table {table} is {other.to_user_string()}'s too; rename one of them."
        wanted = plain(node.metadata.get(AssetMetadata.REQUIRE_CHECKS))
        if key not in checked and (require_checks if wanted is None else wanted):
            yield key, _NO_CHECK


def _unpartitioned_checks(graph: AssetGraph, io_manager_key: str) -> Iterator[tuple[AssetKey, str]]:
    """The checks that read all partitions although nobody has said that they should."""
    for key in sorted(graph.materializable_asset_keys):
        node = graph.get(key)
        if node.partitions_def is None or io_manager_key_of(graph, key) != io_manager_key:
            continue
        for check in sorted(node.check_keys, key=lambda one: one.name):
            its = graph.get(check)
            if its.partitions_def is None and AssetMetadata.CHECK_SCOPE not in (its.metadata or {}):
                yield key, _NO_PARTITIONS.format(check=check.name)


def _bare_metadata(graph: AssetGraph, io_manager_key: str) -> Iterator[tuple[AssetKey, str]]:
    """Metadata keys that are arguments of `table_metadata`, written as they are."""
    for key in sorted(graph.materializable_asset_keys):
        if io_manager_key_of(graph, key) != io_manager_key:
            continue
        for name in sorted(_ARGUMENTS & graph.get(key).metadata.keys()):
            yield key, f"its metadata key {name} is read by nobody. Write metadata=table_metadata({name}=…)."


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name, _KNOWN, n=1)
    return f". Did you mean {close[0]}?" if close else ". Its own keys are set by table_metadata(…)."


_NO_PARTITIONS = (
    "its check {check} has no partitions_def, so it reads the whole table on every run, and one bad row of an"
    " old partition blocks every new one. Add partitions_def=… to @dg.asset_check, the same as the asset's;"
    ' or metadata={{"branchlake/scope": "table"}} if the check is about the whole table.'
)


def _unchecked(graph: AssetGraph, key: AssetKey) -> str | None:
    """Which checks of an asset a live ingestion would publish rows without: it runs none but its own."""
    node = graph.get(key)
    ingestion = plain(node.metadata.get(AssetMetadata.LIVE_INGESTION))
    others = {one for one in graph.asset_check_keys if one.asset_key == key} - {*node.assets_def.check_keys}
    if ingestion is None or not others:
        return None
    names = sorted(one.name for one in others)
    return (
        f"the live run of ingestion {ingestion} would publish its rows without {named('check', names)}. Leave"
        " that run out with ingest_definitions(…, live=False), which leaves one batch a run; or declare the"
        " promise as the table's contract, which both ways hold."
    )


_NO_CHECK = (
    "no check is defined for it, so no run of it would be published. Add one (pandera_checks, sql_check or"
    " Dagster's own), or say table_metadata(require_checks=False)."
)


def _consumed(graph: AssetGraph, key: AssetKey, default_namespace: str) -> str | None:
    """What is wrong with the changes that an asset says it consumes."""
    node = graph.get(key)
    try:
        declaration = declared(node.metadata, asset=key.to_user_string())
        if declaration is None:
            return None
        consumer = consumer_of(
            node.to_asset_spec(),
            declaration,
            node.partitions_def,
            default_namespace,
            node.assets_def.get_partition_mapping,
        )
    except ConfigurationError as error:
        return error.message
    mappings = {one: node.assets_def.get_partition_mapping(one) for one in declaration.inputs}
    moved = sorted(
        one.to_user_string()
        for one, mapping in mappings.items()
        if not _can_be_inverted(mapping, consumer, graph.get(one).partitions_def if graph.has(one) else None)
    )
    if consumer.by_partition and moved:
        return (
            f"it consumes changes of {some(tuple(moved))} by a partition mapping that does not tell which of"
            " its partitions a changed row affects, so results that depend on it would stay as they are."
            " Leave the mapping out, say widen=… in consumes(), or do not name the input there: then it is"
            " read as usual."
        )
    strangers = sorted(one.to_user_string() for one in declaration.inputs.keys() - node.parent_keys)
    if strangers:
        told = some(tuple(strangers))
        return f"it consumes changes of {told}, on which it does not depend; name them in deps."
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
        return (mapping.start_offset == 0 and mapping.end_offset == 0) or _same_windows(
            consumer.definition, upstream
        )
    by_value = IdentityPartitionMapping | MultiToSingleDimensionPartitionMapping
    return mapping is None or isinstance(mapping, by_value)


def _same_windows(own: PartitionsDefinition[str] | None, other: PartitionsDefinition[str] | None) -> bool:
    if not isinstance(own, TimeWindowPartitionsDefinition):
        return False
    return isinstance(other, TimeWindowPartitionsDefinition) and (own.cron_schedule, own.timezone) == (
        other.cron_schedule,
        other.timezone,
    )


def _dimensions(spec: TableSpec, definition: Any) -> str | None:
    """What does not fit between the asset's partitions and its columns."""
    if not spec.columns_by_dimension or definition is None:
        return None
    columns = spec.columns_by_dimension.keys()
    if not isinstance(definition, MultiPartitionsDefinition):
        if "" in columns:
            return None
        return "it names columns by dimension, but its partitions have one dimension; name the column alone."
    names = {one.name for one in definition.partitions_defs}
    listed = some(tuple(sorted(names)))
    if "" in columns:
        return (
            f"its partitions have the dimensions {listed}, but partition_by names one column alone;"
            " say partition_by={dimension: column}."
        )
    if unknown := columns - names:
        return f"its partitions have no dimension {some(tuple(sorted(unknown)))}; they have {listed}."
    if missing := names - columns:
        have, it = agree(len(missing), "has", "have"), agree(len(missing), "it", "them")
        return f"its {named('dimension', sorted(missing))} {have} no column; name {it} in partition_by."
    return None
