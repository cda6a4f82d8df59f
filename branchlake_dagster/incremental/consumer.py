"""Consumers, their inputs, and the input columns that decide what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster import AssetKey, PartitionsDefinition, TimeWindowPartitionsDefinition
from pyiceberg.table import Table

from branchlake_dagster.history.change import Position
from branchlake_dagster.incremental.affected_partitions import Reach, dimension_definitions
from branchlake_dagster.incremental.declaration import Declaration, Pattern, WhenRemoved
from branchlake_dagster.tables.errors import InputColumnGone
from branchlake_dagster.tables.specification import TableSpec, format_table_name

Identifier = tuple[str, ...]


@dataclass(frozen=True)
class Consumer:
    """An asset that consumes changes: its table, its partitions, and the tables of its inputs."""

    asset: str
    spec: TableSpec
    declaration: Declaration
    inputs: Mapping[AssetKey, Identifier]
    definition: PartitionsDefinition[str] | None = None
    reaches: Mapping[AssetKey, Reach] = field(default_factory=dict)
    """The reach of each input. An input without an entry has the default: rows of the own window only."""

    @property
    def tracks_partitions(self) -> bool:
        """Whether each partition of the asset has its own position."""
        return self.definition is not None and bool(self.spec.columns_by_dimension)

    @property
    def computes_in_order(self) -> bool:
        """Whether each partition is computed from the one before it, which must be published first."""
        return self.tracks_partitions and self.declaration.from_start

    def reach_of(self, key: AssetKey) -> Reach:
        """Return how far results depend on rows of an input outside their own window."""
        return self.reaches.get(key, Reach())

    @property
    def when_removed(self) -> WhenRemoved:
        """How rows that were removed from an input are treated, with the pattern `rows`."""
        declared_choice = self.declaration.when_removed
        if declared_choice is not None:
            return declared_choice
        return "apply" if self.spec.write_mode == "upsert" and not self.declaration.commits else "fail"

    def column_of_input(self, key: AssetKey, dimension: str) -> str:
        """Return the column of an input that decides on a partition in this dimension."""
        own_column = self.spec.columns_by_dimension[dimension]
        part = dimension_definitions(self.definition).get(dimension) if self.definition is not None else None
        is_time_window = isinstance(part, TimeWindowPartitionsDefinition)
        return self.declaration.time_column_of(key) or own_column if is_time_window else own_column

    def columns_of_input(self, key: AssetKey, table: Table) -> dict[str, str]:
        """Return the columns of an input that decide on a partition, by dimension.

        Dimensions whose column the input lacks are left out.
        """
        column_names = {field.name for field in table.schema().fields}
        columns = {name: self.column_of_input(key, name) for name in self.spec.columns_by_dimension}
        return {name: column for name, column in columns.items() if column in column_names}


@dataclass(frozen=True)
class UpstreamTable:
    """An input on the run's branch.

    `up_to` is its position there, in terms of the snapshots that `main` had where the branch began.
    """

    key: AssetKey
    name: str
    pattern: Pattern
    table: Table
    up_to: Position


def require_columns(consumer: Consumer, key: AssetKey, table: Table) -> None:
    """Raise InputColumnGone if the input `key` lacks a column that the consumer needs to find changes.

    Required are key columns, a column that `consumes` names for this input, and with the patterns `rows` and
    `keys` the columns that decide on a row's partition. Any other range or partition column is required only
    if the input once had it: an input that never had it lacks it by design, and its rows belong to all
    partitions.
    """
    declaration = consumer.declaration
    pattern = declaration.inputs[key]
    required = declaration.key_columns_of(key) if pattern == "keys" else ()
    if key in declaration.column_overrides and (time_column := declaration.column_overrides[key].on):
        required = (*required, time_column)
    partition_columns = [consumer.column_of_input(key, name) for name in consumer.spec.columns_by_dimension]
    if consumer.tracks_partitions and pattern != "range":
        required = (*required, *partition_columns)
    optional = partition_columns
    if pattern == "range":
        optional += [name for name in (declaration.range_column_of(key),) if name]
    column_names = {field.name for field in table.schema().fields}
    for column in (*required, *optional):
        if column in column_names:
            continue
        field_id = _find_earlier_field_id(table, column)
        if field_id is not None or column in required:
            raise _column_gone_error(consumer, key, table, column, field_id)


def _find_earlier_field_id(table: Table, column: str) -> int | None:
    """Return the id of a column in an earlier schema of the table, or None."""
    schemas = sorted(table.metadata.schemas, key=lambda schema: schema.schema_id, reverse=True)
    field_ids = (field.field_id for schema in schemas for field in schema.fields if field.name == column)
    return next(field_ids, None)


def _column_gone_error(
    consumer: Consumer, key: AssetKey, table: Table, column: str, field_id: int | None
) -> InputColumnGone:
    fields = table.schema().fields
    renamed_to = next((field.name for field in fields if field.field_id == field_id), None)
    what = f"was renamed to {renamed_to}" if renamed_to else "does not exist"
    return InputColumnGone(
        f"Asset {consumer.asset} finds changes of {key.to_user_string()} by column {column}, but the column"
        f" {what}.",
        column=column,
        renamed_to=renamed_to,
        table=format_table_name(consumer.inputs[key]),
        hint=(
            f"Rename the column back. Or name {renamed_to} in the asset's consumes(…), and launch the asset"
            " with the run tag branchlake/rebuild=true."
            if renamed_to
            else "Name one of the input's columns in consumes(…):"
            f" {', '.join(field.name for field in fields)}."
        ),
    )
