"""Columns as Spark's types: what a table's records are converted to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    UUIDType,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.spark.session import quoted

NAME_MAPPING = "schema.name-mapping.default"
_PLAIN: Mapping[type[IcebergType], str] = {
    BooleanType: "boolean",
    IntegerType: "int",
    LongType: "bigint",
    FloatType: "float",
    DoubleType: "double",
    StringType: "string",
    BinaryType: "binary",
    FixedType: "binary",
    UUIDType: "string",
    DateType: "date",
    TimestampType: "timestamp_ntz",
    TimestamptzType: "timestamp",
}
_WIDER = {"int": "bigint", "float": "double"}
_MOST_DIGITS = 38


@dataclass(frozen=True)
class Column:
    """A column of a table: its name there, Spark's type, and the names that records have for it."""

    name: str
    kind: str
    fields: tuple[str, ...]
    required: bool = False
    """The table takes no null there."""

    @property
    def wider(self) -> Column:
        """The column with the widest type that Iceberg lets it become."""
        kind = _WIDER.get(self.kind, self.kind)
        if kind.startswith("decimal("):
            kind = f"decimal({_MOST_DIGITS},{kind.rstrip(')').partition(',')[2]})"
        return replace(self, kind=kind)


def columns_of(schema: Schema, properties: Mapping[str, str], *, table: str) -> tuple[Column, ...]:
    """The columns of a table, with the names of its name mapping where it has one.

    Raises ConfigurationError for a mapping that cannot be read, or that gives other names to fields inside a
    column: records are converted to structs by the names that the fields have in the table.
    """
    mapped = _mapping(properties, schema, table)
    return tuple(
        Column(
            field.name,
            spark_type(field.field_type, table),
            mapped.get(field.field_id) or (field.name,),
            field.required,
        )
        for field in schema.fields
    )


def _mapping(properties: Mapping[str, str], schema: Schema, table: str) -> dict[int, tuple[str, ...]]:
    """The names of top-level columns by field id."""
    text = properties.get(NAME_MAPPING)
    if text is None:
        return {}
    try:
        mapping = NameMapping.model_validate_json(text)
    except ValueError as error:
        raise ConfigurationError(
            f"The table's property {NAME_MAPPING} cannot be read.", table=table, hint="It is a JSON list."
        ) from error
    for column in mapping:
        if renamed := list(_renamed(column.fields, schema)):
            raise ConfigurationError(
                f"The table's property {NAME_MAPPING} gives other names to {', '.join(renamed)}, and records"
                " are converted by the names of columns only.",
                table=table,
                hint="Leave those names out of the mapping, or rename the fields inside the column.",
            )
    return {
        column.field_id: names
        for column in mapping
        if column.field_id is not None and (names := _names(column))
    }


def _names(field: MappedField) -> tuple[str, ...]:
    """Its names; PyIceberg's default for a field without any is not a list."""
    return tuple(field.names) if isinstance(field.names, list) else ()


def _renamed(fields: Iterable[MappedField], schema: Schema) -> Iterator[str]:
    """The fields inside a column that a mapping calls otherwise than the table, with the column's name."""
    for one in fields:
        if one.field_id in schema.field_ids:
            path = schema.find_column_name(one.field_id) or ""
            if {*_names(one)} - {schema.find_field(one.field_id).name}:
                yield path
        yield from _renamed(one.fields, schema)


def spark_type(kind: IcebergType, table: str) -> str:
    """The type in Spark's DDL. Raises ConfigurationError where Spark has none."""
    if isinstance(kind, DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    if isinstance(kind, ListType):
        return f"array<{spark_type(kind.element_type, table)}>"
    if isinstance(kind, MapType):
        return f"map<{spark_type(kind.key_type, table)},{spark_type(kind.value_type, table)}>"
    if isinstance(kind, StructType):
        inside = (f"{quoted(one.name)}: {spark_type(one.field_type, table)}" for one in kind.fields)
        return f"struct<{', '.join(inside)}>"
    found = _PLAIN.get(type(kind))
    if found is None:
        raise ConfigurationError(
            f"Spark cannot write columns of type {kind}.",
            table=table,
            hint="Leave the column out, or change it.",
        )
    return found


def ddl(columns: Sequence[tuple[str, str]]) -> str:
    """A schema in Spark's DDL."""
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in columns)
