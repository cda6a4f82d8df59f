"""Assess close approaches: the uncertainty of both objects' positions, and the probability of a collision.

The covariance (the uncertainty) is not measured. It is the usual difference between later element sets and
sets of that age, for the object's class and the object itself. It is diagonal in each object's own R
(radial), T (transverse: along the track) and N (normal to the orbit's plane) axes, and the errors of the two
objects are assumed to be independent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.trust.differences import rtn_axes, states_at
from branchlake_dagster.sda.trust.probability import (
    build_encounter_plane,
    collision_probability,
    compute_dilution,
)
from branchlake_dagster.sda.trust.radii import ObjectRadii
from branchlake_dagster.sda.trust.tables import COVARIANCE_SOURCE, POSITION_AXES, PublishedErrors

_PERPENDICULAR = 1e-3
"""The largest cosine of the angle between relative position and velocity at a minimum of the distance."""
MIN_SPEED_KM_S = 0.01
"""Objects with a smaller relative speed do not pass each other; they stay together."""
MAX_CROSSING_REVOLUTIONS = 0.05
"""Maximum time, as a fraction of a revolution, in which the relative motion may cross six sigma along its
direction. Within this time the relative motion is nearly a straight line."""
NO_MODEL, NO_ENCOUNTER, TOO_OLD, TOO_SLOW = NO_PROBABILITY_REASONS = (
    *("no error model", "not an encounter"),
    *("older than the error model reaches", "too slow for a short encounter"),
)
ASSESSMENT_COLUMNS = (
    *(f"sat{k}_sigma_{axis}_km" for k in (1, 2) for axis in POSITION_AXES),
    "covariance_source",
    *(f"sat{k}_{name}" for k in (1, 2) for name in ("radius_m", "radius_source")),
    "default_radius_m",
    "hard_body_radius_m",
    "sigma_minor_km",
    "sigma_major_km",
    "collision_probability",
    "max_collision_probability",
    "probability_diluted",
    "no_probability_because",
    "error_model_id",
)
"""The columns that `assess_approaches` adds."""


def assess_approaches(
    approaches: pl.DataFrame, elements: Elements, published_errors: PublishedErrors | None, radii: ObjectRadii
) -> pl.DataFrame:
    """Add `ASSESSMENT_COLUMNS` to close approaches.

    Each row depends only on itself, its two element sets, the radii of the two objects and the error model.

    Args:
        approaches: Close approaches.
        elements: The screened element sets, sorted by ``sat_no``.
        published_errors: The error model. If it is None, no row gets a probability.
        radii: The hard-body radii of the objects: a sphere of this radius contains the object.
    """
    micros = approaches["tca"].dt.epoch("us").to_numpy()
    rows = [
        np.searchsorted(elements.sat_no, approaches[f"sat{k}_object_designator"].to_numpy()).astype(np.int64)
        for k in (1, 2)
    ]
    count = approaches.height
    both_elements = [elements.take(object_rows) for object_rows in rows]
    sigma = [
        np.full((count, 3), np.nan)
        if published_errors is None
        else published_errors.position_sigma(objects, micros)
        for objects in both_elements
    ]
    has_sigma = np.isfinite(sigma[0]).all(axis=1) & np.isfinite(sigma[1]).all(axis=1)
    position, velocity = (
        approaches.select([f"relative_{name}_{axis}_{unit}" for axis in POSITION_AXES]).to_numpy()
        for name, unit in (("position", "km"), ("velocity", "km_s"))
    )
    # A slow pass lasts several minutes, at whose ends the two are within the threshold: `together`.
    is_pass = (approaches["kind"] == "together").to_numpy() & is_passing(position, velocity)
    is_encounter = (approaches["kind"] == "encounter").to_numpy() | is_pass
    computed_rows = np.flatnonzero(is_encounter & has_sigma)
    covariance = combine_covariances(
        elements,
        [object_rows[computed_rows] for object_rows in rows],
        [object_sigma[computed_rows] for object_sigma in sigma],
        micros[computed_rows],
    )
    is_slow = np.zeros(count, np.bool_)
    is_slow[computed_rows] = is_too_slow(
        velocity[computed_rows],
        covariance,
        both_elements[0].values[computed_rows, ELEMENT_FIELDS.index("mean_motion")],
    )
    is_fast = ~is_slow[computed_rows]
    used_rows = computed_rows[is_fast]
    plane = build_encounter_plane(position[used_rows], velocity[used_rows], covariance[is_fast])
    radius_m = [radii.get_radii(approaches[f"sat{k}_object_designator"]) for k in (1, 2)]
    combined_radius_m = (radius_m[0][0] + radius_m[1][0]).to_numpy()
    radius = combined_radius_m[used_rows] / 1000
    max_dilution = compute_dilution(plane, radius)
    reasons = np.select(
        [np.full(count, published_errors is None), ~is_encounter, ~has_sigma, is_slow],
        [NO_MODEL, NO_ENCOUNTER, TOO_OLD, TOO_SLOW],
        "",
    )

    def fill_used_rows(values: npt.NDArray[np.float64]) -> pl.Series:
        all_rows = np.full(count, np.nan)
        all_rows[used_rows] = values
        return pl.Series(all_rows, dtype=pl.Float64).fill_nan(None)

    dilution_factor = fill_used_rows(max_dilution.factor)
    columns: dict[str, pl.Series | pl.Expr] = {
        f"sat{k}_sigma_{axis}_km": pl.Series(sigma[k - 1][:, a], dtype=pl.Float64).fill_nan(None)
        for k in (1, 2)
        for a, axis in enumerate(POSITION_AXES)
    }
    columns |= {
        "covariance_source": pl.lit(None if published_errors is None else COVARIANCE_SOURCE, pl.String),
        **{
            f"sat{k}_{name}": column
            for k, columns in enumerate(radius_m, 1)
            for name, column in zip(("radius_m", "radius_source"), columns, strict=True)
        },
        "default_radius_m": pl.lit(radii.default_m),
        "hard_body_radius_m": pl.Series(combined_radius_m, dtype=pl.Float64),
        "sigma_minor_km": fill_used_rows(plane.sigma[:, 0]),
        "sigma_major_km": fill_used_rows(plane.sigma[:, 1]),
        "collision_probability": fill_used_rows(collision_probability(plane, radius)),
        "max_collision_probability": fill_used_rows(max_dilution.probability),
        "probability_diluted": dilution_factor < 1.0,
        "no_probability_because": pl.Series(reasons.tolist(), dtype=pl.String).replace("", None),
        "error_model_id": pl.lit(None if published_errors is None else published_errors.model_id, pl.String),
    }
    return approaches.with_columns(**columns)


def combine_covariances(
    elements: Elements,
    rows: list[npt.NDArray[np.int64]],
    sigma: list[Floats],
    micros: npt.NDArray[np.int64],
) -> Floats:
    """Return the sum of both objects' covariances (k, 3, 3) in the first object's R, T and N axes, km².

    Args:
        elements: The screened element sets.
        rows: Two arrays (k,), the rows of the first and of the second objects.
        sigma: Two arrays (k, 3), one standard deviation of each object along its own R, T and N axes, km.
        micros: (k,) The instants of the approaches, UTC microseconds.
    """
    axes = [rtn_axes(*states_at(elements, pair_rows, micros)) for pair_rows in rows]
    # The components of the second object's axes along the first object's axes.
    second_axes = np.einsum("kij,klj->kil", axes[0], axes[1])
    second_covariance = np.einsum("kij,kj,klj->kil", second_axes, sigma[1] ** 2, second_axes)
    return np.asarray(second_covariance + sigma[0][:, :, None] ** 2 * np.eye(3))


def is_too_slow(velocity: Floats, covariance: Floats, mean_motion: Floats) -> npt.NDArray[np.bool_]:
    """Return which encounters (k,) are too slow for a straight relative motion.

    Args:
        velocity: (k, 3) relative velocities, km/s, in the axes of the covariance.
        covariance: (k, 3, 3) the combined covariance of the positions, km².
        mean_motion: (k,) revolutions per day of one object.

    """
    speed = np.linalg.norm(velocity, axis=1)
    along = velocity / np.maximum(speed, 1e-12)[:, None]
    sigma = np.sqrt(np.einsum("ki,kij,kj->k", along, covariance, along))
    crossing_s = 6 * sigma / np.maximum(speed, 1e-12)
    return np.asarray(
        (speed < MIN_SPEED_KM_S) | (crossing_s > MAX_CROSSING_REVOLUTIONS * 86_400 / mean_motion)
    )


def is_passing(position: Floats, velocity: Floats) -> npt.NDArray[np.bool_]:
    """Return which pairs (k,) pass each other at their closest moment, and do not fly in formation.

    At a minimum of the distance, the relative velocity is perpendicular to the relative position. At the
    beginning or end of the screened time it is not.
    """
    speed, distance = (np.linalg.norm(values, axis=1) for values in (velocity, position))
    closing = np.abs(np.einsum("ki,ki->k", position, velocity))
    return np.asarray(
        (speed >= MIN_SPEED_KM_S) & (closing <= _PERPENDICULAR * speed * np.maximum(distance, 1e-3))
    )
