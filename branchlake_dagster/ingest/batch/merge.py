"""Rows that take the place of others: staged in a table on the branch, then merged by keys, by Spark."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.branching.frames.spark_frames import session_properties
from branchlake_dagster.branching.table.schema import arrow_schema
from branchlake_dagster.branching.table.types import iceberg_schema
from branchlake_dagster.ingest.scanning.targets import Identifier, Target
from branchlake_dagster.lakehouse.catalog import NessieCatalog
from branchlake_dagster.lakehouse.spark.quoting import dotted, quoted

_BESIDE = pa.schema(
    [
        pa.field("__op", pa.string()),
        pa.field("__topic", pa.string()),
        pa.field("__partition", pa.int32()),
        pa.field("__offset", pa.int64()),
    ]
)


def staging_table(catalog: NessieCatalog, target: Target) -> tuple[Identifier, str]:
    """A table for the rows of one batch, and its metadata as workers take it. It never leaves the branch.

    Another attempt on the same branch may have left one behind: it is made anew.
    """
    *home, name = target.identifier
    identifier = (*home, f"{name}__staged")
    schema = pa.schema([*arrow_schema(target.table.schema(), name=target.name), *_BESIDE])
    if catalog.table_exists(identifier):
        catalog.drop_table(identifier)
    made = catalog.create_table(identifier, iceberg_schema(schema, table=target.name))
    return identifier, made.metadata.model_dump_json()


def merge(session: SparkSession, target: Target, staged: Identifier, properties: Mapping[str, str]) -> None:
    """Let the staged rows take the place of those with the same keys; of one key the last record counts.

    Last is the greatest offset: a key whose records are in several partitions has no order of its own.
    Deletions of keys that are not there change nothing.
    """
    assert target.declared is not None  # noqa: S101 - dead letters are appended
    keys = list(target.declared.keys)
    latest = Window.partitionBy(*map(quoted, keys)).orderBy(
        F.col("__offset").desc(), F.col("__partition").desc(), F.col("__topic").desc()
    )
    rows = session.table(f"nessie.{dotted(staged)}")
    source = rows.withColumn("__nth", F.row_number().over(latest)).filter("__nth = 1").alias("incoming")
    name = f"nessie.{dotted(target.identifier)}"
    # Keys are never null: such records are dead letters.
    on = " AND ".join(f"{name}.{quoted(key)} = incoming.{quoted(key)}" for key in keys)
    names = [one.name for one in target.table.schema().fields]
    columns = {quoted(one): F.col(f"incoming.{quoted(one)}") for one in names}
    gone = F.coalesce(F.col("incoming.__op") == "delete", F.lit(False))
    with session_properties(session, properties):
        merging = source.mergeInto(name, F.expr(on))
        if target.declared.mode == "changes":
            merging = merging.whenMatched(gone).delete().whenMatched().update(columns)
            merging = merging.whenNotMatched(~gone).insert(columns)
        else:
            merging = merging.whenMatched().update(columns).whenNotMatched().insert(columns)
        merging.merge()
