"""The types of fields that nobody has declared, from the schema of the values or from the first records.

The types that Spark's `schema_of_variant_agg` reports, read without asking Spark's server.

Spark Connect returns a type as nested protobuf messages, and its client refuses more than 100 of them: asked
to parse the type of an object of 31 levels, it failed every batch that had such a record.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from branchlake_dagster.ingest.errors import ColumnsUnknown
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.spark_expressions import is_deep_json, is_json_object

MOST_LEVELS = 20
"""Structs and lists inside each other that a column may have.

Each level costs up to three of the 100 messages that Spark Connect may nest, and rows, casts and answers need
some themselves.
"""
_NAME = re.compile(r"`((?:[^`]|``)*)`|([A-Za-z0-9_]+)")
_WORD = re.compile(r"[A-Z0-9_]+(?:\(\d+,\s*\d+\))?")
_BRACKET = re.compile(r"`(?:[^`]|``)*`|([<>])")
_PLAIN: dict[str, DataType] = {
    "VOID": NullType(),
    "BOOLEAN": BooleanType(),
    "BIGINT": LongType(),
    "DOUBLE": DoubleType(),
    "FLOAT": DoubleType(),
    "STRING": StringType(),
}


def variant_type(text: str) -> DataType:
    """The type that a text such as ``OBJECT<id: BIGINT, tags: ARRAY<STRING>>`` describes.

    Whatever lies below `MOST_LEVELS`, and every type that JSON values do not have, becomes `VariantType`.
    Decimals become `DoubleType`: the next record may have more digits. Raises ValueError for another grammar.
    """
    kind, end = _type(text, 0, 0)
    if end != len(text):
        raise ValueError(f"{text[end : end + 50]!r} follows the type of a variant.")
    return kind


def _type(text: str, at: int, level: int) -> tuple[DataType, int]:
    """The type that begins at a position, and the position behind it."""
    word = _WORD.match(text, at)
    if word is None:
        raise ValueError(f"{text[at : at + 50]!r} is not the type of a variant.")
    name, at = word[0], word.end()
    if not text.startswith("<", at):
        if name.startswith("DECIMAL"):
            return DoubleType(), at
        return _PLAIN.get(name, VariantType()), at
    if level == MOST_LEVELS:
        return VariantType(), _behind_brackets(text, at)
    if name == "ARRAY":
        element, at = _type(text, at + 1, level + 1)
        return ArrayType(element), _behind(text, at, ">")
    fields = []
    at += 1
    while not text.startswith(">", at):
        field = _NAME.match(text, at)
        if field is None:
            raise ValueError(f"{text[at : at + 50]!r} does not begin with the name of a field.")
        label = field[2] if field[1] is None else field[1].replace("``", "`")
        kind, at = _type(text, _behind(text, field.end(), ": "), level + 1)
        fields.append(StructField(label, kind))
        if text.startswith(", ", at):
            at += 2
    return StructType(fields), at + 1


def _behind(text: str, at: int, expected: str) -> int:
    if not text.startswith(expected, at):
        raise ValueError(f"{expected!r} is missing before {text[at : at + 50]!r}.")
    return at + len(expected)


def _behind_brackets(text: str, at: int) -> int:
    """The position behind the bracket that closes the one at `at`; names in backticks may hold brackets."""
    depth = 0
    for part in _BRACKET.finditer(text, at):
        depth += {"<": 1, ">": -1}.get(part[1], 0)
        if depth == 0:
            return part.end()
    raise ValueError("A bracket of a variant's type is not closed.")


_SAMPLE = 10_000
"""Records from which types are found."""


def found_types(
    records: DataFrame,
    reading: Format,
    *,
    envelope: bool,
    only: Collection[str] | None = None,
    of: Expression | None = None,
    whole: bool = False,
) -> StructType:
    """The types of the fields of the records, or of those `of` which something holds; or of some fields.

    Of JSON those of the first records, or of all with `whole`: whole numbers are bigint, others double, and
    what is sometimes this and sometimes that is text. A field that is null in all of them has no type, and
    is not among them, nor are those of records that are too deep, see `is_deep_json`. Raises ColumnsUnknown
    where nothing is found of a table's fields.
    """
    if only is not None and not only:
        return StructType([])
    frame = reading.read(records)
    if of is not None:
        frame = frame.filter(F.coalesce(of, F.lit(False)))
    names = reading.names(gone=F.lit(False) if envelope else None)
    if only is not None and names is not None:
        wanted = F.array(*(F.lit(name) for name in sorted(only)))
        frame = frame.filter(F.coalesce(F.arrays_overlap(names, wanted), F.lit(False)))
    text = reading.own_text(F.lit(False) if envelope else None)
    found = (
        _schema_of(frame, reading, envelope)
        if text is None
        else _of_json(frame if whole else frame.limit(_SAMPLE), text)
    )
    fields = [one for one in found.fields if only is None or one.name in only]
    if not fields and only is None:
        raise ColumnsUnknown(
            "The first records have no fields from which a table's columns could be found.",
            hint='Declare them: columns={"id": "bigint"}.',
        )
    return StructType(fields)


def _schema_of(frame: DataFrame, reading: Format, envelope: bool) -> StructType:
    source = reading.struct()
    kind = (
        frame.select((source.getField("after") if envelope else source).alias("row")).schema["row"].dataType
    )
    assert isinstance(kind, StructType)  # noqa: S101 - the formats say so
    return kind


def _of_json(frame: DataFrame, text: Expression) -> StructType:
    # Anything else is a dead letter, and would make the whole no object.
    objects = frame.filter(is_json_object(text) & ~is_deep_json(text)).select(
        F.try_parse_json(text).alias("v")
    )
    told = objects.agg(F.schema_of_variant_agg("v")).collect()[0][0]
    if not told or not str(told).startswith("OBJECT<"):
        return StructType([])
    stored = _stored(variant_type(str(told)))
    return stored if isinstance(stored, StructType) else StructType([])


def _stored(kind: DataType) -> DataType | None:
    """A type that a table may have; None: nothing is known of it."""
    if isinstance(kind, StructType):
        fields = [(one.name, _stored(one.dataType)) for one in kind.fields]
        there = [StructField(name, found) for name, found in fields if found is not None]
        return StructType(there) if there else None
    if isinstance(kind, ArrayType):
        element = _stored(kind.elementType)
        return None if element is None else ArrayType(element)
    if isinstance(kind, MapType):
        return kind
    if isinstance(kind, NullType):
        return None
    if isinstance(kind, VariantType):
        return StringType()
    # How many digits the next one has, nobody knows.
    return DoubleType() if isinstance(kind, DecimalType | FloatType) else kind
