"""The Iceberg partition spec that fits an asset's Dagster partitions."""

from __future__ import annotations

from collections.abc import Mapping

from dagster import MultiPartitionsDefinition, PartitionsDefinition, TimeWindowPartitionsDefinition
from dagster._core.definitions.partitions.schedule_type import ScheduleType
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, HourTransform, IdentityTransform, Transform
from pyiceberg.types import DateType

from branchlake_dagster.branching.errors import SchemaMismatch

_FIRST_FIELD_ID = 1000  # Iceberg numbers partition fields from here on.


def partition_spec(
    definition: PartitionsDefinition[str] | None, columns: Mapping[str, str], schema: Schema, *, table: str
) -> PartitionSpec:
    """One partition field per mapped dimension, in the order of the dimensions.

    Every Dagster partition is a union of Iceberg partitions, so replacing it removes whole files.
    """
    fields: list[PartitionField] = []
    for dimension, column in columns.items():
        try:
            field = schema.find_field(column)
        except ValueError as error:
            raise SchemaMismatch(
                f"Partition column {column} is missing from the frame.", table=table
            ) from error
        transform, suffix = _transform(_dimension(definition, dimension), field.field_type)
        fields.append(
            PartitionField(field.field_id, _FIRST_FIELD_ID + len(fields), transform, f"{column}{suffix}")
        )
    return PartitionSpec(*fields) if fields else UNPARTITIONED_PARTITION_SPEC


def _dimension(definition: PartitionsDefinition[str] | None, name: str) -> PartitionsDefinition[str] | None:
    if isinstance(definition, MultiPartitionsDefinition):
        return definition.get_partitions_def_for_dimension(name)
    return definition


def _transform(definition: PartitionsDefinition[str] | None, kind: object) -> tuple[Transform, str]:  # type: ignore[type-arg]
    if not isinstance(definition, TimeWindowPartitionsDefinition) or isinstance(kind, DateType):
        return IdentityTransform(), ""
    if definition.timezone == "UTC" and definition.schedule_type in {
        ScheduleType.DAILY,
        ScheduleType.WEEKLY,
        ScheduleType.MONTHLY,
    }:
        return DayTransform(), "_day"
    if definition.schedule_type in set(ScheduleType):
        return HourTransform(), "_hour"  # hourly, or a day of another time zone
    return IdentityTransform(), ""  # a cron finer than or across hours: one value per window
