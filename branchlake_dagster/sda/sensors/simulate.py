"""Simulate measurements of catalog objects in one window, by the three kinds of sensor.

Units are those of the sensors' messages (m, m/s, rad, arcsec, nanoseconds). The true state of an object is
its SGP4 state at a slightly earlier or later time; this time error is constant per object. So a fused track
can find an error of the catalog's element set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.orbits.frames import (
    EARTH_RADIUS_KM,
    Floats,
    Micros,
    is_sunlit,
    local_axes,
    site_teme,
    sun_position,
)
from branchlake_dagster.sda.orbits.plausible import find_state_faults
from branchlake_dagster.sda.orbits.propagation import Elements, Ephemeris, propagate_satellites, time_grid
from branchlake_dagster.sda.sensors import measurement
from branchlake_dagster.sda.sensors.hashing import draw_normal, draw_uniform
from branchlake_dagster.sda.sensors.native import NATIVE_COLUMNS
from branchlake_dagster.sda.sensors.network import (
    ALLOWED_LATENESS_S,
    CATALOGUE_TIMING_SIGMA_S,
    RADARS,
    SUN_BELOW_DEG,
    TELESCOPES,
    Noise,
    Site,
    Tasking,
)

Rows = npt.NDArray[np.int64]
STEP_S = 30.0
ARCSEC_RAD = np.pi / (180 * 3600)


class Scene:
    """The objects' true states over a window, and the random numbers of one kind of sensor in it.

    `start` and `end` are in UTC microseconds since 1970. `alive` (n,) marks objects with plausible states.
    """

    def __init__(self, elements: Elements, start: int, end: int, *, seed: int, kind: str) -> None:
        self.sat_no = elements.sat_no
        self.start, self.end = start, end
        self.seed = seed
        margin = round(STEP_S * 1e6)
        self.ephemeris: Ephemeris = propagate_satellites(
            elements.to_satrec_array(), time_grid(start - margin, end + margin, STEP_S)
        )
        self.alive: npt.NDArray[np.bool_] = find_state_faults(self.ephemeris, elements).plausible_objects
        self.timing_us = np.round(
            np.clip(draw_normal(self.sat_no, seed, 77), -4, 4) * CATALOGUE_TIMING_SIGMA_S * 1e6
        ).astype(np.int64)
        self.rng = np.random.default_rng([seed, start // 1_000_000, *kind.encode()])

    def steps(self) -> Rows:
        """Return the indices of the instants within the window, on the grid of `ephemeris`."""
        inside = (self.ephemeris.micros >= self.start) & (self.ephemeris.micros < self.end)
        return np.flatnonzero(inside)

    def truth(self, rows: Rows, micros: Micros) -> tuple[Floats, Floats]:
        """Return true positions and velocities (k, 3) of objects at instants, km and km/s.

        ``rows`` (k,) are the objects, and ``micros`` (k,) the instants, UTC microseconds.
        """
        return self.ephemeris.interpolate(rows, micros + self.timing_us[rows])


def simulate(
    elements: Elements,
    *,
    kind: str,
    start: int,
    end: int,
    seed: int,
    noise: Noise | None = None,
    tasking: Tasking | None = None,
) -> pl.DataFrame:
    """Return measurements of one kind of sensor with `NATIVE_COLUMNS`, ordered by sensor, object and time.

    Args:
        elements: The catalog, sorted by ``sat_no``, so that the same catalog gives the same result.
        kind: ``radar``, ``optical`` or ``isl``.
        start: The start of the window, UTC microseconds since 1970, inclusive.
        end: The end of the window, exclusive.
        seed: All random numbers follow from the seed, the window and the kind.
        noise: The sensors' noise. (default: `Noise()`)
        tasking: The sensors' capacity. (default: `Tasking()`)

    Raises:
        KeyError: The kind is unknown.
    """
    observe = {"radar": _radar, "optical": _optical, "isl": _isl}[kind]
    scene = Scene(elements, start, end, seed=seed, kind=kind)
    parts = observe(scene, noise or Noise(), tasking or Tasking())
    columns = [name for name in NATIVE_COLUMNS if name not in ("window_start", "source_kind")]
    frames = [pl.DataFrame(part) for part in parts if len(part["sat_no"])]
    empty = pl.DataFrame(schema={c: NATIVE_COLUMNS[c] for c in columns})
    merged = pl.concat([empty, *(_complete(f, columns) for f in frames)])
    return (
        merged.with_columns(
            window_start=pl.lit(start).cast(pl.Datetime("us")).dt.replace_time_zone("UTC"),
            source_kind=pl.lit(kind),
            received_ns=pl.col("timestamp_ns") + round(ALLOWED_LATENESS_S[kind] * 1e9),
        )
        .select(list(NATIVE_COLUMNS))
        .sort("orig_sensor_id", "sat_no", "timestamp_ns")
    )


def _complete(frame: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    return frame.select(
        (pl.col(c) if c in frame.columns else pl.lit(None)).cast(NATIVE_COLUMNS[c]).alias(c) for c in columns
    )


def _tracks(
    scene: Scene, visible: npt.NDArray[np.bool_], capacity: int, tasking: Tasking
) -> tuple[Rows, Micros]:
    """Choose the objects and instants that one site observes. Return rows and UTC microseconds, both (k,).

    Args:
        scene: The window.
        visible: (objects, steps) Whether the site sees the objects at the steps of the window.
        capacity: The number of objects that the site follows.
        tasking: The number of samples per track.
    """
    steps = scene.steps()
    count: Rows = np.asarray(visible.sum(axis=1))
    candidates = np.flatnonzero(count >= tasking.minimum_steps)
    if not len(candidates):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    chosen = np.sort(scene.rng.permutation(candidates)[:capacity])
    # Visible steps first, in time order: the first count[i] columns of row i.
    order = np.argsort(~visible[chosen], axis=1, kind="stable")
    wanted = np.minimum(count[chosen], tasking.samples_per_track)
    sample = np.arange(tasking.samples_per_track)
    spread = np.rint(sample * (count[chosen] - 1)[:, None] / np.maximum(wanted - 1, 1)[:, None]).astype(int)
    used = sample < wanted[:, None]
    picked = np.take_along_axis(order, np.minimum(spread, order.shape[1] - 1), axis=1)
    rows = np.repeat(chosen, tasking.samples_per_track).reshape(used.shape)[used]
    micros = scene.ephemeris.micros[steps[picked[used]]]
    return rows, micros + scene.rng.integers(0, round(STEP_S * 1e6), len(rows))


def look(scene: Scene, site: Site) -> tuple[npt.NDArray[np.bool_], Floats, Floats]:
    """Return whether objects are high enough and in range (objects, steps).

    Also returns the site's position (km) and its upward unit vector, both (steps, 3), in TEME.
    """
    steps = scene.steps()
    micros = scene.ephemeris.micros[steps]
    lat, lon, alt = (np.array(v) for v in (site.lat_deg, site.lon_deg, site.alt_km))
    place, _ = site_teme(lat, lon, alt, micros)
    _, _, up = local_axes(lat, lon, micros)
    line = scene.ephemeris.position[:, steps] - place
    distance = np.sqrt(np.einsum("nmk,nmk->nm", line, line))
    height = np.einsum("nmk,mk->nm", line, up)
    seen: npt.NDArray[np.bool_] = np.asarray(
        (height > np.sin(np.radians(site.mask_deg)) * distance) & (distance < site.max_range_km)
    )
    return seen & scene.alive[:, None], place, up


def _ground(scene: Scene, site: Site, rows: Rows, micros: Micros, clock: str) -> dict[str, Any]:
    n = len(rows)
    return {
        "orig_sensor_id": [site.sensor_id] * n,
        "track_id": _track_ids(site.sensor_id, scene, rows),
        "sat_no": scene.sat_no[rows],
        "timestamp_ns": micros * 1000,
        "sensor_lat_deg": np.full(n, site.lat_deg),
        "sensor_lon_deg": np.full(n, site.lon_deg),
        "sensor_alt_km": np.full(n, site.alt_km),
        "clock_source": [clock] * n,
    }


def _track_ids(sensor: str, scene: Scene, rows: Rows) -> pl.Series:
    """Return the track ids (k,): one per sensor, object and window."""
    objects = pl.Series(scene.sat_no[rows], dtype=pl.Int64).cast(pl.String)
    return sensor + "-" + objects + f"-{scene.start // 1_000_000}"


def _stations(site: Site, micros: Micros) -> measurement.Stations:
    n = len(micros)
    return measurement.Stations(
        np.full(n, site.lat_deg), np.full(n, site.lon_deg), np.full(n, site.alt_km), micros
    )


def _radar(scene: Scene, noise: Noise, tasking: Tasking) -> list[dict[str, Any]]:
    parts = []
    for site, seen in seen_by_radars(scene):
        rows, micros = _tracks(scene, seen, tasking.objects_per_radar, tasking)
        parts.append(measured_by_radar(scene, site, rows, micros, noise))
    return parts


def seen_by_radars(scene: Scene) -> Iterator[tuple[Site, npt.NDArray[np.bool_]]]:
    """Yield each radar, and which objects it sees at the steps of the window: (objects, steps)."""
    for site in RADARS:
        yield site, look(scene, site)[0]


def measured_by_radar(scene: Scene, site: Site, rows: Rows, micros: Micros, noise: Noise) -> dict[str, Any]:
    """Simulate a radar's measurements of objects ``rows`` (k,) at instants (k,), as `NATIVE_COLUMNS`."""
    clean, _ = measurement.predict_radar(*scene.truth(rows, micros), _stations(site, micros))
    error = scene.rng.standard_normal((len(rows), 4))
    az = clean[:, 2] + error[:, 2] * noise.angle_rad / np.cos(clean[:, 3])
    return {
        **_ground(scene, site, rows, micros, "gps"),
        "range_m": clean[:, 0] * 1e3 + error[:, 0] * noise.range_m,
        "range_rate_m_s": clean[:, 1] * 1e3 + error[:, 1] * noise.range_rate_m_s,
        "az_rad": az % (2 * np.pi),
        "el_rad": clean[:, 3] + error[:, 3] * noise.angle_rad,
        "sigma_range_m": np.full(len(rows), noise.range_m),
        "sigma_range_rate_m_s": np.full(len(rows), noise.range_rate_m_s),
        "sigma_angle_rad": np.full(len(rows), noise.angle_rad),
        "clock_sync_age_s": np.zeros(len(rows)),
    }


def _optical(scene: Scene, noise: Noise, tasking: Tasking) -> list[dict[str, Any]]:
    parts = []
    for site, seen in seen_by_telescopes(scene):
        rows, micros = _tracks(scene, seen, tasking.objects_per_telescope, tasking)
        parts.append(measured_by_telescope(scene, site, rows, micros, noise))
    return parts


def seen_by_telescopes(scene: Scene) -> Iterator[tuple[Site, npt.NDArray[np.bool_]]]:
    """Yield each telescope, and which objects it sees at the steps of the window: (objects, steps).

    A telescope sees sunlit objects while its site is dark.
    """
    steps = scene.steps()
    sun = sun_position(scene.ephemeris.micros[steps])
    lit = is_sunlit(scene.ephemeris.position[:, steps], sun)
    for site in TELESCOPES:
        seen, place, up = look(scene, site)
        towards_sun = sun - place
        sun_height = np.sum(towards_sun * up, axis=1) / np.linalg.norm(towards_sun, axis=1)
        dark = sun_height < -np.sin(np.radians(SUN_BELOW_DEG))
        yield site, seen & lit & dark


def measured_by_telescope(
    scene: Scene, site: Site, rows: Rows, micros: Micros, noise: Noise
) -> dict[str, Any]:
    """Simulate a telescope's measurements of objects ``rows`` (k,) at instants (k,), as `NATIVE_COLUMNS`."""
    sigma = noise.optical_arcsec * ARCSEC_RAD
    clean, _ = measurement.predict_optical(*scene.truth(rows, micros), _stations(site, micros))
    error = scene.rng.standard_normal((len(rows), 2)) * sigma
    return {
        **_ground(scene, site, rows, micros, "ntp"),
        "ra_rad": (clean[:, 0] + error[:, 0] / np.cos(clean[:, 1])) % (2 * np.pi),
        "dec_rad": clean[:, 1] + error[:, 1],
        "sigma_arcsec": np.full(len(rows), noise.optical_arcsec),
        "clock_sync_age_s": np.floor(scene.rng.uniform(0, 600, len(rows))),
    }


def _isl(scene: Scene, noise: Noise, tasking: Tasking) -> list[dict[str, Any]]:
    """Simulate links: satellites report the states of partners in range, every 10 s during short contacts."""
    parts = []
    span = (scene.end - scene.start) // tasking.isl_contacts
    for contact in range(tasking.isl_contacts if len(isl_observers(scene, tasking)) else 0):
        begin = scene.start + contact * span + int(scene.rng.integers(0, span // 2))
        parts.append(_contact(scene, noise, *isl_links(scene, begin, tasking), begin, tasking))
    return parts


def isl_observers(scene: Scene, tasking: Tasking) -> Rows:
    """Return the rows of the satellites with link terminals. They are the same in every window."""
    alive = np.flatnonzero(scene.alive)
    height = np.linalg.norm(scene.ephemeris.position[alive, 0], axis=1) - EARTH_RADIUS_KM
    low = alive[height < 2_000]
    chosen: Rows = low[np.argsort(draw_uniform(scene.sat_no[low], scene.seed, 5))[: tasking.isl_observers]]
    return chosen


def isl_links(scene: Scene, at: int, tasking: Tasking) -> tuple[Rows, Rows]:
    """Return the observers and the partners in their range at an instant, as rows; both (links,)."""
    from scipy.spatial import cKDTree  # half a second of every run's start, used by few steps

    alive, observers = np.flatnonzero(scene.alive), isl_observers(scene, tasking)
    if not len(observers):
        return observers, observers
    here, _ = scene.truth(alive, np.full(len(alive), at))
    rank = np.searchsorted(alive, observers)
    reach = min(tasking.isl_partners + 1, len(alive))
    distance, near = cKDTree(here).query(here[rank], k=reach, distance_upper_bound=tasking.isl_range_km)
    near, distance = np.reshape(near, (len(rank), -1)), np.reshape(distance, (len(rank), -1))
    linked = np.isfinite(distance) & (near != rank[:, None])
    partner = np.where(linked, near, 0)
    # The chord between two satellites must clear the atmosphere at its lowest point, its middle.
    middle = np.linalg.norm((here[partner] + here[rank][:, None]) / 2, axis=2)
    linked &= middle > EARTH_RADIUS_KM + 80
    observer_rows: Rows = np.broadcast_to(observers[:, None], linked.shape)[linked]
    return observer_rows, alive[partner[linked]]


def _contact(
    scene: Scene, noise: Noise, observers: Rows, partners: Rows, begin: int, tasking: Tasking
) -> dict[str, Any]:
    samples = tasking.samples_per_track
    rows, seen_by = np.repeat(partners, samples), np.repeat(observers, samples)
    micros = begin + np.tile(np.arange(samples) * 10_000_000, len(partners))
    return measured_by_link(scene, seen_by, rows, micros, noise, begin)


def measured_by_link(
    scene: Scene, seen_by: Rows, rows: Rows, micros: Micros, noise: Noise, begin: int
) -> dict[str, Any]:
    """Simulate the states that satellites `seen_by` report of satellites `rows`, as native columns.

    `seen_by`, `rows` and `micros` are (k,). `begin` is the start of the contacts, which names the tracks.
    """
    position, velocity = scene.truth(rows, micros)
    r = position * 1e3 + scene.rng.standard_normal(position.shape) * noise.position_m
    v = velocity * 1e3 + scene.rng.standard_normal(velocity.shape) * noise.velocity_m_s
    sensor = "isl-" + pl.Series(scene.sat_no[seen_by], dtype=pl.Int64).cast(pl.String)
    objects = pl.Series(scene.sat_no[rows], dtype=pl.Int64).cast(pl.String)
    return {
        "orig_sensor_id": sensor,
        "track_id": sensor + "-" + objects + f"-{begin // 1_000_000}",
        "sat_no": scene.sat_no[rows],
        "timestamp_ns": micros * 1000,
        **{name: r[:, k] for k, name in enumerate(("x_m", "y_m", "z_m"))},
        **{name: v[:, k] for k, name in enumerate(("vx_m_s", "vy_m_s", "vz_m_s"))},
        "sigma_position_m": np.full(len(rows), noise.position_m),
        "sigma_velocity_m_s": np.full(len(rows), noise.velocity_m_s),
        "clock_source": ["onboard"] * len(rows),
        "clock_sync_age_s": np.floor(scene.rng.uniform(0, 3600, len(rows))),
    }
