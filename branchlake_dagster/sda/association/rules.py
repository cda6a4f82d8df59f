"""The constants that decide which object an observation is associated with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements


@dataclass(frozen=True)
class AssociationRules:
    """Limits and margins. A cost is ``-2 ln`` of a probability density, as squared distances are.

    - ``gate_probability``: the probability that an observation with a Gaussian error lies outside its gate.
      It is small because real errors have more outliers than a Gaussian.
    - ``sigma_factor``: a factor on the catalog's standard deviations, for the same reason.
    - ``independent_share``: the share of the radial and normal error that observations of one pass do not
      share.
    - ``clear_margin``: the cost by which an object must fit better than any other. 13.8 is a ratio of 1,000.
    - ``stray_share``: the expected share of observations with a wrong track number.
    - ``min_track_share``: the share of a track's observations that must fit.
    - ``max_removal_rounds``: how many observations a fit of a track may leave out to come within the gate.
    - ``max_in_track_km``: the largest error along the track for an object that the track does not claim. If
      the error is larger, the neighbor in the same plane is more likely.
    """

    gate_probability: float = 1e-5
    sigma_factor: float = 1.5
    independent_share: float = 0.1
    clear_margin: float = 13.8
    stray_share: float = 0.05
    min_track_share: float = 0.5
    max_removal_rounds: int = 4
    max_in_track_km: float = 200.0

    def gate(self, degrees_of_freedom: Floats | int) -> Floats:
        """Return the maximum squared distance for a number of degrees of freedom."""
        return np.asarray(chi2.isf(self.gate_probability, degrees_of_freedom))

    @property
    def reach(self) -> float:
        """The largest error of a single component within the gate of six values, in standard deviations."""
        return float(np.sqrt(self.gate(6)))


ASSUMED_SIGMA_KM = (0.5, 1.0, 0.5)
"""One standard deviation of an element set at its epoch, along R, T and N, if there is no error model yet."""
ASSUMED_GROWTH_KM_PER_DAY = 3.0
"""Growth of the standard deviation along T, km per day. SGP4 predictions are 1 to 3 km off after a day."""


def assumed_position_sigma(elements: Elements, micros: npt.NDArray[np.int64]) -> Floats:
    """Return assumed standard deviations (n, 3) of n element sets along R, T and N, km.

    ``micros`` (n,) are the instants of the predictions, UTC microseconds since 1970.
    """
    age_days = np.abs(micros - elements.epoch_micros) / 86_400e6
    sigma = np.tile(np.array(ASSUMED_SIGMA_KM), (len(elements), 1))
    sigma[:, 1] += ASSUMED_GROWTH_KM_PER_DAY * age_days
    return sigma
