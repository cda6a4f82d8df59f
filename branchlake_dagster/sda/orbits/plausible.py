"""Whether propagated states can be true: SGP4 gives absurd ones, without an error, for elements gone stale.

Three things are asked of a state, each against the elements that it was propagated from or against its
neighbour: that the object is above the atmosphere's floor and not beyond its apogee, that its specific energy
is that of its orbit, and that it moved from instant to instant as fast as its velocity says.
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
"""Nothing completes a revolution below it."""

RADIUS_MARGIN = 1.05
"""Of the apogee that the elements state. Mean elements of high orbits are two percent off the true ones."""

MAX_ENERGY_DEVIATION = 0.05
"""Relative, of specific energy. In real catalogues it is at most 1.3 % while the elements are new and 3.6 %
for all but one in a thousand objects two weeks later."""

MAX_DISPLACEMENT_ERROR = 0.01
"""Of the way between two instants: what may remain between it and the integral of the velocity."""

_ERROR_ALLOWANCE_KM = 1.0


class Fault(IntEnum):
    """Why a state cannot be true; in tables by its name in lower case."""

    NONE = 0
    SGP4 = 1
    ALTITUDE = 2
    ENERGY = 3
    DISPLACEMENT = 4


FAULT_NAMES = tuple(fault.name.lower() for fault in Fault if fault is not Fault.NONE)


@dataclass(frozen=True)
class StateFaults:
    """Faults of n objects on m instants, ``fault`` (n, m) of `Fault`; the first that applies.

    ``altitude_km`` (n, m) is above a sphere of the equatorial radius, ``energy_ratio`` (n, m) the state's
    specific energy over that of the elements.
    """

    fault: npt.NDArray[np.int8]
    altitude_km: Floats
    energy_ratio: Floats

    @property
    def plausible_states(self) -> npt.NDArray[np.bool_]:
        """Which states (n, m) can be true."""
        return np.asarray(self.fault == Fault.NONE)

    @property
    def plausible_objects(self) -> npt.NDArray[np.bool_]:
        """Which objects (n,) have no fault at any instant."""
        return np.asarray(self.plausible_states.all(axis=1))

    def first_faulty_instant(self) -> npt.NDArray[np.int64]:
        """Index of each object's first faulty instant (n,); 0 for those without."""
        return np.asarray(np.argmax(self.fault != Fault.NONE, axis=1))


def find_state_faults(ephemeris: Ephemeris, elements: Elements) -> StateFaults:
    """Judge states against the elements that they come from; row by row the same objects.

    Instants may be up to ten minutes apart; with one alone, displacement is not asked. All of it is a
    dozen passes over the states.
    """
    radius, ratio, max_radius = _compare_to_orbit(ephemeris, elements)
    altitude = radius - EARTH_RADIUS_KM
    fault = np.zeros(radius.shape, dtype=np.int8)
    # In reverse, so that the first one stays. Comparisons with NaN are false, so they ask what is right.
    fault[~_is_motion_consistent(ephemeris, radius)] = Fault.DISPLACEMENT
    fault[~_is_energy_plausible(ratio)] = Fault.ENERGY
    fault[~_is_altitude_plausible(radius, max_radius)] = Fault.ALTITUDE
    fault[~ephemeris.valid] = Fault.SGP4
    return StateFaults(fault, altitude, ratio)


def possible_states(ephemeris: Ephemeris, elements: Elements) -> npt.NDArray[np.bool_]:
    """Which states (n, m) can be true taken each by itself: all but displacement."""
    radius, ratio, max_radius = _compare_to_orbit(ephemeris, elements)
    return ephemeris.valid & _is_altitude_plausible(radius, max_radius) & _is_energy_plausible(ratio)


def _compare_to_orbit(ephemeris: Ephemeris, elements: Elements) -> tuple[Floats, Floats, Floats]:
    """Radius and ratio of specific energies (n, m), and the largest radius that the elements allow (n, 1)."""
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
    """Whether each state (n, m) fits the one before it, and the first the one after it.

    The way is the corrected trapezoid of the velocities, h (v0 + v1) / 2 + h² (a0 - a1) / 12 with the
    two-body acceleration: exact to 1 km over ten minutes in low orbit.
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
