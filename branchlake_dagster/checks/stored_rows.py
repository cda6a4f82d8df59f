"""Rows of a table in the lake: what its manifests and footers prove; Spark is for the rest.

Whether the bounds that a manifest entry has for a text column are of all row groups, by the file's footer.

The footer is read where the manifest entry does not show it: for files of several row groups that PyIceberg
wrote outside this package.
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
    Compared,
    Constraint,
    Outcome,
    Promise,
    Proof,
    RowConstraint,
    UniqueConstraint,
)
from branchlake_dagster.checks.proof import keeps, proves, unique
from branchlake_dagster.history.file_facts import Facts, facts
from branchlake_dagster.tables.selection import DateRange, TimeRange, Values, to_iceberg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from branchlake_dagster.io_manager.loading import RowPartitions, StoredRows
    from branchlake_dagster.tables.selection import Condition

_FIELD_ID = b"PARQUET:field_id"
_log = logging.getLogger(__name__)


class Footers:
    """The footers of a table's data files, each read once, and at most `most` of them."""

    def __init__(self, io: FileIO, *, most: int) -> None:
        self._io = io
        self._most = most
        self._read: dict[str, pq.FileMetaData | None] = {}

    def bound_all(self, file: DataFile, field_id: int) -> bool:
        """Whether every row group of `file` has bounds for the column, or only nulls in it."""
        footer = self._footer(file)
        if footer is None:
            return False
        names = [
            field.name
            for field in footer.schema.to_arrow_schema()
            if (field.metadata or {}).get(_FIELD_ID) == str(field_id).encode()
        ]
        if len(names) != 1:
            return False
        return all(_bounded(footer.row_group(number), names[0]) for number in range(footer.num_row_groups))

    def _footer(self, file: DataFile) -> pq.FileMetaData | None:
        path = file.file_path
        if path not in self._read:
            if file.file_format is not FileFormat.PARQUET or len(self._read) >= self._most:
                return None
            try:
                with self._io.new_input(path).open() as source:
                    self._read[path] = pq.read_metadata(source)
            except Exception as error:  # noqa: BLE001 - what is wrong is said when the rows are read
                _log.info("No footer of %s: %s: %s", path, type(error).__name__, error)
                self._read[path] = None
        return self._read[path]


def _bounded(group: pq.RowGroupMetaData, name: str) -> bool:
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == name:
            told = column.statistics
            if told is None:
                return False
            only_nulls = told.has_null_count and told.null_count == group.num_rows
            return bool(told.has_min_max or only_nulls)
    return False


_PLAIN: dict[type[ice.IcebergType], pst.DataType] = {
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


def spark_schema(schema: Schema) -> pst.StructType | None:
    """`schema` in Spark's types; None when it has a type that is not known here to be one of Spark's."""
    fields = _fields(schema.fields)
    return None if fields is None else pst.StructType(fields)


def _fields(fields: tuple[ice.NestedField, ...]) -> list[pst.StructField] | None:
    found = []
    for field in fields:
        kind = _kind(field.field_type)
        if kind is None:
            return None
        found.append(pst.StructField(field.name, kind, field.optional))
    return found


def _kind(kind: ice.IcebergType) -> pst.DataType | None:
    if isinstance(kind, ice.DecimalType):
        return pst.DecimalType(kind.precision, kind.scale)
    if isinstance(kind, ice.StructType):
        fields = _fields(kind.fields)
        return None if fields is None else pst.StructType(fields)
    if isinstance(kind, ice.ListType):
        element = _kind(kind.element_type)
        return None if element is None else pst.ArrayType(element, not kind.element_required)
    if isinstance(kind, ice.MapType):
        key, value = _kind(kind.key_type), _kind(kind.value_type)
        if key is None or value is None:
            return None
        return pst.MapType(key, value, not kind.value_required)
    return _PLAIN.get(type(kind))


MOST_FILES = 10_000
"""Of more data files Spark counts the rows sooner than their metadata is gone through here."""

SMALL_ROWS = 100_000
SMALL_BYTES = 64 * 1024**2
SMALL_FILES = 100
"""Up to these the rows are read here before Spark is asked: 7 to 40 ms against 300 to 800 (ADR 23)."""

COLUMN_ROWS = 2_000_000
COLUMN_BYTES = 32 * 1024**2
"""Of more rows the columns of one promise are read alone, where they are up to this in the files: a column of
few different values is a few kB, and Spark takes as long to plan its query as it takes to read it here."""


class TableRows:
    """The rows of one selection of a table, as `Rows`.

    The files looked at hold every row of the selection, and may hold others, and rows that delete files take
    out: what is true of all their rows is true of those.
    """

    def __init__(self, stored: StoredRows, columns: Iterable[str] = ()) -> None:
        self._stored = stored
        self._columns = frozenset(columns)
        self._footers = Footers(stored.table.io, most=SMALL_FILES)
        self._facts: dict[int, list[Facts]] = {}
        self._read: dict[tuple[str, ...], pa.Table | None] = {}

    @cached_property
    def schema(self) -> StructType:
        """From the table's schema; asked of Spark where that has a type that Spark may show otherwise."""
        return spark_schema(self._stored.table.schema()) or self.frame.schema

    @cached_property
    def frame(self) -> DataFrame:
        """The rows in the run's Spark session."""
        return self._stored.frame()

    @property
    def partitions(self) -> RowPartitions | None:
        """As the IO manager knows them."""
        return self._stored.partitions

    def proved(self, constraint: Constraint) -> Outcome | None:
        """Passed, when metadata proves `constraint` or the rows are few and keep it here; else None.

        Its columns exist, and in their types where that matters to it.
        """
        if self._files is None or not isinstance(constraint, RowConstraint | UniqueConstraint):
            return None
        if self._by_metadata(constraint):
            proof = Proof(by="metadata", files=len(self._files), rows=self._held)
            return Outcome(passed=True, failing=0, total=self._total, proof=proof)
        rows = self._rows_for(constraint) if self._readable(constraint) else None
        if rows is not None and self._by_rows(constraint, rows):
            proof = Proof(by="rows", files=len(self._files), rows=rows.num_rows)
            return Outcome(passed=True, failing=0, total=rows.num_rows, proof=proof)
        return None

    def _by_metadata(self, constraint: RowConstraint | UniqueConstraint) -> bool:
        if isinstance(constraint, UniqueConstraint):
            return self._held <= 1
        if constraint.promise is None:
            return False
        return self._all_keep(constraint.columns[0], constraint.promise)

    def _readable(self, constraint: RowConstraint | UniqueConstraint) -> bool:
        told = isinstance(constraint, UniqueConstraint) or constraint.promise is not None
        return told and self._columns.issuperset(constraint.columns)

    def _by_rows(self, constraint: RowConstraint | UniqueConstraint, rows: pa.Table) -> bool:
        fields = [self._stored.table.schema().find_field(column) for column in constraint.columns]
        if isinstance(constraint, UniqueConstraint):
            return unique(rows, constraint.columns, [field.field_type for field in fields])
        assert constraint.promise is not None  # noqa: S101 - it is readable
        return keeps(rows.column(constraint.columns[0]), constraint.promise, fields[0].field_type)

    def _rows_for(self, constraint: RowConstraint | UniqueConstraint) -> pa.Table | None:
        """The columns of a constraint; None when they are not to be read here."""
        if self._few:
            return self._rows
        columns = tuple(sorted(constraint.columns))
        if columns not in self._read:
            self._read[columns] = self._columns_of(columns) if self._narrow(columns) else None
        return self._read[columns]

    @cached_property
    def _few(self) -> bool:
        files = self._files or []
        size = sum(file.file_size_in_bytes for file in files)
        return self._held <= SMALL_ROWS and size <= SMALL_BYTES and len(files) <= SMALL_FILES

    def _narrow(self, columns: Iterable[str]) -> bool:
        """Whether columns are few bytes in all files; one whose size a file does not tell is not."""
        files = self._files or []
        if self._held > COLUMN_ROWS or len(files) > SMALL_FILES:
            return False
        ids = [self._stored.table.schema().find_field(column).field_id for column in columns]
        sizes = [(file.column_sizes or {}).get(one) for file in files for one in ids]
        return None not in sizes and sum(filter(None, sizes)) <= COLUMN_BYTES

    @cached_property
    def _rows(self) -> pa.Table | None:
        """The columns that are spoken of; None when they cannot be read here."""
        names = self._stored.table.schema().column_names
        return self._columns_of(name for name in names if name in self._columns)

    def _columns_of(self, columns: Iterable[str]) -> pa.Table | None:
        scan = self._stored.table.scan(row_filter=self._filter, selected_fields=tuple(columns))
        try:
            return scan.to_arrow()
        except Exception as error:  # noqa: BLE001 - what is wrong is said when Spark reads the rows
            _log.info("Rows are left to Spark: %s: %s", type(error).__name__, error)
            return None

    @property
    def _filter(self) -> BooleanExpression:
        selection = self._stored.selection
        return AlwaysTrue() if selection is None else to_iceberg(selection, self._stored.table.schema())

    @cached_property
    def _files(self) -> list[DataFile] | None:
        """The data files that may hold rows of the selection; None when that cannot be told here."""
        try:
            tasks = list(self._stored.table.scan(row_filter=self._filter).plan_files())
        except Exception as error:  # noqa: BLE001 - what is wrong is said when the rows are read
            _log.info("Nothing is proved from metadata: %s: %s", type(error).__name__, error)
            return None
        self._deletes = any(task.delete_files for task in tasks)
        return [task.file for task in tasks] if len(tasks) <= MOST_FILES else None

    @cached_property
    def _held(self) -> int:
        """The rows of the files, deleted ones and those of other partitions included."""
        return sum(file.record_count for file in self._files or ())

    @cached_property
    def _total(self) -> int | None:
        """The rows of the selection; None when some of the files' may be deleted or of other partitions."""
        whole = all(self._within(index) for index in range(len(self._files or ())))
        return self._held if whole and not self._deletes else None

    def _all_keep(self, column: str, promise: Promise) -> bool:
        field = self._stored.table.schema().find_field(column)
        return all(proves(found, promise, field.field_type) for found in self._facts_on(field))

    def _facts_on(self, field: NestedField) -> list[Facts]:
        if field.field_id not in self._facts:
            specs = self._stored.table.specs()
            self._facts[field.field_id] = [
                facts(file, field, specs[file.spec_id], self._footers.bound_all) for file in self._files or ()
            ]
        return self._facts[field.field_id]

    def _within(self, index: int) -> bool:
        """Whether all rows of a file are of the selection."""
        selection = self._stored.selection
        return selection is None or any(
            all(self._keeps(index, condition) for condition in part) for part in selection.slices
        )

    def _keeps(self, index: int, condition: Condition) -> bool:
        field = self._stored.table.schema().find_field(condition.column)
        found = self._facts_on(field)[index]
        return found.no_null and proves(found, _promise(condition), field.field_type)


def _promise(condition: Condition) -> Promise:
    if isinstance(condition, Values):
        return Among(condition.values)
    assert isinstance(condition, TimeRange | DateRange)  # noqa: S101 - there is no other
    return Both(Compared(">=", condition.start), Compared("<", condition.end))
