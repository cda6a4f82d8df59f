"""Reports the backlog of every table on `main` that has recorded positions in its inputs.

The backlog is computed from the lake alone, without Dagster definitions. So consumers of all code locations
are included.

The module also finds the objects that depend on a table whose columns change: tables on `main`, assets and
checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from dagster import AssetKey
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.history.capture import capture_change, contains_snapshot, result_rolled_back_error
from branchlake_dagster.history.change import ChangeLost, ChangeSet, Position, from_epoch_ms
from branchlake_dagster.incremental.declaration import parse_declaration
from branchlake_dagster.incremental.positions import (
    ConsumptionRecord,
    Positions,
    read_positions,
    recorded_time,
)
from branchlake_dagster.incremental.step_consumption import build_consumer
from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieError, NessieUnauthorized
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.column_changes import ColumnChange
from branchlake_dagster.tables.errors import PositionUnreadable
from branchlake_dagster.tables.specification import parse_table_spec, table_identifier


@dataclass(frozen=True)
class InputBacklog:
    """The position of a consumer's table in one input, and the change that it has not consumed.

    `table` and `input` are dotted table names. `run_id` is the run that recorded `position`, which counts for
    the whole table; `partitions_ahead` is the number of partitions that have consumed more. `change` is None
    if the remaining change is unknown; `trouble` is the reason.
    """

    table: str
    input: str
    run_id: str
    position: Position
    partitions_ahead: int
    change: ChangeSet | None
    trouble: str | None = None
    valid_through: datetime | None = None
    """The time up to which the table has all records, as its runs recorded it; None if it is unknown."""

    def oldest_age_s(self, now: datetime) -> float | None:
        """Return the age of the oldest unconsumed change in seconds.

        None if nothing is left to consume, or if the change is unknown.
        """
        oldest = self.change.oldest if self.change is not None and not self.change.empty else None
        return None if oldest is None else max(0.0, (now - oldest).total_seconds())


@dataclass(frozen=True)
class UnreadableTable:
    """A table whose metadata or recorded positions cannot be read, and the reason, `trouble`.

    It may or may not be a consumer.
    """

    table: str
    trouble: str


@dataclass(frozen=True)
class TablePositions:
    """A table on `main` with its recorded positions; they are empty if it consumes no changes."""

    name: str
    metadata: TableMetadata
    positions: Positions


def iter_recorded_positions(
    lake: Lakehouse, tables: Collection[str] | None = None
) -> Iterator[TablePositions | UnreadableTable]:
    """Yield the recorded positions of tables on `main`, or the reason why a table cannot be read.

    `tables` has dotted names of tables; None means every table. Reads the metadata of each table. Raises
    NessieError if Nessie does not answer.
    """
    catalog = lake.catalog(MAIN)
    for entry in lake.nessie.entries(MAIN, fetch_content=True):
        table_name = entry.key.name
        if not isinstance(entry.content, IcebergTable) or (tables is not None and table_name not in tables):
            continue
        try:
            metadata = catalog.table_of(entry.key.elements, entry.content).metadata
            positions = read_positions(metadata.properties, table=table_name)
        except NessieError:
            raise
        except PositionUnreadable as error:
            yield UnreadableTable(table_name, str(error))
        except Exception as error:  # noqa: BLE001 - a store and a metadata file may raise anything
            yield UnreadableTable(table_name, _format_metadata_error(error))
        else:
            yield TablePositions(table_name, metadata, positions)


def iter_input_backlogs(lake: Lakehouse) -> Iterator[InputBacklog | UnreadableTable]:
    """Yield an `InputBacklog` for each consumer table on `main` and each of its inputs.

    An unreadable table is yielded with the reason and does not affect other tables. Raises NessieError if
    Nessie does not answer.
    """
    catalog = lake.catalog(MAIN)
    for table in iter_recorded_positions(lake):
        if isinstance(table, UnreadableTable):
            yield table
        elif position_record := _table_position(table.positions):
            valid_through = recorded_time(table.metadata, table.name)
            for input_name, position in sorted(position_record.inputs.items()):
                backlog = _load_input_backlog(
                    catalog,
                    table.name,
                    input_name,
                    position,
                    position_record,
                    len(table.positions.partitions),
                )
                if not contains_snapshot(table.metadata, position_record.snapshot_id):
                    backlog = replace(
                        backlog, change=None, trouble=result_rolled_back_error(table.name).message
                    )
                yield replace(
                    backlog,
                    valid_through=from_epoch_ms(valid_through.ms) if valid_through is not None else None,
                )


def _table_position(positions: Positions) -> ConsumptionRecord | None:
    """Return the record of the common position; without one, the record of the first partition by name.

    None if the table has neither.
    """
    if positions.common_position is not None:
        return positions.common_position
    return next((positions.partitions[name] for name in sorted(positions.partitions)), None)


def _load_input_backlog(
    catalog: NessieCatalog,
    table: str,
    input_name: str,
    position: Position,
    position_record: ConsumptionRecord,
    partitions_ahead: int,
) -> InputBacklog:
    change, trouble = None, None
    try:
        change = capture_change(
            catalog.load_table(tuple(ContentKey.from_path(input_name))), position, name=input_name
        )
    except NoSuchTableError:
        trouble = "The table of the input no longer exists."
    except ChangeLost as lost:
        trouble = str(lost)
    except Exception as error:
        if isinstance(error, Transient | NessieUnauthorized):
            raise  # Nessie does not answer or refuses the token
        trouble = f"Input {input_name}: {_format_metadata_error(error)}"
    return InputBacklog(
        table, input_name, position_record.run_id, position, partitions_ahead, change, trouble
    )


def _format_metadata_error(error: Exception) -> str:
    return f"its metadata cannot be read ({type(error).__name__}: {error})"


@dataclass(frozen=True)
class Dependent:
    """An asset, a check or a table that depends on the table whose columns change.

    `kind` is `asset`, `check`, or `consumer`: a table on `main` that was computed from changes of that table.
    `declares` are the changed columns by which the asset consumes changes.
    """

    kind: str
    name: str
    declares: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        return {"kind": self.kind, "name": self.name, "declares": list(self.declares)}


def iter_consuming_tables(lake: Lakehouse, change: ColumnChange) -> Iterator[Dependent | UnreadableTable]:
    """Yield the tables on `main` that were computed from changes of the table, by any code location.

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
    """Yield the checks of the asset of table `change.identifier`, and the assets that read this asset.

    `graph` is the asset graph of one code location. `namespace` is the namespace of assets whose keys have
    only one part.
    """
    for key in _asset_keys_of_table(graph, change, namespace):
        node = graph.get(key)
        for check in sorted(node.check_keys, key=lambda check: check.name):
            yield Dependent("check", f"{check.asset_key.to_user_string()}:{check.name}")
        for child in sorted(node.child_keys):
            consumed = _consumed_columns(graph, child, key, namespace)
            declares = tuple(column for column in change.columns if column in consumed)
            yield Dependent("asset", child.to_user_string(), declares)


def list_asset_columns(graph: AssetGraph, change: ColumnChange, namespace: str) -> set[str]:
    """Return the key and partition columns that the asset of table `change.identifier` declares.

    The result is empty if `graph`, the asset graph of one code location, has no such asset. `namespace` is
    the namespace of assets whose keys have only one part.
    """
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
    """Return the columns of the input `key` by which the asset `child` consumes its changes.

    Empty if `child` does not consume changes of `key`.
    """
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
