"""Rows of a table in the lake. Manifests, footers and small reads prove constraints; Spark judges the rest.

A manifest entry may have bounds of a column that do not cover all row groups of the file. If the entry does
not show whether they do, the file's footer is read: for files with several row groups that PyIceberg wrote
outside this package.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark.sql.types as pst
from pyiceberg import types as ice
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from branchlake_dagster.checks.constraints import (
    Among,
    Both,
    CheckOutcome,
    Compared,
    Constraint,
    Promise,
    Proof,
    RowConstraint,
    UniqueConstraint,
)
from branchlake_dagster.checks.proof import can_prove, has_unique_keys, values_keep_promise
from branchlake_dagster.history.manifests import ColumnFacts, column_facts
from branchlake_dagster.tables.selection import DateRange, TimeRange, Values, to_iceberg_filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from branchlake_dagster.io_manager.loading import RowPartitions, StoredRows
    from branchlake_dagster.tables.selection import Condition

_FIELD_ID = b"PARQUET:field_id"
_log = logging.getLogger(__name__)


class Footers:
    """The footers of a table's data files. Each is read once, and at most `max_files` of them are read."""

    def __init__(self, io: FileIO, *, max_files: int) -> None:
        self._io = io
        self._max_files = max_files
        self._footers_by_path: dict[str, pq.FileMetaData | None] = {}

    def has_all_bounds(self, file: DataFile, field_id: int) -> bool:
        """Return whether the column has bounds or only nulls in every row group of `file`.

        `field_id` is the column's Iceberg field id. False also if the footer cannot be read or `max_files` is
        reached, or if not exactly one top-level column of the file has that id.
        """
        footer = self._load_footer(file)
        if footer is None:
            return False
        names = [
            field.name
            for field in footer.schema.to_arrow_schema()
            if (field.metadata or {}).get(_FIELD_ID) == str(field_id).encode()
        ]
        if len(names) != 1:
            return False
        return all(_has_bounds(footer.row_group(number), names[0]) for number in range(footer.num_row_groups))

    def _load_footer(self, file: DataFile) -> pq.FileMetaData | None:
        path = file.file_path
        if path not in self._footers_by_path:
            if file.file_format is not FileFormat.PARQUET or len(self._footers_by_path) >= self._max_files:
                return None
            try:
                with self._io.new_input(path).open() as source:
                    self._footers_by_path[path] = pq.read_metadata(source)
            except Exception as error:  # noqa: BLE001 - reading the rows will raise the error again
                _log.info("The footer of %s cannot be read: %s: %s", path, type(error).__name__, error)
                self._footers_by_path[path] = None
        return self._footers_by_path[path]


def _has_bounds(group: pq.RowGroupMetaData, name: str) -> bool:
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == name:
            statistics = column.statistics
            if statistics is None:
                return False
            only_nulls = statistics.has_null_count and statistics.null_count == group.num_rows
            return bool(statistics.has_min_max or only_nulls)
    return False


_PLAIN_TYPES: dict[type[ice.IcebergType], pst.DataType] = {
    ice.BooleanType: pst.BooleanType(),
    ice.IntegerType: pst.IntegerType(),
    ice.LongType: pst.LongType(),
    ice.FloatType: pst.FloatType(),
    ice.DoubleType: pst.DoubleType(),
    ice.DateType: pst.DateType(),
    ice.TimestampType: pst.TimestampNTZType(),
    ice.TimestamptzType: pst.TimestampType(),
    ice.StringType: pst.StringType(),
    ice.UUIDType: pst.StringType(),
    ice.FixedType: pst.BinaryType(),
    ice.BinaryType: pst.BinaryType(),
}


def to_spark_schema(schema: Schema) -> pst.StructType | None:
    """Convert an Iceberg schema to Spark's types; None if a type has no known counterpart in Spark."""
    fields = _to_spark_fields(schema.fields)
    return None if fields is None else pst.StructType(fields)


def _to_spark_fields(fields: tuple[ice.NestedField, ...]) -> list[pst.StructField] | None:
    spark_fields = []
    for field in fields:
        spark_type = _to_spark_type(field.field_type)
        if spark_type is None:
            return None
        spark_fields.append(pst.StructField(field.name, spark_type, field.optional))
    return spark_fields


def _to_spark_type(iceberg_type: ice.IcebergType) -> pst.DataType | None:
    if isinstance(iceberg_type, ice.DecimalType):
        return pst.DecimalType(iceberg_type.precision, iceberg_type.scale)
    if isinstance(iceberg_type, ice.StructType):
        fields = _to_spark_fields(iceberg_type.fields)
        return None if fields is None else pst.StructType(fields)
    if isinstance(iceberg_type, ice.ListType):
        element = _to_spark_type(iceberg_type.element_type)
        return None if element is None else pst.ArrayType(element, not iceberg_type.element_required)
    if isinstance(iceberg_type, ice.MapType):
        key, value = _to_spark_type(iceberg_type.key_type), _to_spark_type(iceberg_type.value_type)
        if key is None or value is None:
            return None
        return pst.MapType(key, value, not iceberg_type.value_required)
    return _PLAIN_TYPES.get(type(iceberg_type))


MAX_FILES = 10_000
"""The largest number of data files whose metadata is read here. With more files, Spark counts faster."""

SMALL_ROWS = 100_000
SMALL_BYTES = 64 * 1024**2
SMALL_FILES = 100
"""Limits on rows, bytes and files. A selection within all three is read here instead of in Spark.

This takes 7 to 40 ms instead of 300 to 800 ms (ADR 23).
"""

COLUMN_ROWS = 2_000_000
COLUMN_BYTES = 32 * 1024**2
"""Limits up to which the columns of one constraint of a larger table are read here as well.

A column with few distinct values has a few kB; reading it takes as long as Spark needs to plan its query.
"""


class TableRows:
    """The rows of one selection of a table, as `CheckedRows`.

    The planned files contain every row of the selection. They may also contain other rows and deleted rows.
    So a condition that is true for all rows of the files is true for the selection.
    """

    def __init__(self, stored: StoredRows, columns: Iterable[str] = ()) -> None:
        self._stored = stored
        self._columns = frozenset(columns)
        self._footers = Footers(stored.table.io, max_files=SMALL_FILES)
        self._facts_by_field: dict[int, list[ColumnFacts]] = {}
        self._tables_by_columns: dict[tuple[str, ...], pa.Table | None] = {}

    @cached_property
    def schema(self) -> StructType:
        """The columns and types, from the table's schema; from Spark if the schema has an unknown type."""
        return to_spark_schema(self._stored.table.schema()) or self.frame.schema

    @cached_property
    def frame(self) -> DataFrame:
        """The rows in the run's Spark session."""
        return self._stored.open_frame()

    @property
    def partitions(self) -> RowPartitions | None:
        """The partitions of the rows, from the IO manager."""
        return self._stored.partitions

    def prove(self, constraint: Constraint) -> CheckOutcome | None:
        """Return a passed outcome if metadata or a small read proves `constraint`; else None.

        With None, Spark has to decide. The columns of the constraint must exist, with the contract's types if
        it needs them.
        """
        if self._files is None or not isinstance(constraint, RowConstraint | UniqueConstraint):
            return None
        if self._is_proved_by_metadata(constraint):
            proof = Proof(source="metadata", files=len(self._files), rows=self._record_count)
            return CheckOutcome(passed=True, failing=0, total=self._row_count, proof=proof)
        rows = self._load_rows_for(constraint) if self._can_read(constraint) else None
        if rows is not None and self._is_proved_by_rows(constraint, rows):
            proof = Proof(source="rows", files=len(self._files), rows=rows.num_rows)
            return CheckOutcome(passed=True, failing=0, total=rows.num_rows, proof=proof)
        return None

    def _is_proved_by_metadata(self, constraint: RowConstraint | UniqueConstraint) -> bool:
        if isinstance(constraint, UniqueConstraint):
            return self._record_count <= 1
        if constraint.promise is None:
            return False
        return self._all_files_keep(constraint.columns[0], constraint.promise)

    def _can_read(self, constraint: RowConstraint | UniqueConstraint) -> bool:
        is_provable = isinstance(constraint, UniqueConstraint) or constraint.promise is not None
        return is_provable and self._columns.issuperset(constraint.columns)

    def _is_proved_by_rows(self, constraint: RowConstraint | UniqueConstraint, rows: pa.Table) -> bool:
        fields = [self._stored.table.schema().find_field(column) for column in constraint.columns]
        if isinstance(constraint, UniqueConstraint):
            return has_unique_keys(rows, constraint.columns, [field.field_type for field in fields])
        assert constraint.promise is not None  # noqa: S101 - `_can_read` requires it
        return values_keep_promise(
            rows.column(constraint.columns[0]), constraint.promise, fields[0].field_type
        )

    def _load_rows_for(self, constraint: RowConstraint | UniqueConstraint) -> pa.Table | None:
        """Return rows with the columns of a constraint; None if they are too large or cannot be read here."""
        if self._is_small:
            return self._rows
        columns = tuple(sorted(constraint.columns))
        if columns not in self._tables_by_columns:
            self._tables_by_columns[columns] = (
                self._load_columns(columns) if self._are_columns_small(columns) else None
            )
        return self._tables_by_columns[columns]

    @cached_property
    def _is_small(self) -> bool:
        files = self._files or []
        size = sum(file.file_size_in_bytes for file in files)
        return self._record_count <= SMALL_ROWS and size <= SMALL_BYTES and len(files) <= SMALL_FILES

    def _are_columns_small(self, columns: Iterable[str]) -> bool:
        """Return whether columns are small in all files; False if a file does not record a column's size."""
        files = self._files or []
        if self._record_count > COLUMN_ROWS or len(files) > SMALL_FILES:
            return False
        ids = [self._stored.table.schema().find_field(column).field_id for column in columns]
        sizes = [(file.column_sizes or {}).get(field_id) for file in files for field_id in ids]
        return None not in sizes and sum(filter(None, sizes)) <= COLUMN_BYTES

    @cached_property
    def _rows(self) -> pa.Table | None:
        """The columns of all constraints; None if they cannot be read here."""
        names = self._stored.table.schema().column_names
        return self._load_columns(name for name in names if name in self._columns)

    def _load_columns(self, columns: Iterable[str]) -> pa.Table | None:
        scan = self._stored.table.scan(row_filter=self._row_filter, selected_fields=tuple(columns))
        try:
            return scan.to_arrow()
        except Exception as error:  # noqa: BLE001 - Spark will read the rows and raise the error again
            _log.info("The rows are left to Spark: %s: %s", type(error).__name__, error)
            return None

    @property
    def _row_filter(self) -> BooleanExpression:
        selection = self._stored.selection
        return (
            AlwaysTrue() if selection is None else to_iceberg_filter(selection, self._stored.table.schema())
        )

    @cached_property
    def _files(self) -> list[DataFile] | None:
        """The data files that may contain rows of the selection; None after an error or if too many."""
        try:
            tasks = list(self._stored.table.scan(row_filter=self._row_filter).plan_files())
        except Exception as error:  # noqa: BLE001 - reading the rows will raise the error again
            _log.info("The metadata proves nothing: %s: %s", type(error).__name__, error)
            return None
        self._has_deletes = any(task.delete_files for task in tasks)
        return [task.file for task in tasks] if len(tasks) <= MAX_FILES else None

    @cached_property
    def _record_count(self) -> int:
        """The number of rows in the files, including deleted rows and rows outside the selection."""
        return sum(file.record_count for file in self._files or ())

    @cached_property
    def _row_count(self) -> int | None:
        """The number of rows in the selection; None if the files may have deleted rows or other rows."""
        is_whole = all(self._is_within_selection(index) for index in range(len(self._files or ())))
        return self._record_count if is_whole and not self._has_deletes else None

    def _all_files_keep(self, column: str, promise: Promise) -> bool:
        field = self._stored.table.schema().find_field(column)
        return all(can_prove(file_facts, promise, field.field_type) for file_facts in self._load_facts(field))

    def _load_facts(self, field: NestedField) -> list[ColumnFacts]:
        if field.field_id not in self._facts_by_field:
            specs = self._stored.table.specs()
            self._facts_by_field[field.field_id] = [
                column_facts(file, field, specs[file.spec_id], self._footers.has_all_bounds)
                for file in self._files or ()
            ]
        return self._facts_by_field[field.field_id]

    def _is_within_selection(self, index: int) -> bool:
        """Return whether metadata proves that all rows of the file at this index are in the selection."""
        selection = self._stored.selection
        return selection is None or any(
            all(self._file_keeps_condition(index, condition) for condition in conditions)
            for conditions in selection.slices
        )

    def _file_keeps_condition(self, index: int, condition: Condition) -> bool:
        field = self._stored.table.schema().find_field(condition.column)
        file_facts = self._load_facts(field)[index]
        return file_facts.no_null and can_prove(file_facts, _to_promise(condition), field.field_type)


def _to_promise(condition: Condition) -> Promise:
    if isinstance(condition, Values):
        return Among(condition.values)
    assert isinstance(condition, TimeRange | DateRange)  # noqa: S101 - no other condition exists
    return Both(Compared(">=", condition.start), Compared("<", condition.end))
