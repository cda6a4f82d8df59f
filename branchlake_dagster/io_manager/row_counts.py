"""Counts the rows of each Dagster partition of a table from its manifests, without reading data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from dagster import MetadataValue, OutputContext, PartitionsDefinition
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform

from branchlake_dagster.history.manifests import column_facts
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.selection import Condition, Values, select_partitions, to_iceberg_filter
from branchlake_dagster.tables.specification import TableSpec

MAX_PARTITIONS = 400
"""The row counts of at most this many partitions of one output are reported: a year of days."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FileValueFinder = Callable[[DataFile], Any]
"""Returns the value or window of a column that all rows of a file have; None if it is not known."""


def report_partition_rows(
    context: OutputContext, table: Table, spec: TableSpec, definition: PartitionsDefinition[str] | None
) -> int | None:
    """Return the row count of the output's partition. For several partitions, report the count of each.

    For several partitions, the counts are added to their materializations, and the result is None. The result
    is also None, and nothing is reported, if counts are not known or there are more than `MAX_PARTITIONS`
    partitions: Dagster lists all partitions of the run for each reported one.
    """
    if definition is None or not spec.columns_by_dimension:
        return None
    keys = tuple(context.asset_partition_keys)
    if len(keys) > MAX_PARTITIONS:
        return None
    row_counts = count_partition_rows(table, keys, definition, spec.columns_by_dimension, name=spec.name)
    if row_counts is None:
        return None
    if len(keys) == 1:
        return row_counts[keys[0]]
    for key, rows in row_counts.items():
        context.step_context.add_asset_metadata(
            {EventMetadata.PARTITION_ROWS_ON_BRANCH: MetadataValue.int(rows)}, context.asset_key, key
        )
    return None


def count_partition_rows(
    table: Table,
    keys: Sequence[str],
    definition: PartitionsDefinition[str],
    columns: Mapping[str, str],
    *,
    name: str,
) -> dict[str, int] | None:
    """Count the rows of each partition of `keys`.

    The partition of a file is found by the bounds of columns and by identity partitions. Returns None if a
    file has rows of several partitions, or if rows were deleted.
    """
    schema = table.schema()
    slices: dict[str, tuple[Condition, ...]] = {}
    for key in keys:
        (slices[key],) = select_partitions([key], definition, columns, schema=schema, table_name=name).slices
    if not slices:
        return {}
    names = [condition.column for condition in next(iter(slices.values()))]
    value_finders = [
        _build_value_finder([part[i] for part in slices.values()], column, schema, table.specs())
        for i, column in enumerate(names)
    ]
    keys_by_values = {tuple(map(_condition_value, part)): key for key, part in slices.items()}
    row_counts = dict.fromkeys(keys, 0)
    row_filter = to_iceberg_filter(
        select_partitions(keys, definition, columns, schema=schema, table_name=name), schema
    )
    for task in table.scan(row_filter=row_filter).plan_files():
        partition_key = keys_by_values.get(tuple(find_value(task.file) for find_value in value_finders))
        if partition_key is None or task.delete_files:
            return None
        row_counts[partition_key] += task.file.record_count
    return row_counts


def _condition_value(condition: Condition) -> Any:
    return condition.values[0] if isinstance(condition, Values) else _to_iceberg_number(condition.start)


def _to_iceberg_number(moment: datetime | date) -> int:
    """Convert to Iceberg's representation: microseconds for a time stamp, days for a date."""
    if isinstance(moment, datetime):
        return (moment - _EPOCH) // timedelta(microseconds=1)
    return (moment - _EPOCH.date()).days


def _build_value_finder(
    conditions: Sequence[Condition], column: str, schema: Schema, specs: Mapping[int, PartitionSpec]
) -> FileValueFinder:
    field = schema.find_field(column)
    if isinstance(conditions[0], Values):
        return lambda file: _identity_value(file, field.field_id, specs[file.spec_id])
    windows = sorted(
        {
            (_to_iceberg_number(condition.start), _to_iceberg_number(condition.end))
            for condition in conditions
            if not isinstance(condition, Values)
        }
    )
    starts = [start for start, _ in windows]

    def find_window(file: DataFile) -> int | None:
        file_facts = column_facts(file, field, specs[file.spec_id])
        if file_facts.low is None or file_facts.high is None or not file_facts.no_null:
            return None
        index = bisect_right(starts, file_facts.low) - 1
        return starts[index] if index >= 0 and file_facts.high < windows[index][1] else None

    return find_window


def _identity_value(file: DataFile, field_id: int, spec: PartitionSpec) -> Any:
    for i, field in enumerate(spec.fields):
        if field.source_id == field_id and isinstance(field.transform, IdentityTransform):
            return file.partition[i]
    return None
