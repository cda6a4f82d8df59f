"""Build the error model of element sets from a history, in two passes to exclude jumps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.classes import orbit_class_codes
from branchlake_dagster.sda.trust.differences import Differences, compute_differences
from branchlake_dagster.sda.trust.growth import ErrorGrowth, fit_growth, object_factors
from branchlake_dagster.sda.trust.jumps import Jumps, find_jumps, is_affected_by_jump


@dataclass(frozen=True)
class ErrorModel:
    """The error model of a history: curves by class, and factors on them for n objects.

    ``sat_no`` (n,) is sorted, ``classes`` (n,) are those of the newest sets, and ``samples`` (n,) belong to
    ``factors`` (n, 5). ``is_affected`` (k,) marks the ``differences`` that were left out because of a jump.
    """

    growth: ErrorGrowth
    sat_no: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    factors: Floats
    differences: Differences
    is_affected: npt.NDArray[np.bool_]
    jumps: Jumps


def build_error_model(history: Elements) -> ErrorModel:
    """Build the model of a history, which must be sorted by ``sat_no`` and epoch, without repeated epochs.

    The first pass uses all differences and takes the median of each object as its usual error. The median
    changes little even if half of the differences span jumps. The second pass leaves out differences that
    span jumps.
    """
    all_differences = compute_differences(history)
    sat_nos, object_index = np.unique(history.sat_no, return_inverse=True)
    classes = orbit_class_codes(history)
    pair_class, pair_object = classes[all_differences.newer], object_index[all_differences.newer]
    first_growth = fit_growth(
        pair_class, all_differences.age_days, all_differences.values, max_sigma_km=np.inf
    )
    rough_sigma = first_growth.sigma_at(pair_class, all_differences.age_days)
    median_ratio = np.abs(all_differences.values) / rough_sigma / _MEDIAN_OF_SIGMA
    _, median_factors = object_factors(pair_object, len(sat_nos), median_ratio, 0.5)
    expected_sigma = rough_sigma * median_factors[pair_object]
    jump_candidates = find_jumps(history, all_differences, expected_sigma)
    is_affected = is_affected_by_jump(history, all_differences, jump_candidates)
    quiet_differences = all_differences.take(~is_affected)
    curves = fit_growth(
        classes[quiet_differences.newer], quiet_differences.age_days, quiet_differences.values
    )
    ratio = np.abs(quiet_differences.values) / curves.sigma_at(
        classes[quiet_differences.newer], quiet_differences.age_days
    )
    samples, factors = object_factors(object_index[quiet_differences.newer], len(sat_nos), ratio)
    newest_rows = np.searchsorted(history.sat_no, sat_nos, side="right") - 1
    return ErrorModel(
        curves, sat_nos, classes[newest_rows], samples, factors, all_differences, is_affected, jump_candidates
    )


_MEDIAN_OF_SIGMA = 0.674_489_750
"""The median of the absolute value of a Gaussian variable with sigma one."""
