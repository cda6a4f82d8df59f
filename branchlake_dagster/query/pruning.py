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
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask

_BOUNDED = (IntegerType, LongType, DateType, DecimalType, StringType, TimestampType, TimestamptzType)
"""Not floats: their bounds leave NaN out, which DuckDB sorts above every number."""


def possible(
    tasks: Sequence[FileScanTask], schema: Schema, arrow_schema: pa.Schema, condition: ds.Expression
) -> list[FileScanTask]:
    """The tasks whose file may hold a row for which `condition` is true."""
    fields = [field for field in schema.fields if isinstance(field.field_type, _BOUNDED)]
    parquet, files = ds.ParquetFileFormat(), LocalFileSystem()
    fragments = [
        parquet.make_fragment(str(number), files, partition_expression=_promise(task.file, fields))
        for number, task in enumerate(tasks)
    ]
    dataset = ds.FileSystemDataset(fragments, arrow_schema, parquet, files)
    return [tasks[int(fragment.path)] for fragment in dataset.get_fragments(filter=condition)]


def _promise(file: DataFile, fields: Iterable[NestedField]) -> ds.Expression:
    """What is true of every row of the file."""
    promise = pa.compute.scalar(True)
    for field in fields:
        column = ds.field(field.name)
        nulls = (file.null_value_counts or {}).get(field.field_id)
        if nulls is not None and nulls == file.record_count:
            promise = promise & column.is_null()
            continue
        lower, upper = _bound(file.lower_bounds, field), _bound(file.upper_bounds, field)
        if lower is None or upper is None:
            continue
        within = (column >= lower) & (column <= upper)
        promise = promise & (within if nulls == 0 else within | column.is_null())
    return promise


def _bound(bounds: dict[int, bytes] | None, field: NestedField) -> pa.Scalar | None:
    data = (bounds or {}).get(field.field_id)
    if data is None or not isinstance(field.field_type, PrimitiveType):
        return None
    value: Any = from_bytes(field.field_type, data)
    kind = schema_to_pyarrow(Schema(field))[0].type
    # Iceberg counts days and microseconds.
    if isinstance(value, int):
        return pa.scalar(value, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    return pa.scalar(value, kind)
