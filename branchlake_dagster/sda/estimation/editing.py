"""Find the observations of an object that disagree with all its others (editing).

The distance of an observation is measured from an estimate without the observation itself. So an observation
that pulls the estimate towards itself is found as well (Baarda 1968, a testing procedure for use in geodetic
networks).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from branchlake_dagster.sda.orbits.frames import Floats

Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

EDIT_PROBABILITY = 1e-4
"""The probability that an observation with Gaussian noise is left out."""
MIN_SCALE_OBSERVATIONS = 4
"""The smallest number of observations from which the true size of an object's noise is estimated."""
WORST_SHARE = 0.5
"""The least excess of an edited observation, as a share of the excess of the object's worst observation.

One round leaves out only the worst observations. The others may be far away only because the worst ones
pulled the estimate away from them.
"""
_OWN_SHARE = 0.05
"""The smallest share of an observation's noise that is assumed to remain in its residual."""


def studentized_distances(design: Floats, residual: Floats, covariance: Floats, is_used: Flags) -> Floats:
    """Return the squared distances (n,) of observations from estimates without them.

    Args:
        design: (n, m, 6) The derivatives of the measured values by the state, in units of their noise.
        residual: (n, m) The residuals in units of their noise; zero where a kind of sensor has fewer values.
        covariance: (n, 6, 6) The covariance of the estimated state of each observation's object.
        is_used: (n,) Whether the estimate used the observation.
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

    The noise of an object may be larger than stated. Its scale is the median of its distances, so that an
    object of a sensor with understated noise does not lose more observations than others.

    Args:
        row: (n,) The object of each observation, sorted.
        objects: The number of objects.
        distance: (n,) Squared distances from `studentized_distances`.
        widths: (n,) The number of measured values of each observation.
        is_used: (n,) Which observations the last estimate used.
        is_usable: (n,) Which observations may be used at all.
    """
    # Few widths, so each quantile is computed once.
    known_widths, width_index = np.unique(widths, return_inverse=True)
    median, largest = np.stack([chi2.median(known_widths), chi2.isf(EDIT_PROBABILITY, known_widths)])
    scale = _noise_scale(row, objects, distance / median[width_index], is_used)
    excess: Floats = distance / (scale[row] * largest[width_index])
    worst = np.zeros(objects)
    np.maximum.at(worst, row[is_used], excess[is_used])
    is_outlier = (excess > 1) & (~is_used | (excess >= WORST_SHARE * worst[row]))
    return is_usable & ~is_outlier


def _noise_scale(row: Rows, objects: int, ratio: Floats, is_used: Flags) -> Floats:
    """Return the median ratio (objects,) of the used observations, at least one.

    Objects with fewer than `MIN_SCALE_OBSERVATIONS` observations get one.
    """
    used_row, used_ratio = row[is_used], ratio[is_used]
    order = np.lexsort((used_ratio, used_row))
    count = np.bincount(used_row, minlength=objects)
    middle = np.cumsum(count) - count + (count - 1) // 2
    scale = np.ones(objects)
    has_scale = count >= MIN_SCALE_OBSERVATIONS
    scale[has_scale] = np.maximum(used_ratio[order][middle[has_scale]], 1.0)
    return scale
