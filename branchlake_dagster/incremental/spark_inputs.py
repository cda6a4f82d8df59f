"""Loads the changes of inputs as Spark frames, and replaces the rows of changed keys in the asset's table.

The replacement removes all rows of the changed keys, and adds the rows that were computed for these keys. An
upsert alone would keep a row whose key has lost its last input row.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, IsNaN, IsNull
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from branchlake_dagster.history.rows import CHANGE_TYPE, DELETE, INSERT
from branchlake_dagster.incremental import inputs as arrow_inputs
from branchlake_dagster.incremental.change_tables import ChangeTablePair, ChangeTables
from branchlake_dagster.incremental.consumption import Consumption
from branchlake_dagster.incremental.declaration import Declaration, Identifier, UpstreamTable
from branchlake_dagster.incremental.inputs import (
    COMMIT_COLUMNS,
    match_values,
    read_input_keys,
    rows_removed_error,
    select_partition_rows,
    select_range_rows,
)
from branchlake_dagster.internals.pyiceberg import open_transaction
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path
from branchlake_dagster.tables.arrow_frames import (
    duplicate_key_error,
    null_key_error,
    require_rows_inside,
    require_unique_keys,
)
from branchlake_dagster.tables.errors import PartitionMismatch
from branchlake_dagster.tables.selection import Selection, match_any, to_iceberg_filter, to_sql_predicate
from branchlake_dagster.tables.spark_frames import (
    OUTSIDE_MESSAGE,
    inside_assertion,
    keys_to_sort_by,
    partition_mismatch_error,
    require_key_columns,
    set_session_properties,
)
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.wording import format_count

MAX_LITERALS = 200
"""If a key column has more values, a filter uses only its lowest and highest value."""
MAX_FILTER_PARTS = 32
"""The largest number of parts in a `row_prefilter`: values of the lead column, times the other columns.

With more parts, the method that Spark generates would exceed 8,000 bytes, and Java would not compile it.
"""
MAX_VALUES_PER_PART, MAX_FILTER_VALUES = 5_000, 50_000
"""The largest number of values in one part of a `row_prefilter`, and in all its parts together.

Spark plans each value as an expression.
"""


def same_keys(keys: pa.Table, left: Callable[[str], Column], right: Callable[[str], Column]) -> Column:
    """Return the condition that both sides have the same key. Null equals null.

    `left` and `right` return the column of a side by the name of a key column. For a key column without null
    in `keys`, the condition is a plain equality, because Spark joins by it with fast hash tables.
    """
    parts = [
        left(name).eqNullSafe(right(name)) if keys[name].null_count else left(name) == right(name)
        for name in keys.column_names
    ]
    return reduce(Column.__and__, parts)


def key_prefilter(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """Return a filter that matches all rows of the keys, and possibly other rows.

    For each column, the filter tests the values, or their range if there are more than `MAX_LITERALS`. Only
    columns of integers, dates and texts are tested. Spark passes this filter to the scan of files, but not
    the keys of a join.
    """
    parts = [_value_prefilter(keys[name], column(name)) for name in keys.column_names]
    return reduce(Column.__and__, parts, F.lit(True))


def row_prefilter(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """Return a cheap filter of rows, applied before each row is compared with all keys.

    It matches all rows of the keys, and possibly other rows. For each value of the column with the fewest
    values, such as a day, it tests the values of the other columns: on an old day few accounts have changed,
    today all of them. Spark does not pass the filter to the scan of files, where it would only cost time. The
    filter is true for all rows if it would exceed `MAX_FILTER_PARTS`.
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
    """Combine conditions, at least one, by OR in a balanced tree.

    The Spark server limits the depth of expressions.
    """
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _build_or_tree(parts[:middle]) | _build_or_tree(parts[middle:])


def _split_by_value(keys: pa.Table, name: str) -> list[pa.Table]:
    """Split the keys into one table for each value of the column."""
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
    """Return the rows of `frame` whose key is among `keys`, as a lazy frame. Null equals null."""
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
    """Convert Arrow rows to a Spark frame. Also works for a table without rows."""
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


MAX_KEYS = 2_000
"""Up to this many keys are replaced by PyIceberg, with a predicate that lists them."""
_GONE = "__branchlake_gone"
_COPIES = "__branchlake_copies"
_NOT_UNIQUE = "branchlake: upsert key not unique"
_NULL_KEY = "branchlake: upsert key is null"
_OTHER_KEY = "branchlake: key has not changed"


def replace_by_pyiceberg(
    frame: pa.Table,
    table: Table,
    spec: TableSpec,
    keys: pa.Table,
    properties: Mapping[str, str],
    selection: Selection | None = None,
) -> None:
    """Replace the rows of `keys` in one commit. Callers pass at most `MAX_KEYS` keys.

    `properties` go into the snapshot's summary. `frame` has the table's columns. Only rows of the run's
    partitions (`selection`) are replaced, because other partitions may have rows with these keys.

    Raises UpsertKeyInvalid, and PartitionMismatch for rows of other keys or partitions.
    """
    require_key_columns(spec, frame.column_names)
    require_unique_keys(frame, spec)
    require_rows_inside(frame, table.schema(), spec, selection)
    _require_changed_keys(frame, keys, spec)
    replaced_rows = match_any_key(keys)
    if selection is not None:
        replaced_rows = And(replaced_rows, to_iceberg_filter(selection, table.schema()))
    with open_transaction(table) as transaction, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Delete operation did not match any records")
        transaction.overwrite(frame, overwrite_filter=replaced_rows, snapshot_properties=dict(properties))


def _require_changed_keys(frame: pa.Table, keys: pa.Table, spec: TableSpec) -> None:
    names = keys.column_names
    rows, allowed = (pl.DataFrame(pl.from_arrow(side.select(names))) for side in (frame, keys))
    if outside := rows.join(allowed.cast(rows.schema), on=names, how="anti", nulls_equal=True).height:
        raise _other_keys_error(format_count(outside, "row"), keys, spec, is_single=outside == 1)


def _other_keys_error(
    rows: str, keys: pa.Table, spec: TableSpec, *, is_single: bool = False
) -> PartitionMismatch:
    return PartitionMismatch(
        f"{rows} of the frame {'has' if is_single else 'have'} a key that has not changed.",
        table=spec.name,
        hint=f"Compute the rows of the input's keys ({', '.join(keys.column_names)}) and no others.",
    )


def match_any_key(keys: pa.Table) -> BooleanExpression:
    """Return a condition that matches the rows with one of the keys. Null equals null, and NaN equals NaN.

    `keys` has a row for each key, and the names of the table's key columns. Without keys the condition is
    always false.
    """
    names = keys.column_names
    if len(names) == 1:
        values = keys[names[0]]
        conditions = match_values(names[0], pc.unique(values.drop_null()))
        conditions += [IsNull(names[0])] if values.null_count else []
    else:
        conditions = [_match_key(row) for row in keys.to_pylist()]
    return match_any(conditions)


def _match_key(row: Mapping[str, object]) -> BooleanExpression:
    condition: BooleanExpression = AlwaysTrue()
    for name, value in row.items():
        if value is None:
            part: BooleanExpression = IsNull(name)
        elif isinstance(value, float) and math.isnan(value):
            part = IsNaN(name)  # PyIceberg has no literal for NaN
        else:
            part = EqualTo(name, value)
        condition = And(condition, part)
    return condition


def replace_by_spark(
    frame: DataFrame,
    schema: Schema,
    spec: TableSpec,
    keys: pa.Table,
    properties: Mapping[str, str],
    selection: Selection | None = None,
) -> None:
    """Replace the rows of `keys` in the asset's table in one MERGE.

    `schema` is the schema of that table. `selection` limits the replaced rows to the run's partitions.
    `properties` go into the snapshot's summary.

    Raises UpsertKeyInvalid, and PartitionMismatch for rows of other keys or partitions.
    """
    require_key_columns(spec, frame.columns)
    rows = _assert_changed_keys(frame, keys)
    own_rows_sql = (
        to_sql_predicate(selection, schema, table_alias=spec.spark_name) if selection is not None else "true"
    )
    gone_keys = _replaced_upsert_keys(frame.sparkSession, spec, keys, own_rows_sql).withColumn(
        _GONE, F.lit(True)
    )
    both = rows.withColumn(_GONE, F.lit(False)).unionByName(gone_keys, allowMissingColumns=True)
    copies = F.sum(F.when(F.col(_GONE), 0).otherwise(1)).over(
        Window.partitionBy(*map(quote_spark_name, keys_to_sort_by(spec)))
    )
    present = " AND ".join(f"{quote_spark_name(key)} IS NOT NULL" for key in spec.keys)
    assertions = (
        f"assert_true({_GONE} OR ({present}), '{_NULL_KEY}') IS NULL",
        f"assert_true({_GONE} OR {_COPIES} = 1, '{_NOT_UNIQUE}') IS NULL",
    )
    source = both.withColumn(_COPIES, copies).filter(F.expr(" AND ".join(assertions)))
    if selection is not None:
        source = source.filter(inside_assertion(selection, schema, f"{_GONE} OR {_COPIES} < 1"))
    source = source.filter(~F.col(_GONE) | (F.col(_COPIES) == 0)).alias("incoming")
    columns = {quote_spark_name(name): F.col(f"incoming.{quote_spark_name(name)}") for name in frame.columns}
    is_gone = F.expr(f"incoming.{_GONE}")
    with set_session_properties(frame.sparkSession, properties):
        try:
            (
                source.mergeInto(spec.spark_name, _merge_condition(spec, keys) & F.expr(f"({own_rows_sql})"))
                .whenMatched(is_gone)
                .delete()
                .whenMatched()
                .update(columns)
                .whenNotMatched(~is_gone)
                .insert(columns)
                .merge()
            )
        except Exception as error:
            if _NOT_UNIQUE in str(error):
                raise duplicate_key_error(spec) from error
            if _NULL_KEY in str(error):
                raise null_key_error(spec, spec.keys) from error
            if _OTHER_KEY in str(error):
                raise _other_keys_error("Rows", keys, spec) from error
            if OUTSIDE_MESSAGE in str(error):
                raise partition_mismatch_error(spec, schema, selection, "Rows") from error
            raise


def _assert_changed_keys(frame: DataFrame, keys: pa.Table) -> DataFrame:
    """Return the frame with an assertion that fails the Spark job at a row whose key has not changed.

    The MERGE searches only files that may have changed keys, so it would not find the old row of another key.
    """
    changed_keys = frame.sparkSession.createDataFrame(keys).withColumn(_GONE, F.lit(True))
    same = same_keys(
        keys, lambda name: frame[quote_spark_name(name)], lambda name: changed_keys[quote_spark_name(name)]
    )
    assertion = F.expr(f"assert_true({_GONE}, '{_OTHER_KEY}') IS NULL")
    columns = [frame[quote_spark_name(name)] for name in frame.columns]
    return frame.join(F.broadcast(changed_keys), same, "left").filter(assertion).select(*columns)


def _replaced_upsert_keys(
    session: SparkSession, spec: TableSpec, keys: pa.Table, own_rows_sql: str
) -> DataFrame:
    """Return the upsert keys of the rows to replace, each key once.

    If the upsert has the same key columns as `keys`, these are `keys` themselves, whether or not the target
    has rows with them. Otherwise the target is read. `own_rows_sql` is the SQL condition for the target rows
    that may be replaced.
    """
    changed_keys = session.createDataFrame(keys)
    if set(spec.keys) == set(keys.column_names):
        return changed_keys
    target = session.table(spec.spark_name).filter(F.expr(own_rows_sql))
    rows = target.filter(key_prefilter(keys, lambda name: target[quote_spark_name(name)]))
    same = same_keys(
        keys, lambda name: rows[quote_spark_name(name)], lambda name: changed_keys[quote_spark_name(name)]
    )
    return rows.join(changed_keys, same, "left_semi").select(*map(quote_spark_name, spec.keys)).distinct()


def _merge_condition(spec: TableSpec, keys: pa.Table) -> Column:
    """Return the condition that target and source have the same upsert key.

    It limits the scan to files that may have rows of the changed keys.
    """

    def target(name: str) -> Column:
        return F.col(f"{spec.spark_name}.{quote_spark_name(name)}")

    def incoming(name: str) -> Column:
        return F.col(f"incoming.{quote_spark_name(name)}")

    condition = key_prefilter(keys, target) & row_prefilter(keys, target)
    condition = condition & same_keys(keys, target, incoming)
    for name in spec.keys:
        if name not in keys.column_names:
            condition = condition & target(name).eqNullSafe(incoming(name))
    return condition
