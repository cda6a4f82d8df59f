"""What depends on a table whose columns change: consumers on `main`, and assets and checks of the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagster import AssetKey

from branchlake_dagster.automation.progress import Unreadable, recorded_positions
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.incremental.declaration import declared
from branchlake_dagster.incremental.step_consumption import consumer_of
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.column_changes import ColumnChange
from branchlake_dagster.tables.specification import identifier_of, table_spec


@dataclass(frozen=True)
class Dependent:
    """An asset, a check or a table. `declares` are the columns of the change by which it consumes changes."""

    kind: str
    name: str
    declares: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"kind": self.kind, "name": self.name, "declares": list(self.declares)}


def consuming_tables(lake: Lakehouse, change: ColumnChange) -> Iterator[Dependent | Unreadable]:
    """The tables on `main` that were computed from changes of the table, in any code location.

    Reads the metadata of each table. A table that cannot be read may be one of them, so it is reported.
    """
    for table in recorded_positions(lake):
        if isinstance(table, Unreadable):
            yield table
            continue
        every = [*table.positions.partitions.values(), *filter(None, [table.positions.floor])]
        if any(change.table in one.inputs for one in every):
            yield Dependent("consumer", table.name)


def dependents_in_code(graph: AssetGraph, change: ColumnChange, namespace: str) -> Iterator[Dependent]:
    """The assets that read the table's asset, and the checks of its rows."""
    for key in _assets(graph, change, namespace):
        node = graph.get(key)
        for check in sorted(node.check_keys, key=lambda one: one.name):
            yield Dependent("check", f"{check.asset_key.to_user_string()}:{check.name}")
        for child in sorted(node.child_keys):
            consumed = _consumed_columns(graph, child, key, namespace)
            declares = tuple(one for one in change.columns if one in consumed)
            yield Dependent("asset", child.to_user_string(), declares)


def columns_of_asset(graph: AssetGraph, change: ColumnChange, namespace: str) -> set[str]:
    """The columns that the table's asset names in its definition: keys and partition columns."""
    found: set[str] = set()
    for key in _assets(graph, change, namespace):
        node = graph.get(key)
        partitioned = node.partitions_def is not None
        spec = table_spec(key, node.metadata, default_namespace=namespace, partitioned=partitioned)
        found |= {*spec.keys, *spec.columns_by_dimension.values()}
    return found


def _assets(graph: AssetGraph, change: ColumnChange, namespace: str) -> list[AssetKey]:
    keys = sorted(graph.materializable_asset_keys)
    return [key for key in keys if _identifier(key, namespace) == change.identifier]


def _identifier(key: AssetKey, namespace: str) -> tuple[str, ...] | None:
    try:
        return identifier_of(key, namespace)
    except BranchlakeError:
        return None  # the key of an asset that is no table


def _consumed_columns(graph: AssetGraph, child: AssetKey, key: AssetKey, namespace: str) -> set[str | None]:
    """The columns of an input by which an asset consumes its changes."""
    node = graph.get(child)
    declaration = declared(node.metadata, asset=child.to_user_string())
    if declaration is None or key not in declaration.inputs:
        return set()
    consumer = consumer_of(
        node.to_asset_spec(),
        declaration,
        node.partitions_def,
        namespace,
        node.assets_def.get_partition_mapping,
    )
    by_partition = consumer.spec.columns_by_dimension if consumer.by_partition else ()
    found: set[str | None] = {consumer.column_of_input(key, dimension) for dimension in by_partition}
    found |= {*declaration.keys_of(key), declaration.on_of(key)}
    return found | ({declaration.range_column_of(key)} if declaration.inputs[key] == "range" else set())
