"""Values that Spark has of a column's type, and that cannot be written: they make dead letters.

PyIceberg keeps bounds of what it writes as Python's values. A date of the year 45000, which Spark reads from
`"45000"`, fails the task that meets it, and with it every batch from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    DateType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    StringType,
    TimestampType,
    TimestamptzType,
    UUIDType,
)
from pyspark.sql import Column as Expression
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.ingest.converting.expressions import matches_whole
from branchlake_dagster.ingest.scanning.targets import Target

Bounds = tuple[tuple[str, str], ...]
"""By column what its values have to keep: one of `_KEPT`, `fixed:<bytes>`, `number`, `utf8` or `text`."""

_FIRST, _LAST = "0001-01-01", "9999-12-31"
_KEPT: Mapping[type[IcebergType], str] = {
    DateType: "date",
    TimestampType: "timestamp_ntz",
    TimestamptzType: "timestamp",
    UUIDType: "uuid",
}
_UUID = "[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}"


def bounds_of(target: Target) -> Bounds:
    """What the values of a table's columns have to keep beyond Spark's type; hashable, and small."""
    schema, spec = target.table.schema(), target.table.spec()
    whole = {one.source_id for one in spec.fields if isinstance(one.transform, IdentityTransform)}
    found = []
    for one in target.columns:
        field = schema.find_field(one.name)
        kind = field.field_type
        if isinstance(kind, FixedType):
            found.append((one.name, f"fixed:{len(kind)}"))
        elif isinstance(kind, FloatType | DoubleType) and field.field_id in whole:
            found.append((one.name, "number"))
        elif type(kind) in _KEPT:
            found.append((one.name, _KEPT[type(kind)]))
    attributes = target.declared.attributes if target.declared else {}
    texts = [
        column
        for column, attribute in attributes.items()
        if attribute == "key" and isinstance(_kind_of(schema, column), StringType)
    ]
    return (*found, *((column, "text") for column in texts))


def _kind_of(schema: Schema, column: str) -> IcebergType | None:
    """A column's type; None: the table has no such column, and takes nothing there."""
    return next((one.field_type for one in schema.fields if one.name == column), None)


def texts_of(target: Target) -> Bounds:
    """That its text is text, where the format does not say so: Avro takes any bytes."""
    schema = target.table.schema()
    return tuple(
        (one.name, "utf8") for one in target.columns if isinstance(_kind_of(schema, one.name), StringType)
    )


def beyond(bounds: Bounds, row: str) -> list[tuple[Expression, str]]:
    """Conditions under which a row cannot be written, each with its words."""
    held = F.col(row)
    return [_broken(name, kept, held.getField(name) if kept != "text" else None) for name, kept in bounds]


def _broken(name: str, kept: str, value: Expression | None) -> tuple[Expression, str]:
    if value is None:
        key = F.col("__key")
        return key.isNotNull() & ~F.is_valid_utf8(key.cast("string")), f"The key is no text for {name}."
    what, _, width = kept.partition(":")
    found, words = _RULES[what](value, width)
    return value.isNotNull() & found, f"{name} is no {words}."


_Rule = Callable[[Expression, str], tuple[Expression, str]]
_RULES: Mapping[str, _Rule] = {
    "date": lambda value, _: (~_within(value, "date", _FIRST, _LAST), "date"),
    "timestamp": lambda value, _: (
        ~_within(value, "timestamp", f"{_FIRST} 00:00:00Z", f"{_LAST} 23:59:59.999999Z"),
        "timestamp",
    ),
    "timestamp_ntz": lambda value, _: (
        ~_within(value, "timestamp_ntz", f"{_FIRST} 00:00:00", f"{_LAST} 23:59:59.999999"),
        "timestamp_ntz",
    ),
    "utf8": lambda value, _: (~F.is_valid_utf8(value), "text in UTF-8"),
    "uuid": lambda value, _: (~matches_whole(value, _UUID), "uuid"),
    "fixed": lambda value, width: (F.octet_length(value) != int(width), f"fixed[{width}]"),
    "number": lambda value, _: (F.isnan(value), "number, and its table is partitioned by it"),
}


def _within(value: Expression, kind: str, first: str, last: str) -> Expression:
    return value.between(F.expr(f"{kind}'{first}'"), F.expr(f"{kind}'{last}'"))
