"""Compute the error model from Arrow batches, by functions for Spark's ``mapInArrow``.

Each function reads all batches of a Spark partition at once. Its docstring says which rows have to be
together in a partition. The results do not depend on how the rows are divided otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.trust.classes import CLASSES, orbit_class_codes
from branchlake_dagster.sda.trust.differences import (
    LAGS,
    Differences,
    FirstPairs,
    compute_differences,
    count_pairs,
)
from branchlake_dagster.sda.trust.growth import (
    AGE_BINS,
    AXES,
    BinStatistics,
    ErrorGrowth,
    find_age_bins,
    fit_growth,
    object_factors,
    summarize_bins,
)
from branchlake_dagster.sda.trust.jumps import (
    JUMP_SIGNS,
    find_jumps,
    find_swaps,
)

Batches = Iterable[pa.RecordBatch]
BatchFunction = Callable[[Batches], Iterator[pa.RecordBatch]]

_UTC = pa.timestamp("us", "UTC")
_MAX_BATCH_ROWS = 50_000
_MEDIAN_OF_SIGMA = 0.674_489_750
"""The median of the absolute value of a Gaussian variable with sigma one."""

HISTORY_INPUT = (*Elements.COLUMNS, "collected_at", "snapshot_id")
"""Columns of `element_history` that the error model reads."""

SET_SCHEMA = pa.schema(
    [
        pa.field("sat_no", pa.int64()),
        pa.field("epoch", _UTC),
        *(pa.field(name, pa.float64()) for name in ELEMENT_FIELDS),
    ]
)
"""One row per element set that is compared."""

COMPARED_OBJECT_SCHEMA = pa.schema(
    [
        pa.field("sat_no", pa.int64()),
        pa.field("class_code", pa.int64()),
        *(pa.field(f"pairs_of_lag_{lag}", pa.int64()) for lag in LAGS),
    ]
)
"""One row per object: the class of its newest set (an index of `CLASSES`), and its numbers of pairs."""

PAIR_SCHEMA = pa.schema(
    [
        pa.field("sat_no", pa.int64()),
        pa.field("older_index", pa.int64()),
        pa.field("lag", pa.int64()),
        pa.field("older_epoch", _UTC),
        pa.field("newer_epoch", _UTC),
        pa.field("class_code", pa.int64()),
        pa.field("age_bin", pa.int64()),
        pa.field("age_days", pa.float64()),
        *(pa.field(f"difference_{axis}", pa.float64()) for axis in AXES),
    ]
)
"""One row per compared pair of sets. ``older_index`` counts the sets of an object by epoch, from 0.
``class_code`` is the class of the newer set. The differences are older minus newer, as in `Differences`."""

JUMP_SCHEMA = pa.schema(
    [
        *PAIR_SCHEMA,
        pa.field("kind", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("sigmas", pa.float64()),
    ]
)
"""One row per jump: the pair of the set before it and the set that jumps, and what `find_jumps` found."""

SWAP_INPUT_SCHEMA = pa.schema(
    [
        pa.field("sat_no", pa.int64()),
        pa.field("older_epoch", _UTC),
        pa.field("newer_epoch", _UTC),
        *(pa.field(f"{side}_{name}", pa.float64()) for side in ("older", "newer") for name in ELEMENT_FIELDS),
    ]
)
"""One row per jump: the element sets before and after it."""

SWAP_SCHEMA = pa.schema(
    [pa.field("sat_no", pa.int64()), pa.field("newer_epoch", _UTC), pa.field("taken_for", pa.int64())]
)
"""One row per jump of the kind `swap`, and the object whose orbit the newer set continues."""

STATISTIC_SCHEMA = pa.schema(
    [
        pa.field("class_code", pa.int64()),
        pa.field("age_bin", pa.int64()),
        pa.field("samples", pa.int64()),
        pa.field("age_days", pa.float64()),
        *(pa.field(name, pa.list_(pa.float64())) for name in ("sigma", "p95", "median")),
    ]
)
"""One row per class and age bin. Lists have one value for each of `AXES`; unknown values are NaN."""

GROWTH_SCHEMA = pa.schema(
    [
        *STATISTIC_SCHEMA,
        *(pa.field(name, pa.list_(pa.float64())) for name in ("fitted", "sigma0", "rate", "power")),
        pa.field("source_code", pa.int64()),
        pa.field("until_days", pa.float64()),
    ]
)
"""One row per class and age bin, with the curve of the class. ``fitted`` is the curve at ``age_days``."""

FACTOR_SCHEMA = pa.schema(
    [
        pa.field("sat_no", pa.int64()),
        pa.field("samples", pa.int64()),
        *(pa.field(f"factor_{axis}", pa.float64()) for axis in AXES),
    ]
)
"""One row per object with differences: its factors on the curves of its class."""


def select_latest_sets(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Select the latest element set (`SET_SCHEMA`) per object and epoch from rows of `HISTORY_INPUT`.

    If two files have different sets of one epoch, the later one is a correction. All sets of an object must
    be in one partition.
    """
    table = _read_batches(batches)
    if table is None:
        return
    keys = [(name, "ascending") for name in ("sat_no", "epoch", "collected_at", "snapshot_id")]
    table = table.take(pc.sort_indices(table, sort_keys=keys, null_placement="at_start"))
    sets = table.select(SET_SCHEMA.names).cast(SET_SCHEMA)
    sat_no, epoch = sets.column("sat_no").to_numpy(), sets.column("epoch").cast(pa.int64()).to_numpy()
    is_last = np.ones(len(sat_no), np.bool_)
    is_last[:-1] = (sat_no[1:] != sat_no[:-1]) | (epoch[1:] != epoch[:-1])
    yield from _divide(sets.filter(pa.array(is_last)))


def describe_objects(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Return the orbit class and the numbers of pairs of each object (`COMPARED_OBJECT_SCHEMA`).

    All sets of an object must be in one partition.
    """
    table = _read_batches(batches)
    if table is None:
        return
    history = _sorted_elements(table)
    sat_nos, counts = count_pairs(history)
    newest = np.searchsorted(history.sat_no, sat_nos, side="right") - 1
    columns = [sat_nos, orbit_class_codes(history.take(newest)), *counts.T]
    yield from _divide(_build_table(columns, COMPARED_OBJECT_SCHEMA))


def build_first_pairs(objects: pa.Table) -> FirstPairs:
    """Number the pairs of element sets of all objects, from their counts (`COMPARED_OBJECT_SCHEMA`)."""
    counts = np.column_stack([objects.column(f"pairs_of_lag_{lag}").to_numpy() for lag in LAGS])
    return FirstPairs.from_counts(objects.column("sat_no").to_numpy(), counts.astype(np.int64))


def compare_batches(first_pairs: FirstPairs) -> BatchFunction:
    """Return a function that compares older with newer element sets (`SET_SCHEMA` to `PAIR_SCHEMA`).

    All sets of an object must be in one partition.
    """

    def compare(batches: Batches) -> Iterator[pa.RecordBatch]:
        table = _read_batches(batches)
        if table is None:
            return
        history = _sorted_elements(table)
        differences = compute_differences(history, first_pairs)
        older, newer = differences.older, differences.newer
        columns = [
            history.sat_no[newer],
            older - np.searchsorted(history.sat_no, history.sat_no[older]),
            differences.lag,
            history.epoch_micros[older],
            history.epoch_micros[newer],
            orbit_class_codes(history)[newer],
            find_age_bins(differences.age_days),
            differences.age_days,
            *differences.values.T,
        ]
        yield from _divide(_build_table(columns, PAIR_SCHEMA))

    return compare


def summarize_batches(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Summarize pairs by class and age bin (`STATISTIC_SCHEMA`). A bin's pairs must be in one partition."""
    table = _read_batches(batches)
    if table is None:
        return
    statistics = summarize_bins(
        table.column("class_code").to_numpy(), table.column("age_days").to_numpy(), _read_values(table)
    )
    columns = _statistic_columns(statistics)
    has_samples = np.flatnonzero(statistics.count.ravel() > 0)
    yield from _divide(_build_table(columns, STATISTIC_SCHEMA).take(pa.array(has_samples)))


def fit_batches(max_sigma_km: float) -> BatchFunction:
    """Return a function that fits error curves (`GROWTH_SCHEMA`) to statistics, all in one partition.

    The arguments are those of `fit_growth`. No statistics give curves of no class.
    """

    def fit(batches: Batches) -> Iterator[pa.RecordBatch]:
        table = _read_batches(batches)
        statistics = BinStatistics.without_samples()
        if table is not None:
            _fill_statistics(statistics, table)
        growth = fit_growth(statistics, max_sigma_km=max_sigma_km)
        class_codes, _ = _class_and_bin()
        columns = [
            *_statistic_columns(statistics),
            *(
                values.tolist()
                for values in (
                    growth.sigma_at(class_codes, statistics.age_days.ravel()),
                    *(curve[class_codes] for curve in (growth.sigma0, growth.rate, growth.power)),
                )
            ),
            growth.source_class[class_codes],
            growth.until_days[class_codes],
        ]
        yield from _divide(_build_table(columns, GROWTH_SCHEMA))

    return fit


def read_growth(table: pa.Table) -> ErrorGrowth:
    """Read error curves from rows of `GROWTH_SCHEMA`."""
    table = table.sort_by([("class_code", "ascending"), ("age_bin", "ascending")])
    statistics = BinStatistics.without_samples()
    _fill_statistics(statistics, table)
    by_class = table.take(pa.array(np.arange(len(CLASSES)) * AGE_BINS))
    sigma0, rate, power = (_read_lists(by_class, name) for name in ("sigma0", "rate", "power"))
    return ErrorGrowth(
        sigma0,
        rate,
        power,
        by_class.column("source_code").to_numpy(),
        by_class.column("until_days").to_numpy(),
        statistics,
    )


def find_jump_batches(rough_growth: ErrorGrowth) -> BatchFunction:
    """Return a function from pairs (`PAIR_SCHEMA`) to jumps (`JUMP_SCHEMA`), of which none is a swap yet.

    The usual error of an object is the curve of its class times the median of the object's own ratios. The
    median changes little even if half of the differences span jumps. All pairs of an object must be in one
    partition.
    """

    def find(batches: Batches) -> Iterator[pa.RecordBatch]:
        table = _read_batches(batches)
        if table is None:
            return
        table = table.sort_by([(name, "ascending") for name in ("sat_no", "older_index", "lag")])
        objects, differences, set_count = _read_differences(table)
        class_codes = table.column("class_code").to_numpy()
        rough_sigma = rough_growth.sigma_at(class_codes, differences.age_days)
        expected_sigma = rough_sigma * median_factors(objects, differences.values, rough_sigma)[objects]
        jumps = find_jumps(set_count, differences, expected_sigma)
        columns = [
            *table.take(pa.array(jumps.pair)).columns,
            jumps.kind,
            [JUMP_SIGNS[code].value for code in jumps.sign],
            jumps.sigmas,
        ]
        yield from _divide(_build_table(columns, JUMP_SCHEMA))

    return find


def median_factors(objects: npt.NDArray[np.int64], values: Floats, rough_sigma: Floats) -> Floats:
    """Return the ratios (n, 5) of n objects' errors to the usual errors, by the medians of differences.

    Args:
        objects: (k,) The object of each difference, 0 to n - 1.
        values: (k, 5) The differences.
        rough_sigma: (k, 5) The usual errors of the classes.
    """
    ratio = np.abs(values) / rough_sigma / _MEDIAN_OF_SIGMA
    _, factors = object_factors(objects, int(objects.max(initial=-1)) + 1, ratio, 0.5)
    return factors


def find_swap_batches(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Find swaps (`SWAP_SCHEMA`) among jumps (`SWAP_INPUT_SCHEMA`), which must all be in one partition."""
    table = _read_batches(batches)
    if table is None:
        return
    table = table.sort_by([("sat_no", "ascending"), ("newer_epoch", "ascending")])
    older, newer = (
        Elements.from_arrow(
            table.select(["sat_no", f"{side}_epoch", *(f"{side}_{name}" for name in ELEMENT_FIELDS)])
            .rename_columns(list(Elements.COLUMNS))
        )
        for side in ("older", "newer")
    )  # fmt: skip
    swaps = find_swaps(older, newer)
    rows = np.flatnonzero(swaps >= 0)
    columns = [newer.sat_no[rows], newer.epoch_micros[rows], older.sat_no[swaps[rows]]]
    yield from _divide(_build_table(columns, SWAP_SCHEMA))


def factor_batches(growth: ErrorGrowth) -> BatchFunction:
    """Return a function that computes objects' error factors (`FACTOR_SCHEMA`) from pairs without jumps.

    All pairs of an object must be in one partition.
    """

    def find_factors(batches: Batches) -> Iterator[pa.RecordBatch]:
        table = _read_batches(batches)
        if table is None:
            return
        sat_nos, objects = np.unique(table.column("sat_no").to_numpy(), return_inverse=True)
        sigma = growth.sigma_at(table.column("class_code").to_numpy(), table.column("age_days").to_numpy())
        samples, factors = object_factors(objects, len(sat_nos), np.abs(_read_values(table)) / sigma)
        yield from _divide(_build_table([sat_nos, samples, *factors.T], FACTOR_SCHEMA))

    return find_factors


def _read_batches(batches: Batches) -> pa.Table | None:
    """Return all rows of a partition, or None if it has none."""
    filled_batches = [batch for batch in batches if batch.num_rows]
    return pa.Table.from_batches(filled_batches) if filled_batches else None


def _sorted_elements(table: pa.Table) -> Elements:
    return Elements.from_arrow(table.sort_by([("sat_no", "ascending"), ("epoch", "ascending")]))


def _read_differences(table: pa.Table) -> tuple[npt.NDArray[np.int64], Differences, int]:
    """Read pairs that are sorted by object: the object (k,) of each, the pairs, the number of element sets.

    Rows of the history are counted anew, object by object.
    """
    _, first, objects = np.unique(table.column("sat_no").to_numpy(), return_index=True, return_inverse=True)
    older, lag = table.column("older_index").to_numpy(), table.column("lag").to_numpy()
    set_counts = np.maximum.reduceat(older + lag, first) + 1
    ends = np.cumsum(set_counts)
    older = older + (ends - set_counts)[objects]
    age_days = table.column("age_days").to_numpy()
    return objects, Differences(older, older + lag, lag, age_days, _read_values(table)), int(ends[-1])


def _read_values(table: pa.Table) -> Floats:
    return np.column_stack([table.column(f"difference_{axis}").to_numpy() for axis in AXES])


def _class_and_bin() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the class and the age bin of each row of statistics."""
    class_codes, bins = (part.ravel() for part in np.indices((len(CLASSES), AGE_BINS)))
    return class_codes, bins


def _statistic_columns(statistics: BinStatistics) -> list[object]:
    return [
        *_class_and_bin(),
        statistics.count.ravel(),
        statistics.age_days.ravel(),
        *(
            values.reshape(-1, len(AXES)).tolist()
            for values in (statistics.sigma, statistics.p95, statistics.median)
        ),
    ]


def _fill_statistics(statistics: BinStatistics, table: pa.Table) -> None:
    cells = table.column("class_code").to_numpy(), table.column("age_bin").to_numpy()
    statistics.count[cells] = table.column("samples").to_numpy()
    statistics.age_days[cells] = table.column("age_days").to_numpy()
    for name in ("sigma", "p95", "median"):
        getattr(statistics, name)[cells] = _read_lists(table, name)


def _read_lists(table: pa.Table, name: str) -> Floats:
    return np.array(table.column(name).to_pylist(), np.float64).reshape(-1, len(AXES))


def _build_table(columns: Sequence[object], schema: pa.Schema) -> pa.Table:
    arrays = [
        column.cast(field.type)
        if isinstance(column, (pa.Array, pa.ChunkedArray))
        else pa.array(column).cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _divide(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Return the batches of a table, each small enough for Spark's workers to send at once."""
    yield from table.to_batches(max_chunksize=_MAX_BATCH_ROWS)
