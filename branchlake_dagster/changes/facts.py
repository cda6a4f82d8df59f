"""What the manifests say of one column in one data file, as far as it may be relied upon.

Everything here errs on the side of knowing less. The cases, each with a test:

- A count that is missing says nothing: metrics may be off, the column younger than the file.
- Bounds of text may be cut: they are bounds still, and equal ones leave room for one value only.
- PyIceberg 0.12 leaves out of a text column's bounds the row groups for which Arrow wrote none (a value of
  over 4 kB). So they count where the file has one row group, or its footer knows bounds of all of them.
- Bounds of floating point numbers leave NaN out, so the number of NaN has to be known as well.
- A bound may be stored in the type that the column had when the file was written.
- A value of an identity partition is that of every row of the file, whatever is written in the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pyiceberg import types as ice
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.transforms import IdentityTransform

_WIDTHS: dict[type[ice.IcebergType], tuple[int, ...]] = {
    ice.BooleanType: (1,),
    ice.IntegerType: (4,),
    ice.LongType: (4, 8),
    ice.FloatType: (4,),
    ice.DoubleType: (4, 8),
    ice.DateType: (4,),
    ice.TimestampType: (8,),
    ice.TimestamptzType: (8,),
}
"""The bytes that a bound may have, by the column's type now; four of an eight-byte type: it was promoted."""

_VALUES: dict[type[ice.IcebergType], type] = {
    ice.BooleanType: bool,
    ice.IntegerType: int,
    ice.LongType: int,
    ice.FloatType: float,
    ice.DoubleType: float,
    ice.DateType: int,
    ice.TimestampType: int,
    ice.TimestamptzType: int,
    ice.StringType: str,
    ice.DecimalType: Decimal,
}
"""The types whose values can be compared with a contract's, and what they are in Python: days of a date,
microseconds of a time stamp."""


@dataclass(frozen=True)
class Facts:
    """What holds for all rows of a file; False and None mean that it is not known.

    Every value that is neither null nor NaN is within `low` and `high`.
    """

    no_null: bool = False
    all_null: bool = False
    no_nan: bool = False
    low: Any = None
    high: Any = None


def facts(
    file: DataFile,
    field: ice.NestedField,
    spec: PartitionSpec,
    bound_all: Callable[[DataFile, int], bool] = lambda *_: False,
) -> Facts:
    """The facts on a top-level column; `spec` is the one that the file was written with.

    `bound_all` is asked about a text column, by field id, in a file of several row groups: whether each of
    them has bounds.
    """
    kind = field.field_type
    if not isinstance(kind, ice.PrimitiveType):
        return Facts()
    for index, part in enumerate(spec.fields):
        if part.source_id == field.field_id and isinstance(part.transform, IdentityTransform):
            return _constant(file.partition[index], kind)
    number = field.field_id
    values = (file.value_counts or {}).get(number)
    nulls = (file.null_value_counts or {}).get(number)
    counted = values is not None and values == file.record_count and nulls is not None
    low, high = (file.lower_bounds or {}).get(number), (file.upper_bounds or {}).get(number)
    if isinstance(kind, ice.StringType) and (low is not None or high is not None):
        one_group = len(file.split_offsets or ()) == 1
        if not one_group and not bound_all(file, number):
            low = high = None
    floating = isinstance(kind, ice.FloatType | ice.DoubleType)
    return Facts(
        no_null=counted and nulls == 0,
        all_null=counted and nulls == values,
        no_nan=not floating or (file.nan_value_counts or {}).get(number) == 0,
        low=_bound(low, kind),
        high=_bound(high, kind),
    )


def _constant(value: Any, kind: ice.PrimitiveType) -> Facts:
    """The facts on a column that the file is partitioned by."""
    if value is None:
        return Facts(all_null=True, no_nan=True)
    if type(value) is not _VALUES.get(type(kind)) or value != value:
        return Facts(no_null=True)
    return Facts(no_null=True, no_nan=True, low=value, high=value)


def _bound(stored: bytes | None, kind: ice.PrimitiveType) -> Any:
    """A bound as a value; None when it is missing or cannot be relied upon."""
    if stored is None or type(kind) not in _VALUES:
        return None
    widths = _WIDTHS.get(type(kind))
    if widths is not None and len(stored) not in widths:
        return None
    try:
        value = from_bytes(kind, stored)
    except (struct.error, UnicodeDecodeError, ValueError, ArithmeticError):
        return None
    return None if _is_nan(value) else value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
