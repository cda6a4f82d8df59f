"""Simulate a seeded catalog in realistic orbital shells, as the text of a GP file.

The shells resemble CelesTrak's active catalog: about two thirds of the objects in low constellations, then
sun-synchronous, geostationary, navigation and transfer orbits, and wide debris clouds. The same seed always
gives the same orbits; the snapshot's time sets the epochs and advances the angles along these orbits.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.gp.records import ELEMENT_COLUMNS
from branchlake_dagster.sda.gp.write import format_omm_json, format_tle

MU_KM3_S2 = 398_600.8
"""The WGS-72 gravitational parameter, which SGP4 uses."""

EARTH_RADIUS_KM = 6_378.135
REFERENCE_EPOCH = datetime.fromisoformat("2026-08-08T00:00:00+00:00")
"""The time at which the simulated orbits have the angles drawn from the seed."""

ABSURD_MEAN_MOTION = 40.0
"""An impossible number of revolutions per day: an orbit at the Earth's surface makes 17."""


@dataclass(frozen=True)
class Shell:
    """A family of orbits. Altitudes (km) and inclinations (deg) are drawn uniformly within their ranges."""

    name: str
    share: float
    perigee_km: tuple[float, float]
    apogee_km: tuple[float, float] | None
    inclination_deg: tuple[float, float]
    planes: int = 0


SHELLS = (
    Shell("STARSIM", 0.45, (535, 555), None, (52.9, 53.3), planes=72),
    Shell("ONESIM", 0.06, (1195, 1205), None, (87.8, 87.95), planes=18),
    Shell("SUNSYNC", 0.17, (480, 820), None, (97.3, 98.8)),
    Shell("DEBRIS", 0.18, (620, 1100), (700, 1400), (65.0, 100.0)),
    Shell("NAVSIM", 0.05, (19_100, 23_200), None, (54.5, 65.0), planes=6),
    Shell("GEOSIM", 0.06, (35_780, 35_792), None, (0.01, 6.0)),
    Shell("HEOSIM", 0.03, (500, 1_200), (38_000, 39_800), (62.5, 64.0)),
)


def simulated_elements(*, seed: int, objects: int, epoch: datetime) -> pl.DataFrame:
    """Simulate element sets (``ELEMENT_COLUMNS``) of ``objects`` objects, sorted by ``sat_no``.

    Epochs lie within the twelve hours before ``epoch`` (UTC, aware). Every tenth object has a number above
    99999, like objects that were cataloged since July 2026.
    """
    rng = np.random.default_rng([seed, objects])
    counts = np.floor(np.array([s.share for s in SHELLS]) * objects).astype(int)
    counts[0] += objects - counts.sum()
    shell_columns = [_draw_shell(rng, shell, int(n)) for shell, n in zip(SHELLS, counts, strict=True)]
    columns = {name: np.concatenate([p[name] for p in shell_columns]) for name in shell_columns[0]}
    names = np.repeat([s.name for s in SHELLS], counts)
    ordinal = np.arange(objects)
    sat_no = np.where(ordinal % 10 == 9, 270_000 + ordinal, 60_000 + ordinal % 30_000).astype(np.int64)
    age_s = rng.uniform(0, 43_200, objects)
    elapsed_s = (epoch - REFERENCE_EPOCH).total_seconds() - age_s
    # Node, perigee and anomaly move at the J2 secular rates, so that successive snapshots of one seed
    # describe the same orbits.
    columns = _advance_angles(columns, elapsed_s)
    micros = np.round(age_s * 1e6).astype("timedelta64[us]")
    epochs = np.datetime64(epoch.replace(tzinfo=None), "us") - micros
    frame = pl.DataFrame(
        {
            "sat_no": sat_no,
            "object_name": pl.Series(np.char.add(names, np.char.mod("-%05d", ordinal)).tolist()),
            "object_id": pl.Series(np.char.mod("2026-%03dA", ordinal % 999 + 1).tolist()),
            "epoch": pl.Series(epochs).cast(pl.Datetime("us")).dt.replace_time_zone("UTC"),
            **columns,
            "ephemeris_type": np.zeros(objects, dtype=np.int32),
            "classification_type": ["U"] * objects,
            "element_set_no": np.full(objects, 999, dtype=np.int32),
            "rev_at_epoch": (ordinal % 90_000).astype(np.int32),
            "mean_motion_dot": np.zeros(objects),
            "mean_motion_ddot": np.zeros(objects),
            "source_format": ["OMM"] * objects,
            "line_number": (ordinal + 1).astype(np.int32),
        }
    )
    return frame.select(pl.col(c).cast(t) for c, t in ELEMENT_COLUMNS.items()).sort("sat_no")


def _draw_shell(rng: np.random.Generator, shell: Shell, n: int) -> dict[str, npt.NDArray[np.float64]]:
    perigee = EARTH_RADIUS_KM + rng.uniform(*shell.perigee_km, n)
    if shell.apogee_km is None:
        # Operators keep circular orbits circular to a few kilometers.
        apogee = perigee + rng.uniform(0, 3, n)
    else:
        apogee = np.maximum(EARTH_RADIUS_KM + rng.uniform(*shell.apogee_km, n), perigee)
    a_km = (perigee + apogee) / 2
    node = rng.uniform(0, 360, n)
    if shell.planes:
        node = np.floor(node / 360 * shell.planes) * 360 / shell.planes + rng.normal(0, 0.05, n)
    return {
        "mean_motion": 86_400 / (2 * np.pi) * np.sqrt(MU_KM3_S2 / a_km**3),
        "eccentricity": (apogee - perigee) / (apogee + perigee),
        "inclination": rng.uniform(*shell.inclination_deg, n),
        "ra_of_asc_node": node % 360,
        "arg_of_pericenter": rng.uniform(0, 360, n) if shell.name != "HEOSIM" else rng.normal(270, 5, n),
        "mean_anomaly": rng.uniform(0, 360, n),
        "bstar": np.where(a_km < 7500, rng.uniform(1e-5, 3e-4, n), 0.0),
    }


def _advance_angles(
    columns: dict[str, npt.NDArray[np.float64]], seconds: npt.NDArray[np.float64]
) -> dict[str, npt.NDArray[np.float64]]:
    """Advance the angles at the J2 secular rates (Vallado, Fundamentals of Astrodynamics, section 9.6)."""
    n_rad_s = columns["mean_motion"] * 2 * np.pi / 86_400
    a_km = (MU_KM3_S2 / n_rad_s**2) ** (1 / 3)
    semilatus_rectum = a_km * (1 - columns["eccentricity"] ** 2)
    factor = 1.5 * 1.0826e-3 * (EARTH_RADIUS_KM / semilatus_rectum) ** 2 * n_rad_s
    cos_i = np.cos(np.radians(columns["inclination"]))
    node = columns["ra_of_asc_node"] - np.degrees(factor * cos_i * seconds)
    perigee = columns["arg_of_pericenter"] + np.degrees(factor * (2 - 2.5 * (1 - cos_i**2)) * seconds)
    anomaly = columns["mean_anomaly"] + np.degrees(n_rad_s * seconds)
    advanced_angles = {
        "ra_of_asc_node": node % 360,
        "arg_of_pericenter": perigee % 360,
        "mean_anomaly": anomaly % 360,
    }
    return {**columns, **advanced_angles}


def simulated_gp_file(*, seed: int, objects: int, epoch: datetime, bad: bool = False) -> str:
    """Return the text of a simulated GP file as OMM JSON.

    With ``bad`` it is a TLE file that checks must refuse: every eighth record has a wrong checksum, and every
    ninth object has the mean motion ``ABSURD_MEAN_MOTION`` with a correct checksum.
    """
    elements = simulated_elements(seed=seed, objects=objects, epoch=epoch)
    if not bad:
        return format_omm_json(elements)
    row = pl.int_range(pl.len())
    absurd_elements = elements.with_columns(
        mean_motion=pl.when(row % 9 == 4).then(ABSURD_MEAN_MOTION).otherwise(pl.col("mean_motion"))
    )
    lines = format_tle(absurd_elements).split("\n")
    # Increment the checksum digit in line 2 of every eighth object.
    lines[2::24] = [line[:-1] + str((int(line[-1]) + 1) % 10) for line in lines[2::24]]
    return "\n".join(lines)
