"""From a history of element sets to what their error is expected to be, in two passes around the jumps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.classes import orbit_class
from branchlake_dagster.sda.trust.differences import Differences, differences
from branchlake_dagster.sda.trust.growth import Growth, growth, object_factors
from branchlake_dagster.sda.trust.jumps import Jumps, crossing, jumps


@dataclass(frozen=True)
class ErrorModel:
    """What a history says: curves by class, and of n objects their factor on them.

    ``sat_no`` (n,) sorted, ``classes`` (n,) of the newest set, ``samples`` (n,), ``factors`` (n, 5).
    ``differences`` and ``across`` (k,), those that were left out because a jump is between the two sets.
    """

    growth: Growth
    sat_no: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    factors: Floats
    differences: Differences
    across: npt.NDArray[np.bool_]
    jumps: Jumps


def error_model(history: Elements) -> ErrorModel:
    """The model of a history, sorted by ``sat_no`` and epoch, no epoch twice.

    The first pass takes all differences, to know what is usual for an object: its median, which half of them
    being across jumps does not move far. The second leaves out those across jumps.
    """
    found = differences(history)
    numbers, owner = np.unique(history.sat_no, return_inverse=True)
    classes = orbit_class(history)
    of_set, of_object = classes[found.newer], owner[found.newer]
    everything = growth(of_set, found.age_days, found.values, max_sigma_km=np.inf)
    rough = everything.at(of_set, found.age_days)
    half = np.abs(found.values) / rough / _MEDIAN_OF_SIGMA
    _, usual = object_factors(of_object, len(numbers), half, 0.5)
    expected = rough * usual[of_object]
    jumped = jumps(history, found, expected)
    across = crossing(history, found, jumped)
    quiet = found.take(~across)
    curves = growth(classes[quiet.newer], quiet.age_days, quiet.values)
    ratio = np.abs(quiet.values) / curves.at(classes[quiet.newer], quiet.age_days)
    samples, factors = object_factors(owner[quiet.newer], len(numbers), ratio)
    newest = np.searchsorted(history.sat_no, numbers, side="right") - 1
    return ErrorModel(curves, numbers, classes[newest], samples, factors, found, across, jumped)


_MEDIAN_OF_SIGMA = 0.674_489_750
"""The median of the absolute value of a Gaussian of sigma one."""
