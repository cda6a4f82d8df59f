"""Assess close approaches of an hour by the best state of each object: its track, or its element set.

A track is an orbit that was estimated from observations. If it is preferred, an element set is fitted to it
(`fit_track_elements`), which replaces the object's element set, with the covariance of the track. Other
objects have the element set of the catalog, with the error that the error model expects at its age. The
errors of the two objects are assumed to be independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from branchlake_dagster.sda.conjunctions.screening import Kind
from branchlake_dagster.sda.estimation.arrow import COVARIANCE_COLUMNS
from branchlake_dagster.sda.orbits.element_fitting import fit_elements
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.orbits.two_body import transition_matrices
from branchlake_dagster.sda.trust.assessment import (
    NO_ENCOUNTER,
    NO_MODEL,
    TOO_OLD,
    TOO_SLOW,
    is_passing,
    is_too_slow,
)
from branchlake_dagster.sda.trust.differences import rtn_axes, states_at
from branchlake_dagster.sda.trust.probability import (
    build_encounter_plane,
    collision_probability,
    compute_dilution,
)
from branchlake_dagster.sda.trust.tables import PublishedErrors

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

RISK_WINDOW_S = 30
"""The length of the windows in a risk's key, s. Windows begin at whole half minutes."""
DISTANCE_DECIMALS = 3
"""Decimals of distances and relative positions in km, so they are rounded to one meter."""
SPEED_DECIMALS = 6
"""Decimals of speeds in km/s, so they are rounded to one millimeter per second."""
TIME_PRECISION_MICROS = 1_000
"""Times of closest approach are rounded to milliseconds. In a millisecond two objects move by up to 15 m."""
PROBABILITY_DIGITS = 3
"""Significant digits of probabilities."""
FROM_TRACK, FROM_ELEMENT_SET = STATE_SOURCES = ("track", "element set")

TRACK_STATE_COLUMNS = (
    *("sat_no", "epoch"),
    *(f"{axis}_km" for axis in "xyz"),
    *(f"{axis}_dot_km_s" for axis in "xyz"),
    *("chi2_per_dof", *COVARIANCE_COLUMNS),
)
"""The columns of `fused_tracks` that `fit_track_elements` reads; ``epoch`` becomes ``track_epoch``."""
_ELEMENT_COLUMNS = ("element_epoch", *ELEMENT_FIELDS)

TRACK_ELEMENT_SCHEMA = pa.schema(
    [
        pa.field("sat_no", pa.int64()),
        pa.field("epoch", pa.timestamp("us", "UTC")),
        *(pa.field(name, pa.float64()) for name in ELEMENT_FIELDS),
        pa.field("track_epoch", pa.timestamp("us", "UTC")),
        *(pa.field(name, pa.float64()) for name in COVARIANCE_COLUMNS),
    ]
)
"""One row per object: the element set that gives its track's state at ``track_epoch``, and the covariance.

The covariance is enlarged if the residuals of the track are larger than the stated noise.
"""

RISK_SCHEMA = pa.schema(
    [
        pa.field("window_start", pa.timestamp("us", "UTC")),
        pa.field("risk_window_start", pa.timestamp("us", "UTC")),
        pa.field("sat1_object_designator", pa.int64()),
        pa.field("sat2_object_designator", pa.int64()),
        pa.field("kind", pa.string()),
        pa.field("tca", pa.timestamp("us", "UTC")),
        pa.field("miss_distance_km", pa.float64()),
        pa.field("relative_speed_km_s", pa.float64()),
        *(pa.field(f"relative_position_{axis}_km", pa.float64()) for axis in "rtn"),
        *(pa.field(f"relative_velocity_{axis}_km_s", pa.float64()) for axis in "rtn"),
        pa.field("together_min", pa.int64()),
        pa.field("sat1_state_source", pa.string()),
        pa.field("sat2_state_source", pa.string()),
        pa.field("sat1_element_epoch", pa.timestamp("us", "UTC")),
        pa.field("sat2_element_epoch", pa.timestamp("us", "UTC")),
        pa.field("hard_body_radius_m", pa.float64()),
        pa.field("sigma_minor_km", pa.float64()),
        pa.field("sigma_major_km", pa.float64()),
        pa.field("collision_probability", pa.float64()),
        pa.field("max_collision_probability", pa.float64()),
        pa.field("no_probability_because", pa.string()),
        pa.field("error_model_id", pa.string()),
    ]
)
"""One row per pair and window of 30 s with a closest approach.

The names follow the Conjunction Data Message (CCSDS 508.0-B-1).
"""


@dataclass(frozen=True)
class ObjectStates:
    """The states of n objects over an hour, and their uncertainties. Spark ships it to the workers.

    ``elements`` are sorted by ``sat_no``. ``track_row`` (n,) is the row of the object's track, or -1. The m
    tracks have ``track_micros`` (m,) and ``track_covariance`` (m, 6, 6) of position and velocity in TEME, km
    and km/s. ``published_errors`` is the error model of element sets, or None. ``radius_m`` (n,) is the
    hard-body radius: the radius of a sphere that contains the object.
    """

    elements: Elements
    track_row: Rows
    track_micros: Micros
    track_covariance: Floats
    published_errors: PublishedErrors | None
    radius_m: Floats

    @classmethod
    def build(
        cls,
        catalog: Elements,
        track_elements: pa.Table,
        published_errors: PublishedErrors | None,
        radius_m: Floats,
    ) -> ObjectStates:
        """Replace the element sets of objects that have a track.

        Args:
            catalog: The element sets, sorted by ``sat_no``.
            track_elements: Rows of `TRACK_ELEMENT_SCHEMA`, at most one per object. Other objects are ignored.
            published_errors: The error model, or None.
            radius_m: (n,) The hard-body radius of each object of the catalog, m.
        """
        track_elements = track_elements.sort_by("sat_no")
        fitted = Elements.from_arrow(track_elements)
        is_listed = np.isin(fitted.sat_no, catalog.sat_no)
        rows = np.searchsorted(catalog.sat_no, fitted.sat_no[is_listed])
        values, epochs = catalog.values.copy(), catalog.epoch_micros.copy()
        values[rows], epochs[rows] = fitted.values[is_listed], fitted.epoch_micros[is_listed]
        track_row = np.full(len(catalog), -1, np.int64)
        track_row[rows] = np.flatnonzero(is_listed)
        return cls(
            Elements(catalog.sat_no, epochs, values),
            track_row,
            _micros(track_elements, "track_epoch"),
            unpack_covariances(track_elements),
            published_errors,
            radius_m,
        )

    def position_covariances(self, rows: Rows, micros: Micros) -> Floats:
        """Return the covariances (k, 3, 3) of the positions of objects at instants, in TEME, km².

        The result is NaN if the error of an element set is unknown.

        Args:
            rows: (k,) The rows of the objects.
            micros: (k,) The instants, UTC microseconds since 1970.
        """
        covariance = np.full((len(rows), 3, 3), np.nan)
        from_track = np.flatnonzero(self.track_row[rows] >= 0)
        track = self.track_row[rows[from_track]]
        position, velocity = states_at(self.elements, rows[from_track], self.track_micros[track])
        seconds = (micros[from_track] - self.track_micros[track]) / 1e6
        mapping = transition_matrices(position, velocity, seconds)[:, :3]
        covariance[from_track] = np.einsum("kij,kjl,kml->kim", mapping, self.track_covariance[track], mapping)
        others = np.flatnonzero(self.track_row[rows] < 0)
        if self.published_errors is not None and len(others):
            objects = self.elements.take(rows[others])
            sigma = self.published_errors.position_sigma(objects, micros[others])
            axes = rtn_axes(*states_at(self.elements, rows[others], micros[others]))
            covariance[others] = np.einsum("kai,ka,kaj->kij", axes, sigma**2, axes)
        return covariance


def fit_track_elements(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fit element sets to tracks, for Spark's ``mapInArrow``.

    Input: `TRACK_STATE_COLUMNS`, with ``epoch`` renamed to ``track_epoch``, and the element set of the object
    (``element_epoch`` and `ELEMENT_FIELDS`). Output: `TRACK_ELEMENT_SCHEMA`. Objects for which the fit does
    not converge are left out; they keep the element set of the catalog.
    """
    for batch in batches:
        table = pa.Table.from_batches([batch])
        renamed = table.rename_columns(
            ["epoch" if name == "element_epoch" else name for name in table.column_names]
        )
        elements, epochs = Elements.from_arrow(renamed), _micros(table, "track_epoch")
        values, is_fitted = elements.values.copy(), np.zeros(len(elements), np.bool_)
        state = np.stack([table.column(name).to_numpy() for name in TRACK_STATE_COLUMNS[2:8]], axis=1).astype(
            np.float64
        )
        for epoch in np.unique(epochs):  # one in an hour's window
            rows = np.flatnonzero(epochs == epoch)
            fitted = fit_elements(elements.take(rows), state[rows, :3], state[rows, 3:], int(epoch))
            values[rows], is_fitted[rows] = fitted.elements.values, fitted.is_fitted
        # Residuals that are larger than the stated noise make the errors of the state larger, too.
        widening = np.maximum(table.column("chi2_per_dof").to_numpy(), 1.0)
        columns = [
            table.column("sat_no"),
            table.column("element_epoch"),
            *values.T,
            table.column("track_epoch"),
            *(table.column(name).to_numpy() * widening for name in COVARIANCE_COLUMNS),
        ]
        fitted_table = _to_table(columns, TRACK_ELEMENT_SCHEMA).filter(pa.array(is_fitted))
        yield from fitted_table.to_batches()


def unpack_covariances(table: pa.Table) -> Floats:
    """Return the covariances (n, 6, 6) whose lower triangles are in the columns `COVARIANCE_COLUMNS`."""
    covariance = np.empty((table.num_rows, 6, 6))
    lower = [(i, j) for i in range(6) for j in range(i + 1)]
    for (i, j), name in zip(lower, COVARIANCE_COLUMNS, strict=True):
        covariance[:, i, j] = covariance[:, j, i] = table.column(name).to_numpy()
    return covariance


def assess_batches(
    states: ObjectStates, window_start: int, select_own: Callable[[pa.Table], pa.Table]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Build a function from batches of close approaches (`ENCOUNTER_SCHEMA`) to batches of `RISK_SCHEMA`.

    Rows of the kind `edge` are left out, because the distance has no minimum there: the pair is closest at
    the beginning or the end of the hour.

    Args:
        states: The states of the objects over the hour.
        window_start: The beginning of the hour, UTC microseconds since 1970.
        select_own: Selects the rows that belong to the hour: a method of `HourOwnership`.
    """

    def assess(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                risks = assess_table(pa.Table.from_batches([batch]), states, window_start)
                yield from select_own(risks).to_batches()

    return assess


def assess_table(approaches: pa.Table, states: ObjectStates, window_start: int) -> pa.Table:
    """Convert close approaches (`ENCOUNTER_SCHEMA`) to risks (`RISK_SCHEMA`). Edges are left out.

    A slow pass can last several minutes. The screening then reports it as `together`, and this function as an
    `encounter`, if the distance has a minimum and the objects move faster than `MIN_SPEED_KM_S`.
    """
    kind = approaches.column("kind").to_numpy(zero_copy_only=False).astype(str)
    approaches = approaches.filter(pa.array(kind != Kind.EDGE.value))
    kind = kind[kind != Kind.EDGE.value]
    count = approaches.num_rows
    micros = _micros(approaches, "tca")
    rows = [
        np.searchsorted(states.elements.sat_no, approaches.column(f"sat{k}_object_designator").to_numpy())
        for k in (1, 2)
    ]
    position, velocity = (
        np.stack(
            [approaches.column(f"relative_{name}_{axis}_{unit}").to_numpy() for axis in "rtn"], axis=1
        ).reshape(count, 3)
        for name, unit in (("position", "km"), ("velocity", "km_s"))
    )
    is_pass = (kind == Kind.TOGETHER.value) & is_passing(position, velocity)
    kind = np.where(is_pass, Kind.ENCOUNTER.value, kind)
    covariance = _combined_covariances(states, rows, micros)
    is_encounter = kind == Kind.ENCOUNTER.value
    has_covariance = np.isfinite(covariance).all(axis=(1, 2))
    is_computed = is_encounter & has_covariance
    motion = states.elements.values[rows[0], ELEMENT_FIELDS.index("mean_motion")]
    is_slow = np.zeros(count, np.bool_)
    is_slow[is_computed] = is_too_slow(velocity[is_computed], covariance[is_computed], motion[is_computed])
    used = np.flatnonzero(is_computed & ~is_slow)
    plane = build_encounter_plane(position[used], velocity[used], covariance[used])
    radius_m = states.radius_m[rows[0]] + states.radius_m[rows[1]]
    reasons = np.select(
        [~is_encounter, ~has_covariance & (states.published_errors is None), ~has_covariance, is_slow],
        [NO_ENCOUNTER, NO_MODEL, TOO_OLD, TOO_SLOW],
        "",
    )

    def fill_used(values: Floats) -> pa.Array:
        all_rows = np.full(count, np.nan)
        all_rows[used] = values
        return pa.array(all_rows, from_pandas=True)

    tca = (micros + TIME_PRECISION_MICROS // 2) // TIME_PRECISION_MICROS * TIME_PRECISION_MICROS
    probability = collision_probability(plane, radius_m[used] / 1000)
    largest = compute_dilution(plane, radius_m[used] / 1000).probability
    model = states.published_errors
    columns = [
        np.full(count, window_start),
        tca // (RISK_WINDOW_S * 1_000_000) * (RISK_WINDOW_S * 1_000_000),
        *(approaches.column(f"sat{k}_object_designator") for k in (1, 2)),
        kind,
        tca,
        np.round(approaches.column("miss_distance_km").to_numpy(), DISTANCE_DECIMALS),
        np.round(approaches.column("relative_speed_km_s").to_numpy(), SPEED_DECIMALS),
        *np.round(position, DISTANCE_DECIMALS).T,
        *np.round(velocity, SPEED_DECIMALS).T,
        np.where(is_pass, 0, approaches.column("together_min").to_numpy()),
        *(np.where(states.track_row[one] >= 0, FROM_TRACK, FROM_ELEMENT_SET) for one in rows),
        *(states.elements.epoch_micros[one] for one in rows),
        radius_m,
        *(fill_used(np.round(plane.sigma[:, k], DISTANCE_DECIMALS + 1)) for k in (0, 1)),
        *(fill_used(round_digits(values, PROBABILITY_DIGITS)) for values in (probability, largest)),
        pa.array([reason or None for reason in reasons.tolist()], pa.string()),
        [None if model is None else model.model_id] * count,
    ]
    return _to_table(columns, RISK_SCHEMA)


def round_digits(values: Floats, digits: int) -> Floats:
    """Round numbers (n,) to significant digits. Zero and NaN stay as they are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(np.abs(values)))
    is_number = np.isfinite(exponent)
    # Two factors: 10 to the power of 308 and more cannot be represented.
    scale = 10.0 ** np.where(is_number, digits - 1 - exponent, 0.0).clip(max=300)
    return np.asarray(np.where(is_number, np.round(values * scale) / scale, values))


def _combined_covariances(states: ObjectStates, rows: list[Rows], micros: Micros) -> Floats:
    """Return the sum of both objects' covariances (k, 3, 3) in the first object's R, T and N axes, km²."""
    axes = rtn_axes(*states_at(states.elements, rows[0], micros))
    total = states.position_covariances(rows[0], micros) + states.position_covariances(rows[1], micros)
    return np.asarray(np.einsum("kai,kij,kbj->kab", axes, total, axes))


def _micros(table: pa.Table, name: str) -> Micros:
    values: Micros = table.column(name).cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    return values


def _to_table(columns: list[object], schema: pa.Schema) -> pa.Table:
    arrays = [
        column.cast(field.type) if isinstance(column, pa.ChunkedArray) else pa.array(column).cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
