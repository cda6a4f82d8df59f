"""Find the close approaches of all objects with each other between two instants.

`search` lists pairs and the minutes to examine. This module decides what the pairs do in these minutes.
States are computed at whole minutes since 1970. So the result for a pair depends only on its two element sets
and the two instants: not on the division of the time among workers, nor on the other objects.

A minute in which a pair comes within the threshold gives at most one of three results:

- `encounter`: The distance has a minimum within the minute. It belongs to the minute in which the derivative
  of the squared distance changes from negative to not negative. Its rounded time is in the same minute, so
  the time divided by `MINUTE` as integers gives the minute.
- `edge`: The minute is the first or last of the whole span, and the pair is closest at that end of the span.
- `together`: The pair is within the threshold at both ends of the minute. Docked vehicles, formations and
  neighbors in a geostationary slot stay so for hours. All such minutes of a pair become one row with the
  closest moment in them, and are not encounters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.conjunctions.closest import Approach, States, find_closest, half_distance_rate
from branchlake_dagster.sda.conjunctions.search import Candidates, search
from branchlake_dagster.sda.conjunctions.sieve import Rows
from branchlake_dagster.sda.orbits.frames import Floats, Micros, julian_dates
from branchlake_dagster.sda.orbits.plausible import possible_states
from branchlake_dagster.sda.orbits.propagation import Elements, Ephemeris, propagate_satellites

THRESHOLD_KM = 10.0
STEP_S = 90.0
MINUTE = 60_000_000
"""One minute in microseconds."""
_STATES_AT_ONCE = 2_000_000
"""The number of states that are computed together. It bounds the memory: a state has 48 bytes."""


class Kind(StrEnum):
    """The kind of a close approach. The module's docstring defines the kinds."""

    ENCOUNTER = "encounter"
    EDGE = "edge"
    TOGETHER = "together"


_CODES = tuple(Kind)


@dataclass(frozen=True)
class Encounters:
    """Close approaches, k rows, sorted by pair and time.

    ``first`` < ``second`` (k,) are object rows, and ``kind`` (k,) is the index in `Kind`. ``tca_micros`` (k,)
    is the time of closest approach, UTC microseconds. ``minutes`` (k,) is the number of minutes together, 0
    for other kinds. ``position`` and ``velocity`` (k, 3) are the second object's state relative to the first
    at closest approach, km and km/s, along the first object's radial, transverse and normal axes, as
    RELATIVE_POSITION_R, _T and _N of the Conjunction Data Message.
    """

    first: Rows
    second: Rows
    kind: npt.NDArray[np.int64]
    tca_micros: Micros
    minutes: npt.NDArray[np.int64]
    position: Floats
    velocity: Floats

    @property
    def miss_km(self) -> Floats:
        """The distances (k,) at closest approach, km."""
        return np.asarray(np.linalg.norm(self.position, axis=1))

    @property
    def kinds(self) -> list[Kind]:
        """The kind of each of the k rows."""
        return [_CODES[code] for code in self.kind.tolist()]

    @classmethod
    def of(cls, parts: Iterable[Encounters]) -> Self:
        """Join parts. The rows of a pair that stays close (kind `together`) are merged into one row.

        The merged row has the closest moment and the sum of the minutes.
        """
        empty = np.zeros(0, np.int64)
        nothing = Encounters(empty, empty, empty, empty, empty, np.zeros((0, 3)), np.zeros((0, 3)))
        parts = [nothing, *parts]
        columns = {one.name: [getattr(part, one.name) for part in parts] for one in fields(cls)}
        found = cls(**{name: np.concatenate(values) for name, values in columns.items()})
        together = found.kind == _CODES.index(Kind.TOGETHER)
        whole = found._take(np.flatnonzero(~together))
        spans = found._take(np.flatnonzero(together))
        order = np.lexsort((spans.tca_micros, np.round(spans.miss_km, 12), spans.second, spans.first))
        pairs = np.stack([spans.first[order], spans.second[order]], axis=1)
        _, begins, member = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        one_each = spans._take(order[begins])
        minutes = np.bincount(member.ravel(), spans.minutes[order], len(begins)).astype(np.int64)
        columns = {
            one.name: [
                getattr(whole, one.name),
                minutes if one.name == "minutes" else getattr(one_each, one.name),
            ]
            for one in fields(cls)
        }
        both = cls(**{name: np.concatenate(values) for name, values in columns.items()})
        return both._take(np.lexsort((both.tca_micros, both.second, both.first)))

    def _take(self, rows: Rows) -> Self:
        return type(self)(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(frozen=True)
class Span:
    """A part of the screened time, and the start and end of the whole screened time.

    All four instants are UTC microseconds at whole minutes. ``start`` and ``end`` limit the part, ``first``
    and ``last`` the whole.
    """

    start: int
    end: int
    first: int
    last: int

    def __post_init__(self) -> None:
        """Raise ValueError for instants that are not whole minutes, or in the wrong order."""
        if any(one % MINUTE for one in (self.start, self.end, self.first, self.last)):
            raise ValueError(f"{self}: its instants are whole minutes")
        if not self.first <= self.start < self.end <= self.last:
            raise ValueError(f"{self}: a part is within its whole, and not empty")

    @classmethod
    def whole(cls, start: int, end: int) -> Self:
        """Return a span that is the whole screened time."""
        return cls(start, end, start, end)


def screen(
    elements: Elements,
    span: Span,
    *,
    threshold_km: float = THRESHOLD_KM,
    subjects: npt.NDArray[np.bool_] | None = None,
    step_s: float = STEP_S,
) -> Encounters:
    """Return all close approaches within ``threshold_km`` in a span.

    Args:
        elements: The element sets of n objects. An object has no close approach while its state is
            implausible.
        span: The time to screen.
        threshold_km: The largest distance that counts.
        subjects: (n,) If given, only pairs with at least one object that is true here are screened.
        step_s: Seconds between the states of the search. The result does not depend on it.
    """
    found = search(
        elements,
        start=span.start,
        end=span.end,
        h=step_s,
        threshold_km=threshold_km,
        subjects=subjects,
    )
    slow = np.stack([found.slow_first, found.slow_second], axis=1)
    return Encounters.of(
        [
            screen_minutes(
                elements,
                span,
                _minutes(_without_pairs(found, slow, len(elements))),
                threshold_km=threshold_km,
            ),
            screen_pairs(elements, span, slow, threshold_km=threshold_km),
        ]
    )


def screen_pairs(
    elements: Elements, span: Span, pairs: npt.NDArray[np.int64], *, threshold_km: float = THRESHOLD_KM
) -> Encounters:
    """Return the close approaches of given pairs in every minute of a span.

    ``pairs`` (m, 2) are rows of ``elements``, the smaller row first.
    """
    minutes = np.arange(span.start, span.end + 1, MINUTE, dtype=np.int64)
    at_once = max(1, _STATES_AT_ONCE // len(minutes) // 2)
    parts = []
    for begin in range(0, len(pairs), at_once):
        few = pairs[begin : begin + at_once]
        rows, place = np.unique(few, return_inverse=True)
        states = _states(elements.take(rows), minutes)
        own, other = (States(*(one[column] for one in states)) for column in place.reshape(few.shape).T)
        near = _find_within(own, other, threshold_km)
        r_v = half_distance_rate(own, other)
        pair, minute = np.nonzero(
            (near[:, :-1] & near[:, 1:])
            | ((r_v[:, :-1] < 0) & (r_v[:, 1:] >= 0))
            | (near[:, :-1] & (minutes[:-1] == span.first))
            | (near[:, 1:] & (minutes[1:] == span.last))
        )
        begins = States(own.position[pair, minute], own.velocity[pair, minute])
        ends = States(own.position[pair, minute + 1], own.velocity[pair, minute + 1])
        others = (
            States(other.position[pair, minute], other.velocity[pair, minute]),
            States(other.position[pair, minute + 1], other.velocity[pair, minute + 1]),
        )
        parts.append(
            _classify_minutes(
                few[pair], minutes[minute], (begins, others[0]), (ends, others[1]), span, threshold_km
            )
        )
    return Encounters.of(parts)


def screen_minutes(
    elements: Elements,
    span: Span,
    wanted: npt.NDArray[np.int64],
    *,
    threshold_km: float = THRESHOLD_KM,
) -> Encounters:
    """Return the close approaches of pairs in given minutes.

    ``wanted`` (m, 3) has the smaller row of ``elements``, the larger row, and the start of the minute in UTC
    microseconds. Minutes outside of the span are ignored.
    """
    wanted = np.unique(wanted[(wanted[:, 2] >= span.start) & (wanted[:, 2] < span.end)], axis=0)
    if not len(wanted):
        return Encounters.of([])
    pairs, minutes = wanted[:, :2], wanted[:, 2]
    begin, end = (
        (states_at(elements, pairs[:, 0], instants), states_at(elements, pairs[:, 1], instants))
        for instants in (minutes, minutes + MINUTE)
    )
    return _classify_minutes(pairs, minutes, begin, end, span, threshold_km)


def _minutes(found: Candidates) -> npt.NDArray[np.int64]:
    """Return the minutes (m, 3) between the earliest and latest instants of candidates.

    The columns are the first row, the second row, and the start of the minute.
    """
    spread = np.arange(int(np.max((found.latest - found.earliest) // MINUTE, initial=-1)) + 2)
    minute = (found.earliest // MINUTE * MINUTE)[:, None] + spread * MINUTE
    which, _ = np.nonzero(named := minute <= found.latest[:, None])
    return np.stack([found.first[which], found.second[which], minute[named]], axis=1)


def _classify_minutes(
    pairs: npt.NDArray[np.int64],
    minutes: Micros,
    begin: tuple[States, States],
    end: tuple[States, States],
    span: Span,
    threshold_km: float,
) -> Encounters:
    """Return the close approaches of pairs (k, 2) in minutes (k,), from the states at both ends.

    Pairs that have none of the three kinds of approach in their minute, or stay farther apart than the
    threshold, are left out.
    """
    near = [_find_within(*states, threshold_km) for states in (begin, end)]
    rates = [half_distance_rate(*states) for states in (begin, end)]
    inside = (rates[0] < 0) & (rates[1] >= 0)
    nearest = find_closest(begin, end)
    # Without a minimum within the minute, one of its ends is the closest moment.
    at_end = ~inside & (rates[1] < 0)
    own = _select_states(inside, at_end, nearest.own, begin[0], end[0])
    other = [States(b.position - a.position, b.velocity - a.velocity) for a, b in (begin, end)]
    relative = _select_states(inside, at_end, nearest.relative, other[0], other[1])
    fraction = np.where(inside, nearest.fraction, at_end.astype(float))
    # A minimum just before the end of its minute would round to the next one, which does not have it.
    micros = np.round(fraction * MINUTE).astype(np.int64)
    tca = minutes + np.where(inside, np.minimum(micros, MINUTE - 1), micros)
    close = np.linalg.norm(relative.position, axis=1) <= threshold_km
    together = near[0] & near[1]
    edge = ~inside & ((minutes == span.first) & ~at_end | (minutes + MINUTE == span.last) & at_end)
    kind = np.select(
        [together, inside, edge], [_CODES.index(k) for k in (Kind.TOGETHER, Kind.ENCOUNTER, Kind.EDGE)], -1
    )
    reported_rows = np.flatnonzero(close & (kind >= 0))
    axes = _axes(Approach(fraction, relative, own))
    return Encounters.of(
        [
            Encounters(
                pairs[reported_rows, 0],
                pairs[reported_rows, 1],
                kind[reported_rows],
                tca[reported_rows],
                together[reported_rows].astype(np.int64),
                np.einsum("aki,ki->ka", axes[:, reported_rows], relative.position[reported_rows]),
                np.einsum("aki,ki->ka", axes[:, reported_rows], relative.velocity[reported_rows]),
            )
        ]
    )


def _select_states(
    inside: npt.NDArray[np.bool_], at_end: npt.NDArray[np.bool_], nearest: States, begin: States, end: States
) -> States:
    return States(
        *(
            np.where(inside[:, None], x, np.where(at_end[:, None], z, y))
            for x, y, z in zip(nearest, begin, end, strict=True)
        )
    )


def _axes(found: Approach) -> Floats:
    """Return unit vectors (3, k, 3) along the first object's radial, transverse and normal axes."""
    position, velocity = found.own
    radial = position / np.linalg.norm(position, axis=1, keepdims=True)
    normal = np.cross(position, velocity)
    normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return np.stack([radial, np.cross(normal, radial), normal])


def _find_within(own: States, other: States, threshold_km: float) -> npt.NDArray[np.bool_]:
    apart = other.position - own.position
    within: npt.NDArray[np.bool_] = np.einsum("...k,...k->...", apart, apart) <= threshold_km**2
    return within


def _states(elements: Elements, instants: Micros) -> States:
    """Return states (n, m, 3) of n objects at m instants. Implausible states are NaN."""
    found = propagate_satellites(elements.to_satrec_array(), instants)
    wrong = ~possible_states(found, elements)
    found.position[wrong], found.velocity[wrong] = np.nan, np.nan
    return States(found.position, found.velocity)


def states_at(elements: Elements, rows: Rows, instants: Micros) -> States:
    """Return the state (k, 3) of each object at its own instant. Implausible states are NaN.

    ``rows`` (k,) are rows of ``elements``, and ``instants`` (k,) UTC microseconds.
    """
    order = np.argsort(rows, kind="stable")
    objects, begins = np.unique(rows[order], return_index=True)
    position, velocity = np.empty((len(rows), 1, 3)), np.empty((len(rows), 1, 3))
    valid = np.empty((len(rows), 1), np.bool_)
    records = elements.take(objects).to_satrecs()
    # A loop over objects, because the array call of SGP4 needs the same instants for all of them.
    for record, few in zip(records, np.split(order, begins[1:]), strict=True):
        error, position[few, 0], velocity[few, 0] = record.sgp4_array(*julian_dates(instants[few]))
        valid[few, 0] = error == 0
    wrong = ~possible_states(Ephemeris(instants, position, velocity, valid), elements.take(rows))
    position[wrong], velocity[wrong] = np.nan, np.nan
    return States(position[:, 0], velocity[:, 0])


def _without_pairs(found: Candidates, pairs: npt.NDArray[np.int64], objects: int) -> Candidates:
    """Return the candidates without the given pairs, which are screened in every minute anyway."""
    keep = ~np.isin(found.first * objects + found.second, pairs[:, 0] * objects + pairs[:, 1])
    return Candidates(
        found.first[keep],
        found.second[keep],
        found.earliest[keep],
        found.latest[keep],
        found.slow_first,
        found.slow_second,
    )
