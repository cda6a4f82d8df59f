"""Propagate many orbits at once by two-body motion, and differentiate the result by the initial state.

Two-body motion considers only the attraction of a spherical Earth. The method uses universal variables
(Vallado, algorithm 8; Bate, Mueller and White, section 4.4).
"""

from __future__ import annotations

import numpy as np

from branchlake_dagster.sda.orbits.frames import Floats

MU_KM3_S2 = 398_600.4418


def _stumpff_functions(z: Floats) -> tuple[Floats, Floats]:
    """Return the functions c2 and c3, by series near zero where the closed forms cancel."""
    safe = np.where(np.abs(z) < 1e-3, 1.0, z)
    root = np.sqrt(np.abs(safe))
    bound = safe > 0
    # Hyperbolic branches are evaluated for all rows; clip keeps the unused ones finite.
    wide = np.minimum(root, 50.0)
    c2 = np.where(bound, (1 - np.cos(root)) / safe, (1 - np.cosh(wide)) / safe)
    c3 = np.where(bound, (root - np.sin(root)) / root**3, (np.sinh(wide) - wide) / wide**3)
    near = np.abs(z) < 1e-3
    c2 = np.where(near, 1 / 2 - z / 24 + z**2 / 720, c2)
    c3 = np.where(near, 1 / 6 - z / 120 + z**2 / 5040, c3)
    return c2, c3


def propagate_two_body(position: Floats, velocity: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the states after ``seconds`` (...). Positions and velocities are (..., 3), in km and km/s."""
    r0 = np.linalg.norm(position, axis=-1)
    rv = np.sum(position * velocity, axis=-1) / np.sqrt(MU_KM3_S2)
    alpha = 2 / r0 - np.sum(velocity**2, axis=-1) / MU_KM3_S2
    target = np.sqrt(MU_KM3_S2) * seconds
    chi = target * np.abs(alpha)
    # Newton iteration reaches rounding error within twelve rounds for spans below one revolution.
    for _ in range(12):
        c2, c3 = _stumpff_functions(alpha * chi**2)
        r = chi**2 * c2 + rv * chi * (1 - alpha * chi**2 * c3) + r0 * (1 - alpha * chi**2 * c2)
        time = chi**3 * c3 + rv * chi**2 * c2 + r0 * chi * (1 - alpha * chi**2 * c3)
        chi = chi + (target - time) / r
    c2, c3 = _stumpff_functions(alpha * chi**2)
    f = 1 - chi**2 / r0 * c2
    g = seconds - chi**3 / np.sqrt(MU_KM3_S2) * c3
    end = f[..., None] * position + g[..., None] * velocity
    r = np.linalg.norm(end, axis=-1)
    fdot = np.sqrt(MU_KM3_S2) / (r * r0) * chi * (alpha * chi**2 * c3 - 1)
    gdot = 1 - chi**2 / r * c2
    return end, fdot[..., None] * position + gdot[..., None] * velocity


def transition_matrices(position: Floats, velocity: Floats, seconds: Floats) -> Floats:
    """Return state transition matrices (n, 6, 6) of two-body motion.

    A matrix converts a small change of the initial state (n, 3), km and km/s, to the change of the state
    after ``seconds`` (n,). The matrices are central differences of ``propagate_two_body`` with steps of 1 km
    and 1 m/s; the relative truncation error is below 1e-6. The two-body model neglects the differential J2
    effect. Over half a revolution this is about 1e-3 of a mapped offset: half a meter for 500 m.
    """
    steps = np.array([1.0, 1.0, 1.0, 1e-3, 1e-3, 1e-3])
    offsets = np.concatenate([np.diag(steps), -np.diag(steps)])[:, None, :]
    r, v = propagate_two_body(
        position + offsets[..., :3], velocity + offsets[..., 3:], np.broadcast_to(seconds, (12, len(seconds)))
    )
    ends = np.concatenate([r, v], axis=-1)
    return np.moveaxis((ends[:6] - ends[6:]) / (2 * steps[:, None, None]), 0, -1)
