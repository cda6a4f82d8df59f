"""Use the element set as prior knowledge: the covariance of its state at one epoch.

The error of an element set has six parameters. Five are those of `association.predictions` at the phase zero:
the amplitudes ``R0``, ``R1``, ``N0`` and ``N1``, and ``T0``, an error of time. The sixth is the error of the
semi-major axis, which makes an object drift along its track. In a circular orbit they are the solution of
Hill's equations (Clohessy and Wiltshire 1960; Vallado, section 6.8). In eccentric orbits the same errors of
position would change the energy, and so the drift. Therefore the velocity along the track compensates them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2
from branchlake_dagster.sda.trust.differences import DAY_MICROS, rtn_axes

Rows = npt.NDArray[np.int64]

MIN_DRIFT_DAYS = 0.5
"""The smallest age from which the drift is derived, days: the error along the track grew over this time."""


@dataclass(frozen=True)
class ElementPrior:
    """The errors of element sets at the middle of a window, as arrays that Spark can ship with a function.

    ``sat_no`` (n,) is sorted. ``sigma_km`` (n, 3) is one standard deviation along R, T and N; NaN marks an
    unknown error. The estimation multiplies it by ``sigma_factor``.
    """

    sat_no: Rows
    sigma_km: Floats
    sigma_factor: float

    @classmethod
    def from_sigma(cls, sat_no: Rows, sigma_km: Floats, sigma_factor: float) -> ElementPrior:
        """Build the prior from objects in any order. ``sigma_km`` (n, 3) belongs to ``sat_no`` (n,)."""
        order = np.argsort(sat_no, kind="stable")
        return cls(sat_no[order], sigma_km[order], sigma_factor)

    def position_sigma(self, sat_no: Rows) -> Floats:
        """Return one standard deviation along R, T and N (k, 3) of objects, without ``sigma_factor``.

        A row is NaN if the object or one of its values is unknown.
        """
        if not len(self.sat_no):
            return np.full((len(sat_no), 3), np.nan)
        rows = np.minimum(np.searchsorted(self.sat_no, sat_no), len(self.sat_no) - 1)
        sigma = self.sigma_km[rows]
        is_usable = np.asarray((np.isfinite(sigma) & (sigma > 0)).all(axis=1) & (self.sat_no[rows] == sat_no))
        return np.where(is_usable[:, None], sigma, np.nan)

    def parameter_sigma(self, elements: Elements, sigma_km: Floats, epoch: int) -> Floats:
        """Return one standard deviation (n, 6) of each of the six parameters, in km.

        The parameters are ``R0``, ``R1``, ``T0``, ``N0``, ``N1`` and the semi-major axis. ``sigma_km`` (n, 3)
        is multiplied by ``sigma_factor``. The error of the semi-major axis is the one that causes the error
        along the track within the element set's age: ``T = 3/2 n a t``.
        """
        radial, transverse, normal = (sigma_km * self.sigma_factor).T
        age_s = np.maximum(np.abs(epoch - elements.epoch_micros) / DAY_MICROS, MIN_DRIFT_DAYS) * 86_400
        drift = 2 / 3 * transverse / (age_s * _mean_motion(elements))
        return np.stack([radial, radial, transverse, normal, normal, drift], axis=1)


def _mean_motion(elements: Elements) -> Floats:
    """Return the mean motion (n,) in rad/s."""
    return np.asarray(elements.values[:, ELEMENT_FIELDS.index("mean_motion")] * (2 * np.pi / 86_400))


def error_directions(elements: Elements, position: Floats, velocity: Floats) -> Floats:
    """Return the changes (n, 6, 6) of states by the six parameters. States are in TEME, km and km/s.

    The parameters are in km.

    Args:
        elements: The n element sets.
        position: (n, 3) Their positions at the epoch, km.
        velocity: (n, 3) Their velocities, km/s.
    """
    radius = np.linalg.norm(position, axis=1)[:, None]
    speed = np.linalg.norm(velocity, axis=1)[:, None]
    radial, _, normal = np.swapaxes(rtn_axes(position, velocity), 0, 1)
    along = velocity / speed
    rate = np.linalg.norm(np.cross(position, velocity), axis=1)[:, None] / radius**2
    radial_speed = np.sum(radial * velocity, axis=1)[:, None]
    inverse_axis = (_mean_motion(elements) ** 2 / MU_KM3_S2)[:, None] ** (1 / 3)
    gravity = MU_KM3_S2 / radius**2
    still = np.zeros_like(position)
    directions = np.zeros((len(position), 6, 6))
    # Each velocity along the track keeps the energy, except that of the semi-major axis: mu / (2 a^2) per km.
    columns = (
        (radial, -gravity / speed * along),
        (still, rate * (radial - radial_speed / speed * along)),
        (along, -gravity * radial / speed),
        (normal, still),
        (still, rate * normal),
        (radial, (MU_KM3_S2 * inverse_axis**2 / 2 - gravity) / speed * along),
    )
    for column, (moved, accelerated) in enumerate(columns):
        directions[:, :3, column], directions[:, 3:, column] = moved, accelerated
    return directions


def prior_information(directions: Floats, parameter_sigma: Floats) -> Floats:
    """Return the inverse covariances (n, 6, 6) of states.

    The result is zero for an object of which a standard deviation is unknown: it has no prior.
    """
    is_known = np.asarray(np.isfinite(parameter_sigma).all(axis=1))
    scaled = directions * np.where(is_known[:, None], parameter_sigma, 1.0)[:, None, :]
    inverse = np.linalg.inv(np.where(is_known[:, None, None], scaled, np.eye(6)))
    return np.where(is_known[:, None, None], np.swapaxes(inverse, 1, 2) @ inverse, 0.0)
