"""Loads the changes of inputs as Arrow tables: changed rows, all rows of changed keys, or changed ranges."""

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
    EqualTo,
    GreaterThanOrEqual,
    In,
    IsNaN,
    IsNull,
    LessThanOrEqual,
    Or,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import DateType, TimestampType, TimestamptzType

from branchlake_dagster.history.change import ChangeSet
from branchlake_dagster.history.ranges import Range, Ranges, merge_ranges
from branchlake_dagster.history.rows import (
    COMMIT,
    ORDINAL,
    SNAPSHOT,
    ChangedRows,
    RowReader,
    drop_unchanged_rows,
)
from branchlake_dagster.incremental.affected_partitions import LAST_DAY
from branchlake_dagster.incremental.consumption import Consumption, PartitionGroup
from branchlake_dagster.incremental.declaration import Declaration, UpstreamTable, require_selectable_keys
from branchlake_dagster.tables.arrow_frames import to_comparable_column
from branchlake_dagster.tables.errors import RowsRemoved, SchemaMismatch
from branchlake_dagster.tables.selection import (
    DateRange,
    Selection,
    TimeRange,
    select_partitions,
    selection_mask,
    to_iceberg_filter,
)
from branchlake_dagster.wording import format_count

_DAY = timedelta(days=1)
_TICK = timedelta(microseconds=1)


def widen_to_days(ranges: Ranges) -> Ranges:
    """Return ranges of dates that contain `ranges`. The days of time stamps are in UTC."""
    return Ranges(merge_ranges([Range(_to_date(part.low), _to_date(part.high)) for part in ranges.parts]))


def select_ranges(ranges: Ranges, column: str, schema: Schema, *, table: str) -> Selection:
    """Return a selection of the rows whose column has a value in the ranges.

    On a column of time stamps, a date means its whole day in UTC. Raises SchemaMismatch, which names the
    `table`, if the column does not exist or is neither a date nor a time stamp, and for a range that ends
    after `LAST_DAY`.
    """
    try:
        kind = schema.find_type(column)
    except ValueError as error:
        raise SchemaMismatch(
            f"The table has no column {column}, whose changed ranges are consumed.",
            table=table,
            hint=f"Its columns are {', '.join(field.name for field in schema.fields)}.",
        ) from error
    try:
        if isinstance(kind, DateType):
            days = widen_to_days(ranges)
            return Selection(tuple((DateRange(column, part.low, part.high + _DAY),) for part in days.parts))
        if isinstance(kind, TimestampType | TimestamptzType):
            intervals = _iter_time_ranges(ranges)
            return Selection(tuple((TimeRange(column, start, end),) for start, end in intervals))
    except OverflowError as error:
        raise SchemaMismatch(
            f"Column {column} has changed rows at the end of the calendar. A range of results cannot end"
            f" after {LAST_DAY}.",
            table=table,
            hint="Mark an open end by null or by an earlier day, or use the pattern `keys`.",
        ) from error
    raise SchemaMismatch(
        f"Column {column} has type {kind}. Only ranges of dates and time stamps can be replaced.",
        table=table,
        hint="Name a date or time stamp column, or use the pattern `keys`.",
    )


def _iter_time_ranges(ranges: Ranges) -> Iterable[tuple[datetime, datetime]]:
    for part in ranges.parts:
        if isinstance(part.low, datetime):
            yield _to_utc(part.low), _to_utc(part.high) + _TICK
        else:
            yield _utc_midnight(part.low), _utc_midnight(part.high) + _DAY


def _to_date(value: Any) -> date:
    return value.date() if isinstance(value, datetime) else value


def _to_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _utc_midnight(value: date) -> datetime:
    return datetime(value.year, value.month, value.day, tzinfo=UTC)


MAX_COMPARED_ROWS = 1_000_000
"""Up to this many changed rows are read with all columns and compared.

The comparison finds unchanged rows of rewritten files.
"""


def select_partition_rows(
    consumption: Consumption, upstream: UpstreamTable, partitions: tuple[str, ...]
) -> Selection | None:
    """Select the rows of an input that the asset's partitions depend on. None means all rows.

    An input that lacks the column of a dimension has the same rows for all keys of that dimension.
    """
    consumer = consumption.consumer
    if not consumer.tracks_partitions or consumer.definition is None:
        return None
    columns = consumer.columns_of_input(upstream.key, upstream.table)
    if not columns:
        return None
    return select_partitions(
        partitions,
        consumer.definition,
        columns,
        schema=upstream.table.schema(),
        table_name=upstream.name,
        map_window=consumer.reach_of(upstream.key).required_window,
        all_dimensions=False,
    )


def select_range_rows(consumption: Consumption, upstream: UpstreamTable) -> Selection | None:
    """Select the rows of an input that results of the changed ranges depend on. None means all rows.

    For a partitioned asset, or if everything is consumed, these are the rows that the run's partitions depend
    on, see `select_partition_rows`.
    """
    if consumption.whole or consumption.consumer.tracks_partitions:
        return select_partition_rows(consumption, upstream, consumption.partitions)
    ranges = consumption.consumer.reach_of(upstream.key).widen_ranges(
        target_ranges(consumption), to_required_rows=True
    )
    return select_ranges(
        ranges, _range_column(consumption, upstream), upstream.table.schema(), table=upstream.name
    )


def target_ranges(consumption: Consumption) -> Ranges:
    """Return the ranges of results that the changes of all inputs affect.

    They are whole days if the asset's column or an input's range column is a date. With `from_start` they are
    one range, from the smallest changed value on.
    """
    declaration = consumption.consumer.declaration
    ranges = consumption.affected_ranges
    if declaration.from_start:
        ranges = extend_to_last_day(ranges)
    has_dates = any(
        isinstance(upstream.table.schema().find_type(_range_column(consumption, upstream)), DateType)
        for upstream in consumption.inputs.values()
    )
    own_type = consumption.target_column_type(declaration.range_column or "")
    return widen_to_days(ranges) if has_dates or isinstance(own_type, DateType) else ranges


def extend_to_last_day(ranges: Ranges) -> Ranges:
    """Return ranges with one part, from the smallest value to `LAST_DAY`.

    Ranges without parts, or with any value, are returned unchanged.
    """
    if ranges.anything or not ranges.parts:
        return ranges
    low = ranges.parts[0].low
    last = datetime.combine(LAST_DAY, time.max, low.tzinfo) if isinstance(low, datetime) else LAST_DAY
    return replace(ranges, parts=(Range(low, last),))


def _range_column(consumption: Consumption, upstream: UpstreamTable) -> str:
    column_name = consumption.consumer.declaration.range_column_of(upstream.key)
    assert column_name is not None  # noqa: S101 - checked by `build_consumer`
    return column_name


def read_changed_rows(consumption: Consumption, upstream: UpstreamTable) -> ChangedRows:
    """Read the added and removed rows of an input.

    Rows that are in both, because a file was rewritten, are left out. For a partitioned asset, only rows of
    the run's partitions are returned. With `commits=True` the rows have the columns `COMMIT_COLUMNS`.
    """
    parts = [
        _filter_rows(
            RowReader(upstream.table, change, commits=consumption.consumer.declaration.commits).read(),
            select_partition_rows(consumption, upstream, group.partitions),
        )
        for group, change in consumption.changes(upstream.key)
    ]
    all_rows = ChangedRows(
        _concat_tables(part.added for part in parts), _concat_tables(part.removed for part in parts)
    )
    net_rows = drop_unchanged_rows(all_rows)
    if not consumption.consumer.declaration.commits:
        return net_rows
    hashes = {
        number: commit.hash for commit in consumption.commits(upstream.key) for number in commit.snapshots
    }
    return ChangedRows(
        _add_commit_hashes(net_rows.added, hashes), _add_commit_hashes(net_rows.removed, hashes)
    )


def _add_commit_hashes(rows: pa.Table, hashes: Mapping[int, str]) -> pa.Table:
    snapshot_ids = pa.array([*hashes], pa.int64())
    commit_hashes = pa.array([*hashes.values()], pa.string())
    return rows.append_column(COMMIT, commit_hashes.take(pc.index_in(rows[SNAPSHOT], snapshot_ids)))


def add_change_columns(rows: pa.Table, declaration: Declaration) -> pa.Table:
    """Add the columns that changed rows have, for an input that is consumed as a whole.

    The commit columns are null, and the change type is INSERT. Each is added only if the declaration asks for
    it.
    """
    if declaration.commits:
        for name, kind in COMMIT_COLUMNS.items():
            rows = rows.append_column(name, pa.nulls(rows.num_rows, kind))
    deliver = declaration.when_removed == "deliver"
    return ChangedRows(rows, rows.slice(0, 0)).with_change_types() if deliver else rows


COMMIT_COLUMNS = {ORDINAL: pa.int32(), SNAPSHOT: pa.int64(), COMMIT: pa.string()}


def deliver_rows(consumption: Consumption, upstream: UpstreamTable, rows: ChangedRows) -> pa.Table:
    """Return the changed rows as the asset gets them by `when_removed`.

    With `deliver`, these are added and removed rows with their change type; otherwise only the added rows.
    Raises RowsRemoved if there are removed rows that the asset's table cannot follow.
    """
    policy = consumption.consumer.when_removed
    if policy == "deliver":
        return rows.with_change_types()
    if rows.removed.num_rows and policy in ("fail", "apply"):
        raise rows_removed_error(consumption, upstream, rows.removed.num_rows)
    return rows.added


def rows_removed_error(consumption: Consumption, upstream: UpstreamTable, count: int) -> RowsRemoved:
    """Return the error for removed rows of an input that the asset's table cannot follow.

    `count` is the number of these rows, which were updated or deleted.
    """
    consumer, what = consumption.consumer, format_count(count, "row")
    if consumer.when_removed == "apply":
        columns = [
            {field.name for field in source.table.schema().fields} for source in consumption.inputs.values()
        ]
        missing = ", ".join(
            key for key in consumer.spec.keys if any(key not in column_names for column_names in columns)
        )
        why = f"asset {consumer.asset} merges by the keys {missing}, which some inputs lack"
        hint = f"Add the columns {missing} to every input, or set"
    else:
        why = f"asset {consumer.asset} accepts only new rows"
        hint = "Use an upsert by keys that the input has, or the pattern `keys` or `range`, or set"
    return RowsRemoved(
        f"{what} of the input {'was' if count == 1 else 'were'} updated or deleted, but {why}.",
        table=upstream.name,
        hint=f"{hint} consumes(when_removed=…), or compute everything anew with the run tag"
        " branchlake/rebuild=true.",
    )


def read_changed_keys(consumption: Consumption) -> pa.Table:
    """Read the keys of all rows that were added or removed in any input, each key once.

    The columns have the names of the asset's own keys. The keys are read once per step.
    """
    return consumption.get_or_compute("keys", lambda: _collect_changed_keys(consumption))


def _collect_changed_keys(consumption: Consumption) -> pa.Table:
    keys = list(consumption.replaced_keys)
    key_tables: list[pa.Table] = []
    for upstream in consumption.inputs.values():
        for group, change in consumption.changes(upstream.key):
            key_tables += _iter_changed_keys(consumption, upstream, group, change, keys)
    all_keys = pa.concat_tables(key_tables, promote_options="permissive")
    # Polars finds NaN equal to NaN, and -0.0 equal to 0.0, as Spark does. Arrow distinguishes the zeros.
    numbered_keys = _to_polars_keys(all_keys).with_row_index(_KEY_ROW)
    first_rows = numbered_keys.unique(subset=keys, keep="first", maintain_order=True)[_KEY_ROW]
    return all_keys.take(first_rows.to_arrow())


_KEY_ROW = "__branchlake_row"


def _to_polars_keys(keys: pa.Table) -> pl.DataFrame:
    return pl.DataFrame(
        {name: pl.Series(pl.from_arrow(to_comparable_column(keys[name]))) for name in keys.column_names}
    )


def _iter_changed_keys(
    consumption: Consumption,
    upstream: UpstreamTable,
    group: PartitionGroup,
    change: ChangeSet,
    keys: list[str],
) -> Iterator[pa.Table]:
    where = select_partition_rows(consumption, upstream, group.partitions)
    key_columns = input_key_columns(consumption, upstream, keys)
    require_selectable_keys(upstream.table, key_columns, upstream.name)
    columns: list[str] | None = list(dict.fromkeys([*key_columns, *(where.column_names() if where else ())]))
    compares_rows = not change.only_appends and change.rows_changed <= MAX_COMPARED_ROWS
    if compares_rows:
        columns = None  # all columns are needed to recognize unchanged rows
    rows = _filter_rows(RowReader(upstream.table, change, columns=columns).read(), where)
    if compares_rows:
        rows = drop_unchanged_rows(rows)
    yield rows.added.select(key_columns).rename_columns(keys)
    yield rows.removed.select(key_columns).rename_columns(keys)


def input_key_columns(consumption: Consumption, upstream: UpstreamTable, keys: Sequence[str]) -> list[str]:
    """Return the columns of an input that correspond to the asset's key columns `keys`, in the same order.

    An input with the pattern `keys` may declare other names; any other input has the same names.
    """
    return (
        [*consumption.consumer.declaration.key_columns_of(upstream.key)]
        if upstream.pattern == "keys"
        else [*keys]
    )


def read_input_keys(consumption: Consumption, upstream: UpstreamTable) -> pa.Table:
    """Return the keys that changed in any input, each key once, with the column names of input `upstream`."""
    changed_keys = read_changed_keys(consumption)
    return changed_keys.rename_columns(input_key_columns(consumption, upstream, changed_keys.column_names))


def _filter_rows(rows: ChangedRows, where: Selection | None) -> ChangedRows:
    if where is None:
        return rows
    return ChangedRows(*(side.filter(selection_mask(where, side)) for side in (rows.added, rows.removed)))


def _concat_tables(parts: Iterator[pa.Table]) -> pa.Table:
    tables = list(parts)
    non_empty = [part for part in tables if part.num_rows]
    return pa.concat_tables(non_empty, promote_options="permissive") if non_empty else tables[0]


def filter_by_keys(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Return the rows of an Arrow table whose key is among `keys`. Null equals null."""
    names = keys.column_names
    row_keys = _to_polars_keys(rows.select(names)).with_row_index(_KEY_ROW)
    matches = row_keys.join(_to_polars_keys(keys), on=names, how="semi", nulls_equal=True)
    return rows.take(matches[_KEY_ROW].to_arrow())


MAX_LITERALS = 2_000
"""If a key column has more values, a filter uses only its lowest and highest value."""


def load_rows(consumption: Consumption, upstream: UpstreamTable) -> pa.Table:
    """Load the rows of an input for the asset, by its pattern.

    Returns the changed rows, all rows of changed keys, or all rows in changed ranges; all rows if everything
    is consumed. Raises RowsRemoved, RowsUnreadable and ChangeLost.
    """
    where = select_partition_rows(consumption, upstream, consumption.partitions)
    if upstream.pattern == "range":
        return _scan_table(
            upstream.table, _row_filter(select_range_rows(consumption, upstream), upstream.table)
        )
    if consumption.whole:
        rows = _scan_table(upstream.table, _row_filter(where, upstream.table))
        return (
            add_change_columns(rows, consumption.consumer.declaration) if upstream.pattern == "rows" else rows
        )
    if not consumption.replaced_keys:
        return deliver_rows(consumption, upstream, read_changed_rows(consumption, upstream))
    keys = read_input_keys(consumption, upstream)
    rows = _scan_table(upstream.table, And(_row_filter(where, upstream.table), key_prefilter(keys)))
    return filter_by_keys(rows, keys)


def _scan_table(table: Table, row_filter: BooleanExpression) -> pa.Table:
    return table.scan(row_filter=row_filter).to_arrow()


def _row_filter(selection: Selection | None, table: Table) -> BooleanExpression:
    return AlwaysTrue() if selection is None else to_iceberg_filter(selection, table.schema())


def key_prefilter(keys: pa.Table) -> BooleanExpression:
    """Return a filter that matches all rows of the keys, and few others.

    PyIceberg can apply it to the column metrics of files, so that it reads fewer files.
    """
    if not keys.num_rows:
        return AlwaysFalse()
    return reduce(And, (_column_filter(name, keys[name]) for name in keys.column_names), AlwaysTrue())


def _column_filter(name: str, values: pa.ChunkedArray) -> BooleanExpression:
    present = pc.unique(values.drop_null())
    conditions: list[BooleanExpression] = [IsNull(name)] if values.null_count else []
    if len(present) <= MAX_LITERALS:
        conditions += match_values(name, present)
    else:
        ends = pc.min_max(present).as_py()
        conditions.append(And(GreaterThanOrEqual(name, ends["min"]), LessThanOrEqual(name, ends["max"])))
        if _has_nan(present):
            conditions.append(IsNaN(name))
    return reduce(Or, conditions) if conditions else AlwaysTrue()


def match_values(name: str, values: pa.Array) -> list[BooleanExpression]:
    """Return conditions of which one is true for each row that has one of `values` in the column `name`.

    `values` has no null. NaN equals NaN, and -0.0 equals 0.0. Without values there is no condition.
    """
    conditions: list[BooleanExpression] = []
    if pa.types.is_floating(values.type):
        # PyIceberg has no literal for NaN. Arrow's `is_in` distinguishes the zeros, its `equal` does not.
        is_nan, is_zero = pc.is_nan(values), pc.equal(values, 0.0)
        conditions += [IsNaN(name)] if pc.any(is_nan).as_py() else []
        conditions += [EqualTo(name, 0.0)] if pc.any(is_zero).as_py() else []
        values = values.filter(pc.invert(pc.or_(is_nan, is_zero)))
    return [*conditions, *([In(name, tuple(values.to_pylist()))] if len(values) else [])]


def _has_nan(values: pa.Array) -> bool:
    return pa.types.is_floating(values.type) and bool(pc.any(pc.is_nan(values)).as_py())
