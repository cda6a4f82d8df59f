"""Casts of structs, lists and maps to the type of a column, value by value.

Spark's own casts match the fields of structs by position, and refuse structs with more or fewer fields. Their
`try_cast` turns a part that does not fit into null without a word.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column as Expression
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from branchlake_dagster.ingest.spark_expressions import any_of, split_outer_type
from branchlake_dagster.spark.session import quote_spark_name

CastValue = Callable[[Expression, DataType, str], Expression]
"""Casts a value of a Spark type to a type that is not a struct, list or map; null if it does not fit."""
NESTED_TYPES = (StructType, ArrayType, MapType)
"""The types whose values have parts."""


def cast_nested(value: Expression, source: DataType, kind: str, cast_value: CastValue) -> Expression:
    """Return a value of type `source` as the type `kind`; null for a part that does not fit.

    Fields of structs are matched by name: fields that `kind` does not have are left out, and missing ones
    are null. `lost_part` returns whether a part did not fit.
    """
    outer, parts = split_outer_type(kind)
    if is_same_type(source, kind):
        return value
    if outer == "struct" and isinstance(source, StructType):
        types = {field.name: field.dataType for field in source.fields}
        fields = (
            cast_nested(value.getField(name), types[name], part, cast_value)
            if name in types
            else F.lit(None).cast(part)
            for name, part in parts
        )
        struct = F.struct(*(field.alias(name) for field, (name, _) in zip(fields, parts, strict=True)))
        return F.when(value.isNotNull(), struct)
    if outer == "array" and isinstance(source, ArrayType):
        return _cast_each(value, source.elementType, parts[0][1], cast_value)
    if outer == "map" and isinstance(source, MapType):
        (_, key), (_, item) = parts
        if is_same_type(source.keyType, key):
            return F.transform_values(
                value, lambda _, one: cast_nested(one, source.valueType, item, cast_value)
            )
        items = _cast_each(F.map_values(value), source.valueType, item, cast_value)
        keys = _cast_each(F.map_keys(value), source.keyType, key, cast_value)
        # Spark fails for a map with a null key, or with a key twice.
        are_keys = ~F.exists(keys, lambda one: one.isNull()) & (
            F.size(F.array_distinct(keys)) == F.size(keys)
        )
        return F.when(are_keys, F.map_from_arrays(keys, items))
    if (isinstance(source, NESTED_TYPES) and outer != "string") or parts:
        return F.lit(None).cast(kind)
    return cast_value(value, source, kind)


def lost_part(value: Expression, source: DataType, kind: str, cast_value: CastValue) -> Expression:
    """Return whether any part of a value is lost by `cast_nested` with the same arguments."""
    outer, parts = split_outer_type(kind)
    if is_same_type(source, kind):
        return F.lit(False)
    is_lost = value.isNotNull() & cast_nested(value, source, kind, cast_value).isNull()
    if outer == "struct" and isinstance(source, StructType):
        types = {field.name: field.dataType for field in source.fields}
        return any_of(
            lost_part(value.getField(name), types[name], part, cast_value)
            for name, part in parts
            if name in types
        )
    if outer == "array" and isinstance(source, ArrayType):
        return _any_lost(value, source.elementType, parts[0][1], cast_value)
    if outer == "map" and isinstance(source, MapType):
        lost_items = _any_lost(F.map_values(value), source.valueType, parts[1][1], cast_value)
        return lost_items | is_lost
    return is_lost


def is_same_type(source: DataType, kind: str) -> bool:
    """Return whether a Spark type is the type `kind` of a column, with the same fields in the same order."""
    outer, parts = split_outer_type(kind)
    if isinstance(source, StructType):
        children = [(field.name, field.dataType) for field in source.fields]
    elif isinstance(source, ArrayType):
        children = [("element", source.elementType)]
    elif isinstance(source, MapType):
        children = [("key", source.keyType), ("value", source.valueType)]
    else:
        return source.simpleString() == kind
    return (
        source.typeName() == outer
        and [name for name, _ in children] == [name for name, _ in parts]
        and all(is_same_type(child, part) for (_, child), (_, part) in zip(children, parts, strict=True))
    )


def format_type(kind: DataType) -> str:
    """Return a Spark type as the type of a column, as `spark_type` writes it."""
    if isinstance(kind, StructType):
        fields = (f"{quote_spark_name(field.name)}: {format_type(field.dataType)}" for field in kind.fields)
        return f"struct<{', '.join(fields)}>"
    if isinstance(kind, ArrayType):
        return f"array<{format_type(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{format_type(kind.keyType)},{format_type(kind.valueType)}>"
    return kind.simpleString()


def _cast_each(values: Expression, source: DataType, kind: str, cast_value: CastValue) -> Expression:
    if is_same_type(source, kind):
        return values
    return F.transform(values, lambda value: cast_nested(value, source, kind, cast_value))


def _any_lost(values: Expression, source: DataType, kind: str, cast_value: CastValue) -> Expression:
    if is_same_type(source, kind):
        return F.lit(False)
    return F.coalesce(
        F.exists(values, lambda value: lost_part(value, source, kind, cast_value)), F.lit(False)
    )
