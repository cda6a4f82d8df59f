"""Read observations and tracks for `branchlake sda observations` and `branchlake sda tracks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import polars as pl
from pyiceberg.expressions import (
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Or,
)
from pyiceberg.table import Table

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.history.change import ChangedFile
from branchlake_dagster.history.ranges import ColumnRanges, union_ranges
from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.query.reference import LakeState
from branchlake_dagster.sda.commands.alert_list import all_of
from branchlake_dagster.sda.commands.published_tables import load_published_table

OBSERVATION_TABLE = "sda.observations"
ASSOCIATION_TABLE = "sda.associations"
TRACK_TABLE = "sda.fused_tracks"
UNCORRELATED = "uncorrelated"
_PREFERRED = "is_preferred"
_WINDOW = timedelta(hours=1)
_ASSOCIATED = {
    "sat_no": "associated_sat_no",
    "result": "association_result",
    "reason": "association_reason",
    "normalized_distance": "normalized_distance",
    "candidates": "candidates",
}
"""Columns of an association, and their names in the rows of observations."""
_ASSOCIATION_SCHEMA: dict[str, pl.DataType] = {
    "observation_id": pl.String(),
    "associated_sat_no": pl.Int64(),
    "association_result": pl.String(),
    "association_reason": pl.String(),
    "normalized_distance": pl.Float64(),
    "candidates": pl.Int64(),
}


class ColumnNotThere(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A filter needs a column that the published table does not have. `subject` names the column."""


@dataclass(frozen=True)
class MeasurementFilter:
    """The observations or tracks to list. Empty fields select all.

    Without times, the newest hour in the table is listed.
    """

    objects: tuple[int, ...] = ()
    source_kinds: tuple[str, ...] = ()
    sensors: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    def with_times(self, table: Table) -> MeasurementFilter:
        """Return the filter with times. If it has none, the times are those of the table's newest hour."""
        if self.since is not None or self.until is not None:
            return self
        hour = find_newest_hour(table)
        return self if hour is None else replace(self, since=hour, until=hour + _WINDOW)

    def time_filter(self, column: str) -> list[BooleanExpression]:
        """Return the conditions on the column `column` and on the hour, by which partitions are selected."""
        parts: list[BooleanExpression] = []
        if self.since is not None:
            parts.append(GreaterThanOrEqual(column, self.since.isoformat()))
            parts.append(GreaterThan("window_start", (self.since - _WINDOW).isoformat()))
        if self.until is not None:
            parts.append(LessThan(column, self.until.isoformat()))
            parts.append(LessThan("window_start", self.until.isoformat()))
        return parts

    def sensor_filter(self) -> list[BooleanExpression]:
        """Return the conditions on the sensor and its kind."""
        parts: list[BooleanExpression] = []
        if self.source_kinds:
            parts.append(In("source_kind", self.source_kinds))
        if self.sensors:
            parts.append(In("source_id", self.sensors))
        return parts

    def label(self) -> str:
        """Format the times, or return an empty text without times."""
        since = f" from {self.since:%Y-%m-%d %H:%M:%S}" if self.since else ""
        until = f" until {self.until:%Y-%m-%d %H:%M:%S}" if self.until else ""
        return f"{since}{until}" + (" UTC" if since or until else "")


@dataclass(frozen=True)
class MeasurementListing:
    """Rows, oldest first, and a label of the lake's state from which they were read.

    `rows` is None if the table does not exist yet.
    """

    rows: pl.DataFrame | None
    label: str


def find_newest_hour(table: Table) -> datetime | None:
    """Return the newest hour that has rows, from the table's manifests. None if the table has no rows."""
    files = [ChangedFile(task.file, 0, 0) for task in table.scan().plan_files()]
    column_ranges = ColumnRanges(table.metadata, "window_start", table=".".join(table.name()))
    span = union_ranges(column_ranges.ranges_of(file) for file in files).span
    return None if span is None else span.high.replace(minute=0, second=0, microsecond=0)


def observation_columns() -> list[str]:
    """Return the columns that `read_observations` reads of a published table."""
    from branchlake_dagster.sda.contracts import Observation

    return [
        *Observation.to_schema().columns,
        *(name for name in _ASSOCIATION_SCHEMA if name != "observation_id"),
    ]


def track_columns() -> list[str]:
    """Return the columns that `read_tracks` reads of a published table, for the default kinds of sensor."""
    from branchlake_dagster.sda.estimation.arrow import track_schema
    from branchlake_dagster.sda.sensors.native import SOURCE_KINDS

    return list(map(str, track_schema(SOURCE_KINDS).names))


def read_observations(
    reader: LakeReader, wanted: MeasurementFilter, *, only_uncorrelated: bool = False
) -> MeasurementListing:
    """Read observations with their associations, only from partitions of the selected hours.

    An observation belongs to an object if it was associated with the object. Before it is associated, it
    belongs to the object that its source claims. With `only_uncorrelated`, only observations that belong to
    no object are read, and `wanted.objects` selects by the claim.
    """
    state = reader.find_state()
    table = load_published_table(reader, OBSERVATION_TABLE, state)
    if table is None:
        return MeasurementListing(None, state.label)
    timed = wanted.with_times(table)
    associations = _read_associations(reader, state, timed, only_uncorrelated=only_uncorrelated)
    parts = [*timed.time_filter("sensor_timestamp"), *timed.sensor_filter()]
    if only_uncorrelated or timed.objects:
        parts.append(_bounds_of(associations, timed.objects if not only_uncorrelated else ()))
    rows = _scan(table, parts)
    beside = associations.drop("sensor_timestamp", "source_id")
    joined = rows.join(beside, on="observation_id", how="inner" if only_uncorrelated else "left")
    if timed.objects:
        claims = pl.col("sat_no").is_in(timed.objects)
        is_associated = pl.col("associated_sat_no").is_in(timed.objects)
        # An uncorrelated observation can only be selected by its claim.
        is_open = pl.col("association_result").is_null() | pl.lit(only_uncorrelated)
        joined = joined.filter(
            is_associated.fill_null(value=False) | (is_open & claims.fill_null(value=False))
        )
    return MeasurementListing(
        joined.sort("sensor_timestamp", "observation_id"), f"{state.label},{timed.label()}".rstrip(",")
    )


def _read_associations(
    reader: LakeReader, state: LakeState, wanted: MeasurementFilter, *, only_uncorrelated: bool
) -> pl.DataFrame:
    """Read the associations of the selected hours. Without a table the result is empty."""
    times = {"sensor_timestamp": pl.Datetime("us", "UTC"), "source_id": pl.String()}
    table = load_published_table(reader, ASSOCIATION_TABLE, state)
    if table is None:
        return pl.DataFrame(schema={**_ASSOCIATION_SCHEMA, **times})
    parts = [*wanted.time_filter("sensor_timestamp"), *wanted.sensor_filter()]
    if only_uncorrelated:
        parts.append(EqualTo("result", UNCORRELATED))
        if wanted.objects:
            parts.append(In("claimed_sat_no", wanted.objects))
    elif wanted.objects:
        # Associations of claims are read too, because they show that the object is another one.
        parts.append(Or(In("sat_no", wanted.objects), In("claimed_sat_no", wanted.objects)))
    rows = _scan(table, parts, columns=("observation_id", *times, *_ASSOCIATED))
    return rows.rename(_ASSOCIATED)


def _bounds_of(associations: pl.DataFrame, objects: Sequence[int]) -> BooleanExpression:
    """Return a condition for the files that may have these observations, or claims of the objects."""
    claims = [In("sat_no", objects)] if objects else []
    if associations.is_empty():
        return claims[0] if claims else EqualTo("observation_id", "")
    times = associations["sensor_timestamp"]
    inside = all_of(
        [
            GreaterThanOrEqual("sensor_timestamp", times.min().isoformat()),  # type: ignore[union-attr]
            LessThanOrEqual("sensor_timestamp", times.max().isoformat()),  # type: ignore[union-attr]
            In("source_id", associations["source_id"].unique().to_list()),
        ]
    )
    return Or(inside, claims[0]) if claims else inside


def read_tracks(
    reader: LakeReader, wanted: MeasurementFilter, *, only_preferred: bool = False
) -> MeasurementListing:
    """Read tracks, ordered by epoch and object, only from partitions of the selected hours.

    If `wanted` names kinds of sensors, only tracks that used at least one observation of each kind are read.
    Raises ColumnNotThere if the table does not have the column of a filter yet.
    """
    state = reader.find_state()
    table = load_published_table(reader, TRACK_TABLE, state)
    if table is None:
        return MeasurementListing(None, state.label)
    timed = wanted.with_times(table)
    parts = timed.time_filter("epoch")
    if timed.objects:
        parts.append(In("sat_no", timed.objects))
    for kind in timed.source_kinds:
        parts.append(GreaterThan(_require_column(table, f"n_{kind}"), 0))
    if only_preferred:
        parts.append(EqualTo(_require_column(table, _PREFERRED), True))
    rows = _scan(table, parts).sort("epoch", "sat_no")
    return MeasurementListing(rows, f"{state.label},{timed.label()}".rstrip(","))


def _require_column(table: Table, name: str) -> str:
    if name not in table.schema().column_names:
        raise ColumnNotThere(
            f"The published tracks do not have the column {name} yet.",
            table=TRACK_TABLE,
            subject=name,
            hint="Publish an hour of tracks with this version, or leave the option out.",
        )
    return name


def with_position_sigma(tracks: pl.DataFrame) -> pl.DataFrame:
    """Return the tracks with ``position_sigma_km``, one standard deviation of the position, km.

    Tables of earlier versions lack the column. It is computed as for the table: the square root of the sum of
    the three variances, enlarged if the residuals are larger than the stated noise.
    """
    if "position_sigma_km" in tracks.columns:
        return tracks
    variance = (pl.col("cx_x") + pl.col("cy_y") + pl.col("cz_z")) * pl.max_horizontal("chi2_per_dof", 1.0)
    return tracks.with_columns(variance.sqrt().alias("position_sigma_km"))


def _scan(
    table: Table, parts: Sequence[BooleanExpression], *, columns: Sequence[str] = ("*",)
) -> pl.DataFrame:
    scan = table.scan(row_filter=all_of(parts), selected_fields=tuple(columns))
    return pl.DataFrame(pl.from_arrow(scan.to_arrow()))
