"""Rows that take the place of others: staged in a table on the branch, then merged by keys, by Spark."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import pyarrow as pa
from pyiceberg.table import Table
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.ingest.declaring.declaration import TOMBSTONE
from branchlake_dagster.ingest.scanning.targets import Identifier, Target
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.spark.session import dotted, quoted
from branchlake_dagster.tables.schemas import arrow_schema, iceberg_schema
from branchlake_dagster.tables.spark_frames import session_properties

_BESIDE = {
    "op": pa.string(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
"""What a staged row has of its record, by attribute."""
_STAGED = re.compile(r"(.+)__staged_[0-9a-f]{16}")


def beside(target: Target) -> dict[str, str]:
    """The columns for that, by attribute: under names that no column of the table has."""
    return {attribute: _free(f"__{attribute}", target) for attribute in _BESIDE}


def _free(name: str, target: Target) -> str:
    # Debezium's transforms give records fields like __op; Spark tells no case apart.
    used = {one.name.casefold() for one in target.table.schema().fields}
    while name in used:
        name = f"_{name}"
    return name


def staging_table(catalog: NessieCatalog, target: Target, batch: str) -> tuple[Identifier, Table]:
    """Create a table for the rows of one batch; its identifier, and the table. It never leaves the branch.

    An earlier pass of the batch may have left one behind: it is made anew. No other batch knows its name: an
    attempt that was given up would take the rows of the next one away.
    """
    *home, name = target.identifier
    identifier = (*home, f"{name}__staged_{hashlib.sha256(batch.encode()).hexdigest()[:16]}")
    names = beside(target)
    more = [pa.field(names[attribute], kind) for attribute, kind in _BESIDE.items()]
    schema = pa.schema([*arrow_schema(target.table.schema(), name=target.name), *more])
    if catalog.table_exists(identifier):
        catalog.drop_table(identifier)
    return identifier, catalog.create_table(identifier, iceberg_schema(schema, table=target.name))


def staging_tables(client: NessieClient, ref: str, tables: Iterable[Identifier]) -> list[Identifier]:
    """All that a reference has for these tables: those of attempts that were given up too."""
    wanted = {*tables}
    if not wanted:
        return []
    found = []
    for entry in client.entries(ref, filter="entry.name.contains('__staged_')"):
        *home, name = entry.key.elements
        if (match := _STAGED.fullmatch(name)) and (*home, match[1]) in wanted:
            found.append(entry.key.elements)
    return found


def merge(session: SparkSession, target: Target, staged: Identifier, properties: Mapping[str, str]) -> None:
    """Let the staged rows take the place of those with the same keys; of one key the last record counts.

    Of one partition the greatest offset is the last record; of several partitions that of the latest time,
    then that of the greatest topic and partition. Deletions of keys that are not there change nothing.
    """
    assert target.declared is not None  # noqa: S101 - dead letters are appended
    keys, names, nth = list(target.declared.keys), beside(target), _free("__nth", target)
    partition = [F.col(names[one]) for one in ("topic", "partition")]
    by_key = Window.partitionBy(*map(quoted, keys))
    in_partition = by_key.partitionBy(*map(quoted, keys), *partition).orderBy(F.col(names["offset"]).desc())
    latest = by_key.orderBy(F.col(names["timestamp"]).desc_nulls_last(), *(one.desc() for one in partition))
    source = session.table(f"nessie.{dotted(staged)}")
    for window in (in_partition, latest):
        source = source.withColumn(nth, F.row_number().over(window)).filter(F.col(nth) == 1)
    source = source.alias("incoming")
    name = f"nessie.{dotted(target.identifier)}"
    # Keys are never null: such records are dead letters.
    on = " AND ".join(f"{name}.{quoted(key)} = incoming.{quoted(key)}" for key in keys)
    own = [one.name for one in target.table.schema().fields]
    columns = {quoted(one): F.col(f"incoming.{quoted(one)}") for one in own}
    deletions = ("delete", TOMBSTONE) if target.declared.mode == "changes" else (TOMBSTONE,)
    gone = F.coalesce(F.col(f"incoming.{names['op']}").isin(*deletions), F.lit(False))
    with session_properties(session, properties):
        merging = source.mergeInto(name, F.expr(on))
        if target.declared.mode == "changes" or target.declared.keyed_by_record:
            merging = merging.whenMatched(gone).delete().whenMatched().update(columns)
            merging = merging.whenNotMatched(~gone).insert(columns)
        else:
            merging = merging.whenMatched().update(columns).whenNotMatched().insert(columns)
        merging.merge()
