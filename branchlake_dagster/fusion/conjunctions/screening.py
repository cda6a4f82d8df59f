r"""Close approaches of all objects with each other over a span of time.

The span is cut into cells of h seconds. An encounter is a local minimum of a pair's distance; it belongs to
the one cell in which the derivative of the squared distance, 2 r·v of the relative state, changes from
negative to not negative. So an encounter is found once, however the span is divided among workers.

Sieve. If a pair comes within d at some instant of a cell, its distance at the cell's middle is at most

    R = d + v_rel h/2,      v_rel <= 2 v_max,

because the distance cannot change faster than the relative speed and no middle is further than h/2 away. That
is a bound, not an approximation: v_max is the largest speed found in the cell, widened by one percent
for its change inside. A KD-tree over the positions at the middle gives all pairs within R.

Step. A tree query over 16,000 objects costs about 20 ms whatever R is; pairs grow with R cubed. With
h = 30 s and v_max near 9.3 km/s, R is 290 km, some thirty thousand pairs a cell, of which the sign test
and the interpolated minimum leave a handful.

Minimum. States inside a cell are cubic Hermite interpolants of the SGP4 states at its ends, exact to 2 cm in
low orbit (see `Ephemeris.at`); three secant steps on r·v locate the time of closest approach. What
limits a result is SGP4 itself, a kilometre or more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.fusion.orbits.frames import Floats, Micros
from branchlake_dagster.fusion.orbits.plausible import examine
from branchlake_dagster.fusion.orbits.propagation import Elements, hermite, propagate

STEP_S = 30.0
THRESHOLD_KM = 10.0
_SPEED_MARGIN = 1.01
_CELLS_AT_ONCE = 20
"""Bounds the memory: 16,000 objects on 21 instants are 16 MB of states."""


@dataclass(frozen=True)
class Encounters:
    """Close approaches, k rows: object indices (first < second) and the relative state at closest approach.

    ``tca_micros`` UTC microseconds since 1970; ``miss_km``, ``speed_km_s`` (k,); ``relative_ric`` (k, 3) km,
    the second object's position minus the first's along the first's radial, in-track and cross-track axes,
    as CDM's RELATIVE_POSITION_R, _T and _N.
    """

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    tca_micros: Micros
    miss_km: Floats
    speed_km_s: Floats
    relative_ric: Floats


def screen(
    elements: Elements,
    *,
    start: int,
    cells: int,
    step_s: float = STEP_S,
    threshold_km: float = THRESHOLD_KM,
) -> Encounters:
    """All encounters below ``threshold_km`` in the cells from ``start`` (UTC microseconds) on.

    Objects that SGP4 cannot propagate over a cell, or not to states that can be true, are left out of it.
    """
    satellites = elements.satellites()
    step = round(step_s * 1e6)
    found = []
    for begin in range(0, cells, _CELLS_AT_ONCE):
        count = min(_CELLS_AT_ONCE, cells - begin)
        instants = start + step * np.arange(begin, begin + count + 1, dtype=np.int64)
        ephemeris = propagate(satellites, instants)
        sound = examine(ephemeris, elements).sound
        for k in range(count):
            whole = np.flatnonzero(sound[:, k] & sound[:, k + 1])
            ends = [(ephemeris.position[whole, j], ephemeris.velocity[whole, j]) for j in (k, k + 1)]
            found.append(_cell(whole, ends[0], ends[1], int(instants[k]), step_s, threshold_km))
    return Encounters(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _cell(
    rows: npt.NDArray[np.int64],
    begin: tuple[Floats, Floats],
    end: tuple[Floats, Floats],
    micros: int,
    h: float,
    threshold_km: float,
) -> tuple[npt.NDArray[np.generic], ...]:
    """Encounters of one cell, as the fields of `Encounters`."""
    half = np.full((1, 1), 0.5)
    middle, _ = hermite(begin, end, half, h)
    pairs = _near_pairs(middle, begin[1], end[1], h, threshold_km)
    i, j = pairs.T
    relative = [(r[j] - r[i], v[j] - v[i]) for r, v in (begin, end)]
    closing = np.sum(relative[0][0] * relative[0][1], axis=1)
    opening = np.sum(relative[1][0] * relative[1][1], axis=1)
    turning = (closing < 0) & (opening >= 0)
    i, j, closing, opening = i[turning], j[turning], closing[turning], opening[turning]
    ends = [(r[turning], v[turning]) for r, v in relative]
    low, high = np.zeros(len(i)), np.ones(len(i))
    s = closing / np.where(closing - opening == 0, -1.0, closing - opening)
    # r·v is nearly a straight line in time for a fast encounter and a smooth curve for a slow one; the
    # bracket keeps the secant inside the cell.
    for _ in range(8):
        r, v = hermite(ends[0], ends[1], s[:, None], h)
        slope = np.sum(r * v, axis=1)
        low, closing = np.where(slope < 0, s, low), np.where(slope < 0, slope, closing)
        high, opening = np.where(slope < 0, high, s), np.where(slope < 0, opening, slope)
        gap = np.where(opening == closing, 1.0, opening - closing)
        s = np.clip(low - closing / gap * (high - low), low, high)
    r, v = hermite(ends[0], ends[1], s[:, None], h)
    miss = np.linalg.norm(r, axis=1)
    close = miss <= threshold_km
    i, j, s, r, v, miss = i[close], j[close], s[close], r[close], v[close], miss[close]
    own_r, own_v = hermite((begin[0][i], begin[1][i]), (end[0][i], end[1][i]), s[:, None], h)
    tca = micros + np.round(s * h * 1e6).astype(np.int64)
    return rows[i], rows[j], tca, miss, np.linalg.norm(v, axis=1), _ric(own_r, own_v, r)


def _near_pairs(
    middle: Floats, speed_begin: Floats, speed_end: Floats, h: float, threshold_km: float
) -> npt.NDArray[np.int64]:
    """Index pairs (k, 2), first below second, within the sieve radius at the middle of the cell."""
    from scipy.spatial import cKDTree  # half a second of every run's start, used by few steps

    if len(middle) < 2:
        return np.zeros((0, 2), np.int64)
    fastest = max(float(np.linalg.norm(v, axis=1).max()) for v in (speed_begin, speed_end))
    radius = threshold_km + fastest * _SPEED_MARGIN * h
    # Building an unbalanced tree is twice as fast, and each tree answers one query.
    tree = cKDTree(middle, balanced_tree=False, compact_nodes=False)
    pairs: npt.NDArray[np.int64] = tree.query_pairs(radius, output_type="ndarray").astype(np.int64)
    return np.sort(pairs, axis=1)


def _ric(position: Floats, velocity: Floats, relative: Floats) -> Floats:
    """Components of ``relative`` (k, 3) along radial, in-track and cross-track of a state."""
    radial = position / np.linalg.norm(position, axis=1, keepdims=True)
    cross = np.cross(position, velocity)
    cross = cross / np.linalg.norm(cross, axis=1, keepdims=True)
    axes = (radial, np.cross(cross, radial), cross)
    return np.stack([np.sum(relative * axis, axis=1) for axis in axes], axis=1)
