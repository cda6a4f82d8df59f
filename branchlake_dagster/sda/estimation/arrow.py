"""Estimate fused tracks from Arrow batches, for Spark's ``mapInArrow``.

A fused track is the state (position and velocity) of an object, with its covariance, as estimated from the
observations of all sensors in a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.sda.estimation.batch import Observations, Tracks, estimate
from branchlake_dagster.sda.estimation.preference import is_preferred, scaled_position_sigma
from branchlake_dagster.sda.estimation.prior import ElementPrior
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.sensors.measurement import Stations
from branchlake_dagster.sda.sensors.models import MAX_WIDTH, MeasurementModel

_SORT_KEYS = ("sat_no", "sensor_timestamp", "observation_id")
ELEMENT_INPUT = ("sat_no", "snapshot_id", "epoch", *ELEMENT_FIELDS)
"""Columns of the catalog that are joined to each observation before the fusion."""

_AXES = ("x", "y", "z", "x_dot", "y_dot", "z_dot")
COVARIANCE_COLUMNS = tuple(f"c{a}_{b}" for i, a in enumerate(_AXES) for b in _AXES[: i + 1])
"""The lower triangle of the covariance, named as in CCSDS 502.0-B (CX_X, CY_X, CY_Y …).

The units are km², km²/s and km²/s².
"""


def track_schema(source_kinds: Sequence[str]) -> pa.Schema:
    """Return the schema of tracks: one row per object and window.

    The state is in TEME at ``epoch``, the middle of the window. ``n_<kind>`` counts the used observations of
    each kind of sensor. ``weighted_rms`` is the root mean square of the residuals in units of their standard
    deviation. ``prior_sigma_km`` is null if the error of the element set is unknown.
    """
    counts = [pa.field(f"n_{kind}", pa.int64()) for kind in source_kinds]
    return pa.schema([*_STATE_FIELDS, *counts, *_FIT_FIELDS])


_STATE_FIELDS = [
    pa.field("window_start", pa.timestamp("us", "UTC")),
    pa.field("sat_no", pa.int64()),
    pa.field("epoch", pa.timestamp("us", "UTC")),
    pa.field("ref_frame", pa.string()),
    *(pa.field(f"{a}_km", pa.float64()) for a in "xyz"),
    *(pa.field(f"{a}_dot_km_s", pa.float64()) for a in "xyz"),
    *(pa.field(name, pa.float64()) for name in COVARIANCE_COLUMNS),
]
_FIT_FIELDS = [
    pa.field("n_measurements", pa.int64()),
    pa.field("n_edited", pa.int64()),
    pa.field("chi2_per_dof", pa.float64()),
    pa.field("weighted_rms", pa.float64()),
    pa.field("position_sigma_km", pa.float64()),
    pa.field("prior_sigma_km", pa.float64()),
    pa.field("is_preferred", pa.bool_()),
    pa.field("catalogue_miss_km", pa.float64()),
    pa.field("offset_radial_km", pa.float64()),
    pa.field("offset_in_track_km", pa.float64()),
    pa.field("offset_cross_track_km", pa.float64()),
    pa.field("catalogue_snapshot_id", pa.string()),
    pa.field("catalogue_epoch", pa.timestamp("us", "UTC")),
]


def fuse_batches(
    start: int, end: int, models: Mapping[str, MeasurementModel], prior: ElementPrior | None = None
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Build a function from batches of observations, joined with `ELEMENT_INPUT`, to batches of tracks.

    All rows of an object must come to one call, as ``repartition("sat_no")`` arranges. A call holds its share
    of the window in memory.

    Args:
        start: The start of the window, UTC microseconds since 1970.
        end: The end of the window.
        models: Measurement models by source kind. Observations of other kinds are not used. The schema of the
            result is `track_schema` of these kinds.
        prior: The errors of the element sets. Without it, an object gets a track only if its measurements
            determine its orbit alone.
    """

    def fuse(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = list(batches)
        if held and sum(b.num_rows for b in held):
            table = of_known_kinds(pa.Table.from_batches(held), models)
            if not table.num_rows:
                return
            # Sums depend on the order of equal instants in their last bits.
            names = [name for name in _SORT_KEYS if name in table.column_names]
            table = table.sort_by([(name, "ascending") for name in names])
            yield from fuse_table(table, start, end, models, prior).to_batches()

    return fuse


def fuse_table(
    table: pa.Table,
    start: int,
    end: int,
    models: Mapping[str, MeasurementModel],
    prior: ElementPrior | None = None,
) -> pa.Table:
    """Return the tracks (`track_schema`) of observations. The arguments are those of `fuse_batches`.

    `table` must have rows, be sorted by object, and have only kinds with a model.
    """
    sat_no = table.column("sat_no").to_numpy()
    _, first, row = np.unique(sat_no, return_index=True, return_inverse=True)
    objects = table.select(list(ELEMENT_INPUT)).take(pa.array(first))
    elements = Elements.from_arrow(objects)
    tracks = estimate(elements, observations_of(table, row, models), start=start, end=end, prior=prior)
    return _track_table(tracks, objects, start, end, track_schema(list(models)))


def of_known_kinds(table: pa.Table, models: Mapping[str, MeasurementModel]) -> pa.Table:
    """Return the rows whose ``source_kind`` has a model."""
    return table.filter(pc.is_in(table.column("source_kind"), pa.array(list(models), pa.string())))


def observations_of(
    table: pa.Table,
    row: np.ndarray[tuple[int], np.dtype[np.int64]],
    models: Mapping[str, MeasurementModel],
) -> Observations:
    """Convert a table of observations to the estimator's arrays: degrees to rad, one value layout per kind.

    ``row`` (n,) is the index of each observation's object or track. Every row's ``source_kind`` must have a
    model (`of_known_kinds`).
    """

    def column(name: str) -> Floats:
        values: Floats = table.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
        return values

    n = table.num_rows
    kind = np.full(n, -1, dtype=np.int64)
    names = table.column("source_kind").to_numpy(zero_copy_only=False)
    values, sigma = np.full((n, MAX_WIDTH), np.nan), np.full((n, MAX_WIDTH), np.nan)
    for code, (source_kind, model) in enumerate(models.items()):
        rows = names == source_kind
        if not rows.any():
            continue
        kind[rows] = code
        for k, quantity in enumerate(model.quantities):
            values[rows, k] = column(quantity.column)[rows] * quantity.unit
            sigma[rows, k] = column(quantity.uncertainty)[rows] * quantity.unit
    stations = Stations(
        lat_deg=column("sensor_lat_deg"),
        lon_deg=column("sensor_lon_deg"),
        alt_km=column("sensor_alt_km"),
        micros=_micros(table, "sensor_timestamp"),
    )
    return Observations(
        np.asarray(row, dtype=np.int64), kind, values, sigma, stations, tuple(models.values())
    )


def _micros(table: pa.Table, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    cast = table.column(name).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    micros: np.ndarray[tuple[int], np.dtype[np.int64]] = cast.to_numpy()
    return micros


def _track_table(tracks: Tracks, objects: pa.Table, start: int, end: int, schema: pa.Schema) -> pa.Table:
    k = len(tracks.row)
    lower = [(i, j) for i in range(6) for j in range(i + 1)]
    chosen = objects.take(pa.array(tracks.row))
    columns: list[object] = [
        np.full(k, start),
        chosen.column("sat_no"),
        np.full(k, (start + end) // 2),
        ["TEME"] * k,
        *tracks.position.T,
        *tracks.velocity.T,
        *(tracks.covariance[:, i, j] for i, j in lower),
        *tracks.counts.T,
        tracks.measurements,
        tracks.edited,
        tracks.chi2_per_dof,
        tracks.weighted_rms,
        scaled_position_sigma(tracks),
        pa.array(tracks.prior_sigma_km, from_pandas=True),
        is_preferred(tracks),
        np.linalg.norm(tracks.offset[:, :3], axis=1),
        *tracks.offset_ric.T,
        chosen.column("snapshot_id"),
        chosen.column("epoch"),
    ]
    arrays = [
        c.cast(f.type) if isinstance(c, (pa.Array, pa.ChunkedArray)) else pa.array(c).cast(f.type)
        for c, f in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
