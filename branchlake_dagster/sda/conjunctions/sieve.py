r"""Find pairs that may come close within a span of h seconds, from states at its middle; none is missed.

Let r and v be a pair's relative position and velocity at the middle, and a_1 and a_2 upper bounds of the two
accelerations over the span. By Taylor's theorem the relative position at t from the middle is

    r + v t + e,      |e| <= (a_1 + a_2) t^2 / 2 <= (a_1 + a_2) h^2 / 8.

So if a pair comes within d, its straight line comes within D = d + (a_1 + a_2) h^2 / 8. This test is applied
to each pair that is near enough: as relative speeds are at most twice the largest speed v_max, such a pair is
at most R = D + v_max h apart at the middle. If space is divided into boxes with edges of length R, all pairs
within R are in the same or in neighboring boxes (a cell list, as in molecular dynamics).

With h = 60 s, R is near 570 km and D is d + 8.5 km: of a quarter of a million pairs within R a few hundred
remain. In machine code, a pair takes 2 ns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats

Rows = npt.NDArray[np.int64]

_FIRST_CAPACITY = 4096


def near_pairs(
    position: Floats,
    velocity: Floats,
    acceleration: Floats,
    *,
    h: float,
    threshold_km: float,
    subjects: npt.NDArray[np.bool_] | None = None,
) -> tuple[Rows, Rows]:
    """Return row pairs (first < second) that may come within ``threshold_km`` less than h/2 from the middle.

    Args:
        position: (n, 3) Positions at the middle of the span, km.
        velocity: (n, 3) Velocities at the middle, km/s.
        acceleration: (n,) An upper bound of each object's acceleration over the span, km/s².
        h: The length of the span, s.
        threshold_km: The distance of interest.
        subjects: (n,) If given, only pairs with at least one object that is true here are returned.
    """
    if len(position) < 2 or (subjects is not None and not subjects.any()):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    half = h / 2
    fastest = float(np.sqrt(np.max(np.sum(velocity * velocity, axis=1))))
    radius = threshold_km + 2 * fastest * half + float(acceleration.max()) * half**2
    order, starts, neighbours = _boxes(position, radius, every=subjects is None)
    states = np.concatenate([position, velocity, acceleration[:, None] * (half**2 / 2)], axis=1)[order]
    chosen = np.ones(len(order), np.bool_) if subjects is None else subjects[order]
    first, second = _collect_pairs(states, chosen, starts, neighbours, half, threshold_km, radius)
    i, j = order[first], order[second]
    return np.minimum(i, j), np.maximum(i, j)


def _boxes(position: Floats, edge: float, *, every: bool) -> tuple[Rows, Rows, Rows]:
    """Return the rows sorted by box, the start of each box in them, and the neighbors of each box.

    A neighbor is an index of a box, or -1 if the neighboring box has no objects. A box is its own neighbor,
    too. With ``every``, only the first of two boxes has the other as its neighbor, so that each pair of boxes
    occurs once.
    """
    place = np.floor((position - position.min(axis=0)) / edge).astype(np.int64) + 1
    _, wide, high = place.max(axis=0) + 2
    keys = (place[:, 0] * wide + place[:, 1]) * high + place[:, 2]
    order = np.argsort(keys, kind="stable")
    boxes, starts = np.unique(keys[order], return_index=True)
    shifts = np.array([(a * wide + b) * high + c for a in (-1, 0, 1) for b in (-1, 0, 1) for c in (-1, 0, 1)])
    wanted = boxes[:, None] + shifts[shifts >= 0 if every else slice(None)]
    found = np.minimum(np.searchsorted(boxes, wanted), len(boxes) - 1)
    neighbours = np.where(boxes[found] == wanted, found, -1)
    return order, np.append(starts, len(keys)).astype(np.int64), neighbours


def _collect_pairs(states: Floats, chosen: npt.NDArray[np.bool_], *how: Any) -> tuple[Rows, Rows]:
    capacity = _FIRST_CAPACITY
    while True:
        first, second = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
        count = _find_pairs(states, chosen, *how, first, second)
        if count <= capacity:
            return first[:count], second[:count]
        capacity = int(count)


class _CompiledPairs:
    """`_pairs` as machine code, compiled at the first call in a process. Arguments are those of `_pairs`.

    A file beside this module caches the code: loading takes 0.1 s. An object is pickled without the machine
    code, but with this class, so that a worker without the package can call it.
    """

    def __init__(self) -> None:
        self._compiled: Callable[..., int] | None = None

    def __call__(self, *arguments: Any) -> int:
        if self._compiled is None:
            from numba import njit  # half a second, used by few steps

            compiled = njit(_pairs, nogil=True)
            with suppress(RuntimeError):  # no place to keep it: a worker that was sent this code
                compiled.enable_caching()
            self._compiled = compiled
        return self._compiled(*arguments)

    def __reduce__(self) -> tuple[type[_CompiledPairs], tuple[()]]:
        return type(self), ()


def _pairs(
    states: Any,
    chosen: Any,
    starts: Any,
    neighbours: Any,
    half: Any,
    threshold: Any,
    radius: Any,
    first: Any,
    second: Any,
) -> Any:
    """Count the pairs, and write as many as fit to ``first`` and ``second``."""
    count = 0
    for box in range(neighbours.shape[0]):
        for place in range(neighbours.shape[1]):
            other = neighbours[box, place]
            if other < 0:
                continue
            for p in range(starts[box], starts[box + 1]):
                if not chosen[p]:
                    continue
                for q in range(starts[other], starts[other + 1]):
                    if q == p or (q < p and chosen[q]):  # seen from q
                        continue
                    x = states[q, 0] - states[p, 0]
                    y = states[q, 1] - states[p, 1]
                    z = states[q, 2] - states[p, 2]
                    apart = x * x + y * y + z * z
                    if apart > radius * radius:
                        continue
                    u = states[q, 3] - states[p, 3]
                    v = states[q, 4] - states[p, 4]
                    w = states[q, 5] - states[p, 5]
                    speed = u * u + v * v + w * w
                    rate = x * u + y * v + z * w
                    t = 0.0
                    if speed > 0.0:
                        t = min(half, max(-half, -rate / speed))
                    reach = threshold + states[p, 6] + states[q, 6]
                    if apart + 2.0 * t * rate + t * t * speed <= reach * reach:
                        if count < first.shape[0]:
                            first[count] = p
                            second[count] = q
                        count += 1
    return count


_find_pairs = _CompiledPairs()
