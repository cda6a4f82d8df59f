"""Changes of inputs as Spark frames, and the changed keys in Spark's plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from branchlake_dagster.history.rows import CHANGE_TYPE, DELETE, INSERT
from branchlake_dagster.incremental import inputs as arrow_inputs
from branchlake_dagster.incremental.change_tables import ChangeTables, Pair
from branchlake_dagster.incremental.consumer import Identifier, Input
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import Declaration
from branchlake_dagster.incremental.inputs import (
    COMMIT_COLUMNS,
    changed_keys_of,
    of_partitions,
    of_range,
    rows_removed,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.spark.session import dotted, quoted
from branchlake_dagster.tables.selection import Selection, to_sql

MOST_LITERALS = 200
"""More values of a key are asked for by their lowest and highest."""
MOST_PARTS = 32
"""Values, times the other columns, beside which those are asked for: of more the method that Spark makes
would be longer than 8,000 bytes, which Java compiles no more."""
MOST_OF_ONE, MOST_NEARLY = 5_000, 50_000
"""The same for the values beside one value, and for all of a filter: each is an expression to be planned."""


def same_keys(keys: pa.Table, left: Callable[[str], Column], right: Callable[[str], Column]) -> Column:
    """Whether two sides have the same of the keys, null equal to null.

    Without a null among them by plain equality: that is the join which Spark has the fast hash tables for.
    """
    parts = [
        left(name).eqNullSafe(right(name)) if keys[name].null_count else left(name) == right(name)
        for name in keys.column_names
    ]
    return reduce(Column.__and__, parts)


def may_have(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """A filter that lets through all rows of the keys, and of others as few as files can tell apart.

    Spark passes no join's keys on to the scan of a file, but what stands in the query it does.
    """
    parts = [_may_be(keys[name], column(name)) for name in keys.column_names]
    return reduce(Column.__and__, parts, F.lit(True))


def nearly(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """A filter of single rows before a shuffle or a look-up among all keys: lets through all rows of them.

    It asks for the values of the other columns by each value of the one that has fewest, a day say: of an
    old day few accounts have changed, of today all. Nothing of it is passed on to files, which would look it
    up in each of their dictionaries in vain.
    """
    few = {name: len(pc.unique(keys[name])) for name in keys.column_names if _comparable(keys[name].type)}
    lead = min(few, key=lambda name: few[name], default="")
    others = [name for name in few if name != lead]
    if not others or not 0 < few[lead] * len(others) <= MOST_PARTS:
        return F.lit(True)
    left, parts = MOST_NEARLY, []
    for rows in sorted(_by_value(keys, lead), key=lambda rows: rows.num_rows):
        found = _may_be(rows[lead], column(lead))
        for name in others:
            found = found & _may_be(rows[name], column(name), most=min(left, MOST_OF_ONE))
        left -= len(others) * rows.num_rows if rows.num_rows <= MOST_OF_ONE else 0
        parts.append(found)
    return F.coalesce(_any(parts), F.lit(False))


def _any(parts: Sequence[Column]) -> Column:
    """As a tree of little depth: what is sent to the server may only be nested so far."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _any(parts[:middle]) | _any(parts[middle:])


def _by_value(keys: pa.Table, name: str) -> list[pa.Table]:
    """The keys in tables that have one value of the column each."""
    ordered = keys.sort_by(name)
    ends = [*pc.run_end_encode(ordered[name].combine_chunks()).run_ends.to_pylist()]
    return [ordered.slice(start, end - start) for start, end in pairwise([0, *ends])]


def _may_be(values: pa.ChunkedArray, column: Column, *, most: int = MOST_LITERALS) -> Column:
    present = pc.unique(values.drop_null())
    if not _comparable(values.type):
        return F.lit(True)
    if not len(present):
        return column.isNull() if values.null_count else F.lit(True)
    if len(present) <= most:
        found = column.isin(present.to_pylist())
    else:
        ends = pc.min_max(present).as_py()
        found = column.between(F.lit(ends["min"]), F.lit(ends["max"]))
    return found | column.isNull() if values.null_count else found


def _comparable(kind: pa.DataType) -> bool:
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(pa.types.is_integer(kind) or pa.types.is_date(kind) or text)


FEW_ROWS = 20_000
"""A change of so many rows is sent to Spark with the query, which needs no table for it."""


def load(consumption: Consumption, one: Input, session: SparkSession, lake: LakehouseResource) -> DataFrame:
    """The rows of an input that the asset is to get, lazily. Raises as `arrow_inputs.load` does."""
    identifier = consumption.consumer.inputs[one.key]
    frame = _table(session, identifier)
    if one.pattern == "range":
        return _where(frame, of_range(consumption, one), one)
    if consumption.whole:
        found = _where(frame, of_partitions(consumption, one, consumption.partitions), one)
        return _everything(found, consumption.consumer.declaration) if one.pattern == "rows" else found
    if consumption.replaced_keys:
        found = _where(frame, of_partitions(consumption, one, consumption.partitions), one)
        return of_keys(found, changed_keys_of(consumption, one))
    rows = sum(change.rows_changed for _, change in consumption.changes(one.key))
    # Which commit a row of a change table came with, nothing in the table says.
    if rows <= FEW_ROWS or consumption.consumer.declaration.commits:
        return from_arrow(session, arrow_inputs.load(consumption, one))
    tables = ChangeTables(lake)
    consumption.when_written.append(tables.drop)
    return _changed_rows(consumption, one, session, tables)


def _everything(frame: DataFrame, declaration: Declaration) -> DataFrame:
    for name, kind in COMMIT_COLUMNS.items() if declaration.commits else ():
        frame = frame.withColumn(name, F.lit(None).cast(from_arrow_type(kind)))
    deliver = declaration.when_removed == "deliver"
    return frame.withColumn(CHANGE_TYPE, F.lit(INSERT)) if deliver else frame


def of_keys(frame: DataFrame, keys: pa.Table) -> DataFrame:
    """The rows whose key is among `keys`, null equal to null."""
    if not keys.num_rows:
        return frame.limit(0)  # Spark makes no scan of it
    wanted = from_arrow(frame.sparkSession, keys)
    found = frame.filter(
        may_have(keys, lambda name: frame[quoted(name)]) & nearly(keys, lambda name: frame[quoted(name)])
    )
    same = same_keys(keys, lambda name: found[quoted(name)], lambda name: wanted[quoted(name)])
    return found.join(F.broadcast(wanted), same, "left_semi")


def from_arrow(session: SparkSession, rows: pa.Table) -> DataFrame:
    """Rows of our own as a frame."""
    # Without a schema Spark cannot take an empty table, and gives a time stamp without zone the session's.
    found: DataFrame = session.createDataFrame(
        rows, from_arrow_schema(rows.schema, prefer_timestamp_ntz=True)
    )
    return found


def _changed_rows(
    consumption: Consumption, one: Input, session: SparkSession, tables: ChangeTables
) -> DataFrame:
    identifier, consumer = consumption.consumer.inputs[one.key], consumption.consumer.spec.identifier
    added: list[DataFrame] = []
    removed: list[DataFrame] = []
    for group, change in consumption.changes(one.key):
        pair: Pair = tables.make(one, identifier, consumer, change)
        where = of_partitions(consumption, one, group.partitions)
        for name, frames in ((pair.added, added), (pair.removed, removed)):
            if name is not None:
                frames.append(_where(_table(session, name), where, one))
    empty = _table(session, identifier).limit(0)
    came, went = reduce(DataFrame.union, added, empty), reduce(DataFrame.union, removed, empty)
    how = consumption.consumer.when_removed
    if removed:
        came, went = came.exceptAll(went), went.exceptAll(came)
        if how in ("fail", "apply") and (count := went.count()):
            raise rows_removed(consumption, one, count)
    if how != "deliver":
        return came
    return came.withColumn(CHANGE_TYPE, F.lit(INSERT)).union(went.withColumn(CHANGE_TYPE, F.lit(DELETE)))


def _table(session: SparkSession, identifier: Identifier) -> DataFrame:
    return session.table(f"nessie.{dotted(identifier)}")


def _where(frame: DataFrame, selection: Selection | None, one: Input) -> DataFrame:
    return frame if selection is None else frame.filter(to_sql(selection, one.table.schema()))
