"""The types that Spark's `schema_of_variant_agg` reports, read without asking Spark's server.

Spark Connect returns a type as nested protobuf messages, and its client refuses more than 100 of them: asked
to parse the type of an object of 31 levels, it failed every batch that had such a record.
"""

from __future__ import annotations

import re

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    NullType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

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
