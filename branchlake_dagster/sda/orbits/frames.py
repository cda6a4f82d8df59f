"""Convert times and Earth-fixed positions to TEME, and compute the Sun's position.

TEME (true equator, mean equinox) is the inertial frame of SGP4: its origin is the Earth's center, and it does
not rotate with the Earth. Errors: UT1 is assumed equal to UTC (at most 0.9 s, 0.42 km at the equator), and
polar motion is neglected (15 m). Simulation and estimation share this conversion, so these errors do not
affect the estimates here. Real measurements would need Earth orientation parameters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Micros = npt.NDArray[np.int64]

EARTH_ROTATION_RAD_S = 7.292115e-5
EARTH_RADIUS_KM = 6378.137
"""WGS-84 equatorial radius."""

_FLATTENING = 1 / 298.257223563
_J2000_MICROS = 946_728_000_000_000
_DAY_MICROS = 86_400_000_000
_AU_KM = 149_597_870.7


def julian_dates(micros: Micros) -> tuple[Floats, Floats]:
    """Convert UTC microseconds since 1970 to Julian dates in two parts, start and fraction of the day."""
    day, rest = np.divmod(micros, _DAY_MICROS)
    return day + 2_440_587.5, rest / _DAY_MICROS


def sidereal_angle(micros: Micros) -> Floats:
    """Return Greenwich mean sidereal time 1982 (Vallado, eq.

    3-47) in rad, the angle from TEME to Earth-fixed.
    """
    days = (micros - _J2000_MICROS) / _DAY_MICROS
    t = days / 36_525
    seconds = 67_310.54841 + (876_600 * 3600 + 8_640_184.812866) * t + 0.093104 * t**2 - 6.2e-6 * t**3
    return np.radians(seconds % 86_400 / 240)


def site_ecef(lat_deg: Floats, lon_deg: Floats, alt_km: Floats) -> Floats:
    """Convert geodetic WGS-84 coordinates to Earth-fixed positions (..., 3) in km."""
    lat, lon = np.radians(lat_deg), np.radians(lon_deg)
    e2 = _FLATTENING * (2 - _FLATTENING)
    n = EARTH_RADIUS_KM / np.sqrt(1 - e2 * np.sin(lat) ** 2)
    return np.stack(
        [
            (n + alt_km) * np.cos(lat) * np.cos(lon),
            (n + alt_km) * np.cos(lat) * np.sin(lon),
            (n * (1 - e2) + alt_km) * np.sin(lat),
        ],
        axis=-1,
    )


def rotate_z(vectors: Floats, angle: Floats) -> Floats:
    """Return components (..., 3) of vectors in a frame rotated by ``angle`` (rad) about the third axis."""
    c, s = np.cos(angle), np.sin(angle)
    x, y, z = vectors[..., 0], vectors[..., 1], vectors[..., 2]
    return np.stack([c * x + s * y, c * y - s * x, z + np.zeros_like(c)], axis=-1)


def site_teme(lat_deg: Floats, lon_deg: Floats, alt_km: Floats, micros: Micros) -> tuple[Floats, Floats]:
    """Return position (km) and velocity (km/s), both (..., 3), of ground sites in TEME at UTC instants."""
    position = rotate_z(site_ecef(lat_deg, lon_deg, alt_km), -sidereal_angle(micros))
    velocity = EARTH_ROTATION_RAD_S * np.stack(
        [-position[..., 1], position[..., 0], np.zeros_like(position[..., 0])], axis=-1
    )
    return position, velocity


def local_axes(lat_deg: Floats, lon_deg: Floats, micros: Micros) -> tuple[Floats, Floats, Floats]:
    """Return the east, north and up unit vectors (..., 3) of ground sites in TEME."""
    lat = np.radians(lat_deg)
    lon = np.radians(lon_deg) + sidereal_angle(micros)
    lat, lon = np.broadcast_arrays(lat, lon)
    zero = np.zeros_like(lon)
    east = np.stack([-np.sin(lon), np.cos(lon), zero], axis=-1)
    north = np.stack([-np.sin(lat) * np.cos(lon), -np.sin(lat) * np.sin(lon), np.cos(lat)], axis=-1)
    up = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=-1)
    return east, north, up


def sun_position(micros: Micros) -> Floats:
    """Return the Sun's position (..., 3) in km, mean equator of date, to 0.01 degree (Vallado, alg. 29)."""
    t = (micros - _J2000_MICROS) / _DAY_MICROS / 36_525
    anomaly = np.radians(357.5291092 + 35_999.05034 * t)
    longitude = np.radians(
        280.46 + 36_000.771 * t + 1.914666471 * np.sin(anomaly) + 0.019994643 * np.sin(2 * anomaly)
    )
    distance = _AU_KM * (1.000140612 - 0.016708617 * np.cos(anomaly) - 0.000139589 * np.cos(2 * anomaly))
    tilt = np.radians(23.439291 - 0.0130042 * t)
    direction = np.stack(
        [np.cos(longitude), np.cos(tilt) * np.sin(longitude), np.sin(tilt) * np.sin(longitude)], axis=-1
    )
    sun: Floats = direction * distance[..., None]
    return sun


def is_sunlit(position: Floats, sun: Floats) -> npt.NDArray[np.bool_]:
    """Return which positions (..., 3) are outside the Earth's shadow, a cylinder without penumbra."""
    direction = sun / np.linalg.norm(sun, axis=-1, keepdims=True)
    along = np.sum(position * direction, axis=-1)
    across = np.linalg.norm(position - along[..., None] * direction, axis=-1)
    lit: npt.NDArray[np.bool_] = (along > 0) | (across > EARTH_RADIUS_KM)
    return lit
