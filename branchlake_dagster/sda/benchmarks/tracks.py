"""`branchlake bench tracks`: measure the position errors of fused tracks, single sensors and element sets.

A fused track is the orbit of an object as estimated from observations of all kinds of sensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from rich.console import Console
from rich.table import Table

from branchlake_dagster.sda.association.arrow import associate_table
from branchlake_dagster.sda.association.predictions import PredictedCatalog
from branchlake_dagster.sda.association.rules import AssociationRules
from branchlake_dagster.sda.benchmarks.association import read_catalogs, simulate_catalogs
from branchlake_dagster.sda.benchmarks.association_scene import CLUTTER, simulate_scene
from branchlake_dagster.sda.estimation.arrow import ELEMENT_INPUT, fuse_table
from branchlake_dagster.sda.estimation.prior import ElementPrior
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements, propagate_satellites
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS, measurement_models
from branchlake_dagster.sda.sensors.native import SOURCE_KINDS
from branchlake_dagster.sda.sensors.simulate import Scene as TrueScene

_OBJECTS = 4_000
_HOUR = 3_600_000_000
_POSITION = ("x_km", "y_km", "z_km")


def measure_tracks(
    files: Sequence[Path], *, hours: float, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the position errors of fused tracks, in this process.

    Observations of all kinds are simulated, 5 % of them with wrong track numbers, and 1 % clutter (false
    measurements). They are associated with the catalog and fused by the functions of the assets.

    Args:
        files: GP files, as for `measure_association`.
        hours: The length of the window.
        seed: The seed of the observations.
        say: Called with lines of progress.

    Returns:
        Figures as `count_tracks` describes them, and the CPU time of the fusion.
    """
    catalogs = read_catalogs(files, hours, say) if files else simulate_catalogs(_OBJECTS, seed)
    start, end = catalogs.start, catalogs.start + round(hours * _HOUR)
    scene = simulate_scene(catalogs.truth, start, end, seed=seed)
    table = scene.observations.to_arrow()
    models = measurement_models(DEFAULT_SENSOR_KINDS)
    catalog = PredictedCatalog.predict(catalogs.earlier, catalogs.sigma_km, start, end)
    associations = pl.DataFrame(associate_table(table, catalog, start, models))
    assigned = associations.filter(pl.col("result").is_in(["confirmed", "reassigned"])).select(
        "observation_id", "sat_no"
    )
    joined = (
        scene.observations.drop("sat_no")
        .join(assigned, on="observation_id")
        .join(element_frame(catalog.elements), on="sat_no")
        .sort("sat_no", "sensor_timestamp", "observation_id")
    )
    say(f"{joined.height:,} of {table.num_rows:,} observations have an object")
    prior = ElementPrior(catalog.elements.sat_no, catalog.sigma_km, AssociationRules().sigma_factor)
    began = time.process_time()
    tracks = pl.DataFrame(fuse_table(joined.to_arrow(), start, end, models, prior))
    fused_s = time.process_time() - began
    parts = [joined.filter(source_kind=kind).to_arrow() for kind in SOURCE_KINDS]
    single, alone = (
        [pl.DataFrame(fuse_table(part, start, end, models, errors)) for part in parts if part.num_rows]
        for errors in (prior, None)
    )
    middle = (start + end) // 2
    errors = build_errors(
        tracks,
        single,
        alone,
        _element_positions(catalog, middle),
        _true_positions(catalogs.truth, start, end, seed),
    )
    real = scene.truth.filter(pl.col("true_sat_no") != CLUTTER)
    return {
        "objects": len(catalogs.truth),
        "observations": table.num_rows,
        "observed_objects": real["true_sat_no"].n_unique(),
        "associated_observations": joined.height,
        "fuse_cpu_s": round(fused_s, 2),
        **count_tracks(errors),
    }


def build_errors(
    tracks: pl.DataFrame,
    single: Sequence[pl.DataFrame],
    alone: Sequence[pl.DataFrame],
    element_sets: pl.DataFrame,
    truth: pl.DataFrame,
) -> pl.DataFrame:
    """Return the position errors of each track, m.

    Args:
        tracks: Tracks from all kinds of sensors together.
        single: Tracks from the observations of each kind alone, with the element set as prior.
        alone: The same without a prior. A few observations then do not determine an orbit.
        element_sets: ``sat_no`` and the positions of the element sets at the same epoch.
        truth: ``sat_no`` and the true positions. A track of any other object has an infinite error.

    Returns:
        ``sat_no``, ``is_preferred``, ``kinds`` (the number of kinds that have a track of the object),
            ``error_m``, ``element_set_error_m``, ``best_sensor_error_m`` (of the kind whose track has the
            smallest standard deviation), and ``sensor_alone_error_m`` (the same without a prior; null if no
            kind alone determines an orbit).
    """
    best, best_alone = (
        pl.concat([frame.select("sat_no", "position_sigma_km", *_POSITION) for frame in frames])
        .sort("sat_no", "position_sigma_km")
        .group_by("sat_no", maintain_order=True)
        .agg(pl.len().alias("kinds"), *(pl.col(name).first() for name in _POSITION))
        for frames in (single, alone)
    )
    joined = tracks.select("sat_no", "is_preferred", *_POSITION)
    others = {"_true": truth, "_best": best, "_alone": best_alone.drop("kinds"), "_set": element_sets}
    for suffix, other in others.items():
        joined = joined.join(other, on="sat_no", how="left", suffix=suffix)

    def error(suffix: str) -> pl.Expr:
        squares = ((pl.col(f"{name}{suffix}") - pl.col(f"{name}_true")) ** 2 for name in _POSITION)
        return (pl.sum_horizontal(*squares, ignore_nulls=False).sqrt() * 1000).fill_null(float("inf"))

    return joined.select(
        "sat_no",
        "is_preferred",
        pl.col("kinds").fill_null(0),
        error_m=error(""),
        best_sensor_error_m=error("_best"),
        sensor_alone_error_m=pl.when(pl.col("x_km_alone").is_not_null()).then(error("_alone")),
        element_set_error_m=error("_set"),
    )


def count_tracks(errors: pl.DataFrame) -> dict[str, Any]:
    """Summarize the errors of `build_errors`.

    All errors are medians over preferred tracks (those that the pipeline uses instead of element sets).
    Figures of ``several_kinds`` cover the preferred tracks that several kinds of sensors observed. Figures of
    ``alone`` cover the preferred tracks whose orbit one kind determines without the element set.
    ``preferred_better_share`` is the share of preferred tracks that are better than their element set.
    Figures of ``all`` cover all tracks.
    """
    preferred = errors.filter("is_preferred")
    several = preferred.filter(pl.col("kinds") > 1)
    alone = preferred.filter(pl.col("sensor_alone_error_m").is_not_null())
    is_better = pl.col("error_m") < pl.col("element_set_error_m")
    return {
        "tracks": errors.height,
        "preferred_tracks": preferred.height,
        "preferred_share": _share(preferred.height, errors.height),
        "preferred_better_share": _share(preferred.filter(is_better).height, preferred.height),
        "median_error_m": _median(preferred, "error_m"),
        "best_sensor_error_m": _median(preferred, "best_sensor_error_m"),
        "element_set_error_m": _median(preferred, "element_set_error_m"),
        "several_kinds_tracks": several.height,
        "several_kinds_error_m": _median(several, "error_m"),
        "several_kinds_best_sensor_error_m": _median(several, "best_sensor_error_m"),
        "several_kinds_better_than_sensor_share": _share(
            several.filter(pl.col("error_m") < pl.col("best_sensor_error_m")).height, several.height
        ),
        "alone_tracks": alone.height,
        "alone_error_m": _median(alone, "error_m"),
        "alone_sensor_error_m": _median(alone, "sensor_alone_error_m"),
        "alone_better_than_sensor_share": _share(
            alone.filter(pl.col("error_m") < pl.col("sensor_alone_error_m")).height, alone.height
        ),
        "all_better_share": _share(errors.filter(is_better).height, errors.height),
        "all_median_error_m": _median(errors, "error_m"),
        "all_element_set_error_m": _median(errors, "element_set_error_m"),
    }


def _share(count: int, of: int) -> float | None:
    return round(count / of, 4) if of else None


def _median(frame: pl.DataFrame, name: str) -> float | None:
    median = frame[name].median()
    return None if median is None else round(float(str(median)), 1)


def element_frame(elements: Elements) -> pl.DataFrame:
    """Return element sets as a frame with the columns that the fusion reads."""
    values = dict(zip(ELEMENT_FIELDS, elements.values.T, strict=True))
    return pl.DataFrame(
        {
            "sat_no": elements.sat_no,
            "snapshot_id": ["bench"] * len(elements),
            "epoch": pl.Series(elements.epoch_micros).cast(pl.Datetime("us", "UTC")),
            **{name: pl.Series(value) for name, value in values.items()},
        }
    ).select(ELEMENT_INPUT)


def _positions(sat_no: npt.NDArray[np.int64], position: Floats) -> pl.DataFrame:
    frame = pl.DataFrame({"sat_no": sat_no, **dict(zip(_POSITION, position.T, strict=True))})
    return frame.with_columns(pl.col(_POSITION).fill_nan(None))


def _element_positions(catalog: PredictedCatalog, epoch: int) -> pl.DataFrame:
    state = propagate_satellites(catalog.elements.to_satrec_array(), np.array([epoch]))
    return _positions(catalog.elements.sat_no, state.position[:, 0])


def _true_positions(elements: Elements, start: int, end: int, seed: int) -> pl.DataFrame:
    """Return the objects' simulated positions at the middle of the window."""
    truth = TrueScene(elements, start, end, seed=seed, kind="radar")
    rows = np.arange(len(elements))
    position, _ = truth.truth(rows, np.full(len(rows), (start + end) // 2))
    return _positions(elements.sat_no, position)


def show_tracks(figures: dict[str, Any]) -> None:
    """Print the figures."""
    table = Table("tracks", "")
    for name, value in figures.items():
        shown = "-" if value is None else f"{value:.1%}" if name.endswith("_share") else f"{value:,}"
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)
