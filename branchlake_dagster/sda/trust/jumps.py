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

SIGMAS = 6.0
_LEAST = {"a": 0.1, "i": 0.005, "t": 1.0}
"""A smaller jump (km, degrees) is none, however regular the object is."""
_BACK = 0.3
"""Of the jump: what may be left of it in the set after a wrong one."""
_SAME_OBJECT = 0.1
_NEIGHBOURS = 8
_SWAP_DAYS = 30.0


class Jump(StrEnum):
    """What an element set that does not continue the ones before may be."""

    MANOEUVRE = "manoeuvre"
    LONE_SET = "lone set"
    UNCONFIRMED = "unconfirmed"
    SWAP = "swap"


class Sign(StrEnum):
    """In what a jump is seen."""

    SEMI_MAJOR_AXIS = "semi-major axis"
    INCLINATION = "inclination"
    IN_TRACK = "in-track position"


SIGNS = tuple(Sign)
_COLUMNS = tuple(AXES.index(one) for one in ("a", "i", "t"))


@dataclass(frozen=True)
class Jumps:
    """m candidates.

    ``pair`` (m,) the row of the differences, ``sign`` the place in `SIGNS`, ``sigmas`` how far outside,
    ``kind`` a `Jump`, ``other`` the row of the history that the object was taken for, else -1.
    """

    pair: Rows
    sign: Rows
    sigmas: Floats
    kind: npt.NDArray[np.str_]
    other: Rows


def jumps(history: Elements, found: Differences, expected: Floats) -> Jumps:
    """Candidates among the differences.

    Args:
        history: what the differences are of.
        found: the differences, of lags 1 and 2 at least.
        expected: (k, 5) one sigma of each difference, NaN where unknown.

    """
    size = np.abs(found.values[:, _COLUMNS])
    far = size / expected[:, _COLUMNS]
    out = (far > SIGMAS) & (size > np.array([_LEAST[AXES[column]] for column in _COLUMNS]))
    n = len(history)
    first, second = (np.full(n, -1) for _ in range(2))
    for lag, places in ((1, first), (2, second)):
        rows = np.flatnonzero(found.lag == lag)
        places[found.newer[rows] if lag == 1 else found.older[rows] + 1] = rows
    # By the set that jumps: the pair with the set before, and that of its neighbours on both sides.
    sets = np.flatnonzero(first >= 0)
    sets = sets[out[first[sets]].any(axis=1)]
    around = second[sets]
    mine = out[first[sets]]
    sign = np.argmax(mine, axis=1)
    followed = around >= 0
    left = np.take_along_axis(size[around], sign[:, None], 1)[:, 0]
    lone = followed & (left < _BACK * np.take_along_axis(size[first[sets]], sign[:, None], 1)[:, 0])
    # The way back from a lone set is no jump of its own.
    back = np.isin(sets - 1, sets[lone])
    pair, sign, followed, lone = first[sets[~back]], sign[~back], followed[~back], lone[~back]
    kind = np.where(followed, Jump.MANOEUVRE.value, Jump.UNCONFIRMED.value).astype("<U16")
    kind[lone] = Jump.LONE_SET.value
    other = _taken_for(history, found, pair)
    kind[other >= 0] = Jump.SWAP.value
    return Jumps(pair, sign, far[pair, sign], kind, other)


def _taken_for(history: Elements, found: Differences, pair: Rows) -> Rows:
    """Of each jump the older set of another one that the newer set continues, if that is mutual; else -1."""
    taken = np.full(len(pair), -1)
    if len(pair) < 2:
        return taken
    older, newer = found.older[pair], found.newer[pair]
    slow = _slow(history)
    near = cKDTree(slow[older]).query(slow[newer], k=min(_NEIGHBOURS, len(pair)))[1]
    who, candidate = np.repeat(np.arange(len(pair)), near.shape[1]), near.ravel()
    days = (history.epoch_micros[newer[who]] - history.epoch_micros[older[candidate]]) / 86_400e6
    other = history.sat_no[older[candidate]] != history.sat_no[newer[who]]
    keep = other & (np.abs(days) <= _SWAP_DAYS)
    who, candidate = who[keep], candidate[keep]
    at = history.epoch_micros[newer[who]]
    own, _ = states_at(history, newer[who], at)
    told, _ = states_at(history, older[candidate], at)
    before, _ = states_at(history, older[who], at)
    fits = np.linalg.norm(told - own, axis=1) <= _SAME_OBJECT * np.linalg.norm(before - own, axis=1)
    who, candidate = who[fits], candidate[fits]
    mutual = np.isin(who * len(pair) + candidate, candidate * len(pair) + who)
    taken[who[mutual]] = older[candidate[mutual]]
    return taken


def _slow(elements: Elements) -> Floats:
    """What hardly changes from set to set, as a point (n, 3), km: the orbit's normal, as long as its axis."""
    inclination, node = (
        np.radians(elements.values[:, ELEMENT_FIELDS.index(name)])
        for name in ("inclination", "ra_of_asc_node")
    )
    normal = np.column_stack(
        [np.sin(inclination) * np.sin(node), -np.sin(inclination) * np.cos(node), np.cos(inclination)]
    )
    return np.asarray(normal * semi_major_axis(elements)[:, None])


def crossing(history: Elements, found: Differences, jumped: Jumps) -> npt.NDArray[np.bool_]:
    """Which differences (k,) are across a jump, or of a set that is wrong: they tell nothing of the error."""
    at = np.zeros(len(history), np.int64)
    at[found.newer[jumped.pair]] = 1
    number = np.cumsum(at)
    wrong = np.zeros(len(history), np.bool_)
    wrong[found.newer[jumped.pair[jumped.kind == Jump.LONE_SET.value]]] = True
    across: npt.NDArray[np.bool_] = number[found.older] != number[found.newer]
    return across | wrong[found.older] | wrong[found.newer]
