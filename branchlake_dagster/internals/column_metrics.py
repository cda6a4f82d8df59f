"""Column metrics of PyIceberg 0.12: use only the metrics of a manifest entry that are reliable.

PyIceberg's writer leaves row groups without statistics out of a file's bounds. Its evaluators read a missing
count of nulls or NaN as zero. So scans skipped files with matching rows, and deletes dropped rows that did
not match. Importing this module corrects both for the whole process. `docs/upstream.md` has the findings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow.parquet as pq
import pyiceberg.table as tables
from pyiceberg import types as ice
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import BooleanExpression, visitors
from pyiceberg.expressions.visitors import (
    _InclusiveMetricsEvaluator,
    _StrictMetricsEvaluator,
    extract_field_ids,
)
from pyiceberg.io import FileIO
from pyiceberg.io import pyarrow as arrow_files
from pyiceberg.io.fileformat import DataFileStatistics
from pyiceberg.io.pyarrow import StatisticsCollector
from pyiceberg.manifest import DATA_FILE_TYPE, DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import WriteTask, delete_file_index
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER_ID
from pyiceberg.table.update import snapshot as snapshot_producers
from pyiceberg.table.update import validate

__all__ = [
    "DATA_PATH",
    "DataPaths",
    "ReliableMetrics",
    "bound_value",
    "data_paths",
    "reliable_metrics",
]

DATA_PATH = 2147483546
"""The field id of `file_path` in files of position deletes."""

_VARIABLE_LENGTH = (
    ice.StringType,
    ice.BinaryType,
    ice.FixedType,
    ice.GeometryType,
    ice.GeographyType,
)
"""Types whose values may have over 4 kB.

Arrow and parquet-java write no bounds for a row group with such a value.
"""

_WIDTHS: dict[type[ice.IcebergType], tuple[int, ...]] = {
    ice.BooleanType: (1,),
    ice.IntegerType: (4,),
    ice.LongType: (4, 8),
    ice.FloatType: (4,),
    ice.DoubleType: (4, 8),
    ice.DateType: (4,),
    ice.TimeType: (8,),
    ice.TimestampType: (8,),
    ice.TimestamptzType: (8,),
    ice.TimestampNanoType: (8,),
    ice.TimestamptzNanoType: (8,),
    ice.UUIDType: (16,),
}
"""The possible sizes of a bound in bytes, by the column's current type. Four-byte bounds of eight-byte types
were written before a type promotion."""


@dataclass(frozen=True, slots=True)
class ReliableMetrics:
    """The reliable metrics of some columns of one file, by field id. A missing metric is unknown.

    Each value that is neither null nor NaN is within the bounds. Text bounds may be truncated, so that they
    include more values. PyIceberg's evaluators read these attributes, so they are named as in `DataFile`.
    """

    record_count: int
    value_counts: Mapping[int, int] = field(default_factory=dict)
    null_value_counts: Mapping[int, int] = field(default_factory=dict)
    nan_value_counts: Mapping[int, int] = field(default_factory=dict)
    lower_bounds: Mapping[int, bytes] = field(default_factory=dict)
    upper_bounds: Mapping[int, bytes] = field(default_factory=dict)

    def for_every_row(self, fields: Iterable[ice.NestedField]) -> ReliableMetrics:
        """Return the metrics without the bounds of columns that may have nulls or NaN.

        Rows with null or NaN are outside any bounds. `fields` are the columns whose bounds may stay.
        """
        complete_ids = {column.field_id for column in fields if self._has_values_only(column)}
        return replace(
            self,
            lower_bounds={
                field_id: bound for field_id, bound in self.lower_bounds.items() if field_id in complete_ids
            },
            upper_bounds={
                field_id: bound for field_id, bound in self.upper_bounds.items() if field_id in complete_ids
            },
        )

    def _has_values_only(self, column: ice.NestedField) -> bool:
        floating = isinstance(column.field_type, ice.FloatType | ice.DoubleType)
        no_nan = not floating or self.nan_value_counts.get(column.field_id) == 0
        return no_nan and self.null_value_counts.get(column.field_id) == 0


def reliable_metrics(
    file: DataFile,
    fields: Iterable[ice.NestedField],
    is_complete: Callable[[DataFile, int], bool] = lambda *_: False,
) -> ReliableMetrics:
    """Select the reliable metrics of `fields` in `file`, from its manifest entry alone.

    `is_complete(file, field_id)` is called for a column of variable length if the entry does not show that
    its bounds cover all row groups. Costs a few microseconds per column.
    """
    values: dict[int, int] = {}
    nulls: dict[int, int] = {}
    nan: dict[int, int] = {}
    lower: dict[int, bytes] = {}
    upper: dict[int, bytes] = {}
    for column in fields:
        field_id, column_type = column.field_id, column.field_type
        if not isinstance(column_type, ice.PrimitiveType):
            continue
        # For lists, PyIceberg counts elements instead of rows; other writers count in other ways.
        if (file.value_counts or {}).get(field_id) == file.record_count:
            values[field_id] = file.record_count
            _copy_count(file.null_value_counts, field_id, nulls)
            _copy_count(file.nan_value_counts, field_id, nan)
        low, high = (file.lower_bounds or {}).get(field_id), (file.upper_bounds or {}).get(field_id)
        if low is None and high is None:
            continue
        if not _covers_all_row_groups(file, column) and not is_complete(file, field_id):
            continue
        if low is not None and bound_value(low, column_type) is not None:
            lower[field_id] = low
        if high is not None and bound_value(high, column_type) is not None:
            upper[field_id] = high
    return ReliableMetrics(file.record_count, values, nulls, nan, lower, upper)


def _copy_count(source: Mapping[int, int] | None, field_id: int, target: dict[int, int]) -> None:
    count = (source or {}).get(field_id)
    if count is not None:
        target[field_id] = count


def _covers_all_row_groups(file: DataFile, column: ice.NestedField) -> bool:
    """Check whether the manifest entry shows that bounds cover all row groups of the file.

    PyIceberg 0.12 writes no sort order id. Iceberg's Java library and this package write one, and both omit
    the bounds of a column if a row group has none.
    """
    return (
        not isinstance(column.field_type, _VARIABLE_LENGTH)
        or len(file.split_offsets or ()) == 1
        or file.sort_order_id is not None
        or column.field_id == DATA_PATH  # no store accepts a path of over 4 kB
    )


def bound_value(stored: bytes, column_type: ice.PrimitiveType) -> Any:
    """Convert a bound from Iceberg's binary form to a value of PyIceberg, such as days since 1970 for a date.

    Returns None if the bound is NaN, or if the bytes cannot be decoded as `column_type`.
    """
    widths = _WIDTHS.get(type(column_type))
    if widths is not None and len(stored) not in widths:
        return None
    try:
        value = from_bytes(column_type, stored)
    except (struct.error, UnicodeDecodeError, ValueError, ArithmeticError, TypeError):
        return None
    return None if _is_nan(value) else value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


@dataclass(frozen=True, slots=True)
class DataPaths:
    """The range of data file paths (UTF-8) whose rows a file of position deletes may delete.

    Bounds may be truncated, even within a character, so only the beginning of a path is compared.
    """

    low: bytes
    high: bytes

    def may_name(self, path: str) -> bool:
        """Check whether rows of the data file at `path` may be deleted."""
        encoded = path.encode()
        return self.low <= encoded and encoded[: len(self.high)] <= self.high


def data_paths(file: DataFile) -> DataPaths | None:
    """Return the range of data file paths that a file of position deletes may refer to.

    None if its manifest entry has no bounds of paths.
    """
    low = (file.lower_bounds or {}).get(DATA_PATH)
    high = (file.upper_bounds or {}).get(DATA_PATH)
    return None if low is None or high is None else DataPaths(low, high)


# -- evaluators ----------------------------------------------------------------------------------------


class ReliableInclusiveEvaluator(_InclusiveMetricsEvaluator):  # type: ignore[misc]  # untyped
    """Checks whether a file may have matching rows. Scans use it to skip files."""

    def __init__(
        self,
        schema: Schema,
        expr: BooleanExpression,
        case_sensitive: bool = True,
        include_empty_files: bool = False,
    ) -> None:
        super().__init__(schema, expr, case_sensitive, include_empty_files)
        self._fields = [schema.find_field(number) for number in extract_field_ids(self.expr)]

    def eval(self, file: DataFile) -> bool:
        """Return False only if certainly no row of the file matches.

        True proves nothing.
        """
        return bool(super().eval(reliable_metrics(file, self._fields)))


class ReliableStrictEvaluator(_StrictMetricsEvaluator):  # type: ignore[misc]  # untyped
    """Checks whether all rows of a file match. Deletes and overwrites use it to drop whole files."""

    def __init__(
        self,
        schema: Schema,
        expr: BooleanExpression,
        case_sensitive: bool = True,
        include_empty_files: bool = False,
    ) -> None:
        super().__init__(schema, expr, case_sensitive, include_empty_files)
        self._fields = [schema.find_field(number) for number in extract_field_ids(self.expr)]

    def eval(self, file: DataFile) -> bool:
        """Return True only if all rows of the file certainly match.

        False proves nothing.
        """
        metrics = reliable_metrics(file, self._fields).for_every_row(self._fields)
        return bool(super().eval(metrics))


for _module in (visitors, tables, delete_file_index, snapshot_producers, validate):
    for _name, _evaluator in (
        ("_InclusiveMetricsEvaluator", ReliableInclusiveEvaluator),
        ("_StrictMetricsEvaluator", ReliableStrictEvaluator),
    ):
        if hasattr(_module, _name):
            setattr(_module, _name, _evaluator)


# -- writer --------------------------------------------------------------------------------------------

_plain_statistics = arrow_files.data_file_statistics_from_parquet_metadata
_plain_write_file = arrow_files.write_file
_plain_upper_bound = arrow_files.truncate_upper_bound_text_string  # type: ignore[attr-defined]


class _NoBounds:
    """Replaces the aggregate of a column whose bounds do not cover the whole file."""

    def __init__(self, column: str) -> None:
        self._column = column

    def min_as_bytes(self) -> None:
        """Return no lower bound."""

    def max_as_bytes(self) -> None:
        """Return no upper bound."""

    @property
    def current_min(self) -> Any:
        """Raise ValueError: `add_files` must not derive a partition value from incomplete bounds."""
        raise ValueError(
            f"Cannot infer a partition value from column {self._column}: "
            "a row group of the file has no bounds for it."
        )

    current_max = current_min


def _safe_statistics(
    parquet_metadata: pq.FileMetaData,
    stats_columns: dict[int, StatisticsCollector],
    parquet_column_mapping: dict[str, int],
) -> DataFileStatistics:
    """Compute PyIceberg's file statistics, without bounds and null counts that leave out row groups.

    `stats_columns` has the statistics to collect by field id, `parquet_column_mapping` the field id of each
    column path in the Parquet file. PyIceberg calls it with these arguments instead of its own function.
    """
    statistics = _plain_statistics(parquet_metadata, stats_columns, parquet_column_mapping)
    if parquet_metadata.num_row_groups > 1:
        without_bounds, without_nulls = _find_partial_columns(parquet_metadata)
        for name in without_bounds:
            field_id = parquet_column_mapping[name]
            if field_id in statistics.column_aggregates:
                statistics.column_aggregates[field_id] = _NoBounds(stats_columns[field_id].column_name)  # type: ignore[assignment]
        for name in without_nulls:
            statistics.null_value_counts.pop(parquet_column_mapping[name], None)
    return statistics


def _find_partial_columns(parquet_metadata: pq.FileMetaData) -> tuple[Set[str], Set[str]]:
    """Return the columns without bounds in some row group, and those without a null count in some row group.

    Columns are named by their path.
    """
    without_bounds, without_nulls = set(), set()
    for group in map(parquet_metadata.row_group, range(parquet_metadata.num_row_groups)):
        for column in map(group.column, range(parquet_metadata.num_columns)):
            statistics = column.statistics
            if statistics is None or not statistics.has_null_count:
                without_nulls.add(column.path_in_schema)
            nulls = statistics.null_count if statistics is not None and statistics.has_null_count else 0
            if statistics is None or not (statistics.has_min_max or nulls == column.num_values):
                without_bounds.add(column.path_in_schema)
    return without_bounds, without_nulls


_SORT_ORDER_ID = [one.name for one in DATA_FILE_TYPE[2].fields].index("sort_order_id")


def _write_with_sort_order(
    io: FileIO, table_metadata: TableMetadata, tasks: Iterator[WriteTask]
) -> Iterator[DataFile]:
    """Write files as PyIceberg does, with the sort order id of unsorted rows.

    Iceberg's Java library writes that id too.
    """
    return map(_with_sort_order, _plain_write_file(io, table_metadata, tasks))


def _with_sort_order(file: DataFile) -> DataFile:
    file[_SORT_ORDER_ID] = UNSORTED_SORT_ORDER_ID
    return file


def _safe_upper_bound(value: str, trunc_length: int | None) -> str | None:
    """Truncate an upper bound as PyIceberg does; None if the result is not valid text.

    The successor of U+D7FF is a surrogate, which has no UTF-8. `trunc_length` is the number of characters to
    keep; None keeps all.
    """
    bound = _plain_upper_bound(value, trunc_length)
    try:
        (bound or "").encode()
    except UnicodeEncodeError:
        return None
    return bound


arrow_files.data_file_statistics_from_parquet_metadata = _safe_statistics
arrow_files.write_file = _write_with_sort_order
arrow_files.truncate_upper_bound_text_string = _safe_upper_bound  # type: ignore[attr-defined]
