"""Loads the changes of inputs as Spark frames, and filters Spark frames by changed keys."""

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
from branchlake_dagster.incremental.change_tables import ChangeTablePair, ChangeTables
from branchlake_dagster.incremental.consumer import Identifier, UpstreamTable
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import Declaration
from branchlake_dagster.incremental.inputs import (
    COMMIT_COLUMNS,
    read_input_keys,
    rows_removed_error,
    select_partition_rows,
    select_range_rows,
)
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path
from branchlake_dagster.tables.selection import Selection, to_sql_predicate

MAX_LITERALS = 200
"""If a key column has more values, a filter uses only its lowest and highest value."""
MAX_FILTER_PARTS = 32
"""The largest number of parts in a `row_prefilter`: values of the lead column, times the other columns.

With more parts, the method that Spark generates would exceed 8,000 bytes, and Java would not compile it.
"""
MAX_VALUES_PER_PART, MAX_FILTER_VALUES = 5_000, 50_000
"""The largest number of values in one part of a `row_prefilter`, and in all its parts.

Spark plans each value as an expression.
"""


def same_keys(keys: pa.Table, left: Callable[[str], Column], right: Callable[[str], Column]) -> Column:
    """Return the condition that both sides have the same key. Null equals null.

    For a column without null, it is a plain equality, because Spark joins by it with fast hash tables.
    """
    parts = [
        left(name).eqNullSafe(right(name)) if keys[name].null_count else left(name) == right(name)
        for name in keys.column_names
    ]
    return reduce(Column.__and__, parts)


def key_prefilter(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """Return a filter that matches at least all rows of the keys.

    For each column, the filter tests the values, or their range if there are more than `MAX_LITERALS`. Only
    columns of integers, dates and texts are tested. Spark passes this filter to the scan of files, but not
    the keys of a join.
    """
    parts = [_value_prefilter(keys[name], column(name)) for name in keys.column_names]
    return reduce(Column.__and__, parts, F.lit(True))


def row_prefilter(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """Return a filter of single rows, to be applied before a shuffle or a search among all keys.

    It matches all rows of the keys. For each value of the column with the fewest values, for example a day,
    it tests the values of the other columns: few accounts have changed on an old day, all of them today. The
    filter is not passed to files, which would search all their dictionaries in vain.
    """
    value_counts = {
        name: len(pc.unique(keys[name])) for name in keys.column_names if _is_comparable(keys[name].type)
    }
    lead_column = min(value_counts, key=lambda name: value_counts[name], default="")
    other_columns = [name for name in value_counts if name != lead_column]
    if not other_columns or not 0 < value_counts[lead_column] * len(other_columns) <= MAX_FILTER_PARTS:
        return F.lit(True)
    values_left, parts = MAX_FILTER_VALUES, []
    for rows in sorted(_split_by_value(keys, lead_column), key=lambda rows: rows.num_rows):
        condition = _value_prefilter(rows[lead_column], column(lead_column))
        for name in other_columns:
            condition = condition & _value_prefilter(
                rows[name], column(name), max_values=min(values_left, MAX_VALUES_PER_PART)
            )
        values_left -= len(other_columns) * rows.num_rows if rows.num_rows <= MAX_VALUES_PER_PART else 0
        parts.append(condition)
    return F.coalesce(_build_or_tree(parts), F.lit(False))


def _build_or_tree(parts: Sequence[Column]) -> Column:
    """Combine conditions by OR in a balanced tree, because the server limits the depth of expressions."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _build_or_tree(parts[:middle]) | _build_or_tree(parts[middle:])


def _split_by_value(keys: pa.Table, name: str) -> list[pa.Table]:
    """Split the keys into tables that have one value of the column each."""
    ordered = keys.sort_by(name)
    ends = [*pc.run_end_encode(ordered[name].combine_chunks()).run_ends.to_pylist()]
    return [ordered.slice(start, end - start) for start, end in pairwise([0, *ends])]


def _value_prefilter(values: pa.ChunkedArray, column: Column, *, max_values: int = MAX_LITERALS) -> Column:
    present = pc.unique(values.drop_null())
    if not _is_comparable(values.type):
        return F.lit(True)
    if not len(present):
        return column.isNull() if values.null_count else F.lit(True)
    if len(present) <= max_values:
        condition = column.isin(present.to_pylist())
    else:
        ends = pc.min_max(present).as_py()
        condition = column.between(F.lit(ends["min"]), F.lit(ends["max"]))
    return condition | column.isNull() if values.null_count else condition


def _is_comparable(kind: pa.DataType) -> bool:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(pa.types.is_integer(kind) or pa.types.is_date(kind) or is_text)


MAX_SENT_ROWS = 20_000
"""A change with at most this many rows is sent to Spark with the query, without a change table."""


def load_frame(
    consumption: Consumption, upstream: UpstreamTable, session: SparkSession, lake: LakehouseResource
) -> DataFrame:
    """Load the rows of an input for the asset as a lazy frame.

    Raises the same errors as `arrow_inputs.load_rows`.
    """
    identifier = consumption.consumer.inputs[upstream.key]
    frame = _read_table(session, identifier)
    if upstream.pattern == "range":
        return _filter_frame(frame, select_range_rows(consumption, upstream), upstream)
    if consumption.whole:
        input_rows = _filter_frame(
            frame, select_partition_rows(consumption, upstream, consumption.partitions), upstream
        )
        return (
            _add_change_columns(input_rows, consumption.consumer.declaration)
            if upstream.pattern == "rows"
            else input_rows
        )
    if consumption.replaced_keys:
        input_rows = _filter_frame(
            frame, select_partition_rows(consumption, upstream, consumption.partitions), upstream
        )
        return filter_by_keys(input_rows, read_input_keys(consumption, upstream))
    rows = sum(change.rows_changed for _, change in consumption.changes(upstream.key))
    # A change table does not record which commit added a row, so commits=True needs rows from Arrow.
    if rows <= MAX_SENT_ROWS or consumption.consumer.declaration.commits:
        return from_arrow(session, arrow_inputs.load_rows(consumption, upstream))
    tables = ChangeTables(lake)
    consumption.cleanup_callbacks.append(tables.drop)
    return _load_changed_rows(consumption, upstream, session, tables)


def _add_change_columns(frame: DataFrame, declaration: Declaration) -> DataFrame:
    for name, kind in COMMIT_COLUMNS.items() if declaration.commits else ():
        frame = frame.withColumn(name, F.lit(None).cast(from_arrow_type(kind)))
    deliver = declaration.when_removed == "deliver"
    return frame.withColumn(CHANGE_TYPE, F.lit(INSERT)) if deliver else frame


def filter_by_keys(frame: DataFrame, keys: pa.Table) -> DataFrame:
    """Return the rows whose key is among `keys`. Null equals null."""
    if not keys.num_rows:
        return frame.limit(0)  # Spark does not scan the table then
    key_frame = from_arrow(frame.sparkSession, keys)
    candidates = frame.filter(
        key_prefilter(keys, lambda name: frame[quote_spark_name(name)])
        & row_prefilter(keys, lambda name: frame[quote_spark_name(name)])
    )
    same = same_keys(
        keys, lambda name: candidates[quote_spark_name(name)], lambda name: key_frame[quote_spark_name(name)]
    )
    return candidates.join(F.broadcast(key_frame), same, "left_semi")


def from_arrow(session: SparkSession, rows: pa.Table) -> DataFrame:
    """Convert rows to a Spark frame. Works without rows, too."""
    # Without a schema, Spark rejects an empty table and puts time stamps without zone into the session's.
    frame: DataFrame = session.createDataFrame(
        rows, from_arrow_schema(rows.schema, prefer_timestamp_ntz=True)
    )
    return frame


def _load_changed_rows(
    consumption: Consumption, upstream: UpstreamTable, session: SparkSession, tables: ChangeTables
) -> DataFrame:
    identifier, consumer = consumption.consumer.inputs[upstream.key], consumption.consumer.spec.identifier
    added: list[DataFrame] = []
    removed: list[DataFrame] = []
    for group, change in consumption.changes(upstream.key):
        pair: ChangeTablePair = tables.create_pair(upstream, identifier, consumer, change)
        where = select_partition_rows(consumption, upstream, group.partitions)
        for name, frames in ((pair.added, added), (pair.removed, removed)):
            if name is not None:
                frames.append(_filter_frame(_read_table(session, name), where, upstream))
    empty = _read_table(session, identifier).limit(0)
    added_rows, removed_rows = reduce(DataFrame.union, added, empty), reduce(DataFrame.union, removed, empty)
    policy = consumption.consumer.when_removed
    if removed:
        added_rows, removed_rows = added_rows.exceptAll(removed_rows), removed_rows.exceptAll(added_rows)
        if policy in ("fail", "apply") and (count := removed_rows.count()):
            raise rows_removed_error(consumption, upstream, count)
    if policy != "deliver":
        return added_rows
    return added_rows.withColumn(CHANGE_TYPE, F.lit(INSERT)).union(
        removed_rows.withColumn(CHANGE_TYPE, F.lit(DELETE))
    )


def _read_table(session: SparkSession, identifier: Identifier) -> DataFrame:
    return session.table(f"nessie.{quote_spark_path(identifier)}")


def _filter_frame(frame: DataFrame, selection: Selection | None, upstream: UpstreamTable) -> DataFrame:
    return frame if selection is None else frame.filter(to_sql_predicate(selection, upstream.table.schema()))
