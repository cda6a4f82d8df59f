"""`branchlake bench association`: measure how often simulated observations get their true object.

The observations are simulated from a real catalog, and associated by the element sets of an earlier day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from branchlake_dagster.sda.association.arrow import associate_table
from branchlake_dagster.sda.association.predictions import PredictedCatalog
from branchlake_dagster.sda.benchmarks.association_scene import CLUTTER, Scene, simulate_scene
from branchlake_dagster.sda.benchmarks.whole_history_model import build_error_model
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.sensor_kinds.registered import SENSOR_KINDS, measurement_models
from branchlake_dagster.sda.trust.classes import semi_major_axis
from branchlake_dagster.sda.windows import to_microseconds

_OBJECTS = 16_000
_SIMULATED_SIGMA_KM = (0.2, 8.0, 0.2)
_HOUR = 3_600_000_000


class Catalogs(NamedTuple):
    """The true objects, the earlier element sets with their standard deviations, and the start of the window.

    `sigma_km` (n, 3) is along R, T and N, km. `start` is in UTC microseconds since 1970.
    """

    truth: Elements
    earlier: Elements
    sigma_km: Floats
    start: int


def measure_association(
    files: Sequence[Path], *, hours: float, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the association of simulated observations of all kinds, in this process.

    Args:
        files: GP files in the order of time, three or more. The last file is the truth, and the file before
            it the prediction. All files except the last are the history from which the error model is built.
            Without files, 16,000 objects are simulated.
        hours: The length of the window. It ends at the time before which 99 % of the last file's epochs lie.
        seed: The seed of the observations.
        say: Called with lines of progress.

    Returns:
        Figures by kind of sensor and for all kinds together, as `count_outcomes` describes them, and the CPU
            time of the association and of the catalog's propagation.
    """
    catalogs = read_catalogs(files, hours, say) if files else simulate_catalogs(_OBJECTS, seed)
    end = catalogs.start + round(hours * _HOUR)
    scene = simulate_scene(catalogs.truth, catalogs.start, end, seed=seed)
    say(f"{scene.observations.height:,} observations of {len(catalogs.truth):,} objects")
    table = scene.observations.to_arrow()
    began = time.process_time()
    catalog = PredictedCatalog.predict(catalogs.earlier, catalogs.sigma_km, catalogs.start, end)
    predicted = time.process_time()
    associations = pl.DataFrame(
        associate_table(table, catalog, catalogs.start, measurement_models(SENSOR_KINDS))
    )
    done = time.process_time()
    usable = pl.Series(catalog.elements.sat_no[catalog.is_usable])
    age = associations["element_age_days"].drop_nulls().median()
    return {
        "objects": len(catalogs.truth),
        "objects_with_prediction": len(usable),
        "median_element_age_days": None if age is None else round(float(str(age)), 3),
        "observations": table.num_rows,
        "predict_cpu_s": round(predicted - began, 2),
        "associate_cpu_s": round(done - predicted, 2),
        "observations_per_core_per_s": round(table.num_rows / (done - began)),
        "kinds": [
            {"kind": kind, **count_outcomes(associations, scene, usable, kind)}
            for kind in ("all", *sorted(scene.truth["source_kind"].unique()))
        ],
    }


def count_outcomes(
    associations: pl.DataFrame, scene: Scene, predicted: pl.Series, kind: str = "all"
) -> dict[str, Any]:
    """Compare associations with the truth, and return counts and shares.

    All shares are of the true observations, except ``clutter_accepted_share``, which is of the clutter (false
    measurements). ``wrong`` counts observations with an object that is not the true one; ``wrong_claimed`` of
    them only repeat a claim that could not be tested. ``uncorrelated`` is split by the cause: the true object
    has no usable prediction, several objects fit, or no object is within the gate.
    ``wrong_tag_corrected_share`` is the share of observations with a wrong track number that got their true
    object.

    Args:
        associations: Rows of `ASSOCIATION_SCHEMA`.
        scene: The truth.
        predicted: Catalog numbers of the objects with a usable prediction.
        kind: The kind of sensor to count, or "all".
    """
    joined = associations.join(scene.truth.drop("source_kind"), on="observation_id")
    if kind != "all":
        joined = joined.filter(source_kind=kind)
    is_real = pl.col("true_sat_no") != CLUTTER
    real, false = joined.filter(is_real), joined.filter(~is_real)
    wrong = real.filter(pl.col("sat_no") != pl.col("true_sat_no"))
    left = real.filter(result="uncorrelated")
    is_predicted = pl.col("true_sat_no").is_in(predicted.implode())
    tagged = real.filter("has_wrong_tag")
    accepted = false.filter(pl.col("sat_no").is_not_null())
    return {
        "observations": joined.height,
        "wrong": wrong.height,
        "wrong_claimed": wrong.filter(result="claimed").height,
        "wrong_share": _share(wrong.height, real.height),
        "uncorrelated_share": _share(left.height, real.height),
        "uncorrelated_without_prediction_share": _share(left.filter(~is_predicted).height, real.height),
        "uncorrelated_ambiguous_share": _share(
            left.filter(is_predicted & (pl.col("reason") == "ambiguous")).height, real.height
        ),
        "uncorrelated_outside_gate_share": _share(
            left.filter(is_predicted & (pl.col("reason") == "outside_gate")).height, real.height
        ),
        "wrong_tags": tagged.height,
        "wrong_tag_corrected_share": _share(
            tagged.filter(pl.col("sat_no") == pl.col("true_sat_no")).height, tagged.height
        ),
        "clutter": false.height,
        "clutter_accepted": accepted.height,
        "clutter_claimed": accepted.filter(result="claimed").height,
        "clutter_accepted_share": _share(accepted.height, false.height),
        **{
            f"{name}_share": _share(real.filter(result=name).height, real.height)
            for name in ("confirmed", "reassigned", "claimed")
        },
    }


def _share(count: int, of: int) -> float | None:
    return round(count / of, 6) if of else None


def simulate_catalogs(objects: int, seed: int) -> Catalogs:
    """Simulate true objects, and element sets of them that deviate by known Gaussian errors.

    The errors are along the track, in the inclination and in the eccentricity. The window begins an hour
    after the reference epoch.
    """
    frame = simulated_elements(seed=seed, objects=objects, epoch=REFERENCE_EPOCH)
    truth = Elements.from_arrow(frame.sort("sat_no").to_arrow())
    generator = np.random.default_rng([seed, 17])
    radius = semi_major_axis(truth)
    radial, transverse, normal = _SIMULATED_SIGMA_KM
    values = truth.values.copy()
    error = generator.standard_normal((3, len(truth)))
    eccentricity = ELEMENT_FIELDS.index("eccentricity")
    values[:, ELEMENT_FIELDS.index("mean_anomaly")] += np.degrees(error[0] * transverse / radius)
    values[:, ELEMENT_FIELDS.index("inclination")] += np.degrees(error[1] * normal / radius)
    values[:, eccentricity] = np.abs(values[:, eccentricity] + error[2] * radial / radius)
    sigma = np.tile(np.array(_SIMULATED_SIGMA_KM), (len(truth), 1))
    return Catalogs(truth, replace(truth, values=values), sigma, to_microseconds(REFERENCE_EPOCH) + _HOUR)


def read_catalogs(files: Sequence[Path], hours: float, say: Callable[[str], None]) -> Catalogs:
    """Read the truth and the earlier element sets from GP files, with errors derived from the history."""
    frames = [
        read_catalogue(path.read_bytes(), path.name).elements.select(Elements.COLUMNS) for path in files
    ]
    truth, earlier = (Elements.from_arrow(frame.to_arrow()) for frame in (frames[-1], frames[-2]))
    history = Elements.from_arrow(
        pl.concat(frames[:-1])
        .unique(["sat_no", "epoch"], keep="last", maintain_order=True)
        .sort("sat_no", "epoch")
        .to_arrow()
    )
    errors = build_error_model(history).to_published()
    say(f"error model of {len(history):,} element sets; prediction by {files[-2].name}")
    # The truth is best near its epochs, of which the last percent may be in the future.
    newest = int(np.quantile(truth.epoch_micros, 0.99))
    start = (newest - round(hours * _HOUR)) // 60_000_000 * 60_000_000
    middle = np.full(len(earlier), start + round(hours * _HOUR) // 2)
    return Catalogs(truth, earlier, errors.position_sigma(earlier, middle), start)


def show_association(figures: dict[str, Any]) -> None:
    """Print the totals, then the outcomes by kind."""
    console = Console()
    totals = Table("association", "")
    for name, value in figures.items():
        if name != "kinds":
            totals.add_row(name.replace("_", " "), _format_figure(name, value))
    console.print(totals)
    kinds = figures["kinds"]
    outcomes = Table("outcome", *(entry["kind"] for entry in kinds))
    for name in kinds[0]:
        if name != "kind":
            outcomes.add_row(name.replace("_", " "), *(_format_figure(name, entry[name]) for entry in kinds))
    console.print(outcomes)


def _format_figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_share"):
        return f"{value:.3%}"
    return f"{value:,}"
