"""Propagate many orbits at once by two-body motion, and differentiate the result by the initial state.

Two-body motion considers only the attraction of a spherical Earth. The method uses universal variables
(Vallado, algorithm 8; Bate, Mueller and White, section 4.4), and Battin's closed form of the derivatives (An
Introduction to the Mathematics and Methods of Astrodynamics, section 9.7).
"""

from __future__ import annotations

from math import factorial, sqrt
from typing import NamedTuple

import numpy as np

from branchlake_dagster.sda.orbits.frames import Floats

MU_KM3_S2 = 398_600.4418
_SQRT_MU = sqrt(MU_KM3_S2)
_ROUNDS = 12
"""Newton's iteration reaches rounding error within this number of rounds for spans below one revolution."""
_LAST_STEP = 1e-9
"""A round with relative steps below this was the last one: each round squares the error."""
_SERIES_BELOW, _SERIES_TERMS = 0.5, 7
"""Arguments of Stumpff functions near zero, where the closed forms cancel, and the terms of the series."""


def _stumpff_series(z: Floats, order: int) -> Floats:
    """Return the Stumpff function of this order by its series: the sum of (-z)**k / (2 * k + order)!."""
    total = np.full_like(z, 1 / factorial(2 * _SERIES_TERMS + order))
    for k in range(_SERIES_TERMS - 1, -1, -1):
        total = 1 / factorial(2 * k + order) - z * total
    return total


def _stumpff_functions(z: Floats) -> tuple[Floats, Floats]:
    """Return the Stumpff functions c2 and c3."""
    shape = np.shape(z)
    z = np.atleast_1d(z)
    is_near = np.abs(z) < _SERIES_BELOW
    safe = np.where(is_near, 1.0, z)
    root = np.sqrt(np.abs(safe))
    c2 = (1 - np.cos(root)) / safe
    c3 = (root - np.sin(root)) / (root * root * root)
    if (is_hyperbolic := safe < 0).any():
        # Clipped, because an iteration may pass through arguments that overflow.
        wide = np.minimum(root[is_hyperbolic], 50.0)
        c2[is_hyperbolic] = (1 - np.cosh(wide)) / safe[is_hyperbolic]
        c3[is_hyperbolic] = (np.sinh(wide) - wide) / (wide * wide * wide)
    if is_near.any():
        c2[is_near] = _stumpff_series(z[is_near], 2)
        c3[is_near] = _stumpff_series(z[is_near], 3)
    return c2.reshape(shape), c3.reshape(shape)


class _Motion(NamedTuple):
    """Two-body motion from an initial to a final state. All values have the shape (...)."""

    chi: Floats
    """The universal anomaly, in the square root of km."""
    z: Floats
    """The argument of the Stumpff functions: `chi` squared, divided by the semi-major axis."""
    c2: Floats
    c3: Floats
    r0: Floats
    """The initial distance, in km."""
    f: Floats
    g: Floats
    """Lagrange's coefficients: the final position is `f` * initial position + `g` * initial velocity."""


def _solve_motion(position: Floats, velocity: Floats, seconds: Floats) -> _Motion:
    """Solve Kepler's equation for initial states (..., 3) and the seconds (...) until the final states."""
    r0 = np.linalg.norm(position, axis=-1)
    rv = np.sum(position * velocity, axis=-1) / _SQRT_MU
    alpha = 2 / r0 - np.sum(velocity**2, axis=-1) / MU_KM3_S2
    target = _SQRT_MU * seconds
    chi = target * np.abs(alpha)
    for _ in range(_ROUNDS):
        square = chi * chi
        z = alpha * square
        c2, c3 = _stumpff_functions(z)
        u1, u2 = chi * (1 - z * c3), square * c2
        r = u2 + rv * u1 + r0 * (1 - z * c2)
        step = (target - (square * chi * c3 + rv * u2 + r0 * u1)) / r
        chi = chi + step
        if np.all(np.abs(step) <= _LAST_STEP * np.abs(chi)):
            break
    square = chi * chi
    z = alpha * square
    c2, c3 = _stumpff_functions(z)
    return _Motion(chi, z, c2, c3, r0, 1 - square / r0 * c2, seconds - square * chi / _SQRT_MU * c3)


def _final_state(motion: _Motion, position: Floats, velocity: Floats) -> tuple[Floats, Floats]:
    """Return the final state, km and km/s (..., 3), of the motion from this initial state."""
    chi, z, c2, c3, r0, f, g = motion
    end = f[..., None] * position + g[..., None] * velocity
    r = np.linalg.norm(end, axis=-1)
    fdot = _SQRT_MU / (r * r0) * chi * (z * c3 - 1)
    gdot = 1 - chi * chi / r * c2
    return end, fdot[..., None] * position + gdot[..., None] * velocity


def propagate_two_body(position: Floats, velocity: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the states after ``seconds`` (...). Positions and velocities are (..., 3), in km and km/s."""
    return _final_state(_solve_motion(position, velocity, seconds), position, velocity)


def transition_matrices(position: Floats, velocity: Floats, seconds: Floats) -> Floats:
    """Return state transition matrices (n, 6, 6) of two-body motion.

    A matrix converts a small change of the initial state (n, 3), km and km/s, to the change of the state
    after ``seconds`` (n,). The two-body model neglects the differential J2 effect. Over half a revolution
    this is about 1e-3 of a mapped offset: half a meter for 500 m.
    """
    motion = _solve_motion(position, velocity, seconds)
    end, end_velocity = _final_state(motion, position, velocity)
    chi, z, c2, c3, r0, f, g = motion
    r = np.linalg.norm(end, axis=-1)
    fdot = _SQRT_MU / (r * r0) * chi * (z * c3 - 1)
    gdot = 1 - chi * chi / r * c2
    is_near = np.abs(z) < _SERIES_BELOW
    safe = np.where(is_near, 1.0, z)
    c4 = np.where(is_near, _stumpff_series(z, 4), (1 / 2 - c2) / safe)
    c5 = np.where(is_near, _stumpff_series(z, 5), (1 / 6 - c3) / safe)
    square = chi * chi
    # Battin's C, in km s.
    secular = square * square * chi * (3 * c5 - c4) / _SQRT_MU - seconds * square * c2
    change = end_velocity - velocity

    def outer(scale: Floats, left: Floats, right: Floats) -> Floats:
        return (scale[..., None] * left)[..., :, None] * right[..., None, :]

    unit = np.eye(3)
    matrices = np.empty((*chi.shape, 6, 6))
    matrices[..., :3, :3] = (
        outer(r / MU_KM3_S2, change, change)
        + outer((1 - f) / r0**2, end, position)
        + outer(secular / r0**3, end_velocity, position)
        + f[..., None, None] * unit
    )
    matrices[..., :3, 3:] = (
        outer(r0 * (1 - f) / MU_KM3_S2, end - position, velocity)
        - outer(r0 * (1 - f) / MU_KM3_S2, change, position)
        + outer(secular / MU_KM3_S2, end_velocity, velocity)
        + g[..., None, None] * unit
    )
    # (R V' - V R') R (V - V0)' is a vector times (V - V0)'.
    along = (
        np.sum(end_velocity * end, axis=-1)[..., None] * end
        - np.sum(end * end, axis=-1)[..., None] * end_velocity
    )
    matrices[..., 3:, :3] = (
        -outer(1 / r0**2, change, position)
        - outer(1 / r**2, end, change)
        + fdot[..., None, None] * unit
        - outer(fdot / r**2, end, end)
        + outer(fdot / (MU_KM3_S2 * r), along, change)
        - outer(MU_KM3_S2 * secular / (r**3 * r0**3), end, position)
    )
    matrices[..., 3:, 3:] = (
        outer(r0 / MU_KM3_S2, change, change)
        + outer(r0 * (1 - f) / r**3, end, position)
        - outer(secular / r**3, end, velocity)
        + gdot[..., None, None] * unit
    )
    return matrices
