"""Read satellite catalogs: the owner, launch, decay and size of each object.

Supported are CelesTrak's SATCAT as CSV or JSON, Space-Track's class ``satcat`` as JSON, and the short field
names of its mirrors. Validity periods are computed from all entries, so late entries are placed correctly.
"""

from __future__ import annotations

import io
import json
from typing import Any

import polars as pl

from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.records import EmptyCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.gp.rules import (
    MAX_SAT_NO,
    REJECTED_COLUMNS,
    RecordRule,
    RejectReason,
    split_by_rules,
)

SATCAT_PREFIX = "satcat"
"""Snapshot ids of satellite catalogs begin with this prefix."""

ENTRY_COLUMNS: dict[str, pl.DataType] = {
    "sat_no": pl.Int64(),
    "object_name": pl.String(),
    "object_id": pl.String(),
    "object_type": pl.String(),
    "owner": pl.String(),
    "launch_date": pl.Date(),
    "decay_date": pl.Date(),
    "period_min": pl.Float64(),
    "inclination_deg": pl.Float64(),
    "apogee_km": pl.Float64(),
    "perigee_km": pl.Float64(),
    "rcs_m2": pl.Float64(),
    "rcs_size": pl.String(),
}
"""Columns of an entry.

The orbit's values (period, inclination, apogee, perigee) change daily, so they do not start a new validity
period.
"""

EFFECTIVE_COLUMNS = (
    "object_name",
    "object_id",
    "object_type",
    "owner",
    "launch_date",
    "decay_date",
    "rcs_m2",
    "rcs_size",
)

_COLUMN_ALIASES = {
    "sat_no": ("NORAD_CAT_ID", "c"),
    "object_name": ("OBJECT_NAME", "SATNAME", "n"),
    "object_id": ("OBJECT_ID", "INTLDES", "i"),
    "object_type": ("OBJECT_TYPE", "t"),
    "owner": ("OWNER", "COUNTRY", "o"),
    "launch_date": ("LAUNCH_DATE", "LAUNCH", "ld"),
    "decay_date": ("DECAY_DATE", "DECAY", "dd"),
    "period_min": ("PERIOD", "p"),
    "inclination_deg": ("INCLINATION", "inc"),
    "apogee_km": ("APOGEE", "a"),
    "perigee_km": ("PERIGEE", "pe"),
    "rcs_m2": ("RCS", "rcs"),
    "rcs_size": ("RCS_SIZE",),
}


def is_satcat(snapshot_id: str) -> bool:
    """Return whether a snapshot id denotes a satellite catalog."""
    return snapshot_id.lower().startswith(SATCAT_PREFIX)


def read_satcat(content: bytes, source: str, limits: ReadLimits) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read entries (``ENTRY_COLUMNS``) sorted by ``sat_no``, and rejected records (``REJECTED_COLUMNS``).

    Raises:
        EmptyCatalogueError: the file has no entry.
        TooLargeCatalogueError: the file unpacks to more than the limit.
        UnreadableCatalogueError: the file is neither JSON nor CSV, or has no column for the catalog number.

    """
    file_text = decode_gp_file(content, source, limits)
    frame = (
        _read_json(file_text, source)
        if file_text.lstrip().startswith(("[", "{"))
        else _read_csv(file_text, source)
    )
    source_columns = {
        column: next((name for name in names if name in frame.columns), None)
        for column, names in _COLUMN_ALIASES.items()
    }
    if not frame.height:
        raise EmptyCatalogueError(source, "it has no entries", "Check that the download was complete.")
    if source_columns["sat_no"] is None:
        raise UnreadableCatalogueError(
            source,
            "it is not a satellite catalog, because it has no NORAD_CAT_ID",
            "Give CelesTrak's or Space-Track's SATCAT.",
        )
    stripped_columns = {
        column: (pl.col(name) if name else pl.lit(None, dtype=pl.String)).str.strip_chars()
        for column, name in source_columns.items()
    }
    entries = frame.select(
        pl.when(text != "").then(text).alias(column) for column, text in stripped_columns.items()
    ).with_row_index("line_number", offset=1)
    raw_line = pl.concat_str([pl.col(c).fill_null("") for c in _COLUMN_ALIASES], separator=",")
    typed_entries = entries.with_columns(
        raw_text=raw_line,
        **{
            column: pl.col(column).str.to_date("%Y-%m-%d", strict=False)
            if kind == pl.Date()
            else pl.col(column).cast(kind, strict=False)
            for column, kind in ENTRY_COLUMNS.items()
        },
        _dates=pl.concat_str([pl.col(c).fill_null("") for c in ("launch_date", "decay_date")], separator=" "),
        _unread=pl.col("decay_date").is_not_null()
        & pl.col("decay_date").str.to_date("%Y-%m-%d", strict=False).is_null(),
    )
    accepted, rejected = split_by_rules(
        typed_entries,
        [
            RecordRule(
                RejectReason.CATALOGUE_NUMBER,
                "sat_no",
                (~pl.col("sat_no").is_between(1, MAX_SAT_NO)).fill_null(True),
                "the entry has no catalog number",
            ),
            # If the unreadable date became null, a decayed object would look as if it still flew.
            RecordRule(
                RejectReason.FIELD,
                "decay_date",
                pl.col("_unread"),
                pl.format("cannot read the dates {}", pl.col("_dates")),
            ),
        ],
    )
    unique_entries = accepted.unique("sat_no", keep="last", maintain_order=True).sort("sat_no")
    return unique_entries.select(list(ENTRY_COLUMNS)), rejected.select(list(REJECTED_COLUMNS))


def _read_json(file_text: str, source: str) -> pl.DataFrame:
    try:
        decoded_json = json.loads(file_text, parse_float=str, parse_int=str)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnreadableCatalogueError(
            source, f"the JSON is invalid ({error})", "Fetch the file again."
        ) from error
    alias_names = [name for names in _COLUMN_ALIASES.values() for name in names]
    rows: list[dict[str, Any]] = (
        [r for r in decoded_json if isinstance(r, dict)] if isinstance(decoded_json, list) else []
    )
    present_names = {name for name in alias_names if any(name in row for row in rows[:1000])}
    schema = {name: pl.String() for name in alias_names if name in present_names}
    return pl.DataFrame(rows, schema=schema, strict=False, orient="row") if schema else pl.DataFrame()


def _read_csv(file_text: str, source: str) -> pl.DataFrame:
    try:
        return pl.read_csv(io.BytesIO(file_text.encode()), infer_schema=False)
    except pl.exceptions.PolarsError as error:
        raise UnreadableCatalogueError(
            source, f"the CSV is invalid ({error})", "Fetch the file again."
        ) from error


def build_validity_periods(entries: pl.DataFrame) -> pl.DataFrame:
    """Return the periods in which an object's `EFFECTIVE_COLUMNS` were unchanged.

    ``valid_from`` is the first collection with these values. ``valid_to`` is the first collection with other
    values, or null for the current period. ``snapshot_id`` is the snapshot of ``valid_from``.
    """
    ordered = entries.sort("sat_no", "collected_at", "snapshot_id")
    facts = pl.struct(EFFECTIVE_COLUMNS)
    is_changed = (facts.shift() != facts).fill_null(True) | (
        pl.col("sat_no").shift() != pl.col("sat_no")
    ).fill_null(True)
    period_starts = ordered.filter(is_changed)
    period_end = pl.when(pl.col("sat_no").shift(-1) == pl.col("sat_no")).then(
        pl.col("collected_at").shift(-1)
    )
    return period_starts.select(
        "sat_no",
        *EFFECTIVE_COLUMNS,
        pl.col("collected_at").alias("valid_from"),
        period_end.alias("valid_to"),
        "snapshot_id",
    )
