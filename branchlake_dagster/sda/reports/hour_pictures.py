"""Draw the pictures of an hour: results of associations, residuals, tracks and alerts.

Each function draws a frame that the asset `hour_reports` has aggregated, and returns None if it has no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats, Micros, rotate_z, sidereal_angle
from branchlake_dagster.sda.reports.pictures import escape_label, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULT_COLORS = {"confirmed": "C2", "reassigned": "C1", "claimed": "C0", "uncorrelated": "C3"}
PRIORITY_COLORS = {"high": "C3", "medium": "C1", "low": "C0"}
_MAX_SENSORS = 25
_MAX_LATITUDE_DEG, _MAX_LONGITUDE_DEG = 90, 180
_MINUTE_MILLISECONDS = 60_000


def draw_outcomes(outcomes: pl.DataFrame) -> Figure | None:
    """Draw how many observations of each kind of sensor have which result.

    Args:
        outcomes: `source_kind`, `result` and `observations`; one row per kind and result.
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


def select_worst_sensors(residuals: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the 25 sensors with the largest medians, the largest last."""
    return residuals.filter(pl.col("median").is_finite()).sort("median", "source_id").tail(_MAX_SENSORS)


def draw_residuals(residuals: pl.DataFrame, sensor_count: int) -> Figure | None:
    """Draw the distance of each sensor's observations from the predictions, in standard deviations.

    A sensor that is biased, or that states too small an error, has a median above 1.

    Args:
        residuals: `source_id`, `observations`, and the quantiles `low`, `median` and `high` of the
            Mahalanobis distance divided by the square root of its degrees of freedom; one row per sensor
            (`select_worst_sensors`).
        sensor_count: The number of all sensors.
    """
    if residuals.is_empty():
        return None
    which = "" if residuals.height == sensor_count else f", the largest of {sensor_count:,} sensors"
    figure = new_figure(f"Residuals by sensor: 5 %, median and 95 %{which}")
    axes = figure.add_subplot()
    positions = np.arange(residuals.height)
    low, median, high = (residuals[name].to_numpy() for name in ("low", "median", "high"))
    axes.errorbar(median, positions, xerr=np.abs([median - low, high - median]), fmt="o", capsize=3)
    labels = [
        f"{escape_label(name)} ({count:,})"
        for name, count in residuals.select("source_id", "observations").rows()
    ]
    axes.set_yticks(positions, labels, fontsize="small")
    axes.axvline(1.0, color="0.6", linestyle="--")
    axes.set(xlabel="distance from the prediction, standard deviations", xlim=(0, None))
    return figure


def draw_track_quality(tracks: pl.DataFrame) -> Figure | None:
    """Draw the errors of tracks and of their element sets, and the distance between both by the sets' age.

    Args:
        tracks: `position_sigma_km`, `prior_sigma_km`, `catalogue_miss_km`, `is_preferred` and
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
    values = {name: _drawable_by_log(column) for name, column in columns.items()}
    all_values = np.concatenate(list(values.values()))
    if len(all_values):
        edges = np.geomspace(all_values.min() / 1.01, all_values.max() * 1.01, 40)
        for name, errors_km in values.items():
            errors.hist(errors_km, bins=edges.tolist(), histtype="step", label=f"{name} ({len(errors_km):,})")
        errors.set(xscale="log")
        errors.legend(fontsize="x-small")
    errors.set(xlabel="one sigma of the position, km", ylabel="objects")
    distant_tracks = tracks.filter(
        pl.col("catalogue_miss_km").is_between(0, float("inf"), closed="none")
        & pl.col("element_age_days").is_finite()
    )
    _scatter_by(
        ages,
        distant_tracks,
        ("element_age_days", "catalogue_miss_km"),
        "is_preferred",
        {True: ("C0", "preferred"), False: ("C1", "not preferred")},
    )
    ages.set(xlabel="age of the element set, days", ylabel="distance from the element set, km")
    if distant_tracks.height:
        ages.set(yscale="log")
    return figure


def _drawable_by_log(column: pl.Series) -> Floats:
    """Return the values that a logarithmic axis can show."""
    values: Floats = column.filter((column > 0) & column.is_finite()).to_numpy()
    return values


def draw_ground_tracks(tracks: pl.DataFrame) -> Figure | None:
    """Draw the points on the Earth below the tracks' positions.

    Args:
        tracks: `x_km`, `y_km`, `z_km` (TEME), `epoch` (UTC) and `is_preferred`; one row per track.
    """
    if tracks.is_empty():
        return None
    positions = tracks.select("x_km", "y_km", "z_km").to_numpy()
    latitude, longitude = compute_subpoints(positions, tracks["epoch"].dt.epoch("us").to_numpy())
    epoch = tracks["epoch"].min()
    moment = f", {epoch:%Y-%m-%d %H:%M} UTC" if isinstance(epoch, datetime) else ""
    figure = new_figure(f"{tracks.height:,} tracks above the Earth{moment}")
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


def draw_alerts(alerts: pl.DataFrame, start: datetime) -> Figure | None:
    """Draw the valid alerts by time and miss distance, colored by priority.

    Args:
        alerts: `tca` (UTC), `miss_distance_km` and `priority`; one row per alert.
        start: The start of the hour, UTC.
    """
    if alerts.is_empty():
        return None
    figure = new_figure(f"Conjunction alerts that hold: {alerts.height:,}, {start:%Y-%m-%d %H:%M} UTC")
    axes = figure.add_subplot()
    counts = dict(alerts.group_by("priority").len().iter_rows())
    colors = {name: (color, f"{name} ({counts.get(name, 0):,})") for name, color in PRIORITY_COLORS.items()}
    by_minute = alerts.with_columns(
        minute=(pl.col("tca") - start).dt.total_milliseconds() / _MINUTE_MILLISECONDS
    )
    _scatter_by(axes, by_minute, ("minute", "miss_distance_km"), "priority", colors, size=18)
    axes.set(
        xlabel="time of closest approach, minutes of the hour",
        ylabel="miss distance, km",
        xlim=(0, 60),
        ylim=(0, None),
    )
    axes.grid(visible=True, alpha=0.3)
    return figure


def compute_subpoints(positions: Floats, micros: Micros) -> tuple[Floats, Floats]:
    """Return geocentric latitude and longitude (degrees) of TEME positions (n, 3) in km at UTC instants."""
    fixed = rotate_z(positions, sidereal_angle(micros))
    latitude: Floats = np.degrees(np.arctan2(fixed[:, 2], np.hypot(fixed[:, 0], fixed[:, 1])))
    longitude: Floats = np.degrees(np.arctan2(fixed[:, 1], fixed[:, 0]))
    return latitude, longitude


def _scatter_by(
    axes: Axes,
    rows: pl.DataFrame,
    columns: tuple[str, str],
    style_column: str,
    styles: Mapping[Any, tuple[str, str]],
    *,
    size: float = 4,
) -> None:
    """Draw a point for each row, in the color and with the label of its value in `style_column`."""
    for value, (color, label) in styles.items():
        rows_of_value = rows.filter(pl.col(style_column) == value)
        x, y = (rows_of_value[name].to_list() for name in columns)
        axes.scatter(x, y, s=size, color=color, label=label)
    axes.legend(fontsize="x-small", loc="upper right")
