"""What to look at again when some objects have new elements, so that the list is that of a full screening.

What two objects do in a minute depends on their element sets alone. So of a pair of which neither has changed
the earlier list knows every minute in which it is close, as far as that list reaches. An encounter away from
the edges of both lists is the same row in both, and is kept. At the edges, and of pairs that are together,
those minutes are looked at again, and no others. Pairs with a changed object are searched for, and beyond the
earlier list all pairs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.conjunctions.screening import MINUTE, STEP_S, Span
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, Task, in_parts
from branchlake_dagster.sda.orbits.frames import Micros
from branchlake_dagster.sda.orbits.propagation import Elements

MOST_CHANGED = 0.4
"""Of the objects: with more, most pairs have a changed one, and searching for all is less work."""
_LONG_STEPS = ((0.02, 240.0), (0.2, 120.0))
"""Few subjects have few pairs, however wide they are looked for; then the states are what costs."""
_AT_AN_EDGE = MINUTE + 1_000
"""Microseconds from an edge within which a minute may touch it; a moment is rounded to one of them."""
_FEW_STATES = 3_000_000
"""States that are propagated here on one core sooner than on Spark's workers, which must start: one takes a
microsecond. Threads do not help, as SGP4 keeps Python's lock."""


@dataclass(frozen=True)
class Earlier:
    """A list of close approaches: when it begins and ends, its threshold, and of k rows what they are.

    ``pairs`` (k, 2) catalogue numbers, the smaller first; ``tca_micros`` (k,); ``together`` (k,) whether the
    row tells of minutes spent together.
    """

    start: int
    end: int
    threshold_km: float
    pairs: npt.NDArray[np.int64]
    tca_micros: Micros
    together: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Plan:
    """A screening, its tasks, and in words why these.

    ``kept`` are the rows of the earlier list that are rows of the new one as they are; ``few``: the tasks are
    so little work that they are done sooner here than sent to workers.
    """

    screening: Screening
    tasks: Sequence[Task]
    why: str
    kept: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    few: bool = False


def plan(
    elements: Elements,
    span: Span,
    threshold_km: float,
    *,
    earlier: Earlier | None,
    changed: npt.NDArray[np.int64],
    parts: int,
) -> Plan:
    """How to screen a span, all of it an edge to edge.

    Args:
        elements: the current ones, sorted by ``sat_no``.
        span: when.
        threshold_km: the largest distance that counts.
        earlier: the last list; None: there is none.
        changed: catalogue numbers of objects with other elements than the earlier list had.
        parts: into how many tasks the work is to be divided.

    """
    subjects = np.isin(elements.sat_no, changed)
    share = float(subjects.mean()) if len(elements) else 0.0
    if (why := _unusable(earlier, span, threshold_km, share)) or earlier is None:
        screening = Screening.of_all(elements, threshold_km)
        return Plan(screening, in_parts(span, Pairs.ALL, parts), f"all pairs: {why}")
    reached = min(earlier.end, span.end)
    minutes, together, kept = _given(elements, subjects, earlier, span)
    step_s = next((step for most, step in _LONG_STEPS if share <= most), STEP_S)
    screening = Screening(elements, threshold_km, subjects, minutes, together, step_s)
    known = Span(span.start, reached, span.first, span.last)
    tasks = in_parts(known, Pairs.GIVEN, 1)
    if subjects.any():
        # Each task sets up all objects for SGP4, which of few pairs is a sixth of its work.
        tasks += in_parts(
            known, Pairs.OF_SUBJECTS, parts if share > _LONG_STEPS[0][0] else max(1, parts // 3)
        )
    if reached < span.end:
        rest = Span(reached, span.end, span.first, span.last)
        new_parts = max(1, round(parts * (rest.end - rest.start) / (span.end - span.start)))
        tasks += in_parts(rest, Pairs.ALL, new_parts)
    steps = (reached - span.start) / step_s * subjects.any() + max(0, span.end - reached) / STEP_S
    few = bool(len(elements) * steps / 1e6 <= _FEW_STATES)
    count = int(subjects.sum())
    of = f"pairs of {count:,} changed object{'' if count == 1 else 's'}"
    return Plan(screening, tasks, of, kept, few)


def _unusable(earlier: Earlier | None, span: Span, threshold_km: float, share: float) -> str:
    """Why an earlier list is of no use; empty when it is."""
    if earlier is None:
        return "there is no earlier list"
    if earlier.threshold_km != threshold_km:
        return f"the earlier list is of {earlier.threshold_km:g} km"
    if not earlier.start <= span.start < earlier.end:
        return "the earlier list is of another time"
    return f"{share:.0%} of the objects have changed" if share > MOST_CHANGED else ""


def _given(
    elements: Elements, subjects: npt.NDArray[np.bool_], earlier: Earlier, span: Span
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What the earlier list tells of pairs whose objects are there and have not changed.

    Minutes (m, 3) and pairs (p, 2) to look at again, and its rows (k,) that need not be.
    """
    start, end = span.start, min(earlier.end, span.end)
    rows = np.searchsorted(elements.sat_no, earlier.pairs)
    inside = np.minimum(rows, max(len(elements) - 1, 0))
    if not len(elements):
        return np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    same = ((elements.sat_no[inside] == earlier.pairs) & ~subjects[inside]).all(axis=1)
    stayed = same & earlier.together
    together = np.unique(inside[stayed], axis=0)
    known = inside[:, 0] * len(elements) + inside[:, 1]
    passed = same & ~np.isin(known, together[:, 0] * len(elements) + together[:, 1])
    first, last = max(earlier.start, start) + _AT_AN_EDGE, end - _AT_AN_EDGE
    stays = passed & (earlier.tca_micros > first) & (earlier.tca_micros < last)
    passed &= ~stays
    tca, pairs = earlier.tca_micros[passed], inside[passed]
    minute = np.minimum(tca, end - 1) // MINUTE * MINUTE
    # A pair on its way out when the new list begins was closest in the minute before.
    leaving = (tca >= start - MINUTE) & (tca < start)
    minute = np.where(leaving, start, minute)
    keep = (minute >= start) & (minute < end)
    return np.column_stack([pairs[keep], minute[keep]]), together, np.flatnonzero(stays)
