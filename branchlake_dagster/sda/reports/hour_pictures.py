"""The pictures of an hour: what the sensors measured, what became of it, and what it warns of.

Each function draws a frame that the asset `hour_reports` has aggregated, and returns None if it has no rows.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats, Micros, rotate_z, sidereal_angle
from branchlake_dagster.sda.reports.pictures import escape_label, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULT_COLORS = {"confirmed": "C2", "reassigned": "C1", "claimed": "C0", "uncorrelated": "C3"}
PRIORITY_COLORS = {"high": "C3", "medium": "C1", "low": "C0"}
_MAX_SENSORS = 25
_MAX_LATITUDE_DEG, _MAX_LONGITUDE_DEG = 90, 180
_MISS_LABEL = "miss distance, km"


def draw_outcomes(outcomes: pl.DataFrame) -> Figure | None:
    """Draw how many observations of each kind of sensor have which result.

    Args:
        outcomes: `source_kind`, `result`, `observations`; one row per kind and result.

    """
    if outcomes.is_empty():
        return None
    figure = new_figure("Associations by kind of sensor")
    axes = figure.add_subplot()
    kinds = sorted(outcomes["source_kind"].unique())
    left = np.zeros(len(kinds))
    for result, color in RESULT_COLORS.items():
        counts = dict(outcomes.filter(result=result).select("source_kind", "observations").iter_rows())
        width = np.array([counts.get(kind, 0) for kind in kinds], float)
        axes.barh([escape_label(kind) for kind in kinds], width, left=left, color=color, label=result)
        left += width
    axes.set(xlabel="observations", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=len(RESULT_COLORS), fontsize="small")
    return figure


def draw_residuals(residuals: pl.DataFrame) -> Figure | None:
    """Draw the distance of each sensor's observations from the predictions, in standard deviations.

    A sensor that is biased, or that states too small an error, is right of 1. The sensors with the largest
    medians are drawn.

    Args:
        residuals: `source_id`, `observations`, and the quantiles `low`, `median`, `high` of the Mahalanobis
            distance over the root of its degrees of freedom; one row per sensor.

    """
    if residuals.is_empty():
        return None
    worst = residuals.sort("median", "source_id").tail(_MAX_SENSORS)
    figure = new_figure("Residuals by sensor: 5 %, median and 95 %")
    axes = figure.add_subplot()
    place = np.arange(worst.height)
    low, median, high = (worst[name].to_numpy() for name in ("low", "median", "high"))
    axes.errorbar(median, place, xerr=np.abs([median - low, high - median]), fmt="o", capsize=3)
    names = [f"{escape_label(name)} ({n:,})" for name, n in worst.select("source_id", "observations").rows()]
    axes.set_yticks(place, names, fontsize="small")
    axes.axvline(1.0, color="0.6", linestyle="--")
    axes.set(xlabel="distance from the prediction, standard deviations", xlim=(0, None))
    return figure


def draw_track_quality(tracks: pl.DataFrame) -> Figure | None:
    """Draw the errors of tracks beside those of their element sets, and the element sets' distance by age.

    Args:
        tracks: `position_sigma_km`, `prior_sigma_km`, `catalogue_miss_km`, `is_preferred`,
            `element_age_days`; one row per track.

    """
    if tracks.is_empty():
        return None
    figure = new_figure(f"Quality of {tracks.height:,} tracks")
    errors, ages = figure.subplots(1, 2)
    columns = {
        "track, preferred": tracks.filter("is_preferred")["position_sigma_km"],
        "track, not preferred": tracks.filter(~pl.col("is_preferred"))["position_sigma_km"],
        "element set": tracks["prior_sigma_km"],
    }
    values = {name: found.filter(found > 0).to_numpy() for name, found in columns.items()}
    every = np.concatenate(list(values.values()))
    if len(every):
        edges = np.geomspace(every.min() / 1.01, every.max() * 1.01, 40)
        for name, found in values.items():
            errors.hist(found, bins=edges.tolist(), histtype="step", label=f"{name} ({len(found):,})")
        errors.set(xscale="log")
        errors.legend(fontsize="x-small")
    errors.set(xlabel="one sigma of the position, km", ylabel="objects")
    _scatter_by(
        ages,
        tracks,
        ("element_age_days", "catalogue_miss_km"),
        "is_preferred",
        {True: ("C0", "preferred"), False: ("C1", "not preferred")},
    )
    ages.set(xlabel="age of the element set, days", ylabel="distance from the element set, km", yscale="log")
    return figure


def draw_ground_tracks(tracks: pl.DataFrame) -> Figure | None:
    """Draw the points of the Earth below the tracks' states.

    Args:
        tracks: `x_km`, `y_km`, `z_km` (TEME), `epoch` (UTC), `is_preferred`; one row per track.

    """
    if tracks.is_empty():
        return None
    positions = tracks.select("x_km", "y_km", "z_km").to_numpy()
    latitude, longitude = subpoints(positions, tracks["epoch"].dt.epoch("us").to_numpy())
    figure = new_figure(f"{tracks.height:,} tracks above the Earth, {_format_minute(tracks['epoch'].min())}")
    axes = figure.add_subplot()
    places = tracks.select("is_preferred").with_columns(
        longitude=pl.Series(longitude), latitude=pl.Series(latitude)
    )
    _scatter_by(
        axes,
        places,
        ("longitude", "latitude"),
        "is_preferred",
        {True: ("C0", "preferred"), False: ("C1", "not preferred")},
    )
    axes.set(
        xlabel="longitude, degrees east",
        ylabel="geocentric latitude, degrees",
        xlim=(-_MAX_LONGITUDE_DEG, _MAX_LONGITUDE_DEG),
        ylim=(-_MAX_LATITUDE_DEG, _MAX_LATITUDE_DEG),
        xticks=range(-_MAX_LONGITUDE_DEG, _MAX_LONGITUDE_DEG + 1, 60),
        yticks=range(-_MAX_LATITUDE_DEG, _MAX_LATITUDE_DEG + 1, 30),
        aspect="equal",
    )
    axes.grid(visible=True, alpha=0.3)
    return figure


def draw_alerts(alerts: pl.DataFrame) -> Figure | None:
    """Draw the alerts that hold by time and miss distance, colored by priority.

    Args:
        alerts: `tca` (UTC), `miss_distance_km`, `priority`; one row per alert.

    """
    if alerts.is_empty():
        return None
    figure = new_figure(f"{alerts.height:,} conjunction alerts")
    axes = figure.add_subplot()
    counts = dict(alerts.group_by("priority").len().iter_rows())
    colors = {name: (color, f"{name} ({counts.get(name, 0):,})") for name, color in PRIORITY_COLORS.items()}
    _scatter_by(axes, alerts, ("tca", "miss_distance_km"), "priority", colors, size=18)
    axes.set(xlabel="time of closest approach, UTC", ylabel=_MISS_LABEL, ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.tick_params(axis="x", labelsize="small")
    return figure


def subpoints(positions: Floats, micros: Micros) -> tuple[Floats, Floats]:
    """Return geocentric latitude and longitude (degrees) of TEME positions (n, 3) in km at UTC instants."""
    fixed = rotate_z(positions, sidereal_angle(micros))
    latitude: Floats = np.degrees(np.arctan2(fixed[:, 2], np.hypot(fixed[:, 0], fixed[:, 1])))
    longitude: Floats = np.degrees(np.arctan2(fixed[:, 1], fixed[:, 0]))
    return latitude, longitude


def _scatter_by(
    axes: Any,
    rows: pl.DataFrame,
    columns: tuple[str, str],
    by: str,
    styles: dict[Any, tuple[str, str]],
    *,
    size: float = 4,
) -> None:
    """Draw a point for each row, in the color and with the label of its value in the column `by`."""
    for value, (color, label) in styles.items():
        chosen = rows.filter(pl.col(by) == value)
        axes.scatter(*(chosen[name].to_list() for name in columns), s=size, color=color, label=label)
    axes.legend(fontsize="x-small", loc="upper right")


def _format_minute(instant: object) -> str:
    return f"{instant:%Y-%m-%d %H:%M} UTC" if isinstance(instant, datetime) else ""
