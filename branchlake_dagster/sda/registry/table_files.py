"""Open the registry's tables, and read and delete their data files by PyIceberg."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Iterable

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, BooleanExpression, In
from pyiceberg.io.pyarrow import PYARROW_PARQUET_FIELD_ID_KEY, pyarrow_to_schema
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import (
    PARTITION_FIELD_ID_START,
    PartitionField,
    PartitionSpec,
)
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import TimestamptzType

from branchlake_dagster.errors import Unsupported

_logger = logging.getLogger(__name__)
MAX_LISTED_VALUES = 200
"""PyIceberg compares no longer lists of values with partitions and bounds."""


def pack_file(file: DataFile) -> bytes:
    """Return a data file's metadata in the form that a task sends back."""
    return pickle.dumps(file)


def unpack_file(payload: bytes) -> DataFile:
    """Return the data file that `pack_file` packed. Only payloads of this run's own tasks are unpacked."""
    file: DataFile = pickle.loads(payload)  # noqa: S301 - pickled by this package's code in this run's tasks
    return file


def open_table(
    catalog: Catalog, identifier: tuple[str, ...], schema: pa.Schema, partition_by: str | None = None
) -> Table:
    """Load a table and add missing columns, or create it. `partition_by` is a column of a new table."""
    try:
        table = catalog.load_table(identifier)
    except NoSuchTableError:
        numbered = pa.schema(
            column.with_metadata({PYARROW_PARQUET_FIELD_ID_KEY: str(number)})
            for number, column in enumerate(schema, 1)
        )
        new_schema = pyarrow_to_schema(numbered)
        parts = []
        if partition_by is not None:
            source_id = new_schema.find_field(partition_by).field_id
            parts = [PartitionField(source_id, PARTITION_FIELD_ID_START, IdentityTransform(), partition_by)]
        return catalog.create_table(identifier, new_schema, partition_spec=PartitionSpec(*parts))
    if not {*schema.names} <= {*table.schema().column_names}:
        with table.update_schema() as update_schema:
            update_schema.union_by_name(schema)
    return table


def list_files(table: Table, column: str | None = None, values: Collection[str] = ()) -> list[DataFile]:
    """List the current data files of a table, or those of the partitions with `values` of a column.

    Raises Unsupported if a file is not in a partition of one value of the column.
    """
    row_filter: BooleanExpression = AlwaysTrue()
    if column is not None and len(values) <= MAX_LISTED_VALUES:
        row_filter = In(column, set(values))
    files = [task.file for task in table.scan(row_filter=row_filter).plan_files()]
    return files if column is None else [f for f in files if partition_value(table, f, column) in values]


def partition_value(table: Table, file: DataFile, column: str) -> str:
    """Return the value that a column has in all rows of a file.

    Raises Unsupported if the file is not in a partition of one value of the column.
    """
    source_id = table.schema().find_field(column).field_id
    for number, part in enumerate(table.specs()[file.spec_id].fields):
        if part.source_id == source_id and isinstance(part.transform, IdentityTransform):
            return str(file.partition[number])
    raise Unsupported(
        f"File {file.file_path} of table {'.'.join(table.name())} is not in a partition of {column}.",
        table=".".join(table.name()),
        hint=f"Rewrite the table's data files with the partition spec that has the column {column}.",
    )


def column_bound(table: Table, file: DataFile, column: str, *, is_upper: bool) -> int | None:
    """Return a bound of a column of timestamps in a file, in microseconds since 1970.

    None if the bound is unknown, or if the file may have rows without a value.
    """
    if column not in table.schema().column_names:
        return None
    field_id = table.schema().find_field(column).field_id
    bounds = file.upper_bounds if is_upper else file.lower_bounds
    bound = (bounds or {}).get(field_id)
    if bound is None or (file.null_value_counts or {}).get(field_id) != 0:
        return None
    return int(from_bytes(TimestamptzType(), bound))


def find_foreign_columns(table: Table, files: Iterable[DataFile], known: Collection[str]) -> list[str]:
    """Return the columns outside `known` that have values in some of these files, by the files' metadata."""
    foreign = {column.name: column.field_id for column in table.schema().fields if column.name not in known}
    counts = [(file.value_counts or {}, file.null_value_counts or {}) for file in files]
    return [
        name
        for name, field_id in foreign.items()
        if any(field_id in values and nulls.get(field_id) != values[field_id] for values, nulls in counts)
    ]


def delete_files(table: Table, files: Iterable[DataFile]) -> None:
    """Delete data files that were written for a table and that no snapshot names.

    A file that cannot be deleted is logged and left to the garbage collection.
    """
    for file in files:
        try:
            table.io.delete(file.file_path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _logger.warning("File %s is not needed and was not deleted: %s", file.file_path, error)
