"""Element sets that do not continue the ones before: candidates for manoeuvres, bad sets, mixed-up objects.

A set is held against the one before by semi-major axis, inclination and transverse position, each over what
is usual for the object's class and for the object itself at that age. What is far outside is a jump, and what
it is follows from the set after it: is that far from the set before as well, the orbit has changed (a
manoeuvre, or drag that no set foresaw); is it as the set before told, the one between was wrong; there may be
none yet, or none within three weeks. Two objects of which each has jumped onto the other's orbit are
taken for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.trust.classes import semi_major_axis
from branchlake_dagster.sda.trust.differences import Differences, Rows, states_at
from branchlake_dagster.sda.trust.growth import AXES

MIN_SIGMAS = 6.0
_MIN_JUMP = {"a": 0.1, "i": 0.005, "t": 1.0}
"""A smaller jump (km, degrees) is none, however regular the object is."""
_MAX_REMAINDER = 0.3
"""Of the jump: what may be left of it in the set after a wrong one."""
_MAX_SWAP_RATIO = 0.1
_NEIGHBOR_COUNT = 8
_MAX_SWAP_DAYS = 30.0


class JumpKind(StrEnum):
    """What an element set that does not continue the ones before may be."""

    MANOEUVRE = "manoeuvre"
    LONE_SET = "lone set"
    UNCONFIRMED = "unconfirmed"
    SWAP = "swap"


class JumpSign(StrEnum):
    """In what a jump is seen."""

    SEMI_MAJOR_AXIS = "semi-major axis"
    INCLINATION = "inclination"
    IN_TRACK = "in-track position"


JUMP_SIGNS = tuple(JumpSign)
_JUMP_COLUMNS = tuple(AXES.index(axis) for axis in ("a", "i", "t"))


@dataclass(frozen=True)
class Jumps:
    """m candidates.

    ``pair`` (m,) the row of the differences, ``sign`` the place in `JUMP_SIGNS`, ``sigmas`` how far outside,
    ``kind`` a `JumpKind`, ``swapped_set`` the row of the history that the object was taken for, else -1.
    """

    pair: Rows
    sign: Rows
    sigmas: Floats
    kind: npt.NDArray[np.str_]
    swapped_set: Rows


def find_jumps(history: Elements, differences: Differences, expected_sigma: Floats) -> Jumps:
    """Candidates among the differences.

    Args:
        history: what the differences are of.
        differences: the differences, of lags 1 and 2 at least.
        expected_sigma: (k, 5) one sigma of each difference, NaN where unknown.

    """
    size = np.abs(differences.values[:, _JUMP_COLUMNS])
    ratio = size / expected_sigma[:, _JUMP_COLUMNS]
    is_outside = (ratio > MIN_SIGMAS) & (
        size > np.array([_MIN_JUMP[AXES[column]] for column in _JUMP_COLUMNS])
    )
    n = len(history)
    pair_before, pair_around = (np.full(n, -1) for _ in range(2))
    for lag, pair_of_set in ((1, pair_before), (2, pair_around)):
        rows = np.flatnonzero(differences.lag == lag)
        pair_of_set[differences.newer[rows] if lag == 1 else differences.older[rows] + 1] = rows
    # By the set that jumps: the pair with the set before, and that of its neighbours on both sides.
    jump_sets = np.flatnonzero(pair_before >= 0)
    jump_sets = jump_sets[is_outside[pair_before[jump_sets]].any(axis=1)]
    around_pairs = pair_around[jump_sets]
    is_far = is_outside[pair_before[jump_sets]]
    sign = np.argmax(is_far, axis=1)
    has_next = around_pairs >= 0
    remaining = np.take_along_axis(size[around_pairs], sign[:, None], 1)[:, 0]
    is_lone = has_next & (
        remaining < _MAX_REMAINDER * np.take_along_axis(size[pair_before[jump_sets]], sign[:, None], 1)[:, 0]
    )
    # The way back from a lone set is no jump of its own.
    is_return = np.isin(jump_sets - 1, jump_sets[is_lone])
    pair, sign, has_next, is_lone = (
        pair_before[jump_sets[~is_return]],
        sign[~is_return],
        has_next[~is_return],
        is_lone[~is_return],
    )
    kind = np.where(has_next, JumpKind.MANOEUVRE.value, JumpKind.UNCONFIRMED.value).astype("<U16")
    kind[is_lone] = JumpKind.LONE_SET.value
    swapped_set = _find_swapped_sets(history, differences, pair)
    kind[swapped_set >= 0] = JumpKind.SWAP.value
    return Jumps(pair, sign, ratio[pair, sign], kind, swapped_set)


def _find_swapped_sets(history: Elements, differences: Differences, pair: Rows) -> Rows:
    """Of each jump the older set of another one that the newer set continues, if that is mutual; else -1."""
    swapped_sets = np.full(len(pair), -1)
    if len(pair) < 2:
        return swapped_sets
    older, newer = differences.older[pair], differences.newer[pair]
    orbit_points = _orbit_normal_points(history)
    neighbors = cKDTree(orbit_points[older]).query(orbit_points[newer], k=min(_NEIGHBOR_COUNT, len(pair)))[1]
    jump_index, candidate = np.repeat(np.arange(len(pair)), neighbors.shape[1]), neighbors.ravel()
    days = (history.epoch_micros[newer[jump_index]] - history.epoch_micros[older[candidate]]) / 86_400e6
    is_other_object = history.sat_no[older[candidate]] != history.sat_no[newer[jump_index]]
    keep = is_other_object & (np.abs(days) <= _MAX_SWAP_DAYS)
    jump_index, candidate = jump_index[keep], candidate[keep]
    micros = history.epoch_micros[newer[jump_index]]
    new_position, _ = states_at(history, newer[jump_index], micros)
    other_position, _ = states_at(history, older[candidate], micros)
    old_position, _ = states_at(history, older[jump_index], micros)
    is_closer = np.linalg.norm(other_position - new_position, axis=1) <= _MAX_SWAP_RATIO * np.linalg.norm(
        old_position - new_position, axis=1
    )
    jump_index, candidate = jump_index[is_closer], candidate[is_closer]
    is_mutual = np.isin(jump_index * len(pair) + candidate, candidate * len(pair) + jump_index)
    swapped_sets[jump_index[is_mutual]] = older[candidate[is_mutual]]
    return swapped_sets


def _orbit_normal_points(elements: Elements) -> Floats:
    """What hardly changes from set to set, as a point (n, 3), km: the orbit's normal, as long as its axis."""
    inclination, node = (
        np.radians(elements.values[:, ELEMENT_FIELDS.index(name)])
        for name in ("inclination", "ra_of_asc_node")
    )
    normal = np.column_stack(
        [np.sin(inclination) * np.sin(node), -np.sin(inclination) * np.cos(node), np.cos(inclination)]
    )
    return np.asarray(normal * semi_major_axis(elements)[:, None])


def is_affected_by_jump(history: Elements, differences: Differences, jumps: Jumps) -> npt.NDArray[np.bool_]:
    """Which differences (k,) are across a jump, or of a set that is wrong: they tell nothing of the error."""
    jump_marks = np.zeros(len(history), np.int64)
    jump_marks[differences.newer[jumps.pair]] = 1
    jump_counts = np.cumsum(jump_marks)
    is_lone_set = np.zeros(len(history), np.bool_)
    is_lone_set[differences.newer[jumps.pair[jumps.kind == JumpKind.LONE_SET.value]]] = True
    is_across: npt.NDArray[np.bool_] = jump_counts[differences.older] != jump_counts[differences.newer]
    return is_across | is_lone_set[differences.older] | is_lone_set[differences.newer]
