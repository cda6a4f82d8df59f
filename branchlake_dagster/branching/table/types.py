"""Which Arrow types the lake stores, as what, and what to do about the others: by column, with the remedy."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import IcebergType, ListType, MapType, StructType

from branchlake_dagster.branching.errors import ColumnUnsupported, SchemaMismatch
from branchlake_dagster.internals.pyiceberg import iceberg_schema_of

_MOST_DIGITS = 38
_FORMAT_VERSION = 2


def stored_schema(schema: pa.Schema, *, table: str) -> pa.Schema:
    """`schema` as the lake stores it: every column nullable, times in microseconds, zones in UTC.

    Nullability is a matter of checks, not of storage: pandas cannot express it and Spark derives it
    from the query, so the same asset would flip it between runs. A column that is null in all rows and says
    no type keeps the type null. Raises SchemaMismatch for a frame without columns or with two of one name,
    ColumnUnsupported for a type that the lake has not.
    """
    if not schema.names:
        raise SchemaMismatch(
            "The frame has no columns.",
            table=table,
            hint="Return a frame with columns (it may have no rows), or None to write nothing.",
        )
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise SchemaMismatch(
            f"The frame has several columns of the name {', '.join(twice)}.",
            table=table,
            hint="Rename or drop all but one.",
        )
    return pa.schema([pa.field(one.name, stored_type(one.type, one.name, table)) for one in schema])


def stored_type(kind: pa.DataType, column: str, table: str) -> pa.DataType:
    """The type that the lake stores for `kind`; raises ColumnUnsupported where it has none."""
    if remedy := _remedy(kind):
        raise ColumnUnsupported(
            f"Column {column} is {kind}, which the lake cannot store.", table=table, hint=remedy
        )
    nested = _nested(kind, column, table)
    return _plain(kind) if nested is None else nested


def _nested(kind: pa.DataType, column: str, table: str) -> pa.DataType | None:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return stored_type(kind.value_type, column, table)
    if is_list(kind):
        element = stored_type(kind.value_type, f"{column}.element", table)
        return pa.list_(pa.field("element", element))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, stored_type(f.type, f"{column}.{f.name}", table)) for f in kind])
    if pa.types.is_map(kind):
        key = stored_type(kind.key_type, f"{column}.key", table)
        return pa.map_(key, stored_type(kind.item_type, f"{column}.value", table))
    return None


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_time(kind):
        return pa.time64("us")
    if pa.types.is_date(kind):
        return pa.date32()
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_unsigned_integer(kind):
        return pa.int64() if kind.bit_width >= 32 else pa.int32()
    if pa.types.is_integer(kind) and kind.bit_width < 32:
        return pa.int32()
    return pa.float32() if pa.types.is_float16(kind) else kind


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list of any of Arrow's layouts."""
    return any(
        test(kind)
        for test in (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_fixed_size_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
        )
    )


def _remedy(kind: pa.DataType) -> str | None:
    """What to do about a type that Iceberg has not; None where it has one."""
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return "Store whole numbers of one unit, such as int64 microseconds, and name it in the column."
    if pa.types.is_decimal(kind) and (kind.precision > _MOST_DIGITS or not 0 <= kind.scale <= kind.precision):
        return f"Cast it to a decimal of at most {_MOST_DIGITS} digits whose scale is not negative."
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.UuidType):
        return "Cast it to text, numbers or time stamps."
    if pa.types.is_union(kind):
        return "Make a column of each of its types."
    return None


def has_type(kind: pa.DataType) -> bool:
    """Whether all of it is known: no null type, and none inside."""
    if pa.types.is_null(kind):
        return False
    if pa.types.is_list(kind):
        return has_type(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(has_type(field.type) for field in kind)
    return not pa.types.is_map(kind) or (has_type(kind.key_type) and has_type(kind.item_type))


def iceberg_schema(schema: pa.Schema, *, table: str) -> Schema:
    """An Iceberg schema with fresh field ids for a stored Arrow schema whose columns all have a type."""
    for column in schema:
        if not has_type(column.type):
            raise ColumnUnsupported(
                f"Column {column.name} is {column.type}: a part of it has no type, because no row has a value"
                " there.",
                table=table,
                hint="Give it a type in the asset (an Arrow, Polars or Spark schema), or leave the part out.",
            )
    converted = iceberg_schema_of(schema, _FORMAT_VERSION)
    return assign_fresh_schema_ids(converted)


def iceberg_type(kind: pa.DataType, *, table: str) -> IcebergType:
    """The Iceberg type of a stored Arrow type that is known."""
    return iceberg_schema(pa.schema([pa.field("it", kind)]), table=table).fields[0].field_type


def in_words(kind: pa.DataType, *, table: str) -> str:
    """The type as Iceberg prints it, without field ids."""
    return _words(iceberg_type(kind, table=table)) if has_type(kind) else str(kind)


def _words(kind: IcebergType) -> str:
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{f.name}: {_words(f.field_type)}' for f in kind.fields)}>"
    if isinstance(kind, ListType):
        return f"list<{_words(kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{_words(kind.key_type)}, {_words(kind.value_type)}>"
    return str(kind)
