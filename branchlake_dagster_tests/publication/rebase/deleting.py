"""Row-level deletes as other engines commit them: equality delete files, which neither Spark nor PyIceberg write."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestWriter,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record, TableVersion
from pyiceberg.types import IntegerType, ListType, NestedField, StructType


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}

    def _with_partition(self, format_version: TableVersion) -> Schema:
        """PyIceberg writes the ids of the columns as longs, which Iceberg's Java library cannot read."""
        fields = []
        for field in super()._with_partition(format_version).fields:
            if isinstance(field.field_type, StructType):
                inner = [_with_integers(one) for one in field.field_type.fields]
                field = field.model_copy(update={"field_type": StructType(*inner)})
            fields.append(field)
        return Schema(*fields)


def _with_integers(field: NestedField) -> NestedField:
    if field.name != "equality_ids":
        return field
    return field.model_copy(update={"field_type": ListType(136, IntegerType(), element_required=True)})


class _Deleting(_FastAppendFiles):
    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        return _DeletesWriter(
            spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression
        )


def delete_equal(table: Table, column: str, value: Any, partition: Any = None) -> None:
    """Commit an equality delete of the rows whose `column` is `value`, as Flink does.

    `partition`: the value of the table's one partition field, for a partitioned table.
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
    producer = _Deleting(Operation.DELETE, transaction, table.io)
    producer.append_data_file(file)
    producer.commit()
    transaction.commit_transaction()
