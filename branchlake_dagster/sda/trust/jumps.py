"""Find jumps: element sets that do not continue the previous ones, after maneuvers, bad sets or mix-ups.

Each set is compared with the previous set of its object by semi-major axis, inclination and transverse
position. The differences are relative to the usual error of the object's class and of the object itself at
that age. A set far outside is a jump, and the next set determines its kind:

- The next set is also far from the previous one: the orbit has changed, by a maneuver or unexpected drag.
- The next set agrees with the previous one: the set between them was wrong (a lone set).
- There is no next set yet, or none within three weeks: the jump is unconfirmed.

If two objects have each jumped onto the other's orbit, they were taken for each other (a swap).
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
"""Minimum jumps (km, degrees), which also apply to very regular objects."""
_MAX_REMAINDER = 0.3
"""Maximum remainder in the set after a lone set, relative to the jump."""
_MAX_SWAP_RATIO = 0.1
_NEIGHBOR_COUNT = 8
_MAX_SWAP_DAYS = 30.0


class JumpKind(StrEnum):
    """The probable kind of a jump."""

    MANOEUVRE = "manoeuvre"
    LONE_SET = "lone set"
    UNCONFIRMED = "unconfirmed"
    SWAP = "swap"


class JumpSign(StrEnum):
    """The quantity that shows a jump."""

    SEMI_MAJOR_AXIS = "semi-major axis"
    INCLINATION = "inclination"
    IN_TRACK = "in-track position"


JUMP_SIGNS = tuple(JumpSign)
_JUMP_COLUMNS = tuple(AXES.index(axis) for axis in ("a", "i", "t"))


@dataclass(frozen=True)
class Jumps:
    """The m candidates for jumps.

    ``pair`` (m,) is the row of the differences, ``sign`` the index in `JUMP_SIGNS`, ``sigmas`` the size of
    the jump in sigmas and ``kind`` a `JumpKind`.
    """

    pair: Rows
    sign: Rows
    sigmas: Floats
    kind: npt.NDArray[np.str_]


def find_jumps(set_count: int, differences: Differences, expected_sigma: Floats) -> Jumps:
    """Find candidates for jumps among differences. Each jump depends on the differences of its object only.

    No jump has the kind `SWAP`, because this needs the jumps of all objects (`find_swaps`).

    Args:
        set_count: The number of element sets to which the rows ``older`` and ``newer`` refer.
        differences: k differences, of lags 1 and 2 at least.
        expected_sigma: (k, 5) one sigma of each difference, NaN where unknown.

    """
    size = np.abs(differences.values[:, _JUMP_COLUMNS])
    ratio = size / expected_sigma[:, _JUMP_COLUMNS]
    is_outside = (ratio > MIN_SIGMAS) & (
        size > np.array([_MIN_JUMP[AXES[column]] for column in _JUMP_COLUMNS])
    )
    pair_before, pair_around = (np.full(set_count, -1) for _ in range(2))
    for lag, pair_of_set in ((1, pair_before), (2, pair_around)):
        rows = np.flatnonzero(differences.lag == lag)
        pair_of_set[differences.newer[rows] if lag == 1 else differences.older[rows] + 1] = rows
    # By set: its pair with the previous set, and the pair of its two neighbors.
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
    # The return from a lone set is not another jump.
    is_return = np.isin(jump_sets - 1, jump_sets[is_lone])
    pair, sign, has_next, is_lone = (
        pair_before[jump_sets[~is_return]],
        sign[~is_return],
        has_next[~is_return],
        is_lone[~is_return],
    )
    kind = np.where(has_next, JumpKind.MANOEUVRE.value, JumpKind.UNCONFIRMED.value).astype("<U16")
    kind[is_lone] = JumpKind.LONE_SET.value
    return Jumps(pair, sign, ratio[pair, sign], kind)


def find_swaps(older: Elements, newer: Elements) -> Rows:
    """Find, for each of m jumps, the jump of another object whose older orbit the newer set continues.

    Args:
        older: The sets (m,) before the jumps.
        newer: The sets (m,) that jump.

    Returns:
        The index (m,) of the other jump, and -1 unless the two jumps continue each other's orbit.
    """
    count = len(older)
    swaps = np.full(count, -1)
    if count < 2:
        return swaps
    neighbors = cKDTree(_orbit_normal_points(older)).query(
        _orbit_normal_points(newer), k=min(_NEIGHBOR_COUNT, count)
    )[1]
    jump_index, candidate = np.repeat(np.arange(count), neighbors.shape[1]), neighbors.ravel()
    days = (newer.epoch_micros[jump_index] - older.epoch_micros[candidate]) / 86_400e6
    is_other_object = older.sat_no[candidate] != newer.sat_no[jump_index]
    keep = is_other_object & (np.abs(days) <= _MAX_SWAP_DAYS)
    jump_index, candidate = jump_index[keep], candidate[keep]
    micros = newer.epoch_micros[jump_index]
    new_position, _ = states_at(newer, jump_index, micros)
    other_position, _ = states_at(older, candidate, micros)
    old_position, _ = states_at(older, jump_index, micros)
    is_closer = np.linalg.norm(other_position - new_position, axis=1) <= _MAX_SWAP_RATIO * np.linalg.norm(
        old_position - new_position, axis=1
    )
    jump_index, candidate = jump_index[is_closer], candidate[is_closer]
    is_mutual = np.isin(jump_index * count + candidate, candidate * count + jump_index)
    swaps[jump_index[is_mutual]] = candidate[is_mutual]
    return swaps


def _orbit_normal_points(elements: Elements) -> Floats:
    """Return the orbit normals times the semi-major axes (n, 3), km, which hardly change from set to set."""
    inclination, node = (
        np.radians(elements.values[:, ELEMENT_FIELDS.index(name)])
        for name in ("inclination", "ra_of_asc_node")
    )
    normal = np.column_stack(
        [np.sin(inclination) * np.sin(node), -np.sin(inclination) * np.cos(node), np.cos(inclination)]
    )
    return np.asarray(normal * semi_major_axis(elements)[:, None])
