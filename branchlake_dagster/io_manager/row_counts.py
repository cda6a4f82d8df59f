"""How many rows each Dagster partition of a table has, from its manifests. No data is read."""

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

from branchlake_dagster.history.file_facts import facts
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables.selection import Condition, Values, select, to_iceberg
from branchlake_dagster.tables.specification import TableSpec

MOST_TOLD = 400
"""Partitions of one output whose rows are told one by one: a year of days."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Place = Callable[[DataFile], Any]
"""Which of a column's values or windows all rows of a file have; None when that is not known."""


def report(
    context: OutputContext, table: Table, spec: TableSpec, definition: PartitionsDefinition[str] | None
) -> int | None:
    """The rows of the partition that the output is of. Of several, each materialisation is told its own.

    None, and nothing is told, where that is not known, or there are more partitions than Dagster takes in
    reasonable time: it lists all partitions of the run for each that is told.
    """
    if definition is None or not spec.columns_by_dimension:
        return None
    keys = tuple(context.asset_partition_keys)
    if len(keys) > MOST_TOLD:
        return None
    found = partition_rows(table, keys, definition, spec.columns_by_dimension, name=spec.name)
    if found is None:
        return None
    if len(keys) == 1:
        return found[keys[0]]
    for key, rows in found.items():
        context.step_context.add_asset_metadata(
            {EventMetadata.PARTITION_ROWS_ON_BRANCH: MetadataValue.int(rows)}, context.asset_key, key
        )
    return None


def partition_rows(
    table: Table,
    keys: Sequence[str],
    definition: PartitionsDefinition[str],
    columns: Mapping[str, str],
    *,
    name: str,
) -> dict[str, int] | None:
    """The rows of each partition of `keys`; None when files hold rows of several, or rows were deleted.

    The columns' bounds and identity partitions say which partition a file is of.
    """
    schema = table.schema()
    slices: dict[str, tuple[Condition, ...]] = {}
    for key in keys:
        (slices[key],) = select([key], definition, columns, schema=schema, table=name).slices
    if not slices:
        return {}
    names = [one.column for one in next(iter(slices.values()))]
    places = [
        _place([part[i] for part in slices.values()], column, schema, table.specs())
        for i, column in enumerate(names)
    ]
    by_place = {tuple(map(_label, part)): key for key, part in slices.items()}
    found = dict.fromkeys(keys, 0)
    wanted = to_iceberg(select(keys, definition, columns, schema=schema, table=name), schema)
    for task in table.scan(row_filter=wanted).plan_files():
        held = by_place.get(tuple(place(task.file) for place in places))
        if held is None or task.delete_files:
            return None
        found[held] += task.file.record_count
    return found


def _label(condition: Condition) -> Any:
    return condition.values[0] if isinstance(condition, Values) else _number(condition.start)


def _number(moment: datetime | date) -> int:
    """As Iceberg stores it: microseconds of a time stamp, days of a date."""
    if isinstance(moment, datetime):
        return (moment - _EPOCH) // timedelta(microseconds=1)
    return (moment - _EPOCH.date()).days


def _place(
    conditions: Sequence[Condition], column: str, schema: Schema, specs: Mapping[int, PartitionSpec]
) -> Place:
    field = schema.find_field(column)
    if isinstance(conditions[0], Values):
        return lambda file: _identity(file, field.field_id, specs[file.spec_id])
    windows = sorted(
        {(_number(one.start), _number(one.end)) for one in conditions if not isinstance(one, Values)}
    )
    starts = [start for start, _ in windows]

    def window(file: DataFile) -> int | None:
        known = facts(file, field, specs[file.spec_id])
        if known.low is None or known.high is None or not known.no_null:
            return None
        found = bisect_right(starts, known.low) - 1
        return starts[found] if found >= 0 and known.high < windows[found][1] else None

    return window


def _identity(file: DataFile, field_id: int, spec: PartitionSpec) -> Any:
    for i, field in enumerate(spec.fields):
        if field.source_id == field_id and isinstance(field.transform, IdentityTransform):
            return file.partition[i]
    return None
