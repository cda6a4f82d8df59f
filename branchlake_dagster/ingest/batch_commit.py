"""The commit of a batch: files with offsets, and merges by keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update import AddSnapshotUpdate, RemoveSnapshotsUpdate, SetPropertiesUpdate, TableUpdate
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import OutcomeUnknown
from branchlake_dagster.history.capture import line
from branchlake_dagster.ingest.batch_tables import Identifier, Target
from branchlake_dagster.ingest.declaration import TOMBSTONE
from branchlake_dagster.ingest.errors import EarlierAttemptLate
from branchlake_dagster.ingest.offsets import Recorded
from branchlake_dagster.ingest.progress import PutBack, with_put_back
from branchlake_dagster.internals.pyiceberg import applied, snapshot_of
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, Delete, IcebergTable, Put, Reference
from branchlake_dagster.nessie.model import Operation as NessieOperation
from branchlake_dagster.publication.replay import IcebergTables, Staged
from branchlake_dagster.spark.session import dotted, quoted
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.schemas import arrow_schema, iceberg_schema
from branchlake_dagster.tables.spark_frames import session_properties
from branchlake_dagster.tables.specification import table_name


@dataclass(frozen=True)
class TableChange:
    """What a batch does to one table.

    `recorded` are its offsets afterwards, None for a table that records none; `origin` goes into the summary
    of its snapshot beside them, and `properties` are set on the table. `put_back_by` is the run whose dead
    letters are put back into it, or marked in it.
    """

    identifier: Identifier
    table: Table
    files: Sequence[DataFile] = ()
    recorded: Recorded | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    put_back_by: str | None = None

    def told(self, ingestion: str) -> list[str]:
        """The properties that it sets."""
        offsets = [LakeProperty.OFFSETS_PREFIX + ingestion] if self.recorded else []
        return [
            *self.properties,
            *offsets,
            *([LakeProperty.REPROCESSED_PREFIX + ingestion] if self.put_back_by else []),
        ]


def commit_tables(
    client: NessieClient,
    catalog: NessieCatalog,
    branch: str,
    changes: Sequence[TableChange],
    *,
    ingestion: str,
    message: str,
    properties: Mapping[str, str],
    tables: IcebergTables,
    keep: int | None = None,
    dropped: Sequence[Identifier] = (),
) -> Reference:
    """Commit the files and offsets of all tables at once, and forget the tables that are `dropped`.

    Of tables without files the offsets alone; with `keep` so many snapshots stay of one that has a quarter
    more. The branch as it is then. Raises EarlierAttemptLate where the branch has, since a table was loaded,
    come to say something else of what is set on it here. Nessie's errors pass through; nothing is left of a
    commit that certainly did not happen but data files.
    """
    keys = [ContentKey(one.identifier) for one in changes]
    gone = [ContentKey(one) for one in dropped]
    seen = client.contents_at(branch, [*keys, *gone])
    operations: list[NessieOperation] = [Delete(key) for key in gone if key in seen.contents]
    staged: list[Staged] = []
    try:
        for key, change in zip(keys, changes, strict=True):
            content = seen.contents.get(key)
            assert isinstance(content, IcebergTable)  # noqa: S101 - it was loaded or made on this branch
            table = change.table
            if content.metadata_location != table.metadata_location:
                table = catalog.table_of(key, content)
                _require_unsaid(change, table, ingestion, branch)
            one = _staged(table, change, ingestion, keep)
            staged.append(one)
            operations.append(Put(key, tables.write(one, content.content_id)))
        result = client.commit(
            branch,
            expected_hash=seen.reference.hash,
            operations=operations,
            message=message,
            properties=properties,
        )
    except Exception as error:
        if not isinstance(error, OutcomeUnknown):
            for one in staged:
                tables.discard(one)
        raise
    return replace(seen.reference, hash=result.hash)


def _require_unsaid(change: TableChange, now: Table, ingestion: str, branch: str) -> None:
    """Raise EarlierAttemptLate where an attempt that was given up has committed since: no other one may.

    Its rows would stay under ours, which has read the same records.
    """
    told = change.told(ingestion)
    if any(now.metadata.properties.get(one) != change.table.metadata.properties.get(one) for one in told):
        raise EarlierAttemptLate(
            f"An earlier attempt of ingestion {ingestion} has committed its batch after this one had begun.",
            table=table_name(change.identifier),
            branch=branch,
            hint="Nothing of this attempt was committed. The next attempt of the step takes the earlier one's"
            " back and begins anew; where the step has no retry, retry the run from its failure.",
        )


def _outgrown(metadata: TableMetadata, keep: int) -> list[int]:
    """The oldest snapshots of the line, beyond those that are kept; none that a reference names."""
    if len(metadata.snapshots) <= keep + keep // 4:
        return []
    found, _ = line(metadata)
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    return [one.snapshot_id for one in found[:-keep] if one.snapshot_id not in named]


def _staged(table: Table, change: TableChange, ingestion: str, keep: int | None) -> Staged:
    recorded = change.recorded
    written: list[str] = []
    updates: tuple[TableUpdate, ...] = ()
    now = table.metadata.current_snapshot()
    if change.files:
        updates = snapshot_of(
            table,
            added=change.files,
            removed=(),
            operation=Operation.APPEND,
            properties={**change.origin, **(recorded.summary(ingestion) if recorded else {})},
            written=written,
        )
        now = next(one for one in updates if isinstance(one, AddSnapshotUpdate)).snapshot
    at = now.snapshot_id if now else None
    if recorded is not None:
        text = replace(recorded, at=at).text()
        updates += (SetPropertiesUpdate(updates={LakeProperty.OFFSETS_PREFIX + ingestion: text}),)
    if change.put_back_by is not None:
        run = PutBack(change.put_back_by, at, (now.sequence_number or 0) if now else 0)
        text = with_put_back(ingestion, table.metadata, run)
        updates += (SetPropertiesUpdate(updates={LakeProperty.REPROCESSED_PREFIX + ingestion: text}),)
    if change.files and keep is not None and (old := _outgrown(table.metadata, keep)):
        updates += (RemoveSnapshotsUpdate(snapshot_ids=old),)
    if change.properties:
        updates += (SetPropertiesUpdate(updates=dict(change.properties)),)
    metadata = applied(table.metadata, updates)
    state = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)
    return Staged(table, state, written)


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
