"""Facts about one column in all rows of a data file, from the file's manifest entry.

A fact is stated only if it is proved. `reliable_metrics` decides which counts and bounds can be trusted. The
value of an identity partition holds for every row of the file, whatever its metrics are.
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
"""The types whose bounds can be decoded, and their Python types.

Dates are days, times and time stamps are microseconds, a UUID is its 16 bytes.
"""


@dataclass(frozen=True)
class ColumnFacts:
    """What is known about one column in all rows of a file. False and None mean "not known".

    Every value that is neither null nor NaN lies between `low` and `high`, both included.
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
    """Return the facts about a top-level column. `spec` is the partition spec that the file was written with.

    `is_complete(file, field_id)` is called for a text column whose manifest entry does not show that its
    bounds cover all row groups. It returns whether they do.
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
    """Return the facts about a column that has one value in the whole file, its identity partition."""
    if value is None:
        return ColumnFacts(all_null=True, no_nan=True)
    if type(value) is not _VALUES.get(type(kind)) or value != value:
        return ColumnFacts(no_null=True)
    return ColumnFacts(no_null=True, no_nan=True, low=value, high=value)


def _decode_bound(stored: bytes | None, kind: ice.PrimitiveType) -> Any:
    """Decode a bound. Returns None if the bound is missing or its type has no order here."""
    return None if stored is None or type(kind) not in _VALUES else bound_value(stored, kind)
