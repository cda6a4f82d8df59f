"""Spark expressions for columns, JSON texts, and the reasons why a record has no row."""

from __future__ import annotations

import re
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
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.spark.session import quote_spark_name


def interpret_when(
    condition: Expression, value: Expression, function: Callable[[Expression], Expression]
) -> Expression:
    """Return `function(value)` where the condition holds, else null. Spark does not compile the function.

    Spark compiles expressions into one Java method, and Java does not compile a method of more than 8,000
    bytes to machine code. With the texts for every bad field in that method, good records took twice as long.
    Spark interprets a lambda node by node, only where it is needed.
    """
    return F.when(condition, bind_value(value, function))


def first_reason(
    kind: str, branches: Sequence[tuple[Expression, str]]
) -> list[tuple[Expression, Expression]]:
    """Build one branch for `build_case` from conditions, each with the text of its reason.

    Returns a list with this branch; [] without conditions. The branch applies if any condition holds. Its
    reason has the text of the first condition that holds.
    """
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
    r"""Return whether a regular expression matches the whole text. The result is null for a null text.

    Java's ``$`` also matches before a line break at the end: it would take ``a\n`` for the route ``a``.
    """
    return value.rlike(full_match_pattern(pattern))


def full_match_pattern(pattern: str) -> str:
    """Return the Java regular expression that matches a text if `pattern` matches all its characters."""
    return rf"\A(?:{pattern})\z"


def any_of(conditions: Iterable[Expression]) -> Expression:
    """Return whether at least one condition holds. A null condition does not hold."""
    return join_balanced(or_, [F.coalesce(condition, F.lit(False)) for condition in conditions], F.lit(False))


def any_value(
    column: Expression, steps: Sequence[str], condition: Callable[[Expression], Expression]
) -> Expression:
    """Return whether a condition holds for at least one value inside a column. Null where nothing decides it.

    `steps` lead from the column to the values: `.<field>` of a struct, `element` of a list, `key` or `value`
    of a map.
    """
    if not steps:
        return condition(column)
    step, rest = steps[0], steps[1:]
    if step.startswith("."):
        return any_value(column.getField(step[1:]), rest, condition)
    values = {
        "element": lambda: column,
        "key": lambda: F.map_keys(column),
        "value": lambda: F.map_values(column),
    }
    return F.exists(values[step](), lambda value: any_value(value, rest, condition))


def join_balanced(
    join: Callable[[Expression, Expression], Expression], parts: Sequence[Expression], default: Expression
) -> Expression:
    """Join expressions pairwise in a balanced tree. Return `default` if there are none.

    A chain would be as deep as the number of expressions. With more than fifty tables or partitions Spark
    would reject the message, because protocol buffers allow a hundred levels.
    """
    expressions = list(parts)
    while len(expressions) > 1:
        expressions = [reduce(join, expressions[at : at + 2]) for at in range(0, len(expressions), 2)]
    return expressions[0] if expressions else default


def bind_value(value: Expression, function: Callable[[Expression], Expression]) -> Expression:
    """Return `function(value)` and compute the value only once. Spark does not compile the function."""
    return F.transform(F.array(value), function)[0]


def build_reason(kind: Expression | str, detail: Expression | str) -> Expression:
    """Build a reason why a record has no row: a struct of `kind` and `detail`."""
    kind_value, detail_value = (F.lit(value) if isinstance(value, str) else value for value in (kind, detail))
    return F.struct(kind_value.alias("kind"), detail_value.alias("detail"))


def no_reason() -> Expression:
    """Return the expression null with the type of a reason, which means that the record has a row."""
    return F.lit(None).cast("struct<kind: string, detail: string>")


def build_case(branches: Sequence[tuple[Expression, Expression]], otherwise: Expression) -> Expression:
    """Build a CASE WHEN expression from `branches`, pairs of a condition and a value.

    The first condition that holds decides. If none holds, or without branches, the value is `otherwise`.
    """
    if not branches:
        return otherwise
    (condition, value), rest = branches[0], branches[1:]
    return reduce(lambda found, one: found.when(*one), rest, F.when(condition, value)).otherwise(otherwise)


JSON_STRING = r'"(?:[^"\\]|\\.)*+"'
"""Regular expression for a JSON string with its quotes. It never backtracks."""
MAX_DEPTH = 200
"""Levels of nested objects and lists that Spark's recursive type functions handle with the stack of any JVM.
"""


def is_json_object(json_text: Expression) -> Expression:
    """Return whether a valid JSON text is an object, by its first character. The result is null for null."""
    return json_text.rlike(r"^[ \t\r\n]*\{")


def is_deep_json(json_text: Expression, levels: int = MAX_DEPTH) -> Expression:
    """Return whether a JSON text has more nested levels of objects and lists than `levels`.

    False for null.

    `schema_of_variant` is recursive. A value of a thousand levels, five kilobytes, overflows the stack of the
    executor's thread. Spark treats that as a failure of the executor and ends it.

    A text with few brackets costs one replacement. In any other text, pairs of empty brackets are removed
    level by level.
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
    """A column of a table: its name, its Spark type, and the field names that records have for it."""

    name: str
    kind: str
    fields: tuple[str, ...]
    required: bool = False
    """Whether the table allows no null in the column."""

    @property
    def wider(self) -> RecordColumn:
        """The column with the widest type to which Iceberg can promote it; itself if there is none."""
        kind = _WIDER_TYPES.get(self.kind, self.kind)
        if kind.startswith("decimal("):
            kind = f"decimal({_MAX_DIGITS},{kind.rstrip(')').partition(',')[2]})"
        return replace(self, kind=kind)


def columns_of(schema: Schema, properties: Mapping[str, str], *, table: str) -> tuple[RecordColumn, ...]:
    """Return the columns of a table, with the names of its name mapping if it has one.

    Raises ConfigurationError if the mapping cannot be read, or if it renames fields inside a column. Records
    are converted to structs by the names that these fields have in the table.
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
    """Return the mapped names of top-level columns, by field id; {} if the table has no name mapping.

    `properties` are those of the table. Raises ConfigurationError if the mapping cannot be read, or if it
    renames fields inside a column.
    """
    mapping_json = properties.get(NAME_MAPPING)
    if mapping_json is None:
        return {}
    try:
        mapping = NameMapping.model_validate_json(mapping_json)
    except ValueError as error:
        raise ConfigurationError(
            f"The table's property {NAME_MAPPING} cannot be read.",
            table=table,
            hint="Set it to a JSON list of mapped fields, or remove the property.",
        ) from error
    for column in mapping:
        if renamed_fields := list(_iter_renamed_fields(column.fields, schema)):
            raise ConfigurationError(
                f"The table's property {NAME_MAPPING} gives other names to {', '.join(renamed_fields)}, but"
                " records are converted by the names of top-level columns only.",
                table=table,
                hint="Remove these names from the mapping, or rename the fields inside the column.",
            )
    return {
        column.field_id: names
        for column in mapping
        if column.field_id is not None and (names := _mapped_names(column))
    }


def _mapped_names(field: MappedField) -> tuple[str, ...]:
    """Return the names of a mapped field. PyIceberg's default for a field without names is not a list."""
    return tuple(field.names) if isinstance(field.names, list) else ()


def _iter_renamed_fields(fields: Iterable[MappedField], schema: Schema) -> Iterator[str]:
    """Iterate over the paths of fields inside a column whose mapped names differ from the table's."""
    for field in fields:
        if field.field_id in schema.field_ids:
            path = schema.find_column_name(field.field_id) or ""
            if {*_mapped_names(field)} - {schema.find_field(field.field_id).name}:
                yield path
        yield from _iter_renamed_fields(field.fields, schema)


def spark_type(kind: IcebergType, table: str) -> str:
    """Return an Iceberg type in Spark's DDL, such as `array<bigint>`.

    Raises ConfigurationError, which names the `table`, if Spark has no such type.
    """
    if isinstance(kind, DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    if isinstance(kind, ListType):
        return f"array<{spark_type(kind.element_type, table)}>"
    if isinstance(kind, MapType):
        return f"map<{spark_type(kind.key_type, table)},{spark_type(kind.value_type, table)}>"
    if isinstance(kind, StructType):
        field_types = (
            f"{quote_spark_name(field.name)}: {spark_type(field.field_type, table)}" for field in kind.fields
        )
        return f"struct<{', '.join(field_types)}>"
    type_name = _SPARK_TYPES.get(type(kind))
    if type_name is None:
        raise ConfigurationError(
            f"Spark cannot write columns of type {kind}.",
            table=table,
            hint="Remove the column from the table, or change its type.",
        )
    return type_name


_TYPE_TOKEN = re.compile(r"`(?:[^`]|``)*`|\w+(?:\([\d, ]*\))?|[<>:,]")


def split_outer_type(kind: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a type of `spark_type` at its outermost level: its name, and the name and type of each part.

    The parts of a struct are its fields, that of a list is `element`, and those of a map are `key` and
    `value`. Other types are returned whole, without parts.
    """
    tokens = _TYPE_TOKEN.findall(kind)
    if tokens[1:2] != ["<"]:
        return kind, []
    groups: list[list[str]] = [[]]
    depth = 0
    for word in tokens[2:-1]:
        depth += {"<": 1, ">": -1}.get(word, 0)
        if word == "," and not depth:
            groups.append([])
        else:
            groups[-1].append(word)
    if tokens[0] == "struct":
        return "struct", [(_plain_name(name), "".join(rest)) for name, _, *rest in filter(None, groups)]
    names = ("element",) if tokens[0] == "array" else ("key", "value")
    return tokens[0], [(name, "".join(group)) for name, group in zip(names, groups, strict=True)]


def _plain_name(label: str) -> str:
    """Return a name of a type in DDL without its quotes."""
    return label[1:-1].replace("``", "`") if label.startswith("`") else label


def split_nested_type(kind: str) -> tuple[str, list[tuple[tuple[str, ...], str]]]:
    """Split a type of `spark_type` into its values.

    Returns the same type with `string` for all values that are not structs, lists or maps, and for each of
    these values the steps that lead to it (see `any_value`) and its type.
    """
    text_kind, leaves, _ = _split_type(_TYPE_TOKEN.findall(kind), 0, ())
    return text_kind, leaves


def _split_type(
    tokens: Sequence[str], position: int, steps: tuple[str, ...]
) -> tuple[str, list[tuple[tuple[str, ...], str]], int]:
    """Split the type that begins at `position`. Also returns the position after it."""
    word, position = tokens[position], position + 1
    if tokens[position : position + 1] != ["<"]:
        return "string", [(steps, word)], position
    parts, leaves = [], []
    names = iter(("element",) if word == "array" else ("key", "value"))
    position += 1
    while tokens[position] != ">":
        if word == "struct":
            label = tokens[position]
            part, found, position = _split_type(tokens, position + 2, (*steps, f".{_plain_name(label)}"))
            part = f"{label}: {part}"
        else:
            part, found, position = _split_type(tokens, position, (*steps, next(names)))
        parts.append(part)
        leaves += found
        position += tokens[position] == ","
    return f"{word}<{', '.join(parts)}>", leaves, position + 1


def with_columns(frame: DataFrame, columns: Mapping[str, Expression]) -> DataFrame:
    """Add all columns in one step. Spark limits how many frames may be nested in one message."""
    return frame.withColumns(dict(columns)) if columns else frame


def fold_name(name: str) -> str:
    """Fold the case of a name like Java's `equalsIgnoreCase`: to Spark `İ`, `I`, `i` and `ı` are equal."""
    return "".join(map(_fold_letter, name))


def _fold_letter(letter: str) -> str:
    upper = letter.upper()
    return (upper if len(upper) == 1 else letter).lower()[0]


def format_ddl(columns: Sequence[tuple[str, str]]) -> str:
    """Format a schema in Spark's DDL."""
    return ", ".join(f"{quote_spark_name(name)} {kind}" for name, kind in columns)
