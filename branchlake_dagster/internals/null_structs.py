"""Corrects PyIceberg 0.12, which cannot write a null struct that has required fields.

A null struct in Arrow usually has nulls in its fields. PyIceberg builds structs anew when it writes and reads
files, and PyArrow then counts these nulls as missing values of required fields, although no reader sees them
(docs/upstream.md). So they are replaced by zeros and empty values.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import ArrowProjectionVisitor, schema_to_pyarrow
from pyiceberg.types import NestedField, StructType

__all__ = ["fill_values"]

_plain_struct = ArrowProjectionVisitor.struct


def _project_struct(
    self: ArrowProjectionVisitor,
    struct: StructType,
    struct_array: pa.Array | None,
    field_results: list[pa.Array | None],
) -> pa.Array | None:
    """Return the structs in the requested type. The required fields of null structs have empty values."""
    if isinstance(struct_array, pa.StructArray) and struct_array.null_count:
        is_null = struct_array.is_null()
        field_results = [
            _fill_field(field, values, is_null)
            for field, values in zip(struct.fields, field_results, strict=True)
        ]
    return _plain_struct(self, struct, struct_array, field_results)


def _fill_field(field: NestedField, values: pa.Array | None, is_null: pa.BooleanArray) -> pa.Array | None:
    if values is None or field.optional or not values.null_count:
        return values
    is_missing = pc.and_(is_null, values.is_null())
    return fill_values(values, is_missing, schema_to_pyarrow(field.field_type, include_field_ids=False))


def fill_values(values: pa.Array, is_missing: pa.BooleanArray, kind: pa.DataType) -> pa.Array:
    """Return the values with an empty value where `is_missing` is true.

    An empty value can be cast to `kind`.
    """
    if not is_missing.true_count:
        return values
    filler = _one_value(values.type, _empty_value(values.type, kind))
    indices = pc.if_else(is_missing, len(values), pa.array(np.arange(len(values))))
    return pa.concat_arrays([values, filler]).take(indices)


def _one_value(kind: pa.DataType, value: Any) -> pa.Array:
    if not pa.types.is_dictionary(kind):
        return pa.array([value], kind)
    # PyArrow converts values to dictionaries of few types only.
    index, values = pa.array([0], kind.index_type), pa.array([value], kind.value_type)
    return pa.DictionaryArray.from_arrays(index, values, ordered=kind.ordered)


def _empty_value(source: pa.DataType, kind: pa.DataType) -> Any:
    """Return a value of the type `source` that can be cast to `kind`."""
    if pa.types.is_dictionary(source):
        return _empty_value(source.value_type, kind)
    if pa.types.is_struct(source):
        kinds = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
        return {field.name: _empty_value(field.type, kinds.get(field.name, field.type)) for field in source}
    if _is_list(source) or pa.types.is_map(source):
        return []
    if pa.types.is_string(source) or pa.types.is_large_string(source):
        return "0" * 32 if isinstance(kind, pa.UuidType) else ""
    if pa.types.is_fixed_size_binary(source):
        return bytes(source.byte_width)
    if isinstance(source, pa.UuidType):
        return bytes(16)
    if pa.types.is_binary(source) or pa.types.is_large_binary(source):
        return bytes(kind.byte_width) if pa.types.is_fixed_size_binary(kind) else b""
    if pa.types.is_boolean(source):
        return False
    return Decimal(0) if pa.types.is_decimal(source) else 0


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType)


ArrowProjectionVisitor.struct = _project_struct  # type: ignore[method-assign]
