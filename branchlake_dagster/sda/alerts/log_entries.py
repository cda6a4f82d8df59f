"""Sort, compare and format entries of the log of alerts, without Spark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import polars as pl

from branchlake_dagster.sda.alerts.entry_names import RETRACT

Entry = Mapping[str, Any]
"""The columns of an entry by name. Times are datetimes with a time zone."""

IDENTITY = ("alert_id", "sequence", "kind")
"""The columns that identify an entry. A subscriber can recognize by them an entry that was sent twice."""
_PAIR = ("sat1_object_designator", "sat2_object_designator")


@dataclass(frozen=True)
class AddedEntries:
    """The entries that a change added, and the number of entries that it removed or altered.

    A log only grows, so `lost_count` is 0 unless somebody rebuilt the table with other entries, or deleted
    rows.
    """

    entries: pl.DataFrame
    lost_count: int


def find_added_entries(added: pl.DataFrame, removed: pl.DataFrame) -> AddedEntries:
    """Compare the rows that a change of the log's table added with those that it removed.

    A rewritten file has its unchanged entries in both frames. These entries were neither added nor lost.
    """
    if removed.is_empty() or added.is_empty():
        return AddedEntries(added, removed.height)
    columns = [*added.columns]
    comparable = [
        pl.col(name).list.join("\n") if isinstance(dtype, pl.List) else pl.col(name)
        for name, dtype in added.schema.items()
    ]
    # The removed rows lack columns that were added to the schema later.
    earlier = removed.select(name for name in columns if name in removed.columns)
    shared = earlier.columns
    lost = earlier.with_columns(one for one in comparable if one.meta.output_name() in shared).join(
        added.with_columns(comparable), on=shared, how="anti", nulls_equal=True
    )
    return AddedEntries(added.join(removed, on=list(IDENTITY), how="anti"), lost.height)


def sort_entries(entries: pl.DataFrame, *first: str) -> pl.DataFrame:
    """Sort entries by the columns `first`, then by alert, sequence and kind: insert before retract."""
    return entries.sort(*first, "alert_id", "sequence", pl.col("kind") == RETRACT)


def latest_entries(entries: pl.DataFrame) -> pl.DataFrame:
    """Return the last entry of each alert."""
    return sort_entries(entries).unique("alert_id", keep="last", maintain_order=True)


def held_alerts(entries: pl.DataFrame) -> pl.DataFrame:
    """Return the entries of the alerts that are valid now: the last entry of each alert, if it is an insert.

    `entries` may be a selection by any column of `ALERT_FIELDS`. A retract has the same values as the insert
    that it retracts, so a selection contains both or neither.
    """
    return latest_entries(entries).filter(pl.col("kind") != RETRACT)


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """Return an entry as values for JSON: times as ISO 8601 in UTC, NaN and infinity as null."""
    return {name: _value_to_json(value) for name, value in entry.items()}


def _value_to_json(value: object) -> object:
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_value_to_json(one) for one in value] if isinstance(value, list) else value


def format_time(moment: datetime) -> str:
    """Return a time, which has a time zone, as ISO 8601 in UTC with microseconds."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def format_entry(entry: Entry) -> str:
    """Return an entry as one line of text."""
    probability = entry["collision_probability"]
    return "  ".join(
        (
            f"{entry['kind']:<7} {entry['sequence']}",
            f"{entry['reason']:<14}",
            f"{entry['priority']:<6}",
            f"{entry['tca'].astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"[:-5],
            " and ".join(str(entry[name]) for name in _PAIR),
            f"{entry['miss_distance_km']:.2f} km",
            "no probability" if probability is None else f"probability {probability:.1e}",
            format_sources(entry),
            str(entry["alert_id"]),
        )
    )


def format_sources(entry: Entry) -> str:
    """Return the sources of both objects' states, each `track` or `element set`."""
    return f"{entry['sat1_state_source']}, {entry['sat2_state_source']}"


def to_entries(frame: pl.DataFrame) -> Iterable[Entry]:
    """Iterate over the rows of a frame as entries."""
    return frame.iter_rows(named=True)
