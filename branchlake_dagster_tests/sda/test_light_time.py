"""Light time and refraction against the path of the signal itself, which is solved numerically on the whole orbit."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq

from branchlake_dagster.sda.orbits import frames
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2, propagate_two_body
from branchlake_dagster.sda.sensors import measurement
from branchlake_dagster.sda.sensors.network import Noise

LIGHT = 299_792.458
START = 1_786_150_800_000_000
HEIGHTS_KM = {"low": 500.0, "navigation": 20_200.0, "geostationary": 35_786.0}
LAT, LON, ALT = 41.75, -70.54, 0.1


def site_at(seconds: float) -> np.ndarray:
    """The site, without rounding the time to microseconds."""
    angle = float(frames.sidereal_angle(np.array([START]))[0]) + frames.EARTH_ROTATION_RAD_S * seconds
    fixed = frames.site_ecef(np.array([LAT]), np.array([LON]), np.array([ALT]))[0]
    c, s = np.cos(angle), np.sin(angle)
    return np.array([c * fixed[0] - s * fixed[1], s * fixed[0] + c * fixed[1], fixed[2]])


@pytest.fixture(params=HEIGHTS_KM)
def orbit(request):
    """A state at the start that the site sees 500 km east of the zenith, in a circular orbit to the north."""
    station = measurement.Stations(*(np.array([one]) for one in (LAT, LON, ALT)), np.array([START]))
    east, north, up = frames.local_axes(station.lat_deg, station.lon_deg, station.micros)
    r = site_at(0.0) + HEIGHTS_KM[request.param] * up[0] + 500 * east[0] - 300 * north[0]
    along = north[0] - r * (r @ north[0]) / (r @ r)
    v = along / np.linalg.norm(along) * np.sqrt(MU_KM3_S2 / np.linalg.norm(r))

    def position(seconds: float) -> np.ndarray:
        return propagate_two_body(r[None], v[None], np.array([seconds]))[0][0]

    return r, v, position, station, (east[0], north[0], up[0])


def reflection_time(position, received: float) -> float:
    """When the light left the object that the site receives at that time."""
    return brentq(
        lambda t: received - t - np.linalg.norm(position(t) - site_at(received)) / LIGHT,
        received - 1.0,
        received,
        xtol=1e-14,
    )


def round_trip_range(position, reflected: float) -> float:
    """Half of the way from the transmission to the reception, km."""
    path = lambda at: np.linalg.norm(position(reflected) - site_at(at)) / LIGHT  # noqa: E731
    received = brentq(lambda t: t - reflected - path(t), reflected, reflected + 1.0, xtol=1e-14)
    sent = brentq(lambda t: reflected - t - path(t), reflected - 1.0, reflected, xtol=1e-14)
    return LIGHT * (received - sent) / 2


def test_a_radar_measures_half_of_the_round_trip(orbit):
    r, v, position, station, axes = orbit
    measured, _ = measurement.predict_radar(r[None], v[None], station)
    reflected = reflection_time(position, 0.0)
    assert measured[0, 0] == pytest.approx(round_trip_range(position, reflected), abs=1e-5)
    step = 0.05
    rate = (round_trip_range(position, reflected + step) - round_trip_range(position, reflected - step)) / (
        2 * step
    )
    # The range rate is that of the object and the site, without the change of the light time: 1 mm/s.
    assert measured[0, 1] == pytest.approx(rate, abs=5e-6)
    line = position(reflected) - site_at(0.0)
    e, n, u = (axis @ line for axis in axes)
    assert measured[0, 2] == pytest.approx(np.arctan2(e, n) % (2 * np.pi), abs=1e-9)
    assert measured[0, 3] == pytest.approx(np.arctan2(u, np.hypot(e, n)), abs=1e-9)


def test_a_telescope_sees_where_the_object_was(orbit, monkeypatch):
    r, v, position, station, _ = orbit
    monkeypatch.setattr(measurement, "ZENITH_PATH_KM", 0.0)
    measured, _ = measurement.predict_optical(r[None], v[None], station)
    x, y, z = position(reflection_time(position, 0.0)) - site_at(0.0)
    assert measured[0, 0] == pytest.approx(np.arctan2(y, x) % (2 * np.pi), abs=1e-9)
    assert measured[0, 1] == pytest.approx(np.arctan2(z, np.hypot(x, y)), abs=1e-9)


def test_light_time_exceeds_a_tenth_of_the_noise(orbit):
    """So it must be modelled: telescopes see two seconds of arc of it from any height, radars meters."""
    r, v, _, station, _ = orbit
    measured, _ = measurement.predict_optical(r[None], v[None], station)
    x, y, z = r - site_at(0.0)
    across = (measured[0, 1] - np.arctan2(z, np.hypot(x, y))) * 180 / np.pi * 3600
    assert abs(across) > Noise().optical_arcsec
    ranged = measurement.predict_radar(r[None], v[None], station)[0][0, 0]
    if np.linalg.norm(r) < 7_000:
        assert abs(ranged - np.linalg.norm(r - site_at(0.0))) > 0.1 * Noise().range_m / 1e3


@pytest.mark.parametrize("height_km", HEIGHTS_KM.values())
@pytest.mark.parametrize("zenith_deg", [10.0, 45.0, 65.0])
def test_parallactic_refraction_is_that_of_a_ray_through_the_atmosphere(height_km, zenith_deg):
    """Against the integral of a ray in a spherical atmosphere: n r sin(z) is constant along it."""
    radius, refractivity = 6_378.0, 2.77e-4
    at_site = np.radians(zenith_deg)
    constant = (1 + refractivity) * radius * np.sin(at_site)

    def turned(height: float) -> float:
        index = 1 + refractivity * np.exp(-height / measurement.SCALE_HEIGHT_KM)
        here = radius + height
        return constant / (here * np.sqrt((index * here) ** 2 - constant**2))

    air = quad(turned, 0, 300, epsabs=1e-15, epsrel=1e-13, limit=400)[0]
    # Beyond the atmosphere the ray is straight: its zenith distance and the angle at the center add up.
    top = np.arcsin(constant / (radius + 300))
    at_object = np.arcsin(constant / (radius + height_km))
    angle = air + top - at_object
    seen = air + top
    x, y = (radius + height_km) * np.sin(angle), (radius + height_km) * np.cos(angle) - radius
    bent = seen - np.arctan2(x, y)
    station = measurement.Stations(np.zeros(1), np.zeros(1), np.zeros(1), np.array([START]))
    east, _, up = frames.local_axes(station.lat_deg, station.lon_deg, station.micros)
    line = x * east + y * up
    lowered = line + measurement._parallactic_refraction(line, station)
    found = np.arctan2(np.sum(lowered * east), np.sum(lowered * up)) - np.arctan2(x, y)
    # The next order of the series: 3 % of a second of arc.
    assert found == pytest.approx(bent, rel=0.03)
    # 0.1 seconds of arc is a tenth of the noise of a telescope.
    if height_km < 1_000 and zenith_deg >= 45:
        assert np.degrees(found) * 3600 > 0.1 * Noise().optical_arcsec
