"""The constants that decide an association."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements


@dataclass(frozen=True)
class AssociationRules:
    """Gates and margins. Costs are ``-2 ln`` of a probability density, as squared distances are.

    ``gate_probability`` is the probability that an observation of a Gaussian error lies outside its gate. It
    is small, and ``sigma_factor`` widens the catalog's sigmas, because real errors have wide tails.
    ``independent_share`` is the share of the radial and normal error that observations of one pass do not
    share. ``clear_margin`` is the cost by which an object must fit better than any other; 13.8 is a ratio of
    1,000. ``stray_share`` is the expected share of observations with a wrong track number.
    ``min_track_share`` is the share of a track's observations that must fit. ``max_in_track_km`` is the
    largest error along the track of an object that the track does not claim: beyond it, the neighbor in the
    same plane is more likely.
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
        """Return the maximum squared distance by degrees of freedom."""
        return np.asarray(chi2.isf(self.gate_probability, degrees_of_freedom))

    @property
    def reach(self) -> float:
        """The number of standard deviations of any component within the gate of six measured values."""
        return float(np.sqrt(self.gate(6)))


ASSUMED_SIGMA_KM = (0.5, 1.0, 0.5)
"""One sigma of an element set at its epoch, along R, T and N, where no error model is known yet."""
ASSUMED_GROWTH_KM_PER_DAY = 3.0
"""How much the sigma along T grows. SGP4 is 1 to 3 km off after a day."""


def assumed_position_sigma(elements: Elements, micros: npt.NDArray[np.int64]) -> Floats:
    """Return assumed sigmas along R, T and N (n, 3), km, of n element sets at the instants `micros` (n,)."""
    age_days = np.abs(micros - elements.epoch_micros) / 86_400e6
    sigma = np.tile(np.array(ASSUMED_SIGMA_KM), (len(elements), 1))
    sigma[:, 1] += ASSUMED_GROWTH_KM_PER_DAY * age_days
    return sigma
