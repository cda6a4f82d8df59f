"""Fit SGP4 element sets to states, so that a track can be propagated like any other element set.

A state is a position and velocity at one time. To propagate means to compute states at other times. An
element set has mean elements: they give a state only through SGP4 itself. So the elements are corrected by
Newton's method until SGP4 returns the wanted state (Vallado, Fundamentals of Astrodynamics, section 9.6, as
differential correction on one state). The corrected variables are equinoctial, because the classical ones are
undefined for circular and equatorial orbits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements, propagate_satellites

POSITION_TOLERANCE_KM = 1e-3
VELOCITY_TOLERANCE_KM_S = 1e-6
_STEPS = (1e-6, 1e-5, 1e-5, 1e-5, 1e-5, 1e-6)
"""Steps of the derivatives: relative for the mean motion, otherwise absolute.

They are a few meters in low orbit.
"""
_MAX_ECCENTRICITY = 0.999
_ECC, _ARGP, _INC, _ANOMALY, _MOTION, _NODE = (
    ELEMENT_FIELDS.index(name)
    for name in (
        *("eccentricity", "arg_of_pericenter", "inclination"),
        *("mean_anomaly", "mean_motion", "ra_of_asc_node"),
    )
)


@dataclass(frozen=True)
class FittedElements:
    """Element sets of n objects that give the wanted states.

    If ``is_fitted`` (n,) is false, the fit did not converge, and the object's row of ``elements`` is
    unchanged.
    """

    elements: Elements
    is_fitted: npt.NDArray[np.bool_]


def fit_elements(elements: Elements, position: Floats, velocity: Floats, micros: int) -> FittedElements:
    """Correct element sets so that SGP4 gives the wanted states at one instant, to 1 m and 1 mm/s.

    Epochs, drag terms and catalog numbers stay. Cost: about 12 initializations and propagations of SGP4 per
    object, 60 microseconds.

    Args:
        elements: One element set per object, near the wanted state (within some hundred kilometers).
        position: (n, 3) Wanted positions, TEME, km.
        velocity: (n, 3) Wanted velocities, TEME, km/s.
        micros: The instant of the states, UTC microseconds since 1970.
    """
    wanted = np.concatenate([position, velocity], axis=1).reshape(len(elements), 6)
    variables = _to_equinoctial(elements)
    # One matrix of derivatives serves nearly all objects. The others, in geosynchronous and very eccentric
    # orbits, get a new one in each round.
    variables = _iterate(elements, variables, wanted, micros, rounds=5, renews_derivatives=False)
    missed = np.flatnonzero(~_is_near(_states(elements, variables, micros), wanted))
    variables[missed] = _iterate(
        elements.take(missed),
        _to_equinoctial(elements.take(missed)),
        wanted[missed],
        micros,
        rounds=8,
        renews_derivatives=True,
    )
    is_fitted = _is_near(_states(elements, variables, micros), wanted)
    values = np.where(is_fitted[:, None], _to_values(elements, variables), elements.values)
    return FittedElements(replace(elements, values=values), is_fitted)


def _iterate(
    elements: Elements,
    variables: Floats,
    wanted: Floats,
    micros: int,
    *,
    rounds: int,
    renews_derivatives: bool,
) -> Floats:
    """Return the variables (n, 6) after some rounds of Newton's method."""
    current = _states(elements, variables, micros)
    inverse = _inverse_derivatives(elements, variables, current, micros)
    for number in range(rounds):
        if number and renews_derivatives:
            inverse = _inverse_derivatives(elements, variables, current, micros)
        step = np.einsum("nij,nj->ni", inverse, wanted - current)
        variables = variables + np.where(np.isfinite(step).all(axis=1)[:, None], step, 0.0)
        current = _states(elements, variables, micros)
    return variables


def _is_near(states: Floats, wanted: Floats) -> npt.NDArray[np.bool_]:
    miss = np.abs(wanted - states)
    return np.asarray(
        (miss[:, :3] < POSITION_TOLERANCE_KM).all(axis=1)
        & (miss[:, 3:] < VELOCITY_TOLERANCE_KM_S).all(axis=1)
    )


def _inverse_derivatives(elements: Elements, variables: Floats, current: Floats, micros: int) -> Floats:
    """Return the inverse (n, 6, 6) of the derivatives of the states; NaN where it does not exist."""
    derivative = np.empty((len(elements), 6, 6))
    for k, step in enumerate(_STEPS):
        moved = variables.copy()
        moved[:, k] += step
        derivative[:, :, k] = (_states(elements, moved, micros) - current) / step
    is_regular = np.asarray(np.isfinite(derivative).all(axis=(1, 2)))
    is_regular &= np.linalg.matrix_rank(np.where(is_regular[:, None, None], derivative, 0.0), tol=0.0) == 6
    inverse = np.linalg.inv(np.where(is_regular[:, None, None], derivative, np.eye(6)))
    return np.asarray(np.where(is_regular[:, None, None], inverse, np.nan))


def _states(elements: Elements, variables: Floats, micros: int) -> Floats:
    """Return the states (n, 6) that SGP4 computes; NaN for impossible elements."""
    values = _to_values(elements, variables)
    is_possible = np.isfinite(values).all(axis=1) & (values[:, _ECC] < _MAX_ECCENTRICITY)
    # SGP4 must not see impossible elements: their states are NaN, and the others are unaffected.
    safe = replace(elements, values=np.where(is_possible[:, None], values, elements.values))
    states = propagate_satellites(safe.to_satrec_array(), np.array([micros]))
    both = np.concatenate([states.position[:, 0], states.velocity[:, 0]], axis=1)
    return np.asarray(np.where(is_possible[:, None], both, np.nan))


def _to_equinoctial(elements: Elements) -> Floats:
    """Return (n, 6): correction of the mean motion (relative), h, k, p, q and the mean longitude (rad)."""
    eccentricity = elements.values[:, _ECC]
    argp, inclination, anomaly, node = np.radians(elements.values[:, [_ARGP, _INC, _ANOMALY, _NODE]]).T
    half = np.tan(inclination / 2)
    return np.stack(
        [
            np.zeros(len(elements)),
            eccentricity * np.sin(argp + node),
            eccentricity * np.cos(argp + node),
            half * np.sin(node),
            half * np.cos(node),
            anomaly + argp + node,
        ],
        axis=1,
    )


def _to_values(elements: Elements, variables: Floats) -> Floats:
    """Convert variables (n, 6) to ``Elements.values`` (n, 9)."""
    motion_change, h, k, p, q, longitude = variables.T
    periapsis, node = np.arctan2(h, k), np.arctan2(p, q)
    values = elements.values.copy()
    values[:, _ECC] = np.hypot(h, k)
    values[:, _INC] = np.degrees(2 * np.arctan(np.hypot(p, q)))
    values[:, _NODE] = np.degrees(node) % 360
    values[:, _ARGP] = np.degrees(periapsis - node) % 360
    values[:, _ANOMALY] = np.degrees(longitude - periapsis) % 360
    values[:, _MOTION] = elements.values[:, _MOTION] * (1 + motion_change)
    return values
