"""Check whether propagated states are plausible: SGP4 gives absurd states for stale elements, without error.

There are three checks. The altitude must be at least 80 km, and the radius at most 5 % above the apogee. The
specific energy must be that of the orbit. The displacement from the neighboring instant must agree with the
velocities.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import EARTH_RADIUS_KM, Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements, Ephemeris
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2

MIN_ALTITUDE_KM = 80.0
"""No object completes a revolution below this altitude."""

RADIUS_MARGIN = 1.05
"""Factor on the apogee radius of the elements. Mean elements of high orbits are two percent off the true
ones."""

MAX_ENERGY_DEVIATION = 0.05
"""Maximum relative deviation of the specific energy. In real catalogs the deviation is at most 1.3 % for
new elements. Two weeks later it is at most 3.6 % for 99.9 % of the objects."""

MAX_DISPLACEMENT_ERROR = 0.01
"""Maximum difference of the displacement between two instants from the integral of the velocity, relative to
this integral."""

_ERROR_ALLOWANCE_KM = 1.0


class Fault(IntEnum):
    """The reason why a state is not plausible. Tables store its name in lower case."""

    NONE = 0
    SGP4 = 1
    ALTITUDE = 2
    ENERGY = 3
    DISPLACEMENT = 4


FAULT_NAMES = tuple(fault.name.lower() for fault in Fault if fault is not Fault.NONE)


@dataclass(frozen=True)
class StateFaults:
    """The faults of n objects at m instants.

    ``fault`` (n, m) is the first `Fault` that applies. ``altitude_km`` (n, m) is the altitude above a sphere
    of the equatorial radius. ``energy_ratio`` (n, m) is the state's specific energy over that of the
    elements.
    """

    fault: npt.NDArray[np.int8]
    altitude_km: Floats
    energy_ratio: Floats

    @property
    def plausible_states(self) -> npt.NDArray[np.bool_]:
        """Which states (n, m) are plausible."""
        return np.asarray(self.fault == Fault.NONE)

    @property
    def plausible_objects(self) -> npt.NDArray[np.bool_]:
        """Which objects (n,) have no fault at any instant."""
        return np.asarray(self.plausible_states.all(axis=1))

    def first_faulty_instant(self) -> npt.NDArray[np.int64]:
        """Return the index (n,) of each object's first faulty instant, or 0 for an object without faults."""
        return np.asarray(np.argmax(self.fault != Fault.NONE, axis=1))


def find_state_faults(ephemeris: Ephemeris, elements: Elements) -> StateFaults:
    """Check states against the elements that they were propagated from, in the same order of objects.

    Instants may be up to ten minutes apart. Displacement is not checked if there is only one instant. The
    cost is a dozen passes over the states.
    """
    radius, ratio, max_radius = _compare_to_orbit(ephemeris, elements)
    altitude = radius - EARTH_RADIUS_KM
    fault = np.zeros(radius.shape, dtype=np.int8)
    # The order is reversed, so that the first fault remains. Comparisons with NaN are false, so each check
    # states the valid range and is negated.
    fault[~_is_motion_consistent(ephemeris, radius)] = Fault.DISPLACEMENT
    fault[~_is_energy_plausible(ratio)] = Fault.ENERGY
    fault[~_is_altitude_plausible(radius, max_radius)] = Fault.ALTITUDE
    fault[~ephemeris.valid] = Fault.SGP4
    return StateFaults(fault, altitude, ratio)


def possible_states(ephemeris: Ephemeris, elements: Elements) -> npt.NDArray[np.bool_]:
    """Return which states (n, m) pass all checks except displacement, which needs several instants."""
    radius, ratio, max_radius = _compare_to_orbit(ephemeris, elements)
    return ephemeris.valid & _is_altitude_plausible(radius, max_radius) & _is_energy_plausible(ratio)


def _compare_to_orbit(ephemeris: Ephemeris, elements: Elements) -> tuple[Floats, Floats, Floats]:
    """Return radius and ratio of specific energies (n, m), and the maximum radius of the elements (n, 1)."""
    position, velocity = ephemeris.position, ephemeris.velocity
    motion, eccentricity = (
        elements.values[:, ELEMENT_FIELDS.index(name)] for name in ("mean_motion", "eccentricity")
    )
    axis = (MU_KM3_S2 / (motion * 2 * np.pi / 86_400) ** 2) ** (1 / 3)
    radius = np.sqrt(np.einsum("nmk,nmk->nm", position, position))
    speed2 = np.einsum("nmk,nmk->nm", velocity, velocity)
    ratio = (speed2 / 2 - MU_KM3_S2 / radius) * (-2 * axis / MU_KM3_S2)[:, None]
    return radius, ratio, (axis * (1 + eccentricity) * RADIUS_MARGIN)[:, None]


def _is_altitude_plausible(radius: Floats, max_radius: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray((radius >= EARTH_RADIUS_KM + MIN_ALTITUDE_KM) & (radius <= max_radius))


def _is_energy_plausible(ratio: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray(np.abs(ratio - 1) <= MAX_ENERGY_DEVIATION)


def _is_motion_consistent(ephemeris: Ephemeris, radius: Floats) -> npt.NDArray[np.bool_]:
    """Return which states (n, m) agree with the previous state; the first state is compared with the second.

    The predicted displacement is the corrected trapezoid of the velocities, h (v0 + v1) / 2 +
    h² (a0 - a1) / 12 with the two-body acceleration. Its error is at most 1 km over ten minutes in low orbit.
    """
    if len(ephemeris.micros) < 2:
        return np.ones(radius.shape, dtype=np.bool_)
    h = (np.diff(ephemeris.micros) / 1e6)[None, :, None]
    r, v = ephemeris.position, ephemeris.velocity
    acceleration = -MU_KM3_S2 * r / radius[..., None] ** 3
    displacement = np.diff(r, axis=1)
    predicted = h / 2 * (v[:, :-1] + v[:, 1:]) - h**2 / 12 * np.diff(acceleration, axis=1)
    deviation = np.linalg.norm(displacement - predicted, axis=2)
    is_consistent = (
        deviation <= MAX_DISPLACEMENT_ERROR * np.linalg.norm(predicted, axis=2) + _ERROR_ALLOWANCE_KM
    )
    return np.concatenate([is_consistent[:, :1], is_consistent], axis=1)
