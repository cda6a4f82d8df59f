"""What holds for one column in all rows of a data file, from its manifest entry: never more than is proved.

`reliable_metrics` decides which counts and bounds may be relied upon. A value of an identity partition is
that of every row of the file, whatever the metrics say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pyiceberg import types as ice
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.transforms import IdentityTransform

from branchlake_dagster.internals.column_metrics import bound_value, reliable_metrics

_VALUES: dict[type[ice.IcebergType], type] = {
    ice.BooleanType: bool,
    ice.IntegerType: int,
    ice.LongType: int,
    ice.FloatType: float,
    ice.DoubleType: float,
    ice.DateType: int,
    ice.TimeType: int,
    ice.TimestampType: int,
    ice.TimestamptzType: int,
    ice.StringType: str,
    ice.BinaryType: bytes,
    ice.UUIDType: bytes,
    ice.DecimalType: Decimal,
}
"""The types whose bounds are known as values, and what they are in Python: days of a date, microseconds of a
time or time stamp, the 16 bytes of a UUID."""


@dataclass(frozen=True)
class ColumnFacts:
    """What holds for all rows of a file; False and None mean that it is not known.

    Every value that is neither null nor NaN is within `low` and `high`.
    """

    no_null: bool = False
    all_null: bool = False
    no_nan: bool = False
    low: Any = None
    high: Any = None


def column_facts(
    file: DataFile,
    field: ice.NestedField,
    spec: PartitionSpec,
    is_complete: Callable[[DataFile, int], bool] = lambda *_: False,
) -> ColumnFacts:
    """The facts on a top-level column; `spec` is the one that the file was written with.

    `is_complete` is asked about a text column, by field id, when the manifest entry does not show that its
    bounds are of all row groups.
    """
    kind = field.field_type
    if not isinstance(kind, ice.PrimitiveType):
        return ColumnFacts()
    for index, part in enumerate(spec.fields):
        if part.source_id == field.field_id and isinstance(part.transform, IdentityTransform):
            return _constant_facts(file.partition[index], kind)
    metrics, field_id = reliable_metrics(file, [field], is_complete), field.field_id
    null_count = metrics.null_value_counts.get(field_id)
    floating = isinstance(kind, ice.FloatType | ice.DoubleType)
    return ColumnFacts(
        no_null=null_count == 0,
        all_null=null_count == file.record_count,
        no_nan=not floating or metrics.nan_value_counts.get(field_id) == 0,
        low=_decode_bound(metrics.lower_bounds.get(field_id), kind),
        high=_decode_bound(metrics.upper_bounds.get(field_id), kind),
    )


def _constant_facts(value: Any, kind: ice.PrimitiveType) -> ColumnFacts:
    """The facts on a column that the file is partitioned by."""
    if value is None:
        return ColumnFacts(all_null=True, no_nan=True)
    if type(value) is not _VALUES.get(type(kind)) or value != value:
        return ColumnFacts(no_null=True)
    return ColumnFacts(no_null=True, no_nan=True, low=value, high=value)


def _decode_bound(stored: bytes | None, kind: ice.PrimitiveType) -> Any:
    """A bound as a value; None if it is missing or of a type without order here."""
    return None if stored is None or type(kind) not in _VALUES else bound_value(stored, kind)
