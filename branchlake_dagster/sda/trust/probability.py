"""Compute the probability of collision of a short encounter, and its dilution.

The model assumes a straight relative motion, Gaussian positions and a sphere for both objects together. The
probability is then the integral of a two-dimensional Gaussian over a disc in the plane perpendicular to the
relative velocity (Foster and Estes 1992; Chan 2008).

The disc is cut into strips along the wide axis, whose integral has a closed form (as in Alfano 2005). The
strips are summed by Gauss-Legendre quadrature in the disc's angle, only where the density matters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from branchlake_dagster.sda.orbits.frames import Floats

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_MAX_EXPONENT = 40.0
"""Strips with less than e^-40 of the maximum density are left out."""
_GOLDEN = (np.sqrt(5.0) - 1) / 2
_SEARCH_STEPS = 26
_MIN_SIGMAS = 1e-9
_BATCH_SIZE = 20_000


class EncounterPlane(NamedTuple):
    """The k encounters in the plane perpendicular to the relative velocity, km.

    ``miss`` (k, 2) is the position of the second object relative to the first. ``sigma`` (k, 2) is one
    standard deviation of both errors together. Both are along the axes of the error ellipse, the narrow axis
    first.
    """

    miss: Floats
    sigma: Floats


def build_encounter_plane(position: Floats, velocity: Floats, covariance: Floats) -> EncounterPlane:
    """Project relative positions (k, 3), km, and combined covariances (k, 3, 3), km², to encounter planes.

    The planes are perpendicular to the relative velocities (k, 3), km/s.
    """
    along = velocity / np.linalg.norm(velocity, axis=1, keepdims=True)
    # The axis with the smallest component of the velocity gives the best-conditioned plane.
    helper = np.eye(3)[np.argmin(np.abs(along), axis=1)]
    first_axis = np.cross(along, helper)
    first_axis = first_axis / np.linalg.norm(first_axis, axis=1, keepdims=True)
    basis = np.stack([first_axis, np.cross(along, first_axis)], axis=1)
    plane_covariance = np.einsum("kij,kjl,kml->kim", basis, covariance, basis)
    variance, axes = np.linalg.eigh(plane_covariance)
    miss = np.einsum("kij,kj->ki", basis, position)
    return EncounterPlane(np.einsum("kij,ki->kj", axes, miss), np.sqrt(np.maximum(variance, 0.0)))


def collision_probability(plane: EncounterPlane, radius_km: float | Floats) -> Floats:
    """Return the probability (k,) that two objects come closer than the sum of their radii.

    ``radius_km`` is this sum, one for all encounters or one for each (k,). The result is NaN where a sigma is
    not a positive number.
    """
    radius = _radius_per_encounter(radius_km, plane)
    parts = [np.zeros(0)]
    for begin in range(0, len(plane.miss), _BATCH_SIZE):
        rows = slice(begin, begin + _BATCH_SIZE)
        parts.append(_integrate_disc(plane.miss[rows], plane.sigma[rows], radius[rows]))
    return np.concatenate(parts)


def _radius_per_encounter(radius_km: float | Floats, plane: EncounterPlane) -> Floats:
    return np.broadcast_to(np.asarray(radius_km, np.float64), (len(plane.miss),))


def _integrate_disc(miss: Floats, sigma: Floats, radius: Floats) -> Floats:
    is_valid = np.asarray(np.isfinite(miss).all(axis=1) & (np.nan_to_num(sigma) > 0).all(axis=1))
    # The distribution is symmetric in both axes.
    (x0, y0), (sx, sy) = np.abs(miss).T, np.where(is_valid[:, None], sigma, 1.0).T
    nearest = np.minimum(x0, radius)
    reach = np.sqrt((x0 - nearest) ** 2 + 2 * _MAX_EXPONENT * sx**2)
    low = np.arcsin(np.clip((x0 - reach) / radius, -1.0, 1.0))
    high = np.arcsin(np.clip((x0 + reach) / radius, -1.0, 1.0))
    half = (high - low)[:, None] / 2
    angle = (high + low)[:, None] / 2 + half * _NODES
    x, chord = radius[:, None] * np.sin(angle), radius[:, None] * np.cos(angle)
    across = np.exp(-0.5 * ((x - x0[:, None]) / sx[:, None]) ** 2) / (np.sqrt(2 * np.pi) * sx[:, None])
    # Both arguments are on the side of the small tail: a difference of values near one would lose digits.
    strip = ndtr((chord - y0[:, None]) / sy[:, None]) - ndtr((-chord - y0[:, None]) / sy[:, None])
    total = np.sum(across * strip * chord * half * _WEIGHTS, axis=1)
    return np.asarray(np.where(is_valid, np.clip(total, 0.0, 1.0), np.nan))


class Dilution(NamedTuple):
    """The maximum probability (k,) over all scales of the covariance.

    ``factor`` (k,) on the sigmas gives this maximum. If it is below one, the encounter is in the dilution
    region.
    """

    probability: Floats
    factor: Floats


def compute_dilution(plane: EncounterPlane, radius_km: float | Floats) -> Dilution:
    """Return the maximum probability over one common factor on the errors of both objects.

    A probability in the dilution region is small because the positions are uncertain: with better elements it
    would rise at first. Where the miss distance is at most the radius, the maximum is 1 at factor 0.
    """
    radius = _radius_per_encounter(radius_km, plane)
    is_inside = np.linalg.norm(plane.miss, axis=1) <= radius
    sigma = np.where(plane.sigma > 0, plane.sigma, np.nan)
    # Over all factors, the density at a point is largest where the point is sqrt(2) sigma away. If all points
    # of the disc are nearer, or all are farther, the probability is monotonic, which bounds the search.
    distance = np.linalg.norm(plane.miss, axis=1)
    outside_sigmas = np.maximum(np.abs(plane.miss) - radius[:, None], 0.0) / sigma
    nearest = np.fmax(outside_sigmas.max(axis=1), (distance - radius) / sigma[:, 1])
    farthest = np.linalg.norm(plane.miss / sigma, axis=1) + radius / sigma[:, 0]
    low = np.log(np.maximum(nearest, _MIN_SIGMAS) / np.sqrt(2.0))
    high = np.log(np.maximum(farthest, _MIN_SIGMAS) / np.sqrt(2.0))

    def probability_at(log_factor: Floats) -> Floats:
        return collision_probability(EncounterPlane(plane.miss, sigma * np.exp(log_factor)[:, None]), radius)

    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = probability_at(left), probability_at(right)
    for _ in range(_SEARCH_STEPS):
        keep_left = at_left >= at_right
        low, high = np.where(keep_left, low, left), np.where(keep_left, right, high)
        new_point = np.where(keep_left, high - _GOLDEN * (high - low), low + _GOLDEN * (high - low))
        at_new_point = probability_at(new_point)
        left, right = np.where(keep_left, new_point, right), np.where(keep_left, left, new_point)
        at_left, at_right = (
            np.where(keep_left, at_new_point, at_right),
            np.where(keep_left, at_left, at_new_point),
        )
    best = (low + high) / 2
    has_sigma = np.isfinite(sigma).all(axis=1)
    largest = np.fmax(probability_at(best), collision_probability(plane, radius))
    return Dilution(
        np.where(has_sigma, np.where(is_inside, 1.0, largest), np.nan),
        np.where(has_sigma, np.where(is_inside, 0.0, np.exp(best)), np.nan),
    )
