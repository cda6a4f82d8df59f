"""Changes of inputs as Spark frames: small ones as they are, large ones through change tables."""

from __future__ import annotations

from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from branchlake_dagster.branching.consuming.consumer import Identifier, Input
from branchlake_dagster.branching.consuming.consumption import Consumption
from branchlake_dagster.branching.consuming.declaration import Declaration
from branchlake_dagster.branching.delivering import arrow_inputs, spark_keys
from branchlake_dagster.branching.delivering.change_tables import ChangeTables, Pair
from branchlake_dagster.branching.delivering.inputs import (
    COMMIT_COLUMNS,
    changed_keys_of,
    of_partitions,
    of_range,
    rows_removed,
)
from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.branching.table.selection import Selection, to_sql
from branchlake_dagster.changes.rows import CHANGE_TYPE, DELETE, INSERT
from branchlake_dagster.spark.session import dotted, quoted

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
        spark_keys.may_have(keys, lambda name: frame[quoted(name)])
        & spark_keys.nearly(keys, lambda name: frame[quoted(name)])
    )
    same = spark_keys.same(keys, lambda name: found[quoted(name)], lambda name: wanted[quoted(name)])
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
