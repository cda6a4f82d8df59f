"""How the rows of a stage differ from those that they replaced: counts, sums, share of changed rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import reduce

import polars as pl
import polars.selectors as cs
from dagster import AssetKey

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
        sums[name] = value if held is None else held if value is None else _added(held, value)
    return sums


def _added(one: Number, other: Number) -> Number:
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
