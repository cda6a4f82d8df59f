"""A table's columns and types as Spark shows them, without asking Spark."""

from __future__ import annotations

import pyspark.sql.types as pst
from pyiceberg import types as ice
from pyiceberg.schema import Schema

_PLAIN: dict[type[ice.IcebergType], pst.DataType] = {
    ice.BooleanType: pst.BooleanType(),
    ice.IntegerType: pst.IntegerType(),
    ice.LongType: pst.LongType(),
    ice.FloatType: pst.FloatType(),
    ice.DoubleType: pst.DoubleType(),
    ice.DateType: pst.DateType(),
    ice.TimestampType: pst.TimestampNTZType(),
    ice.TimestamptzType: pst.TimestampType(),
    ice.StringType: pst.StringType(),
    ice.UUIDType: pst.StringType(),
    ice.FixedType: pst.BinaryType(),
    ice.BinaryType: pst.BinaryType(),
}


def spark_schema(schema: Schema) -> pst.StructType | None:
    """`schema` in Spark's types; None when it has a type that is not known here to be one of Spark's."""
    fields = _fields(schema.fields)
    return None if fields is None else pst.StructType(fields)


def _fields(fields: tuple[ice.NestedField, ...]) -> list[pst.StructField] | None:
    found = []
    for field in fields:
        kind = _kind(field.field_type)
        if kind is None:
            return None
        found.append(pst.StructField(field.name, kind, field.optional))
    return found


def _kind(kind: ice.IcebergType) -> pst.DataType | None:
    if isinstance(kind, ice.DecimalType):
        return pst.DecimalType(kind.precision, kind.scale)
    if isinstance(kind, ice.StructType):
        fields = _fields(kind.fields)
        return None if fields is None else pst.StructType(fields)
    if isinstance(kind, ice.ListType):
        element = _kind(kind.element_type)
        return None if element is None else pst.ArrayType(element, not kind.element_required)
    if isinstance(kind, ice.MapType):
        key, value = _kind(kind.key_type), _kind(kind.value_type)
        if key is None or value is None:
            return None
        return pst.MapType(key, value, not kind.value_required)
    return _PLAIN.get(type(kind))
