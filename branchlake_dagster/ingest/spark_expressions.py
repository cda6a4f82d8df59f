"""Spark expressions for columns, texts of JSON, and reasons why a record has no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

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
from pyspark.sql import Column as Expression
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.spark.session import quote_spark_name


def interpret_when(
    condition: Expression, value: Expression, function: Callable[[Expression], Expression]
) -> Expression:
    """What `function` makes of the value where the condition holds, else null; outside Spark's compiled code.

    What is compiled together is one method, and one of more than 8,000 bytes Java leaves to its interpreter:
    with the words for every bad field in it, records that are all good took twice as long. Spark evaluates a
    lambda node by node, only where it has to.
    """
    return F.when(condition, bind_value(value, function))


def first_reason(
    kind: str, branches: Sequence[tuple[Expression, str]]
) -> list[tuple[Expression, Expression]]:
    """One branch of a `build_case` for many conditions, each with its words: those of the first that holds."""
    if not branches:
        return []
    detail = F.coalesce(*(F.when(condition, text) for condition, text in branches))
    return [
        (
            any_of(condition for condition, _ in branches),
            bind_value(F.lit(kind), lambda kind_value: build_reason(kind_value, detail)),
        )
    ]


def matches_whole(value: Expression, pattern: str) -> Expression:
    r"""Whether a regular expression matches all of a text; null where the text is null.

    Java's ``$`` also matches before a line break at the end: ``a\n`` was taken for the route ``a``.
    """
    return value.rlike(full_match_pattern(pattern))


def full_match_pattern(pattern: str) -> str:
    """The regular expression that matches a text from its first to its last character, in Java."""
    return rf"\A(?:{pattern})\z"


def any_of(conditions: Iterable[Expression]) -> Expression:
    """Whether one of them holds; null is no."""
    return join_balanced(or_, [F.coalesce(one, F.lit(False)) for one in conditions], F.lit(False))


def join_balanced(
    join: Callable[[Expression, Expression], Expression], parts: Sequence[Expression], default: Expression
) -> Expression:
    """All of them joined two by two, `default` where there are none.

    One after the other they would be as deep as they are many: of more than fifty tables or partitions the
    message to Spark is refused (a protocol buffer's limit of a hundred levels).
    """
    expressions = list(parts)
    while len(expressions) > 1:
        expressions = [reduce(join, expressions[at : at + 2]) for at in range(0, len(expressions), 2)]
    return expressions[0] if expressions else default


def bind_value(value: Expression, function: Callable[[Expression], Expression]) -> Expression:
    """What `function` makes of a value that is computed once, however often it names it; never compiled."""
    return F.transform(F.array(value), function)[0]


def build_reason(kind: Expression | str, detail: Expression | str) -> Expression:
    """A reason, as `Fitted.why` has it."""
    kind_value, detail_value = (F.lit(value) if isinstance(value, str) else value for value in (kind, detail))
    return F.struct(kind_value.alias("kind"), detail_value.alias("detail"))


def no_reason() -> Expression:
    """None, in the type of a reason."""
    return F.lit(None).cast("struct<kind: string, detail: string>")


def build_case(branches: Sequence[tuple[Expression, Expression]], otherwise: Expression) -> Expression:
    """CASE WHEN with any number of branches."""
    if not branches:
        return otherwise
    (condition, value), rest = branches[0], branches[1:]
    return reduce(lambda found, one: found.when(*one), rest, F.when(condition, value)).otherwise(otherwise)


JSON_STRING = r'"(?:[^"\\]|\\.)*+"'
"""A regular expression: a string with its quotes. It never backtracks."""
MAX_DEPTH = 200
"""Levels of objects and lists that Spark's functions on types of values follow with the stack of any JVM."""


def is_json_object(json_text: Expression) -> Expression:
    """Whether a text that is known to be JSON holds an object, by its first character; null stays null."""
    return json_text.rlike(r"^[ \t\r\n]*\{")


def is_deep_json(json_text: Expression, levels: int = MAX_DEPTH) -> Expression:
    """Whether a text has more than so many objects and lists inside each other; null has none.

    `schema_of_variant` calls itself for each level. A value of a thousand levels, five kilobytes, exhausts
    the stack of an executor's thread, which Spark takes for a failure of the executor and ends it.

    A text with few brackets costs one replacement. Of any other the pairs of brackets without anything
    inside are taken away, level by level.
    """
    openings = F.length(F.regexp_replace(json_text, r"[^\[{]", ""))
    brackets = F.regexp_replace(F.regexp_replace(json_text, JSON_STRING, ""), r"[^\[\]{}]", "")
    rest = F.reduce(
        F.sequence(F.lit(1), F.lit(levels)),
        brackets,
        lambda left, _: F.regexp_replace(left, r"\[\]|\{\}", ""),
    )
    return F.coalesce(F.when(openings > levels, rest != ""), F.lit(False))


NAME_MAPPING = "schema.name-mapping.default"
_SPARK_TYPES: Mapping[type[IcebergType], str] = {
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
_WIDER_TYPES = {"int": "bigint", "float": "double"}
_MAX_DIGITS = 38


@dataclass(frozen=True)
class RecordColumn:
    """A column of a table: its name there, Spark's type, and the names that records have for it."""

    name: str
    kind: str
    fields: tuple[str, ...]
    required: bool = False
    """The table takes no null there."""

    @property
    def wider(self) -> RecordColumn:
        """The column with the widest type that Iceberg lets it become."""
        kind = _WIDER_TYPES.get(self.kind, self.kind)
        if kind.startswith("decimal("):
            kind = f"decimal({_MAX_DIGITS},{kind.rstrip(')').partition(',')[2]})"
        return replace(self, kind=kind)


def columns_of(schema: Schema, properties: Mapping[str, str], *, table: str) -> tuple[RecordColumn, ...]:
    """The columns of a table, with the names of its name mapping where it has one.

    Raises ConfigurationError for a mapping that cannot be read, or that gives other names to fields inside a
    column: records are converted to structs by the names that the fields have in the table.
    """
    names_by_id = _parse_name_mapping(properties, schema, table)
    return tuple(
        RecordColumn(
            field.name,
            spark_type(field.field_type, table),
            names_by_id.get(field.field_id) or (field.name,),
            field.required,
        )
        for field in schema.fields
    )


def _parse_name_mapping(
    properties: Mapping[str, str], schema: Schema, table: str
) -> dict[int, tuple[str, ...]]:
    """The names of top-level columns by field id."""
    mapping_json = properties.get(NAME_MAPPING)
    if mapping_json is None:
        return {}
    try:
        mapping = NameMapping.model_validate_json(mapping_json)
    except ValueError as error:
        raise ConfigurationError(
            f"The table's property {NAME_MAPPING} cannot be read.", table=table, hint="It is a JSON list."
        ) from error
    for column in mapping:
        if renamed_fields := list(_iter_renamed_fields(column.fields, schema)):
            raise ConfigurationError(
                f"The table's property {NAME_MAPPING} gives other names to {', '.join(renamed_fields)}, and"
                " records"
                " are converted by the names of columns only.",
                table=table,
                hint="Leave those names out of the mapping, or rename the fields inside the column.",
            )
    return {
        column.field_id: names
        for column in mapping
        if column.field_id is not None and (names := _mapped_names(column))
    }


def _mapped_names(field: MappedField) -> tuple[str, ...]:
    """Its names; PyIceberg's default for a field without any is not a list."""
    return tuple(field.names) if isinstance(field.names, list) else ()


def _iter_renamed_fields(fields: Iterable[MappedField], schema: Schema) -> Iterator[str]:
    """The fields inside a column that a mapping calls otherwise than the table, with the column's name."""
    for field in fields:
        if field.field_id in schema.field_ids:
            path = schema.find_column_name(field.field_id) or ""
            if {*_mapped_names(field)} - {schema.find_field(field.field_id).name}:
                yield path
        yield from _iter_renamed_fields(field.fields, schema)


def spark_type(kind: IcebergType, table: str) -> str:
    """The type in Spark's DDL. Raises ConfigurationError where Spark has none."""
    if isinstance(kind, DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    if isinstance(kind, ListType):
        return f"array<{spark_type(kind.element_type, table)}>"
    if isinstance(kind, MapType):
        return f"map<{spark_type(kind.key_type, table)},{spark_type(kind.value_type, table)}>"
    if isinstance(kind, StructType):
        field_types = (
            f"{quote_spark_name(one.name)}: {spark_type(one.field_type, table)}" for one in kind.fields
        )
        return f"struct<{', '.join(field_types)}>"
    type_name = _SPARK_TYPES.get(type(kind))
    if type_name is None:
        raise ConfigurationError(
            f"Spark cannot write columns of type {kind}.",
            table=table,
            hint="Leave the column out, or change it.",
        )
    return type_name


def format_ddl(columns: Sequence[tuple[str, str]]) -> str:
    """A schema in Spark's DDL."""
    return ", ".join(f"{quote_spark_name(name)} {kind}" for name, kind in columns)
