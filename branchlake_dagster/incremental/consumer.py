"""An asset that consumes changes, an input of it, and the columns of an input that decide what changed."""

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
    """An asset that consumes changes: its table, its partitions, and where its inputs are stored."""

    asset: str
    spec: TableSpec
    declaration: Declaration
    inputs: Mapping[AssetKey, Identifier]
    definition: PartitionsDefinition[str] | None = None
    reaches: Mapping[AssetKey, Reach] = field(default_factory=dict)
    """By input how far results depend on rows beside their own; without an entry: on their own alone."""

    @property
    def tracks_partitions(self) -> bool:
        """Whether each of its partitions has a position of its own."""
        return self.definition is not None and bool(self.spec.columns_by_dimension)

    @property
    def computes_in_order(self) -> bool:
        """Whether each partition is computed from the one before it, which has to be published first."""
        return self.tracks_partitions and self.declaration.from_start

    def reach_of(self, key: AssetKey) -> Reach:
        """How far the results depend on rows of an input beside their own."""
        return self.reaches.get(key, Reach())

    @property
    def when_removed(self) -> WhenRemoved:
        """What becomes of rows that have gone from an input of the pattern `rows`."""
        declared_choice = self.declaration.when_removed
        if declared_choice is not None:
            return declared_choice
        return "apply" if self.spec.write_mode == "upsert" and not self.declaration.commits else "fail"

    def column_of_input(self, key: AssetKey, dimension: str) -> str:
        """The column of an input that decides on a partition of the asset."""
        own_column = self.spec.columns_by_dimension[dimension]
        part = dimension_definitions(self.definition).get(dimension) if self.definition is not None else None
        is_time_window = isinstance(part, TimeWindowPartitionsDefinition)
        return self.declaration.time_column_of(key) or own_column if is_time_window else own_column

    def columns_of_input(self, key: AssetKey, table: Table) -> dict[str, str]:
        """By dimension the column of an input that decides on a partition, as far as the input has it."""
        column_names = {field.name for field in table.schema().fields}
        columns = {name: self.column_of_input(key, name) for name in self.spec.columns_by_dimension}
        return {name: column for name, column in columns.items() if column in column_names}


@dataclass(frozen=True)
class UpstreamTable:
    """An input as the run's branch has it, and as `main` had it where the branch began."""

    key: AssetKey
    name: str
    pattern: Pattern
    table: Table
    up_to: Position


def require_columns(consumer: Consumer, key: AssetKey, table: Table) -> None:
    """Raise InputColumnGone if the input `key` lacks a column by which the consumer finds what changed.

    Keys must be there, columns that are named for this input, and with the pattern `rows` those that decide
    on the partition of a row. Another range or partition column may be missing where it never was there: then
    the input has no such column by design, and its rows belong to all partitions.
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
    """The id of a column that an earlier schema of the table had."""
    schemas = sorted(table.metadata.schemas, key=lambda schema: schema.schema_id, reverse=True)
    field_ids = (field.field_id for schema in schemas for field in schema.fields if field.name == column)
    return next(field_ids, None)


def _column_gone_error(
    consumer: Consumer, key: AssetKey, table: Table, column: str, field_id: int | None
) -> InputColumnGone:
    fields = table.schema().fields
    renamed_to = next((field.name for field in fields if field.field_id == field_id), None)
    what = f"was renamed to {renamed_to}" if renamed_to else "is not among its columns"
    return InputColumnGone(
        f"{consumer.asset} finds what has changed in {key.to_user_string()} by its column {column}:"
        f" that {what}.",
        column=column,
        renamed_to=renamed_to,
        table=format_table_name(consumer.inputs[key]),
        hint=(
            f"Rename it back, or name {renamed_to} in consumes(…) of the asset and launch that with the run"
            " tag branchlake/rebuild=true."
            if renamed_to
            else f"The input has the columns {', '.join(field.name for field in fields)}: name one of them."
        ),
    )
