"""What a close approach may come to: covariance of both objects by age, and probability of collision.

The covariance is no measured one. It says what later element sets usually said of sets of that age, of the
object's class and of the object itself; it is diagonal in each object's own R, T and N, and the errors of the
two are taken as independent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.trust.differences import rtn_axes, states_at
from branchlake_dagster.sda.trust.probability import dilution, encounter_plane, probability
from branchlake_dagster.sda.trust.radii import Radii
from branchlake_dagster.sda.trust.tables import POSITION, SOURCE, Expected

MIN_SPEED_KM_S = 0.01
"""Slower than that two objects do not pass, they stay."""
MAX_CROSSING = 0.05
"""Of a revolution: while the relative motion crosses six sigma along itself, it has to be a straight line."""
NO_MODEL, NO_ENCOUNTER, TOO_OLD, TOO_SLOW = REASONS = (
    *("no error model", "not an encounter"),
    *("older than the error model reaches", "too slow for a short encounter"),
)
ASSESSED = (
    *(f"sat{k}_sigma_{axis}_km" for k in (1, 2) for axis in POSITION),
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
"""The columns that an assessment adds."""


def assessed(
    found: pl.DataFrame, elements: Elements, expected: Expected | None, radii: Radii
) -> pl.DataFrame:
    """Close approaches with `ASSESSED`.

    Each row depends on itself, its two element sets, their objects' radii and the error model only.

    Args:
        found: close approaches.
        elements: those that were screened, sorted by ``sat_no``.
        expected: the error model; None: there is none, and no row has a probability.
        radii: of the objects.

    """
    micros = found["tca"].dt.epoch("us").to_numpy()
    rows = [
        np.searchsorted(elements.sat_no, found[f"sat{k}_object_designator"].to_numpy()).astype(np.int64)
        for k in (1, 2)
    ]
    count = found.height
    both = [elements.take(one) for one in rows]
    sigma = [np.full((count, 3), np.nan) if expected is None else expected.sigma(one, micros) for one in both]
    encounter = (found["kind"] == "encounter").to_numpy()
    known = np.isfinite(sigma[0]).all(axis=1) & np.isfinite(sigma[1]).all(axis=1)
    computed = np.flatnonzero(encounter & known)
    position, velocity = (
        found.select([f"relative_{name}_{axis}_{unit}" for axis in POSITION]).to_numpy()
        for name, unit in (("position", "km"), ("velocity", "km_s"))
    )
    covariance = combined(
        elements, [one[computed] for one in rows], [one[computed] for one in sigma], micros[computed]
    )
    slow = np.zeros(count, np.bool_)
    slow[computed] = _slow(
        velocity[computed], covariance, both[0].values[computed, ELEMENT_FIELDS.index("mean_motion")]
    )
    fast = ~slow[computed]
    used = computed[fast]
    plane = encounter_plane(position[used], velocity[used], covariance[fast])
    radius_m = [radii.of(found[f"sat{k}_object_designator"]) for k in (1, 2)]
    together_m = (radius_m[0][0] + radius_m[1][0]).to_numpy()
    radius = together_m[used] / 1000
    most = dilution(plane, radius)
    reasons = np.select(
        [np.full(count, expected is None), ~encounter, ~known, slow],
        [NO_MODEL, NO_ENCOUNTER, TOO_OLD, TOO_SLOW],
        "",
    )

    def spread(values: npt.NDArray[np.float64]) -> pl.Series:
        whole = np.full(count, np.nan)
        whole[used] = values
        return pl.Series(whole, dtype=pl.Float64).fill_nan(None)

    nearest = spread(most.factor)
    columns: dict[str, pl.Series | pl.Expr] = {
        f"sat{k}_sigma_{axis}_km": pl.Series(sigma[k - 1][:, a], dtype=pl.Float64).fill_nan(None)
        for k in (1, 2)
        for a, axis in enumerate(POSITION)
    }
    columns |= {
        "covariance_source": pl.lit(None if expected is None else SOURCE, pl.String),
        **{
            f"sat{k}_{name}": column
            for k, columns in enumerate(radius_m, 1)
            for name, column in zip(("radius_m", "radius_source"), columns, strict=True)
        },
        "default_radius_m": pl.lit(radii.default_m),
        "hard_body_radius_m": pl.Series(together_m, dtype=pl.Float64),
        "sigma_minor_km": spread(plane.sigma[:, 0]),
        "sigma_major_km": spread(plane.sigma[:, 1]),
        "collision_probability": spread(probability(plane, radius)),
        "max_collision_probability": spread(most.probability),
        "probability_diluted": nearest < 1.0,
        "no_probability_because": pl.Series(reasons.tolist(), dtype=pl.String).replace("", None),
        "error_model_id": pl.lit(None if expected is None else expected.model_id, pl.String),
    }
    return found.with_columns(**columns)


def combined(
    elements: Elements,
    rows: list[npt.NDArray[np.int64]],
    sigma: list[Floats],
    micros: npt.NDArray[np.int64],
) -> Floats:
    """Both objects' covariance (k, 3, 3) in the first one's R, T and N, km².

    Args:
        elements: those that were screened.
        rows: of each of k pairs the first's and the second's row.
        sigma: of both (k, 3) one sigma along the own R, T and N, km.
        micros: (k,) when.

    """
    axes = [rtn_axes(*states_at(elements, one, micros)) for one in rows]
    # The second's axes along the first's.
    turned = np.einsum("kij,klj->kil", axes[0], axes[1])
    second = np.einsum("kij,kj,klj->kil", turned, sigma[1] ** 2, turned)
    return np.asarray(second + sigma[0][:, :, None] ** 2 * np.eye(3))


def _slow(velocity: Floats, covariance: Floats, mean_motion: Floats) -> npt.NDArray[np.bool_]:
    """Whether a straight line is too bold (k,)."""
    speed = np.linalg.norm(velocity, axis=1)
    along = velocity / np.maximum(speed, 1e-12)[:, None]
    sigma = np.sqrt(np.einsum("ki,kij,kj->k", along, covariance, along))
    crossing_s = 6 * sigma / np.maximum(speed, 1e-12)
    return np.asarray((speed < MIN_SPEED_KM_S) | (crossing_s > MAX_CROSSING * 86_400 / mean_motion))
