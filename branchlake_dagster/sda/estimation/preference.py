"""Decide which tracks should be preferred to the element sets of their objects."""

from __future__ import annotations

import numpy as np

from branchlake_dagster.sda.estimation.batch import Tracks
from branchlake_dagster.sda.estimation.editing import Flags
from branchlake_dagster.sda.orbits.frames import Floats

MAX_SIGMA_RATIO = 0.05
"""The largest position error of a preferred track, as a share of the element set's error.

Some element sets are accurate by chance. At 0.1, one preferred track in twenty was worse than its element set
if the sets were a few hours old.
"""
MAX_CHI2_PER_DOF = 3.0
MAX_EDITED_SHARE = 0.25
"""The largest share of a preferred track's observations that were left out."""


def scaled_position_sigma(tracks: Tracks) -> Floats:
    """Return one standard deviation of the position (k,), km.

    It is the formal one, enlarged if the residuals are larger than the stated noise.
    """
    variance = np.trace(tracks.covariance[:, :3, :3], axis1=1, axis2=2)
    return np.asarray(np.sqrt(variance * np.maximum(tracks.chi2_per_dof, 1.0)))


def is_preferred(tracks: Tracks) -> Flags:
    """Return which tracks (k,) should be preferred to the element set.

    A track is not preferred if the error of its element set is unknown, because the two cannot be compared.
    """
    used = tracks.counts.sum(axis=1)
    return np.asarray(
        (scaled_position_sigma(tracks) <= MAX_SIGMA_RATIO * tracks.prior_sigma_km)
        & (tracks.chi2_per_dof <= MAX_CHI2_PER_DOF)
        & (tracks.edited <= MAX_EDITED_SHARE * (used + tracks.edited))
    )
