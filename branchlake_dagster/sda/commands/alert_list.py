"""Read and print alerts for the command `branchlake sda alerts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import polars as pl
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThanOrEqual,
    In,
    LessThan,
    Or,
)
from rich.table import Table
from rich.text import Text

from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.sda.alerts.entry_names import ALERT_TABLE
from branchlake_dagster.sda.alerts.log_entries import (
    Entry,
    entry_to_json,
    format_sources,
    format_time,
    held_alerts,
    sort_entries,
)
from branchlake_dagster.sda.commands.alert_subscribers import Acknowledgement
from branchlake_dagster.sda.commands.published_tables import load_published_table
from branchlake_dagster.sda.commands.row_output import print_table


@dataclass(frozen=True)
class AlertFilter:
    """The alerts to list. Empty fields select all alerts.

    `since` and `until` limit the time of the closest approach; `until` itself is excluded.
    """

    priorities: tuple[str, ...] = ()
    objects: tuple[int, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    alert_id: str | None = None

    def row_filter(self) -> BooleanExpression:
        """Return the filter for PyIceberg, which opens only files that may have such rows."""
        parts: list[BooleanExpression] = []
        if self.priorities:
            parts.append(In("priority", self.priorities))
        if self.objects:
            parts.append(
                Or(In("sat1_object_designator", self.objects), In("sat2_object_designator", self.objects))
            )
        if self.since is not None:
            parts.append(GreaterThanOrEqual("tca", self.since.isoformat()))
        if self.until is not None:
            parts.append(LessThan("tca", self.until.isoformat()))
        if self.alert_id is not None:
            parts.append(EqualTo("alert_id", self.alert_id))
        return all_of(parts)


def all_of(parts: Sequence[BooleanExpression]) -> BooleanExpression:
    """Return the conjunction of filters. Without filters, return a filter that selects all rows."""
    combined: BooleanExpression = AlwaysTrue()
    for part in parts:
        combined = And(combined, part)
    return combined


@dataclass(frozen=True)
class AlertListing:
    """Entries of the log of alerts, and a label of the lake's state from which they were read.

    `entries` is None if the log's table does not exist yet.
    """

    entries: pl.DataFrame | None
    label: str


def read_alerts(reader: LakeReader, alert_filter: AlertFilter, *, history: bool) -> AlertListing:
    """Read the valid alerts, latest approach first. With `history`, read all entries in the log's order."""
    state = reader.find_state()
    table = load_published_table(reader, ALERT_TABLE, state)
    if table is None:
        return AlertListing(None, state.label)
    rows = pl.DataFrame(pl.from_arrow(table.scan(row_filter=alert_filter.row_filter()).to_arrow()))
    if history:
        return AlertListing(sort_entries(rows), state.label)
    held = held_alerts(rows).sort("tca", "alert_id", descending=[True, False])
    return AlertListing(held, state.label)


AcknowledgementsByAlert = Mapping[str, Sequence[Acknowledgement]]


def alert_to_json(entry: Entry, acknowledgements: AcknowledgementsByAlert) -> dict[str, Any]:
    """Return an entry with its acknowledgements as values for JSON."""
    its_acknowledgements = acknowledgements.get(entry["alert_id"], ())
    return {
        **entry_to_json(entry),
        "acknowledged": any(one.sequence >= entry["sequence"] for one in its_acknowledgements),
        "acknowledgements": [
            {
                "subscriber": one.subscriber,
                "sequence": one.sequence,
                "acknowledged_at": format_time(one.acknowledged_at),
                "note": one.note,
            }
            for one in its_acknowledgements
        ],
    }


def csv_columns() -> list[str]:
    """Return the columns of alerts in CSV, as `flatten_for_csv` has them of a published log."""
    from branchlake_dagster.sda.contracts import ConjunctionAlert

    return [*ConjunctionAlert.to_schema().columns, "acknowledged"]


def flatten_for_csv(entries: pl.DataFrame, acknowledgements: AcknowledgementsByAlert) -> pl.DataFrame:
    """Return the entries without nested columns, and with the column `acknowledged`."""
    lists = [name for name, dtype in entries.schema.items() if isinstance(dtype, pl.List)]
    texts = [_format_acknowledged(entry, acknowledgements) for entry in entries.iter_rows(named=True)]
    return entries.with_columns(
        *(pl.col(name).list.join(" ") for name in lists),
        pl.Series("acknowledged", texts, dtype=pl.String),
    )


def show_alerts(
    entries: pl.DataFrame, acknowledgements: AcknowledgementsByAlert, *, history: bool, limit: int
) -> None:
    """Print at most `limit` entries as a table; 0 prints all."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("closest approach", "objects", "priority"):
        table.add_column(name)
    for name in ("miss, km", "probability", "sequence"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (*(("entry", "reason", "reported") if history else ()), "sources", "acknowledged"):
        table.add_column(name)
    table.add_column("alert", no_wrap=True)
    for entry in (entries.head(limit) if limit else entries).iter_rows(named=True):
        probability = entry["collision_probability"]
        cells = [
            f"{entry['tca']:%Y-%m-%d %H:%M:%S.%f}"[:-5],
            f"{entry['sat1_object_designator']} and {entry['sat2_object_designator']}",
            entry["priority"],
            f"{entry['miss_distance_km']:.2f}",
            "" if probability is None else f"{probability:.1e}",
            str(entry["sequence"]),
        ]
        if history:
            cells += [entry["kind"], entry["reason"], f"{entry['reported_at']:%Y-%m-%d %H:%M:%S}"]
        cells += [format_sources(entry), _format_acknowledged(entry, acknowledgements), entry["alert_id"]]
        table.add_row(*(Text(cell) for cell in cells))
    print_table(table)


def _format_acknowledged(entry: Entry, acknowledgements: AcknowledgementsByAlert) -> str:
    """Format who acknowledged the alert and when.

    An acknowledgement of an earlier version includes that version's sequence number.
    """
    return "; ".join(
        f"{one.subscriber} {one.acknowledged_at:%Y-%m-%d %H:%M}"
        + ("" if one.sequence >= entry["sequence"] else f" (only sequence {one.sequence})")
        for one in acknowledgements.get(entry["alert_id"], ())
    )
