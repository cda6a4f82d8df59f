"""Replaces all rows of changed keys by the rows that were computed of them.

An upsert alone would keep a row whose key has lost its last input row.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, In, IsNull, Or
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

from branchlake_dagster.incremental import spark_inputs as spark_keys
from branchlake_dagster.internals.pyiceberg import open_transaction
from branchlake_dagster.spark.session import quote_spark_name
from branchlake_dagster.tables.arrow_frames import (
    duplicate_key_error,
    require_rows_inside,
    require_unique_keys,
)
from branchlake_dagster.tables.errors import PartitionMismatch
from branchlake_dagster.tables.selection import Selection, to_iceberg_filter, to_sql_predicate
from branchlake_dagster.tables.spark_frames import (
    OUTSIDE_MESSAGE,
    inside_assertion,
    partition_mismatch_error,
    require_key_columns,
    set_session_properties,
)
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.wording import format_count

MAX_KEYS = 2_000
"""Up to this many keys are replaced by PyIceberg, with a predicate that lists them."""
_GONE = "__branchlake_gone"
_COPIES = "__branchlake_copies"
_NOT_UNIQUE = "branchlake: upsert key not unique"
_OTHER_KEY = "branchlake: key has not changed"


def replace_by_pyiceberg(
    frame: pa.Table,
    table: Table,
    spec: TableSpec,
    keys: pa.Table,
    properties: Mapping[str, str],
    selection: Selection | None = None,
) -> None:
    """Replace the rows of `keys`, at most `MAX_KEYS`, in one commit.

    `frame` has the table's columns. Only rows of the run's partitions (`selection`) are replaced, because
    other partitions may have rows with these keys.

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
    """Return a condition that matches the rows with one of the keys."""
    names = keys.column_names
    if len(names) == 1:
        values = keys[names[0]]
        present = tuple(pc.unique(values.drop_null()).to_pylist())
        conditions: list[BooleanExpression] = [In(names[0], present)] if present else []
        return _build_or_tree(conditions + ([IsNull(names[0])] if values.null_count else []))
    return _build_or_tree([_match_key(row) for row in keys.to_pylist()])


def _match_key(row: Mapping[str, object]) -> BooleanExpression:
    parts = [IsNull(name) if value is None else EqualTo(name, value) for name, value in row.items()]
    condition: BooleanExpression = AlwaysTrue()
    for part in parts:
        condition = And(condition, part)
    return condition


def _build_or_tree(parts: Sequence[BooleanExpression]) -> BooleanExpression:
    """Combine conditions by OR in a balanced tree, because visitors recurse."""
    if len(parts) < 2:
        return parts[0]
    middle = len(parts) // 2
    return Or(_build_or_tree(parts[:middle]), _build_or_tree(parts[middle:]))


def replace_by_spark(
    frame: DataFrame,
    schema: Schema,
    spec: TableSpec,
    keys: pa.Table,
    properties: Mapping[str, str],
    selection: Selection | None = None,
) -> None:
    """Replace the rows of `keys` in one MERGE.

    `schema` is the table's. `selection` is as for `replace_by_pyiceberg`.

    Raises UpsertKeyInvalid, and PartitionMismatch for rows of other keys or partitions.
    """
    require_key_columns(spec, frame.columns)
    rows = _assert_changed_keys(frame, keys)
    if selection is not None:
        rows = rows.filter(inside_assertion(selection, schema))
    own_rows_sql = (
        to_sql_predicate(selection, schema, table_alias=spec.spark_name) if selection is not None else "true"
    )
    gone_keys = _replaced_upsert_keys(frame.sparkSession, spec, keys, own_rows_sql).withColumn(
        _GONE, F.lit(True)
    )
    both = rows.withColumn(_GONE, F.lit(False)).unionByName(gone_keys, allowMissingColumns=True)
    copies = F.sum(F.when(F.col(_GONE), 0).otherwise(1)).over(
        Window.partitionBy(*map(quote_spark_name, spec.keys))
    )
    present = " AND ".join(f"{quote_spark_name(key)} IS NOT NULL" for key in spec.keys)
    valid = f"assert_true({_GONE} OR ({_COPIES} = 1 AND {present}), '{_NOT_UNIQUE}') IS NULL"
    source = (
        both.withColumn(_COPIES, copies)
        .filter(F.expr(valid))
        .filter(~F.col(_GONE) | (F.col(_COPIES) == 0))
        .alias("incoming")
    )
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
            if _OTHER_KEY in str(error):
                raise _other_keys_error("Rows", keys, spec) from error
            if OUTSIDE_MESSAGE in str(error):
                raise partition_mismatch_error(spec, schema, selection, "Rows") from error
            raise


def _assert_changed_keys(frame: DataFrame, keys: pa.Table) -> DataFrame:
    """Return the frame with an assertion: its job fails at a row of a key that has not changed.

    Such a row would be searched for in the wrong files.
    """
    changed_keys = frame.sparkSession.createDataFrame(keys).withColumn(_GONE, F.lit(True))
    same = spark_keys.same_keys(
        keys, lambda name: frame[quote_spark_name(name)], lambda name: changed_keys[quote_spark_name(name)]
    )
    assertion = F.expr(f"assert_true({_GONE}, '{_OTHER_KEY}') IS NULL")
    columns = [frame[quote_spark_name(name)] for name in frame.columns]
    return frame.join(F.broadcast(changed_keys), same, "left").filter(assertion).select(*columns)


def _replaced_upsert_keys(
    session: SparkSession, spec: TableSpec, keys: pa.Table, own_rows_sql: str
) -> DataFrame:
    """Return the upsert keys of rows to replace, each once, existing or not.

    `own_rows_sql` is the SQL condition for the target rows that may be replaced.
    """
    changed_keys = session.createDataFrame(keys)
    if set(spec.keys) == set(keys.column_names):
        return changed_keys
    target = session.table(spec.spark_name).filter(F.expr(own_rows_sql))
    rows = target.filter(spark_keys.key_prefilter(keys, lambda name: target[quote_spark_name(name)]))
    same = spark_keys.same_keys(
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

    condition = spark_keys.key_prefilter(keys, target) & spark_keys.row_prefilter(keys, target)
    condition = condition & spark_keys.same_keys(keys, target, incoming)
    for name in spec.keys:
        if name not in keys.column_names:
            condition = condition & target(name).eqNullSafe(incoming(name))
    return condition
