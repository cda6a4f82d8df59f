"""Build the definitions of a lake for a code location, and find mistakes in its assets when they load.

`branchlake_definitions` builds the resources, sensors, jobs and schedules of a lake, which can be merged into
any `Definitions`. `validate_definitions` reports mistakes in a lake's assets at load time. Without it, a
mistake would appear only when a run is blocked.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from dagster import (
    AssetKey,
    Definitions,
    Executor,
    ExecutorDefinition,
    IdentityPartitionMapping,
    MultiPartitionsDefinition,
    MultiToSingleDimensionPartitionMapping,
    PartitionMapping,
    PartitionsDefinition,
    TimeWindowPartitionMapping,
    TimeWindowPartitionsDefinition,
    multi_or_in_process_executor,
)

from branchlake_dagster.cleanup.jobs import dead_writer_sensor, reap_job, reap_schedule
from branchlake_dagster.errors import ConfigurationError, format_first_values
from branchlake_dagster.incremental.declaration import Consumer, parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetGraph, io_manager_key_of, returns_frame, with_executor
from branchlake_dagster.io_manager.io_manager import NessieBranchIOManager
from branchlake_dagster.publication.publication_sensor import publication_sensor
from branchlake_dagster.publication.run_publication import publish_at_end
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster.tables.specification import (
    TableSpec,
    format_table_name,
    parse_table_spec,
    unwrap_metadata,
)
from branchlake_dagster.undo.undo_job import undo_job
from branchlake_dagster.wording import format_names, pluralize

_PREFIX = "branchlake/"
_METADATA_KEYS = frozenset(
    (
        AssetMetadata.WRITE_MODE,
        AssetMetadata.KEYS,
        AssetMetadata.WHEN_MATCHED,
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
"""The metadata keys of assets that branchlake reads."""
_ARGUMENTS = frozenset(("write_mode", "partition_by", "require_checks"))
"""Arguments of `table_metadata` that are a mistake as metadata keys.

The other arguments are common words, which other metadata may use.
"""


class DefinitionsWarning(UserWarning):
    """A warning about definitions that are probably not intended.

    A check of a partitioned asset reads the whole table on every run, or an asset has a metadata key that
    branchlake does not read. Python's own filters decide whether the warning is shown.

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
    """Raise one ConfigurationError with all assets that could not be written or published.

    These mistakes of the IO manager's assets are found:

    - an invalid table name, write mode, key, partition column or isolation
    - two assets of one table, and a table that has the name of another table's namespace
    - an asset without any check, with `require_checks`
    - checks without `partitions_def` of a partitioned asset, unless their scope is declared;
      `unpartitioned_checks` can turn these errors into a DefinitionsWarning, or allow such checks
    - user checks on tables of ingestions with a live run, because that run would not execute them

    Metadata keys that look like arguments of `table_metadata` cause a DefinitionsWarning. So does a namespace
    with the name of a table, if the assets are not annotated with a frame and so may have no tables.
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
        if why := _find_dimension_mistake(
            spec, node.partitions_def, consumes_changes=AssetMetadata.CONSUMES in node.metadata
        ):
            yield key, why
        for name in sorted(
            metadata_key for metadata_key in node.metadata if metadata_key.startswith(_PREFIX)
        ):
            if name not in _METADATA_KEYS:
                yield key, f"branchlake does not read its metadata key {name}{_suggest_key(name)}"
        if why := _find_consumer_mistake(graph, key, default_namespace):
            yield key, why
        if (other := tables.setdefault(spec.identifier, key)) != key:
            table = format_table_name(spec.identifier)
            yield (
                key,
                f"its table {table} also belongs to {other.to_user_string()}. Rename one of them.",
            )
        demands_checks = unwrap_metadata(node.metadata.get(AssetMetadata.REQUIRE_CHECKS))
        if key not in checked and (require_checks if demands_checks is None else demands_checks):
            yield key, _NO_CHECK
    for identifier, key in tables.items():
        for length in range(1, len(identifier)):
            if (table_owner := tables.get(identifier[:length])) is not None:
                namespace = format_table_name(identifier[:length])
                mistake = (
                    f"the namespace {namespace} of its table is the table of {table_owner.to_user_string()}."
                    " Rename one of them."
                )
                if returns_frame(graph, table_owner) and returns_frame(graph, key):
                    yield key, mistake
                else:
                    # An asset that returns None or a MaterializeResult may have no table.
                    message = f"{key.to_user_string()}: if both assets have tables, {mistake}"
                    warnings.warn(message, DefinitionsWarning, stacklevel=4)


def _find_unscoped_checks(graph: AssetGraph, io_manager_key: str) -> Iterator[tuple[AssetKey, str]]:
    """Yield a mistake for each check of a partitioned asset without `partitions_def` and declared scope.

    A mistake is an asset key and the text of the mistake.
    """
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
    """Yield (asset key, mistake) for each metadata key that should be an argument of `table_metadata`.

    Only assets with this IO manager are inspected.
    """
    for key in sorted(graph.materializable_asset_keys):
        if io_manager_key_of(graph, key) != io_manager_key:
            continue
        for name in sorted(_ARGUMENTS & graph.get(key).metadata.keys()):
            yield (
                key,
                f"branchlake does not read its metadata key {name}. Write metadata=table_metadata({name}=…).",
            )


def _suggest_key(name: str) -> str:
    close = difflib.get_close_matches(name, _METADATA_KEYS, n=1)
    return f". Did you mean {close[0]}?" if close else ". Use table_metadata(…) to set its keys."


_NO_PARTITIONS = (
    "its check {check} has no partitions_def. It reads the whole table on every run, so one bad row of an old"
    " partition blocks every new partition. Add the asset's partitions_def=… to @dg.asset_check, or"
    ' metadata={{"branchlake/scope": "table"}} if the check is about the whole table.'
)


def _find_unchecked(graph: AssetGraph, key: AssetKey) -> str | None:
    """Return a mistake if a live ingestion fills the asset and would not execute all checks; None otherwise.

    A live ingestion executes only the checks that are defined together with the asset.
    """
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
        f" {format_names('check', names)}. Omit"
        " the live run with ingest_definitions(…, live=False): then each run ingests one batch. Or declare"
        " the"
        " promise in the table's contract, which both kinds of runs check."
    )


_NO_CHECK = (
    "it has no check, so its runs would not be published. Add a check (pandera_checks, sql_check or Dagster's"
    " own), or declare table_metadata(require_checks=False)."
)


def _find_consumer_mistake(graph: AssetGraph, key: AssetKey, default_namespace: str) -> str | None:
    """Return the mistake in an asset's declaration of consumed changes, as a sentence or part of one.

    None if the declaration is correct, or if the asset has none. `default_namespace` is the namespace of
    tables whose declared names have none.
    """
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
            " that does not show which of its partitions a changed row affects. Results that depend on the"
            " row"
            " would not be updated. Remove the mapping, declare widen=… in consumes(), or remove the input"
            " from consumes(); then the whole input is read."
        )
    unrelated_inputs = sorted(
        input_key.to_user_string() for input_key in declaration.inputs.keys() - node.parent_keys
    )
    if unrelated_inputs:
        input_names = format_first_values(tuple(unrelated_inputs))
        return f"it consumes changes of {input_names}, but does not depend on them. Add them to deps."
    if len(node.assets_def.keys) > 1:
        return "it consumes changes, and its function creates other assets too. Give it its own function."
    return None


def _can_be_inverted(
    mapping: PartitionMapping | None, consumer: Consumer, upstream: PartitionsDefinition[str] | None
) -> bool:
    """Return whether a changed row of an input shows which partitions of the consumer depend on it.

    True without a mapping and for mappings by value. The offsets of a TimeWindowPartitionMapping count
    partitions of the input, so offsets other than 0 need an input with the same time windows as the consumer.
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


def _find_dimension_mistake(spec: TableSpec, definition: Any, *, consumes_changes: bool) -> str | None:
    """Return, as part of a sentence, why the asset's partitions and its partition columns do not match.

    None if they match. `definition` is the asset's partitions definition or None. An asset that consumes
    changes (`consumes_changes`) chooses its write mode in each run.
    """
    if not spec.columns_by_dimension:
        return None
    if definition is None:
        if spec.write_mode != "replace_partitions" or consumes_changes:
            return None
        return (
            "it names a partition column, but has no partitions, so each run would replace the whole table."
            " Give it a partitions_def, or name columns that only split its files in layout."
        )
    columns = spec.columns_by_dimension.keys()
    if not isinstance(definition, MultiPartitionsDefinition):
        if "" in columns:
            return None
        return "it names columns by dimension, but its partitions have one dimension. Name only the column."
    names = {dimension.name for dimension in definition.partitions_defs}
    listed = format_first_values(tuple(sorted(names)))
    if "" in columns:
        return (
            f"its partitions have the dimensions {listed}, but partition_by names only a column."
            " Write partition_by={dimension: column}."
        )
    if unknown := columns - names:
        others = format_first_values(tuple(sorted(unknown)))
        return f"its partitions have no dimension {others}; they have {listed}."
    if missing := names - columns:
        verb, pronoun = pluralize(len(missing), "has", "have"), pluralize(len(missing), "it", "them")
        dimensions = format_names("dimension", sorted(missing))
        return f"its {dimensions} {verb} no column. Add {pronoun} to partition_by."
    if len({*spec.columns_by_dimension.values()}) < len(columns):
        return f"its dimensions {listed} share a column. Name a column for each of them in partition_by."
    return None


def branchlake_definitions(
    settings: Settings | None = None,
    definitions: Definitions | None = None,
    *,
    lakehouse: LakehouseResource | None = None,
    name: str | None = None,
    lakehouse_key: str | None = None,
    spark_key: str | None = None,
    io_manager_key: str | None = None,
) -> Definitions:
    """Create the definitions of a lake: IO manager, Spark session, publication sensor and reaper.

    With `definitions`, the result contains them, and mistakes in the assets of this lake are errors at load
    time instead of blocked runs later. Runs then judge and publish themselves at their end, because the
    executor is wrapped in `publish_at_end`. Without `definitions`, the result can be merged into any other
    `Definitions`. Then the publication sensor judges and publishes all runs.

    Args:
        settings (Optional[Settings]): The lake's settings; they apply to every resource. (default: those of
            `lakehouse`, else those of the environment, `BRANCHLAKE_…`)
        definitions (Optional[Definitions]): Your assets, checks, jobs, schedules, sensors and other
            resources.
        lakehouse (Optional[LakehouseResource]): The lake's resource, if its fields come from `dg.EnvVar`.
        name (Optional[str]): The lake's name, if one code location has several lakes. It comes before the
            names of sensors, job and schedule, and before the default resource keys (`archive_io_manager`).
        lakehouse_key (Optional[str]): The resource key of the lake. (default: `lakehouse`)
        spark_key (Optional[str]): The resource key of the run's Spark session. (default: `spark`)
        io_manager_key (Optional[str]): The resource key of the IO manager. (default: `io_manager`, the key of
            all assets that do not name one)

    Returns:
        Definitions: Those of the lake, merged with `definitions` if given.

    Raises:
        ConfigurationError: Assets in `definitions` could not be written or published; the message names each.
            Or `settings` are definitions (reason `definitions_as_settings`).

    Warns:
        DefinitionsWarning: A check of a partitioned asset does not have a `partitions_def`, so it reads the
            whole table on every run; the setting `unpartitioned_checks` makes this an error, or allows it.
            Or an asset has a metadata key that branchlake does not read.

    Examples:
        .. code-block:: python

            import dagster as dg
            import polars as pl

            from branchlake_dagster import Settings, branchlake_definitions, sql_check

            @dg.asset
            def prices() -> pl.DataFrame:
                return pl.DataFrame({"item": ["a", "b"], "eur": [1.0, 2.5]})

            positive = sql_check(prices, "positive", "SELECT * FROM {this} WHERE eur <= 0")

            defs = branchlake_definitions(
                Settings(default_namespace="shop"),
                dg.Definitions(assets=[prices], asset_checks=[positive]),
            )
    """
    if isinstance(settings, Definitions):
        raise ConfigurationError(
            "branchlake_definitions got Definitions as its settings.",
            hint="Name the argument: branchlake_definitions(definitions=…).",
            reason="definitions_as_settings",
        )
    example = "Write branchlake_definitions(Settings(…), dg.Definitions(assets=[…]))."
    for argument, value, expected, hint in (
        ("settings", settings, Settings, example),
        ("definitions", definitions, Definitions, example),
        (
            "lakehouse",
            lakehouse,
            LakehouseResource,
            "Write branchlake_definitions(lakehouse=LakehouseResource(…)). Settings are the first argument.",
        ),
    ):
        if value is not None and not isinstance(value, expected):
            raise ConfigurationError(
                f"The argument {argument} of branchlake_definitions is a {type(value).__name__}.",
                hint="Call it, and pass the result, also for a function with @dg.definitions."
                if callable(value)
                else hint,
                reason="argument_type",
                subject=argument,
            )
    if lakehouse is None:
        settings = settings or Settings()
        lakehouse = LakehouseResource.from_settings(settings)
    elif settings is None:
        settings = lakehouse.effective()
    prefix = f"{name}_" if name else ""
    lakehouse_key = lakehouse_key or f"{prefix}lakehouse"
    io_manager_key = io_manager_key or f"{prefix}io_manager"
    spark = BranchSparkResource(lakehouse=lakehouse)
    reaper = reap_job(lakehouse_key, prefix)
    own_definitions = Definitions(
        resources={
            lakehouse_key: lakehouse,
            spark_key or f"{prefix}spark": spark,
            io_manager_key: NessieBranchIOManager(lakehouse=lakehouse, spark=spark),
        },
        sensors=[
            publication_sensor(settings, lakehouse_key, prefix),
            dead_writer_sensor(settings, lakehouse_key, prefix),
        ],
        jobs=[reaper, undo_job(lakehouse_key, prefix)],
        schedules=[reap_schedule(reaper, settings)],
    )
    if definitions is None:
        return own_definitions
    all_definitions = Definitions.merge(own_definitions, definitions)
    validate_definitions(
        all_definitions,
        io_manager_key=io_manager_key,
        default_namespace=settings.default_namespace,
        require_checks=settings.require_checks,
        unpartitioned_checks=settings.unpartitioned_checks,
    )
    return with_executor(
        all_definitions, publish_at_end(_get_executor(definitions), lakehouse_key=lakehouse_key)
    )


def _get_executor(definitions: Definitions) -> ExecutorDefinition:
    executor = definitions.executor
    if isinstance(executor, Executor):
        executor_definition: ExecutorDefinition = ExecutorDefinition.hardcoded_executor(executor)
        return executor_definition
    default_executor: ExecutorDefinition = multi_or_in_process_executor
    return executor or default_executor
