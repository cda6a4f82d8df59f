"""Convert the error model to tables and back, so that probabilities use the published model."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.classes import CLASSES, orbit_class_codes
from branchlake_dagster.sda.trust.differences import DAY_MICROS
from branchlake_dagster.sda.trust.growth import AGE_BINS, AGE_EDGES_DAYS, AXES, evaluate_curve
from branchlake_dagster.sda.trust.jumps import JUMP_SIGNS
from branchlake_dagster.sda.trust.model import ErrorModel

POSITION_AXES = AXES[:3]
COVARIANCE_SOURCE = "element-set differences"
_CURVE_PARAMETERS = ("sigma0", "rate", "power")
_UNIT_SUFFIXES = {"sigma0": "_km", "rate": "", "power": ""}
_UTC_MICROS = pl.Datetime("us", "UTC")


def build_model_id(model: ErrorModel, history: Elements) -> str:
    """Build a model's id from the newest epoch of its history, and a hash of the history and the model."""
    newest = np.datetime64(int(history.epoch_micros.max()) if len(history) else 0, "us")
    growth = model.growth
    hashed_arrays = (
        *(history.sat_no, history.epoch_micros, history.values),
        *(growth.sigma0, growth.rate, growth.power, growth.until_days),
        *(model.sat_no, model.factors),
    )
    digest = sha256()
    for part in hashed_arrays:
        digest.update(f"{part.dtype.str}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
    time = np.datetime_as_string(newest, unit="s").replace("-", "").replace(":", "")
    return f"{time}Z-{digest.hexdigest()[:16]}"


def element_errors(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Return the rows of `ElementError`: each class at each age bin, with the curve of the class."""
    growth = model.growth
    code, age_bin = (part.ravel() for part in np.indices((len(CLASSES), AGE_BINS)))
    names = [name.value for name in CLASSES]
    fitted = growth.sigma_at(code, growth.age_days[code, age_bin])
    first, last = (
        (int(history.epoch_micros.min()), int(history.epoch_micros.max())) if len(history) else (0, 0)
    )
    columns: dict[str, pl.Series] = {
        "orbit_class": pl.Series([names[row] for row in code], dtype=pl.String),
        "from_age_days": pl.Series(np.array(AGE_EDGES_DAYS)[age_bin]),
        "to_age_days": pl.Series(np.array(AGE_EDGES_DAYS)[age_bin + 1]),
        "samples": pl.Series(growth.count[code, age_bin]),
        "age_days": _nullable_floats(growth.age_days[code, age_bin]),
    }
    for name, values in (("sigma", growth.sigma), ("p95", growth.p95), ("median", growth.median)):
        columns |= {
            f"{name}_{axis}_km": _nullable_floats(values[code, age_bin, k])
            for k, axis in enumerate(POSITION_AXES)
        }
    columns |= {f"fitted_{axis}_km": _nullable_floats(fitted[:, k]) for k, axis in enumerate(POSITION_AXES)}
    for name in _CURVE_PARAMETERS:
        values = getattr(growth, name)[code]
        columns |= {
            f"{name}_{axis}{_UNIT_SUFFIXES[name]}": _nullable_floats(values[:, k])
            for k, axis in enumerate(POSITION_AXES)
        }
    source_class = growth.source_class[code]
    columns |= {
        "curve_of": pl.Series([names[row] if row >= 0 else None for row in source_class], dtype=pl.String),
        "until_age_days": pl.Series(growth.until_days[code]),
    }
    return pl.DataFrame(columns).with_columns(
        pl.lit(first).cast(_UTC_MICROS).alias("history_from"),
        pl.lit(last).cast(_UTC_MICROS).alias("history_until"),
        pl.lit(build_model_id(model, history)).alias("error_model_id"),
    )


def object_errors(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Return the rows of `ObjectError`: the factor of each object on its class's curves."""
    return pl.DataFrame(
        {
            "sat_no": pl.Series(model.sat_no, dtype=pl.Int64),
            "orbit_class": pl.Series([CLASSES[code].value for code in model.classes], dtype=pl.String),
            "samples": pl.Series(model.samples, dtype=pl.Int64),
            **{f"factor_{axis}": pl.Series(model.factors[:, k]) for k, axis in enumerate(POSITION_AXES)},
        }
    ).with_columns(pl.lit(build_model_id(model, history)).alias("error_model_id"))


def element_jumps(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Return the rows of `ElementJump`: the candidates for jumps, ordered by epoch."""
    differences, jumps = model.differences, model.jumps
    older, newer = differences.older[jumps.pair], differences.newer[jumps.pair]
    values = differences.values[jumps.pair]
    other = np.where(jumps.swapped_set >= 0, history.sat_no[jumps.swapped_set], 0)
    return (
        pl.DataFrame(
            {
                "sat_no": pl.Series(history.sat_no[newer], dtype=pl.Int64),
                "epoch": pl.Series(history.epoch_micros[newer], dtype=pl.Int64),
                "previous_epoch": pl.Series(history.epoch_micros[older], dtype=pl.Int64),
                "kind": pl.Series(jumps.kind.tolist(), dtype=pl.String),
                "reason": pl.Series([JUMP_SIGNS[code].value for code in jumps.sign], dtype=pl.String),
                "sigmas": pl.Series(jumps.sigmas, dtype=pl.Float64),
                "semi_major_axis_change_km": pl.Series(-values[:, 3], dtype=pl.Float64),
                "inclination_change_deg": pl.Series(-values[:, 4], dtype=pl.Float64),
                "in_track_km": pl.Series(values[:, 1], dtype=pl.Float64),
                "taken_for": pl.Series(other, dtype=pl.Int64),
            }
        )
        .with_columns(
            pl.col("epoch", "previous_epoch").cast(_UTC_MICROS),
            pl.when(pl.col("taken_for") > 0).then("taken_for").alias("taken_for"),
            pl.lit(build_model_id(model, history)).alias("error_model_id"),
        )
        .sort("epoch", "sat_no")
    )


def _nullable_floats(values: Floats) -> pl.Series:
    return pl.Series(values, dtype=pl.Float64).fill_nan(None)


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
            by_class.select([f"{name}_{axis}{_UNIT_SUFFIXES[name]}" for axis in POSITION_AXES])
            .cast(pl.Float64)
            .fill_null(np.nan)
            .to_numpy()
            for name in _CURVE_PARAMETERS
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
