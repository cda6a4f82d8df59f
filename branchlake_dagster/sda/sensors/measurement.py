"""Predict what each kind of sensor measures of a state, and differentiate it by the state.

A state is an object's position and velocity, here in TEME (the inertial frame of SGP4), km and km/s. Angles
are in rad. Right ascension and declination are topocentric (seen from the sensor) along the TEME axes, not
J2000.

The time of a measurement is that of the reception. So the light time, in which the signal travels, is
modeled: an object in a low orbit moves up to 50 m in it, and 0.4 km in the geostationary orbit (Vallado,
section 4.4.2).

Sensors correct their angles for refraction (the bending of light by the air) and for stellar aberration
themselves: radars by a model of the troposphere, telescopes by the stars in the image. Light of stars and of
satellites is bent by the same angle, but a satellite is not infinitely far away. The remaining difference is
the parallactic refraction, which is modeled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats, Micros, local_axes, site_teme
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2

LIGHT_KM_S = 299_792.458
"""The speed of light in vacuum, km/s."""
_LIGHT_ROUNDS = 2
"""Iterations that compute the light time.

Each leaves 3e-5 of the error: the ratio of the speeds of the object and of light.
"""


ZENITH_PATH_KM = 2.34e-3
"""The additional optical path, km, that refraction causes for visible light from the zenith.

It is the refractivity 2.77e-4 at 15 degrees Celsius and 1013 hPa, times the scale height of 8.43 km, for a
site at sea level.
"""
SCALE_HEIGHT_KM = 8.43


@dataclass(frozen=True)
class Stations:
    """The coordinates of ground sensors, and the times of their measurements; all arrays (n,).

    Latitude and longitude are in degrees, the height in km, the times in UTC microseconds since 1970.
    """

    lat_deg: Floats
    lon_deg: Floats
    alt_km: Floats
    micros: Micros

    # `cached_property` has a lock, so the class could not be pickled for Spark's workers.
    _cache: dict[str, tuple[Floats, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def states(self) -> tuple[Floats, Floats]:
        """The positions (km) and velocities (km/s), both (n, 3), in TEME. They are computed once."""
        if "states" not in self._cache:
            self._cache["states"] = site_teme(self.lat_deg, self.lon_deg, self.alt_km, self.micros)
        position, velocity = self._cache["states"]
        return position, velocity

    @property
    def axes(self) -> tuple[Floats, Floats, Floats]:
        """The east, north and up unit vectors (n, 3) in TEME. They are computed once."""
        if "axes" not in self._cache:
            self._cache["axes"] = local_axes(self.lat_deg, self.lon_deg, self.micros)
        east, north, up = self._cache["axes"]
        return east, north, up

    def take(self, rows: npt.NDArray[np.int64]) -> Stations:
        """Return the given rows."""
        return Stations(self.lat_deg[rows], self.lon_deg[rows], self.alt_km[rows], self.micros[rows])


def light_delay(position: Floats, velocity: Floats, site: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the light time from objects to sites, and the objects' states when the light left them.

    Args:
        position: (n, 3) The objects' positions at the time of reception, km.
        velocity: (n, 3) Their velocities, km/s.
        site: (n, 3) The sites' positions at the time of reception, km.

    Returns:
        The light time (n,), s, positive, and the earlier positions and velocities (n, 3). They neglect the
            change of the acceleration, which is micrometers.
    """
    acceleration = -MU_KM3_S2 * position / np.linalg.norm(position, axis=-1)[:, None] ** 3
    earlier = position
    for _ in range(_LIGHT_ROUNDS):
        delay = (np.linalg.norm(earlier - site, axis=-1) / LIGHT_KM_S)[:, None]
        earlier = position - delay * velocity + delay**2 / 2 * acceleration
    return delay[:, 0], earlier, velocity - delay * acceleration


def predict_radar(position: Floats, velocity: Floats, stations: Stations) -> tuple[Floats, Floats]:
    """Return the radar measurements (n, 4) of n states, and their derivatives (n, 4, 6) by the state.

    The four values are range (km), range rate (km/s), azimuth from north over east, and elevation (rad).
    Range and range rate are those between object and site at the instant of the reflection. A radar measures
    half of the round trip, which equals this range, because the site's motion changes the two ways by
    opposite amounts. The angles are the direction from which the signal is received.

    Args:
        position: (n, 3) The objects' positions at the time of reception, TEME, km.
        velocity: (n, 3) Their velocities, km/s.
        stations: The sites, and the times of reception.
    """
    site, site_velocity = stations.states
    east, north, up = stations.axes
    delay, earlier, earlier_velocity = light_delay(position, velocity, site)
    line, rate = earlier - (site - delay[:, None] * site_velocity), earlier_velocity - site_velocity
    distance = np.linalg.norm(line, axis=-1)
    unit = line / distance[:, None]
    range_rate = np.sum(unit * rate, axis=-1)
    seen = earlier - site
    seen_unit = seen / np.linalg.norm(seen, axis=-1)[:, None]
    e, n, u = (np.sum(axis * seen, axis=-1) for axis in (east, north, up))
    horizontal = np.hypot(e, n)
    measured = np.stack(
        [distance, range_rate, np.arctan2(e, n) % (2 * np.pi), np.arctan2(u, horizontal)], axis=1
    )
    slope = np.zeros((len(distance), 4, 6))
    slope[:, 0, :3] = unit
    slope[:, 1, :3] = (rate - range_rate[:, None] * unit) / distance[:, None]
    slope[:, 1, 3:] = unit
    slope[:, 2, :3] = (n[:, None] * east - e[:, None] * north) / horizontal[:, None] ** 2
    slope[:, 3, :3] = (up - np.sum(seen_unit * up, axis=-1)[:, None] * seen_unit) / horizontal[:, None]
    return measured, _delay_slope(slope, delay)


def predict_optical(position: Floats, velocity: Floats, stations: Stations) -> tuple[Floats, Floats]:
    """Return right ascension and declination (rad) of n states (n, 2), and their derivatives (n, 2, 6).

    The arguments are those of `predict_radar`.
    """
    site, _ = stations.states
    delay, earlier, _ = light_delay(position, velocity, site)
    line = earlier - site
    line = line + _parallactic_refraction(line, stations)
    x, y, z = line.T
    flat = np.hypot(x, y)
    distance = np.hypot(flat, z)
    measured = np.stack([np.arctan2(y, x) % (2 * np.pi), np.arctan2(z, flat)], axis=1)
    slope = np.zeros((len(x), 2, 6))
    slope[:, 0, 0], slope[:, 0, 1] = -y / flat**2, x / flat**2
    slope[:, 1, 0], slope[:, 1, 1] = -x * z / (flat * distance**2), -y * z / (flat * distance**2)
    slope[:, 1, 2] = flat / distance**2
    return measured, _delay_slope(slope, delay)


def _parallactic_refraction(line: Floats, stations: Stations) -> Floats:
    """Return the displacement (n, 3), km, of objects in comparison with the stars around them.

    Objects appear lower than they are. The bent ray from an object outside of the atmosphere is a straight
    line there, which passes the site at a distance of ``K sin(z) / cos(z)^2`` (z: zenith distance; K:
    `ZENITH_PATH_KM`). This is the refraction of a spherical atmosphere in the first order of its scale height
    over the Earth's radius.
    """
    _, _, up = stations.axes
    unit = line / np.linalg.norm(line, axis=-1)[:, None]
    cosine = np.sum(unit * up, axis=-1)[:, None]
    path = ZENITH_PATH_KM * np.exp(-stations.alt_km / SCALE_HEIGHT_KM)[:, None]
    # Near the horizon the series does not hold; telescopes do not observe there.
    return np.asarray(path / np.maximum(cosine, 0.1) ** 2 * (cosine * unit - up))


def _delay_slope(slope: Floats, delay: Floats) -> Floats:
    """Convert derivatives by the state before the light time to derivatives by the state at the reception.

    The dependence of the light time on the state is neglected: 3e-5 of a derivative.
    """
    slope[:, :, 3:] -= delay[:, None, None] * slope[:, :, :3]
    return slope


def wrap_angle(angle: Floats) -> Floats:
    """Return the same angle in [-pi, pi), rad."""
    return (angle + np.pi) % (2 * np.pi) - np.pi
