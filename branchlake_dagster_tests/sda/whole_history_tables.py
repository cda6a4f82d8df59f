"""The tables of an error model that was built of a whole history in one process: what Spark's are compared with."""

from __future__ import annotations

import numpy as np
import polars as pl

from branchlake_dagster.sda.benchmarks.whole_history_model import ErrorModel
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.classes import CLASSES
from branchlake_dagster.sda.trust.growth import AGE_BINS, AGE_EDGES_DAYS
from branchlake_dagster.sda.trust.jumps import JUMP_SIGNS
from branchlake_dagster.sda.trust.tables import CURVE_PARAMETERS, POSITION_AXES, UNIT_SUFFIXES

_UTC_MICROS = pl.Datetime("us", "UTC")


def element_errors(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Return the rows of `ElementError`: each class at each age bin, with the curve of the class."""
    growth, statistics = model.growth, model.growth.statistics
    code, age_bin = (part.ravel() for part in np.indices((len(CLASSES), AGE_BINS)))
    names = [name.value for name in CLASSES]
    fitted = growth.sigma_at(code, statistics.age_days[code, age_bin])
    first, last = (
        (int(history.epoch_micros.min()), int(history.epoch_micros.max())) if len(history) else (0, 0)
    )
    columns: dict[str, pl.Series] = {
        "orbit_class": pl.Series([names[row] for row in code], dtype=pl.String),
        "from_age_days": pl.Series(np.array(AGE_EDGES_DAYS)[age_bin]),
        "to_age_days": pl.Series(np.array(AGE_EDGES_DAYS)[age_bin + 1]),
        "samples": pl.Series(statistics.count[code, age_bin]),
        "age_days": _nullable_floats(statistics.age_days[code, age_bin]),
    }
    for name, values in (("sigma", statistics.sigma), ("p95", statistics.p95), ("median", statistics.median)):
        columns |= {
            f"{name}_{axis}_km": _nullable_floats(values[code, age_bin, k])
            for k, axis in enumerate(POSITION_AXES)
        }
    columns |= {f"fitted_{axis}_km": _nullable_floats(fitted[:, k]) for k, axis in enumerate(POSITION_AXES)}
    for name in CURVE_PARAMETERS:
        values = getattr(growth, name)[code]
        columns |= {
            f"{name}_{axis}{UNIT_SUFFIXES[name]}": _nullable_floats(values[:, k])
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
    )


def object_errors(model: ErrorModel) -> pl.DataFrame:
    """Return the rows of `ObjectError`: the factor of each object on its class's curves."""
    return pl.DataFrame(
        {
            "sat_no": pl.Series(model.sat_no, dtype=pl.Int64),
            "orbit_class": pl.Series([CLASSES[code].value for code in model.classes], dtype=pl.String),
            "samples": pl.Series(model.samples, dtype=pl.Int64),
            **{f"factor_{axis}": pl.Series(model.factors[:, k]) for k, axis in enumerate(POSITION_AXES)},
        }
    )


def element_jumps(model: ErrorModel, history: Elements) -> pl.DataFrame:
    """Return the rows of `ElementJump`: the candidates for jumps, ordered by epoch."""
    differences, jumps = model.differences, model.jumps
    older, newer = differences.older[jumps.pair], differences.newer[jumps.pair]
    values = differences.values[jumps.pair]
    other = np.where(model.swapped_set >= 0, history.sat_no[model.swapped_set], 0)
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
        )
        .sort("epoch", "sat_no")
    )


def _nullable_floats(values: Floats) -> pl.Series:
    return pl.Series(values, dtype=pl.Float64).fill_nan(None)
