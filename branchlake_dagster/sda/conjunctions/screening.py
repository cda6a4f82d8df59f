"""Close approaches of all objects with each other between two instants.

`search` names pairs and when to look at them; here is decided what they do. An object's state is looked at in
whole minutes since 1970, so the answer for a pair depends on its two element sets and the two instants only:
not on how the time is divided among workers, nor on what else was screened.

Of each minute in which a pair comes within the threshold there is one of three things to say:

* **encounter**: the distance has a minimum inside it. A minimum is in one minute only, the one in which the
  derivative of the squared distance changes from negative to not negative.
* **edge**: it is the first or last minute that is looked at, and the pair is closest at that end.
* **together**: at both ends of the minute the pair is within the threshold. Docked vehicles, formations and
  neighbours in a geostationary slot are, for hours; their minutes are told together, with the closest
  moment in them, and are no encounters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.conjunctions.closest import MINUTE_S, Approach, States, closest, rate
from branchlake_dagster.sda.conjunctions.search import Candidates, search
from branchlake_dagster.sda.conjunctions.sieve import Rows
from branchlake_dagster.sda.orbits.frames import Floats, Micros, julian_dates
from branchlake_dagster.sda.orbits.plausible import possible_states
from branchlake_dagster.sda.orbits.propagation import Elements, Ephemeris, propagate_satellites

THRESHOLD_KM = 10.0
STEP_S = 90.0
MINUTE = 60_000_000
"""In microseconds."""
_STATES_AT_ONCE = 2_000_000
"""Bounds the memory: a state is 48 bytes."""


class Kind(StrEnum):
    """What a close approach is, see this module."""

    ENCOUNTER = "encounter"
    EDGE = "edge"
    TOGETHER = "together"


_CODES = tuple(Kind)


@dataclass(frozen=True)
class Encounters:
    """Close approaches, k rows, sorted by pair and time.

    ``first`` < ``second`` (k,) object rows; ``kind`` (k,) the place in `Kind`; ``tca_micros`` (k,) UTC
    microseconds; ``minutes`` (k,) together, else 0; ``position``, ``velocity`` (k, 3) the second's state
    relative to the first's at closest approach, km and km/s, along the first's radial, transverse and normal
    axes, as CDM's RELATIVE_POSITION_R, _T and _N.
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
        """(k,) the distance at closest approach."""
        return np.asarray(np.linalg.norm(self.position, axis=1))

    @property
    def kinds(self) -> list[Kind]:
        """What each of the k rows is."""
        return [_CODES[code] for code in self.kind.tolist()]

    @classmethod
    def of(cls, parts: Iterable[Encounters]) -> Self:
        """All of them, with one row for the minutes that a pair is together: they may come in parts."""
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
    """Two instants (UTC microseconds, whole minutes) and the edges of the whole of which this is a part."""

    start: int
    end: int
    first: int
    last: int

    def __post_init__(self) -> None:
        """Raise ValueError for instants that are no whole minutes, or in the wrong order."""
        if any(one % MINUTE for one in (self.start, self.end, self.first, self.last)):
            raise ValueError(f"{self}: its instants are whole minutes")
        if not self.first <= self.start < self.end <= self.last:
            raise ValueError(f"{self}: a part is within its whole, and not empty")

    @classmethod
    def whole(cls, start: int, end: int) -> Self:
        """Between two instants, both of which are edges."""
        return cls(start, end, start, end)


def screen(
    elements: Elements,
    span: Span,
    *,
    threshold_km: float = THRESHOLD_KM,
    subjects: npt.NDArray[np.bool_] | None = None,
    step_s: float = STEP_S,
) -> Encounters:
    """All close approaches within ``threshold_km`` in a span.

    Args:
        elements: of n objects. Where its state cannot be true, an object has no close approach.
        span: when.
        threshold_km: the largest distance that counts.
        subjects: (n,) only those of pairs with one of these; None: all.
        step_s: seconds between the states that are searched; the result does not depend on it.

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
                _minutes(_not_among(found, slow, len(elements))),
                threshold_km=threshold_km,
            ),
            screen_pairs(elements, span, slow, threshold_km=threshold_km),
        ]
    )


def screen_pairs(
    elements: Elements, span: Span, pairs: npt.NDArray[np.int64], *, threshold_km: float = THRESHOLD_KM
) -> Encounters:
    """The close approaches of given row pairs (m, 2), the smaller row first, in a span."""
    minutes = np.arange(span.start, span.end + 1, MINUTE, dtype=np.int64)
    at_once = max(1, _STATES_AT_ONCE // len(minutes) // 2)
    parts = []
    for begin in range(0, len(pairs), at_once):
        few = pairs[begin : begin + at_once]
        rows, place = np.unique(few, return_inverse=True)
        states = _states(elements.take(rows), minutes)
        own, other = (States(*(one[column] for one in states)) for column in place.reshape(few.shape).T)
        near = _within(own, other, threshold_km)
        r_v = rate(own, other)
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
            _decided(few[pair], minutes[minute], (begins, others[0]), (ends, others[1]), span, threshold_km)
        )
    return Encounters.of(parts)


def screen_minutes(
    elements: Elements,
    span: Span,
    wanted: npt.NDArray[np.int64],
    *,
    threshold_km: float = THRESHOLD_KM,
) -> Encounters:
    """What row pairs do in given minutes: ``wanted`` (m, 3) has the smaller row, the other, and the minute.

    Minutes (UTC microseconds at their begin) outside of the span are passed over.
    """
    wanted = np.unique(wanted[(wanted[:, 2] >= span.start) & (wanted[:, 2] < span.end)], axis=0)
    if not len(wanted):
        return Encounters.of([])
    pairs, minutes = wanted[:, :2], wanted[:, 2]
    begin, end = (
        (states_at(elements, pairs[:, 0], instants), states_at(elements, pairs[:, 1], instants))
        for instants in (minutes, minutes + MINUTE)
    )
    return _decided(pairs, minutes, begin, end, span, threshold_km)


def _minutes(found: Candidates) -> npt.NDArray[np.int64]:
    """The minutes (m, 3) that candidates may be in."""
    spread = np.arange(int(np.max((found.latest - found.earliest) // MINUTE, initial=-1)) + 2)
    minute = (found.earliest // MINUTE * MINUTE)[:, None] + spread * MINUTE
    which, _ = np.nonzero(named := minute <= found.latest[:, None])
    return np.stack([found.first[which], found.second[which], minute[named]], axis=1)


def _decided(
    pairs: npt.NDArray[np.int64],
    minutes: Micros,
    begin: tuple[States, States],
    end: tuple[States, States],
    span: Span,
    threshold_km: float,
) -> Encounters:
    """What pairs (k, 2) do in minutes (k,), from their states at both ends: of some nothing."""
    near = [_within(*states, threshold_km) for states in (begin, end)]
    rates = [rate(*states) for states in (begin, end)]
    inside = (rates[0] < 0) & (rates[1] >= 0)
    nearest = closest(begin, end)
    # Where there is no minimum inside, an end is closest.
    at_end = ~inside & (rates[1] < 0)
    own = _chosen(inside, at_end, nearest.own, begin[0], end[0])
    other = [States(b.position - a.position, b.velocity - a.velocity) for a, b in (begin, end)]
    relative = _chosen(inside, at_end, nearest.relative, other[0], other[1])
    fraction = np.where(inside, nearest.fraction, at_end.astype(float))
    tca = minutes + np.round(fraction * MINUTE_S * 1e6).astype(np.int64)
    close = np.linalg.norm(relative.position, axis=1) <= threshold_km
    together = near[0] & near[1]
    edge = ~inside & ((minutes == span.first) & ~at_end | (minutes + MINUTE == span.last) & at_end)
    kind = np.select(
        [together, inside, edge], [_CODES.index(k) for k in (Kind.TOGETHER, Kind.ENCOUNTER, Kind.EDGE)], -1
    )
    told = np.flatnonzero(close & (kind >= 0))
    axes = _axes(Approach(fraction, relative, own))
    return Encounters.of(
        [
            Encounters(
                pairs[told, 0],
                pairs[told, 1],
                kind[told],
                tca[told],
                together[told].astype(np.int64),
                np.einsum("aki,ki->ka", axes[:, told], relative.position[told]),
                np.einsum("aki,ki->ka", axes[:, told], relative.velocity[told]),
            )
        ]
    )


def _chosen(
    inside: npt.NDArray[np.bool_], at_end: npt.NDArray[np.bool_], nearest: States, begin: States, end: States
) -> States:
    return States(
        *(
            np.where(inside[:, None], x, np.where(at_end[:, None], z, y))
            for x, y, z in zip(nearest, begin, end, strict=True)
        )
    )


def _axes(found: Approach) -> Floats:
    """Unit vectors (3, k, 3): radial, transverse and normal of the first object."""
    position, velocity = found.own
    radial = position / np.linalg.norm(position, axis=1, keepdims=True)
    normal = np.cross(position, velocity)
    normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return np.stack([radial, np.cross(normal, radial), normal])


def _within(own: States, other: States, threshold_km: float) -> npt.NDArray[np.bool_]:
    apart = other.position - own.position
    within: npt.NDArray[np.bool_] = np.einsum("...k,...k->...", apart, apart) <= threshold_km**2
    return within


def _states(elements: Elements, instants: Micros) -> States:
    """States (n, m, 3) of n objects at m instants; NaN where they cannot be true."""
    found = propagate_satellites(elements.to_satrec_array(), instants)
    wrong = ~possible_states(found, elements)
    found.position[wrong], found.velocity[wrong] = np.nan, np.nan
    return States(found.position, found.velocity)


def states_at(elements: Elements, rows: Rows, instants: Micros) -> States:
    """States (k, 3) of objects at an instant each; NaN where they cannot be true."""
    order = np.argsort(rows, kind="stable")
    objects, begins = np.unique(rows[order], return_index=True)
    position, velocity = np.empty((len(rows), 1, 3)), np.empty((len(rows), 1, 3))
    valid = np.empty((len(rows), 1), np.bool_)
    records = elements.take(objects).to_satrecs()
    # A loop over objects: each has instants of its own, and the theory's array call takes the same for all.
    for record, few in zip(records, np.split(order, begins[1:]), strict=True):
        error, position[few, 0], velocity[few, 0] = record.sgp4_array(*julian_dates(instants[few]))
        valid[few, 0] = error == 0
    wrong = ~possible_states(Ephemeris(instants, position, velocity, valid), elements.take(rows))
    position[wrong], velocity[wrong] = np.nan, np.nan
    return States(position[:, 0], velocity[:, 0])


def _not_among(found: Candidates, pairs: npt.NDArray[np.int64], objects: int) -> Candidates:
    """Without the pairs that are looked at in every minute anyway."""
    keep = ~np.isin(found.first * objects + found.second, pairs[:, 0] * objects + pairs[:, 1])
    return Candidates(
        found.first[keep],
        found.second[keep],
        found.earliest[keep],
        found.latest[keep],
        found.slow_first,
        found.slow_second,
    )
