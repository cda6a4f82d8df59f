"""Types of undeclared fields, inferred from the schema of the values or from the first records.

For JSON, Spark's `schema_of_variant_agg` returns the types as text, which this module parses itself. Spark
Connect would return a parsed type as nested protobuf messages, and its client refuses more than 100 levels of
them: an object of 31 levels made every batch fail that had such a record.
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

MAX_LEVELS = 20
"""The number of nested structs and lists that a column may have.

Each level takes up to three of the 100 messages that Spark Connect may nest. Rows, casts and answers need
some of them too.
"""
_NAME = re.compile(r"`((?:[^`]|``)*)`|([A-Za-z0-9_]+)")
_WORD = re.compile(r"[A-Z0-9_]+(?:\(\d+,\s*\d+\))?")
_BRACKET = re.compile(r"`(?:[^`]|``)*`|([<>])")
_PLAIN_TYPES: dict[str, DataType] = {
    "VOID": NullType(),
    "BOOLEAN": BooleanType(),
    "BIGINT": LongType(),
    "DOUBLE": DoubleType(),
    "FLOAT": DoubleType(),
    "STRING": StringType(),
}


def parse_variant_type(type_text: str) -> DataType:
    """Parse the text of a variant's type, such as ``OBJECT<id: BIGINT, tags: ARRAY<STRING>>``.

    Types below `MAX_LEVELS`, and types that JSON values do not have, become `VariantType`. Decimals become
    `DoubleType`, because the next record may have more digits. Raises ValueError for another grammar.
    """
    kind, end = _parse_type(type_text, 0, 0)
    if end != len(type_text):
        raise ValueError(f"{type_text[end : end + 50]!r} follows the type of a variant.")
    return kind


def _parse_type(type_text: str, position: int, level: int) -> tuple[DataType, int]:
    """Parse the type that begins at a position. Return it and the position after it."""
    word = _WORD.match(type_text, position)
    if word is None:
        raise ValueError(f"{type_text[position : position + 50]!r} is not the type of a variant.")
    name, position = word[0], word.end()
    if not type_text.startswith("<", position):
        if name.startswith("DECIMAL"):
            return DoubleType(), position
        return _PLAIN_TYPES.get(name, VariantType()), position
    if level == MAX_LEVELS:
        return VariantType(), _skip_brackets(type_text, position)
    if name == "ARRAY":
        element, position = _parse_type(type_text, position + 1, level + 1)
        return ArrayType(element), _skip_expected(type_text, position, ">")
    fields = []
    position += 1
    while not type_text.startswith(">", position):
        field = _NAME.match(type_text, position)
        if field is None:
            raise ValueError(
                f"{type_text[position : position + 50]!r} does not begin with the name of a field."
            )
        label = field[2] if field[1] is None else field[1].replace("``", "`")
        kind, position = _parse_type(type_text, _skip_expected(type_text, field.end(), ": "), level + 1)
        fields.append(StructField(label, kind))
        if type_text.startswith(", ", position):
            position += 2
    return StructType(fields), position + 1


def _skip_expected(type_text: str, position: int, expected: str) -> int:
    if not type_text.startswith(expected, position):
        raise ValueError(f"{expected!r} is missing before {type_text[position : position + 50]!r}.")
    return position + len(expected)


def _skip_brackets(type_text: str, position: int) -> int:
    """Return the position after the bracket that closes the one at `position`, despite brackets in names."""
    depth = 0
    for part in _BRACKET.finditer(type_text, position):
        depth += {"<": 1, ">": -1}.get(part[1], 0)
        if depth == 0:
            return part.end()
    raise ValueError("A bracket of a variant's type is not closed.")


_SAMPLE = 10_000
"""The number of records from which types are inferred."""


def infer_field_types(
    records: DataFrame,
    record_format: Format,
    *,
    has_envelope: bool,
    only_fields: Collection[str] | None = None,
    condition: Expression | None = None,
    all_records: bool = False,
) -> StructType:
    """Infer the types of the records' fields.

    `condition` selects the records, and `only_fields` the fields. For a format with a schema the types are
    those of the schema. For JSON they come from the first 10,000 records, or from all with `all_records`:
    whole numbers are bigint, other numbers double, and a field with values of several types is text. A field
    without a value in these records is left out, as are the fields of records that are too deep
    (`is_deep_json`).

    Raises ColumnsUnknown if no field is found and `only_fields` is None.
    """
    if only_fields is not None and not only_fields:
        return StructType([])
    frame = record_format.read(records)
    if condition is not None:
        frame = frame.filter(F.coalesce(condition, F.lit(False)))
    record_names = record_format.record_field_names(is_deletion=F.lit(False) if has_envelope else None)
    if only_fields is not None and record_names is not None:
        wanted_names = F.array(*(F.lit(name) for name in sorted(only_fields)))
        frame = frame.filter(F.coalesce(F.arrays_overlap(record_names, wanted_names), F.lit(False)))
    row_json = record_format.row_json(F.lit(False) if has_envelope else None)
    row_type = (
        _schema_row_type(frame, record_format, has_envelope)
        if row_json is None
        else _infer_json_type(frame if all_records else frame.limit(_SAMPLE), row_json)
    )
    fields = [one for one in row_type.fields if only_fields is None or one.name in only_fields]
    if not fields and only_fields is None:
        raise ColumnsUnknown(
            "The first records have no fields from which the table's columns could be inferred.",
            hint='Declare the columns: IngestTable(columns={"id": "bigint"}).',
        )
    return StructType(fields)


def _schema_row_type(frame: DataFrame, record_format: Format, has_envelope: bool) -> StructType:
    source = record_format.value_struct()
    kind = (
        frame.select((source.getField("after") if has_envelope else source).alias("row"))
        .schema["row"]
        .dataType
    )
    assert isinstance(kind, StructType)  # noqa: S101 - formats with a schema return structs
    return kind


def _infer_json_type(frame: DataFrame, row_json: Expression) -> StructType:
    # Other values become dead letters. Here they would make the common type something else than an object.
    objects = frame.filter(is_json_object(row_json) & ~is_deep_json(row_json)).select(
        F.try_parse_json(row_json).alias("v")
    )
    type_text = objects.agg(F.schema_of_variant_agg("v")).collect()[0][0]
    if not type_text or not str(type_text).startswith("OBJECT<"):
        return StructType([])
    column_type = _to_column_type(parse_variant_type(str(type_text)))
    return column_type if isinstance(column_type, StructType) else StructType([])


def _to_column_type(kind: DataType) -> DataType | None:
    """Return the type of a table column for an inferred type, or None if no value determines it."""
    if isinstance(kind, StructType):
        fields = [(one.name, _to_column_type(one.dataType)) for one in kind.fields]
        typed_fields = [
            StructField(name, column_type) for name, column_type in fields if column_type is not None
        ]
        return StructType(typed_fields) if typed_fields else None
    if isinstance(kind, ArrayType):
        element = _to_column_type(kind.elementType)
        return None if element is None else ArrayType(element)
    if isinstance(kind, MapType):
        return kind
    if isinstance(kind, NullType):
        return None
    if isinstance(kind, VariantType):
        return StringType()
    # The next value may have more digits.
    return DoubleType() if isinstance(kind, DecimalType | FloatType) else kind
