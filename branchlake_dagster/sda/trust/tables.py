"""The error model as tables, and back: what a probability is computed with is what was published."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.classes import CLASSES, orbit_class
from branchlake_dagster.sda.trust.differences import DAY_MICROS
from branchlake_dagster.sda.trust.growth import AXES, BINS, EDGES_DAYS, curve
from branchlake_dagster.sda.trust.jumps import SIGNS
from branchlake_dagster.sda.trust.model import ErrorModel

POSITION = AXES[:3]
SOURCE = "element-set differences"
_CURVE = ("sigma0", "rate", "power")
_UNITS = {"sigma0": "_km", "rate": "", "power": ""}
_MOMENT = pl.Datetime("us", "UTC")


def model_id(model: ErrorModel, history: Elements) -> str:
    """The name of a model: the newest epoch of its history, and a hash of that history and of its figures."""
    newest = np.datetime64(int(history.epoch_micros.max()) if len(history) else 0, "us")
    growth = model.growth
    figures = (
        *(history.sat_no, history.epoch_micros, history.values),
        *(growth.sigma0, growth.rate, growth.power, growth.until_days),
        *(model.sat_no, model.factors),
    )
    content = sha256()
    for part in figures:
        content.update(f"{part.dtype.str}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
    time = np.datetime_as_string(newest, unit="s").replace("-", "").replace(":", "")
    return f"{time}Z-{content.hexdigest()[:16]}"


def element_errors(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Rows of `ElementError`: each class at each age, with the curve of the class."""
    growth = model.growth
    code, one = (part.ravel() for part in np.indices((len(CLASSES), BINS)))
    names = [name.value for name in CLASSES]
    fitted = growth.at(code, growth.age_days[code, one])
    first, last = (
        (int(history.epoch_micros.min()), int(history.epoch_micros.max())) if len(history) else (0, 0)
    )
    columns: dict[str, pl.Series] = {
        "orbit_class": pl.Series([names[row] for row in code], dtype=pl.String),
        "from_age_days": pl.Series(np.array(EDGES_DAYS)[one]),
        "to_age_days": pl.Series(np.array(EDGES_DAYS)[one + 1]),
        "samples": pl.Series(growth.count[code, one]),
        "age_days": _numbers(growth.age_days[code, one]),
    }
    for name, values in (("sigma", growth.sigma), ("p95", growth.p95), ("median", growth.median)):
        columns |= {f"{name}_{axis}_km": _numbers(values[code, one, k]) for k, axis in enumerate(POSITION)}
    columns |= {f"fitted_{axis}_km": _numbers(fitted[:, k]) for k, axis in enumerate(POSITION)}
    for name in _CURVE:
        values = getattr(growth, name)[code]
        columns |= {f"{name}_{axis}{_UNITS[name]}": _numbers(values[:, k]) for k, axis in enumerate(POSITION)}
    taken = growth.taken_from[code]
    columns |= {
        "curve_of": pl.Series([names[row] if row >= 0 else None for row in taken], dtype=pl.String),
        "until_age_days": pl.Series(growth.until_days[code]),
    }
    return pl.DataFrame(columns).with_columns(
        pl.lit(first).cast(_MOMENT).alias("history_from"),
        pl.lit(last).cast(_MOMENT).alias("history_until"),
        pl.lit(model_id(model, history)).alias("error_model_id"),
    )


def object_errors(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Rows of `ObjectError`: the factor of each object on its class's curves."""
    return pl.DataFrame(
        {
            "sat_no": pl.Series(model.sat_no, dtype=pl.Int64),
            "orbit_class": pl.Series([CLASSES[code].value for code in model.classes], dtype=pl.String),
            "samples": pl.Series(model.samples, dtype=pl.Int64),
            **{f"factor_{axis}": pl.Series(model.factors[:, k]) for k, axis in enumerate(POSITION)},
        }
    ).with_columns(pl.lit(model_id(model, history)).alias("error_model_id"))


def element_jumps(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Rows of `ElementJump`: the candidates, by time."""
    found, jumped = model.differences, model.jumps
    older, newer = found.older[jumped.pair], found.newer[jumped.pair]
    values = found.values[jumped.pair]
    other = np.where(jumped.other >= 0, history.sat_no[jumped.other], 0)
    return (
        pl.DataFrame(
            {
                "sat_no": pl.Series(history.sat_no[newer], dtype=pl.Int64),
                "epoch": pl.Series(history.epoch_micros[newer], dtype=pl.Int64),
                "previous_epoch": pl.Series(history.epoch_micros[older], dtype=pl.Int64),
                "kind": pl.Series(jumped.kind.tolist(), dtype=pl.String),
                "reason": pl.Series([SIGNS[code].value for code in jumped.sign], dtype=pl.String),
                "sigmas": pl.Series(jumped.sigmas, dtype=pl.Float64),
                "semi_major_axis_change_km": pl.Series(-values[:, 3], dtype=pl.Float64),
                "inclination_change_deg": pl.Series(-values[:, 4], dtype=pl.Float64),
                "in_track_km": pl.Series(values[:, 1], dtype=pl.Float64),
                "taken_for": pl.Series(other, dtype=pl.Int64),
            }
        )
        .with_columns(
            pl.col("epoch", "previous_epoch").cast(_MOMENT),
            pl.when(pl.col("taken_for") > 0).then("taken_for").alias("taken_for"),
            pl.lit(model_id(model, history)).alias("error_model_id"),
        )
        .sort("epoch", "sat_no")
    )


def _numbers(values: Floats) -> pl.Series:
    return pl.Series(values, dtype=pl.Float64).fill_nan(None)


@dataclass(frozen=True)
class Expected:
    """A published model: curves (c, 3) by class, factors (n, 3) by object."""

    sigma0: Floats
    rate: Floats
    power: Floats
    until_days: Floats
    sat_no: npt.NDArray[np.int64]
    factors: Floats
    model_id: str

    @classmethod
    def of(cls, errors: pl.DataFrame, objects: pl.DataFrame) -> Expected:
        """The model of the two tables."""
        by_class = pl.DataFrame({"orbit_class": [name.value for name in CLASSES]}).join(
            errors.unique("orbit_class", keep="first"), on="orbit_class", how="left", maintain_order="left"
        )
        sigma0, rate, power = (
            by_class.select([f"{name}_{axis}{_UNITS[name]}" for axis in POSITION])
            .cast(pl.Float64)
            .fill_null(np.nan)
            .to_numpy()
            for name in _CURVE
        )
        sorted_objects = objects.sort("sat_no")
        return cls(
            sigma0,
            rate,
            power,
            by_class["until_age_days"].cast(pl.Float64).fill_null(0.0).to_numpy(),
            sorted_objects["sat_no"].to_numpy(),
            sorted_objects.select([f"factor_{axis}" for axis in POSITION]).to_numpy(),
            str(errors["error_model_id"][0]),
        )

    def sigma(self, elements: Elements, micros: npt.NDArray[np.int64]) -> Floats:
        """One sigma along R, T and N (k, 3), km, of k element sets, each at its own instant; NaN if unknown.

        An object that the model does not have is as its class is.
        """
        classes = orbit_class(elements)
        age = (micros - elements.epoch_micros) / DAY_MICROS
        usual = curve(
            self.sigma0[classes], self.rate[classes], self.power[classes], self.until_days[classes], age
        )
        if not len(self.sat_no):
            return usual
        place = np.minimum(np.searchsorted(self.sat_no, elements.sat_no), len(self.sat_no) - 1)
        known = self.sat_no[place] == elements.sat_no
        return np.asarray(usual * np.where(known[:, None], self.factors[place], 1.0))
