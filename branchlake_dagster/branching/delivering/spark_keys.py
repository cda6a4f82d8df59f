"""Changed keys in Spark's plans: which rows are theirs, and which files cannot have any."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

MOST_LITERALS = 200
"""More values of a key are asked for by their lowest and highest."""


def same(keys: pa.Table, left: Callable[[str], Column], right: Callable[[str], Column]) -> Column:
    """Whether two sides have the same of the keys, null equal to null.

    Without a null among them by plain equality: that is the join which Spark has the fast hash tables for.
    """
    parts = [
        left(name).eqNullSafe(right(name)) if keys[name].null_count else left(name) == right(name)
        for name in keys.column_names
    ]
    return reduce(Column.__and__, parts)


def may_have(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """A filter that lets through all rows of the keys, and of others as few as files can tell apart.

    Spark passes no join's keys on to the scan of a file, but what stands in the query it does.
    """
    parts = [_may_be(keys[name], column(name)) for name in keys.column_names]
    return reduce(Column.__and__, parts, F.lit(True))


def _may_be(values: pa.ChunkedArray, column: Column) -> Column:
    kind = values.type
    comparable = pa.types.is_integer(kind) or pa.types.is_date(kind) or _is_text(kind)
    present = pc.unique(values.drop_null())
    if not comparable or not len(present):
        return F.lit(True)
    if len(present) <= MOST_LITERALS:
        found = column.isin(present.to_pylist())
    else:
        ends = pc.min_max(present).as_py()
        found = column.between(F.lit(ends["min"]), F.lit(ends["max"]))
    return found | column.isNull() if values.null_count else found


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
