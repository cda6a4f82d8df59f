"""Comparing the tables of a backfill's stages with what they were before it."""

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

from branchlake_dagster.automation.backfill_plan import Stage, selection_of, spec_of
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.internals.dagster import AssetGraph, BackfillState
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieNotFound
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.selection import to_iceberg
from branchlake_dagster.tables.specification import TableSpec

Number = int | float | Decimal

KEY, ROW = "key", "row"
"""The columns of fingerprints."""
_NO_SUMS: Mapping[str, Number | None] = {}


@dataclass(frozen=True)
class Measures:
    """Rows and sums of one state of some rows. `sums` has each numeric column; None: it has no values."""

    rows: int = 0
    sums: Mapping[str, Number | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Some rows before a backfill and now.

    With keys, `changed` counts the keys that came, went or have other rows, of `compared` keys in either
    state. Without keys, an updated row counts once: `changed` is the larger of the rows that came and the
    rows that went, and `compared` the larger of the two row counts. A column that only one state has is not
    compared row by row, and has None for its sum in the other one.
    """

    before: Measures = Measures()
    after: Measures = Measures()
    changed: int = 0
    compared: int = 0

    @property
    def share(self) -> float:
        """The share of changed rows or keys, from 0 to 1."""
        return self.changed / self.compared if self.compared else 0.0

    @property
    def difference(self) -> int:
        """How many rows more there are now."""
        return self.after.rows - self.before.rows

    @property
    def sums(self) -> dict[str, tuple[Number | None, Number | None]]:
        """The sum of each numeric column before and now."""
        names = dict.fromkeys((*self.before.sums, *self.after.sums))
        return {name: (self.before.sums.get(name), self.after.sums.get(name)) for name in names}


@dataclass(frozen=True)
class StageComparison:
    """The comparison of a stage, by partition and in total; None stands for an asset without partitions."""

    number: int
    asset: AssetKey
    keys: tuple[str, ...]
    """The columns by which rows were matched; empty if whole rows were compared."""
    partitions: Mapping[str | None, Comparison]

    @property
    def total(self) -> Comparison:
        """All partitions together. A key that moved from one partition to another counts in both."""
        return total(self.partitions.values())


def total(parts: Iterable[Comparison]) -> Comparison:
    """Comparisons of different rows as one."""
    return reduce(_together, parts, Comparison())


def _together(one: Comparison, other: Comparison) -> Comparison:
    return Comparison(
        _both(one.before, other.before),
        _both(one.after, other.after),
        one.changed + other.changed,
        one.compared + other.compared,
    )


def _both(one: Measures, other: Measures) -> Measures:
    return Measures(one.rows + other.rows, add_sums(one.sums, other.sums))


def add_sums(
    one: Mapping[str, Number | None], other: Mapping[str, Number | None] = _NO_SUMS
) -> dict[str, Number | None]:
    """Sums by column, added; None is a column without values."""
    sums = dict(one)
    for name, value in other.items():
        held = sums.get(name)
        sums[name] = value if held is None else held if value is None else _sum_of(held, value)
    return sums


def _sum_of(one: Number, other: Number) -> Number:
    if isinstance(one, float) or isinstance(other, float):  # a column may have changed its type
        return float(one) + float(other)
    return one + other


def sums_of(frame: pl.DataFrame) -> dict[str, Number | None]:
    """The sum of each numeric column, without NaN; None for a column without values."""
    columns = frame.select(cs.numeric())
    # In 128 bits: Polars lets a sum of 64 bits overflow silently.
    numbers = columns.select(cs.float().fill_nan(None), cs.integer().cast(pl.Int128), cs.decimal())
    if not columns.width:
        return {}
    sums = numbers.select(pl.when(pl.all().count() > 0).then(pl.all().sum())).row(0, named=True)
    return {name: sums[name] for name in columns.columns}


def fingerprints(frame: pl.DataFrame, columns: Sequence[str], keys: Sequence[str]) -> pl.DataFrame:
    """A hash of 64 bits for each row, and with `keys` one of its key: all that is kept of the rows."""
    rows = [frame.select(columns).hash_rows().alias(ROW)]
    return pl.DataFrame([frame.select(keys).hash_rows().alias(KEY), *rows] if keys else rows)


def count_changed(before: pl.DataFrame, after: pl.DataFrame) -> tuple[int, int]:
    """How many rows or keys changed, and of how many, as `Comparison` counts them."""
    columns = before.columns
    sides = [
        frame.group_by(columns).agg(pl.len().cast(pl.Int64).alias(side))
        for frame, side in ((before, "before"), (after, "after"))
    ]
    joined = sides[0].join(sides[1], on=columns, how="full", coalesce=True)
    counted = joined.with_columns(pl.col("before", "after").fill_null(0))
    differing = counted.filter(pl.col("before") != pl.col("after"))
    if KEY in columns:
        return differing[KEY].n_unique(), counted[KEY].n_unique()
    more = differing.select(pl.col("after") - pl.col("before")).to_series()
    came, went = int(more.clip(lower_bound=0).sum()), int(-more.clip(upper_bound=0).sum())
    return max(came, went), max(before.height, after.height)


class EarlierStateLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The state of a table before a backfill cannot be read any more."""


def hash_before(lake: Lakehouse, backfill: BackfillState) -> str | None:
    """The commit of `main` at which a backfill was requested; None if `main` had none.

    `branchlake backfill run` records it. For a backfill that was requested on Dagster's page, it is the
    newest commit that is older than the request by the clocks of Nessie and Dagster.
    """
    if recorded := backfill.tags.get(RunTag.BACKFILL_BASE):
        return recorded
    requested = datetime.fromtimestamp(backfill.requested_at, UTC).isoformat()
    older = lake.nessie.log(MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{requested}')", limit=1)
    newest = next(iter(older), None)
    return newest.commit.hash if newest is not None else None


def compare_stage(graph: AssetGraph, lake: Lakehouse, stage: Stage, before: str | None) -> StageComparison:
    """Compare the rows of the stage's partitions on `main` now with those at commit `before` of `main`.

    Reads both states of one partition after the other, in batches, and keeps 16 bytes for each row. A
    partition whose data files are the same is read once. Raises EarlierStateLost if the commit or files of
    the earlier state are gone.
    """
    spec = spec_of(graph, stage.asset, lake.settings.default_namespace)
    name = spec.name
    try:
        old = _load(lake, spec, f"{MAIN}@{before}") if before is not None else None
        new = _load(lake, spec, f"{MAIN}@{lake.nessie.reference(MAIN).hash}")
        keys = tuple(spec.keys) if _have(spec.keys, old, new) else ()
        pairs = _Pairs(graph, spec, stage.asset, old, new, keys)
        wanted: Sequence[str | None] = (None,) if stage.partitions is None else stage.partitions
        return StageComparison(stage.number, stage.asset, keys, {one: pairs.compare(one) for one in wanted})
    except (NessieNotFound, FileNotFoundError) as error:
        raise EarlierStateLost(
            f"The state of table {name} before the backfill cannot be read any more: {error}",
            table=name,
            hint="Its commit was collected by Nessie, or its snapshots expired and their files were deleted.",
        ) from error


def _load(lake: Lakehouse, spec: TableSpec, ref: str) -> Table | None:
    try:
        return lake.catalog(ref).load_table(spec.identifier)
    except NoSuchTableError:
        return None


def _have(columns: Sequence[str], *tables: Table | None) -> bool:
    """Whether each of the tables has all of the columns."""
    return all(set(columns) <= set(table.schema().column_names) for table in tables if table is not None)


@dataclass(frozen=True)
class _Rows:
    """The rows of a table that belong to one partition."""

    table: Table
    row_filter: BooleanExpression

    def files(self) -> frozenset[tuple[str, frozenset[str]]]:
        """The data files that may hold these rows, each with its delete files."""
        tasks = self.table.scan(row_filter=self.row_filter).plan_files()
        return frozenset(
            (task.file.file_path, frozenset(one.file_path for one in task.delete_files)) for task in tasks
        )

    def frames(self) -> Iterator[pl.DataFrame]:
        """The rows in batches."""
        for batch in self.table.scan(row_filter=self.row_filter).to_arrow_batch_reader():
            frame = pl.from_arrow(batch)
            assert isinstance(frame, pl.DataFrame)  # noqa: S101 - a batch has columns
            yield frame


class _Pairs:
    """Two states of a stage's table."""

    def __init__(
        self,
        graph: AssetGraph,
        spec: TableSpec,
        asset: AssetKey,
        old: Table | None,
        new: Table | None,
        keys: Sequence[str],
    ) -> None:
        self._graph, self._spec, self._asset = graph, spec, asset
        self._old, self._new, self._keys = old, new, keys
        self._types = _types(new)
        self._common = [name for name in _types(old) if name in self._types]

    def compare(self, partition: str | None) -> Comparison:
        old, new = self._rows(self._old, partition), self._rows(self._new, partition)
        if old is None or new is None or not self._common:
            came, went = self._measured(new), self._measured(old)
            rows = max(came.rows, went.rows)
            return Comparison(went, came, rows, rows)
        if old.files() == new.files() and old.table.schema() == new.table.schema():
            same = self._measured(new)
            return Comparison(same, same, 0, same.rows)
        (before, had), (after, has) = self._read(old), self._read(new)
        return Comparison(before, after, *count_changed(had, has))

    def _rows(self, table: Table | None, partition: str | None) -> _Rows | None:
        if table is None:
            return None
        wanted = None if partition is None else [partition]
        selection = selection_of(self._graph, self._spec, self._asset, wanted, table)
        return _Rows(table, AlwaysTrue() if selection is None else to_iceberg(selection, table.schema()))

    @staticmethod
    def _measured(rows: _Rows | None) -> Measures:
        measured = Measures()
        for frame in rows.frames() if rows is not None else ():
            measured = _added(measured, frame)
        return measured

    def _read(self, rows: _Rows) -> tuple[Measures, pl.DataFrame]:
        """The measures of the rows, and their fingerprints in the columns that both states have."""
        measured = Measures()
        names = [KEY, ROW] if self._keys else [ROW]
        prints = [pl.DataFrame(schema=dict.fromkeys(names, pl.UInt64))]
        types = pl.Schema({name: self._types[name] for name in self._common})
        for frame in rows.frames():
            measured = _added(measured, frame)
            # A column may have been widened since: the same value has another hash in another type.
            prints.append(
                fingerprints(frame.select(self._common).cast(types, strict=False), self._common, self._keys)
            )
        return measured, pl.concat(prints)


def _added(measured: Measures, frame: pl.DataFrame) -> Measures:
    return Measures(measured.rows + frame.height, add_sums(measured.sums, sums_of(frame)))


def _types(table: Table | None) -> dict[str, pl.DataType]:
    """The columns of a table with Polars' types."""
    if table is None:
        return {}
    empty = pl.from_arrow(schema_to_pyarrow(table.schema(), include_field_ids=False).empty_table())
    return dict(empty.schema) if isinstance(empty, pl.DataFrame) else {}
