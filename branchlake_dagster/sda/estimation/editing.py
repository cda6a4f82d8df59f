"""Find the observations of an object that disagree with all its others.

The distance of an observation is that from an estimate without the observation itself. So one that draws the
estimate to itself is found as well (Baarda 1968, a testing procedure for use in geodetic networks).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from branchlake_dagster.sda.orbits.frames import Floats

Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

EDIT_PROBABILITY = 1e-4
"""The probability that an observation of Gaussian noise is edited."""
MIN_SCALE_OBSERVATIONS = 4
"""Objects with fewer observations do not tell how much larger the noise is than stated."""
WORST_SHARE = 0.5
"""One round edits observations whose squared distance is at least this share of the object's largest one. The
others may only be drawn away by them."""
_OWN_SHARE = 0.05
"""Minimum of the share of an observation's noise that the estimate does not absorb."""


def studentized_distances(design: Floats, residual: Floats, covariance: Floats, is_used: Flags) -> Floats:
    """Return the squared distances (n,) of observations from estimates without them.

    Args:
        design: (n, m, 6) derivatives of the measured values by the state, in units of their noise.
        residual: (n, m) residuals in units of their noise; zero where a kind of sensor has fewer values.
        covariance: (n, 6, 6) of the estimated state of each observation's object.
        is_used: (n,) whether the estimate used the observation.

    """
    absorbed = design @ covariance @ np.swapaxes(design, 1, 2)
    own = np.eye(design.shape[1])
    spread = np.where(is_used[:, None, None], (1 + _OWN_SHARE) * own - absorbed, own + absorbed)
    solved = np.linalg.solve(spread, residual[..., None])[..., 0]
    return np.asarray(np.maximum(np.sum(residual * solved, axis=1), 0.0))


def choose_observations(
    row: Rows, objects: int, distance: Floats, widths: Rows, is_used: Flags, is_usable: Flags
) -> Flags:
    """Return which observations (n,) the next estimate uses.

    The noise of an object may be larger than stated. Its scale is the median of its distances, so that a
    sensor with understated noise loses no more observations than any other.

    Args:
        row: (n,) the object of each observation, sorted.
        objects: the number of objects.
        distance: (n,) squared distances from `studentized_distances`.
        widths: (n,) the number of measured values of each observation.
        is_used: (n,) which observations the last estimate used.
        is_usable: (n,) which observations may be used at all.

    """
    scale = _noise_scale(row, objects, distance / chi2.median(widths), is_used)
    excess = distance / (scale[row] * chi2.isf(EDIT_PROBABILITY, widths))
    worst = np.zeros(objects)
    np.maximum.at(worst, row[is_used], excess[is_used])
    is_outlier = (excess > 1) & (~is_used | (excess >= WORST_SHARE * worst[row]))
    return is_usable & ~is_outlier


def _noise_scale(row: Rows, objects: int, ratio: Floats, is_used: Flags) -> Floats:
    """Return the median ratio (objects,) of the used observations, at least one."""
    used_row, used_ratio = row[is_used], ratio[is_used]
    order = np.lexsort((used_ratio, used_row))
    count = np.bincount(used_row, minlength=objects)
    middle = np.cumsum(count) - count + (count - 1) // 2
    scale = np.ones(objects)
    has_scale = count >= MIN_SCALE_OBSERVATIONS
    scale[has_scale] = np.maximum(used_ratio[order][middle[has_scale]], 1.0)
    return scale
