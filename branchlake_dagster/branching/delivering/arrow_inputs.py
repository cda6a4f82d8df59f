"""Changes of inputs as Arrow tables: no Spark, no JVM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThanOrEqual,
    Or,
)
from pyiceberg.table import Table

from branchlake_dagster.branching.consuming.consumer import Input
from branchlake_dagster.branching.consuming.consumption import Consumption
from branchlake_dagster.branching.delivering.inputs import (
    changed_keys_of,
    changed_rows,
    delivered,
    everything,
    of_partitions,
    of_range,
    rows_of_keys,
)
from branchlake_dagster.branching.table.selection import Selection, to_iceberg

MOST_LITERALS = 2_000
"""More values of a key are asked for by their lowest and highest."""


def load(consumption: Consumption, one: Input) -> pa.Table:
    """The rows of an input that the asset is to get. Raises RowsRemoved, RowsUnreadable, ChangeLost."""
    where = of_partitions(consumption, one, consumption.partitions)
    if one.pattern == "range":
        return _scan(one.table, _filter(of_range(consumption, one), one.table))
    if consumption.whole:
        rows = _scan(one.table, _filter(where, one.table))
        return everything(rows, consumption.consumer.declaration) if one.pattern == "rows" else rows
    if not consumption.replaced_keys:
        return delivered(consumption, one, changed_rows(consumption, one))
    keys = changed_keys_of(consumption, one)
    rows = _scan(one.table, And(_filter(where, one.table), may_have(keys)))
    return rows_of_keys(rows, keys)


def _scan(table: Table, row_filter: BooleanExpression) -> pa.Table:
    return table.scan(row_filter=row_filter).to_arrow()


def _filter(selection: Selection | None, table: Table) -> BooleanExpression:
    return AlwaysTrue() if selection is None else to_iceberg(selection, table.schema())


def may_have(keys: pa.Table) -> BooleanExpression:
    """A filter that lets through all rows of the keys, and of others as few as files can tell apart."""
    if not keys.num_rows:
        return AlwaysFalse()
    return reduce(And, (_column(name, keys[name]) for name in keys.column_names), AlwaysTrue())


def _column(name: str, values: pa.ChunkedArray) -> BooleanExpression:
    present = pc.unique(values.drop_null())
    null = IsNull(name) if values.null_count else None
    found: BooleanExpression | None = None
    if 0 < len(present) <= MOST_LITERALS:
        found = In(name, _literals(present))
    elif len(present):
        ends = pc.min_max(present).as_py()
        found = And(GreaterThanOrEqual(name, ends["min"]), LessThanOrEqual(name, ends["max"]))
    parts = [part for part in (found, null) if part is not None]
    return reduce(Or, parts) if parts else AlwaysTrue()


def _literals(values: pa.Array) -> Sequence[Any]:
    return tuple(values.to_pylist())
