"""Build the predicate in Spark's SQL that selects exactly one partition of an Iceberg table."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from pyiceberg import transforms as ice_transforms
from pyiceberg import types as ice_types
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

from branchlake_dagster.spark.session import quote_spark_path, quote_spark_string

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FUNCTIONS: dict[type[ice_transforms.Transform[Any, Any]], str] = {
    ice_transforms.YearTransform: "years",
    ice_transforms.MonthTransform: "months",
    ice_transforms.DayTransform: "days",
    ice_transforms.HourTransform: "hours",
}
"""Iceberg's functions in Spark's catalog. They return years, months or hours since 1970; `days` a date."""


def partition_predicate(partition: Record, spec: PartitionSpec, schema: Schema) -> str | None:
    """Return the predicate for a partition, such as `nessie.system.days(at) = date'2026-11-05'`.

    Returns `true` for a table without partitions. Returns None if Spark's SQL cannot express the predicate:
    the column was dropped, its type has no exact literal, or a time is before year 1 or after year 9999.
    Iceberg projects the predicate on partition values, so Spark plans only files of this partition.
    """
    conditions = []
    for number, field in enumerate(spec.fields):
        if isinstance(field.transform, ice_transforms.VoidTransform):
            continue
        try:
            condition = _field_condition(field, partition[number], schema)
        except OverflowError:
            return None
        if condition is None:
            return None
        conditions.append(condition)
    return " AND ".join(conditions) or "true"


def _field_condition(field: PartitionField, value: Any, schema: Schema) -> str | None:
    name = schema.find_column_name(field.source_id)
    if name is None:
        return None  # the column was dropped
    column = quote_spark_path(name.split("."))
    transform, source_type = field.transform, schema.find_type(field.source_id)
    if value is None:
        return f"{column} IS NULL"
    if isinstance(transform, ice_transforms.IdentityTransform):
        literal = _format_literal(value, source_type)
        return None if literal is None else f"{column} = {literal}"
    if isinstance(transform, ice_transforms.BucketTransform):
        return f"nessie.system.bucket({transform.num_buckets}, {column}) = {int(value)}"
    if isinstance(transform, ice_transforms.TruncateTransform):
        literal = _format_literal(value, source_type)
        return None if literal is None else f"nessie.system.truncate({transform.width}, {column}) = {literal}"
    function = _FUNCTIONS.get(type(transform))
    if function is None:
        return None
    if function == "days":
        day = value if isinstance(value, date) else _EPOCH.date() + timedelta(days=int(value))
        return f"nessie.system.days({column}) = date'{day.isoformat()}'"
    return f"nessie.system.{function}({column}) = {int(value)}"


def _format_literal(value: Any, kind: ice_types.IcebergType) -> str | None:
    """Return a literal of the column's type in Spark's SQL; None if the type has no exact literal."""
    match kind:
        case ice_types.StringType():
            return quote_spark_string(str(value))
        case ice_types.BooleanType():
            return "true" if value else "false"
        case ice_types.IntegerType() | ice_types.LongType():
            return str(int(value))
        case ice_types.DecimalType():
            return f"CAST('{Decimal(value)}' AS decimal({kind.precision},{kind.scale}))"
        case ice_types.DateType():
            day = value if isinstance(value, date) else _EPOCH.date() + timedelta(days=int(value))
            return f"date'{day.isoformat()}'"
        case ice_types.TimestampType() | ice_types.TimestamptzType():
            return _format_timestamp(value, has_zone=isinstance(kind, ice_types.TimestamptzType))
    return None


def _format_timestamp(value: Any, *, has_zone: bool) -> str:
    moment = value if isinstance(value, datetime) else _EPOCH + timedelta(microseconds=int(value))
    text = moment.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")
    return f"timestamp_ltz'{text}+00:00'" if has_zone else f"timestamp_ntz'{text}'"
