"""The types of fields that nobody has declared: what the schema of the values says, or the first records."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from branchlake_dagster.ingest.converting.formats import Format
from branchlake_dagster.ingest.converting.json_text import is_deep_json, is_json_object
from branchlake_dagster.ingest.converting.variant_types import variant_type
from branchlake_dagster.ingest.errors import ColumnsUnknown

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
