"""Plan a screening after some objects got new elements, so that its list equals that of a full screening.

The approaches of two objects in a minute depend only on their element sets. So if neither object of a pair
has changed, the earlier list has every minute in which the pair is close, within its time span. An encounter
away from the edges of both lists is the same row in both, and is kept. At the edges, and for pairs of the
kind `together`, the minutes of the earlier list are screened again, and no others. Pairs with a changed
object are searched. After the end of the earlier list, all pairs are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.conjunctions.screening import (
    MINUTE,
    STEP_S,
    Encounters,
    Span,
    screen_minutes,
    screen_pairs,
)
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, Task, in_parts
from branchlake_dagster.sda.orbits.frames import Micros
from branchlake_dagster.sda.orbits.propagation import Elements

MOST_CHANGED = 0.4
"""The largest share of changed objects for an incremental screening.

With more, most pairs have a changed object, and a full screening is less work.
"""
_LONG_STEPS = ((0.02, 240.0), (0.2, 120.0))
"""Search steps (s) by the largest share of changed objects for which they are used.

If few objects changed, there are few pairs, also in a wide search. Then the computation of states is the
largest cost, so a longer step is cheaper.
"""
_AT_AN_EDGE = MINUTE + 1_000
"""Microseconds from an edge within which a minute may touch it. Times are rounded to microseconds."""


@dataclass(frozen=True)
class EarlierLimits:
    """The time and the threshold of an earlier list of close approaches.

    `start` and `end` limit its time (UTC microseconds), and `threshold_km` is its largest miss distance.
    """

    start: int
    end: int
    threshold_km: float


@dataclass(frozen=True)
class EarlierRows:
    """k rows of an earlier list of close approaches.

    ``pairs`` (k, 2) are catalog numbers, the smaller first; ``tca_micros`` (k,) are the times of closest
    approach, UTC microseconds; ``together`` (k,) is true for rows of the kind `together`.
    """

    pairs: npt.NDArray[np.int64]
    tca_micros: Micros
    together: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rescreening:
    """Decides for rows of an earlier list whether they stay, and screens the minutes of the others again.

    Spark ships it to the workers. ``elements`` are the current element sets, sorted by ``sat_no``.
    ``is_changed`` (n,) is true for the objects whose elements differ from those of the earlier list; their
    pairs are searched by the tasks of the `Plan`, so their earlier rows are ignored. ``span`` is the part of
    the new time that the earlier list covers.
    """

    elements: Elements
    is_changed: npt.NDArray[np.bool_]
    earlier: EarlierLimits
    span: Span

    def rescreen(self, rows: EarlierRows) -> tuple[npt.NDArray[np.int64], Encounters]:
        """Return which rows of the earlier list stay, and the approaches that replace the others.

        The result for a pair depends only on the rows of this pair, so a list may be divided by pairs.

        Args:
            rows: Rows of the earlier list. If it has a row of a pair, it has all rows of that pair.

        Returns:
            Indexes of `rows` (k,), and close approaches by rows of ``elements``.
        """
        minutes, together, stays = self._split_rows(rows)
        threshold_km = self.earlier.threshold_km
        again = [
            screen_minutes(self.elements, self.span, minutes, threshold_km=threshold_km),
            screen_pairs(self.elements, self.span, together, threshold_km=threshold_km),
        ]
        return stays, Encounters.of(again)

    def _split_rows(
        self, rows: EarlierRows
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Divide rows of unchanged pairs into those to screen again and those that stay.

        Returns:
            Minutes (m, 3) to screen again, as (first row, second row, minute); pairs (p, 2) to screen in
                every minute; and the indexes (k,) of the rows that stay.
        """
        elements, (start, end) = self.elements, (self.span.start, self.span.end)
        if not len(elements):
            return np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
        inside = np.minimum(np.searchsorted(elements.sat_no, rows.pairs), len(elements) - 1)
        same = ((elements.sat_no[inside] == rows.pairs) & ~self.is_changed[inside]).all(axis=1)
        together = np.unique(inside[same & rows.together], axis=0)
        pair = inside[:, 0] * len(elements) + inside[:, 1]
        passed = same & ~np.isin(pair, together[:, 0] * len(elements) + together[:, 1])
        first, last = max(self.earlier.start, start) + _AT_AN_EDGE, end - _AT_AN_EDGE
        stays = passed & (rows.tca_micros > first) & (rows.tca_micros < last)
        passed &= ~stays
        tca, pairs = rows.tca_micros[passed], inside[passed]
        minute = np.minimum(tca, end - 1) // MINUTE * MINUTE
        # A pair that is receding when the new list begins was closest in the minute before.
        leaving = (tca >= start - MINUTE) & (tca < start)
        minute = np.where(leaving, start, minute)
        keep = (minute >= start) & (minute < end)
        return np.column_stack([pairs[keep], minute[keep]]), together, np.flatnonzero(stays)


@dataclass(frozen=True)
class Plan:
    """A screening, its tasks, and the reason for this plan as text.

    ``rescreening`` is for the rows of the earlier list. It is None if all pairs are searched.
    """

    screening: Screening
    tasks: Sequence[Task]
    why: str
    rescreening: Rescreening | None = None


def plan(
    elements: Elements,
    span: Span,
    threshold_km: float,
    *,
    earlier: EarlierLimits | None,
    changed: npt.NDArray[np.int64],
    parts: int,
) -> Plan:
    """Plan the screening of a whole span.

    Args:
        elements: The current element sets, sorted by ``sat_no``.
        span: The span. Both of its ends are edges.
        threshold_km: The largest miss distance.
        earlier: The previous list, or None if there is none.
        changed: Catalog numbers of the objects whose elements differ from those of the earlier list.
        parts: The number of tasks among which the work is divided.
    """
    subjects = np.isin(elements.sat_no, changed)
    share = float(subjects.mean()) if len(elements) else 0.0
    if (why := _reason_unusable(earlier, span, threshold_km, share)) or earlier is None:
        screening = Screening.of_all(elements, threshold_km)
        return Plan(screening, in_parts(span, Pairs.ALL, parts), f"all pairs: {why}")
    reached = min(earlier.end, span.end)
    step_s = next((step for most, step in _LONG_STEPS if share <= most), STEP_S)
    screening = Screening(elements, threshold_km, subjects, step_s)
    known = Span(span.start, reached, span.first, span.last)
    tasks = []
    if subjects.any():
        # Each task initializes SGP4 for all objects, which is a sixth of its work if there are few pairs.
        tasks += in_parts(
            known, Pairs.OF_SUBJECTS, parts if share > _LONG_STEPS[0][0] else max(1, parts // 3)
        )
    if reached < span.end:
        rest = Span(reached, span.end, span.first, span.last)
        new_parts = max(1, round(parts * (rest.end - rest.start) / (span.end - span.start)))
        tasks += in_parts(rest, Pairs.ALL, new_parts)
    count = int(subjects.sum())
    of = f"pairs of {count:,} changed object{'' if count == 1 else 's'}"
    return Plan(screening, tasks, of, Rescreening(elements, subjects, earlier, known))


def _reason_unusable(earlier: EarlierLimits | None, span: Span, threshold_km: float, share: float) -> str:
    """Return why an earlier list cannot be used, or an empty text if it can."""
    if earlier is None:
        return "there is no earlier list"
    if earlier.threshold_km != threshold_km:
        return f"the earlier list is of {earlier.threshold_km:g} km"
    if not earlier.start <= span.start < earlier.end:
        return "the earlier list is of another time"
    return f"{share:.0%} of the objects have changed" if share > MOST_CHANGED else ""
