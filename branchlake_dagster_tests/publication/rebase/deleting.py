"""Row-level deletes as other engines commit them: equality delete files, which neither Spark nor PyIceberg write."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestFile,
    ManifestWriter,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record

from branchlake_dagster.internals.pyiceberg import DeleteManifestWriter, build_snapshot, commit_compaction

_PATH_ID, _POSITION_ID = 2147483546, 2147483545


class _Deleting(_FastAppendFiles):
    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        return DeleteManifestWriter(
            spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression
        )


class _MergingDeletes(_Deleting):
    def _manifests(self) -> list[ManifestFile]:
        manifests = super()._manifests()
        merged = [one for one in manifests if one.content == ManifestContent.DELETES]
        with self.new_manifest_writer(self.spec(merged[0].partition_spec_id)) as writer:
            for manifest in merged:
                for entry in self.fetch_manifest_entry(manifest):
                    writer.existing(entry)
        return [*(one for one in manifests if one not in merged), writer.to_manifest_file()]


def merge_delete_manifests(table: Table) -> None:
    """Commit a snapshot that lists all delete files in one manifest, as Iceberg's Java library merges them.

    All delete files must have the same partition spec.
    """
    transaction = table.transaction()
    commit_compaction(transaction, _MergingDeletes(Operation.APPEND, transaction, table.io))


def write_position_deletes(table: Table, data_file: DataFile, positions: Sequence[int]) -> DataFile:
    """Write a file of position deletes for rows of one data file, numbered from 0. Nothing is committed."""
    delete_path, path = f"{table.location()}/data/{uuid.uuid4()}-deletes.parquet", data_file.file_path
    fields = [
        pa.field("file_path", pa.string(), metadata={"PARQUET:field_id": str(_PATH_ID)}),
        pa.field("pos", pa.int64(), metadata={"PARQUET:field_id": str(_POSITION_ID)}),
    ]
    rows = pa.table([[path] * len(positions), sorted(positions)], schema=pa.schema(fields))
    with table.io.new_output(delete_path).create() as stream:
        pq.write_table(rows, stream)
    file = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=delete_path,
        file_format=FileFormat.PARQUET,
        partition=data_file.partition,
        record_count=len(positions),
        file_size_in_bytes=len(table.io.new_input(delete_path)),
        lower_bounds={_PATH_ID: path.encode()},
        upper_bounds={_PATH_ID: path.encode()},
    )
    file.spec_id = data_file.spec_id
    return file


def commit_deletes(
    table: Table,
    deletes: Sequence[DataFile],
    *,
    properties: Mapping[str, str],
    added: Sequence[DataFile] = (),
    replaces: Sequence[DataFile] = (),
) -> None:
    """Commit files of position deletes, and data files, by one snapshot, as Spark's UPDATE does (merge-on-read).

    `properties` go into the snapshot's summary. The delete files `replaces` are removed by the same snapshot, as
    Spark does with the former delete files of a data file.
    """
    updates = build_snapshot(
        table,
        added=added,
        removed=(),
        operation=Operation.OVERWRITE if added else Operation.DELETE,
        properties=dict(properties),
        written_paths=[],
        added_deletes=deletes,
        removed_deletes=replaces,
    )
    transaction = table.transaction()
    transaction._apply(updates)
    transaction.commit_transaction()


def delete_at(
    table: Table,
    path: str,
    *positions: int,
    properties: Mapping[str, str],
    replaces: Sequence[DataFile] = (),
) -> None:
    """Commit a position delete of rows of the data file at `path`. See `commit_deletes`."""
    (task,) = (task for task in table.scan().plan_files() if task.file.file_path == path)
    delete_file = write_position_deletes(table, task.file, positions)
    commit_deletes(table, [delete_file], properties=properties, replaces=replaces)


def delete_equal(
    table: Table,
    column: str,
    value: Any,
    partition: Any = None,
    properties: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Commit an equality delete of the rows whose `column` is `value`, as Flink does.

    `partition`: the value of the table's one partition field, for a partitioned table. `properties` go into the
    snapshot's summary.
    """
    field = table.schema().find_field(column)
    rows = pa.table({column: [value]})
    kept = pa.field(column, rows.schema.field(0).type, metadata={"PARQUET:field_id": str(field.field_id)})
    path = f"{table.location()}/data/{uuid.uuid4()}-deletes.parquet"
    with table.io.new_output(path).create() as stream:
        pq.write_table(rows.cast(pa.schema([kept])), stream)
    file = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(partition) if table.spec().fields else Record(),
        record_count=1,
        file_size_in_bytes=len(table.io.new_input(path)),
        equality_ids=[field.field_id],
    )
    file.spec_id = table.spec().spec_id
    transaction = table.transaction()
    producer = _Deleting(Operation.DELETE, transaction, table.io, snapshot_properties=dict(properties))
    producer.append_data_file(file)
    producer.commit()
    transaction.commit_transaction()
