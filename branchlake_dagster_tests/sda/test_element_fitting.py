"""Element sets fitted to states: SGP4 gives the state back, and what follows from it is true."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.orbits.element_fitting import fit_elements
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements, propagate_satellites
from branchlake_dagster.sda.orbits.two_body import transition_matrices

NOON = datetime(2026, 8, 8, 12, 0, tzinfo=UTC)
MICROS = int(NOON.timestamp()) * 1_000_000
HALF_HOUR = 1_800_000_000


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements.from_arrow(simulated_elements(seed=4, objects=300, epoch=NOON).sort("sat_no").to_arrow())


def moved_states(elements: Elements, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    print(f"seed {seed}")  # noqa: T201 - shown if the test fails
    states = propagate_satellites(elements.to_satrec_array(), np.array([MICROS]))
    offset = np.random.default_rng(seed).normal(size=(len(elements), 6)) * [2, 2, 2, 2e-3, 2e-3, 2e-3]
    return states.position[:, 0], states.velocity[:, 0], offset


def test_the_state_comes_back(elements):
    position, velocity, offset = moved_states(elements, 1)
    fitted = fit_elements(elements, position + offset[:, :3], velocity + offset[:, 3:], MICROS)
    assert fitted.is_fitted.all()
    again = propagate_satellites(fitted.elements.to_satrec_array(), np.array([MICROS]))
    np.testing.assert_allclose(again.position[:, 0], position + offset[:, :3], atol=1e-3)
    np.testing.assert_allclose(again.velocity[:, 0], velocity + offset[:, 3:], atol=1e-6)
    np.testing.assert_array_equal(fitted.elements.epoch_micros, elements.epoch_micros)


@pytest.mark.parametrize("sign", [-1, 1])
def test_half_an_hour_from_the_state_the_offset_moves_as_in_two_body_motion(elements, sign):
    """Independent of SGP4's derivatives: the transition matrix of two-body motion maps the offset."""
    position, velocity, offset = moved_states(elements, 2)
    fitted = fit_elements(elements, position + offset[:, :3], velocity + offset[:, 3:], MICROS)
    at = np.array([MICROS + sign * HALF_HOUR])
    before, after = (
        propagate_satellites(one.to_satrec_array(), at).position[:, 0] for one in (elements, fitted.elements)
    )
    mapping = transition_matrices(position, velocity, np.full(len(elements), sign * HALF_HOUR / 1e6))
    expected = before + np.einsum("nij,nj->ni", mapping, offset)[:, :3]
    miss = np.linalg.norm(after - expected, axis=1)
    moved = np.linalg.norm(after - before, axis=1)
    assert np.median(miss / moved) < 0.02
    assert (miss < 0.05 * moved + 0.05).all()


def test_a_state_that_no_element_set_has_leaves_the_element_set(elements):
    position, velocity, _ = moved_states(elements, 3)
    velocity[0] *= 3  # hyperbolic
    position[1] = np.nan
    fitted = fit_elements(elements, position, velocity, MICROS)
    assert not fitted.is_fitted[:2].any()
    assert fitted.is_fitted[2:].all()
    np.testing.assert_array_equal(fitted.elements.values[:2], elements.values[:2])


def test_circular_and_equatorial_orbits_are_fitted(elements):
    values = elements.values.copy()
    values[:, ELEMENT_FIELDS.index("eccentricity")] = 0.0
    values[:150, ELEMENT_FIELDS.index("inclination")] = 0.0
    flat = replace(elements, values=values)
    position, velocity, offset = moved_states(flat, 4)
    fitted = fit_elements(flat, position + offset[:, :3], velocity + offset[:, 3:], MICROS)
    assert fitted.is_fitted.mean() > 0.97


def test_no_objects_are_no_error(elements):
    nothing = elements.take(np.zeros(0, np.int64))
    fitted = fit_elements(nothing, np.zeros((0, 3)), np.zeros((0, 3)), MICROS)
    assert len(fitted.elements) == 0
    assert fitted.is_fitted.shape == (0,)
