"""Build an error model in this process, for benchmarks that read element sets from files.

The rules are those of `trust`, applied to the whole history at once. Tests compare the tables that Spark
computes with this model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.arrow import median_factors
from branchlake_dagster.sda.trust.classes import orbit_class_codes
from branchlake_dagster.sda.trust.differences import Differences, compute_differences
from branchlake_dagster.sda.trust.growth import ErrorGrowth, fit_growth, object_factors, summarize_bins
from branchlake_dagster.sda.trust.jumps import (
    JumpKind,
    Jumps,
    find_jumps,
    find_swaps,
)
from branchlake_dagster.sda.trust.tables import POSITION_AXES, PublishedErrors


@dataclass(frozen=True)
class ErrorModel:
    """The error model of a history: curves by class, and factors on them for n objects.

    ``sat_no`` (n,) is sorted, ``classes`` (n,) are those of the newest sets, and ``samples`` (n,) belong to
    ``factors`` (n, 5). ``is_affected`` (k,) marks the ``differences`` that were left out because of a jump.
    ``swapped_set`` is the row in the history of the other object's set that the object of a jump was taken
    for, or -1.
    """

    growth: ErrorGrowth
    sat_no: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    factors: Floats
    differences: Differences
    is_affected: npt.NDArray[np.bool_]
    jumps: Jumps
    swapped_set: npt.NDArray[np.int64]

    def to_published(self, model_id: str = "not published") -> PublishedErrors:
        """Return the part of the model that probabilities need."""
        count, growth = len(POSITION_AXES), self.growth
        sigma0, rate, power = (curve[:, :count] for curve in (growth.sigma0, growth.rate, growth.power))
        factors = self.factors[:, :count]
        return PublishedErrors(sigma0, rate, power, growth.until_days, self.sat_no, factors, model_id)


def build_error_model(history: Elements) -> ErrorModel:
    """Build the model of a history, which must be sorted by ``sat_no`` and epoch, without repeated epochs."""
    differences = compute_differences(history)
    sat_nos, object_index = np.unique(history.sat_no, return_inverse=True)
    classes = orbit_class_codes(history)
    pair_class, pair_object = classes[differences.newer], object_index[differences.newer]
    statistics = summarize_bins(pair_class, differences.age_days, differences.values)
    rough_sigma = fit_growth(statistics, max_sigma_km=np.inf).sigma_at(pair_class, differences.age_days)
    factors = np.ones((len(sat_nos), rough_sigma.shape[1]))
    known_factors = median_factors(pair_object, differences.values, rough_sigma)
    factors[: len(known_factors)] = known_factors
    jumps = find_jumps(len(history), differences, rough_sigma * factors[pair_object])
    older, newer = differences.older[jumps.pair], differences.newer[jumps.pair]
    swaps = find_swaps(history.take(older), history.take(newer))
    jumps = replace(jumps, kind=np.where(swaps >= 0, JumpKind.SWAP.value, jumps.kind))
    is_affected = is_affected_by_jump(len(history), differences, jumps)
    quiet = differences.take(~is_affected)
    quiet_class = classes[quiet.newer]
    growth = fit_growth(summarize_bins(quiet_class, quiet.age_days, quiet.values))
    ratio = np.abs(quiet.values) / growth.sigma_at(quiet_class, quiet.age_days)
    samples, factors = object_factors(object_index[quiet.newer], len(sat_nos), ratio)
    newest_rows = np.searchsorted(history.sat_no, sat_nos, side="right") - 1
    swapped_set = np.where(swaps >= 0, older[swaps] if len(older) else -1, -1)
    return ErrorModel(
        growth,
        sat_nos,
        classes[newest_rows],
        samples,
        factors,
        differences,
        is_affected,
        jumps,
        swapped_set,
    )


def is_affected_by_jump(set_count: int, differences: Differences, jumps: Jumps) -> npt.NDArray[np.bool_]:
    """Return which differences (k,) span a jump or involve a lone set. They do not show the usual error."""
    jump_marks = np.zeros(set_count, np.int64)
    jump_marks[differences.newer[jumps.pair]] = 1
    jump_counts = np.cumsum(jump_marks)
    is_lone_set = np.zeros(set_count, np.bool_)
    is_lone_set[differences.newer[jumps.pair[jumps.kind == JumpKind.LONE_SET.value]]] = True
    is_across: npt.NDArray[np.bool_] = jump_counts[differences.older] != jump_counts[differences.newer]
    return is_across | is_lone_set[differences.older] | is_lone_set[differences.newer]
