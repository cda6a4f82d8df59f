"""Write Arrow, pandas and Polars frames to a table, and read them, with PyIceberg and without Spark."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import TimestampType

from branchlake_dagster.errors import format_first_values
from branchlake_dagster.internals.pyiceberg import open_transaction
from branchlake_dagster.tables.errors import (
    ColumnUnsupported,
    PartitionMismatch,
    SchemaMismatch,
    UpsertKeyInvalid,
)
from branchlake_dagster.tables.schemas import is_list_type, require_readable_depth, stored_schema
from branchlake_dagster.tables.selection import Selection, Values, count_rows_outside, to_iceberg_filter
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.wording import format_names, pluralize


def format_required_rows(selection: Selection, schema: Schema) -> str:
    """Return a sentence that says which rows the frame may have, as a hint for an error.

    For columns of the selection that are timestamps without time zone, it adds that they are read as UTC.
    `schema` is the table's schema.
    """
    naive_columns = [
        column_name
        for column_name in selection.column_names()
        if isinstance(schema.find_type(column_name), TimestampType)
    ]
    have, are = (
        pluralize(len(naive_columns), "has", "have"),
        pluralize(len(naive_columns), "it is", "they are"),
    )
    time_zone_note = (
        f" {', '.join(naive_columns)} {have} no time zone, so {are} read as UTC. Convert local times to UTC"
        " in the asset, or give them a time zone."
    )
    return (
        f"The frame may only have rows with {format_selected_rows(selection)}."
        f"{time_zone_note if naive_columns else ''}"
    )


def format_selected_rows(selection: Selection) -> str:
    """Describe the rows that a selection holds: the first few of its conditions, with their columns."""
    slice_texts = []
    for part in selection.slices:
        condition_texts = []
        for condition in part:
            if isinstance(condition, Values):
                condition_texts.append(
                    f"{condition.column} is {format_first_values(tuple(map(repr, condition.values)))}"
                )
            else:
                condition_texts.append(
                    f"{condition.start.isoformat()} <= {condition.column} < {condition.end.isoformat()}"
                )
        slice_texts.append(" and ".join(condition_texts))
    return format_first_values(tuple(slice_texts)) if slice_texts else "no row"


def duplicate_key_error(spec: TableSpec) -> UpsertKeyInvalid:
    """Return the error for a frame in which two rows have the same upsert key. It names the key columns."""
    return UpsertKeyInvalid(
        f"Two rows share a key in ({', '.join(spec.keys)}).",
        table=spec.name,
        hint="Keep one row per key before returning the frame.",
        reason="duplicate_key",
    )


def null_key_error(spec: TableSpec, keys: Sequence[str]) -> UpsertKeyInvalid:
    """Return the error for a frame in which one of the key columns `keys` is null in a row."""
    return UpsertKeyInvalid(
        f"A row has no key: {format_names('column', keys)} must not be null.",
        table=spec.name,
        hint="Leave rows without a key out before returning the frame, or fill their keys.",
        reason="null_key",
        subject=", ".join(keys),
    )


def can_write_type(frame_type: type) -> bool:
    """Return whether frames of this type can be written."""
    return frame_type in (pd.DataFrame, pl.DataFrame, pl.LazyFrame, pa.Table, pa.RecordBatchReader)


def read_stream(frame: Any) -> Any:
    """Read a frame that can be read only once, or differently each time: a reader of batches, a LazyFrame.

    Other values are returned unchanged.
    """
    if isinstance(frame, pl.LazyFrame):
        return frame.collect()
    return frame.read_all() if isinstance(frame, pa.RecordBatchReader) else frame


def to_arrow(frame: Any, table_schema: pa.Schema | None, *, table_name: str) -> pa.Table:
    """Convert any supported frame to an Arrow table in the types that the lake stores.

    `table_schema` is the schema of the target table, or None if the table does not exist yet. Python objects
    in columns that are maps in this schema are converted to maps. A column without any value gets the type
    null if its type does not fit the table.

    Raises SchemaMismatch and ColumnUnsupported.
    """
    frame = read_stream(frame)
    if isinstance(frame, pl.DataFrame):
        arrow_table = _from_polars(frame, table_name)
    else:
        is_arrow = isinstance(frame, pa.Table)
        arrow_table = frame if is_arrow else _from_pandas(frame, table_schema, table_name)
        require_readable_depth(arrow_table.schema, table_name=table_name)
        _require_unicode_names(arrow_table.schema, table_name)
        _require_valid_values(arrow_table, table_name)
    arrow_table = _restore_maps(arrow_table, table_schema)
    stored_table = cast_columns(
        arrow_table, stored_schema(arrow_table.schema, table_name=table_name), table_name=table_name
    )
    for name, column in zip(stored_table.column_names, stored_table.columns, strict=True):
        _require_calendar_years(column, name, table_name)
    return _drop_guessed_types(stored_table, table_schema)


def _require_no_objects(frame: pl.DataFrame, table_name: str) -> None:
    """Raise ColumnUnsupported if a column of `frame` holds Python objects.

    Polars would export them to Arrow as memory addresses. `table_name` is for the error.
    """
    if object_columns := [name for name, kind in frame.schema.items() if kind == pl.Object]:
        hold = pluralize(len(object_columns), "holds", "hold")
        raise ColumnUnsupported(
            f"{format_names('Column', object_columns)} {hold} Python objects, which the lake cannot store.",
            table=table_name,
            hint="Cast the values to text, numbers, timestamps or structs in the asset.",
        )


def _require_unicode_names(fields: Iterable[pa.Field], table_name: str) -> None:
    """Raise SchemaMismatch for the name of a column, or of a field in it, that is not UTF-8.

    Arrow accepts such a name as bytes, and fails when the name is read.
    """
    for field in fields:
        try:
            field.name  # noqa: B018 - the attribute is decoded when it is read
        except UnicodeDecodeError as error:
            name = repr(error.object)
            raise SchemaMismatch(
                f"The name {name} of a column or field is not valid Unicode text.",
                table=table_name,
                hint="Rename the column or field in the asset.",
                reason="name_not_unicode",
                subject=name,
            ) from error
        if pa.types.is_nested(field.type):
            children = (field.type.field(number) for number in range(field.type.num_fields))
            _require_unicode_names(children, table_name)


def _require_no_null_characters(frame: pl.DataFrame, table_name: str) -> None:
    """Raise ColumnUnsupported for a null character in the name of a column or field. Polars panics at it."""
    for column_name, column_type in frame.schema.items():
        if "\0" in column_name or any("\0" in name for name in _iter_field_names(column_type)):
            raise ColumnUnsupported(
                f"The name of column {column_name!r}, or of a field in it, contains a null character.",
                table=table_name,
                hint="Rename the column or field in the asset.",
                reason="null_in_name",
                subject=column_name,
            )


def _iter_field_names(kind: Any) -> Iterator[str]:
    """Yield the names of the struct fields in a Polars type, also those in lists and arrays."""
    if isinstance(kind, pl.Struct):
        for field in kind.fields:
            yield field.name
            yield from _iter_field_names(field.dtype)
    elif isinstance(kind, pl.List | pl.Array):
        yield from _iter_field_names(kind.inner)


def _from_polars(frame: pl.DataFrame, table_name: str) -> pa.Table:
    """Convert a Polars frame.

    Raise ColumnUnsupported for a type that Arrow lacks, such as Int128, for a null character in a name, and
    for a frame at which Polars itself fails.
    """
    _require_no_objects(frame, table_name)
    _require_no_null_characters(frame, table_name)
    try:
        return frame.to_arrow()
    except pl.exceptions.PanicException as error:
        raise ColumnUnsupported(
            f"Polars cannot convert the frame to Arrow ({str(error).splitlines()[0]}).",
            table=table_name,
            hint="Look for unusual characters in the names of its columns and fields, and rename those.",
            reason="polars_panic",
        ) from error
    except pa.ArrowException:
        for column in frame:
            try:
                column.to_arrow()
            except pa.ArrowException as error:
                raise ColumnUnsupported(
                    f"Column {column.name} is {column.dtype}, which the lake cannot store.",
                    table=table_name,
                    hint="Cast the column in the asset, for example to decimal(38, 0) or to text.",
                ) from error
        raise


def cast_columns(frame: pa.Table, schema: pa.Schema, *, table_name: str) -> pa.Table:
    """Select the columns of `schema` and cast them to its types.

    Raise ColumnUnsupported if a cast would lose data.
    """
    columns = [_cast_column(frame.column(field.name), field, table_name) for field in schema]
    return pa.table(columns, schema=schema)


_DAYS = range(-719_162, 2_932_897)
_MICROSECONDS = range(-62_135_596_800_000_000, 253_402_300_800_000_000)
"""The days and microseconds since 1970 that have a year from 1 to 9999."""


def _require_calendar_years(column: pa.ChunkedArray, column_name: str, table_name: str) -> None:
    """Raise ColumnUnsupported for a date or timestamp outside the years 1 to 9999.

    Python has no such years, so PyIceberg could not record the bounds of the data file. Usually a unit is
    wrong. `column` has the types of the lake.
    """
    for values in _iter_times(column):
        is_date = pa.types.is_date(values.type)
        bounds = pc.min_max(values.cast(pa.int32() if is_date else pa.int64()))
        valid = _DAYS if is_date else _MICROSECONDS
        if any(bound.is_valid and bound.as_py() not in valid for bound in (bounds["min"], bounds["max"])):
            raise ColumnUnsupported(
                f"Column {column_name} has a {'date' if is_date else 'timestamp'} outside the years 1 to"
                " 9999.",
                table=table_name,
                hint="Correct the values in the asset: often they were computed with a wrong unit, such as"
                " milliseconds as seconds.",
                reason="year_out_of_range",
                subject=column_name,
            )


def _iter_times(values: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """Yield the dates and timestamps of a column, also those in structs, lists and maps."""
    kind = values.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        yield values
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _iter_times(pc.struct_field(values, [number]))
    elif pa.types.is_list(kind):
        yield from _iter_times(pc.list_flatten(values))
    elif pa.types.is_map(kind):
        entries = pa.struct(
            [pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]
        )
        yield from _iter_times(values.cast(pa.list_(entries)))


def _require_valid_values(frame: pa.Table, table_name: str) -> None:
    """Raise ColumnUnsupported for a column that Arrow itself calls invalid, such as text that is not UTF-8.

    Arrow does not check this when a frame is built, and a reader would fail later.
    """
    for name, column in zip(frame.column_names, frame.columns, strict=True):
        try:
            for chunk in column.chunks:
                # Of a slice of nested values, Arrow would validate all values, not only those of the slice.
                (pa.concat_arrays([chunk]) if pa.types.is_nested(chunk.type) else chunk).validate(full=True)
        except pa.ArrowInvalid as error:
            raise ColumnUnsupported(
                f"Column {name} has invalid values ({str(error).splitlines()[0]}).",
                table=table_name,
                hint=" ".join(dict.fromkeys(("Correct the values in the asset.", *_iter_hints(column.type)))),
                reason="invalid_values",
                subject=name,
            ) from error


def _iter_hints(kind: pa.DataType) -> Iterator[str]:
    """Yield what to do about invalid values of a type, also of the types in it."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        yield "Store bytes that are not UTF-8 text as binary."
    elif pa.types.is_time(kind):
        yield "Times of day are from 00:00 until before 24:00."
    elif pa.types.is_date64(kind):
        yield "Cast date64 with times of day to date32 or timestamp."
    elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        yield from _iter_hints(kind.value_type)
    elif pa.types.is_nested(kind):
        for number in range(kind.num_fields):
            yield from _iter_hints(kind.field(number).type)


def _cast_column(column: pa.ChunkedArray, field: pa.Field, table_name: str) -> pa.ChunkedArray:
    try:
        column = _to_plain_layout(column)
        if _has_long_offsets(column.type) and not _has_long_offsets(field.type):
            parts = [part for chunk in column.chunks for part in _narrow_offsets(chunk, field.type)]
            return pa.chunked_array(parts, type=field.type)
        return column.cast(field.type)
    except pa.ArrowException as error:
        hint = "Cast the column in the asset."
        if pa.types.is_uint64(column.type):
            hint = "The lake's integers end at 2^63 - 1: cast the column to decimal(20, 0) or to text."
        if pa.types.is_timestamp(column.type) or pa.types.is_time(column.type):
            hint = (
                "The lake stores microseconds: round the values in the asset (pandas .dt.floor('us'), Polars"
                " .dt.truncate('1us'))."
            )
        raise ColumnUnsupported(
            f"Column {field.name} has {column.type} values that {field.type} cannot hold"
            f" ({str(error).splitlines()[0]}).",
            table=table_name,
            hint=hint,
        ) from error


_MAX_CHUNK_BYTES = 2**31 - 1
"""The largest number of bytes of text or binary values in one Arrow array with offsets of 32 bits."""


def _has_long_offsets(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _narrow_offsets(chunk: pa.Array, kind: pa.DataType) -> Iterator[pa.Array]:
    """Yield the values of a large text or binary array as arrays of `kind`, each of at most 2 GiB.

    Copies offsets only. Raises pa.ArrowInvalid for a single value that is larger.
    """
    valid, offset_buffer, values = chunk.buffers()
    if not len(chunk) or offset_buffer is None or values is None:
        yield chunk.cast(kind)
        return
    offsets = np.frombuffer(offset_buffer, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
    if offsets[-1] <= _MAX_CHUNK_BYTES:
        yield chunk.cast(kind)
        return
    start = 0
    while start < len(chunk):
        end = int(np.searchsorted(offsets, offsets[start] + _MAX_CHUNK_BYTES, side="right")) - 1
        if end == start:
            raise pa.ArrowInvalid(f"a value has {offsets[start + 1] - offsets[start]:,} bytes")
        end = min(end, len(chunk))
        own_offsets = (offsets[start : end + 1] - offsets[start]).astype(np.int32)
        is_valid = None if valid is None else chunk[start:end].is_valid().buffers()[1]
        own_values = values.slice(int(offsets[start]), int(offsets[end] - offsets[start]))
        yield pa.Array.from_buffers(kind, end - start, [is_valid, pa.py_buffer(own_offsets), own_values])
        start = end


def _from_pandas(frame: pd.DataFrame, table_schema: pa.Schema | None, table_name: str) -> pa.Table:
    names = [str(name) for name in frame.columns]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise SchemaMismatch(
                f"The name of column {name!r} is not valid Unicode text.",
                table=table_name,
                hint="Rename the column in the asset.",
                reason="name_not_unicode",
                subject=name,
            ) from error
    arrays = [
        _convert_series(frame.iloc[:, i], name, table_schema, table_name) for i, name in enumerate(names)
    ]
    return pa.Table.from_arrays(arrays, names=names)


def _convert_series(
    series: pd.Series[Any], column_name: str, table_schema: pa.Schema | None, table_name: str
) -> Any:
    column_type = (
        table_schema.field(column_name).type
        if table_schema is not None and column_name in table_schema.names
        else None
    )
    map_type = (
        column_type
        if column_type is not None and pa.types.is_map(column_type) and series.dtype == object
        else None
    )
    try:
        column = pa.Array.from_pandas(series, type=map_type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        hint = "Convert all its values to one type with .astype(…) in the asset."
        if map_type is not None:
            hint = "Use dicts or lists of (key, value) whose types are those of the map."
        raise ColumnUnsupported(
            f"Column {column_name} ({series.dtype}) has values that Arrow cannot convert, for example because"
            f" their types differ ({str(error).splitlines()[0]}).",
            table=table_name,
            hint=hint,
        ) from error
    _require_unchanged_objects(series, column.type, column_name, table_name)
    return column


def _require_unchanged_objects(
    series: pd.Series[Any], kind: pa.DataType, column_name: str, table_name: str
) -> None:
    """Raise ColumnUnsupported if the conversion to Arrow's type `kind` changed some of the Python objects.

    Arrow often takes the type of a column from its first values. Then it removes times of day in a column of
    dates, reads wall clocks among moments as UTC, and removes nanoseconds, zones of times, and fractions.
    """
    if series.dtype != object or not _may_change_objects(kind):
        return
    for value in series:
        if _is_changed_by_arrow(value, kind):
            raise ColumnUnsupported(
                f"Column {column_name} (object) has values of different types, or of too many digits:"
                f" {kind} would change {repr(value)[:80]}.",
                table=table_name,
                hint="Convert all its values to one type in the asset. Timestamps have microseconds, and"
                " times of day have no time zone.",
                reason="value_changed",
                subject=column_name,
            )


def _may_change_objects(kind: pa.DataType) -> bool:
    """Return whether Arrow may change Python objects when it converts them to `kind`, or to a part of it."""
    if pa.types.is_map(kind):  # the type of the table's column, not one that Arrow chose for the values
        return True
    if is_list_type(kind) or pa.types.is_struct(kind):
        return any(_may_change_objects(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_temporal(kind) or pa.types.is_binary(kind))


def _is_changed_by_arrow(value: Any, kind: pa.DataType) -> bool:
    """Return whether Arrow changes a Python value when it converts the value to `kind`."""
    if pa.types.is_map(kind) and isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else value
        kinds = (kind.key_type, kind.item_type)
        return any(any(map(_is_changed_by_arrow, pair, kinds)) for pair in pairs)
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        return any(_is_changed_by_arrow(value.get(field.name), field.type) for field in kind)
    if is_list_type(kind) and isinstance(value, list | tuple | set | frozenset | np.ndarray):
        return any(_is_changed_by_arrow(element, kind.value_type) for element in value)
    if pa.types.is_nested(kind) or value is None or value is pd.NaT:
        return False
    if pa.types.is_temporal(kind):
        return _is_time_changed(value, kind)
    if pa.types.is_integer(kind):
        is_number = isinstance(value, float | np.floating | Decimal) and math.isfinite(value)
        return is_number and value != int(value)
    if pa.types.is_float32(kind):
        return isinstance(value, float) and math.isfinite(value) and float(np.float32(value)) != value
    return isinstance(
        value, str if pa.types.is_binary(kind) else bytes
    ) and not pa.types.is_fixed_size_binary(kind)


def _is_time_changed(value: Any, kind: pa.DataType) -> bool:
    """Return whether Arrow changes a Python value when it converts it to a date, time or timestamp."""
    if isinstance(value, int | float):
        return not math.isnan(value)
    if isinstance(value, np.datetime64):
        unit = "D" if pa.types.is_date(kind) else getattr(kind, "unit", "us")
        has_zone = getattr(kind, "tz", None) is not None
        return bool(not np.isnat(value) and (has_zone or value != value.astype(f"datetime64[{unit}]")))
    if pa.types.is_date(kind):
        return isinstance(value, datetime)
    if pa.types.is_time(kind):
        return isinstance(value, time) and value.tzinfo is not None
    if not pa.types.is_timestamp(kind) or not isinstance(value, datetime):
        return False
    has_nanoseconds = kind.unit != "ns" and bool(getattr(value, "nanosecond", 0))
    return has_nanoseconds or (value.tzinfo is None) == (kind.tz is not None)


def _to_plain_layout(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decode runs and list views, also inside other values, to layouts that Arrow can cast.

    PyArrow 26 casts list views to lists with wrong offsets, which loses elements.
    """
    if not _has_special_layout(column.type):
        return column
    chunks = [_decode_array(chunk) for chunk in column.chunks] or [_decode_array(pa.array([], column.type))]
    return pa.chunked_array(chunks)


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _has_special_layout(kind: pa.DataType) -> bool:
    if pa.types.is_run_end_encoded(kind) or _is_list_view(kind):
        return True
    return pa.types.is_nested(kind) and any(
        _has_special_layout(kind.field(i).type) for i in range(kind.num_fields)
    )


def _decode_array(array: pa.Array) -> pa.Array:
    kind = array.type
    if not _has_special_layout(kind):
        return array
    if pa.types.is_run_end_encoded(kind):
        return _decode_array(pc.run_end_decode(array))
    if pa.types.is_struct(kind):
        parts = [_decode_array(part) for part in array.flatten()]
        fields = [pa.field(field.name, part.type) for field, part in zip(kind, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    if not is_list_type(kind):
        raise pa.ArrowInvalid(f"{kind} has list views or runs inside a map or union")
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)])
    return pa.LargeListArray.from_arrays(offsets, _decode_array(array.flatten()), mask=array.is_null())


def _restore_maps(frame: pa.Table, table_schema: pa.Schema | None) -> pa.Table:
    """Convert lists of (key, value) structs, which Polars uses for maps, to maps where the table has maps."""
    for i, field in enumerate(frame.schema if table_schema is not None else ()):
        table_type = (
            table_schema.field(field.name).type
            if table_schema is not None and field.name in table_schema.names
            else None
        )
        frame_type = field.type
        is_pair_list = (
            table_type is not None
            and pa.types.is_map(table_type)
            and (pa.types.is_list(frame_type) or pa.types.is_large_list(frame_type))
            and pa.types.is_struct(frame_type.value_type)
            and [entry_field.name for entry_field in frame_type.value_type] == ["key", "value"]
        )
        if is_pair_list:
            rows = [
                None if row is None else [(pair["key"], pair["value"]) for pair in row]
                for row in frame.column(i).to_pylist()
            ]
            map_type = pa.map_(
                frame_type.value_type.field("key").type, frame_type.value_type.field("value").type
            )
            frame = frame.set_column(i, field.name, pa.chunked_array([pa.array(rows, map_type)]))
    return frame


def _drop_guessed_types(frame: pa.Table, table_schema: pa.Schema | None) -> pa.Table:
    """Give the type null to columns without any value whose type is only a guess, as pandas makes.

    A type counts as a guess if it differs from the table's, or if it is a list of nulls in a column that the
    table lacks. `table_schema` is None if the table does not exist.
    """
    for i, field in enumerate(frame.schema):
        column = frame.column(i)
        in_table = table_schema is not None and field.name in table_schema.names
        has_no_values = column.null_count == len(column)
        is_guessed = (
            in_table and table_schema is not None and table_schema.field(field.name).type != field.type
        )
        empty_list = not in_table and len(column) > 0 and pa.types.is_list(field.type)
        is_untyped = empty_list and pa.types.is_null(field.type.value_type)
        if has_no_values and (is_guessed or is_untyped):
            frame = frame.set_column(i, field.name, pa.nulls(len(column)))
    return frame


_MAX_EXACT_FLOAT = 2**53


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    """Convert to pandas. Whole numbers beside nulls become floats, or `Int64` if floats cannot hold them."""
    frame: pd.DataFrame = table.to_pandas()
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not pa.types.is_int64(column.type) or not column.null_count:
            continue
        bounds = pc.min_max(column).as_py()
        if any(abs(bound) > _MAX_EXACT_FLOAT for bound in bounds.values() if bound is not None):
            frame[name] = column.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame


_FROM_ARROW: dict[type, Callable[[pa.Table], Any]] = {
    pa.Table: lambda table: table,
    pd.DataFrame: _to_pandas,
    pl.DataFrame: pl.from_arrow,
    pl.LazyFrame: lambda table: pl.DataFrame(pl.from_arrow(table)).lazy(),
}


def can_load_type(frame_type: Any) -> bool:
    """Return whether tables can be loaded as this type."""
    return frame_type in _FROM_ARROW


def require_rows_inside(
    frame: pa.Table, schema: Schema, spec: TableSpec, selection: Selection | None
) -> None:
    """Raise PartitionMismatch if rows are outside the selection; None allows all rows.

    `frame` has the table's columns and types, `schema` is the table's schema.
    """
    if selection is not None and (outside_count := count_rows_outside(selection, frame)):
        raise PartitionMismatch(
            f"{outside_count} rows of the frame are outside the run's partitions.",
            table=spec.name,
            hint=format_required_rows(selection, schema),
        )


def count_candidate_rows(table: Table, selection: Selection | None = None) -> int:
    """Return the largest number of rows that a table may have in the selection (default: all rows).

    Returns 0 only if manifests show that no row is selected. Otherwise, the number may be too large: it
    includes all rows of a file that may have one selected row, and deleted rows. Reads the manifests that may
    have such files, and without a selection the snapshot's summary; `sys.maxsize` if that has no number.
    """
    snapshot = table.current_snapshot()
    if snapshot is None:
        return 0
    summary = snapshot.summary.additional_properties if snapshot.summary else {}
    total = summary.get("total-records", "unknown")
    # A summary of 0 proves nothing, because any engine may write it.
    if selection is None and total != "0":
        return int(total) if total.isdecimal() else sys.maxsize
    row_filter = AlwaysTrue() if selection is None else to_iceberg_filter(selection, table.schema())
    return sum(max(1, task.file.record_count) for task in table.scan(row_filter=row_filter).plan_files())


def require_unique_keys(frame: pa.Table, spec: TableSpec) -> None:
    """Raise UpsertKeyInvalid if a key of an upsert is null or occurs in two rows of `frame`.

    `spec.keys` are the key columns, which the frame must have. They may have any type.
    """
    if null_keys := [key for key in spec.keys if frame[key].null_count]:
        raise null_key_error(spec, null_keys)
    if key_columns(frame, spec).n_unique() < frame.num_rows:
        raise duplicate_key_error(spec)


def key_columns(rows: pa.Table, spec: TableSpec) -> pl.DataFrame:
    """Return the key columns of an upsert as Polars columns.

    Polars finds the same keys equal as Spark: NaN is NaN, -0.0 is 0.0, and nested values are compared. Arrow
    distinguishes -0.0 from 0.0, and cannot group nested values.
    """
    return pl.DataFrame({key: pl.Series(pl.from_arrow(to_comparable_column(rows[key]))) for key in spec.keys})


def to_comparable_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert UUIDs and fixed binary to binary, because Arrow and Polars cannot group or join by them."""
    if isinstance(column.type, pa.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(storage, column.type.storage_type)
    return column.cast(pa.binary()) if pa.types.is_fixed_size_binary(column.type) else column


def write_frame(
    frame: pa.Table, table: Table, spec: TableSpec, selection: Selection | None, properties: Mapping[str, str]
) -> None:
    """Write a frame by the spec's write mode in one commit. Afterwards `table` has the new state.

    `frame` has the table's columns. An upsert is written as an append, so the caller must ensure that the
    table has no rows. `selection` has the rows that the write may replace; None means the whole table.
    `properties` are the properties of the snapshot's summary. Raises PartitionMismatch and UpsertKeyInvalid
    before anything is written.
    """
    require_rows_inside(frame, table.schema(), spec, selection)
    if spec.requires_unique_keys:
        require_unique_keys(frame, spec)
    with open_transaction(table) as transaction:
        if spec.write_mode in ("append", "upsert") or table.current_snapshot() is None:
            transaction.append(frame, snapshot_properties=dict(properties))
            return
        row_filter: BooleanExpression = (
            AlwaysTrue() if selection is None else to_iceberg_filter(selection, table.schema())
        )
        with warnings.catch_warnings():
            # PyIceberg warns when the first write of a partition replaces no rows. That is expected here.
            warnings.filterwarnings("ignore", message="Delete operation did not match any records")
            transaction.overwrite(frame, overwrite_filter=row_filter, snapshot_properties=dict(properties))


def read_frame(
    table: Table, frame_type: type, selection: Selection | None, columns: Sequence[str] | None = None
) -> Any:
    """Read the selected rows as `frame_type`.

    `columns` selects columns and their order; None reads all columns. Raises StoredFileDamaged, which names
    the file.
    """
    row_filter: BooleanExpression = (
        AlwaysTrue() if selection is None else to_iceberg_filter(selection, table.schema())
    )
    names = ("*",) if columns is None else tuple(columns)
    scan = table.scan(row_filter=row_filter, selected_fields=names)
    rows = scan.to_arrow()
    return from_arrow(rows if columns is None else rows.select(list(columns)), frame_type)


def from_arrow(rows: pa.Table, frame_type: type) -> Any:
    """Convert an Arrow table to a frame of this type."""
    return _FROM_ARROW[frame_type](rows)
