"""Report the most important conjunctions of a day to an operator, as a table and three pictures.

A conjunction is a close approach of two objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from branchlake_dagster.sda.orbits.frames import EARTH_RADIUS_KM, Floats
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites
from branchlake_dagster.sda.reports.pictures import draw_chart, new_figure
from branchlake_dagster.sda.trust.assessment import combine_covariances
from branchlake_dagster.sda.trust.classes import semi_major_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP_COUNT = 15
_BIN_KM = 25.0
_MAX_ALTITUDE_KM = 2_000.0
_DISTANCE_SPAN = 5.0
"""The distance at the left and right ends of the picture, as a multiple of the miss distance."""
_MAX_DRAWN, _REACH_MARGIN, _ARROW_SHARE = 8, 1.3, 0.2
_PLANES = (("radial, km", 0), ("cross-track, km", 2))
_MIN_MISS_KM, _MAX_SPAN_S, _INSTANT_COUNT = 0.1, 60.0, 101


def select_top_approaches(approaches: pl.DataFrame, count: int = TOP_COUNT) -> pl.DataFrame:
    """Return the first `count` encounters by probability of collision, then by miss distance."""
    return (
        approaches.filter(pl.col("kind") == "encounter")
        .sort(
            *("collision_probability", "miss_distance_km", "event_id"),
            descending=[True, False, False],
            nulls_last=True,
        )
        .head(count)
    )


def format_approaches(approaches: pl.DataFrame, names: dict[int, str]) -> str:
    """Format close approaches as a Markdown table. `names` has the known names by catalog number."""
    lines = [
        "| TCA, UTC | object 1 | object 2 | miss, km | km/s | probability | largest | ages, d |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in approaches.iter_rows(named=True):
        sat_nos = [row[f"sat{k}_object_designator"] for k in (1, 2)]
        object_labels = [
            f"{names[sat_no]} ({sat_no})" if names.get(sat_no) else str(sat_no) for sat_no in sat_nos
        ]
        chance, largest = row["collision_probability"], row["max_collision_probability"]
        diluted = ", diluted" if row["probability_diluted"] else ""
        cells = [
            f"{row['tca']:%m-%d %H:%M:%S}",
            *(label.replace("|", "/") for label in object_labels),
            f"{row['miss_distance_km']:.3f}",
            f"{row['relative_speed_km_s']:.2f}",
            row["no_probability_because"] or "" if chance is None else f"{chance:.1e}{diluted}",
            "" if largest is None else f"{largest:.1e}",
            f"{row['sat1_element_age_days']:.1f}, {row['sat2_element_age_days']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_altitudes(elements: Elements) -> Figure:
    """Draw the number of objects at each altitude in low orbit."""
    edges = np.arange(100.0, _MAX_ALTITUDE_KM + _BIN_KM, _BIN_KM)
    count, _ = np.histogram(semi_major_axis(elements) - EARTH_RADIUS_KM, edges)
    # Each bin is drawn as a step from its lower to its upper edge.
    points = [(edge, float(n)) for k, n in enumerate(count.tolist()) for edge in edges[k : k + 2].tolist()]
    return draw_chart(
        "Objects in low orbit",
        "mean altitude, km",
        f"objects per {_BIN_KM:.0f} km",
        {"objects": points},
    )


def draw_distance(row: dict[str, Any], elements: Elements) -> Figure:
    """Draw the distance of two objects in the seconds before and after their closest approach."""
    numbers = [row[f"sat{k}_object_designator"] for k in (1, 2)]
    tca = int(pl.Series([row["tca"]]).dt.epoch("us")[0])
    end_distance_km = _DISTANCE_SPAN * max(row["miss_distance_km"], _MIN_MISS_KM)
    span_s = min(end_distance_km / max(row["relative_speed_km_s"], 1e-6), _MAX_SPAN_S)
    seconds = np.linspace(-span_s, span_s, _INSTANT_COUNT)
    pair = elements.take(np.searchsorted(elements.sat_no, np.array(numbers, np.int64)).astype(np.int64))
    states = propagate_satellites(pair.to_satrec_array(), tca + np.round(seconds * 1e6).astype(np.int64))
    distance = np.linalg.norm(states.position[1] - states.position[0], axis=1)
    points = [(s, d) for s, d in zip(seconds.tolist(), distance.tolist(), strict=True) if np.isfinite(d)]
    title = f"{numbers[0]} and {numbers[1]}, {row['tca']:%Y-%m-%d %H:%M:%S} UTC"
    return draw_chart(title, "seconds from the closest approach", "distance, km", {"distance": points})


def draw_geometry(approaches: pl.DataFrame, elements: Elements) -> Figure:
    """Draw the positions of the second objects relative to the first at the closest approach.

    The first few approaches are drawn in two planes, in-track with radial and in-track with cross-track. Each
    has a point, the direction of the relative velocity and, if the errors are known, the ellipse of one
    standard deviation of both objects' errors together. All axes have the same scale.
    """
    from matplotlib.patches import Ellipse

    drawn_approaches = approaches.head(_MAX_DRAWN)
    position, velocity = (
        drawn_approaches.select([f"relative_{name}_{axis}_{unit}" for axis in "rtn"]).to_numpy()
        for name, unit in (("position", "km"), ("velocity", "km_s"))
    )
    covariance = _position_covariances(drawn_approaches, elements)
    directions = velocity / np.maximum(np.linalg.norm(velocity, axis=1, keepdims=True), 1e-12)
    names = drawn_approaches.select(
        pl.format("{} {}", *(f"sat{k}_object_designator" for k in (1, 2)))
    ).to_series()
    reach = _round_up(float(np.abs(position).max(initial=_MIN_MISS_KM)) * _REACH_MARGIN)
    figure = new_figure("The second object from the first, with one sigma of both")
    for axes, (label, axis) in zip(figure.subplots(1, 2), _PLANES, strict=True):
        for k, name in enumerate(names.to_list()):
            color = f"C{k}"
            x, y = position[k, [1, axis]]
            dx, dy = directions[k, [1, axis]] * reach * _ARROW_SHARE
            # The number makes labels unique: a pair may meet twice in a day.
            axes.plot(x, y, "o", markersize=4, color=color, label=f"{k + 1}: {name}")
            axes.plot([x, x + dx], [y, y + dy], color=color)
            ellipse = _sigma_ellipse(covariance[k][np.ix_([1, axis], [1, axis])])
            if ellipse is not None:
                major, minor, angle = ellipse
                axes.add_patch(
                    Ellipse((x, y), 2 * major, 2 * minor, angle=np.degrees(angle), color=color, alpha=0.15)
                )
        axes.set(
            xlabel="in-track, km", ylabel=label, xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal"
        )
        axes.grid(visible=True, alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize="x-small")
    return figure


def _position_covariances(approaches: pl.DataFrame, elements: Elements) -> Floats:
    """Return the sum of both covariances (k, 3, 3) along the first object's R, T and N, km².

    R is radial, T along the track, N normal to the orbit's plane. Unknown covariances are NaN.
    """
    sigma = [
        approaches.select([pl.col(f"sat{k}_sigma_{axis}_km").cast(pl.Float64) for axis in "rtn"])
        .fill_null(float("nan"))
        .to_numpy()
        for k in (1, 2)
    ]
    rows = [
        np.searchsorted(elements.sat_no, approaches[f"sat{k}_object_designator"].to_numpy()).astype(np.int64)
        for k in (1, 2)
    ]
    return combine_covariances(elements, rows, sigma, approaches["tca"].dt.epoch("us").to_numpy())


def _sigma_ellipse(covariance: Floats) -> tuple[float, float, float] | None:
    if not np.isfinite(covariance).all():
        return None
    variances, axes = np.linalg.eigh(covariance)
    half_axes = np.sqrt(np.maximum(variances, 0.0))
    return float(half_axes[1]), float(half_axes[0]), float(np.arctan2(axes[1, 1], axes[0, 1]))


def _round_up(reach: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(reach))
    return float(next(k * power for k in (1, 2, 5, 10) if k * power >= reach))
