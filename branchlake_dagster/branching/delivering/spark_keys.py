"""Changed keys in Spark's plans: which rows are theirs, and which files cannot have any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the library's own abbreviation

MOST_LITERALS = 200
"""More values of a key are asked for by their lowest and highest."""
MOST_PARTS = 32
"""Values, times the other columns, beside which those are asked for: of more the method that Spark makes
would be longer than 8,000 bytes, which Java compiles no more."""
MOST_OF_ONE, MOST_NEARLY = 5_000, 50_000
"""The same for the values beside one value, and for all of a filter: each is an expression to be planned."""


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


def nearly(keys: pa.Table, column: Callable[[str], Column]) -> Column:
    """A filter of single rows before a shuffle or a look-up among all keys: lets through all rows of them.

    It asks for the values of the other columns by each value of the one that has fewest, a day say: of an
    old day few accounts have changed, of today all. Nothing of it is passed on to files, which would look it
    up in each of their dictionaries in vain.
    """
    few = {name: len(pc.unique(keys[name])) for name in keys.column_names if _comparable(keys[name].type)}
    lead = min(few, key=lambda name: few[name], default="")
    others = [name for name in few if name != lead]
    if not others or not 0 < few[lead] * len(others) <= MOST_PARTS:
        return F.lit(True)
    left, parts = MOST_NEARLY, []
    for rows in sorted(_by_value(keys, lead), key=lambda rows: rows.num_rows):
        found = _may_be(rows[lead], column(lead))
        for name in others:
            found = found & _may_be(rows[name], column(name), most=min(left, MOST_OF_ONE))
        left -= len(others) * rows.num_rows if rows.num_rows <= MOST_OF_ONE else 0
        parts.append(found)
    return F.coalesce(_any(parts), F.lit(False))


def _any(parts: Sequence[Column]) -> Column:
    """As a tree of little depth: what is sent to the server may only be nested so far."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _any(parts[:middle]) | _any(parts[middle:])


def _by_value(keys: pa.Table, name: str) -> list[pa.Table]:
    """The keys in tables that have one value of the column each."""
    ordered = keys.sort_by(name)
    ends = [*pc.run_end_encode(ordered[name].combine_chunks()).run_ends.to_pylist()]
    return [ordered.slice(start, end - start) for start, end in pairwise([0, *ends])]


def _may_be(values: pa.ChunkedArray, column: Column, *, most: int = MOST_LITERALS) -> Column:
    present = pc.unique(values.drop_null())
    if not _comparable(values.type):
        return F.lit(True)
    if not len(present):
        return column.isNull() if values.null_count else F.lit(True)
    if len(present) <= most:
        found = column.isin(present.to_pylist())
    else:
        ends = pc.min_max(present).as_py()
        found = column.between(F.lit(ends["min"]), F.lit(ends["max"]))
    return found | column.isNull() if values.null_count else found


def _comparable(kind: pa.DataType) -> bool:
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(pa.types.is_integer(kind) or pa.types.is_date(kind) or text)
