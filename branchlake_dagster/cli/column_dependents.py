"""What depends on a table whose columns change: consumers on `main`, and assets and checks of the code."""

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
    """An asset, a check or a table. `declares` are the columns of the change by which it consumes changes."""

    kind: str
    name: str
    declares: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"kind": self.kind, "name": self.name, "declares": list(self.declares)}


def iter_consuming_tables(lake: Lakehouse, change: ColumnChange) -> Iterator[Dependent | UnreadableTable]:
    """The tables on `main` that were computed from changes of the table, in any code location.

    Reads the metadata of each table. A table that cannot be read may be one of them, so it is reported.
    """
    for table in iter_recorded_positions(lake):
        if isinstance(table, UnreadableTable):
            yield table
            continue
        positions = [*table.positions.partitions.values(), *filter(None, [table.positions.common_position])]
        if any(change.table in position.inputs for position in positions):
            yield Dependent("consumer", table.name)


def iter_code_dependents(graph: AssetGraph, change: ColumnChange, namespace: str) -> Iterator[Dependent]:
    """The assets that read the table's asset, and the checks of its rows."""
    for key in _asset_keys_of_table(graph, change, namespace):
        node = graph.get(key)
        for check in sorted(node.check_keys, key=lambda one: one.name):
            yield Dependent("check", f"{check.asset_key.to_user_string()}:{check.name}")
        for child in sorted(node.child_keys):
            consumed = _consumed_columns(graph, child, key, namespace)
            declares = tuple(one for one in change.columns if one in consumed)
            yield Dependent("asset", child.to_user_string(), declares)


def list_asset_columns(graph: AssetGraph, change: ColumnChange, namespace: str) -> set[str]:
    """The columns that the table's asset names in its definition: keys and partition columns."""
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
        return None  # the key of an asset that is no table


def _consumed_columns(graph: AssetGraph, child: AssetKey, key: AssetKey, namespace: str) -> set[str | None]:
    """The columns of an input by which an asset consumes its changes."""
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
