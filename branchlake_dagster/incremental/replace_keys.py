"""Writing what was computed of changed keys: it takes the place of all rows of these keys.

An upsert alone would leave a row behind whose key has lost its last input row.
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
from branchlake_dagster.internals.pyiceberg import transaction_on
from branchlake_dagster.spark.session import quoted
from branchlake_dagster.tables.arrow_frames import not_unique, require_inside, require_unique
from branchlake_dagster.tables.errors import PartitionMismatch
from branchlake_dagster.tables.selection import Selection, to_iceberg, to_sql
from branchlake_dagster.tables.spark_frames import (
    OUTSIDE,
    asserted_inside,
    check_keys,
    partition_mismatch,
    session_properties,
)
from branchlake_dagster.tables.specification import TableSpec
from branchlake_dagster.wording import counted

MOST_KEYS = 2_000
"""Keys that are replaced without Spark: PyIceberg looks each of them up in a predicate."""
_GONE = "__branchlake_gone"
_COPIES = "__branchlake_copies"
_NOT_UNIQUE = "branchlake: upsert key not unique"
_OTHER_KEY = "branchlake: key has not changed"


def by_arrow(
    frame: pa.Table,
    table: Table,
    spec: TableSpec,
    keys: pa.Table,
    properties: Mapping[str, str],
    selection: Selection | None = None,
) -> None:
    """Replace the rows of `keys` (at most MOST_KEYS) in one commit. `frame` has the table's columns.

    Only rows of the run's partitions (`selection`) are replaced: another one's may have these keys too.

    Raises UpsertKeyInvalid, and PartitionMismatch for rows of other keys or partitions.
    """
    check_keys(spec, frame.column_names)
    require_unique(frame, spec)
    require_inside(frame, table.schema(), spec, selection)
    _require_among(frame, keys, spec)
    replaced = any_of(keys)
    if selection is not None:
        replaced = And(replaced, to_iceberg(selection, table.schema()))
    with transaction_on(table) as transaction, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Delete operation did not match any records")
        transaction.overwrite(frame, overwrite_filter=replaced, snapshot_properties=dict(properties))


def _require_among(frame: pa.Table, keys: pa.Table, spec: TableSpec) -> None:
    names = keys.column_names
    rows, allowed = (pl.DataFrame(pl.from_arrow(side.select(names))) for side in (frame, keys))
    if outside := rows.join(allowed.cast(rows.schema), on=names, how="anti", nulls_equal=True).height:
        raise _other_keys(counted(outside, "row"), keys, spec, one=outside == 1)


def _other_keys(rows: str, keys: pa.Table, spec: TableSpec, *, one: bool = False) -> PartitionMismatch:
    return PartitionMismatch(
        f"{rows} of the frame {'has' if one else 'have'} a key that has not changed.",
        table=spec.name,
        hint=f"Compute the rows of the input's keys ({', '.join(keys.column_names)}) and no others.",
    )


def any_of(keys: pa.Table) -> BooleanExpression:
    """The rows that have one of the keys."""
    names = keys.column_names
    if len(names) == 1:
        values = keys[names[0]]
        present = tuple(pc.unique(values.drop_null()).to_pylist())
        found: list[BooleanExpression] = [In(names[0], present)] if present else []
        return _union(found + ([IsNull(names[0])] if values.null_count else []))
    return _union([_equal(row) for row in keys.to_pylist()])


def _equal(row: Mapping[str, object]) -> BooleanExpression:
    parts = [IsNull(name) if value is None else EqualTo(name, value) for name, value in row.items()]
    found: BooleanExpression = AlwaysTrue()
    for part in parts:
        found = And(found, part)
    return found


def _union(parts: Sequence[BooleanExpression]) -> BooleanExpression:
    """As a tree of little depth: visitors recurse."""
    if len(parts) < 2:
        return parts[0]
    middle = len(parts) // 2
    return Or(_union(parts[:middle]), _union(parts[middle:]))


def by_spark(
    frame: DataFrame,
    schema: Schema,
    spec: TableSpec,
    keys: pa.Table,
    properties: Mapping[str, str],
    selection: Selection | None = None,
) -> None:
    """Replace the rows of `keys` in one MERGE. `schema` is the table's; `selection` as in `by_arrow`.

    Raises UpsertKeyInvalid, and PartitionMismatch for rows of other keys or partitions.
    """
    check_keys(spec, frame.columns)
    rows = _among(frame, keys)
    if selection is not None:
        rows = rows.filter(asserted_inside(selection, schema))
    own = to_sql(selection, schema, of=spec.spark_name) if selection is not None else "true"
    gone_keys = _replaced(frame.sparkSession, spec, keys, own).withColumn(_GONE, F.lit(True))
    both = rows.withColumn(_GONE, F.lit(False)).unionByName(gone_keys, allowMissingColumns=True)
    copies = F.sum(F.when(F.col(_GONE), 0).otherwise(1)).over(Window.partitionBy(*map(quoted, spec.keys)))
    present = " AND ".join(f"{quoted(key)} IS NOT NULL" for key in spec.keys)
    valid = f"assert_true({_GONE} OR ({_COPIES} = 1 AND {present}), '{_NOT_UNIQUE}') IS NULL"
    source = (
        both.withColumn(_COPIES, copies)
        .filter(F.expr(valid))
        .filter(~F.col(_GONE) | (F.col(_COPIES) == 0))
        .alias("incoming")
    )
    columns = {quoted(name): F.col(f"incoming.{quoted(name)}") for name in frame.columns}
    gone = F.expr(f"incoming.{_GONE}")
    with session_properties(frame.sparkSession, properties):
        try:
            (
                source.mergeInto(spec.spark_name, _on(spec, keys) & F.expr(f"({own})"))
                .whenMatched(gone)
                .delete()
                .whenMatched()
                .update(columns)
                .whenNotMatched(~gone)
                .insert(columns)
                .merge()
            )
        except Exception as error:
            if _NOT_UNIQUE in str(error):
                raise not_unique(spec) from error
            if _OTHER_KEY in str(error):
                raise _other_keys("Rows", keys, spec) from error
            if OUTSIDE in str(error):
                raise partition_mismatch(spec, schema, selection, "Rows") from error
            raise


def _among(frame: DataFrame, keys: pa.Table) -> DataFrame:
    """The frame, whose job fails at a row of another key: that would be looked for in the wrong files."""
    changed = frame.sparkSession.createDataFrame(keys).withColumn(_GONE, F.lit(True))
    same = spark_keys.same_keys(keys, lambda name: frame[quoted(name)], lambda name: changed[quoted(name)])
    known = F.expr(f"assert_true({_GONE}, '{_OTHER_KEY}') IS NULL")
    columns = [frame[quoted(name)] for name in frame.columns]
    return frame.join(F.broadcast(changed), same, "left").filter(known).select(*columns)


def _replaced(session: SparkSession, spec: TableSpec, keys: pa.Table, own: str) -> DataFrame:
    """The upsert keys of the rows that are replaced, of rows there are or that there may be, each once.

    `own` is the SQL condition of the target's rows that may be.
    """
    changed = session.createDataFrame(keys)
    if set(spec.keys) == set(keys.column_names):
        return changed
    target = session.table(spec.spark_name).filter(F.expr(own))
    rows = target.filter(spark_keys.may_have(keys, lambda name: target[quoted(name)]))
    same = spark_keys.same_keys(keys, lambda name: rows[quoted(name)], lambda name: changed[quoted(name)])
    return rows.join(changed, same, "left_semi").select(*map(quoted, spec.keys)).distinct()


def _on(spec: TableSpec, keys: pa.Table) -> Column:
    """Target and source have the same upsert key, in files that may have rows of the changed ones."""

    def target(name: str) -> Column:
        return F.col(f"{spec.spark_name}.{quoted(name)}")

    def incoming(name: str) -> Column:
        return F.col(f"incoming.{quoted(name)}")

    found = spark_keys.may_have(keys, target) & spark_keys.nearly(keys, target)
    found = found & spark_keys.same_keys(keys, target, incoming)
    for name in spec.keys:
        if name not in keys.column_names:
            found = found & target(name).eqNullSafe(incoming(name))
    return found
