"""Tables made and changed so that they hold a frame."""

from __future__ import annotations

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from branchlake_dagster.branching.errors import ColumnsFrozen, ColumnUnsupported, SchemaMismatch
from branchlake_dagster.branching.table.evolution import Added, changes
from branchlake_dagster.branching.table.types import has_type, iceberg_type, stored_schema
from branchlake_dagster.wording import named


def arrow_schema(schema: Schema, *, name: str) -> pa.Schema:
    """A table's columns in Arrow's types, as frames are compared with them."""
    return stored_schema(schema_to_pyarrow(schema, include_field_ids=False), table=name)


def without_untyped(schema: pa.Schema, needed: tuple[str, ...], *, name: str) -> pa.Schema:
    """What a new table is made of: the columns that have a type.

    One that is null in all rows comes when a frame brings values. Raises SchemaMismatch when nothing is
    left, or one of `needed` (keys, partition columns) is not.
    """
    untyped = [column.name for column in schema if pa.types.is_null(column.type)]
    hint = "Give it a type in the asset (a pandas dtype, an Arrow, Polars or Spark schema)."
    if lost := [column for column in untyped if column in needed]:
        are, has, it = ("is", "it has", "it") if len(lost) == 1 else ("are", "they have", "them")
        raise SchemaMismatch(
            f"{named('Column', lost)} {are} null in all rows, so {has} no type, and the table is made by"
            f" {it}.",
            table=name,
            hint=hint,
        )
    if len(untyped) == len(schema):
        raise SchemaMismatch(
            f"All columns ({', '.join(untyped)}) are null in all rows, so no table can be made of them.",
            table=name,
            hint=hint,
        )
    return pa.schema([column for column in schema if column.name not in untyped])


def require_unchanged(table: Table, wanted: pa.Schema, *, name: str, widen: bool) -> None:
    """Raise ColumnsFrozen if a frame of `wanted` would change the table's columns.

    A new column that is null in all rows counts too. `evolve` would leave the column out, and its first value
    would fail a later run.
    """
    current = arrow_schema(table.schema(), name=name)
    paths = [change.path for change in changes(current, wanted, name=name, widen=widen)]
    untyped = [(column,) for column in wanted.names if column not in current.names]
    columns = tuple(".".join(path) for path in dict.fromkeys((*untyped, *paths)))
    if columns:
        new = tuple(column for column in columns if (column,) in untyped)
        raise ColumnsFrozen(
            f"The frame would change {named('column', columns)}, and the asset's columns are frozen.",
            columns=columns,
            table=name,
            hint=(
                f"Leave {named('column', new)} out in the asset" if new else "Cast the columns in the asset"
            )
            + ', or declare table_metadata(columns="evolve") for the run that shall change the table.',
        )


def evolve(table: Table, wanted: pa.Schema, *, name: str, widen: bool) -> Table:
    """Make the changes that let the table hold a frame of `wanted`; any other is refused by column."""
    found = changes(arrow_schema(table.schema(), name=name), wanted, name=name, widen=widen)
    for change in found:
        if not has_type(change.kind):
            raise ColumnUnsupported(
                f"{'.'.join(change.path)} has no type in the frame, because no row has a value there, and the"
                " table has not got it either.",
                table=name,
                hint="Give it a type in the asset (an Arrow, Polars or Spark schema), or leave it out.",
            )
    if not found:
        return table
    with table.update_schema() as update:
        for change in found:
            kind = iceberg_type(change.kind, table=name)
            if isinstance(change, Added):
                update.add_column(change.path, kind)
            else:
                update.update_column(change.path, field_type=kind)
    return table
