"""Fused tracks as a function over Arrow batches, for Spark's ``mapInArrow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa

from branchlake_dagster.sda.estimation.batch import Observations, Tracks, estimate
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.sensors.measurement import Stations
from branchlake_dagster.sda.sensors.native import SOURCE_KINDS

_SORT_KEYS = ("sat_no", "sensor_timestamp", "observation_id")
ELEMENT_INPUT = ("sat_no", "snapshot_id", "epoch", *ELEMENT_FIELDS)
"""Columns of the catalogue that the fusion joins to each observation."""

_AXES = ("x", "y", "z", "x_dot", "y_dot", "z_dot")
COVARIANCE_COLUMNS = tuple(f"c{a}_{b}" for i, a in enumerate(_AXES) for b in _AXES[: i + 1])
"""Lower triangle as CCSDS 502.0-B names it (CX_X, CY_X, CY_Y …); km², km²/s and km²/s²."""

TRACK_SCHEMA = pa.schema(
    [
        pa.field("window_start", pa.timestamp("us", "UTC")),
        pa.field("sat_no", pa.int64()),
        pa.field("epoch", pa.timestamp("us", "UTC")),
        pa.field("ref_frame", pa.string()),
        *(pa.field(f"{a}_km", pa.float64()) for a in "xyz"),
        *(pa.field(f"{a}_dot_km_s", pa.float64()) for a in "xyz"),
        *(pa.field(name, pa.float64()) for name in COVARIANCE_COLUMNS),
        *(pa.field(f"n_{kind}", pa.int64()) for kind in SOURCE_KINDS),
        pa.field("n_measurements", pa.int64()),
        pa.field("chi2_per_dof", pa.float64()),
        pa.field("weighted_rms", pa.float64()),
        pa.field("catalogue_miss_km", pa.float64()),
        pa.field("offset_radial_km", pa.float64()),
        pa.field("offset_in_track_km", pa.float64()),
        pa.field("offset_cross_track_km", pa.float64()),
        pa.field("catalogue_snapshot_id", pa.string()),
        pa.field("catalogue_epoch", pa.timestamp("us", "UTC")),
    ]
)
"""One row per object and window. The state is TEME at ``epoch``, the middle of the window. ``weighted_rms``
is the root mean square of residuals in units of their standard deviation."""


def fuse_batches(start: int, end: int) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function from batches of observations joined with ``ELEMENT_INPUT`` to batches of ``TRACK_SCHEMA``.

    All rows of an object must come to one call, as ``repartition("sat_no")`` arranges; a call holds its
    share of the window in memory. ``start`` and ``end`` are the window, UTC microseconds since 1970.
    """

    def fuse(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = list(batches)
        if held and sum(b.num_rows for b in held):
            table = pa.Table.from_batches(held)
            # Sums depend on the order of equal instants in their last bits.
            names = [name for name in _SORT_KEYS if name in table.column_names]
            table = table.sort_by([(name, "ascending") for name in names])
            yield from fuse_table(table, start, end).to_batches()

    return fuse


def fuse_table(table: pa.Table, start: int, end: int) -> pa.Table:
    """Tracks (`TRACK_SCHEMA`) of observations sorted by object."""
    sat_no = table.column("sat_no").to_numpy()
    _, first, row = np.unique(sat_no, return_index=True, return_inverse=True)
    objects = table.select(list(ELEMENT_INPUT)).take(pa.array(first))
    elements = Elements.from_arrow(objects)
    tracks = estimate(elements, observations_of(table, row), start=start, end=end)
    return _track_table(tracks, objects, start, end)


def observations_of(table: pa.Table, row: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Observations:
    """The estimator's arrays from the normalised envelope: degrees to rad, one value layout per kind."""

    def column(name: str) -> Floats:
        values: Floats = table.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
        return values

    rad = np.pi / 180
    n = table.num_rows
    kind = np.full(n, -1, dtype=np.int64)
    names = table.column("source_kind").to_numpy(zero_copy_only=False)
    layouts = (
        (("range_km", 1), ("range_rate_km_s", 1), ("azimuth_deg", rad), ("elevation_deg", rad)),
        (("ra_deg", rad), ("declination_deg", rad)),
        (
            *((f"pos_{a}_km", 1) for a in "xyz"),
            *((f"vel_{a}_km_s", 1) for a in "xyz"),
        ),
    )
    values, sigma = np.full((n, 6), np.nan), np.full((n, 6), np.nan)
    for code, (source_kind, layout) in enumerate(zip(SOURCE_KINDS, layouts, strict=True)):
        rows = names == source_kind
        kind[rows] = code
        for k, (name, unit) in enumerate(layout):
            values[rows, k] = column(name)[rows] * unit
            sigma[rows, k] = column(_uncertainty(name))[rows] * unit
    stations = Stations(
        lat_deg=column("sensor_lat_deg"),
        lon_deg=column("sensor_lon_deg"),
        alt_km=column("sensor_alt_km"),
        micros=_micros(table, "sensor_timestamp"),
    )
    return Observations(np.asarray(row, dtype=np.int64), kind, values, sigma, stations)


def _uncertainty(name: str) -> str:
    if name.startswith("pos_"):
        return "position_unc_km"
    if name.startswith("vel_"):
        return "velocity_unc_km_s"
    unit = next(u for u in ("_km_s", "_km", "_deg") if name.endswith(u))
    return name.removesuffix(unit) + "_unc" + unit


def _micros(table: pa.Table, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    cast = table.column(name).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    micros: np.ndarray[tuple[int], np.dtype[np.int64]] = cast.to_numpy()
    return micros


def _track_table(tracks: Tracks, objects: pa.Table, start: int, end: int) -> pa.Table:
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
        tracks.chi2_per_dof,
        np.sqrt(tracks.chi2_per_dof * (tracks.measurements - 6) / tracks.measurements),
        np.linalg.norm(tracks.offset[:, :3], axis=1),
        *tracks.offset_ric.T,
        chosen.column("snapshot_id"),
        chosen.column("epoch"),
    ]
    arrays = [
        c.cast(f.type) if isinstance(c, pa.ChunkedArray) else pa.array(c).cast(f.type)
        for c, f in zip(columns, TRACK_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=TRACK_SCHEMA)
