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
from branchlake_dagster.spark.session import quoted


def seldom(condition: Expression, value: Expression, made: Callable[[Expression], Expression]) -> Expression:
    """What `made` makes of the value where the condition holds, else null; outside Spark's compiled code.

    What is compiled together is one method, and one of more than 8,000 bytes Java leaves to its interpreter:
    with the words for every bad field in it, records that are all good took twice as long. Spark evaluates a
    lambda node by node, only where it has to.
    """
    return F.when(condition, bound(value, made))


def first_of(kind: str, said: Sequence[tuple[Expression, str]]) -> list[tuple[Expression, Expression]]:
    """One branch of a `case` for many conditions, each with its words: those of the first that holds."""
    if not said:
        return []
    words = F.coalesce(*(F.when(condition, text) for condition, text in said))
    return [(any_of(one for one, _ in said), bound(F.lit(kind), lambda told: because(told, words)))]


def matches_whole(text: Expression, pattern: str) -> Expression:
    r"""Whether a regular expression matches all of a text; null where the text is null.

    Java's ``$`` also matches before a line break at the end: ``a\n`` was taken for the route ``a``.
    """
    return text.rlike(whole(pattern))


def whole(pattern: str) -> str:
    """The regular expression that matches a text from its first to its last character, in Java."""
    return rf"\A(?:{pattern})\z"


def any_of(conditions: Iterable[Expression]) -> Expression:
    """Whether one of them holds; null is no."""
    return balanced(or_, [F.coalesce(one, F.lit(False)) for one in conditions], F.lit(False))


def balanced(
    join: Callable[[Expression, Expression], Expression], parts: Sequence[Expression], nothing: Expression
) -> Expression:
    """All of them joined two by two, `nothing` where there are none.

    One after the other they would be as deep as they are many: of more than fifty tables or partitions the
    message to Spark is refused (a protocol buffer's limit of a hundred levels).
    """
    found = list(parts)
    while len(found) > 1:
        found = [reduce(join, found[at : at + 2]) for at in range(0, len(found), 2)]
    return found[0] if found else nothing


def bound(value: Expression, made: Callable[[Expression], Expression]) -> Expression:
    """What `made` makes of a value that is computed once, however often it names it; never compiled."""
    return F.transform(F.array(value), made)[0]


def because(kind: Expression | str, detail: Expression | str) -> Expression:
    """A reason, as `Fitted.why` has it."""
    said, text = (F.lit(one) if isinstance(one, str) else one for one in (kind, detail))
    return F.struct(said.alias("kind"), text.alias("detail"))


def no_reason() -> Expression:
    """None, in the type of a reason."""
    return F.lit(None).cast("struct<kind: string, detail: string>")


def case(branches: Sequence[tuple[Expression, Expression]], otherwise: Expression) -> Expression:
    """CASE WHEN with any number of branches."""
    if not branches:
        return otherwise
    (condition, value), rest = branches[0], branches[1:]
    return reduce(lambda found, one: found.when(*one), rest, F.when(condition, value)).otherwise(otherwise)


JSON_STRING = r'"(?:[^"\\]|\\.)*+"'
"""A regular expression: a string with its quotes. It never backtracks."""
DEEPEST = 200
"""Levels of objects and lists that Spark's functions on types of values follow with the stack of any JVM."""


def is_json_object(text: Expression) -> Expression:
    """Whether a text that is known to be JSON holds an object, by its first character; null stays null."""
    return text.rlike(r"^[ \t\r\n]*\{")


def is_deep_json(text: Expression, levels: int = DEEPEST) -> Expression:
    """Whether a text has more than so many objects and lists inside each other; null has none.

    `schema_of_variant` calls itself for each level. A value of a thousand levels, five kilobytes, exhausts
    the stack of an executor's thread, which Spark takes for a failure of the executor and ends it.

    A text with few brackets costs one replacement. Of any other the pairs of brackets without anything
    inside are taken away, level by level.
    """
    openings = F.length(F.regexp_replace(text, r"[^\[{]", ""))
    brackets = F.regexp_replace(F.regexp_replace(text, JSON_STRING, ""), r"[^\[\]{}]", "")
    rest = F.reduce(
        F.sequence(F.lit(1), F.lit(levels)),
        brackets,
        lambda left, _: F.regexp_replace(left, r"\[\]|\{\}", ""),
    )
    return F.coalesce(F.when(openings > levels, rest != ""), F.lit(False))


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
