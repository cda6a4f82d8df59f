"""Which data files a filter can be true in, by the bounds that the manifests keep.

The filter is DuckDB's, as a PyArrow expression, which nobody but PyArrow can read. So each file becomes a
fragment of a PyArrow dataset that promises its bounds, and PyArrow leaves out those whose promise contradicts
the filter. No file is opened for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import (
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
)

from branchlake_dagster.history.file_facts import facts

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask

_BOUNDED = (IntegerType, LongType, DateType, DecimalType, StringType, TimestampType, TimestamptzType)
"""Not floats: their bounds leave NaN out, which DuckDB sorts above every number."""


def possible(
    tasks: Sequence[FileScanTask], metadata: TableMetadata, arrow_schema: pa.Schema, condition: ds.Expression
) -> list[FileScanTask]:
    """The tasks whose file may hold a row for which `condition` is true."""
    specs = metadata.specs()
    fields = [
        (field, schema_to_pyarrow(Schema(field)).types[0])
        for field in metadata.schema().fields
        if isinstance(field.field_type, _BOUNDED)
    ]
    parquet, files = ds.ParquetFileFormat(), LocalFileSystem()
    fragments = [
        parquet.make_fragment(
            str(number), files, partition_expression=_promise(task.file, specs[task.file.spec_id], fields)
        )
        for number, task in enumerate(tasks)
    ]
    dataset = ds.FileSystemDataset(fragments, arrow_schema, parquet, files)
    return [tasks[int(fragment.path)] for fragment in dataset.get_fragments(filter=condition)]


def _promise(
    file: DataFile, spec: PartitionSpec, fields: Iterable[tuple[NestedField, pa.DataType]]
) -> ds.Expression:
    """What is true of every row of the file."""
    promise = pa.compute.scalar(True)
    for field, kind in fields:
        known, column = facts(file, field, spec), ds.field(field.name)
        if known.all_null:
            promise = promise & column.is_null()
        elif known.low is not None and known.high is not None:
            within = (column >= _scalar(known.low, kind)) & (column <= _scalar(known.high, kind))
            promise = promise & (within if known.no_null else within | column.is_null())
    return promise


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    # Iceberg counts days and microseconds.
    if isinstance(value, int):
        return pa.scalar(value, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    return pa.scalar(value, kind)
