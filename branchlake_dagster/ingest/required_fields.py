"""Values for the required fields of null structs, so that PyArrow can cast and write these structs.

Spark writes null into each field of a null struct. PyArrow counts these nulls as missing values of required
fields, although nobody can read them. So they are replaced by zeros and empty values.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.internals.null_lists import unsliced_offsets
from branchlake_dagster.internals.null_structs import fill_values


def fill_null_structs(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column with a value in each required field of null structs; all other values stay.

    `kind` is the type to which the column can be cast afterwards. Fields are matched by name. Returns the
    column itself if `kind` has no required fields inside structs. Cost: copies the fields that are filled.
    """
    if not _has_required_fields(kind):
        return column
    if pa.types.is_struct(kind) and pa.types.is_struct(column.type):
        return _fill_struct(column, kind)
    if _is_list(kind) and _is_list(column.type):
        values = fill_null_structs(column.values, kind.value_type)
        return type(column).from_arrays(
            unsliced_offsets(column.offsets), values, type=column.type, mask=column.is_null()
        )
    if pa.types.is_map(kind) and pa.types.is_map(column.type):
        return pa.MapArray.from_arrays(
            unsliced_offsets(column.offsets),
            fill_null_structs(column.keys, kind.key_type),
            fill_null_structs(column.items, kind.item_type),
            type=column.type,
            mask=column.is_null(),
        )
    return column


def _fill_struct(column: pa.StructArray, kind: pa.StructType) -> pa.StructArray:
    is_null = column.is_null()
    fields = []
    for number, source_field in enumerate(column.type):
        values, index = column.field(number), kind.get_field_index(source_field.name)
        if index >= 0:
            target_field = kind.field(index)
            values = fill_null_structs(values, target_field.type)
            if not target_field.nullable:
                values = fill_values(values, pc.and_(is_null, values.is_null()), target_field.type)
        fields.append(values)
    return pa.StructArray.from_arrays(fields, fields=list(column.type), mask=is_null)


def _has_required_fields(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(not field.nullable or _has_required_fields(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _has_required_fields(kind.key_type) or _has_required_fields(kind.item_type)
    return _is_list(kind) and _has_required_fields(kind.value_type)


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType)
