"""Find the objects that an observation may belong to, without comparing all pairs.

Observations are grouped into short slices of time. The positions of all objects are computed once per slice,
at its middle. A k-d tree of the slice's observations then finds, for each object, the observations within a
radius. The radius covers the motion during the slice and the error of the prediction. Observations with a
position are searched by position, others by direction. Observations that have neither can only be compared
with the object that they claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from branchlake_dagster.sda.association.predictions import PredictedCatalog, Rows
from branchlake_dagster.sda.estimation.batch import Observations
from branchlake_dagster.sda.orbits.frames import Floats, local_axes, site_teme
from branchlake_dagster.sda.orbits.propagation import interpolate_hermite
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2
from branchlake_dagster.sda.sensors.models import MeasurementModel
from branchlake_dagster.sda.trust.differences import rtn_axes

POSITION_SLICE_S = 60.0
DIRECTION_SLICE_S = 20.0
"""The length of a slice in a search by direction.

Shorter slices need more searches, longer ones find more pairs that are not real. Within the same time,
directions change more than positions in relation to the distance between neighbors.
"""
MAX_ACCELERATION_KM_S2 = 0.0098


def find_candidates(
    catalog: PredictedCatalog,
    observations: Observations,
    clock_sigma_s: Floats,
    rows: Rows,
    kind: int,
    *,
    claimed_rows: Rows,
    reach: float,
    sigma_factor: float,
) -> Iterator[tuple[Rows, Rows]]:
    """Yield pairs of observation rows and object rows, slice by slice in the order of time.

    The result contains every pair within ``reach`` standard deviations, and others. Slices begin at multiples
    of their length since 1970, so the pairs of an observation do not depend on other observations.

    Args:
        catalog: The predicted objects.
        observations: The observations.
        clock_sigma_s: (observations,) One standard deviation of the sensor's clock.
        rows: The observations to search for, all of the same kind.
        kind: The index of that kind in `observations.models`.
        claimed_rows: (observations,) The rows of the claimed objects, or -1.
        reach: The number of standard deviations of the measurement and of the prediction.
        sigma_factor: A factor on the catalog's standard deviations.
    """
    objects = np.flatnonzero(catalog.is_usable)
    if not len(rows) or not len(objects):
        return
    model = observations.models[kind]
    direction = None if model.has_position else model.direction
    if not model.has_position and direction is None:
        claiming = rows[claimed_rows[rows] >= 0]
        yield claiming, claimed_rows[claiming]
        return
    sigma_km = sigma_factor * catalog.sigma_km[objects]
    slice_s = POSITION_SLICE_S if model.has_position else DIRECTION_SLICE_S
    length = round(slice_s * 1e6)
    micros = observations.stations.micros[rows]
    slices = micros // length
    order = np.argsort(slices, kind="stable")
    rows, slices = rows[order], slices[order]
    starts = np.flatnonzero(np.diff(slices, prepend=slices[0] - 1))
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True):
        middle = int(slices[begin]) * length + length // 2
        position, velocity = _states_at_instant(catalog, objects, middle)
        if direction is not None:
            found = _search_directions(
                observations,
                rows[begin:end],
                model,
                direction,
                middle,
                position,
                velocity,
                sigma_km,
                reach,
                clock_sigma_s,
            )
        else:
            found = _search_positions(
                observations,
                rows[begin:end],
                model,
                middle,
                position,
                velocity,
                sigma_km,
                reach,
                clock_sigma_s,
            )
        for observation_rows, object_index in found:
            yield observation_rows, objects[object_index]


def _states_at_instant(catalog: PredictedCatalog, objects: Rows, micros: int) -> tuple[Floats, Floats]:
    """Return positions and velocities (k, 3) of objects at one instant.

    This is faster than an interpolation at a separate instant for each object.
    """
    ephemeris = catalog.ephemeris
    step = int(ephemeris.micros[1] - ephemeris.micros[0])
    cell = min(max((micros - int(ephemeris.micros[0])) // step, 0), len(ephemeris.micros) - 2)
    fraction = np.array((micros - int(ephemeris.micros[cell])) / step)
    start, end = (
        (ephemeris.position[:, k][objects], ephemeris.velocity[:, k][objects]) for k in (cell, cell + 1)
    )
    return interpolate_hermite(start, end, fraction, step / 1e6)


def _total_error(sigma_km: Floats, reach: float) -> Floats:
    """Return the largest distance (k,) in km of a true position from its prediction.

    ``reach`` is the number of standard deviations that count as the largest error.
    """
    # Along the track the radial error appears twice.
    return np.asarray(reach * np.sqrt(5 * sigma_km[:, 0] ** 2 + sigma_km[:, 1] ** 2 + sigma_km[:, 2] ** 2))


def _search_positions(
    observations: Observations,
    rows: Rows,
    model: MeasurementModel,
    middle: int,
    position: Floats,
    velocity: Floats,
    sigma_km: Floats,
    reach: float,
    clock_sigma_s: Floats,
) -> Iterator[tuple[Rows, Rows]]:
    measured, measured_sigma = _measured_positions(observations, rows, model)
    half_s = POSITION_SLICE_S / 2 + reach * float(clock_sigma_s[rows].max())
    radius = (
        _distance_travelled(np.linalg.norm(velocity, axis=1), half_s)
        + _total_error(sigma_km, reach)
        + reach * float(measured_sigma.max())
    )
    index, objects = _within(np.arange(len(rows)), measured, position, radius)
    seconds = (observations.stations.micros[rows[index]] - middle) / 1e6
    near = _near_orbit(
        measured[index],
        position[objects],
        velocity[objects],
        seconds,
        reach * (_WIDE * sigma_km[objects] + measured_sigma[index, None]),
    )
    yield rows[index[near]], objects[near]


_WIDE = 1.1
"""A factor on the error of the prediction, for errors that differ between observations of one pass."""
_ALLOWANCE_KM = 0.3


def _near_orbit(
    measured: Floats, position: Floats, velocity: Floats, seconds: Floats, tolerance: Floats
) -> npt.NDArray[np.bool_]:
    """Return which measured positions (k, 3) are near the orbits of their objects.

    The comparison ignores where on the orbit the object is, because the error along the track is by far the
    largest. Most wrong pairs differ in the distance from the Earth's center, or across the plane of the
    orbit, by more than the object's errors there.

    Args:
        measured: (k, 3) Measured positions, km.
        position: (k, 3) Positions of the objects, km.
        velocity: (k, 3) Velocities of the objects, km/s.
        seconds: (k,) Time of the measurement after that of the object, at most half a minute.
        tolerance: (k, 3) The largest differences along R, T and N, km. The one along T is not used.
    """
    gravity = -MU_KM3_S2 * position / np.linalg.norm(position, axis=1, keepdims=True) ** 3
    moved = position + velocity * seconds[:, None] + gravity / 2 * seconds[:, None] ** 2
    speed = velocity + gravity * seconds[:, None]
    radius = np.linalg.norm(moved, axis=1)
    axes = rtn_axes(moved, speed)
    radial, along, across = np.einsum("kij,kj->ik", axes, measured - moved)
    up, forward, _ = np.einsum("kij,kj->ik", axes, speed)
    # The radius of the orbit where the measurement is, to the second order of the time from here to there.
    time = along / forward
    orbit_radius = radius + up * time + (forward**2 / radius - MU_KM3_S2 / radius**2) / 2 * time**2
    higher_orders = radius * np.abs(along / radius) ** 3 + 0.01 * along**2 / radius + _ALLOWANCE_KM
    is_level = np.abs(np.hypot(radius + radial, along) - orbit_radius) <= tolerance[:, 0] + higher_orders
    is_in_plane = np.abs(across) <= tolerance[:, 2] + 0.002 * np.abs(along) + _ALLOWANCE_KM
    return np.asarray(is_level & is_in_plane)


def _search_directions(
    observations: Observations,
    rows: Rows,
    model: MeasurementModel,
    direction: tuple[int, int],
    middle: int,
    position: Floats,
    velocity: Floats,
    sigma_km: Floats,
    reach: float,
    clock_sigma_s: Floats,
) -> Iterator[tuple[Rows, Rows]]:
    stations = observations.stations
    places = np.stack([stations.lat_deg[rows], stations.lon_deg[rows], stations.alt_km[rows]], axis=1)
    at = np.array([middle])
    error_km = _total_error(sigma_km, reach)
    for place in np.unique(places, axis=0):
        here = rows[(places == place).all(axis=1)]
        lat, lon, alt = (np.array([value]) for value in place)
        site, site_velocity = site_teme(lat, lon, alt, at)
        _, _, up = local_axes(lat, lon, at)
        half_s = DIRECTION_SLICE_S / 2 + reach * float(clock_sigma_s[here].max())
        line = position - site
        speed = np.linalg.norm(velocity - site_velocity, axis=1)
        moved = _distance_travelled(speed, half_s) + error_km
        visible = np.flatnonzero(line @ up[0] > -moved)
        distance = np.linalg.norm(line[visible], axis=1)
        measured, sigma = _measured_directions(observations, here, model, direction)
        measured_sigma = sigma.max()
        # A chord between unit vectors is never longer than the angle; all directions are within 2.
        nearest = np.maximum(distance - moved[visible], 1e-9)
        radius = np.minimum(moved[visible] / nearest + 2 * reach * measured_sigma, 2.0)
        observation_rows, index = _within(here, measured, line[visible] / distance[:, None], radius)
        yield observation_rows, visible[index]


def _within(rows: Rows, measured: Floats, points: Floats, radius: Floats) -> tuple[Rows, Rows]:
    """Return all pairs of rows and point indices with a measured point within the radius of the point.

    `points` has one row per object, and `radius` one value per point.
    """
    lists = cKDTree(measured).query_ball_point(points, radius)
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.fromiter(chain.from_iterable(lists), np.int64, int(counts.sum()))
    return rows[flat], np.repeat(np.arange(len(points)), counts)


def _distance_travelled(speed: Floats, seconds: float) -> Floats:
    return np.asarray(speed * seconds + MAX_ACCELERATION_KM_S2 / 2 * seconds**2)


def _measured_positions(
    observations: Observations, rows: Rows, model: MeasurementModel
) -> tuple[Floats, Floats]:
    """Return measured positions (k, 3) in TEME, km, and one standard deviation (k,) in the worst direction.

    TEME is the inertial frame of SGP4: it does not rotate with the Earth.
    """
    values, sigma = observations.values[rows], observations.sigma[rows]
    if model.direction is None:
        return values[:, :3], sigma[:, 0]
    stations = observations.stations
    lat, lon, alt, micros = (
        getattr(stations, name)[rows] for name in ("lat_deg", "lon_deg", "alt_km", "micros")
    )
    longitude, latitude = model.direction
    distance, range_sigma = (of[:, model.columns.index("range_km")] for of in (values, sigma))
    elevation = values[:, latitude]
    site, _ = site_teme(lat, lon, alt, micros)
    toward, _ = _measured_directions(observations, rows, model, model.direction)
    angle_sigma = np.hypot(sigma[:, longitude] * np.cos(elevation), sigma[:, latitude])
    return site + distance[:, None] * toward, np.hypot(range_sigma, distance * angle_sigma)


def _measured_directions(
    observations: Observations, rows: Rows, model: MeasurementModel, direction: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Return measured unit vectors (k, 3) along the axes of TEME, and one standard deviation (k,) in rad."""
    longitude, latitude = direction
    turn, height = observations.values[rows, longitude], observations.values[rows, latitude]
    sigma = observations.sigma[rows, latitude]
    if model.geometry == "celestial":
        vector = np.stack(
            [np.cos(height) * np.cos(turn), np.cos(height) * np.sin(turn), np.sin(height)], axis=1
        )
        return vector, sigma
    stations = observations.stations
    east, north, up = local_axes(stations.lat_deg[rows], stations.lon_deg[rows], stations.micros[rows])
    vector = (
        (np.cos(height) * np.sin(turn))[:, None] * east
        + (np.cos(height) * np.cos(turn))[:, None] * north
        + np.sin(height)[:, None] * up
    )
    return vector, sigma
