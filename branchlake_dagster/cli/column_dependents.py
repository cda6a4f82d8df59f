"""The objects that depend on a table whose columns change: tables on `main`, assets and checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagster import AssetKey

from branchlake_dagster.automation.progress import UnreadableTable, iter_recorded_positions
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.column_changes import ColumnChange
from branchlake_dagster.tables.specification import parse_table_spec, table_identifier


@dataclass(frozen=True)
class Dependent:
    """An asset, a check or a table that depends on the changed table.

    `kind` is `asset`, `check`, or `consumer`: a table on `main` that was computed from changes of the changed
    table. `declares` are those of the changed columns that the asset names in `consumes`.
    """

    kind: str
    name: str
    declares: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        return {"kind": self.kind, "name": self.name, "declares": list(self.declares)}


def iter_consuming_tables(lake: Lakehouse, change: ColumnChange) -> Iterator[Dependent | UnreadableTable]:
    """Iterate over the tables on `main` that were computed from changes of the table, by any code location.

    Reads the metadata of every table. Unreadable tables are included, because they may depend on the table.
    """
    for table in iter_recorded_positions(lake):
        if isinstance(table, UnreadableTable):
            yield table
            continue
        positions = [*table.positions.partitions.values(), *filter(None, [table.positions.common_position])]
        if any(change.table in position.inputs for position in positions):
            yield Dependent("consumer", table.name)


def iter_code_dependents(graph: AssetGraph, change: ColumnChange, namespace: str) -> Iterator[Dependent]:
    """Iterate over the checks of the table's asset and the assets that read it."""
    for key in _asset_keys_of_table(graph, change, namespace):
        node = graph.get(key)
        for check in sorted(node.check_keys, key=lambda check: check.name):
            yield Dependent("check", f"{check.asset_key.to_user_string()}:{check.name}")
        for child in sorted(node.child_keys):
            consumed = _consumed_columns(graph, child, key, namespace)
            declares = tuple(column for column in change.columns if column in consumed)
            yield Dependent("asset", child.to_user_string(), declares)


def list_asset_columns(graph: AssetGraph, change: ColumnChange, namespace: str) -> set[str]:
    """Return the key and partition columns in the definition of the table's asset."""
    column_names: set[str] = set()
    for key in _asset_keys_of_table(graph, change, namespace):
        node = graph.get(key)
        partitioned = node.partitions_def is not None
        spec = parse_table_spec(key, node.metadata, default_namespace=namespace, partitioned=partitioned)
        column_names |= {*spec.keys, *spec.columns_by_dimension.values()}
    return column_names


def _asset_keys_of_table(graph: AssetGraph, change: ColumnChange, namespace: str) -> list[AssetKey]:
    keys = sorted(graph.materializable_asset_keys)
    return [key for key in keys if _find_identifier(key, namespace) == change.identifier]


def _find_identifier(key: AssetKey, namespace: str) -> tuple[str, ...] | None:
    try:
        return table_identifier(key, namespace)
    except BranchlakeError:
        return None  # the asset's key cannot name a table


def _consumed_columns(graph: AssetGraph, child: AssetKey, key: AssetKey, namespace: str) -> set[str | None]:
    """Return the columns of the input `key` by which the asset `child` consumes its changes."""
    node = graph.get(child)
    declaration = parse_declaration(node.metadata, asset=child.to_user_string())
    if declaration is None or key not in declaration.inputs:
        return set()
    consumer = build_consumer(
        node.to_asset_spec(),
        declaration,
        node.partitions_def,
        namespace,
        node.assets_def.get_partition_mapping,
    )
    by_partition = consumer.spec.columns_by_dimension if consumer.tracks_partitions else ()
    column_names: set[str | None] = {consumer.column_of_input(key, dimension) for dimension in by_partition}
    column_names |= {*declaration.key_columns_of(key), declaration.time_column_of(key)}
    return column_names | (
        {declaration.range_column_of(key)} if declaration.inputs[key] == "range" else set()
    )
