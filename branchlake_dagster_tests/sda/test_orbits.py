import numpy as np
import pytest
from sgp4.api import Satrec

from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.orbits import frames
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites, time_grid
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2, propagate_two_body, transition_matrices
from branchlake_dagster.sda.sensors import measurement
from branchlake_dagster_tests.sda.test_gp import L1, L2

START = int(np.datetime64("2026-08-08T03:00:00", "us").astype(np.int64))


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements.from_arrow(simulated_elements(seed=3, objects=200, epoch=REFERENCE_EPOCH).to_arrow())


def test_propagation_is_that_of_the_sgp4_package():
    table = read_catalogue(f"{L1}\n{L2}".encode(), "test").elements.to_arrow()
    states = propagate_satellites(Elements.from_arrow(table).to_satrec_array(), np.array([START]))
    reference = Satrec.twoline2rv(L1, L2)
    whole, part = frames.julian_dates(np.array([START]))
    error, r, v = reference.sgp4(float(whole[0]), float(part[0]))
    assert error == 0
    np.testing.assert_allclose(states.position[0, 0], r, atol=1e-6)
    np.testing.assert_allclose(states.velocity[0, 0], v, atol=1e-9)


def test_interpolation_is_good_to_a_metre(elements):
    satellites = elements.to_satrec_array()
    coarse = propagate_satellites(satellites, time_grid(START, START + 600_000_000, 30))
    instant = START + 45_000_000
    rows = np.arange(len(elements))
    position, _ = coarse.interpolate(rows, np.full(len(rows), instant))
    exact = propagate_satellites(satellites, np.array([instant])).position[:, 0]
    assert np.abs(position - exact).max() < 1e-3


def test_an_object_that_cannot_be_propagated_is_marked(elements):
    values = elements.values.copy()
    values[0, 7] = 40.0  # revolutions per day
    broken = Elements(elements.sat_no, elements.epoch_micros, values)
    states = propagate_satellites(broken.to_satrec_array(), np.array([START]))
    assert not states.valid[0, 0]
    assert np.isnan(states.position[0]).all()
    assert states.valid[1:].all()


def test_sidereal_angle_matches_the_almanac_example():
    # Vallado, example 3-5: 1992-08-20 12:14 UT1, GMST 152.578787810 degrees.
    instant = np.array([np.datetime64("1992-08-20T12:14:00", "us").astype(np.int64)])
    assert np.degrees(frames.sidereal_angle(instant))[0] == pytest.approx(152.578787810, abs=1e-6)


def test_sun_matches_the_almanac_example():
    # Vallado, example 5-1: 2006-04-02 00:00 UT1, (146186212, 28788976, 12481064) km.
    instant = np.array([np.datetime64("2006-04-02T00:00:00", "us").astype(np.int64)])
    np.testing.assert_allclose(
        frames.sun_position(instant)[0], [146_186_212, 28_788_976, 12_481_064], rtol=1e-4
    )


def test_shadow_is_behind_the_earth():
    sun = np.array([1.5e8, 0, 0])
    position = np.array([[7000.0, 0, 0], [-7000.0, 0, 0], [-7000.0, 6500.0, 0]])
    assert frames.is_sunlit(position, sun).tolist() == [True, False, True]


def test_kepler_returns_and_its_transition_predicts(elements):
    states = propagate_satellites(elements.to_satrec_array(), np.array([START]))
    r, v = states.position[:, 0], states.velocity[:, 0]
    seconds = np.full(len(r), 1800.0)
    there = propagate_two_body(r, v, seconds)
    back = propagate_two_body(*there, -seconds)
    assert np.abs(back[0] - r).max() < 1e-6
    alone = propagate_two_body(r[0], v[0], np.float64(1800.0))
    np.testing.assert_allclose(alone[0], there[0][0], rtol=1e-12)
    matrix = transition_matrices(r, v, seconds)
    assert np.abs(np.linalg.det(matrix) - 1).max() < 1e-5
    change = np.array([0.2, -0.1, 0.3, 1e-4, -2e-4, 1e-4])
    moved = propagate_two_body(r + change[:3], v + change[3:], seconds)
    predicted = matrix @ change
    # Second order in the change: 0.3 km and 0.2 m/s over half an orbit leave metres.
    assert np.abs(moved[0] - there[0] - predicted[:, :3]).max() < 5e-3


@pytest.mark.parametrize("eccentricity", [0.0, 0.3, 0.95, 1.0, 1.5])
@pytest.mark.parametrize("seconds", [-1500.0, 0.0, 5.0, 600.0, 4000.0])
def test_transition_matrices_are_the_derivatives(eccentricity: float, seconds: float):
    """They are also symplectic, as of any motion without friction."""
    rng = np.random.default_rng(7)
    n, perigee = 200, 7_000.0
    anomaly = rng.uniform(-1.5, 1.5, n)
    semi_latus = perigee * (1 + eccentricity)
    radius = semi_latus / (1 + eccentricity * np.cos(anomaly))
    flat = np.stack([np.cos(anomaly), np.sin(anomaly), np.zeros(n)], axis=-1) * radius[:, None]
    speed = np.sqrt(MU_KM3_S2 / semi_latus)
    motion = np.stack([-np.sin(anomaly), eccentricity + np.cos(anomaly), np.zeros(n)], axis=-1) * speed
    turn = np.linalg.qr(rng.normal(size=(n, 3, 3)))[0]
    position, velocity = (np.einsum("nij,nj->ni", turn, some) for some in (flat, motion))
    span = np.full(n, seconds)
    matrix = transition_matrices(position, velocity, span)
    for column, step in enumerate([1e-2] * 3 + [1e-5] * 3):
        change = np.eye(6)[column] * step
        ahead, behind = (
            np.concatenate(
                propagate_two_body(position + sign * change[:3], velocity + sign * change[3:], span), axis=-1
            )
            for sign in (1, -1)
        )
        slope = (ahead - behind) / (2 * step)
        scale = np.abs(slope[:, :3]).max() + 1, np.abs(slope[:, 3:]).max() + 1e-3
        assert np.abs(slope - matrix[:, :, column])[:, :3].max() / scale[0] < 1e-5
        assert np.abs(slope - matrix[:, :, column])[:, 3:].max() / scale[1] < 1e-5
    form = np.block([[np.zeros((3, 3)), np.eye(3)], [-np.eye(3), np.zeros((3, 3))]])
    # Kilometers and kilometers in ten minutes, so that the terms have similar sizes.
    units = np.diag([1.0] * 3 + [600.0] * 3)
    scaled = units @ matrix @ np.linalg.inv(units)
    errors = np.abs(np.swapaxes(scaled, 1, 2) @ form @ scaled - form).max(axis=(1, 2))
    assert (errors / np.abs(scaled).max(axis=(1, 2)) ** 2).max() < 1e-9


def test_measurement_slopes_are_the_derivatives():
    rng = np.random.default_rng(5)
    n = 50
    stations = measurement.Stations(
        rng.uniform(-60, 60, n), rng.uniform(-180, 180, n), rng.uniform(0, 3, n), START + np.arange(n)
    )
    site, _ = frames.site_teme(stations.lat_deg, stations.lon_deg, stations.alt_km, stations.micros)
    east, north, up = frames.local_axes(stations.lat_deg, stations.lon_deg, stations.micros)
    r = site + 800 * up + 300 * east - 200 * north
    v = rng.normal(0, 5, (n, 3))
    # Without a velocity only the site moves, by a meter or two while the signal travels.
    measured, _ = measurement.predict_radar(r, 0 * v, stations)
    assert measured[:, 0] == pytest.approx(np.sqrt(800**2 + 300**2 + 200**2), abs=2e-3)
    assert np.degrees(measured[:, 2]) == pytest.approx(180 - np.degrees(np.arctan2(300, 200)))
    _, slope = measurement.predict_radar(r, v, stations)
    _, angle_slope = measurement.predict_optical(r, v, stations)
    for k in range(6):
        step = np.zeros(6)
        step[k] = 1e-4
        ahead = measurement.predict_radar(r + step[:3], v + step[3:], stations)[0]
        behind = measurement.predict_radar(r - step[:3], v - step[3:], stations)[0]
        np.testing.assert_allclose((ahead - behind) / 2e-4, slope[:, :, k], rtol=1e-4, atol=1e-6)
        ahead = measurement.predict_optical(r + step[:3], v + step[3:], stations)[0]
        behind = measurement.predict_optical(r - step[:3], v - step[3:], stations)[0]
        np.testing.assert_allclose((ahead - behind) / 2e-4, angle_slope[:, :, k], rtol=1e-4, atol=1e-6)
