"""Classes of orbits in which element sets grow wrong alike: drag decides below, the Sun and Moon above."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from branchlake_dagster.sda.orbits.frames import EARTH_RADIUS_KM, Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.orbits.two_body import MU_KM3_S2


class OrbitClass(StrEnum):
    """By mean altitude (semi-major axis less the Earth's radius), km, and eccentricity."""

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
"""Those that an object can be in; the last two are the wider ones."""
WIDER_CLASS = {
    **dict.fromkeys(CLASSES[:4], OrbitClass.LEO),
    **dict.fromkeys((OrbitClass.MEO, OrbitClass.GEO, OrbitClass.HEO, OrbitClass.LEO), OrbitClass.ALL),
}
"""Where a class without enough samples takes its figures from."""
MAX_ECCENTRICITY = 0.1
"""From there on HEO, transfer orbits included: error and altitude differ along one revolution."""
_LEO_BOUNDS_KM = (450.0, 700.0, 1_200.0, 2_000.0)
_GEO_KM, _GEO_WIDTH_KM = 35_786.0, 500.0


def semi_major_axis(elements: Elements) -> Floats:
    """Of each element set (n,), km, by its mean motion."""
    motion = elements.values[:, ELEMENT_FIELDS.index("mean_motion")] * 2 * np.pi / 86_400
    return np.asarray((MU_KM3_S2 / motion**2) ** (1 / 3))


def orbit_class_codes(elements: Elements) -> npt.NDArray[np.int64]:
    """The place in `CLASSES` of each element set's own class (n,)."""
    altitude = semi_major_axis(elements) - EARTH_RADIUS_KM
    codes = np.searchsorted(_LEO_BOUNDS_KM, altitude, side="right")
    codes = np.minimum(codes, CLASSES.index(OrbitClass.MEO))
    codes[np.abs(altitude - _GEO_KM) <= _GEO_WIDTH_KM] = CLASSES.index(OrbitClass.GEO)
    codes[altitude > _GEO_KM + _GEO_WIDTH_KM] = CLASSES.index(OrbitClass.HEO)
    codes[elements.values[:, ELEMENT_FIELDS.index("eccentricity")] >= MAX_ECCENTRICITY] = CLASSES.index(
        OrbitClass.HEO
    )
    return np.asarray(codes, np.int64)
