"""Build the partition spec of an asset's table, and split data files with rows on both sides of a selection.

Spark's `overwrite(expr)` refuses to replace a part of a file, so a file must not have rows inside and outside
of a selection. Runs that write one window each produce no such file. Runs of several windows, compactions and
SQL of other writers do, if windows do not start at full hours.
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

from branchlake_dagster.catalog.damaged_files import name_damaged_file
from branchlake_dagster.internals.pyiceberg import (
    commit_compaction,
    open_transaction,
    rows_all_match,
    write_data_files,
)
from branchlake_dagster.tables.errors import SchemaMismatch
from branchlake_dagster.tables.selection import (
    Condition,
    DateRange,
    Selection,
    TimeRange,
    Values,
    range_bounds,
    to_iceberg_filter,
)
from branchlake_dagster.tables.specification import LayoutField

AnyTransform = Transform[Any, Any]

_FIRST_FIELD_ID = 1000  # Iceberg numbers partition fields from 1000.
_DAY = 24 * 60
_HOUR = 60


def build_partition_spec(
    definition: PartitionsDefinition[str] | None,
    columns_by_dimension: Mapping[str, str],
    schema: Schema,
    *,
    table_name: str,
    layout: Sequence[LayoutField] = (),
) -> PartitionSpec:
    """Return a spec with one partition field per mapped dimension, followed by the fields of `layout`.

    A time window becomes a field of UTC days if all windows start at midnight UTC, otherwise of hours. If
    windows start within an hour (half-hour zones, windows of minutes), one hour contains files of several
    windows, because a partition for each distinct moment would mean a file for each row. Otherwise every
    Dagster partition is a union of Iceberg partitions. Other dimensions, and dates, are partitioned by value.

    Raises SchemaMismatch if a column is missing, its type does not fit a transform, or the layout repeats a
    field.
    """
    fields: list[PartitionField] = []
    for dimension, column in columns_by_dimension.items():
        field = _require_column_field(schema, column, table_name)
        transform, suffix = _window_transform(_dimension_definition(definition, dimension), field.field_type)
        fields.append(_build_partition_field(fields, field, transform, suffix, schema))
    for layout_field in layout:
        field = _require_column_field(
            schema, layout_field.column, table_name, hint=_layout_hint(layout_field)
        )
        transform, suffix = _layout_transform(layout_field)
        if any((other.source_id, other.transform) == (field.field_id, transform) for other in fields):
            raise SchemaMismatch(
                f"The layout and partition_by partition column {layout_field.column} by {transform} twice.",
                table=table_name,
                hint="Remove it from table_metadata(layout=[…]).",
                reason="layout_twice",
                subject=layout_field.column,
            )
        if not transform.can_transform(field.field_type):
            raise SchemaMismatch(
                f"The layout partitions by {layout_field.transform or 'the values'} of column"
                f" {layout_field.column}, but the column is {field.field_type}.",
                table=table_name,
                hint="Name another column or transform in table_metadata(layout=[…]).",
                reason="layout_type",
                subject=layout_field.column,
            )
        fields.append(_build_partition_field(fields, field, transform, suffix, schema))
    return PartitionSpec(*fields) if fields else UNPARTITIONED_PARTITION_SPEC


def _layout_hint(layout_field: LayoutField) -> str | None:
    """Return a hint for an entry of a layout that looks like a transform but is taken for a column."""
    if layout_field.transform is not None or not layout_field.column.endswith(")"):
        return None
    return (
        "The transforms of table_metadata(layout=[…]) are year(c), month(c), day(c), hour(c), bucket(16, c)"
        " and truncate(4, c). Everything else is the name of a column."
    )


def _require_column_field(
    schema: Schema, column_name: str, table_name: str, *, hint: str | None = None
) -> NestedField:
    try:
        return schema.find_field(column_name)
    except ValueError as error:
        raise SchemaMismatch(
            f"Partition column {column_name} is missing from the frame.",
            table=table_name,
            hint=hint,
            reason="column_missing",
            subject=column_name,
        ) from error


def _build_partition_field(
    earlier_fields: Sequence[PartitionField],
    field: NestedField,
    transform: AnyTransform,
    suffix: str,
    schema: Schema,
) -> PartitionField:
    name = f"{field.name}{suffix}"
    names = {other.name for other in schema.fields} | {other.name for other in earlier_fields}
    while suffix and name in names:
        name += "_"  # Iceberg refuses a partition field with the name of another column or field
    return PartitionField(field.field_id, _FIRST_FIELD_ID + len(earlier_fields), transform, name)


def _layout_transform(layout_field: LayoutField) -> tuple[AnyTransform, str]:
    if layout_field.transform is None:
        return IdentityTransform(), ""
    name = layout_field.transform.split("[")[0]
    return parse_transform(layout_field.transform), f"_{'trunc' if name == 'truncate' else name}"


def selects_whole_files(selection: Selection, schema: Schema, specs: Mapping[int, PartitionSpec]) -> bool:
    """Return whether the specs exclude files with rows both inside and outside of the selection.

    `specs` are all partition specs of the table, by id. `schema` is the table's schema.
    """
    return all(
        _is_spec_aligned(condition, schema, spec)
        for part in selection.slices
        for condition in part
        for spec in specs.values()
    )


def _is_spec_aligned(condition: Condition, schema: Schema, spec: PartitionSpec) -> bool:
    source_id = schema.find_field(condition.column).field_id
    transforms = [field.transform for field in spec.fields if field.source_id == source_id]
    return any(_is_transform_aligned(transform, condition) for transform in transforms)


def _is_transform_aligned(transform: Transform, condition: Condition) -> bool:  # type: ignore[type-arg]
    """Return whether all values in one partition of `transform` are on the same side of the condition."""
    if isinstance(transform, IdentityTransform):
        return True
    if isinstance(condition, TimeRange):
        bounds = [condition.start.astimezone(UTC), condition.end.astimezone(UTC)]
    elif isinstance(condition, DateRange):
        bounds = [
            datetime(end.year, end.month, end.day, tzinfo=UTC) for end in (condition.start, condition.end)
        ]
    else:
        return False
    return all(_is_period_start(transform, end) for end in bounds)


def _is_period_start(transform: Transform, moment: datetime) -> bool:  # type: ignore[type-arg]
    """Return whether a period of the transform starts at the moment (in UTC).

    False for transforms other than hour, day, month and year.
    """
    if (moment.minute, moment.second, moment.microsecond) != (0, 0, 0):
        return False
    periods: dict[type, bool] = {
        HourTransform: True,
        DayTransform: moment.hour == 0,
        MonthTransform: (moment.hour, moment.day) == (0, 1),
        YearTransform: (moment.hour, moment.day, moment.month) == (0, 1, 1),
    }
    return periods.get(type(transform), False)


def _dimension_definition(
    definition: PartitionsDefinition[str] | None, dimension: str
) -> PartitionsDefinition[str] | None:
    if isinstance(definition, MultiPartitionsDefinition):
        return definition.get_partitions_def_for_dimension(dimension)
    return definition


def _window_transform(
    definition: PartitionsDefinition[str] | None, column_type: object
) -> tuple[AnyTransform, str]:
    if not isinstance(definition, TimeWindowPartitionsDefinition) or not isinstance(
        column_type, TimestampType | TimestamptzType
    ):
        return IdentityTransform(), ""
    if _starts_on_utc_days(definition):
        return DayTransform(), "_day"
    return HourTransform(), "_hour"


def _starts_on_utc_days(definition: TimeWindowPartitionsDefinition) -> bool:
    """Return whether every window of the partitions starts at midnight UTC, in summer and winter.

    False if the cron schedule has windows for every minute or every hour.
    """
    # croniter returns lists of numbers, or "*" for all numbers.
    minutes, hours = cast("list[list[Any]]", croniter.expand(definition.cron_schedule)[0][:2])
    if "*" in minutes or "*" in hours:
        return False
    return all(
        (hour * _HOUR + minute - offset) % _DAY == 0
        for hour, minute, offset in product(hours, minutes, _utc_offsets(definition))
    )


def _utc_offsets(definition: TimeWindowPartitionsDefinition) -> set[float]:
    """Return the zone's UTC offsets in minutes, sampled weekly for two years from the first window.

    If a zone's rules change later, a file may have rows of several windows. Splitting it costs time, but
    causes no errors.
    """
    zone = ZoneInfo(definition.timezone)
    weeks = (definition.start.astimezone(UTC) + timedelta(weeks=week) for week in range(105))
    shifts = (moment.astimezone(zone).utcoffset() or timedelta() for moment in weeks)
    return {shift.total_seconds() / 60 for shift in shifts}


_MAX_FOLDER_BYTES = 255
"""The longest folder name in bytes that common file systems allow. Iceberg names folders `column=value`."""

_SHORT_PATH_PROPERTIES = {
    TableProperties.OBJECT_STORE_ENABLED: "true",
    TableProperties.WRITE_OBJECT_STORE_PARTITIONED_PATHS: "false",
}


def path_properties(selection: Selection | None) -> Mapping[str, str]:
    """Return the table properties that long partition values of a selection require; usually {}.

    Long string values do not fit into a folder name. With these properties, PyIceberg and Spark omit the
    values from the paths of new files.
    """
    has_long_folder = selection is not None and any(map(_is_too_long, _partition_folders(selection)))
    return _SHORT_PATH_PROPERTIES if has_long_folder else {}


def set_path_properties(table: Table, selection: Selection | None) -> Table:
    """Set the table properties of `path_properties`, and return the table in its new state.

    Existing files stay in place. If nothing changes, there is no commit.
    """
    required_properties = path_properties(selection)
    if all(table.properties.get(name) == value for name, value in required_properties.items()):
        return table
    with open_transaction(table) as transaction:
        transaction.set_properties(dict(required_properties))
    return table.refresh()


def _partition_folders(selection: Selection) -> set[str]:
    conditions = {
        condition for part in selection.slices for condition in part if isinstance(condition, Values)
    }
    return {
        f"{quote_plus(condition.column)}={quote_plus(value)}"
        for condition in conditions
        for value in condition.values
    }


def _is_too_long(folder: str) -> bool:
    return len(folder.encode()) > _MAX_FOLDER_BYTES


def split_straddling_files(table: Table, selection: Selection, properties: Mapping[str, str]) -> Table:
    """Rewrite the files with rows inside and outside of the selection, and return the table.

    The table has the same rows afterwards, and no file has rows on both sides. Reads no manifest if the
    layout excludes such files, and only the data files that it rewrites. The change is a separate snapshot, a
    compaction (`replace`), because no rows change. `properties` are added to the summary of that snapshot.
    """
    schema = table.schema()
    if selects_whole_files(selection, schema, table.specs()):
        return table
    straddling_files = list(_iter_straddling_files(table, to_iceberg_filter(selection, schema)))
    if not straddling_files:
        return table
    commit_id = uuid.uuid4()
    file_numbers = itertools.count()
    transaction = open_transaction(table)
    producer = transaction.update_snapshot(snapshot_properties=dict(properties)).overwrite(
        commit_uuid=commit_id
    )
    for task in straddling_files:
        producer.delete_data_file(task.file)
        for file in _write_file_parts(table, task, selection, commit_id, file_numbers):
            producer.append_data_file(file)
    return commit_compaction(transaction, producer)


def _iter_straddling_files(table: Table, row_filter: BooleanExpression) -> Iterator[FileScanTask]:
    """Yield the files that may have rows inside and outside of `row_filter`, and those with delete files.

    Files that certainly have no matching row are omitted. The statistics of the files decide, without reading
    rows.
    """
    for task in table.scan(row_filter=row_filter).plan_files():
        if task.delete_files or not rows_all_match(table.schema(), task.residual, task.file):
            yield task


def _write_file_parts(
    table: Table,
    task: FileScanTask,
    selection: Selection,
    commit_id: uuid.UUID,
    file_numbers: itertools.count[int],
) -> Iterator[DataFile]:
    """Write the rows of a file to several new files, so that each has rows of one side of the selection.

    The bounds of a new file do not reach across a border of the selection. Yields the new files. `commit_id`
    and `file_numbers` make the names of the new files unique.
    """
    with name_damaged_file(table.io, lambda: [task]):
        rows = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_table([task])
    cells = _number_cells(rows, selection)
    for cell in pc.unique(cells):
        part = rows.filter(pc.equal(cells, cell))
        yield from write_data_files(table.metadata, part, table.io, commit=commit_id, numbers=file_numbers)


def _number_cells(rows: pa.Table, selection: Selection) -> pa.ChunkedArray:
    """Return a cell number for each row. Rows with one number are on the same side of every bound and value.

    A split into inside and outside would not be enough. The rows before and after a window are both outside,
    but the bounds of a file with both of them would include the window.
    """
    cell_numbers = pa.chunked_array([pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)])
    for column_name in selection.column_names():
        column = rows.column(column_name)
        cell_index, cell_count = pc.cast(pc.is_valid(column), pa.int64()), 2
        for edge_mask in _iter_edge_masks(column, selection, column_name):
            cell_index, cell_count = (
                pc.add(cell_index, pc.cast(pc.fill_null(edge_mask, False), pa.int64())),
                cell_count + 1,
            )
        cell_numbers = pc.add(pc.multiply(cell_numbers, cell_count), cell_index)
    return cell_numbers


def _iter_edge_masks(
    column: pa.ChunkedArray, selection: Selection, column_name: str
) -> Iterator[pa.ChunkedArray]:
    """Yield, for each value or bound of a condition on the column, which rows lie at or after it.

    For a value, a second mask has the rows that lie after it. Null values give null.
    """
    conditions = {
        condition for part in selection.slices for condition in part if condition.column == column_name
    }
    for value in {v for condition in conditions if isinstance(condition, Values) for v in condition.values}:
        yield pc.greater_equal(column, pa.scalar(value, column.type))
        yield pc.greater(column, pa.scalar(value, column.type))
    ranges = [condition for condition in conditions if not isinstance(condition, Values)]
    for end in {end for condition in ranges for end in range_bounds(condition, column.type)}:
        yield pc.greater_equal(column, end)
