"""Changes of inputs as the rows, keys or selection that an asset gets, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from functools import reduce
from typing import Any

import polars as pl
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
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import DateType, TimestampType, TimestamptzType

from branchlake_dagster.history.change import ChangeSet
from branchlake_dagster.history.ranges import Range, Ranges, joined
from branchlake_dagster.history.rows import COMMIT, ORDINAL, SNAPSHOT, ChangedRows, RowReader, without_carried
from branchlake_dagster.incremental.affected_partitions import LAST_DAY
from branchlake_dagster.incremental.consumer import Input
from branchlake_dagster.incremental.consumption import Consumption, Group
from branchlake_dagster.incremental.declaration import Declaration
from branchlake_dagster.tables.errors import RowsRemoved, SchemaMismatch
from branchlake_dagster.tables.selection import DateRange, Selection, TimeRange, inside, select, to_iceberg
from branchlake_dagster.wording import counted

_DAY = timedelta(days=1)
_TICK = timedelta(microseconds=1)


def by_days(ranges: Ranges) -> Ranges:
    """The same widened to whole days, of UTC where they are time stamps."""
    return Ranges(joined([Range(_day(part.low), _day(part.high)) for part in ranges.parts]))


def selection(ranges: Ranges, column: str, schema: Schema, *, table: str) -> Selection:
    """The rows whose column lies in the ranges: dates on a column of time stamps are whole days of UTC.

    Raises SchemaMismatch for a column that is neither a date nor a time stamp.
    """
    try:
        kind = schema.find_type(column)
    except ValueError as error:
        raise SchemaMismatch(
            f"Change ranges are about {column}, which is missing from the table.",
            table=table,
            hint=f"Its columns are {', '.join(field.name for field in schema.fields)}.",
        ) from error
    if isinstance(kind, DateType):
        days = by_days(ranges)
        return Selection(tuple((DateRange(column, part.low, part.high + _DAY),) for part in days.parts))
    if not isinstance(kind, TimestampType | TimestamptzType):
        raise SchemaMismatch(
            f"Column {column} is {kind}, and only ranges of dates and time stamps can be replaced.",
            table=table,
            hint="Name a date or time stamp column, or use the pattern `keys`.",
        )
    return Selection(tuple((TimeRange(column, start, end),) for start, end in _moments(ranges)))


def _moments(ranges: Ranges) -> Iterable[tuple[datetime, datetime]]:
    for part in ranges.parts:
        if isinstance(part.low, datetime):
            yield _aware(part.low), _aware(part.high) + _TICK
        else:
            yield _midnight(part.low), _midnight(part.high) + _DAY


def _day(value: Any) -> date:
    return value.date() if isinstance(value, datetime) else value


def _aware(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _midnight(value: date) -> datetime:
    return datetime(value.year, value.month, value.day, tzinfo=UTC)


MOST_COMPARED = 1_000_000
"""Rows of a change that are read whole to tell which of them a rewritten file only carries along."""


def of_partitions(consumption: Consumption, one: Input, partitions: tuple[str, ...]) -> Selection | None:
    """The rows of an input that partitions of the asset depend on; None: all rows.

    An input that lacks the column of a dimension has the same rows for all keys of that dimension.
    """
    consumer = consumption.consumer
    if not consumer.by_partition or consumer.definition is None:
        return None
    columns = consumer.columns_of_input(one.key, one.table)
    if not columns:
        return None
    return select(
        partitions,
        consumer.definition,
        columns,
        schema=one.table.schema(),
        table=one.name,
        window=consumer.reach_of(one.key).of_window,
        all_dimensions=False,
    )


def of_range(consumption: Consumption, one: Input) -> Selection | None:
    """The rows of an input that the results of the changed ranges depend on; None: all rows."""
    if consumption.whole or consumption.consumer.by_partition:
        return of_partitions(consumption, one, consumption.partitions)
    ranges = consumption.consumer.reach_of(one.key).around(target_ranges(consumption), rows=True)
    return selection(ranges, _range_column(consumption, one), one.table.schema(), table=one.name)


def target_ranges(consumption: Consumption) -> Ranges:
    """The ranges of results that the changes of all inputs affect, as the asset's own column can tell apart.

    With `from_start` one range: from the smallest changed value on.
    """
    declaration = consumption.consumer.declaration
    ranges = consumption.affected_ranges
    if declaration.from_start:
        ranges = from_smallest(ranges)
    dates = any(
        isinstance(one.table.schema().find_type(_range_column(consumption, one)), DateType)
        for one in consumption.inputs.values()
    )
    own = consumption.target_type(declaration.range_column or "")
    return by_days(ranges) if dates or isinstance(own, DateType) else ranges


def from_smallest(ranges: Ranges) -> Ranges:
    """From the smallest of the values on; the last day is the last but one of the year 9999."""
    if ranges.anything or not ranges.parts:
        return ranges
    low = ranges.parts[0].low
    last = datetime.combine(LAST_DAY, time.max, low.tzinfo) if isinstance(low, datetime) else LAST_DAY
    return replace(ranges, parts=(Range(low, last),))


def _range_column(consumption: Consumption, one: Input) -> str:
    found = consumption.consumer.declaration.range_column_of(one.key)
    assert found is not None  # noqa: S101 - `steps` has looked
    return found


def changed_rows(consumption: Consumption, one: Input) -> ChangedRows:
    """The rows that came and went, without those that were only carried along in rewritten files."""
    parts = [
        _inside(
            RowReader(one.table, change, commits=consumption.consumer.declaration.commits).read(),
            of_partitions(consumption, one, group.partitions),
        )
        for group, change in consumption.changes(one.key)
    ]
    together = ChangedRows(_all(part.added for part in parts), _all(part.removed for part in parts))
    found = without_carried(together)
    if not consumption.consumer.declaration.commits:
        return found
    hashes = {number: commit.hash for commit in consumption.commits(one.key) for number in commit.snapshots}
    return ChangedRows(_with_commits(found.added, hashes), _with_commits(found.removed, hashes))


def _with_commits(rows: pa.Table, hashes: Mapping[int, str]) -> pa.Table:
    known = pa.array([*hashes], pa.int64())
    by_place = pa.array([*hashes.values()], pa.string())
    return rows.append_column(COMMIT, by_place.take(pc.index_in(rows[SNAPSHOT], known)))


def everything(rows: pa.Table, declaration: Declaration) -> pa.Table:
    """All rows, with the columns that changed ones would have."""
    if declaration.commits:
        for name, kind in COMMIT_COLUMNS.items():
            rows = rows.append_column(name, pa.nulls(rows.num_rows, kind))
    deliver = declaration.when_removed == "deliver"
    return ChangedRows(rows, rows.slice(0, 0)).tracked() if deliver else rows


COMMIT_COLUMNS = {ORDINAL: pa.int32(), SNAPSHOT: pa.int64(), COMMIT: pa.string()}


def delivered(consumption: Consumption, one: Input, rows: ChangedRows) -> pa.Table:
    """The rows as the asset is to get them. Raises RowsRemoved."""
    how = consumption.consumer.when_removed
    if how == "deliver":
        return rows.tracked()
    if rows.removed.num_rows and how in ("fail", "apply"):
        raise rows_removed(consumption, one, rows.removed.num_rows)
    return rows.added


def rows_removed(consumption: Consumption, one: Input, count: int) -> RowsRemoved:
    """The error for rows that have gone and cannot be taken out of the asset's table."""
    consumer, what = consumption.consumer, counted(count, "row")
    if consumer.when_removed == "apply":
        columns = [{field.name for field in its.table.schema().fields} for its in consumption.inputs.values()]
        missing = ", ".join(key for key in consumer.spec.keys if any(key not in known for known in columns))
        why = f"{consumer.asset} merges by {missing}, which not every input has"
        hint = f"Give each input the column {missing}, or choose"
    else:
        why = f"{consumer.asset} takes only rows that come"
        hint = "Use an upsert by keys that the input has, or the pattern `keys` or `range`, or choose"
    return RowsRemoved(
        f"{what} of the input {'was' if count == 1 else 'were'} updated or deleted, and {why}.",
        table=one.name,
        hint=f"{hint} consumes(when_removed=…), or compute everything anew with the run tag"
        " branchlake/rebuild=true.",
    )


def changed_keys(consumption: Consumption) -> pa.Table:
    """The keys of all rows that came or went in any input, each once, by the asset's names. Read once."""
    return consumption.once("keys", lambda: _changed_keys(consumption))


def _changed_keys(consumption: Consumption) -> pa.Table:
    keys = list(consumption.replaced_keys)
    found: list[pa.Table] = []
    for one in consumption.inputs.values():
        for group, change in consumption.changes(one.key):
            found += _key_rows(consumption, one, group, change, keys)
    together = pa.concat_tables(found, promote_options="permissive")
    return together.group_by(keys, use_threads=False).aggregate([])


def _key_rows(
    consumption: Consumption, one: Input, group: Group, change: ChangeSet, keys: list[str]
) -> Iterator[pa.Table]:
    where = of_partitions(consumption, one, group.partitions)
    of_input = keys_of_input(consumption, one, keys)
    columns: list[str] | None = list(dict.fromkeys([*of_input, *(where.columns() if where else ())]))
    compared = not change.only_appends and change.rows_changed <= MOST_COMPARED
    if compared:
        columns = None  # what a rewritten file carries along shows in all of its columns
    rows = _inside(RowReader(one.table, change, columns=columns).read(), where)
    if compared:
        rows = without_carried(rows)
    yield rows.added.select(of_input).rename_columns(keys)
    yield rows.removed.select(of_input).rename_columns(keys)


def keys_of_input(consumption: Consumption, one: Input, keys: Sequence[str]) -> list[str]:
    """The columns of an input that hold the asset's key columns `keys`."""
    return [*consumption.consumer.declaration.keys_of(one.key)] if one.pattern == "keys" else [*keys]


def changed_keys_of(consumption: Consumption, one: Input) -> pa.Table:
    """`changed_keys` under the names that the columns have in an input."""
    found = changed_keys(consumption)
    return found.rename_columns(keys_of_input(consumption, one, found.column_names))


def _inside(rows: ChangedRows, where: Selection | None) -> ChangedRows:
    if where is None:
        return rows
    return ChangedRows(*(side.filter(inside(where, side)) for side in (rows.added, rows.removed)))


def _all(parts: Iterator[pa.Table]) -> pa.Table:
    found = list(parts)
    filled = [part for part in found if part.num_rows]
    return pa.concat_tables(filled, promote_options="permissive") if filled else found[0]


def rows_of_keys(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """The rows whose key is among `keys`, null equal to null."""
    names = keys.column_names
    left = pl.DataFrame(pl.from_arrow(rows.select(names))).with_row_index("branchlake_row")
    found = left.join(pl.DataFrame(pl.from_arrow(keys)), on=names, how="semi", nulls_equal=True)
    return rows.take(found["branchlake_row"].to_arrow())


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
