"""Convert vectors between TEME and the other inertial frames that messages use.

The path from SGP4's TEME to GCRF has two steps (Vallado et al., AIAA 2006-6753, appendix C; IERS Conventions
2010): the mean sidereal time of 1982 leads to the Earth's pseudo-fixed frame, and the Earth rotation angle
with the precession-nutation of IAU 2006/2000A leads from there to GCRF.

Only the difference of the two angles matters. It changes by 50 arcseconds a year, so UTC can replace UT1, and
Earth orientation parameters are not needed. The celestial pole offsets are neglected, an error of 1 cm in low
orbit. The frames rotate so slowly against each other (1e-11 rad/s) that velocities are rotated like
positions.
"""

from __future__ import annotations

import warnings
from enum import StrEnum

import erfa
import numpy as np

from branchlake_dagster.sda.orbits.frames import Floats, Micros, julian_dates

_DAY_S = 86_400.0
_J2000 = (2_451_545.0, 0.0)


class Frame(StrEnum):
    """Earth-centered inertial frames. EME2000 differs from GCRF by the constant frame bias."""

    TEME = "TEME"
    GCRF = "GCRF"
    EME2000 = "EME2000"


def rotate_to_frame(vectors: Floats, micros: Micros, begin: Frame, end: Frame) -> Floats:
    """Convert vectors (k, 3) at UTC instants (k,) from frame ``begin`` to frame ``end``."""
    if begin is end:
        return np.asarray(vectors)
    begin_matrices, end_matrices = to_gcrf_matrix(micros, begin), to_gcrf_matrix(micros, end)
    return np.asarray(np.einsum("kji,kjl,kl->ki", end_matrices, begin_matrices, vectors))


def to_gcrf_matrix(micros: Micros, frame: Frame) -> Floats:
    """Return the matrices (k, 3, 3) that rotate a frame's vectors to GCRF."""
    if frame is Frame.GCRF:
        return np.broadcast_to(np.eye(3), (len(micros), 3, 3))
    if frame is Frame.EME2000:
        # The frame bias is a fixed rotation from GCRF to the mean equator and equinox of J2000.
        bias, _, _ = erfa.bp06(*_J2000)
        return np.broadcast_to(np.asarray(bias).T, (len(micros), 3, 3))
    day, rest = julian_dates(micros)
    with warnings.catch_warnings():
        # ERFA warns about dates after the known leap seconds. The error of a leap second is a nanoradian.
        warnings.simplefilter("ignore", erfa.ErfaWarning)
        tt = erfa.taitt(*erfa.utctai(day, rest))
    angle = erfa.gmst82(day, rest) - erfa.era00(day, rest)
    c, s, zeros, ones = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    # Rotate to the Earth-fixed frame by one angle and back by the other, both about the same pole.
    to_cirs = np.stack(
        [
            np.stack([c, s, zeros], axis=-1),
            np.stack([-s, c, zeros], axis=-1),
            np.stack([zeros, zeros, ones], axis=-1),
        ],
        axis=-2,
    )
    return np.asarray(np.einsum("kji,kjl->kil", erfa.c2i06a(*tt), to_cirs))
