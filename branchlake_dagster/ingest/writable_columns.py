"""Decides which fields become columns, infers their types, and finds values that a column cannot store.

The types of undeclared fields are inferred from the schema of the values or from the first records. For JSON,
Spark's `schema_of_variant_agg` returns the types as text, which this module parses itself. Spark Connect
would return a parsed type as nested protobuf messages, and its client refuses more than 100 levels of them:
an object of 31 levels made every batch fail that had such a record.

Spark accepts some values of a column's type that PyIceberg cannot write. The records with these values become
dead letters. For example, Spark reads `"45000"` as a date of the year 45000. PyIceberg keeps column bounds as
Python values, and Python cannot represent this date. It would fail its task, and with it every later batch.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

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
from pyiceberg.types import ListType as IcebergList
from pyiceberg.types import MapType as IcebergMap
from pyiceberg.types import StructType as IcebergStruct
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    LongType,
    MapType,
    NullType,
    StructField,
    StructType,
    VariantType,
)

from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.errors import ColumnsUnknown
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.spark_expressions import (
    any_value,
    fold_name,
    is_deep_json,
    is_json_object,
    matches_whole,
)
from branchlake_dagster.internals.pyiceberg import write_data_files
from branchlake_dagster.tables.schemas import build_iceberg_schema, stored_schema

MAX_LEVELS = 20
"""The number of nested structs and lists that a column may have.

Each level takes up to three of the 100 messages that Spark Connect may nest. Rows and answers need some of
them too. Casts take none, because they are SQL texts.
"""
_NAME = re.compile(r"`((?:[^`]|``)*)`|([A-Za-z0-9_]+)")
_WORD = re.compile(r"[A-Z0-9_]+(?:\(\d+,\s*\d+\))?")
_BRACKET = re.compile(r"`(?:[^`]|``)*`|([<>])")
_PLAIN_TYPES: dict[str, DataType] = {
    "VOID": NullType(),
    "BOOLEAN": BooleanType(),
    "BIGINT": LongType(),
    "DOUBLE": spark_types.DoubleType(),
    "FLOAT": spark_types.DoubleType(),
    "STRING": spark_types.StringType(),
}


def parse_variant_type(type_text: str) -> DataType:
    """Parse the text of a variant's type, such as ``OBJECT<id: BIGINT, tags: ARRAY<STRING>>``.

    Types nested deeper than `MAX_LEVELS`, and types that JSON values do not have, become `VariantType`.
    Decimals become `DoubleType`, because the next record may have more digits. Raises ValueError if the text
    has another grammar.
    """
    kind, end = _parse_type(type_text, 0, 0)
    if end != len(type_text):
        raise ValueError(f"{type_text[end : end + 50]!r} follows the type of a variant.")
    return kind


def _parse_type(type_text: str, position: int, level: int) -> tuple[DataType, int]:
    """Parse the type that begins at `position`. Return the type, and the position after it.

    `level` is the number of types around it. At `MAX_LEVELS`, a nested type becomes `VariantType`. Raises
    ValueError if the text has another grammar.
    """
    word = _WORD.match(type_text, position)
    if word is None:
        raise ValueError(f"{type_text[position : position + 50]!r} is not the type of a variant.")
    name, position = word[0], word.end()
    if not type_text.startswith("<", position):
        if name.startswith("DECIMAL"):
            return spark_types.DoubleType(), position
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
    """Return the position after the bracket that closes the one at `position`, despite brackets in names.

    `type_text` is the text of a variant's type. Raises ValueError if the bracket is not closed.
    """
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

    `condition` selects the records, and `only_fields` the fields. With `has_envelope` the fields are those of
    the envelope's field `after`. For a format with a schema the types are those of the schema. For JSON they
    come from the first 10,000 records, or from all with `all_records`: whole numbers are bigint, other
    numbers double, and a field with values of several types is text. A field without a value in these records
    is left out. Records that are nested too deeply (`is_deep_json`) are not used.

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
    source = record_format.value_struct(has_envelope=has_envelope)
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
    """Return the type of a table column for an inferred type, or None if no value determines it.

    A variant becomes text, and decimals and floats become double. Fields of a struct without a type are left
    out.
    """
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
        return spark_types.StringType()
    # The next value may have more digits.
    return spark_types.DoubleType() if isinstance(kind, DecimalType | spark_types.FloatType) else kind


def select_new_columns(
    fields: Iterable[StructField], reserved: Iterable[str], max_columns: int
) -> tuple[list[StructField], list[str]]:
    """Select the fields that can become columns, at most `max_columns`.

    Returns the selected fields, and the names of all other fields.

    Column names must not collide with each other or with `reserved`. Spark ignores the case of column names,
    and Iceberg identifies nested fields by dotted paths. So of `a` and `A`, or of a field `a.b` and a column
    `a` with a field `b`, the first one is selected. Parquet files replace characters that Avro does not
    allow, so `☃` and `_x2603` collide too.

    A field that a worker could not write is not selected. To find such fields costs a test file of one row.
    """
    used_paths = {_fold_path(name) for name in reserved}
    candidates: list[StructField] = []
    left_out: list[str] = []
    for field in fields:
        paths = [*_iter_paths(field.name, field.dataType)]
        field_paths = {_fold_path(path) for path in paths}
        if (
            len(candidates) >= max_columns
            or len(field_paths) < len(paths)
            or used_paths & field_paths
            or not _is_shallow(field.dataType)
        ):
            left_out.append(field.name)
        else:
            candidates.append(field)
            used_paths |= field_paths
    writable = _writable_fields(candidates)
    return writable, left_out + [field.name for field in candidates if field not in writable]


def _writable_fields(fields: Sequence[StructField]) -> list[StructField]:
    """Return the fields that PyIceberg can write to a file, in order.

    If writing all fields together fails, each half is tried alone.
    """
    if not fields or _is_writable(fields):
        return list(fields)
    if len(fields) == 1:
        return []
    half = len(fields) // 2
    return _writable_fields(fields[:half]) + _writable_fields(fields[half:])


def _is_writable(fields: Sequence[StructField]) -> bool:
    """Return whether a worker could write a row of nulls to a table with the columns `fields`.

    Writes a file to a temporary folder. Any error means False.
    """
    try:
        stored = stored_schema(to_arrow_schema(StructType(list(fields))), table_name="the new columns")
        schema = build_iceberg_schema(stored, table_name="the new columns")
        with tempfile.TemporaryDirectory() as folder:
            new_metadata = new_table_metadata(
                schema, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, f"file://{folder}"
            )
            metadata = TableMetadataUtil.parse_raw(new_metadata.model_dump_json())
            arrow = schema_to_pyarrow(metadata.schema(), include_field_ids=False)
            row = pa.table([pa.nulls(1, field.type) for field in arrow], schema=arrow)
            io = load_file_io({}, metadata.location)
            return bool(
                [*write_data_files(metadata, row, io, commit=uuid.uuid4(), numbers=itertools.count())]
            )
    except Exception:  # noqa: BLE001 - such a failure of any library would fail each batch later
        return False


def _fold_path(path: str) -> str:
    """Return a canonical path.

    Two columns with the same canonical path collide in Spark, Iceberg or Parquet.
    """
    names = map(fold_name, path.split("."))
    return ".".join(make_compatible_name(name) if name else name for name in names)


def _is_shallow(kind: DataType, levels: int = MAX_LEVELS) -> bool:
    """Return whether a type has at most `levels` nested structs, lists and maps."""
    if isinstance(kind, StructType):
        inner_types = [field.dataType for field in kind.fields]
    elif isinstance(kind, ArrayType):
        inner_types = [kind.elementType]
    elif isinstance(kind, MapType):
        inner_types = [kind.keyType, kind.valueType]
    else:
        return True
    return levels > 0 and all(_is_shallow(inner_type, levels - 1) for inner_type in inner_types)


def reserved_names(table: Table) -> set[str]:
    """Return names that a new column cannot have: those of columns, nested fields and partition fields."""
    partitions = {field.name for spec in table.metadata.partition_specs for field in spec.fields}
    return {*table.schema().column_names, *partitions}


def remaining_columns(table: Table | None, max_columns: int) -> int:
    """Return how many columns can still be added to a table that may have at most `max_columns`."""
    return max(0, max_columns - (len(table.schema().fields) if table is not None else 0))


def _iter_paths(name: str, kind: DataType) -> Iterator[str]:
    yield name
    if isinstance(kind, StructType):
        for field in kind.fields:
            yield from _iter_paths(f"{name}.{field.name}", field.dataType)
    elif isinstance(kind, ArrayType):
        yield from _iter_paths(f"{name}.element", kind.elementType)
    elif isinstance(kind, MapType):
        yield from _iter_paths(f"{name}.key", kind.keyType)
        yield from _iter_paths(f"{name}.value", kind.valueType)


ValuePath = tuple[str, ...]
"""A column's name, then the steps to a value inside it: `.<field>` of a struct, or `element`, `key`, `value`.
"""
ColumnBounds = tuple[tuple[ValuePath, str], ...]
"""The rule for values in columns: one of `_BOUND_TYPES`, `fixed:<bytes>`, `number`, `utf8` or `text`."""

_FIRST_DATE, _LAST_DATE = "0001-01-01", "9999-12-31"
_BOUND_TYPES: Mapping[type[IcebergType], str] = {
    DateType: "date",
    TimestampType: "timestamp_ntz",
    TimestamptzType: "timestamp",
    UUIDType: "uuid",
}
_UUID = "[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}"


def column_bounds(target: Target) -> ColumnBounds:
    """Return the rules for the values of a table that Spark's column types do not check.

    These are ranges of dates and times, the form of UUIDs, lengths of fixed columns, numbers that are
    partition values, and values inside columns that must not be null. Values inside structs, lists and maps
    have the same rules. The result is hashable.
    """
    schema, spec = target.table.schema(), target.table.spec()
    identity_sources = {
        field.source_id for field in spec.fields if isinstance(field.transform, IdentityTransform)
    }
    bounds = []
    for path, kind, field_id in _iter_values(target):
        if isinstance(kind, FixedType):
            bounds.append((path, f"fixed:{len(kind)}"))
        elif isinstance(kind, FloatType | DoubleType) and field_id in identity_sources:
            bounds.append((path, "number"))
        elif type(kind) in _BOUND_TYPES:
            bounds.append((path, _BOUND_TYPES[type(kind)]))
    for column in target.columns:
        bounds += _iter_required_parts((column.name,), schema.find_field(column.name).field_type)
    attributes = target.declaration.attributes if target.declaration else {}
    key_columns = [
        column
        for column, attribute in attributes.items()
        if attribute == "key" and isinstance(_kind_of(schema, column), StringType)
    ]
    return (*bounds, *(((column,), "text") for column in key_columns))


def required_part_columns(target: Target) -> list[str]:
    """Return the names of the target's columns that have parts which must not be null, without the keys."""
    schema, keys = target.table.schema(), target.declaration.keys if target.declaration else ()
    return [
        column.name
        for column in target.columns
        if column.name not in keys
        and any(_iter_required_parts((column.name,), schema.find_field(column.name).field_type))
    ]


def _iter_values(target: Target) -> Iterator[tuple[ValuePath, IcebergType, int]]:
    """Iterate over the values in the target's columns: path, type and field id. Nested types are left out."""
    schema = target.table.schema()
    for column in target.columns:
        field = schema.find_field(column.name)
        yield from _iter_nested_values((column.name,), field.field_type, field.field_id)


def _iter_nested_values(
    path: ValuePath, kind: IcebergType, field_id: int
) -> Iterator[tuple[ValuePath, IcebergType, int]]:
    if isinstance(kind, IcebergStruct):
        for field in kind.fields:
            yield from _iter_nested_values((*path, f".{field.name}"), field.field_type, field.field_id)
    elif isinstance(kind, IcebergList):
        yield from _iter_nested_values((*path, "element"), kind.element_type, kind.element_id)
    elif isinstance(kind, IcebergMap):
        yield from _iter_nested_values((*path, "key"), kind.key_type, kind.key_id)
        yield from _iter_nested_values((*path, "value"), kind.value_type, kind.value_id)
    else:
        yield path, kind, field_id


def _iter_required_parts(path: ValuePath, kind: IcebergType) -> Iterator[tuple[ValuePath, str]]:
    """Iterate over the rules for parts of a value that must not be null: the path of the value, and the rule.

    Whether the value itself may be null is not a rule here.
    """
    if isinstance(kind, IcebergStruct):
        for field in kind.fields:
            if field.required:
                yield path, f"field:{field.name}"
            yield from _iter_required_parts((*path, f".{field.name}"), field.field_type)
    elif isinstance(kind, IcebergList):
        if kind.element_required:
            yield path, "elements"
        yield from _iter_required_parts((*path, "element"), kind.element_type)
    elif isinstance(kind, IcebergMap):
        if kind.value_required:
            yield path, "values"
        yield from _iter_required_parts((*path, "key"), kind.key_type)
        yield from _iter_required_parts((*path, "value"), kind.value_type)


def _kind_of(schema: Schema, column: str) -> IcebergType | None:
    """Return the type of a column, or None if the table has no such column."""
    return next((field.field_type for field in schema.fields if field.name == column), None)


def text_bounds(target: Target) -> ColumnBounds:
    """Return the rule `utf8` for each text in the target's columns, as pairs of path and rule.

    Some formats do not check text: Avro takes any bytes.
    """
    return tuple((path, "utf8") for path, kind, _ in _iter_values(target) if isinstance(kind, StringType))


def unwritable_conditions(bounds: ColumnBounds, row: str) -> list[tuple[Expression, str]]:
    """Return the conditions under which a row cannot be written, each with its message.

    `bounds` are those of `column_bounds` and `text_bounds`. `row` is the name of the column with the rows.
    """
    held = F.col(row)
    return [
        _build_condition(path, bound, held.getField(path[0]) if bound != "text" else None)
        for path, bound in bounds
    ]


def _build_condition(path: ValuePath, bound: str, column: Expression | None) -> tuple[Expression, str]:
    if column is None:
        key = F.col("__key")
        message = f"The key is not valid text for {path[0]}."
        return key.isNotNull() & ~F.is_valid_utf8(key.cast("string")), message
    what, _, width = bound.partition(":")
    is_broken, words = _RULES[what], _RULE_WORDS.get(what, "").format(width)
    name = path[0] + "".join(step if step.startswith(".") else f".{step}" for step in path[1:])
    message = f"{name}.{width} is null." if what == "field" else f"{name} is not a valid {words}."
    return any_value(column, path[1:], lambda value: value.isNotNull() & is_broken(value, width)), message


_Rule = Callable[[Expression, str], Expression]
_RULES: Mapping[str, _Rule] = {
    "date": lambda value, _: ~_is_between(value, "date", _FIRST_DATE, _LAST_DATE),
    "timestamp": lambda value, _: (
        ~_is_between(value, "timestamp", f"{_FIRST_DATE} 00:00:00Z", f"{_LAST_DATE} 23:59:59.999999Z")
    ),
    "timestamp_ntz": lambda value, _: (
        ~_is_between(value, "timestamp_ntz", f"{_FIRST_DATE} 00:00:00", f"{_LAST_DATE} 23:59:59.999999")
    ),
    "utf8": lambda value, _: ~F.is_valid_utf8(value),
    "uuid": lambda value, _: ~matches_whole(value, _UUID),
    "fixed": lambda value, width: F.octet_length(value) != int(width),
    "number": lambda value, _: F.isnan(value),
    "field": lambda value, name: value.getField(name).isNull(),
    "elements": lambda value, _: F.exists(value, lambda element: element.isNull()),
    "values": lambda value, _: F.exists(F.map_values(value), lambda item: item.isNull()),
}
_RULE_WORDS: Mapping[str, str] = {
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
    "utf8": "UTF-8 text",
    "uuid": "uuid",
    "fixed": "fixed[{}]",
    "number": "number, but its table is partitioned by it",
    "elements": "list: an element is null",
    "values": "map: a value is null",
}


def _is_between(value: Expression, kind: str, first: str, last: str) -> Expression:
    return value.between(F.expr(f"{kind}'{first}'"), F.expr(f"{kind}'{last}'"))
