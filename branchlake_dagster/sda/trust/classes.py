"""Classify orbits by the growth of their errors.

Drag dominates the errors in low orbits, the Sun and Moon in high ones.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import EARTH_RADIUS_KM, Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2


class OrbitClass(StrEnum):
    """Orbit classes by mean altitude (semi-major axis minus the Earth's radius, km) and eccentricity."""

    LEO_450 = "LEO below 450"
    LEO_700 = "LEO 450-700"
    LEO_1200 = "LEO 700-1200"
    LEO_2000 = "LEO 1200-2000"
    MEO = "MEO"
    GEO = "GEO"
    HEO = "HEO"
    LEO = "LEO"
    ALL = "all"


CLASSES = tuple(OrbitClass)
OWN_CLASSES = CLASSES[: CLASSES.index(OrbitClass.LEO)]
"""The classes of objects. The two other classes are unions of these."""
WIDER_CLASS = {
    **dict.fromkeys(CLASSES[:4], OrbitClass.LEO),
    **dict.fromkeys((OrbitClass.MEO, OrbitClass.GEO, OrbitClass.HEO, OrbitClass.LEO), OrbitClass.ALL),
}
"""A class without enough samples takes its figures from this wider class."""
MAX_ECCENTRICITY = 0.1
"""From this eccentricity on the class is HEO, transfer orbits included, because error and altitude vary along
a revolution."""
_LEO_BOUNDS_KM = (450.0, 700.0, 1_200.0, 2_000.0)
_GEO_KM, _GEO_WIDTH_KM = 35_786.0, 500.0


def semi_major_axis(elements: Elements) -> Floats:
    """Return the semi-major axis (n,) in km from the mean motion of each element set."""
    motion = elements.values[:, ELEMENT_FIELDS.index("mean_motion")] * 2 * np.pi / 86_400
    return np.asarray((MU_KM3_S2 / motion**2) ** (1 / 3))


def orbit_class_codes(elements: Elements) -> npt.NDArray[np.int64]:
    """Return the index in `CLASSES` (n,) of the class of each element set."""
    altitude = semi_major_axis(elements) - EARTH_RADIUS_KM
    codes = np.searchsorted(_LEO_BOUNDS_KM, altitude, side="right")
    codes = np.minimum(codes, CLASSES.index(OrbitClass.MEO))
    codes[np.abs(altitude - _GEO_KM) <= _GEO_WIDTH_KM] = CLASSES.index(OrbitClass.GEO)
    codes[altitude > _GEO_KM + _GEO_WIDTH_KM] = CLASSES.index(OrbitClass.HEO)
    codes[elements.values[:, ELEMENT_FIELDS.index("eccentricity")] >= MAX_ECCENTRICITY] = CLASSES.index(
        OrbitClass.HEO
    )
    return np.asarray(codes, np.int64)
