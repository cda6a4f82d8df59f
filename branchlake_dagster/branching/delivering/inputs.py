"""What of an input a consumption gives to its asset, whatever the frame: rows, keys, or a selection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, time

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import DateType

from branchlake_dagster.branching.consuming.consumer import Input
from branchlake_dagster.branching.consuming.consumption import Consumption, Group
from branchlake_dagster.branching.consuming.declaration import Declaration
from branchlake_dagster.branching.consuming.reach import LAST_DAY
from branchlake_dagster.branching.delivering.range_selection import by_days, selection
from branchlake_dagster.branching.errors import RowsRemoved
from branchlake_dagster.branching.table.selection import Selection, inside, select
from branchlake_dagster.changes.model import ChangeSet
from branchlake_dagster.changes.ranges import Range, Ranges
from branchlake_dagster.changes.rows import (
    COMMIT,
    ORDINAL,
    SNAPSHOT,
    ChangedRows,
    RowReader,
    without_carried,
)
from branchlake_dagster.wording import counted

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
