"""Define measurement models: the values that a kind of sensor measures, and how a state predicts them.

A state is an object's position and velocity. A model is a selection of envelope columns of one geometry:

- ``topocentric``: range, range rate, azimuth and elevation from a place on the ground
- ``celestial``: topocentric right ascension and declination
- ``state``: position and velocity

Estimation and association depend on a kind of sensor only through its model. So a new kind needs no code
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.sensors import measurement
from branchlake_dagster.sda.sensors.measurement import Stations

_RAD = np.pi / 180


class Quantity(NamedTuple):
    """One measured value: its envelope columns, its unit, and the range over which false values spread.

    ``unit`` is the factor to km, km/s or rad. ``extent`` is the size of that range in these units. The first
    component of a direction or vector has the extent of the whole vector, because the components are not
    independent.
    """

    column: str
    uncertainty: str
    unit: float
    extent: float


GEOMETRIES: dict[str, tuple[Quantity, ...]] = {
    "topocentric": (
        Quantity("range_km", "range_unc_km", 1.0, 5_500.0),
        Quantity("range_rate_km_s", "range_rate_unc_km_s", 1.0, 15.0),
        Quantity("azimuth_deg", "azimuth_unc_deg", _RAD, 2 * np.pi * 1.4),
        Quantity("elevation_deg", "elevation_unc_deg", _RAD, 1.0),
    ),
    "celestial": (
        Quantity("ra_deg", "ra_unc_deg", _RAD, 2 * np.pi),
        Quantity("declination_deg", "declination_unc_deg", _RAD, 1.0),
    ),
    "state": (
        Quantity("pos_x_km", "position_unc_km", 1.0, 4 / 3 * np.pi * 1_500.0**3),
        Quantity("pos_y_km", "position_unc_km", 1.0, 1.0),
        Quantity("pos_z_km", "position_unc_km", 1.0, 1.0),
        Quantity("vel_x_km_s", "velocity_unc_km_s", 1.0, 4 / 3 * np.pi * 15.0**3),
        Quantity("vel_y_km_s", "velocity_unc_km_s", 1.0, 1.0),
        Quantity("vel_z_km_s", "velocity_unc_km_s", 1.0, 1.0),
    ),
}
"""The values that a state can predict, by geometry, in the order of a model's values."""

STATION_COLUMNS = ("sensor_lat_deg", "sensor_lon_deg", "sensor_alt_km")
"""The columns with the coordinates of a ground sensor."""

MEASUREMENT_COLUMNS: tuple[str, ...] = (
    *STATION_COLUMNS,
    *(name for key in ("topocentric", "celestial") for one in GEOMETRIES[key] for name in one[:2]),
    *(one.column for one in GEOMETRIES["state"]),
    "position_unc_km",
    "velocity_unc_km_s",
)
"""The envelope columns that measurements of any kind fill, in the order of the table."""

_TOGETHER = (
    ("azimuth_deg", "elevation_deg"),
    ("ra_deg", "declination_deg"),
    ("pos_x_km", "pos_y_km", "pos_z_km"),
    ("vel_x_km_s", "vel_y_km_s", "vel_z_km_s"),
)
MAX_RANGE_KM = 500_000.0
"""The largest accepted distance from a sensor, and coordinate of a position: farther than the Moon."""
MAX_WIDTH = max(len(quantities) for quantities in GEOMETRIES.values())


@dataclass(frozen=True)
class MeasurementModel:
    """The m measured values of one kind of sensor.

    ``components`` are their indices in the geometry. `measurement_model` builds a model from column names.
    """

    geometry: str
    components: tuple[int, ...]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The measured values."""
        return tuple(GEOMETRIES[self.geometry][one] for one in self.components)

    @property
    def columns(self) -> tuple[str, ...]:
        """The envelope columns of the measured values."""
        return tuple(one.column for one in self.quantities)

    @property
    def width(self) -> int:
        """The number of measured values."""
        return len(self.components)

    @property
    def direction(self) -> tuple[int, int] | None:
        """The indices of the longitude (such as azimuth) and the latitude of a direction among the values.

        None if no direction is measured.
        """
        for longitude, latitude in (_TOGETHER[0], _TOGETHER[1]):
            if longitude in self.columns:
                return self.columns.index(longitude), self.columns.index(latitude)
        return None

    @property
    def is_on_ground(self) -> bool:
        """Whether the values depend on the position of the sensor on the ground."""
        return self.geometry != "state"

    @property
    def has_position(self) -> bool:
        """Whether one observation determines a position in space."""
        return self.geometry == "state" or ("range_km" in self.columns and self.direction is not None)

    @property
    def clutter_volume(self) -> float:
        """The volume over which false measurements spread: the product of the extents, km, km/s and rad."""
        return float(np.prod([one.extent for one in self.quantities]))

    def predict(self, position: Floats, velocity: Floats, stations: Stations) -> tuple[Floats, Floats]:
        """Return the values (k, m) of states (k, 3), and their derivatives (k, m, 6) by the state.

        States are in TEME at the time of the measurement, in km and km/s.
        """
        if self.geometry == "state":
            values = np.concatenate([position, velocity], axis=1)
            slope = np.broadcast_to(np.eye(6), (len(values), 6, 6))
        elif self.geometry == "topocentric":
            values, slope = measurement.predict_radar(position, velocity, stations)
        else:
            values, slope = measurement.predict_optical(position, velocity, stations)
        if self.width == len(GEOMETRIES[self.geometry]):
            return values, slope
        return values[:, list(self.components)], slope[:, list(self.components)]


def measurement_model(measures: Sequence[str]) -> MeasurementModel:
    """Build the model of a kind of sensor that measures the given envelope columns, in any order.

    Raises:
        ConfigurationError: A column is unknown or repeated, the columns are of several geometries, or only a
            part of a direction or vector is measured.

    """
    matching = [
        (geometry, [one.column for one in quantities])
        for geometry, quantities in GEOMETRIES.items()
        if set(measures) <= {one.column for one in quantities}
    ]
    if not measures or not matching or len(set(measures)) != len(measures):
        choices = "; ".join(f"{name}: {', '.join(q.column for q in of)}" for name, of in GEOMETRIES.items())
        raise ConfigurationError(
            f"A sensor cannot measure {list(measures)} at once.",
            hint=f"List some columns of one geometry, each once. {choices}.",
        )
    geometry, names = matching[0]
    for group in _TOGETHER:
        present = [name for name in group if name in measures]
        if present and len(present) != len(group):
            raise ConfigurationError(
                f"A sensor measures {', '.join(present)} without the rest of the vector.",
                hint=f"List all of {', '.join(group)}.",
            )
    if geometry == "state" and "pos_x_km" not in measures:
        raise ConfigurationError(
            "A sensor measures a velocity without a position.", hint="List pos_x_km, pos_y_km and pos_z_km."
        )
    return MeasurementModel(geometry, tuple(k for k, name in enumerate(names) if name in measures))
