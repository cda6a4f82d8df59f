"""Frame schemas against table schemas: creation, the one allowed evolution, and named differences."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table
from pyiceberg.types import NestedField

from branchlake_dagster.branching.errors import SchemaMismatch
from branchlake_dagster.library_internals.pyiceberg import iceberg_schema_of

_FORMAT_VERSION: Literal[2] = 2


def normalised(schema: pa.Schema) -> pa.Schema:
    """`schema` as the lake stores it: every column nullable, times in microseconds, zones in UTC.

    Nullability is a matter of checks, not of storage: pandas cannot express it and Spark derives it
    from the query, so the same asset would flip it between runs.
    """
    return pa.schema([pa.field(field.name, _stored(field.type), nullable=True) for field in schema])


def _stored(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_dictionary(kind):
        return _stored(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", _stored(kind.value_type), nullable=True))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _stored(f.type), nullable=True) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(_stored(kind.key_type), _stored(kind.item_type))
    if pa.types.is_unsigned_integer(kind) and kind.bit_width < 64:
        return pa.int64() if kind.bit_width == 32 else pa.int32()
    if pa.types.is_integer(kind) and kind.bit_width < 32:
        return pa.int32()
    return pa.float32() if pa.types.is_float16(kind) else kind


def iceberg_schema(schema: pa.Schema) -> Schema:
    """An Iceberg schema with fresh field ids for a normalised Arrow schema."""
    return assign_fresh_schema_ids(iceberg_schema_of(schema, _FORMAT_VERSION))


def evolve(table: Table, wanted: pa.Schema, *, name: str) -> Table:
    """Add the columns that `wanted` has and the table lacks; refuse every other difference by column."""
    incoming = {field.name: field for field in iceberg_schema(wanted).fields}
    current = {field.name: field for field in table.schema().fields}
    missing = [column for column in current if column not in incoming]
    if missing:
        raise SchemaMismatch(
            f"The frame lacks column {', '.join(missing)}.",
            table=name,
            hint="Write the column (nulls are fine), or drop it from the table on purpose.",
        )
    for column, field in incoming.items():
        if column in current and not _same_type(current[column], field):
            raise SchemaMismatch(
                f"Column {column} is {current[column].field_type} in the table"
                f" and {field.field_type} in the frame.",
                table=name,
                hint="Cast the column in the asset; only adding nullable columns evolves a table.",
            )
    added = [column for column in incoming if column not in current]
    if not added:
        return table
    with table.update_schema() as update:
        for column in added:
            update.add_column(column, incoming[column].field_type)
    return table


def _same_type(left: NestedField, right: NestedField) -> bool:
    # Field ids of nested types differ by construction; their printed form without ids does not.
    return _without_ids(left.field_type) == _without_ids(right.field_type)


def _without_ids(kind: object) -> str:
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{f.name}: {_without_ids(f.field_type)}' for f in kind.fields)}>"
    if isinstance(kind, ListType):
        return f"list<{_without_ids(kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{_without_ids(kind.key_type)}, {_without_ids(kind.value_type)}>"
    return str(kind)
