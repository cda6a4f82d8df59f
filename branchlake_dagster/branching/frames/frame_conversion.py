"""pandas, Polars and Arrow frames as Arrow tables: in the lake's types, then in their table's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa

from branchlake_dagster.branching.errors import ColumnUnsupported
from branchlake_dagster.branching.table.types import stored_schema
from branchlake_dagster.wording import agree, named

_TO_ARROW: dict[type, Callable[[Any], pa.Table]] = {
    pa.Table: lambda frame: frame,
    pa.RecordBatchReader: lambda reader: reader.read_all(),
    pl.DataFrame: lambda frame: frame.to_arrow(),
}


def handles(kind: type) -> bool:
    """Whether frames of this type can be written."""
    return kind in (pd.DataFrame, pl.LazyFrame) or kind in _TO_ARROW


def to_arrow(frame: Any, like: pa.Schema | None, *, table: str) -> pa.Table:
    """Any supported frame as an Arrow table in types that the lake stores.

    `like` is the schema of the table it goes to, if there is one: Python objects become its maps, and a
    column that is null in all rows (or has none) and would not fit says no type. Raises SchemaMismatch and
    ColumnUnsupported.
    """
    if isinstance(frame, pl.LazyFrame):
        frame = frame.collect()
    if isinstance(frame, pl.DataFrame):
        _no_objects(frame, table)
    convert = _TO_ARROW.get(type(frame))
    found = _maps(convert(frame) if convert else _from_pandas(frame, like, table), like)
    return _without_guesses(cast(found, stored_schema(found.schema, table=table), table=table), like)


def _no_objects(frame: pl.DataFrame, table: str) -> None:
    """Polars hands Python objects to Arrow as the addresses they have in memory."""
    if objects := [name for name, kind in frame.schema.items() if kind == pl.Object]:
        hold = agree(len(objects), "holds", "hold")
        raise ColumnUnsupported(
            f"{named('Column', objects)} {hold} Python objects, which the lake cannot store.",
            table=table,
            hint="Cast to text, numbers, time stamps or structs.",
        )


def cast(frame: pa.Table, schema: pa.Schema, *, table: str) -> pa.Table:
    """The columns of `schema` in its types; what would lose something is refused by column."""
    columns = [_cast(frame.column(one.name), one, table) for one in schema]
    return pa.table(columns, schema=schema)


def _cast(column: pa.ChunkedArray, to: pa.Field, table: str) -> pa.ChunkedArray:
    try:
        return column.cast(to.type)
    except pa.ArrowException as error:
        hint = "Cast the column in the asset."
        if pa.types.is_uint64(column.type):
            hint = "The lake's whole numbers end at 2^63 - 1: cast the column to decimal(20, 0), or to text."
        if pa.types.is_timestamp(column.type) or pa.types.is_time(column.type):
            hint = (
                "The lake holds microseconds: round in the asset (pandas .dt.floor('us'), Polars"
                " .dt.truncate('1us'))."
            )
        raise ColumnUnsupported(
            f"Column {to.name} holds values of {column.type} that {to.type} cannot hold"
            f" ({str(error).splitlines()[0]}).",
            table=table,
            hint=hint,
        ) from error


def _from_pandas(frame: pd.DataFrame, like: pa.Schema | None, table: str) -> pa.Table:
    names = [str(name) for name in frame.columns]
    arrays = [_series(frame.iloc[:, i], name, like, table) for i, name in enumerate(names)]
    return pa.Table.from_arrays(arrays, names=names)


def _series(series: pd.Series[Any], name: str, like: pa.Schema | None, table: str) -> Any:
    wanted = like.field(name).type if like is not None and name in like.names else None
    kind = wanted if wanted is not None and pa.types.is_map(wanted) and series.dtype == object else None
    try:
        return pa.Array.from_pandas(series, type=kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        hint = "Let all its values be of one type: .astype(…) in the asset."
        if kind is not None:
            hint = "Its values must be dicts, or lists of (key, value), of the map's types."
        raise ColumnUnsupported(
            f"Column {name} ({series.dtype}) has values that no one type holds"
            f" ({str(error).splitlines()[0]}).",
            table=table,
            hint=hint,
        ) from error


def _maps(frame: pa.Table, like: pa.Schema | None) -> pa.Table:
    """Lists of (key, value) structs, Polars' form of maps, become maps where the table has maps."""
    for i, field in enumerate(frame.schema if like is not None else ()):
        wanted = like.field(field.name).type if like is not None and field.name in like.names else None
        kind = field.type
        pairs = (
            wanted is not None
            and pa.types.is_map(wanted)
            and (pa.types.is_list(kind) or pa.types.is_large_list(kind))
            and pa.types.is_struct(kind.value_type)
            and [one.name for one in kind.value_type] == ["key", "value"]
        )
        if pairs:
            rows = [
                None if row is None else [(pair["key"], pair["value"]) for pair in row]
                for row in frame.column(i).to_pylist()
            ]
            inner = pa.map_(kind.value_type.field("key").type, kind.value_type.field("value").type)
            frame = frame.set_column(i, field.name, pa.chunked_array([pa.array(rows, inner)]))
    return frame


def _without_guesses(frame: pa.Table, like: pa.Schema | None) -> pa.Table:
    """A column without any value says no type: pandas has floats for it, or objects, whatever was meant."""
    for i, field in enumerate(frame.schema):
        column = frame.column(i)
        known = like is not None and field.name in like.names
        nothing = column.null_count == len(column)
        guessed = known and like is not None and like.field(field.name).type != field.type
        empty_list = not known and len(column) > 0 and pa.types.is_list(field.type)
        untyped = empty_list and pa.types.is_null(field.type.value_type)
        if nothing and (guessed or untyped):
            frame = frame.set_column(i, field.name, pa.nulls(len(column)))
    return frame
