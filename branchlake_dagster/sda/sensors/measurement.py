"""What each kind of sensor measures of a state, and the derivative by that state.

States are TEME, km and km/s. Angles are rad, geometric: neither refraction, light time nor aberration are
modelled (up to 20 arcsec for real telescopes), in simulation and estimation alike. Right ascension and
declination are topocentric along the TEME axes, not J2000.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from branchlake_dagster.sda.orbits.frames import Floats, Micros, local_axes, site_teme


@dataclass(frozen=True)
class Stations:
    """Where and when ground sensors measured; all arrays (n,), degrees and km."""

    lat_deg: Floats
    lon_deg: Floats
    alt_km: Floats
    micros: Micros


def radar(position: Floats, velocity: Floats, stations: Stations) -> tuple[Floats, Floats]:
    """Range (km), range rate (km/s), azimuth from north over east, elevation (rad): (n, 4), and (n, 4, 6)."""
    site, site_velocity = site_teme(stations.lat_deg, stations.lon_deg, stations.alt_km, stations.micros)
    east, north, up = local_axes(stations.lat_deg, stations.lon_deg, stations.micros)
    line, rate = position - site, velocity - site_velocity
    distance = np.linalg.norm(line, axis=-1)
    unit = line / distance[:, None]
    range_rate = np.sum(unit * rate, axis=-1)
    e, n, u = (np.sum(axis * line, axis=-1) for axis in (east, north, up))
    horizontal = np.hypot(e, n)
    measured = np.stack(
        [distance, range_rate, np.arctan2(e, n) % (2 * np.pi), np.arctan2(u, horizontal)], axis=1
    )
    slope = np.zeros((len(distance), 4, 6))
    slope[:, 0, :3] = unit
    slope[:, 1, :3] = (rate - range_rate[:, None] * unit) / distance[:, None]
    slope[:, 1, 3:] = unit
    slope[:, 2, :3] = (n[:, None] * east - e[:, None] * north) / horizontal[:, None] ** 2
    slope[:, 3, :3] = (up - (u / distance)[:, None] * unit) / horizontal[:, None]
    return measured, slope


def optical(position: Floats, stations: Stations) -> tuple[Floats, Floats]:
    """Right ascension and declination (rad): (n, 2), and their derivatives (n, 2, 6)."""
    site, _ = site_teme(stations.lat_deg, stations.lon_deg, stations.alt_km, stations.micros)
    line = position - site
    x, y, z = line.T
    flat = np.hypot(x, y)
    distance = np.hypot(flat, z)
    measured = np.stack([np.arctan2(y, x) % (2 * np.pi), np.arctan2(z, flat)], axis=1)
    slope = np.zeros((len(x), 2, 6))
    slope[:, 0, 0], slope[:, 0, 1] = -y / flat**2, x / flat**2
    slope[:, 1, 0], slope[:, 1, 1] = -x * z / (flat * distance**2), -y * z / (flat * distance**2)
    slope[:, 1, 2] = flat / distance**2
    return measured, slope


def wrap(angle: Floats) -> Floats:
    """The same angle in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi
