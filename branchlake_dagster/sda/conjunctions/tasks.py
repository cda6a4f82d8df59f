"""Divide a screening into tasks that can run anywhere and in any order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.conjunctions.screening import (
    MINUTE,
    STEP_S,
    Encounters,
    Span,
    screen,
    screen_minutes,
    screen_pairs,
)
from branchlake_dagster.sda.orbits.propagation import Elements


class Pairs(StrEnum):
    """The pairs that a task screens: all, those with a subject, or given ones."""

    ALL = "all"
    OF_SUBJECTS = "of subjects"
    GIVEN = "given"


@dataclass(frozen=True)
class Task:
    """A part of the screened time, and the pairs to screen in it."""

    span: Span
    pairs: Pairs


@dataclass(frozen=True)
class Screening:
    """The input of all tasks of a screening. Spark ships it to the workers: 1.4 MB for 16,000 objects.

    ``elements`` are sorted by ``sat_no``. The other arrays refer to their rows. ``subjects`` (n,) is for
    tasks of the kind `OF_SUBJECTS`. ``minutes`` (m, 3) and ``together`` (p, 2) are for tasks of the kind
    `GIVEN`: pairs to screen in given minutes (`screen_minutes`), and pairs to screen in every minute.
    """

    elements: Elements
    threshold_km: float
    subjects: npt.NDArray[np.bool_]
    minutes: npt.NDArray[np.int64]
    together: npt.NDArray[np.int64]
    subjects_step_s: float = STEP_S

    @classmethod
    def of_all(cls, elements: Elements, threshold_km: float) -> Self:
        """Return a screening of all pairs."""
        nothing = np.zeros((0, 3), np.int64)
        return cls(elements, threshold_km, np.ones(len(elements), np.bool_), nothing, nothing[:, :2])

    def done(self, task: Task) -> Encounters:
        """Run a task and return its close approaches."""
        how: dict[str, Any] = {"threshold_km": self.threshold_km}
        if task.pairs is Pairs.GIVEN:
            return Encounters.of(
                [
                    screen_minutes(self.elements, task.span, self.minutes, **how),
                    screen_pairs(self.elements, task.span, self.together, **how),
                ]
            )
        if task.pairs is Pairs.OF_SUBJECTS:
            how |= {"subjects": self.subjects, "step_s": self.subjects_step_s}
        return screen(self.elements, task.span, **how)


def in_parts(span: Span, pairs: Pairs, parts: int) -> list[Task]:
    """Divide a span into at most ``parts`` tasks of about the same length."""
    minutes = (span.end - span.start) // MINUTE
    cuts = sorted({span.start + minutes * k // parts * MINUTE for k in range(parts)} | {span.end})
    return [Task(Span(begin, end, span.first, span.last), pairs) for begin, end in pairwise(cuts)]
