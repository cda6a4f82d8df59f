"""Compare the tables of a backfill's stages with their state before the backfill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import reduce

import polars as pl
import polars.selectors as cs
from dagster import AssetKey
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table

from branchlake_dagster.automation.backfill_plan import Stage, asset_table_spec, partition_selection
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.internals.dagster import AssetGraph, BackfillState
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieNotFound
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.selection import to_iceberg_filter
from branchlake_dagster.tables.specification import TableSpec

Number = int | float | Decimal

KEY, ROW = "key", "row"
"""The columns of a frame of fingerprints: the hash of a row's key and the hash of the row."""
_NO_SUMS: Mapping[str, Number | None] = {}


@dataclass(frozen=True)
class Measures:
    """The number of rows, and the sum of each numeric column by name.

    The sum is None for a column without values.
    """

    rows: int = 0
    sums: Mapping[str, Number | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The difference between some rows before a backfill and the same rows now.

    With keys, `changed_count` counts the keys that were added, removed or have other rows, and
    `compared_count` counts all keys of both states. Without keys, an updated row counts once: `changed_count`
    is the larger of the numbers of added and of removed rows, and `compared_count` the larger of the two row
    counts. A column that only one state has is not compared; its sum in the other state is None.
    """

    before: Measures = Measures()
    after: Measures = Measures()
    changed_count: int = 0
    compared_count: int = 0

    @property
    def share(self) -> float:
        """The share of changed rows or keys, from 0 to 1."""
        return self.changed_count / self.compared_count if self.compared_count else 0.0

    @property
    def row_difference(self) -> int:
        """The number of rows now minus the number of rows before the backfill."""
        return self.after.rows - self.before.rows

    @property
    def sums(self) -> dict[str, tuple[Number | None, Number | None]]:
        """The sums of each numeric column, as (before, now).

        The sum of a state is None if its column has no values, or if it does not have the column.
        """
        names = dict.fromkeys((*self.before.sums, *self.after.sums))
        return {name: (self.before.sums.get(name), self.after.sums.get(name)) for name in names}


@dataclass(frozen=True)
class StageComparison:
    """The comparisons of a stage's partitions. The key None means an asset without partitions."""

    number: int
    asset: AssetKey
    keys: tuple[str, ...]
    """The columns by which rows were matched; empty if whole rows were compared."""
    partitions: Mapping[str | None, Comparison]

    @property
    def total(self) -> Comparison:
        """The comparison of all partitions together. A key that moved to another partition counts in both."""
        return sum_comparisons(self.partitions.values())


def sum_comparisons(parts: Iterable[Comparison]) -> Comparison:
    """Return one comparison that adds up `parts`, which compare different rows; all zeros without parts."""
    return reduce(_add_comparisons, parts, Comparison())


def _add_comparisons(left: Comparison, right: Comparison) -> Comparison:
    return Comparison(
        _add_measures(left.before, right.before),
        _add_measures(left.after, right.after),
        left.changed_count + right.changed_count,
        left.compared_count + right.compared_count,
    )


def _add_measures(left: Measures, right: Measures) -> Measures:
    return Measures(left.rows + right.rows, add_sums(left.sums, right.sums))


def add_sums(
    left: Mapping[str, Number | None], right: Mapping[str, Number | None] = _NO_SUMS
) -> dict[str, Number | None]:
    """Return the column sums of two sets of rows together, from the column sums of each set.

    `left` and `right` map a column name to its sum; None is the sum of a column without values. A column
    that only one of them has keeps its sum.
    """
    sums = dict(left)
    for name, value in right.items():
        previous = sums.get(name)
        sums[name] = (
            value if previous is None else previous if value is None else _add_numbers(previous, value)
        )
    return sums


def _add_numbers(left: Number, right: Number) -> Number:
    if isinstance(left, float) or isinstance(right, float):  # a column may have changed its type
        return float(left) + float(right)
    return left + right


def column_sums(frame: pl.DataFrame) -> dict[str, Number | None]:
    """Return the sum of each numeric column; NaN is skipped. None for a column without values."""
    columns = frame.select(cs.numeric())
    # The sums use 128 bits, because a sum of 64 bits overflows silently in Polars.
    numbers = columns.select(cs.float().fill_nan(None), cs.integer().cast(pl.Int128), cs.decimal())
    if not columns.width:
        return {}
    sums = numbers.select(pl.when(pl.all().count() > 0).then(pl.all().sum())).row(0, named=True)
    return {name: sums[name] for name in columns.columns}


def fingerprint_rows(frame: pl.DataFrame, columns: Sequence[str], keys: Sequence[str]) -> pl.DataFrame:
    """Return a frame with a 64-bit hash of each row in `ROW` and, with `keys`, of its key in `KEY`.

    `columns` are the columns that the hash of a row covers.
    """
    rows = [frame.select(columns).hash_rows().alias(ROW)]
    return pl.DataFrame([frame.select(keys).hash_rows().alias(KEY), *rows] if keys else rows)


def count_changes(before: pl.DataFrame, after: pl.DataFrame) -> tuple[int, int]:
    """Return the counts of changed and of compared rows or keys, as `Comparison` defines them.

    Both frames are results of `fingerprint_rows`.
    """
    columns = before.columns
    sides = [
        frame.group_by(columns).agg(pl.len().cast(pl.Int64).alias(side))
        for frame, side in ((before, "before"), (after, "after"))
    ]
    both_sides = sides[0].join(sides[1], on=columns, how="full", coalesce=True)
    row_counts = both_sides.with_columns(pl.col("before", "after").fill_null(0))
    changed_rows = row_counts.filter(pl.col("before") != pl.col("after"))
    if KEY in columns:
        return changed_rows[KEY].n_unique(), row_counts[KEY].n_unique()
    row_changes = changed_rows.select(pl.col("after") - pl.col("before")).to_series()
    added_count, removed_count = (
        int(row_changes.clip(lower_bound=0).sum()),
        int(-row_changes.clip(upper_bound=0).sum()),
    )
    return max(added_count, removed_count), max(before.height, after.height)


class EarlierStateLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The state of a table before a backfill can no longer be read."""


def find_base_hash(lake: Lakehouse, backfill: BackfillState) -> str | None:
    """Return the hash of `main` when a backfill was requested; None if `main` had no commit.

    `branchlake backfill run` records this hash. For a backfill from Dagster's page, it is the newest commit
    before the request, by the clocks of Nessie and Dagster.
    """
    if base_hash := backfill.tags.get(RunTag.BACKFILL_BASE):
        return base_hash
    requested_at = datetime.fromtimestamp(backfill.requested_at, UTC).isoformat()
    older_entries = lake.nessie.log(
        MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{requested_at}')", limit=1
    )
    newest_entry = next(iter(older_entries), None)
    return newest_entry.commit.hash if newest_entry is not None else None


def compare_stage(graph: AssetGraph, lake: Lakehouse, stage: Stage, base_hash: str | None) -> StageComparison:
    """Compare the rows of the stage's partitions on `main` now with those at commit `base_hash` of `main`.

    If `base_hash` is None, the table had no rows before. Reads the partitions one after the other, both
    states in batches, and keeps at most 16 bytes for each row. A partition whose data files and schema are
    unchanged is read once. Raises EarlierStateLost if the commit or the files of the earlier state no longer
    exist.
    """
    spec = asset_table_spec(graph, stage.asset, lake.settings.default_namespace)
    table_name = spec.name
    try:
        old_table = _load_existing_table(lake, spec, f"{MAIN}@{base_hash}") if base_hash is not None else None
        new_table = _load_existing_table(lake, spec, f"{MAIN}@{lake.nessie.reference(MAIN).hash}")
        keys = tuple(spec.keys) if _have_columns(spec.keys, old_table, new_table) else ()
        table_pair = _TablePair(graph, spec, stage.asset, old_table, new_table, keys)
        partition_keys: Sequence[str | None] = (None,) if stage.partitions is None else stage.partitions
        return StageComparison(
            stage.number,
            stage.asset,
            keys,
            {partition: table_pair.compare_partition(partition) for partition in partition_keys},
        )
    except (NessieNotFound, FileNotFoundError) as error:
        raise EarlierStateLost(
            f"The state of table {table_name} before the backfill can no longer be read: {error}",
            table=table_name,
            hint="Nessie's GC removed its commit, or its snapshots expired and their files were deleted.",
        ) from error


def _load_existing_table(lake: Lakehouse, spec: TableSpec, ref: str) -> Table | None:
    try:
        return lake.catalog(ref).load_table(spec.identifier)
    except NoSuchTableError:
        return None


def _have_columns(columns: Sequence[str], *tables: Table | None) -> bool:
    """Return whether each of the existing tables has all of the columns."""
    return all(set(columns) <= set(table.schema().column_names) for table in tables if table is not None)


@dataclass(frozen=True)
class _PartitionRows:
    """The rows of a table that belong to one partition."""

    table: Table
    row_filter: BooleanExpression

    def plan_files(self) -> frozenset[tuple[str, frozenset[str]]]:
        """Return the data files that may contain these rows, each with its delete files."""
        tasks = self.table.scan(row_filter=self.row_filter).plan_files()
        return frozenset(
            (task.file.file_path, frozenset(delete_file.file_path for delete_file in task.delete_files))
            for task in tasks
        )

    def iter_frames(self) -> Iterator[pl.DataFrame]:
        """Yield the rows in batches."""
        for batch in self.table.scan(row_filter=self.row_filter).to_arrow_batch_reader():
            frame = pl.from_arrow(batch)
            assert isinstance(frame, pl.DataFrame)  # noqa: S101 - a batch has columns
            yield frame


class _TablePair:
    """Compares the table of a stage before the backfill (`old_table`) with the table now (`new_table`).

    None means that the table did not exist.
    """

    def __init__(
        self,
        graph: AssetGraph,
        spec: TableSpec,
        asset: AssetKey,
        old_table: Table | None,
        new_table: Table | None,
        keys: Sequence[str],
    ) -> None:
        self._graph, self._spec, self._asset = graph, spec, asset
        self._old_table, self._new_table, self._keys = old_table, new_table, keys
        self._column_types = _polars_types(new_table)
        self._common_columns = [name for name in _polars_types(old_table) if name in self._column_types]

    def compare_partition(self, partition: str | None) -> Comparison:
        old_rows, new_rows = (
            self._select_rows(self._old_table, partition),
            self._select_rows(self._new_table, partition),
        )
        if old_rows is None or new_rows is None or not self._common_columns:
            new_measures, old_measures = self._measure_rows(new_rows), self._measure_rows(old_rows)
            row_count = max(new_measures.rows, old_measures.rows)
            return Comparison(old_measures, new_measures, row_count, row_count)
        if (
            old_rows.plan_files() == new_rows.plan_files()
            and old_rows.table.schema() == new_rows.table.schema()
        ):
            measures = self._measure_rows(new_rows)
            return Comparison(measures, measures, 0, measures.rows)
        (before, old_hashes), (after, new_hashes) = (
            self._read_row_hashes(old_rows),
            self._read_row_hashes(new_rows),
        )
        return Comparison(before, after, *count_changes(old_hashes, new_hashes))

    def _select_rows(self, table: Table | None, partition: str | None) -> _PartitionRows | None:
        if table is None:
            return None
        partition_keys = None if partition is None else [partition]
        selection = partition_selection(self._graph, self._spec, self._asset, partition_keys, table)
        return _PartitionRows(
            table, AlwaysTrue() if selection is None else to_iceberg_filter(selection, table.schema())
        )

    @staticmethod
    def _measure_rows(rows: _PartitionRows | None) -> Measures:
        measures = Measures()
        for frame in rows.iter_frames() if rows is not None else ():
            measures = _add_frame(measures, frame)
        return measures

    def _read_row_hashes(self, rows: _PartitionRows) -> tuple[Measures, pl.DataFrame]:
        """Return the measures of the rows, and fingerprints over the columns that both states have."""
        measures = Measures()
        names = [KEY, ROW] if self._keys else [ROW]
        hash_frames = [pl.DataFrame(schema=dict.fromkeys(names, pl.UInt64))]
        types = pl.Schema({name: self._column_types[name] for name in self._common_columns})
        for frame in rows.iter_frames():
            measures = _add_frame(measures, frame)
            # A column may have been widened since. The same value has another hash in another type.
            hash_frames.append(
                fingerprint_rows(
                    frame.select(self._common_columns).cast(types, strict=False),
                    self._common_columns,
                    self._keys,
                )
            )
        return measures, pl.concat(hash_frames)


def _add_frame(measures: Measures, frame: pl.DataFrame) -> Measures:
    return Measures(measures.rows + frame.height, add_sums(measures.sums, column_sums(frame)))


def _polars_types(table: Table | None) -> dict[str, pl.DataType]:
    """Return the Polars type of each column; no columns if the table does not exist."""
    if table is None:
        return {}
    empty = pl.from_arrow(schema_to_pyarrow(table.schema(), include_field_ids=False).empty_table())
    return dict(empty.schema) if isinstance(empty, pl.DataFrame) else {}
