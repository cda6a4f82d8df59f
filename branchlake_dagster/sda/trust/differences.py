"""Estimate the error of an element set at some age by comparing it with a later set of the same object.

Both sets are propagated to an instant within the revolution before the later epoch. The instant varies from
pair to pair, because most epochs are at a node, where part of the error is never visible. The difference of
the positions is given along the later set's radius, along its arc and across its plane.

A difference is not a measurement. The later set has an error of its own, so differences tend to be too large.
Both sets may have been fitted to the same observations, so differences of young sets tend to be too small.
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
"""Each set is compared with the first, second, fourth and eighth set after it, over hours to weeks."""
MIN_AGE_DAYS = 0.02
"""Sets with closer epochs are corrections of the same set."""
MAX_AGE_DAYS = 21.0
_BATCH_SIZE = 100_000
_GOLDEN = 0.618_033_988_749_895
"""Multiples of the golden ratio, modulo one, spread any number of instants evenly over a revolution."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Differences:
    """Differences of k pairs of element sets, each of one object: older minus newer set.

    ``older`` and ``newer`` (k,) are rows of the history and ``lag`` (k,) their distance. ``age_days`` (k,) is
    the age of the older set at the instant of comparison. ``values`` (k, 5) has the position along R, T (the
    arc) and N in km, the semi-major axis in km (without its change by drag, which the elements state) and the
    inclination in degrees.
    """

    older: Rows
    newer: Rows
    lag: Rows
    age_days: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.older)

    def take(self, rows: Rows | npt.NDArray[np.bool_]) -> Differences:
        """Return the pairs of the given rows."""
        return Differences(
            self.older[rows], self.newer[rows], self.lag[rows], self.age_days[rows], self.values[rows]
        )


@dataclass(frozen=True)
class FirstPairs:
    """The numbers of each object's first pairs, if all compared pairs of a history are numbered.

    Pairs are numbered by lag, object and epoch. ``sat_no`` (n,) is sorted, and ``first`` (n, lags) has the
    number of the object's first pair of each of `LAGS`. The number of a pair determines its instant, so a
    part of the history gives the same differences as the whole history.
    """

    sat_no: npt.NDArray[np.int64]
    first: Rows

    @classmethod
    def from_counts(cls, sat_no: npt.NDArray[np.int64], counts: Rows) -> FirstPairs:
        """Number the pairs of all objects. ``counts`` (n, lags) is the number of pairs by object and lag."""
        order = np.argsort(sat_no)
        by_lag = counts[order].T
        first = np.cumsum(by_lag.ravel()) - by_lag.ravel()
        return cls(sat_no[order], first.reshape(by_lag.shape).T)

    def number_pairs(self, sat_no: npt.NDArray[np.int64], lag: Rows) -> Rows:
        """Return the numbers (k,) of pairs that are sorted by lag, object and epoch."""
        lag_index = np.searchsorted(LAGS, lag)
        is_first = np.ones(len(lag), np.bool_)
        is_first[1:] = (sat_no[1:] != sat_no[:-1]) | (lag_index[1:] != lag_index[:-1])
        group_starts = np.flatnonzero(is_first)
        position = np.arange(len(lag)) - group_starts[np.cumsum(is_first) - 1]
        return np.asarray(self.first[np.searchsorted(self.sat_no, sat_no), lag_index] + position)


def count_pairs(history: Elements) -> tuple[npt.NDArray[np.int64], Rows]:
    """Return the objects (n,) of a history, and their numbers of pairs (n, lags), for `FirstPairs`."""
    sat_nos, object_index = np.unique(history.sat_no, return_inverse=True)
    older, _, lags, _ = _select_pairs(history)
    cells = object_index[older] * len(LAGS) + np.searchsorted(LAGS, lags)
    counts = np.bincount(cells, minlength=len(sat_nos) * len(LAGS))
    return sat_nos, counts.reshape(len(sat_nos), len(LAGS)).astype(np.int64)


def compute_differences(history: Elements, first_pairs: FirstPairs | None = None) -> Differences:
    """Compare element sets with later sets of the same object, up to `MAX_AGE_DAYS` apart.

    Pairs with a state that SGP4 cannot compute are left out.

    Args:
        history: Element sets, sorted by ``sat_no`` and epoch, without repeated epochs.
        first_pairs: The numbers of the pairs, if ``history`` is a part of a larger history. The part must
            have all sets of its objects.
    """
    older, newer, lags, age = _select_pairs(history)
    if first_pairs is None:
        number = np.arange(len(older))
    else:
        number = first_pairs.number_pairs(history.sat_no[older], lags)
    motion = _element_column(history, "mean_motion")[newer]
    days_before_newer = np.minimum((number * _GOLDEN) % 1.0 / motion, age / 2)
    micros = history.epoch_micros[newer] - (days_before_newer * DAY_MICROS).astype(np.int64)
    older_position, _ = states_at(history, older, micros)
    newer_position, velocity = states_at(history, newer, micros)
    radial, transverse, normal = np.einsum("kij,kj->ik", rtn_axes(newer_position, velocity), older_position)
    radius = np.linalg.norm(newer_position, axis=1)
    # T is measured along the arc: on the tangent, an object 100 km behind would also be 0.7 km too low.
    rtn = np.column_stack(
        [np.hypot(radial, transverse) - radius, radius * np.arctan2(transverse, radial), normal]
    )
    values = np.column_stack([rtn, *_element_differences(history, older, newer, age)])
    return Differences(older, newer, lags, age - days_before_newer, values).take(
        np.isfinite(values).all(axis=1)
    )


def _select_pairs(history: Elements) -> tuple[Rows, Rows, Rows, Floats]:
    """Return the compared pairs, sorted by lag, object and epoch: older and newer rows, lag, and age."""
    count = len(history)
    older = np.concatenate([np.arange(max(0, count - lag)) for lag in LAGS]).astype(np.int64)
    lags = np.repeat(np.array(LAGS), [max(0, count - lag) for lag in LAGS]).astype(np.int64)
    newer = older + lags
    age = (history.epoch_micros[newer] - history.epoch_micros[older]) / DAY_MICROS
    is_same_object = history.sat_no[older] == history.sat_no[newer]
    keep = np.flatnonzero(is_same_object & (age >= MIN_AGE_DAYS) & (age <= MAX_AGE_DAYS))
    return older[keep], newer[keep], lags[keep], age[keep]


def _element_differences(history: Elements, older: Rows, newer: Rows, age: Floats) -> tuple[Floats, Floats]:
    motion, inclination, dot = (
        _element_column(history, name) for name in ("mean_motion", "inclination", "mean_motion_dot")
    )
    # Element sets state half of the derivative.
    drag = (dot[older] + dot[newer]) * age
    change = motion[newer] - motion[older] - drag
    axis = 2 / 3 * semi_major_axis(history)[newer] / motion[newer] * change
    return axis, inclination[older] - inclination[newer]


def _element_column(elements: Elements, name: str) -> Floats:
    return np.asarray(elements.values[:, ELEMENT_FIELDS.index(name)])


def states_at(elements: Elements, rows: Rows, micros: Micros) -> tuple[Floats, Floats]:
    """Propagate ``rows`` (k,) of element sets, each to its own instant.

    The array call of the sgp4 package supports common instants only, so this is a loop over compiled calls.
    It takes a second for half a million states.

    Returns:
        Position (km) and velocity (km/s) in TEME, both (k, 3); NaN where SGP4 reports an error.

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
    """Return the radial, transverse and normal unit vectors of states (k, 3), as rows of (k, 3, 3)."""
    radial = position / np.linalg.norm(position, axis=1, keepdims=True)
    normal = np.cross(position, velocity)
    normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return np.stack([radial, np.cross(normal, radial), normal], axis=1)
