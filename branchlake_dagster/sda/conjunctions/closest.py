"""Compute the closest approach of two objects within one minute, from their SGP4 states at both ends.

SGP4 is the standard model that computes a state (position and velocity) from an element set. Within the
minute each object moves on the quintic Hermite interpolant: a polynomial with the position, velocity and
acceleration of both ends. The acceleration is that of the Earth's gravity with its oblateness (J2). In the
middle of a minute, this differs from SGP4 by 6 mm for most objects of a real catalog, and by 5 cm for one
object in ten, mainly because SGP4's velocity is not exactly the derivative of its position. The result
depends only on the two element sets and the minute, not on the search that selected them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from branchlake_dagster.sda.orbits.frames import Floats

MINUTE_S = 60.0
_MU_KM3_S2 = 398_600.8
_RADIUS_KM = 6_378.135
_J2 = 0.001_082_616
"""The constant of WGS-72, the Earth model of SGP4."""
_ITERATIONS = 12


class States(NamedTuple):
    """Positions (km) and velocities (km/s), both (k, 3), in TEME, the inertial frame of SGP4."""

    position: Floats
    velocity: Floats


class Approach(NamedTuple):
    """The closest approaches of k pairs.

    `fraction` (k,) is the time as a fraction of the minute. `relative` is the second object's state relative
    to the first, and `own` the first object's state.
    """

    fraction: Floats
    relative: States
    own: States


def half_distance_rate(first: States, second: States) -> Floats:
    """Return half the derivative of the squared distance, km²/s. It is negative while a pair comes closer.

    The states are (..., 3); the result has the shape without the last dimension.
    """
    apart, speed = second.position - first.position, second.velocity - first.velocity
    return np.asarray(np.einsum("...k,...k->...", apart, speed))


def find_closest(begin: tuple[States, States], end: tuple[States, States]) -> Approach:
    """Find the minimum of the distance of pairs that approach at the start and recede at the end.

    For other pairs the result has no meaning.

    Args:
        begin: The states of both objects (k, 3) at the start of the minute.
        end: The states of both objects (k, 3) at its end.
    """
    curves = [_Quintic(one, other) for one, other in zip(begin, end, strict=True)]

    def states(s: Floats) -> tuple[States, States]:
        own, other = (curve.at(s) for curve in curves)
        return own, States(other.position - own.position, other.velocity - own.velocity)

    low, high = np.zeros(len(begin[0].position)), np.ones(len(begin[0].position))
    at_low, at_high = half_distance_rate(*begin), half_distance_rate(*end)
    was_before = np.zeros(len(low), np.int64)
    for _ in range(_ITERATIONS):
        # The Illinois variant of the false position: if an end of the bracket stays twice, its value is
        # halved, so that both ends move. The bracket keeps the secant within the minute.
        gap = np.where(at_high == at_low, 1.0, at_high - at_low)
        s = np.clip(low - at_low / gap * (high - low), low, high)
        _, relative = states(s)
        found = np.einsum("ij,ij->i", relative.position, relative.velocity)
        before = found < 0
        at_high = np.where(before, np.where(was_before > 0, at_high / 2, at_high), found)
        at_low = np.where(before, found, np.where(was_before < 0, at_low / 2, at_low))
        low, high = np.where(before, s, low), np.where(before, high, s)
        was_before = np.where(before, 1, -1)
    own, relative = states(s)
    return Approach(s, relative, own)


class _Quintic:
    """A polynomial of s in [0, 1] with the positions, velocities and accelerations of both ends."""

    def __init__(self, begin: States, end: States) -> None:
        h = MINUTE_S
        p0, v0, a0 = begin.position, h * begin.velocity, h * h / 2 * acceleration(begin.position)
        p1, v1, a1 = end.position, h * end.velocity, h * h / 2 * acceleration(end.position)
        gap, slope, bend = p1 - p0 - v0 - a0, v1 - v0 - 2 * a0, a1 - a0
        self._terms = (
            *(p0, v0, a0),
            *(10 * gap - 4 * slope + bend, -15 * gap + 7 * slope - 2 * bend, 6 * gap - 3 * slope + bend),
        )

    def at(self, s: Floats) -> States:
        x = s[:, None]
        p0, p1, p2, p3, p4, p5 = self._terms
        position = ((((p5 * x + p4) * x + p3) * x + p2) * x + p1) * x + p0
        velocity = (((5 * p5 * x + 4 * p4) * x + 3 * p3) * x + 2 * p2) * x + p1
        return States(position, velocity / MINUTE_S)


def acceleration(position: Floats) -> Floats:
    """Return the acceleration (..., 3) by the Earth's gravity with its oblateness (J2), km/s².

    `position` (..., 3) is in km, in TEME. Source: Vallado, 4th ed., eq. 8-30.
    """
    squared = np.einsum("...k,...k->...", position, position)[..., None]
    central = -_MU_KM3_S2 / (squared * np.sqrt(squared)) * position
    of_pole = 5 * position[..., 2:] ** 2 / squared
    factors = np.concatenate([1 - of_pole, 1 - of_pole, 3 - of_pole], axis=-1)
    return np.asarray(central * (1 + 1.5 * _J2 * _RADIUS_KM**2 / squared * factors))
