"""Casts of structs, lists and maps to the type of a column, value by value, as SQL expressions.

Spark's own casts match the fields of structs by position, and refuse structs with more or fewer fields. Their
`try_cast` turns a part that does not fit into null.

The casts are SQL texts, because each function of a `Column` is a message inside the message of its caller.
Spark Connect allows a hundred levels of messages, so only nine levels of structs would fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from branchlake_dagster.ingest.spark_expressions import fold_name, split_outer_type
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_string

CastValue = Callable[[str, DataType, str], str]
"""Casts a value of a Spark type to a type that is not a struct, list or map; null if it does not fit.

The value and the result are SQL expressions.
"""
NESTED_TYPES = (StructType, ArrayType, MapType)
"""The types whose values have parts."""
_NESTED_NAMES = ("struct", "array", "map")
_NEVER = "FALSE"


def cast_nested(value: str, source: DataType, kind: str, cast_value: CastValue, level: int = 0) -> str:
    """Return a value of type `source` as the type `kind`; null for a part that does not fit.

    The value and the result are SQL expressions. `level` is the number of lists and maps around the value.

    Fields of structs are matched by `match_fields`: fields that `kind` does not have are left out, and
    missing ones are null. A struct without any field of `kind` does not fit. `lost_part` returns whether a
    part did not fit.
    """
    outer, parts = split_outer_type(kind)
    if is_same_type(source, kind):
        return value
    if outer == "struct" and isinstance(source, StructType):
        fields = match_fields(source, [name for name, _ in parts])
        if source.fields and not fields:
            return null_of(kind)
        members = []
        for name, part in parts:
            member = null_of(part)
            if name in fields:
                field_type = source.fields[fields[name]].dataType
                member = cast_nested(
                    select_field(value, source, fields[name]), field_type, part, cast_value, level
                )
            members += [quote_spark_string(name), member]
        return f"IF({value} IS NOT NULL, named_struct({', '.join(members)}), NULL)"
    if outer == "array" and isinstance(source, ArrayType):
        return _cast_each(value, source.elementType, parts[0][1], cast_value, level)
    if outer == "map" and isinstance(source, MapType):
        (_, key), (_, item) = parts
        if is_same_type(source.keyType, key):
            variable = f"__item{level}"
            cast_item = cast_nested(variable, source.valueType, item, cast_value, level + 1)
            return f"transform_values({value}, (__key{level}, {variable}) -> {cast_item})"
        items = _cast_each(f"map_values({value})", source.valueType, item, cast_value, level)
        keys = _cast_each(f"map_keys({value})", source.keyType, key, cast_value, level)
        # Spark fails for a map with a null key, or with a key twice.
        are_keys = (
            f"NOT exists({keys}, __item{level} -> __item{level} IS NULL)"
            f" AND size(array_distinct({keys})) = size({keys})"
        )
        return f"IF({are_keys}, map_from_arrays({keys}, {items}), NULL)"
    if (isinstance(source, NESTED_TYPES) and outer != "string") or outer in _NESTED_NAMES:
        return null_of(kind)
    return cast_value(value, source, kind)


def lost_part(value: str, source: DataType, kind: str, cast_value: CastValue, level: int = 0) -> str:
    """Return whether any part of a value is lost by `cast_nested` with the same arguments, never null."""
    outer, parts = split_outer_type(kind)
    if is_same_type(source, kind):
        return _NEVER
    if outer == "struct" and isinstance(source, StructType):
        fields = match_fields(source, [name for name, _ in parts])
        if source.fields and not fields:
            return f"{value} IS NOT NULL"
        return _any_of(
            lost_part(
                select_field(value, source, fields[name]),
                source.fields[fields[name]].dataType,
                part,
                cast_value,
                level,
            )
            for name, part in parts
            if name in fields
        )
    if outer == "array" and isinstance(source, ArrayType):
        return _any_lost(value, source.elementType, parts[0][1], cast_value, level)
    is_lost = f"({value} IS NOT NULL AND {cast_nested(value, source, kind, cast_value, level)} IS NULL)"
    if outer == "map" and isinstance(source, MapType):
        (_, key), (_, item) = parts
        return _any_of(
            [
                _any_lost(f"map_values({value})", source.valueType, item, cast_value, level),
                _any_lost(f"map_keys({value})", source.keyType, key, cast_value, level),
                _NEVER if is_same_type(source.keyType, key) else is_lost,
            ]
        )
    return is_lost


def match_fields(source: StructType, names: Sequence[str]) -> dict[str, int]:
    """Return the positions of the fields of a struct that have these names, by name.

    A name without a field of exactly this name has the field whose name differs only in case, if there is
    exactly one, and no other name has it.
    """
    positions = {field.name: number for number, field in enumerate(source.fields)}
    fields = {name: positions[name] for name in names if name in positions}
    others = [name for name in names if name not in fields]
    folded_names = Counter(fold_name(name) for name in others)
    free = [number for name, number in positions.items() if name not in fields]
    for name in others:
        candidates = [one for one in free if fold_name(source.fields[one].name) == fold_name(name)]
        if len(candidates) == 1 and folded_names[fold_name(name)] == 1:
            fields[name] = candidates[0]
    return fields


def select_field(value: str, source: StructType, position: int) -> str:
    """Return the SQL expression of a struct's field.

    Spark ignores the case of names in expressions and refuses a name that two fields have. Then the fields
    get other names, by a cast, which matches them by position.
    """
    folded_names = Counter(fold_name(field.name) for field in source.fields)
    name = source.fields[position].name
    if folded_names[fold_name(name)] == 1:
        return f"{value}.{quote_spark_name(name)}"
    fields = ", ".join(
        f"`_{number}`: {format_type(field.dataType)}" for number, field in enumerate(source.fields)
    )
    return f"CAST({value} AS struct<{fields}>).`_{position}`"


def null_of(kind: str) -> str:
    """Return the SQL expression of a null with a type."""
    return f"CAST(NULL AS {kind})"


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


def _cast_each(values: str, source: DataType, kind: str, cast_value: CastValue, level: int) -> str:
    if is_same_type(source, kind):
        return values
    variable = f"__item{level}"
    return f"transform({values}, {variable} -> {cast_nested(variable, source, kind, cast_value, level + 1)})"


def _any_lost(values: str, source: DataType, kind: str, cast_value: CastValue, level: int) -> str:
    variable = f"__item{level}"
    is_lost = lost_part(variable, source, kind, cast_value, level + 1)
    return _NEVER if is_lost == _NEVER else f"coalesce(exists({values}, {variable} -> {is_lost}), FALSE)"


def _any_of(conditions: Iterable[str]) -> str:
    """Return whether at least one condition holds. The conditions are never null."""
    present = [one for one in conditions if one != _NEVER]
    return f"({' OR '.join(present)})" if present else _NEVER
