"""Which fields may become columns, and which values of a column's type cannot be written.

Values that Spark has of a column's type, and that cannot be written: they make dead letters.

PyIceberg keeps bounds of what it writes as Python's values. A date of the year 45000, which Spark reads from
`"45000"`, fails the task that meets it, and with it every batch from then on.
"""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyiceberg.io import load_file_io
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema, make_compatible_name
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadataUtil, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
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
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.field_types import MOST_LEVELS
from branchlake_dagster.ingest.spark_expressions import matches_whole
from branchlake_dagster.internals.pyiceberg import data_files
from branchlake_dagster.tables.schemas import iceberg_schema, stored_schema


def possible(
    fields: Iterable[StructField], taken: Iterable[str], most: int
) -> tuple[list[StructField], list[str]]:
    """The fields that can be columns beside those `taken`, at most so many; and the names of the others.

    Spark finds columns whatever case their names are in, Iceberg finds what is inside by its path with dots:
    of `a` and `A`, or of `a.b` and a column `a` with a field `b`, the first one stays. A Parquet file has
    other names for what Avro does not allow, so `☃` and `_x2603` meet too. A field that a worker could not
    write is left out; trying them costs a file of one row.
    """
    used = {_folded(name) for name in taken}
    kept: list[StructField] = []
    left_out: list[str] = []
    for one in fields:
        paths = [*_paths(one.name, one.dataType)]
        mine = {_folded(path) for path in paths}
        if len(kept) >= most or len(mine) < len(paths) or used & mine or not _is_shallow(one.dataType):
            left_out.append(one.name)
        else:
            kept.append(one)
            used |= mine
    writable = _writable(kept)
    return writable, left_out + [one.name for one in kept if one not in writable]


def _writable(fields: Sequence[StructField]) -> list[StructField]:
    """The fields of which PyIceberg writes a file; halves are tried where all together fail."""
    if not fields or _is_writable(fields):
        return list(fields)
    if len(fields) == 1:
        return []
    half = len(fields) // 2
    return _writable(fields[:half]) + _writable(fields[half:])


def _is_writable(fields: Sequence[StructField]) -> bool:
    """Whether what a worker does with a table of these columns succeeds, with one row of nulls."""
    try:
        stored = stored_schema(to_arrow_schema(StructType(list(fields))), table="the new columns")
        schema = iceberg_schema(stored, table="the new columns")
        with tempfile.TemporaryDirectory() as folder:
            made = new_table_metadata(
                schema, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, f"file://{folder}"
            )
            metadata = TableMetadataUtil.parse_raw(made.model_dump_json())
            arrow = schema_to_pyarrow(metadata.schema(), include_field_ids=False)
            row = pa.table([pa.nulls(1, one.type) for one in arrow], schema=arrow)
            io = load_file_io({}, metadata.location)
            return bool([*data_files(metadata, row, io, commit=uuid.uuid4(), numbers=itertools.count())])
    except Exception:  # noqa: BLE001 - whichever library refuses it would fail each batch later
        return False


def _folded(path: str) -> str:
    """A path as no two columns may have it, whatever compares them."""
    names = ("".join(map(_folded_letter, part)) for part in path.split("."))
    return ".".join(make_compatible_name(name) if name else name for name in names)


def _folded_letter(letter: str) -> str:
    """A letter as Java's `equalsIgnoreCase` compares it: to Spark `İ`, `I`, `i` and `ı` are one letter."""
    upper = letter.upper()
    return (upper if len(upper) == 1 else letter).lower()[0]


def _is_shallow(kind: DataType, levels: int = MOST_LEVELS) -> bool:
    """Whether a type has at most so many structs, lists and maps inside each other."""
    if isinstance(kind, StructType):
        inside = [one.dataType for one in kind.fields]
    elif isinstance(kind, ArrayType):
        inside = [kind.elementType]
    elif isinstance(kind, MapType):
        inside = [kind.keyType, kind.valueType]
    else:
        return True
    return levels > 0 and all(_is_shallow(one, levels - 1) for one in inside)


def taken_names(table: Table) -> set[str]:
    """The names that a new column of a table cannot have: of columns, what is in them, and partitions."""
    partitions = {one.name for spec in table.metadata.partition_specs for one in spec.fields}
    return {*table.schema().column_names, *partitions}


def room(table: Table | None, most: int) -> int:
    """How many columns a table may get that is to have at most so many."""
    return max(0, most - (len(table.schema().fields) if table is not None else 0))


def _paths(name: str, kind: DataType) -> Iterator[str]:
    yield name
    if isinstance(kind, StructType):
        for one in kind.fields:
            yield from _paths(f"{name}.{one.name}", one.dataType)
    elif isinstance(kind, ArrayType):
        yield from _paths(f"{name}.element", kind.elementType)
    elif isinstance(kind, MapType):
        yield from _paths(f"{name}.key", kind.keyType)
        yield from _paths(f"{name}.value", kind.valueType)


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
