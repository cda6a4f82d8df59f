"""Commits a batch: adds data files with offsets, merges rows by their keys, and removes old kept records.

With `keep_value`, each batch appends its records to the table of kept records as they were received, in the
commit that adds their rows. This table is partitioned by the day of receipt, so a removal only drops whole
files: it reads the manifests and no data. A table property has the first day that is not removed. The removal
is repeated when that day changes, once a day.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
from pyiceberg.expressions import LessThan
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update import AddSnapshotUpdate, SetPropertiesUpdate, TableUpdate
from pyiceberg.transforms import DayTransform
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.errors import OutcomeUnknown
from branchlake_dagster.expiry.live_trim import drop_snapshots, get_trimmer
from branchlake_dagster.ingest.batch_context import BatchContext
from branchlake_dagster.ingest.batch_tables import Identifier, Target
from branchlake_dagster.ingest.declaration import TOMBSTONE, Ingest
from branchlake_dagster.ingest.errors import EarlierAttemptLate
from branchlake_dagster.ingest.offsets import TableProgress
from branchlake_dagster.ingest.progress import ReprocessingRun, add_reprocessing_run
from branchlake_dagster.internals.pyiceberg import apply_updates, build_snapshot
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, Delete, IcebergTable, Put, Reference
from branchlake_dagster.nessie.model import Operation as NessieOperation
from branchlake_dagster.publication.replay import IcebergTableFormat, StagedState
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.schemas import build_iceberg_schema, table_arrow_schema
from branchlake_dagster.tables.spark_frames import set_session_properties
from branchlake_dagster.tables.specification import format_table_name


@dataclass(frozen=True)
class BatchTableChange:
    """The change that a batch makes to one table.

    `progress` is the ingestion's progress after the batch, None for a table that does not record it.
    `snapshot_properties` are added to the summary of the new snapshot; `table_properties` are set on the
    table. `reprocessed_by` is the id of the run that reprocesses records into this table, or marks dead
    letters in it. `removed_files` are files of the table that the snapshot removes.
    """

    identifier: Identifier
    table: Table
    files: Sequence[DataFile] = ()
    progress: TableProgress | None = None
    snapshot_properties: Mapping[str, str] = field(default_factory=dict)
    table_properties: Mapping[str, str] = field(default_factory=dict)
    reprocessed_by: str | None = None
    removed_files: Sequence[DataFile] = ()

    def property_names(self, ingestion: str) -> list[str]:
        """Return the names of the table properties that the change sets.

        `ingestion` is the name of the ingestion, which ends the names of the properties about its progress.
        """
        offsets = [LakeProperty.OFFSETS_PREFIX + ingestion] if self.progress else []
        return [
            *self.table_properties,
            *offsets,
            *([LakeProperty.REPROCESSED_PREFIX + ingestion] if self.reprocessed_by else []),
        ]


def commit_tables(
    client: NessieClient,
    catalog: NessieCatalog,
    branch: str,
    changes: Sequence[BatchTableChange],
    *,
    ingestion: str,
    message: str,
    properties: Mapping[str, str],
    tables: IcebergTableFormat,
    keep_snapshots: int | None = None,
    tables_to_drop: Sequence[Identifier] = (),
) -> Reference:
    """Atomic: commit the files and properties of all tables and drop `tables_to_drop`, or change nothing.

    A table without files gets only its properties. `properties` are the commit's properties in Nessie. With
    `keep_snapshots`, a table that has a quarter more snapshots than that number keeps only the newest
    `keep_snapshots` of them, and those that open runs and consumers still need.

    Returns the branch after the commit. Raises EarlierAttemptLate if a property that this commit sets has
    changed on the branch since the table was loaded. Nessie's errors pass through. A commit that certainly
    failed leaves only data files behind: its metadata files are deleted.
    """
    keys = [ContentKey(one.identifier) for one in changes]
    dropped_keys = [ContentKey(one) for one in tables_to_drop]
    branch_contents = client.contents_at(branch, [*keys, *dropped_keys])
    operations: list[NessieOperation] = [
        Delete(key) for key in dropped_keys if key in branch_contents.contents
    ]
    staged_changes: list[StagedState] = []
    try:
        for key, change in zip(keys, changes, strict=True):
            content = branch_contents.contents.get(key)
            assert isinstance(content, IcebergTable)  # noqa: S101 - loaded or created on this branch
            table = change.table
            if content.metadata_location != table.metadata_location:
                table = catalog.table_of(key, content)
                _require_unchanged(change, table, ingestion, branch)
            expired_ids = (
                get_trimmer(client.uri).list_expired(
                    client, catalog.properties, key, content, table.metadata, keep_snapshots
                )
                if change.files and keep_snapshots is not None
                else []
            )
            staged_change = _stage_change(table, change, ingestion, expired_ids)
            staged_changes.append(staged_change)
            operations.append(Put(key, tables.write(staged_change, content.content_id)))
        result = client.commit(
            branch,
            expected_hash=branch_contents.reference.hash,
            operations=operations,
            message=message,
            properties=properties,
        )
    except Exception as error:
        if not isinstance(error, OutcomeUnknown):
            for staged_change in staged_changes:
                tables.discard(staged_change)
        raise
    return replace(branch_contents.reference, hash=result.hash)


def _require_unchanged(change: BatchTableChange, current_table: Table, ingestion: str, branch: str) -> None:
    """Raise EarlierAttemptLate if an abandoned attempt of the step has committed since the table was loaded.

    Both attempts have read the same records, so the table would hold their rows twice.
    """
    property_names = change.property_names(ingestion)
    if any(
        current_table.metadata.properties.get(one) != change.table.metadata.properties.get(one)
        for one in property_names
    ):
        raise EarlierAttemptLate(
            f"An earlier attempt of ingestion {ingestion} committed its batch after this attempt began.",
            table=format_table_name(change.identifier),
            branch=branch,
            hint="This attempt committed nothing. The next attempt of the step undoes the late commit and"
            " starts again. If the step has no retry policy, retry the run from its failure.",
        )


def _stage_change(
    table: Table, change: BatchTableChange, ingestion: str, expired_ids: Sequence[int]
) -> StagedState:
    progress = change.progress
    written_paths: list[str] = []
    updates: tuple[TableUpdate, ...] = ()
    current_snapshot = table.metadata.current_snapshot()
    if change.files or change.removed_files:
        updates = build_snapshot(
            table,
            added=change.files,
            removed=change.removed_files,
            operation=Operation.DELETE if change.removed_files else Operation.APPEND,
            properties={**change.snapshot_properties, **(progress.to_summary(ingestion) if progress else {})},
            written_paths=written_paths,
        )
        current_snapshot = next(one for one in updates if isinstance(one, AddSnapshotUpdate)).snapshot
    snapshot_id = current_snapshot.snapshot_id if current_snapshot else None
    if progress is not None:
        property_value = replace(progress, snapshot_id=snapshot_id).to_json()
        updates += (SetPropertiesUpdate(updates={LakeProperty.OFFSETS_PREFIX + ingestion: property_value}),)
    if change.reprocessed_by is not None:
        reprocessing_run = ReprocessingRun(
            change.reprocessed_by,
            snapshot_id,
            (current_snapshot.sequence_number or 0) if current_snapshot else 0,
        )
        property_value = add_reprocessing_run(ingestion, table.metadata, reprocessing_run)
        updates += (
            SetPropertiesUpdate(updates={LakeProperty.REPROCESSED_PREFIX + ingestion: property_value}),
        )
    if change.table_properties:
        updates += (SetPropertiesUpdate(updates=dict(change.table_properties)),)
    metadata = apply_updates(table.metadata, updates)
    if expired_ids:
        metadata = drop_snapshots(metadata, frozenset(expired_ids))
    staged_table = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)
    return StagedState(table, staged_table, written_paths)


_STAGING_COLUMN_TYPES = {
    "op": pa.string(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
"""Types of the columns that a staging table adds for attributes of the record."""
_STAGING_NAME = re.compile(r"(.+)__staged_[0-9a-f]{16}")


def staging_columns(target: Target) -> dict[str, str]:
    """Return the staging table's columns of record attributes: `{"op": "__op", "offset": "__offset", …}`.

    If the target table has a column of such a name, the name gets another underscore.
    """
    return {attribute: _unused_column_name(f"__{attribute}", target) for attribute in _STAGING_COLUMN_TYPES}


def _unused_column_name(name: str, target: Target) -> str:
    # Debezium's transforms add fields such as __op to records. Spark compares names without case.
    used_names = {one.name.casefold() for one in target.table.schema().fields}
    while name in used_names:
        name = f"_{name}"
    return name


def create_staging_table(
    catalog: NessieCatalog, target: Target, batch_id: str, *, with_attributes: bool = True
) -> tuple[Identifier, Table]:
    """Create a table that holds the rows of one batch until they are merged.

    `with_attributes` adds the columns of `staging_columns`, which `merge_staged_rows` needs.
    Returns its identifier and the table. The table never leaves the branch. A table that an earlier pass of
    the batch has left behind is replaced. The name is unique to the batch: an abandoned attempt that shared
    the name could drop the rows of the next.
    """
    *namespace, name = target.identifier
    identifier = (*namespace, f"{name}__staged_{hashlib.sha256(batch_id.encode()).hexdigest()[:16]}")
    attribute_columns = staging_columns(target)
    record_fields = [
        pa.field(attribute_columns[attribute], data_type)
        for attribute, data_type in _STAGING_COLUMN_TYPES.items()
    ]
    schema = table_arrow_schema(target.table.schema(), table_name=target.name)
    if with_attributes:
        schema = pa.schema([*schema, *record_fields])
    if catalog.table_exists(identifier):
        catalog.drop_table(identifier)
    return identifier, catalog.create_table(identifier, build_iceberg_schema(schema, table_name=target.name))


def list_staging_tables(client: NessieClient, ref: str, tables: Iterable[Identifier]) -> list[Identifier]:
    """Return the identifiers of all staging tables that belong to `tables` at a reference.

    Those of abandoned attempts are included.
    """
    target_identifiers = {*tables}
    if not target_identifiers:
        return []
    staging_identifiers = []
    for entry in client.entries(ref, filter="entry.name.contains('__staged_')"):
        *namespace, name = entry.key.elements
        if (match := _STAGING_NAME.fullmatch(name)) and (*namespace, match[1]) in target_identifiers:
            staging_identifiers.append(entry.key.elements)
    return staging_identifiers


def merge_staged_rows(
    session: SparkSession, target: Target, staging_identifier: Identifier, properties: Mapping[str, str]
) -> None:
    """Merge the staged rows into the target: each replaces, or deletes, the row with the same keys.

    A staged row deletes if its record is a deletion or has no value. If several records have the same keys,
    the last record wins. Within a partition the last record has the greatest offset. Among partitions it has
    the latest time, then the greatest topic and partition. Deleting a key that the table does not have
    changes nothing. `properties` are added to the summary of the snapshot.
    """
    assert target.declaration is not None  # noqa: S101 - dead letters are appended
    keys, attribute_columns, row_number_column = (
        list(target.declaration.keys),
        staging_columns(target),
        _unused_column_name("__nth", target),
    )
    partition = [F.col(attribute_columns[one]) for one in ("topic", "partition")]
    by_key = Window.partitionBy(*map(quote_spark_name, keys))
    in_partition = by_key.partitionBy(*map(quote_spark_name, keys), *partition).orderBy(
        F.col(attribute_columns["offset"]).desc()
    )
    latest = by_key.orderBy(
        F.col(attribute_columns["timestamp"]).desc_nulls_last(), *(one.desc() for one in partition)
    )
    source = session.table(f"nessie.{quote_spark_path(staging_identifier)}")
    for window in (in_partition, latest):
        source = source.withColumn(row_number_column, F.row_number().over(window)).filter(
            F.col(row_number_column) == 1
        )
    source = source.alias("incoming")
    target_name = f"nessie.{quote_spark_path(target.identifier)}"
    # Keys are never null: such records are dead letters.
    merge_condition = " AND ".join(
        f"{target_name}.{quote_spark_name(key)} = incoming.{quote_spark_name(key)}" for key in keys
    )
    column_names = [one.name for one in target.table.schema().fields]
    columns = {quote_spark_name(one): F.col(f"incoming.{quote_spark_name(one)}") for one in column_names}
    deletions = ("delete", TOMBSTONE) if target.declaration.mode == "changes" else (TOMBSTONE,)
    is_deletion = F.coalesce(F.col(f"incoming.{attribute_columns['op']}").isin(*deletions), F.lit(False))
    with set_session_properties(session, properties):
        merge_builder = source.mergeInto(target_name, F.expr(merge_condition))
        if target.declaration.mode == "changes" or target.declaration.keyed_by_record:
            merge_builder = merge_builder.whenMatched(is_deletion).delete().whenMatched().update(columns)
            merge_builder = merge_builder.whenNotMatched(~is_deletion).insert(columns)
        else:
            merge_builder = merge_builder.whenMatched().update(columns).whenNotMatched().insert(columns)
        merge_builder.merge()


RECEIVED_AT = "received_at"
"""The column with the time at which the batch of a record began."""
EPOCH = date(1970, 1, 1)
"""The day from which Iceberg counts days."""


def remove_expired_records(
    ingest: Ingest,
    batch_context: BatchContext,
    kept_records: Target,
    *,
    now: datetime,
    tables: IcebergTableFormat,
) -> int:
    """Remove the kept records of days (UTC) that ended more than `keep_value_days` before `now`.

    Commits on the branch and returns the number of removed records. If the table's property shows that an
    earlier batch of the same day has already removed them, changes nothing and returns 0.
    """
    first_day = (now.astimezone(UTC) - timedelta(days=ingest.keep_value_days)).date()
    property_name = LakeProperty.KEPT_SINCE_PREFIX + ingest.name
    if kept_records.table.metadata.properties.get(property_name) == first_day.isoformat():
        return 0
    files = list(_iter_files_before(kept_records.table, first_day))
    commit_tables(
        batch_context.lake.nessie,
        batch_context.catalog,
        batch_context.branch,
        [
            BatchTableChange(
                kept_records.identifier,
                kept_records.table,
                snapshot_properties={
                    **batch_context.snapshot_properties,
                    LakeProperty.ASSET: "/".join(kept_records.identifier),
                },
                table_properties={property_name: first_day.isoformat()},
                removed_files=files,
            )
        ],
        ingestion=ingest.name,
        message=f"Ingest {ingest.name}: remove kept records from before {first_day}",
        properties=batch_context.commit_properties,
        tables=tables,
    )
    return sum(file.record_count for file in files)


def _iter_files_before(table: Table, first_day: date) -> Iterator[DataFile]:
    """Yield the files whose partition is a day of receipt before `first_day`. Reads manifests only.

    Files of a partition spec without the day of receipt are left out, because they may hold newer records.
    """
    if table.current_snapshot() is None:
        return
    source_id = table.schema().find_field(RECEIVED_AT).field_id
    day_positions = {
        spec_id: next(
            (
                number
                for number, part in enumerate(spec.fields)
                if part.source_id == source_id and isinstance(part.transform, DayTransform)
            ),
            None,
        )
        for spec_id, spec in table.specs().items()
    }
    older = LessThan(RECEIVED_AT, f"{first_day.isoformat()}T00:00:00+00:00")
    for task in table.scan(row_filter=older).plan_files():
        position = day_positions[task.file.spec_id]
        if position is not None and task.file.partition[position] < (first_day - EPOCH).days:
            yield task.file
