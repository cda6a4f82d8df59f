"""Arrow, pandas and Polars frames written to a table and read from it through PyIceberg: no Spark, no JVM."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import TimestampType

from branchlake_dagster.errors import some
from branchlake_dagster.internals.pyiceberg import transaction_on
from branchlake_dagster.tables.errors import ColumnUnsupported, PartitionMismatch, UpsertKeyInvalid
from branchlake_dagster.tables.schemas import stored_schema
from branchlake_dagster.tables.selection import Selection, Values, rows_outside, to_iceberg
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.wording import agree, named


def must_be(selection: Selection, schema: Schema) -> str:
    """Which rows a frame for the selection may have, and how their time stamps are read."""
    naive = [one for one in selection.columns() if isinstance(schema.find_type(one), TimestampType)]
    have, are = agree(len(naive), "has", "have"), agree(len(naive), "it is", "they are")
    rule = (
        f" {', '.join(naive)} {have} no time zone, so {are} read as the clock of UTC: convert local times in"
        " the asset, or give them their zone."
    )
    return f"Its rows must be those where {rows_of(selection)}.{rule if naive else ''}"


def rows_of(selection: Selection) -> str:
    """Which rows a selection holds: the first few of its conditions, with their columns."""
    found = []
    for part in selection.slices:
        words = []
        for one in part:
            if isinstance(one, Values):
                words.append(f"{one.column} is {some(tuple(map(repr, one.values)))}")
            else:
                words.append(f"{one.start.isoformat()} <= {one.column} < {one.end.isoformat()}")
        found.append(" and ".join(words))
    return some(tuple(found)) if found else "no row"


def not_unique(spec: TableSpec) -> UpsertKeyInvalid:
    """The error for keys that are null or occur twice."""
    return UpsertKeyInvalid(
        f"Two rows share a key, or a key is null, in ({', '.join(spec.keys)}).",
        table=spec.name,
        hint="Keep one row per key before returning the frame.",
    )


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


_FROM_ARROW: dict[type, Callable[[pa.Table], Any]] = {
    pa.Table: lambda table: table,
    pd.DataFrame: lambda table: table.to_pandas(),
    pl.DataFrame: pl.from_arrow,
    pl.LazyFrame: lambda table: pl.DataFrame(pl.from_arrow(table)).lazy(),
}


def loads(kind: Any) -> bool:
    """Whether tables can be loaded as this type."""
    return kind in _FROM_ARROW


def require_inside(frame: pa.Table, schema: Schema, spec: TableSpec, selection: Selection | None) -> None:
    """Raise PartitionMismatch for rows outside the selection. `frame` has the table's columns."""
    if selection is not None and (outside := rows_outside(selection, frame)):
        raise PartitionMismatch(
            f"{outside} rows of the frame are outside the run's partitions.",
            table=spec.name,
            hint=must_be(selection, schema),
        )


def may_have_rows(table: Table) -> bool:
    """Whether a table has rows. That it has none is not taken from a summary, which any engine may write."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return False
    told = snapshot.summary.additional_properties if snapshot.summary else {}
    return told.get("total-records") != "0" or any(True for _ in table.scan().plan_files())


def require_unique(frame: pa.Table, spec: TableSpec) -> None:
    """Raise UpsertKeyInvalid when a key of an upsert is null or occurs twice."""
    nulls = any(frame[key].null_count for key in spec.keys)
    keys = pa.table({key: comparable(frame[key]) for key in spec.keys})
    distinct = keys.group_by(list(spec.keys)).aggregate([]).num_rows
    if nulls or distinct < frame.num_rows:
        raise not_unique(spec)


def comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column in a type that Arrow and Polars group and join by: UUIDs and fixed binary as binary."""
    if isinstance(column.type, pa.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(storage, column.type.storage_type)
    return column.cast(pa.binary()) if pa.types.is_fixed_size_binary(column.type) else column


def write(
    frame: pa.Table, table: Table, spec: TableSpec, selection: Selection | None, properties: Mapping[str, str]
) -> None:
    """Write by the spec's mode in one commit, after which `table` is what it then is.

    `frame` has the table's columns. An upsert finds no row to match: the table has none yet. Raises
    PartitionMismatch and UpsertKeyInvalid before anything is written.
    """
    require_inside(frame, table.schema(), spec, selection)
    if spec.write_mode == "upsert":
        require_unique(frame, spec)
    with transaction_on(table) as transaction:
        if spec.write_mode in ("append", "upsert") or table.current_snapshot() is None:
            transaction.append(frame, snapshot_properties=dict(properties))
            return
        row_filter: BooleanExpression = (
            AlwaysTrue() if selection is None else to_iceberg(selection, table.schema())
        )
        with warnings.catch_warnings():
            # The first write of a partition replaces nothing, which is what we asked for.
            warnings.filterwarnings("ignore", message="Delete operation did not match any records")
            transaction.overwrite(frame, overwrite_filter=row_filter, snapshot_properties=dict(properties))


def read(table: Table, kind: type, selection: Selection | None, columns: Sequence[str] | None = None) -> Any:
    """The table's rows of the selection as `kind`, with these columns in this order; None: all."""
    row_filter: BooleanExpression = (
        AlwaysTrue() if selection is None else to_iceberg(selection, table.schema())
    )
    if columns is None:
        return as_kind(table.scan(row_filter=row_filter).to_arrow(), kind)
    rows = table.scan(row_filter=row_filter, selected_fields=tuple(columns)).to_arrow()
    return as_kind(rows.select(list(columns)), kind)


def as_kind(rows: pa.Table, kind: type) -> Any:
    """Rows as a frame of the kind."""
    return _FROM_ARROW[kind](rows)
