"""Pictures of an hour: what is drawn is what the frames say."""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.orbits.frames import site_teme
from branchlake_dagster.sda.reports.hour_pictures import (
    compute_subpoints,
    draw_alerts,
    draw_ground_tracks,
    draw_outcomes,
    draw_residuals,
    draw_track_quality,
    select_worst_sensors,
)
from branchlake_dagster.sda.reports.pictures import draw_chart, to_markdown, to_png
from branchlake_dagster_tests.suite.soak import soaking

HOUR = datetime(2026, 8, 8, 3, tzinfo=UTC)


def tracks(count: int = 50) -> pl.DataFrame:
    numbers = np.random.default_rng(5).uniform(0.1, 1.0, (count, 7))
    return pl.DataFrame(
        {
            "x_km": 7000 * numbers[:, 0],
            "y_km": -7000 * numbers[:, 1],
            "z_km": 7000 * numbers[:, 2],
            "epoch": [HOUR] * count,
            "is_preferred": (numbers[:, 3] > 0.5).tolist(),
            "position_sigma_km": numbers[:, 3],
            "prior_sigma_km": [None if k % 7 == 0 else 10 * numbers[k, 4] for k in range(count)],
            "catalogue_miss_km": numbers[:, 5],
            "element_age_days": numbers[:, 6],
        }
    )


def test_bars_have_the_counts_of_each_result():
    rows = [("radar", "confirmed", 90), ("radar", "uncorrelated", 10), ("_$x$", "claimed", 5)]
    frame = pl.DataFrame(rows, schema=["source_kind", "result", "observations"], orient="row")
    figure = draw_outcomes(frame)
    (axes,) = figure.axes
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert widths == {
        "confirmed": [0, 90],
        "reassigned": [0, 0],
        "claimed": [5, 0],
        "uncorrelated": [0, 10],
    }
    assert [bar.get_x() for bar in axes.containers[-1]] == [5, 90]
    assert to_png(figure).startswith(b"\x89PNG")


def test_the_sensors_with_the_largest_residuals_are_drawn():
    frame = pl.DataFrame(
        {
            "source_id": [f"radar-{k}" for k in range(40)],
            "observations": [100] * 40,
            "low": [0.1] * 40,
            "median": [0.5 + 0.1 * k for k in range(40)],
            "high": [9.0] * 40,
        }
    )
    worst = select_worst_sensors(frame.sample(fraction=1.0, shuffle=True, seed=3))
    figure = draw_residuals(worst, 40)
    assert "40 sensors" in figure.get_suptitle()
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"radar-{k} (100)" for k in range(15, 40)]
    assert axes.containers[0][0].get_xdata().tolist() == pytest.approx([0.5 + 0.1 * k for k in range(15, 40)])
    to_png(figure)


def test_tracks_are_drawn_by_preference():
    frame = tracks()
    figure = draw_track_quality(frame)
    errors, ages = figure.axes
    preferred = int(frame["is_preferred"].sum())
    labels = [text.get_text() for text in errors.get_legend().get_texts()]
    assert set(labels) == {
        f"track, preferred ({preferred})",
        f"track, not preferred ({50 - preferred})",
        f"element set ({frame['prior_sigma_km'].count()})",
    }
    assert [len(points.get_offsets()) for points in ages.collections] == [preferred, 50 - preferred]
    to_png(figure)
    # No track has an error that can be drawn on a logarithmic axis.
    without = frame.with_columns(
        position_sigma_km=pl.lit(None, pl.Float64), prior_sigma_km=pl.lit(None, pl.Float64)
    )
    to_png(draw_track_quality(without))


def test_subpoints_are_the_longitudes_of_sites_at_the_equator():
    longitudes = np.array([-170.0, 0.0, 47.5])
    micros = np.full(3, int(HOUR.timestamp() * 1e6))
    positions, _ = site_teme(np.zeros(3), longitudes, np.full(3, 400.0), micros)
    latitude, longitude = compute_subpoints(positions, micros)
    assert latitude == pytest.approx([0.0] * 3, abs=1e-9)
    assert longitude == pytest.approx(longitudes)
    figure = draw_ground_tracks(tracks())
    assert sum(len(points.get_offsets()) for points in figure.axes[0].collections) == 50
    to_png(figure)


def test_alerts_are_drawn_by_priority():
    frame = pl.DataFrame(
        {
            "tca": [HOUR + timedelta(minutes=k) for k in range(3)],
            "miss_distance_km": [0.1, 0.2, 0.3],
            "priority": ["high", "low", "low"],
        }
    )
    figure = draw_alerts(frame, HOUR)
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["high (1)", "medium (0)", "low (2)"]
    assert [len(points.get_offsets()) for points in axes.collections] == [1, 0, 2]
    assert axes.get_xlim() == (0, 60)
    assert axes.collections[2].get_offsets()[:, 0].tolist() == [1.0, 2.0]
    to_png(figure)


def test_nothing_is_drawn_of_an_empty_frame():
    empty = pl.DataFrame()
    assert draw_outcomes(empty) is None
    assert draw_residuals(empty, 0) is None
    assert draw_track_quality(empty) is None
    assert draw_ground_tracks(empty) is None
    assert draw_alerts(empty, HOUR) is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, None])
def test_values_that_no_axis_can_show_are_left_out(value):
    names = ["position_sigma_km", "prior_sigma_km", "catalogue_miss_km", "element_age_days"]
    for count in (1, 5) if soaking() else (1,):
        one = tracks(count).with_columns(pl.lit(value, pl.Float64).alias(name) for name in names)
        to_png(draw_track_quality(one))
        mixed = pl.concat([one.select(tracks().columns), tracks()])
        to_png(draw_track_quality(mixed))
        states = tracks(count).with_columns(x_km=pl.lit(value, pl.Float64))
        to_png(draw_ground_tracks(states))
    residuals = pl.DataFrame(
        {"source_id": ["a", "b"], "observations": [1, 2], "low": 0.0, "median": [value, 1.0], "high": 2.0},
        schema_overrides={"median": pl.Float64},
    )
    worst = select_worst_sensors(residuals)
    assert worst["source_id"].to_list()[-1] == "b"
    to_png(draw_residuals(worst, 2))


def test_a_long_name_of_a_sensor_leaves_room_for_the_picture():
    name = "$" + "radar" * 200
    frame = pl.DataFrame(
        {"source_id": [name], "observations": [1], "low": [0.1], "median": [1.0], "high": [2.0]}
    )
    figure = draw_residuals(frame, 1)
    to_png(figure)
    assert figure.axes[0].get_position().width > 0.3


def test_a_chart_without_points_or_with_odd_names_is_still_a_picture():
    to_png(draw_chart("a < b & $c_", "x", "y", {}))
    figure = draw_chart(
        "one", "x", "y", {"<$": [(1.0, 1.0)], "_&": []}, dots={"z": [(1.0, 2.0)]}, log=(True, True)
    )
    assert to_markdown(figure, "it").startswith("![it](data:image/png;base64,")
