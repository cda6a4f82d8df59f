"""Commit data files that an asset's functions wrote on Spark's workers (`WorkerTable`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dagster import AssetExecutionContext, AssetKey
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.pyiceberg import commit_files
from branchlake_dagster.runs import provenance
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.tables import replaced_rows
from branchlake_dagster.tables.errors import PartitionMismatch
from branchlake_dagster.tables.selection import select_partitions
from branchlake_dagster.tables.specification import TableSpec, format_table_name, parse_table_spec


def commit_worker_files(
    context: AssetExecutionContext,
    lakehouse: LakehouseResource,
    table: Table,
    *,
    key: AssetKey | None = None,
    added: Iterable[DataFile],
    removed: Iterable[DataFile] = (),
    properties: Mapping[str, str] | None = None,
) -> Table:
    """Exchange data files of an asset's table in one snapshot on the run's branch.

    Atomic: either all files are exchanged or none. The snapshot gets the properties that the IO manager also
    sets: run, asset, partitions, write mode, replaced rows and attempt. The publisher, undo and the sweeper
    rely on them.

    Args:
        context (AssetExecutionContext): The context of the running asset.
        lakehouse (LakehouseResource): The lake from which the table was loaded.
        table (Table): The table on the run's branch, as it was when the files were written.
        key (Optional[AssetKey]): The asset of the table. (default: the only asset of the context)
        added (Iterable[DataFile]): Files that `WorkerTable.write` returned.
        removed (Iterable[DataFile]): Current files of the table that no longer belong to it.
        properties (Optional[Mapping[str, str]]): More entries for the snapshot's summary.

    Returns:
        Table: The table with the new snapshot.

    Raises:
        CommitFailedException: The table has changed since it was loaded, for example by a late commit of an
            earlier attempt of the step. Nothing was committed; retry the step.
        ConfigurationError: `table` was loaded from another branch than the run's (reason `other_branch`), or
            is the table of another asset (`other_table`). Nothing was committed.
        PartitionMismatch: The asset has partitions, and the run has none. Nothing was committed.

    Examples:
        .. code-block:: python

            from dagster import AssetExecutionContext

            from branchlake_dagster import LakehouseResource, commit_worker_files

            def replace_rows(context: AssetExecutionContext, lakehouse: LakehouseResource, files):
                table = lakehouse.catalog().load_table("shop.prices")
                removed = [task.file for task in table.scan().plan_files()]
                commit_worker_files(context, lakehouse, table, added=files, removed=removed)
    """
    asset_key = context.asset_key if key is None else key
    asset_spec = context.assets_def.specs_by_key[asset_key]
    definition = context.assets_def.partitions_def
    spec = parse_table_spec(
        asset_key,
        asset_spec.metadata,
        default_namespace=lakehouse.lakehouse.settings.default_namespace,
        partitioned=definition is not None,
    )
    _require_own_table(table, spec, lakehouse, asset_key)
    is_partitioned = context.has_partition_key or context.has_partition_key_range
    if definition is not None and not is_partitioned:
        raise PartitionMismatch.of_run_without_partitions(asset_key.to_user_string(), spec.name)
    partition_keys = tuple(context.partition_keys) if is_partitioned else ()
    step = context.op_execution_context.get_step_execution_context()
    return commit_files(
        table,
        added=added,
        removed=removed,
        properties=provenance.build_snapshot_properties(
            spec=spec,
            asset=asset_key.to_user_string(),
            partitions=partition_keys,
            code_version=asset_spec.code_version,
            run=lakehouse.run_branch,
            root_run_id=step.dagster_run.root_run_id or step.dagster_run.run_id,
            step=step.step.key,
            attempt=step.previous_attempt_count + 1,
            replaced=_format_replaced_rows(spec, definition, partition_keys, table.schema()),
        )
        | dict(properties or {}),
    )


def _require_own_table(
    table: Table, spec: TableSpec, lakehouse: LakehouseResource, asset_key: AssetKey
) -> None:
    """Raise ConfigurationError unless `table` is the asset's table, loaded from the run's branch.

    `spec` is the spec of the asset `asset_key`. Opens the run's branch if it is not open yet.
    """
    table_name, branch = format_table_name(table.name()), lakehouse.open_branch()
    loaded_from = table.catalog.ref if isinstance(table.catalog, NessieCatalog) else table.catalog.name
    if table.name() != spec.identifier:
        raise ConfigurationError(
            f"Asset {asset_key.to_user_string()} writes table {spec.name}, but the files are for table"
            f" {table_name}.",
            table=table_name,
            branch=branch,
            hint="Give the asset of this table as `key`.",
            reason="other_table",
            subject=table_name,
        )
    if loaded_from != branch:
        raise ConfigurationError(
            f"Table {table_name} was loaded from {loaded_from}, but this run writes to {branch}.",
            table=table_name,
            branch=branch,
            hint="Load the table with `lakehouse.catalog().load_table(…)` in the asset.",
            reason="other_branch",
            subject=loaded_from,
        )


def _format_replaced_rows(
    spec: TableSpec, definition: Any, partition_keys: tuple[str, ...], schema: Schema
) -> str | None:
    """Return, as JSON for the snapshot's properties, which rows a write of these partitions replaces.

    Returns None for other write modes, without partitions, and without partition columns. `definition` is the
    asset's partitions definition, `schema` the table's schema.
    """
    columns = spec.columns_by_dimension
    if spec.write_mode != "replace_partitions" or definition is None or not columns:
        return None
    selection = select_partitions(partition_keys, definition, columns, schema=schema, table_name=spec.name)
    return replaced_rows.to_json(replaced_rows.build_replaced_rows(selection, schema))
