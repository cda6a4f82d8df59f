r"""Find close approaches of an ephemeris with all objects of a catalog.

The first step is a sieve. The time of the ephemeris is divided into cells of at most four minutes. In each
cell, one state of the ephemeris and of the object at the middle gives their relative position r and velocity
v. Let A be a bound of the ephemeris' acceleration in the cell (`Track.bounds`), P and J the sums of the jumps
of its position and velocity in it, and a a bound of the object's acceleration. Then the relative position at
t from the middle is

    r + v t + e,      |e| <= (A + a) t^2 / 2 + J |t| + P,

so an object that comes within d has a straight line that comes within d + (A + a) h^2 / 2 + J h + P, where h
is half the cell. The bound holds for the interpolated motion, including maneuvers; nothing else is assumed.

The second step examines the minutes of the remaining cells, with states every ten seconds. Between two of
them the object moves on the cubic of its states, which is less than a millimeter from SGP4 in low orbit, and
the ephemeris on its own interpolation.

The kinds of approaches are those of `conjunctions.screening`. Edges are the instants where the usable time of
the ephemeris begins or ends: a gap has two. A minute that an edge shortens never counts as `together`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.conjunctions.screening import MINUTE, Encounters, Kind, states_at
from branchlake_dagster.sda.conjunctions.search import largest_acceleration
from branchlake_dagster.sda.ephemerides.track import Track
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.plausible import possible_states
from branchlake_dagster.sda.orbits.propagation import Elements, interpolate_hermite, propagate_satellites

_CELL = 4 * MINUTE
_CELLS_AT_ONCE = 40
_SAMPLES = 7
_HALVINGS = 40
_VELOCITY_OFF_KM_S = 2e-3
"""A bound for the error of SGP4's velocity, which is not exactly the derivative of its position.

The error reaches 0.4 m/s in deep-space orbits.
"""
_CODES = tuple(Kind)

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """Close approaches of one ephemeris with rows of a catalog.

    ``row`` (k,) is the object's row, and ``kind`` (k,) the index in `Kind`. ``tca_micros`` and ``minutes``
    (k,) are as in `Encounters`. ``position`` (km) and ``velocity`` (km/s), both (k, 3), are the object's
    state relative to the ephemeris in TEME; ``own_position`` and ``own_velocity`` are the state of the
    ephemeris.
    """

    row: Rows
    kind: Rows
    tca_micros: Micros
    minutes: Rows
    position: Floats
    velocity: Floats
    own_position: Floats
    own_velocity: Floats

    def relative(self) -> Encounters:
        """Return the approaches as `Encounters`, along the ephemeris' radial, transverse and normal axes.

        The rows of one object of the kind `together` are merged. ``first`` is -1.
        """
        radial = self.own_position / np.linalg.norm(self.own_position, axis=1, keepdims=True)
        normal = np.cross(self.own_position, self.own_velocity)
        normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
        axes = np.stack([radial, np.cross(normal, radial), normal])
        return Encounters.of(
            [
                Encounters(
                    np.full(len(self.row), -1, np.int64),
                    self.row,
                    self.kind,
                    self.tca_micros,
                    self.minutes,
                    np.einsum("aki,ki->ka", axes, self.position),
                    np.einsum("aki,ki->ka", axes, self.velocity),
                )
            ]
        )


def screen_tracks(
    tracks: Sequence[Track], elements: Elements, start: int, end: int, *, threshold_km: float
) -> Encounters:
    """Return all close approaches of an ephemeris within ``threshold_km`` between two instants.

    Args:
        tracks: The tracks of one object, ordered by time, with gaps between them.
        elements: The element sets of the catalog's objects. An object has no close approach while its state
            is implausible.
        start: The start, UTC microseconds.
        end: The end, UTC microseconds.
        threshold_km: The largest distance that counts.
    """
    parts = [
        _screen_track(track, elements, max(track.begin, start), min(track.end, end), threshold_km).relative()
        for track in tracks
        if max(track.begin, start) < min(track.end, end) and len(elements)
    ]
    return Encounters.of(parts)


_NONE, _NO_VECTORS = np.zeros(0, np.int64), np.zeros((0, 3))
_NOTHING = Found(*[_NONE] * 4, *[_NO_VECTORS] * 4)  # type: ignore[arg-type]  # four of each


def _take_rows(found: Found, rows: Rows) -> Found:
    return Found(*(getattr(found, name)[rows] for name in Found.__dataclass_fields__))


def _screen_track(track: Track, elements: Elements, first: int, last: int, threshold_km: float) -> Found:
    """Return the close approaches of one track between two instants, where the screened time ends."""
    cuts = np.unique(np.append(np.arange(first // _CELL * _CELL, last, _CELL), [first, last]))
    cuts = cuts[(cuts >= first) & (cuts <= last)]
    row, begin = _candidates(track, elements, cuts, threshold_km)
    # The minutes of the cells. The first and the last minute may be shorter.
    spread = np.arange(_CELL // MINUTE) * MINUTE
    minute = ((begin // _CELL * _CELL)[:, None] + spread).ravel()
    row = np.repeat(row, len(spread))
    low, high = np.maximum(minute, first), np.minimum(minute + MINUTE, last)
    inside = low < high
    return _find_approaches(
        track, elements, row[inside], low[inside], high[inside], (first, last), threshold_km
    )


def _candidates(track: Track, elements: Elements, cuts: Micros, threshold_km: float) -> tuple[Rows, Micros]:
    """Return rows that may come within the threshold, and the start of the cell in which they may."""
    bound, leaps, jumps = track.bounds()
    pieces = np.searchsorted(track.knots, cuts, side="right") - 1
    satellites = elements.to_satrec_array()
    rows, begins = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    middles = (cuts[:-1] + cuts[1:]) // 2
    own_position, own_velocity = track.at(middles)
    for begin in range(0, len(middles), _CELLS_AT_ONCE):
        part = slice(begin, begin + _CELLS_AT_ONCE)
        ephemeris = propagate_satellites(satellites, middles[part])
        usable = possible_states(ephemeris, elements)
        for k, cell in enumerate(range(begin, begin + len(middles[part]))):
            # Half a cell, and a microsecond for the rounding of the middle.
            half = float(cuts[cell + 1] - cuts[cell]) / 2e6 + 1e-6
            mine = np.arange(max(pieces[cell], 0), min(pieces[cell + 1], len(bound) - 1) + 1)
            use = np.flatnonzero(usable[:, k])
            position, velocity = ephemeris.position[use, k], ephemeris.velocity[use, k]
            _, acceleration = largest_acceleration(position, velocity, half)
            off = (acceleration + bound[mine].max()) * half**2 / 2
            off += (jumps[mine].sum() + _VELOCITY_OFF_KM_S) * half + leaps[mine].sum()
            r, v = position - own_position[cell], velocity - own_velocity[cell]
            vv = np.einsum("ij,ij->i", v, v)
            time = np.clip(-np.einsum("ij,ij->i", r, v) / np.where(vv == 0, 1, vv), -half, half)
            near = use[np.linalg.norm(r + v * time[:, None], axis=1) <= threshold_km + off]
            rows.append(near)
            begins.append(np.full(len(near), cuts[cell]))
    return np.concatenate(rows), np.concatenate(begins)


def _find_approaches(
    track: Track,
    elements: Elements,
    row: Rows,
    low: Micros,
    high: Micros,
    edges: tuple[int, int],
    threshold_km: float,
) -> Found:
    """Find the close approaches of objects in intervals of at most one minute.

    An interval gives a result only for an approach of one of the kinds that `conjunctions.screening` defines,
    and only within the threshold. An encounter belongs to the interval that contains its closest moment.

    Args:
        track: The ephemeris.
        elements: The element sets of the catalog.
        row: (k,) The rows of the objects.
        low: (k,) The starts of the intervals, UTC microseconds.
        high: (k,) The ends of the intervals, UTC microseconds.
        edges: The start and the end of the track's screened time, UTC microseconds.
        threshold_km: The largest distance that counts.
    """
    if not len(row):
        return _NOTHING
    share = np.arange(_SAMPLES) / (_SAMPLES - 1)
    instants = low[:, None] + np.round((high - low)[:, None] * share).astype(np.int64)
    flat = instants.ravel()
    states = states_at(elements, np.repeat(row, _SAMPLES), flat)
    other = [one.reshape(len(row), _SAMPLES, 3) for one in states]
    own = [one.reshape(len(row), _SAMPLES, 3) for one in track.at(flat)]
    apart, speed = other[0] - own[0], other[1] - own[1]
    distance = np.linalg.norm(apart, axis=2)
    rates = np.einsum("kij,kij->ki", apart, speed)
    near = distance <= threshold_km
    together = near[:, 0] & near[:, -1] & (high - low == MINUTE)
    minimum, place = np.nonzero((rates[:, :-1] < 0) & (rates[:, 1:] >= 0))
    tca = _minima(
        track,
        instants[minimum, place],
        instants[minimum, place + 1],
        [one[minimum, place] for one in other],
        [one[minimum, place + 1] for one in other],
    )
    # The candidates for the closest moment: the minima within the interval, and both ends.
    ends = np.arange(len(row))
    which = np.concatenate([minimum, ends, ends])
    at = np.concatenate([tca, low, high])
    kinds = np.full(len(which), -1)
    kinds[: len(minimum)] = _CODES.index(Kind.ENCOUNTER)
    begins, finishes = len(minimum) + ends, len(minimum) + len(ends) + ends
    kinds[begins[(low == edges[0]) & (rates[:, 0] >= 0)]] = _CODES.index(Kind.EDGE)
    kinds[finishes[(high == edges[1]) & (rates[:, -1] < 0)]] = _CODES.index(Kind.EDGE)
    kinds[together[which]] = _CODES.index(Kind.TOGETHER)
    keep = np.flatnonzero(kinds >= 0)
    which, at, kinds = which[keep], at[keep], kinds[keep]
    exact = states_at(elements, row[which], at)
    own_position, own_velocity = track.at(at)
    position = exact.position - own_position
    close = np.linalg.norm(position, axis=1) <= threshold_km
    chosen = np.flatnonzero(
        close & ((kinds != _CODES.index(Kind.TOGETHER)) | _nearest(which, position, kinds))
    )
    minutes = (kinds == _CODES.index(Kind.TOGETHER)).astype(np.int64)
    return _take_rows(
        Found(
            row[which],
            kinds,
            at,
            minutes,
            position,
            exact.velocity - own_velocity,
            own_position,
            own_velocity,
        ),
        chosen,
    )


def _nearest(which: Rows, position: Floats, kinds: Rows) -> npt.NDArray[np.bool_]:
    """Mark the closest moment of each minute that a pair is together."""
    distance = np.linalg.norm(position, axis=1)
    order = np.lexsort((distance, which))
    first = np.ones(len(order), np.bool_)
    first[1:] = which[order][1:] != which[order][:-1]
    found = np.zeros(len(which), np.bool_)
    found[order[first]] = True
    return np.asarray(found & (kinds == _CODES.index(Kind.TOGETHER)))


def _minima(
    track: Track, low: Micros, high: Micros, begin: Sequence[Floats], end: Sequence[Floats]
) -> Micros:
    """Return the time of the least distance of pairs that approach at ``low`` and recede at ``high``.

    The interval is halved repeatedly, so that a jump of the velocity is found as well as a change of sign.
    ``begin`` and ``end`` are the object's positions and velocities at ``low`` and ``high``.
    """
    h = (high - low)[:, None] / 1e6
    left, right = np.zeros(len(low)), np.ones(len(low))
    for _ in range(_HALVINGS):
        s = (left + right) / 2
        at = low + np.round(s * (high - low)).astype(np.int64)
        s_at = ((at - low) / np.maximum(high - low, 1))[:, None]
        position, velocity = interpolate_hermite((begin[0], begin[1]), (end[0], end[1]), s_at, h)
        own = track.at(at)
        before = np.einsum("ki,ki->k", position - own[0], velocity - own[1]) < 0
        left, right = np.where(before, s, left), np.where(before, right, s)
    return low + np.round(right * (high - low)).astype(np.int64)
