"""The partition spec of an asset's table, and files and keys that do not fit its partitions.

Files that hold rows inside and outside of a selection are divided, so that an engine can drop whole files.

Spark's `overwrite(expr)` refuses to replace a part of a file. Runs that write one window each make no such
file; runs of several windows, compactions and other people's SQL do, where windows do not begin on hours.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, cast
from urllib.parse import quote_plus
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
from croniter import croniter
from dagster import MultiPartitionsDefinition, PartitionsDefinition, TimeWindowPartitionsDefinition
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table, TableProperties
from pyiceberg.transforms import (
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    YearTransform,
    parse_transform,
)
from pyiceberg.types import NestedField, TimestampType, TimestamptzType

from branchlake_dagster.internals.pyiceberg import commit_compaction, data_files, rows_all_match
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster.tables.selection import (
    Condition,
    DateRange,
    Selection,
    TimeRange,
    Values,
    ends,
    to_iceberg,
)
from branchlake_dagster.tables.specification import LayoutField

AnyTransform = Transform[Any, Any]

_FIRST_FIELD_ID = 1000  # Iceberg numbers partition fields from here on.
_DAY = 24 * 60
_HOUR = 60


def partition_spec(
    definition: PartitionsDefinition[str] | None,
    columns: Mapping[str, str],
    schema: Schema,
    *,
    table: str,
    layout: Sequence[LayoutField] = (),
) -> PartitionSpec:
    """One partition field per mapped dimension, in the order of the dimensions, then those of `layout`.

    Wherever the windows begin on UTC days or hours, every Dagster partition is a union of Iceberg partitions.
    Where they do not (half-hour zones, windows of minutes) the field is the hour all the same: a partition
    for each distinct moment would be a file for each row. Such an hour holds files of several windows.
    """
    fields: list[PartitionField] = []
    for dimension, column in columns.items():
        field = _field(schema, column, table)
        transform, suffix = _transform(_dimension(definition, dimension), field.field_type)
        fields.append(_partition(fields, field, transform, suffix, schema))
    for part in layout:
        field = _field(schema, part.column, table)
        transform, suffix = _declared(part)
        if not transform.can_transform(field.field_type):
            raise SchemaMismatch(
                f"The layout asks for {part.transform or 'the values'} of {part.column}, which is"
                f" {field.field_type}.",
                table=table,
                hint="Name another column or transform in table_metadata(layout=[…]).",
                reason="layout_type",
                subject=part.column,
            )
        fields.append(_partition(fields, field, transform, suffix, schema))
    return PartitionSpec(*fields) if fields else UNPARTITIONED_PARTITION_SPEC


def _field(schema: Schema, column: str, table: str) -> NestedField:
    try:
        return schema.find_field(column)
    except ValueError as error:
        raise SchemaMismatch(
            f"Partition column {column} is missing from the frame.",
            table=table,
            reason="column_missing",
            subject=column,
        ) from error


def _partition(
    before: Sequence[PartitionField], field: NestedField, transform: AnyTransform, suffix: str, schema: Schema
) -> PartitionField:
    name = f"{field.name}{suffix}"
    while suffix and name in {other.name for other in schema.fields}:
        name += "_"  # Iceberg takes no partition field that is called like another column
    return PartitionField(field.field_id, _FIRST_FIELD_ID + len(before), transform, name)


def _declared(part: LayoutField) -> tuple[AnyTransform, str]:
    if part.transform is None:
        return IdentityTransform(), ""
    name = part.transform.split("[")[0]
    return parse_transform(part.transform), f"_{'trunc' if name == 'truncate' else name}"


def whole_files(selection: Selection, schema: Schema, specs: Mapping[int, PartitionSpec]) -> bool:
    """Whether under each of `specs` no file can hold rows inside and rows outside of the selection."""
    return all(
        _fits(condition, schema, spec)
        for part in selection.slices
        for condition in part
        for spec in specs.values()
    )


def _fits(condition: Condition, schema: Schema, spec: PartitionSpec) -> bool:
    source = schema.find_field(condition.column).field_id
    transforms = [field.transform for field in spec.fields if field.source_id == source]
    return any(_divides(transform, condition) for transform in transforms)


def _divides(transform: Transform, condition: Condition) -> bool:  # type: ignore[type-arg]
    """Whether all values that share a partition of `transform` are on one side of the condition."""
    if isinstance(transform, IdentityTransform):
        return True
    if isinstance(condition, TimeRange):
        ends = [condition.start.astimezone(UTC), condition.end.astimezone(UTC)]
    elif isinstance(condition, DateRange):
        ends = [
            datetime(end.year, end.month, end.day, tzinfo=UTC) for end in (condition.start, condition.end)
        ]
    else:
        return False
    return all(_begins(transform, end) for end in ends)


def _begins(transform: Transform, moment: datetime) -> bool:  # type: ignore[type-arg]
    """Whether one of the transform's periods begins at the moment (UTC)."""
    if (moment.minute, moment.second, moment.microsecond) != (0, 0, 0):
        return False
    periods: dict[type, bool] = {
        HourTransform: True,
        DayTransform: moment.hour == 0,
        MonthTransform: (moment.hour, moment.day) == (0, 1),
        YearTransform: (moment.hour, moment.day, moment.month) == (0, 1, 1),
    }
    return periods.get(type(transform), False)


def _dimension(definition: PartitionsDefinition[str] | None, name: str) -> PartitionsDefinition[str] | None:
    if isinstance(definition, MultiPartitionsDefinition):
        return definition.get_partitions_def_for_dimension(name)
    return definition


def _transform(definition: PartitionsDefinition[str] | None, kind: object) -> tuple[AnyTransform, str]:
    if not isinstance(definition, TimeWindowPartitionsDefinition) or not isinstance(
        kind, TimestampType | TimestamptzType
    ):
        return IdentityTransform(), ""
    if _on_utc_days(definition):
        return DayTransform(), "_day"
    return HourTransform(), "_hour"


def _on_utc_days(definition: TimeWindowPartitionsDefinition) -> bool:
    """Whether every window begins at a midnight of UTC."""
    # Numbers, or "*" for all of them.
    minutes, hours = cast("list[list[Any]]", croniter.expand(definition.cron_schedule)[0][:2])
    if "*" in minutes or "*" in hours:
        return False
    return all(
        (hour * _HOUR + minute - offset) % _DAY == 0
        for hour, minute, offset in product(hours, minutes, _offsets(definition))
    )


def _offsets(definition: TimeWindowPartitionsDefinition) -> set[float]:
    """The zone's distances from UTC in minutes, seen week by week from the first window for two years.

    A clock change that somebody decides later makes some files straddle, which costs and breaks nothing.
    """
    zone = ZoneInfo(definition.timezone)
    weeks = (definition.start.astimezone(UTC) + timedelta(weeks=week) for week in range(105))
    shifts = (moment.astimezone(zone).utcoffset() or timedelta() for moment in weeks)
    return {shift.total_seconds() / 60 for shift in shifts}


_LONGEST = 255
"""Bytes of a folder's name on the file systems there are; Iceberg calls folders `column=value`."""

_WITHOUT_VALUES = {
    TableProperties.OBJECT_STORE_ENABLED: "true",
    TableProperties.WRITE_OBJECT_STORE_PARTITIONED_PATHS: "false",
}


def properties(selection: Selection | None) -> Mapping[str, str]:
    """What a table must be told so that it can hold the selection; usually nothing.

    Both engines follow these properties of Iceberg's.
    """
    long = selection is not None and any(map(_too_long, _folders(selection)))
    return _WITHOUT_VALUES if long else {}


def make_room(table: Table, selection: Selection | None) -> Table:
    """The table, told so. Files that are there stay where they are."""
    wanted = properties(selection)
    if all(table.properties.get(name) == value for name, value in wanted.items()):
        return table
    with table.transaction() as transaction:
        transaction.set_properties(dict(wanted))
    return table.refresh()


def _folders(selection: Selection) -> set[str]:
    conditions = {one for part in selection.slices for one in part if isinstance(one, Values)}
    return {f"{quote_plus(one.column)}={quote_plus(value)}" for one in conditions for value in one.values}


def _too_long(folder: str) -> bool:
    return len(folder.encode()) > _LONGEST


def divide(table: Table, selection: Selection, properties: Mapping[str, str]) -> Table:
    """The table, its rows the same, without files that the selection cuts through.

    Reads no manifest where the layout rules such files out, and no data file but those. The change is a
    snapshot of its own, a compaction (`replace`), because nobody's rows change by it.
    """
    schema = table.schema()
    if whole_files(selection, schema, table.specs()):
        return table
    cut = list(_cut(table, to_iceberg(selection, schema)))
    if not cut:
        return table
    commit = uuid.uuid4()
    numbers = itertools.count()
    transaction = table.transaction()
    producer = transaction.update_snapshot(snapshot_properties=dict(properties)).overwrite(commit_uuid=commit)
    for task in cut:
        producer.delete_data_file(task.file)
        for file in _pieces(table, task, selection, commit, numbers):
            producer.append_data_file(file)
    return commit_compaction(transaction, producer)


def _cut(table: Table, row_filter: BooleanExpression) -> Iterator[FileScanTask]:
    """The files of which some rows may match the filter and others may not."""
    for task in table.scan(row_filter=row_filter).plan_files():
        if task.delete_files or not rows_all_match(table.schema(), task.residual, task.file):
            yield task


def _pieces(
    table: Table, task: FileScanTask, selection: Selection, commit: uuid.UUID, numbers: itertools.count[int]
) -> Iterator[DataFile]:
    """The file's rows again, in files whose statistics say which side they are on."""
    rows = ArrowScan(
        table_metadata=table.metadata, io=table.io, projected_schema=table.schema(), row_filter=AlwaysTrue()
    ).to_table(tasks=[task])
    cells = _cells(rows, selection)
    for cell in pc.unique(cells):
        part = rows.filter(pc.equal(cells, cell))
        yield from data_files(table.metadata, part, table.io, commit=commit, numbers=numbers)


def _cells(rows: pa.Table, selection: Selection) -> pa.ChunkedArray:
    """A number for each row. Rows of one number stand on one side of every end and value of the selection.

    Inside and outside alone would not do: rows before and after a window are outside, but the bounds of a
    file that holds both enclose it.
    """
    found = pa.chunked_array([pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)])
    for name in selection.columns():
        column = rows.column(name)
        place, places = pc.cast(pc.is_valid(column), pa.int64()), 2
        for above in _edges(column, selection, name):
            place, places = pc.add(place, pc.cast(pc.fill_null(above, False), pa.int64())), places + 1
        found = pc.add(pc.multiply(found, places), place)
    return found


def _edges(column: pa.ChunkedArray, selection: Selection, name: str) -> Iterator[pa.ChunkedArray]:
    """For each place where a condition on the column changes: which rows are beyond it."""
    conditions = {one for part in selection.slices for one in part if one.column == name}
    for value in {v for one in conditions if isinstance(one, Values) for v in one.values}:
        yield pc.greater_equal(column, pa.scalar(value, column.type))
        yield pc.greater(column, pa.scalar(value, column.type))
    ranges = [one for one in conditions if not isinstance(one, Values)]
    for end in {end for one in ranges for end in ends(one, column.type)}:
        yield pc.greater_equal(column, end)
