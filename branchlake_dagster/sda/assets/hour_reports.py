"""Asset `hour_reports`: pictures of an hour's observations, associations, tracks and alerts."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg
import polars as pl
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster import column_metadata, consumes, range_, table_metadata
from branchlake_dagster.sda.alerts.entry_names import INSERT
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.contracts import HourReport
from branchlake_dagster.sda.partitions import windows
from branchlake_dagster.sda.reports.hour_pictures import (
    draw_alerts,
    draw_ground_tracks,
    draw_outcomes,
    draw_residuals,
    draw_track_quality,
    select_worst_sensors,
)
from branchlake_dagster.sda.reports.pictures import picture_markdown, to_png
from branchlake_dagster.sda.windows import window_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOUR_REPORTS = dg.AssetKey(["sda", "hour_reports"])
GROUP = "reports"
REPORT_SCHEMA = pa.schema(
    [
        pa.field("window_start", pa.timestamp("us", "UTC")),
        pa.field("name", pa.string()),
        pa.field("title", pa.string()),
        pa.field("drawn_rows", pa.int64()),
        pa.field("media_type", pa.string()),
        pa.field("image", pa.binary()),
    ]
)
_INPUTS = (ASSOCIATIONS, FUSED_TRACKS, CONJUNCTION_ALERTS)
_DAY_MICROS = 86_400e6


@dg.asset(
    key=HOUR_REPORTS,
    group_name=GROUP,
    partitions_def=windows,
    owners=OWNERS,
    kinds={"iceberg", "matplotlib"},
    freshness_policy=OF_WINDOWS,
    ins={
        "associations": dg.AssetIn(ASSOCIATIONS),
        "fused_tracks": dg.AssetIn(FUSED_TRACKS),
        "alerts": dg.AssetIn(CONJUNCTION_ALERTS),
    },
    metadata=table_metadata(partition_by="window_start", require_checks=True)
    | consumes({key: range_(optional=True) for key in _INPUTS}, on="window_start")
    | column_metadata(HourReport),
)
def hour_reports(
    context: dg.AssetExecutionContext, associations: DataFrame, fused_tracks: DataFrame, alerts: DataFrame
) -> pa.Table:
    """Draw pictures of the hour: results of associations, residuals of sensors, tracks and alerts.

    The materialization shows them too. Spark aggregates the rows first, so at most one row per object of the
    catalog is drawn.
    """
    start = datetime.fromtimestamp(window_of(context)[0] / 1e6, UTC)
    rows = []
    for name, drawn_rows, figure in _draw_pictures(associations, fused_tracks, alerts, start):
        title, png = figure.get_suptitle(), to_png(figure)
        rows.append(
            {
                "window_start": start,
                "name": name,
                "title": title,
                "drawn_rows": drawn_rows.height,
                "media_type": "image/png",
                "image": png,
            }
        )
        context.add_output_metadata({name: dg.MetadataValue.md(picture_markdown(png, title))})
    return pa.Table.from_pylist(rows, REPORT_SCHEMA)


def _draw_pictures(
    associations: DataFrame, fused_tracks: DataFrame, alerts: DataFrame, start: datetime
) -> Iterator[tuple[str, pl.DataFrame, "Figure"]]:
    """Yield the name, the drawn rows and the figure of each picture that has something to show."""
    # A table that does not exist yet is a frame without columns.
    figures: list[tuple[str, pl.DataFrame, Figure | None]] = []
    if associations.columns:
        outcomes, residuals = count_outcomes(associations), measure_residuals(associations)
        worst = select_worst_sensors(residuals)
        figures += [
            ("outcomes", outcomes, draw_outcomes(outcomes)),
            ("residuals", worst, draw_residuals(worst, residuals.height)),
        ]
    if fused_tracks.columns:
        tracks = select_tracks(fused_tracks)
        figures += [
            ("track_quality", tracks, draw_track_quality(tracks)),
            ("ground_tracks", tracks, draw_ground_tracks(tracks)),
        ]
    if alerts.columns:
        holding = select_holding(alerts)
        figures += [("alerts", holding, draw_alerts(holding, start))]
    for name, rows, figure in figures:
        if figure is not None:
            yield name, rows, figure


def count_outcomes(associations: DataFrame) -> pl.DataFrame:
    """Count observations by `source_kind` and `result`; the count is the column `observations`."""
    return _collect(associations.groupBy("source_kind", "result").agg(F.count("*").alias("observations")))


def measure_residuals(associations: DataFrame) -> pl.DataFrame:
    """Return quantiles of each sensor's normalized distances between observations and predictions.

    The columns `low`, `median` and `high` are the quantiles 5 %, 50 % and 95 %, in standard deviations per
    measured value.
    """
    ratio = F.col("normalized_distance") / F.sqrt("degrees_of_freedom")
    quantiles = F.percentile_approx(ratio, [0.05, 0.5, 0.95], 1000)
    by_sensor = associations.where("normalized_distance IS NOT NULL").groupBy("source_id")
    return _collect(
        by_sensor.agg(F.count("*").alias("observations"), quantiles.alias("quantiles")).select(
            "source_id",
            "observations",
            *(F.col("quantiles")[place].alias(name) for place, name in enumerate(("low", "median", "high"))),
        )
    )


def select_tracks(fused_tracks: DataFrame) -> pl.DataFrame:
    """Return the columns of each track that the pictures show, also for tables without the newest columns."""
    age_days = (F.unix_micros("epoch") - F.unix_micros("catalogue_epoch")) / _DAY_MICROS
    # Hours that were computed before a column existed have no value, or no column.
    present = set(fused_tracks.columns)
    is_preferred = F.coalesce("is_preferred", F.lit(False)) if "is_preferred" in present else F.lit(False)
    prior_sigma_km = F.col("prior_sigma_km") if "prior_sigma_km" in present else F.lit(None).cast("double")
    return _collect(
        fused_tracks.select(
            *("x_km", "y_km", "z_km", "epoch", "catalogue_miss_km", "position_sigma_km"),
            is_preferred.alias("is_preferred"),
            prior_sigma_km.alias("prior_sigma_km"),
            age_days.alias("element_age_days"),
        )
    )


def select_holding(alerts: DataFrame) -> pl.DataFrame:
    """Return time, miss distance and priority of the valid alerts: those whose last entry is an insert."""
    last = alerts.groupBy("alert_id").agg(
        F.max_by(
            F.struct("kind", "tca", "miss_distance_km", "priority"), F.struct("sequence", F.col("kind"))
        ).alias("entry")
    )
    return _collect(
        last.where(F.col("entry.kind") == INSERT).select(
            "entry.tca", "entry.miss_distance_km", "entry.priority"
        )
    )


def _collect(frame: DataFrame) -> pl.DataFrame:
    """Return the rows, with times in UTC: Spark returns them in the session's time zone."""
    rows = pl.DataFrame(frame.toArrow())
    return rows.with_columns(pl.col(pl.Datetime("us", "*")).dt.convert_time_zone("UTC"))
