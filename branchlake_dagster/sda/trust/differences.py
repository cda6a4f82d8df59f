"""What a later element set of the same object says of an earlier one: the earlier one's error at that age.

Both are propagated to an instant within the revolution before the later one's epoch, another one for each
pair: most epochs are at a node, where part of the error is never seen. The difference of positions is told
along the later one's radius, along its arc and across its plane. The later set has an error of its own, so a
difference is rather too large; and both may have been fitted to the same observations, so for young sets it
is rather too small. It is no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats, Micros, julian_dates
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.trust.classes import semi_major_axis

DAY_MICROS = 86_400_000_000
LAGS = (1, 2, 4, 8)
"""Sets of an object are held against the next one, the second, fourth and eighth: ages of hours and weeks."""
MIN_AGE_DAYS = 0.02
"""Sets with nearer epochs are corrections of one and the same."""
MAX_AGE_DAYS = 21.0
_BATCH_SIZE = 100_000
_GOLDEN = 0.618_033_988_749_895
"""Spreads instants evenly over a revolution, however many there are."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Differences:
    """Of k pairs of element sets of one object, older less newer.

    Rows ``older`` and ``newer`` of the history, ``lag``, ``age_days`` (k,), and ``values`` (k, 5): position
    along R, T (the arc) and N in km, semi-major axis in km (less its change by drag, as the elements state
    it) and inclination in degrees.
    """

    older: Rows
    newer: Rows
    lag: Rows
    age_days: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.older)

    def take(self, rows: Rows | npt.NDArray[np.bool_]) -> Differences:
        """Some of them."""
        return Differences(
            self.older[rows], self.newer[rows], self.lag[rows], self.age_days[rows], self.values[rows]
        )


def compute_differences(history: Elements) -> Differences:
    """All that a history (sorted by ``sat_no`` and epoch, no epoch twice) has of up to `MAX_AGE_DAYS`.

    Pairs of which SGP4 refuses a state are left out.
    """
    count = len(history)
    older = np.concatenate([np.arange(max(0, count - lag)) for lag in LAGS]).astype(np.int64)
    lags = np.repeat(np.array(LAGS), [max(0, count - lag) for lag in LAGS]).astype(np.int64)
    newer = older + lags
    age = (history.epoch_micros[newer] - history.epoch_micros[older]) / DAY_MICROS
    is_same_object = history.sat_no[older] == history.sat_no[newer]
    keep = np.flatnonzero(is_same_object & (age >= MIN_AGE_DAYS) & (age <= MAX_AGE_DAYS))
    older, newer, lags, age = older[keep], newer[keep], lags[keep], age[keep]
    motion = _element_column(history, "mean_motion")[newer]
    days_before_newer = np.minimum((np.arange(len(older)) * _GOLDEN) % 1.0 / motion, age / 2)
    micros = history.epoch_micros[newer] - (days_before_newer * DAY_MICROS).astype(np.int64)
    older_position, _ = states_at(history, older, micros)
    newer_position, velocity = states_at(history, newer, micros)
    radial, transverse, normal = np.einsum("kij,kj->ik", rtn_axes(newer_position, velocity), older_position)
    radius = np.linalg.norm(newer_position, axis=1)
    # Along the arc: on the tangent, what is 100 km behind would also be 0.7 km too low.
    rtn = np.column_stack(
        [np.hypot(radial, transverse) - radius, radius * np.arctan2(transverse, radial), normal]
    )
    values = np.column_stack([rtn, *_element_differences(history, older, newer, age)])
    return Differences(older, newer, lags, age - days_before_newer, values).take(
        np.isfinite(values).all(axis=1)
    )


def _element_differences(history: Elements, older: Rows, newer: Rows, age: Floats) -> tuple[Floats, Floats]:
    motion, inclination, dot = (
        _element_column(history, name) for name in ("mean_motion", "inclination", "mean_motion_dot")
    )
    # Element lines state half the derivative.
    drag = (dot[older] + dot[newer]) * age
    change = motion[newer] - motion[older] - drag
    axis = 2 / 3 * semi_major_axis(history)[newer] / motion[newer] * change
    return axis, inclination[older] - inclination[newer]


def _element_column(elements: Elements, name: str) -> Floats:
    return np.asarray(elements.values[:, ELEMENT_FIELDS.index(name)])


def states_at(elements: Elements, rows: Rows, micros: Micros) -> tuple[Floats, Floats]:
    """Position (km) and velocity (km/s) in TEME, both (k, 3), of ``rows`` each at its own instant; else NaN.

    SGP4's array call knows common instants only, so this is a loop over compiled calls: a second for half a
    million.
    """
    position, velocity = np.full((len(rows), 3), np.nan), np.full((len(rows), 3), np.nan)
    unique_rows, record_index = np.unique(rows, return_inverse=True)
    records = elements.take(unique_rows).to_satrecs()
    whole, fraction = julian_dates(micros)
    for begin in range(0, len(rows), _BATCH_SIZE):
        batch = slice(begin, begin + _BATCH_SIZE)
        results = [
            records[index].sgp4(day, rest)
            for index, day, rest in zip(
                record_index[batch].tolist(), whole[batch].tolist(), fraction[batch].tolist(), strict=True
            )
        ]
        is_valid = np.array([error == 0 for error, _, _ in results], np.bool_)
        position[batch] = np.where(is_valid[:, None], [r for _, r, _ in results], np.nan)
        velocity[batch] = np.where(is_valid[:, None], [v for _, _, v in results], np.nan)
    return position, velocity


def rtn_axes(position: Floats, velocity: Floats) -> Floats:
    """Radial, transverse and normal unit vectors as rows (k, 3, 3) of states (k, 3)."""
    radial = position / np.linalg.norm(position, axis=1, keepdims=True)
    normal = np.cross(position, velocity)
    normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return np.stack([radial, np.cross(normal, radial), normal], axis=1)
