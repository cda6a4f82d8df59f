"""Read satellite catalogs: the owner, launch, decay and size of each object.

Supported are CelesTrak's SATCAT as CSV or JSON, Space-Track's class ``satcat`` as JSON, and the short field
names of its mirrors. Validity periods are computed from all entries, so late entries are placed correctly.
"""

from __future__ import annotations

import polars as pl

from branchlake_dagster.sda.gp.encodings import read_csv, read_json
from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.records import EmptyCatalogueError, UnreadableCatalogueError
from branchlake_dagster.sda.gp.rules import (
    MAX_SAT_NO,
    REJECTED_COLUMNS,
    RecordRule,
    RejectReason,
    build_rejections,
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
"""The names of each column in the files. Of several names, the first one with a value in a record counts."""

_ALIASES = tuple(name for names in _COLUMN_ALIASES.values() for name in names)


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
    records = _read_records(decode_gp_file(content, source, limits), source, limits)
    if not records.height:
        raise EmptyCatalogueError(source, "it has no entries", "Check that the download was complete.")
    is_broken = pl.col("broken").is_not_null()
    broken_records = build_rejections(
        records.filter(is_broken), reason=pl.col("broken_as"), message=pl.col("broken")
    )
    entries = records.filter(~is_broken).select(
        "line_number",
        "raw_text",
        *(
            pl.coalesce(_nonempty(name) for name in names if name in records.columns).alias(column)
            if not {*names}.isdisjoint(records.columns)
            else pl.lit(None, dtype=pl.String).alias(column)
            for column, names in _COLUMN_ALIASES.items()
        ),
    )
    if broken_records.is_empty() and entries["sat_no"].null_count() == entries.height:
        raise UnreadableCatalogueError(
            source,
            "it is not a satellite catalog, because it has no NORAD_CAT_ID",
            "Give CelesTrak's or Space-Track's SATCAT.",
        )
    raw_line = pl.concat_str([pl.col(c).fill_null("") for c in _COLUMN_ALIASES], separator=",")
    typed_entries = entries.with_columns(
        raw_text=pl.when(pl.col("raw_text") != "").then("raw_text").otherwise(raw_line),
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
    all_rejected = pl.concat([broken_records, rejected.select(list(REJECTED_COLUMNS))]).sort("line_number")
    return unique_entries.select(list(ENTRY_COLUMNS)), all_rejected


def _read_records(file_text: str, source: str, limits: ReadLimits) -> pl.DataFrame:
    """Read the records of a file as text columns (`encodings`). Raises UnreadableCatalogueError."""
    if file_text.lstrip().startswith(("[", "{")):
        return read_json(file_text, source, limits, _ALIASES)
    if not file_text.strip(" \t\n\x00\x1a"):
        return pl.DataFrame()
    return read_csv(file_text, source, limits, _ALIASES, _COLUMN_ALIASES["sat_no"])


def _nonempty(name: str) -> pl.Expr:
    text = pl.col(name).str.strip_chars()
    return pl.when(text != "").then(text)


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
