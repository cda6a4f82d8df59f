"""Read the error model from its published tables, so that probabilities use the published model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.classes import CLASSES, orbit_class_codes
from branchlake_dagster.sda.trust.differences import DAY_MICROS
from branchlake_dagster.sda.trust.growth import AXES, evaluate_curve

POSITION_AXES = AXES[:3]
COVARIANCE_SOURCE = "element-set differences"
CURVE_PARAMETERS = ("sigma0", "rate", "power")
UNIT_SUFFIXES = {"sigma0": "_km", "rate": "", "power": ""}


@dataclass(frozen=True)
class PublishedErrors:
    """A published error model: curves (c, 3) by class and factors (n, 3) by object."""

    sigma0: Floats
    rate: Floats
    power: Floats
    until_days: Floats
    sat_no: npt.NDArray[np.int64]
    factors: Floats
    model_id: str

    @classmethod
    def from_tables(cls, errors: pl.DataFrame, objects: pl.DataFrame) -> PublishedErrors:
        """Load the model from rows of `ElementError` and `ObjectError`."""
        by_class = pl.DataFrame({"orbit_class": [name.value for name in CLASSES]}).join(
            errors.unique("orbit_class", keep="first"), on="orbit_class", how="left", maintain_order="left"
        )
        sigma0, rate, power = (
            by_class.select([f"{name}_{axis}{UNIT_SUFFIXES[name]}" for axis in POSITION_AXES])
            .cast(pl.Float64)
            .fill_null(np.nan)
            .to_numpy()
            for name in CURVE_PARAMETERS
        )
        sorted_objects = objects.sort("sat_no")
        return cls(
            sigma0,
            rate,
            power,
            by_class["until_age_days"].cast(pl.Float64).fill_null(0.0).to_numpy(),
            sorted_objects["sat_no"].to_numpy(),
            sorted_objects.select([f"factor_{axis}" for axis in POSITION_AXES]).to_numpy(),
            str(errors["error_model_id"][0]),
        )

    def position_sigma(self, elements: Elements, micros: npt.NDArray[np.int64]) -> Floats:
        """Return one standard deviation (k, 3) of the positions of k element sets along R, T and N, km.

        ``micros`` (k,) are the instants of the positions, UTC microseconds. The result is NaN if it is
        unknown. An object that is not in the model has the curve of its class.
        """
        classes = orbit_class_codes(elements)
        age = (micros - elements.epoch_micros) / DAY_MICROS
        class_sigma = evaluate_curve(
            self.sigma0[classes], self.rate[classes], self.power[classes], self.until_days[classes], age
        )
        if not len(self.sat_no):
            return class_sigma
        object_rows = np.minimum(np.searchsorted(self.sat_no, elements.sat_no), len(self.sat_no) - 1)
        has_factor = self.sat_no[object_rows] == elements.sat_no
        return np.asarray(class_sigma * np.where(has_factor[:, None], self.factors[object_rows], 1.0))
