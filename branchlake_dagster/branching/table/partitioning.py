"""The Iceberg partition spec that fits an asset's Dagster partitions, and whether a selection fits a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, cast
from zoneinfo import ZoneInfo

from croniter import croniter
from dagster import MultiPartitionsDefinition, PartitionsDefinition, TimeWindowPartitionsDefinition
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
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

from branchlake_dagster.branching.errors import SchemaMismatch
from branchlake_dagster.branching.table.selection import Condition, DateRange, Selection, TimeRange
from branchlake_dagster.branching.table.spec import LayoutField

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
