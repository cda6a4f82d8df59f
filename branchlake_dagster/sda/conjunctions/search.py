"""Find pairs that may come close, and when, from one state of each object every h seconds.

The states are those in the middle of each span of h seconds. `sieve.near_pairs` returns the pairs whose
straight-line motions come near. The true motions are bent by gravity. This module bounds the error e of a
pair's relative position by the difference of the two accelerations a_1 and a_2:

    |e| <= |a_2 - a_1| t^2 / 2 + (j_1 + j_2) |t|^3 / 6 + b (a_1 + a_2) t^2 / 2.

j <= 2 mu v / r^3 bounds the change of a central acceleration mu / r^2, and b = 1/200 bounds all other
accelerations, of which the largest is J2 with at most 1/600. At h = 60 s the bound exceeds the threshold by
some hundred meters, so nearly all pairs found are encounters.

The search does not affect the reported approaches, so h is chosen by cost: `screening` examines the minutes
that the search lists, and every minute for pairs that pass each other slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.conjunctions.sieve import Rows, near_pairs
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.plausible import possible_states
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites

_MU_KM3_S2 = 398_601.0
_NOT_CENTRAL = 1 / 200
_GROUND_KM = 6_350.0
_LARGEST_ACCELERATION = _MU_KM3_S2 / _GROUND_KM**2 * (1 + _NOT_CENTRAL)
"""An upper bound of every object's acceleration, km/s²."""
_MINUTE_S = 60.0
_EARLY_S = 1.0
_SPANS_AT_ONCE = 40
"""The number of spans that are searched together.

It bounds the memory: 16,000 objects at 40 instants have 31 MB of states.
"""


@dataclass(frozen=True)
class Candidates:
    """The pairs of objects that may come within the threshold, as rows; the first row is the smaller one.

    ``first`` and ``second`` (k,) are pairs that pass each other between the instants ``earliest`` and
    ``latest`` (k,), UTC microseconds. A pair may be listed twice for one encounter, or without an encounter.
    ``slow_first`` and ``slow_second`` (m,) are pairs that may stay within the threshold for a minute; each is
    listed once.
    """

    first: Rows
    second: Rows
    earliest: Micros
    latest: Micros
    slow_first: Rows
    slow_second: Rows


def search(
    elements: Elements,
    *,
    start: int,
    end: int,
    h: float,
    threshold_km: float,
    subjects: npt.NDArray[np.bool_] | None = None,
) -> Candidates:
    """Return pairs that may come within ``threshold_km`` between two instants. No such pair is missed.

    Args:
        elements: The element sets of n objects. An object is left out of a span if its state in the middle of
            the span is implausible.
        start: The first instant, UTC microseconds.
        end: The last instant.
        h: Seconds between the states. The last span may end after ``end``.
        threshold_km: The distance of interest.
        subjects: (n,) If given, only pairs with at least one object that is true here are searched.
    """
    step = round(h * 1e6)
    middles = np.arange(start + step // 2, end + step // 2, step, dtype=np.int64)
    satellites = elements.to_satrec_array()
    parts: list[tuple[npt.NDArray[np.int64], ...]] = []
    slow: set[int] = set()
    n = len(elements)
    for begin in range(0, len(middles), _SPANS_AT_ONCE):
        instants = middles[begin : begin + _SPANS_AT_ONCE]
        ephemeris = propagate_satellites(satellites, instants)
        usable = possible_states(ephemeris, elements)
        for k, middle in enumerate(instants.tolist()):
            rows = np.flatnonzero(usable[:, k])
            found = _span(
                ephemeris.position[rows, k],
                ephemeris.velocity[rows, k],
                h,
                threshold_km,
                None if subjects is None else subjects[rows],
            )
            i, j, time, doubt, stays = found
            i, j = rows[i], rows[j]
            slow.update((i[stays] * n + j[stays]).tolist())
            passes = ~stays
            earliest = middle + np.floor((time - doubt)[passes] * 1e6).astype(np.int64)
            latest = middle + np.ceil((time + doubt)[passes] * 1e6).astype(np.int64)
            parts.append((i[passes], j[passes], earliest, latest))
    pairs = np.array(sorted(slow), np.int64)
    empty = (np.zeros(0, np.int64),) * 4
    first, second, earliest, latest = (np.concatenate(one) for one in zip(empty, *parts, strict=True))
    # A pair that is closest after the end, or before the start, may be close at this instant.
    moments = [np.clip(one, start, end - 1) for one in (earliest, latest)]
    return Candidates(first, second, moments[0], moments[1], pairs // max(n, 1), pairs % max(n, 1))


def _span(
    position: Floats,
    velocity: Floats,
    h: float,
    threshold_km: float,
    subjects: npt.NDArray[np.bool_] | None,
) -> tuple[Rows, Rows, Floats, Floats, npt.NDArray[np.bool_]]:
    """Return the candidates of one span.

    Returns:
        Rows of both objects, the time of the nearest point of their straight lines (seconds from the middle),
            the uncertainty of that time, and whether the pair may stay within the threshold for a minute; all
            (k,).
    """
    half = h / 2
    radius = np.linalg.norm(position, axis=1)
    speed = np.linalg.norm(velocity, axis=1)
    lowest, bound = largest_acceleration(position, velocity, half)
    i, j = near_pairs(position, velocity, bound, h=h, threshold_km=threshold_km, subjects=subjects)
    r, v = position[j] - position[i], velocity[j] - velocity[i]
    vv = np.einsum("ij,ij->i", v, v)
    time = np.clip(-np.einsum("ij,ij->i", r, v) / np.where(vv == 0, 1, vv), -half, half)
    central = [-_MU_KM3_S2 * position[k] / radius[k][:, None] ** 3 for k in (i, j)]
    bend = np.linalg.norm(central[1] - central[0], axis=1)
    jerk = 2 * bound * (speed + _LARGEST_ACCELERATION * half) / lowest
    off = (
        bend * half**2 / 2
        + (jerk[i] + jerk[j]) * half**3 / 6
        + _NOT_CENTRAL * (bound[i] + bound[j]) * half**2 / 2
    )
    near = np.linalg.norm(r + v * time[:, None], axis=1) <= threshold_km + off
    i, j, time, off = i[near], j[near], time[near], off[near]
    fast = np.sqrt(vv[near])
    # To stay within the threshold for a minute, a pair moves by at most the diameter. Its speed may change.
    stays = fast <= 2 * threshold_km / _MINUTE_S + (bound[i] + bound[j]) * half
    # With the line at most d + off away, and the curve never further than off from it, the line is at most
    # d + 3 off away when the curve is closest.
    doubt = _EARLY_S + 2 * np.sqrt(off * (threshold_km + 2 * off)) / np.maximum(fast, 1e-3)
    return i, j, time, doubt, stays


def largest_acceleration(position: Floats, velocity: Floats, half: float) -> tuple[Floats, Floats]:
    """Return the smallest distance from the Earth's center (n,), km, and the acceleration (n,) there, km/s².

    Both are bounds for the time within ``half`` seconds of the states.

    Args:
        position: (n, 3) Positions, km.
        velocity: (n, 3) Velocities, km/s.
        half: Seconds before and after the states.
    """
    radius = np.linalg.norm(position, axis=1)
    radial = np.abs(np.einsum("ij,ij->i", position, velocity)) / np.where(radius == 0, 1, radius)
    lowest = np.maximum(radius - radial * half - _LARGEST_ACCELERATION * half**2 / 2, _GROUND_KM)
    return lowest, _MU_KM3_S2 / lowest**2 * (1 + _NOT_CENTRAL)
