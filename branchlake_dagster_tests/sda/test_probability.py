"""Probability of collision: published cases, two independent integrations, and its dilution."""

import numpy as np
import pytest
from scipy.integrate import dblquad
from scipy.stats import multivariate_normal

from branchlake_dagster.sda.trust.probability import (
    EncounterPlane,
    build_encounter_plane,
    collision_probability,
    compute_dilution,
)

# Miss and sigma along two axes, radius, probability; in any one unit of length.
PUBLISHED = {
    # Chan, Spacecraft Collision Probability (2008), twelve cases; figures to four digits.
    "Chan 1": (0, 10, 25, 50, 5, 9.741e-3),
    "Chan 2": (10, 0, 25, 50, 5, 9.181e-3),
    "Chan 3": (0, 10, 25, 75, 5, 6.571e-3),
    "Chan 4": (10, 0, 25, 75, 5, 6.125e-3),
    "Chan 5": (0, 1000, 1000, 3000, 10, 1.577e-5),
    "Chan 6": (1000, 0, 1000, 3000, 10, 1.011e-5),
    "Chan 7": (0, 10000, 1000, 3000, 10, 6.443e-8),
    "Chan 8": (10000, 0, 1000, 3000, 10, 3.219e-27),
    "Chan 9": (0, 10000, 1000, 10000, 10, 3.033e-6),
    "Chan 10": (10000, 0, 1000, 10000, 10, 9.656e-28),
    "Chan 11": (0, 5000, 1000, 3000, 50, 1.039e-4),
    "Chan 12": (5000, 0, 1000, 3000, 50, 1.564e-9),
    # Real messages and Alfano's cases 3 and 5 as in Serra's thesis (INSA Toulouse, 2015).
    "CSM 1": (84.875546, 60.583685, 57.918666, 152.8814468, 10.3, 1.9002e-3),
    "CSM 2": (-81.618369, 115.055899, 15.988242, 5756.840725, 1.3, 2.0553e-11),
    "CSM 3": (102.177247, 693.405893, 94.230921, 643.409272, 5.3, 7.2003e-5),
    "CDM 1": (-752.672701, 644.939441, 445.859950, 6095.858688, 3.5, 5.3904e-7),
    "CDM 2": (-692.362272, 4475.456261, 193.454603, 562.027293, 13.2, 2.2795e-20),
    "Alfano 3": (-3.8872073, 0.1591646, 1.4101830, 114.2585190, 15, 1.0038e-1),
    "Alfano 5": (-1.2217895, 2.1230067, 0.0373279, 177.8109003, 10, 4.4509e-2),
}


def plane(*rows: tuple[float, float, float, float]) -> EncounterPlane:
    values = np.array(rows, dtype=float)
    return EncounterPlane(values[:, :2], values[:, 2:])


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_cases(case):
    *row, radius, wanted = PUBLISHED[case]
    # Which axis is called the first says nothing.
    swapped = (row[1], row[0], row[3], row[2])
    assert collision_probability(plane(tuple(row), swapped), radius) == pytest.approx(wanted, rel=5e-4)


def test_a_published_case_from_states_and_covariances():
    """The first example of NASA CARA's Pc2D_Foster, a circle: two states, two covariances, 20 m."""
    r1, v1 = (
        np.array([378.39559, 4305.721887, 5752.767554]),
        np.array([2.360800244, 5.580331936, -4.322349039]),
    )
    r2, v2 = (
        np.array([374.5180598, 4307.560983, 5751.130418]),
        np.array([-5.388125081, -3.946827739, 3.322820358]),
    )
    first = [
        [44.5757544811362, 81.6751751052616, -67.8687662707124],
        [81.6751751052616, 158.453402956163, -128.616921644857],
        [-67.8687662707124, -128.616921644858, 105.490542562701],
    ]
    second = [
        [2.31067077720423, 1.69905293875632, -1.4170164577661],
        [1.69905293875632, 1.24957388457206, -1.04174164279599],
        [-1.4170164577661, -1.04174164279599, 0.869260558223714],
    ]
    found = build_encounter_plane(
        (r2 - r1)[None], (v2 - v1)[None], (np.array(first) + np.array(second))[None]
    )
    assert collision_probability(found, 0.020)[0] == pytest.approx(2.7060234765697e-05, rel=1e-8)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_integral_over_the_disc(seed):
    generator = np.random.default_rng(seed)
    miss = generator.normal(size=2) * 0.3
    sigma = np.sort(10 ** generator.uniform(-1.5, 0.5, 2))
    radius = 10 ** generator.uniform(-1.0, 0.0)
    density = multivariate_normal(miss, np.diag(sigma**2)).pdf
    wanted, error = dblquad(
        lambda s, angle: density([s * np.cos(angle), s * np.sin(angle)]) * s, 0, 2 * np.pi, 0, radius
    )
    found = collision_probability(plane((*miss, *sigma)), radius)[0]
    assert found == pytest.approx(wanted, rel=1e-6, abs=10 * error)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_share_of_lines_that_pass_through_the_sphere(seed):
    """Monte Carlo in three dimensions, without a plane: which straight lines come within the radius."""
    generator = np.random.default_rng(seed)
    root = generator.normal(size=(3, 3)) * np.array([0.3, 1.0, 0.1])
    covariance = root @ root.T
    velocity = generator.normal(size=3)
    velocity /= np.linalg.norm(velocity)
    position = root @ generator.normal(size=3)
    position -= (position @ velocity) * velocity
    radius = 0.25
    draws = position + generator.normal(size=(400_000, 3)) @ root.T
    nearest = np.linalg.norm(draws - (draws @ velocity)[:, None] * velocity, axis=1)
    share = np.mean(nearest <= radius)
    found = collision_probability(
        build_encounter_plane(position[None], 10 * velocity[None], covariance[None]), radius
    )[0]
    assert found == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / len(draws)))
    assert share > 0.005


def test_bounds_and_unknown_values():
    rows = plane((0, 0, 1e-6, 1e-6), (0, 0, 1e3, 1e3), (50, 0, 1e-3, 1e-3), (0, 0, 0, 1), (0, 0, np.nan, 1))
    found = collision_probability(rows, 1.0)
    assert found[:3] == pytest.approx([1.0, 0.5e-6, 0.0], rel=1e-5, abs=1e-300)
    assert np.isnan(found[3:]).all()
    assert np.isnan(compute_dilution(rows, 1.0).probability[3:]).all()
    assert len(collision_probability(EncounterPlane(np.zeros((0, 2)), np.zeros((0, 2))), 1.0)) == 0


@pytest.mark.parametrize("farthest", [2.0, 300.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_largest_probability_is_that_of_the_best_of_all_factors(seed, farthest):
    generator = np.random.default_rng(seed)
    count, radius = 60, 0.01
    far = generator.uniform(1.001, farthest, count) * radius
    angle = generator.uniform(0, 2 * np.pi, count)
    sigma = np.sort(10 ** generator.uniform(-3, 1.5, (count, 2)), axis=1)
    rows = EncounterPlane(np.column_stack([far * np.cos(angle), far * np.sin(angle)]), sigma)
    found = compute_dilution(rows, radius)
    factors = np.logspace(-6, 6, 2_000)
    all_of_them = np.stack(
        [collision_probability(EncounterPlane(rows.miss, sigma * one), radius) for one in factors]
    )
    best = all_of_them.max(axis=0)
    assert np.all(found.probability >= best * (1 - 1e-6))
    assert found.probability == pytest.approx(best, rel=1e-3)
    at_best = collision_probability(EncounterPlane(rows.miss, sigma * found.factor[:, None]), radius)
    assert at_best == pytest.approx(found.probability, rel=1e-6)
    larger = collision_probability(EncounterPlane(rows.miss, sigma * 1.001), radius)
    clear = np.abs(np.log(found.factor)) > 0.01
    rising = larger < collision_probability(rows, radius)
    nonzero = collision_probability(rows, radius) > 1e-290
    assert np.array_equal((found.factor < 1)[clear & nonzero], rising[clear & nonzero])


def test_a_small_disc_is_worst_where_the_miss_is_root_two_sigma():
    found = compute_dilution(plane((0.6, 0.8, 1.0, 1.0)), 1e-4)
    assert found.factor[0] == pytest.approx(1 / np.sqrt(2), rel=1e-3)
    assert found.factor[0] < 1
    assert compute_dilution(plane((0.6, 0.8, 0.1, 0.1)), 1e-4).factor[0] >= 1
    inside = compute_dilution(plane((0.001, 0.0, 1.0, 1.0)), 0.01)
    assert (inside.probability[0], inside.factor[0]) == (1.0, 0.0)
