"""From TEME to the frames that messages are written in, and back.

SGP4's TEME is the mean equator of date with the true equinox's uniform part; it is brought to the Earth's
pseudo-fixed frame by the mean sidereal time of 1982, and from there by the Earth rotation angle and the
precession-nutation of IAU 2006/2000A to GCRF (Vallado et al., AIAA 2006-6753, appendix C; IERS Conventions
2010). Of the two angles only the difference counts, which changes by 50 arcseconds a year: so UTC stands for
UT1, and no Earth orientation parameters are needed. What is left out, the celestial pole offsets, is 1 cm in
low orbit. The turn itself is so slow (1e-11 rad/s) that velocities are only turned.
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
    """Inertial frames, with the Earth in the middle; EME2000 is off GCRF by the constant frame bias."""

    TEME = "TEME"
    GCRF = "GCRF"
    EME2000 = "EME2000"


def rotate_to_frame(vectors: Floats, micros: Micros, begin: Frame, end: Frame) -> Floats:
    """Vectors (k, 3) at instants (k,) from one frame in another."""
    if begin is end:
        return np.asarray(vectors)
    begin_matrices, end_matrices = to_gcrf_matrix(micros, begin), to_gcrf_matrix(micros, end)
    return np.asarray(np.einsum("kji,kjl,kl->ki", end_matrices, begin_matrices, vectors))


def to_gcrf_matrix(micros: Micros, frame: Frame) -> Floats:
    """Matrices (k, 3, 3) that turn a frame's vectors into GCRF."""
    if frame is Frame.GCRF:
        return np.broadcast_to(np.eye(3), (len(micros), 3, 3))
    if frame is Frame.EME2000:
        # The bias is fixed: what turns GCRF into the mean equator and equinox of J2000.
        bias, _, _ = erfa.bp06(*_J2000)
        return np.broadcast_to(np.asarray(bias).T, (len(micros), 3, 3))
    day, rest = julian_dates(micros)
    with warnings.catch_warnings():
        # Beyond the known leap seconds: one of them is a nanoradian.
        warnings.simplefilter("ignore", erfa.ErfaWarning)
        tt = erfa.taitt(*erfa.utctai(day, rest))
    angle = erfa.gmst82(day, rest) - erfa.era00(day, rest)
    c, s, zeros, ones = np.cos(angle), np.sin(angle), np.zeros_like(angle), np.ones_like(angle)
    # To the Earth-fixed frame by one angle, back by the other, both about the same pole.
    to_cirs = np.stack(
        [
            np.stack([c, s, zeros], axis=-1),
            np.stack([-s, c, zeros], axis=-1),
            np.stack([zeros, zeros, ones], axis=-1),
        ],
        axis=-2,
    )
    return np.asarray(np.einsum("kji,kjl->kil", erfa.c2i06a(*tt), to_cirs))
