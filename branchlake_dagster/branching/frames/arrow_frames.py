"""Arrow tables written to a table and read from it through PyIceberg: no Spark, no JVM."""

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

from branchlake_dagster.branching.errors import PartitionMismatch
from branchlake_dagster.branching.frames.wording import must_be, not_unique
from branchlake_dagster.branching.table.selection import Selection, rows_outside, to_iceberg
from branchlake_dagster.branching.table.spec import TableSpec
from branchlake_dagster.internals.pyiceberg import transaction_on

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
