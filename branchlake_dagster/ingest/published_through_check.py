"""An asset check that passes if a table is published through a time.

This module has no postponed annotations: Dagster compares the annotation of `context` with the class itself.
"""

from datetime import datetime, timedelta
from typing import Any, Literal

import dagster as dg

from branchlake_dagster.checks.asset_checks import (
    CheckedAsset,
    asset_key,
    build_check_specs,
    check_partitions_def,
)
from branchlake_dagster.checks.constraints import ContractError
from branchlake_dagster.ingest.published_through import (
    DeclaredConsumers,
    PublishedTime,
    TableName,
    format_table,
    identifier_of_table,
    parse_time,
    published_time,
    require_time_partitions,
)
from branchlake_dagster.internals.dagster import asset_graph_of
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import EventMetadata


def published_through_check(
    asset: CheckedAsset,
    table: TableName,
    time: datetime | str | None = None,
    *,
    allowed_lateness: timedelta = timedelta(0),
    name: str = "published_through",
    severity: Literal["error", "warn"] = "error",
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    lakehouse_key: str = "lakehouse",
) -> dg.AssetChecksDefinition:
    """An asset check that passes when a table has all records that are older than a time.

    The table is filled by an ingestion, or consumes the changes of such tables, over any number of stages.
    Attach the check to an asset that reads the table: if its run read too early, the run is not published.
    Without `time` the table must reach the end of the run's partitions.

    The check reads the table's metadata on the run's branch, where the run also reads its rows. That branch
    has `main` as it was when the branch was created. The check reads no data and does not need Spark. For a
    consumer it also reads the metadata of the upstream tables and the manifests of its backlog.

    Args:
        asset (AssetKey | str | Sequence[str] | AssetsDefinition): The asset that is checked. A definition
            also gives its partitioning.
        table (str | AssetKey): The table, `raw.orders`, or its asset, `raw/orders`.
        time (datetime | str | None): A time with its zone, also as ISO 8601 text: `2026-11-24T06:00Z`.
            (default: the end of the run's last partition)
        allowed_lateness (timedelta): The table must reach this much more than the time. (default: 0)
        name (str): The check's name. (default: `published_through`)
        severity (Literal["error", "warn"]): `error` blocks the publication, `warn` publishes with a warning.
            (default: `error`)
        partitions_def (Optional[PartitionsDefinition]): The asset's partitions, if `asset` is a key.
        lakehouse_key (str): The resource key of the lake. (default: `lakehouse`)

    Returns:
        AssetChecksDefinition: One step with one check. The check also fails while the table does not exist,
            has no valid-through time, or must be filled or computed again after a rollback. Its description
            gives the reason.

    Raises:
        ContractError: The severity is not allowed.
        ConfigurationError: The time is not ISO 8601 or has no zone, or there is none and the asset is not
            partitioned by time.

    Examples:
        .. code-block:: python

            from branchlake_dagster import published_through_check

            complete = published_through_check(revenue, "raw.orders")
    """
    if severity not in ("error", "warn"):
        raise ContractError(f"Check {name} has severity {severity!r}.", hint="Set it to 'error' or 'warn'.")
    key = asset_key(asset)
    fixed_time = None if time is None else parse_time(time)
    identifier_of_table(table, "default")
    partitions = check_partitions_def(asset, partitions_def, whole_table=False)
    if fixed_time is None:
        require_time_partitions(partitions, key.to_user_string())
    time_text = "the end of the run's partitions" if fixed_time is None else fixed_time.isoformat()
    lateness_text = f" and {allowed_lateness} more" if allowed_lateness else ""
    promise = f"{format_table(table)} has all records through {time_text}{lateness_text}"
    warned = frozenset({name} if severity == "warn" else ())

    @dg.multi_asset_check(
        name=f"{key.to_python_identifier()}__{name}",
        description=f"Whether {promise}.",
        specs=build_check_specs(asset, {name: promise}, partitions, warn_names=warned),
        required_resource_keys={lakehouse_key},
        compute_kind="iceberg",
    )
    def published(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake, catalog = resource.lakehouse, resource.own_catalog()
        namespace = lake.settings.default_namespace
        graph = asset_graph_of(context.get_step_execution_context().job)
        declared_consumers = DeclaredConsumers(graph, namespace, context.instance)
        identifier = identifier_of_table(table, namespace)
        table_time = published_time(lake.nessie, catalog, identifier, namespace, declared_consumers)
        required_time = (
            context.partition_time_window.end if fixed_time is None else fixed_time
        ) + allowed_lateness
        return _build_result(name, table_time, required_time, warn=severity == "warn")

    return published


def _build_result(
    name: str, table_time: PublishedTime, required_time: datetime, *, warn: bool
) -> dg.AssetCheckResult:
    passed = table_time.reaches(required_time)
    metadata: dict[str, Any] = {EventMetadata.WANTED_THROUGH: dg.MetadataValue.timestamp(required_time)}
    if table_time.at is not None:
        metadata[EventMetadata.VALID_THROUGH] = dg.MetadataValue.timestamp(table_time.at)
    shortfall = (
        "" if passed else f", not through {required_time.isoformat()}" if table_time.at is not None else ""
    )
    return dg.AssetCheckResult(
        check_name=name,
        passed=passed,
        severity=dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR,
        metadata=metadata,
        description=f"{table_time.reason}{shortfall}.",
    )
