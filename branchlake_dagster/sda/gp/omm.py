"""Convert the keywords of Orbit Mean-Elements Messages (CCSDS 502.0-B-3) to typed element sets.

All encodings arrive as one frame of keyword columns (see `encodings`), so the same rules apply to each.
"""

from __future__ import annotations

import polars as pl

from branchlake_dagster.sda.gp.records import CANDIDATE_COLUMNS
from branchlake_dagster.sda.gp.rules import (
    MAX_SAT_NO,
    REJECTED_COLUMNS,
    RecordRule,
    RejectReason,
    ephemeris_rule,
    range_rules,
    split_by_rules,
)

_REQUIRED_NUMBERS = {
    "MEAN_MOTION": "mean_motion",
    "ECCENTRICITY": "eccentricity",
    "INCLINATION": "inclination",
    "RA_OF_ASC_NODE": "ra_of_asc_node",
    "ARG_OF_PERICENTER": "arg_of_pericenter",
    "MEAN_ANOMALY": "mean_anomaly",
}
_OPTIONAL_NUMBERS = {
    "BSTAR": "bstar",
    "MEAN_MOTION_DOT": "mean_motion_dot",
    "MEAN_MOTION_DDOT": "mean_motion_ddot",
}
"""These keywords default to zero, as in the TLE format."""

_OPTIONAL_COUNTERS = {
    "EPHEMERIS_TYPE": "ephemeris_type",
    "ELEMENT_SET_NO": "element_set_no",
    "REV_AT_EPOCH": "rev_at_epoch",
}
_TEXT_KEYWORDS = {
    "OBJECT_NAME": "object_name",
    "OBJECT_ID": "object_id",
    "CLASSIFICATION_TYPE": "classification_type",
}
_SUPPORTED_VALUES = {
    "CENTER_NAME": ("EARTH",),
    "REF_FRAME": ("TEME",),
    "TIME_SYSTEM": ("UTC",),
    "MEAN_ELEMENT_THEORY": ("SGP4", "SGP", "SGP/SGP4"),
}
"""The values that an SGP4 propagator supports. A message with another value is rejected; a missing value is
accepted."""

KEYWORDS = (
    *("EPOCH", "NORAD_CAT_ID"),
    *_REQUIRED_NUMBERS,
    *_OPTIONAL_NUMBERS,
    *_OPTIONAL_COUNTERS,
    *_TEXT_KEYWORDS,
    *_SUPPORTED_VALUES,
)
_EPOCH_FORMATS = ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%jT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f")
_FIRST_YEAR = 1957


def elements_from_keywords(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Convert a frame of OMM keywords (see `encodings`) to typed candidate element sets and rejected rows.

    Keyword columns may be missing. The ``raw_text`` of a rejected row without text lists its keywords.

    Returns:
        Candidates with ``CANDIDATE_COLUMNS`` and rejected rows with ``REJECTED_COLUMNS``.
    """
    missing_keywords = [k for k in KEYWORDS if k not in frame.columns]
    frame = frame.with_columns(
        *(pl.lit(None, dtype=pl.String).alias(k) for k in missing_keywords),
        *(pl.lit(None, dtype=pl.String).alias(k) for k in ("broken", "broken_as") if k not in frame.columns),
    )
    stripped_values = {k: pl.col(k).str.strip_chars() for k in KEYWORDS}
    frame = frame.with_columns(
        pl.when(stripped_values[k] != "").then(stripped_values[k]).alias(k) for k in KEYWORDS
    )
    epoch_value = pl.col("EPOCH").str.replace("Z$", "")
    epoch = pl.coalesce(epoch_value.str.to_datetime(f, time_unit="us", strict=False) for f in _EPOCH_FORMATS)
    numbers = _REQUIRED_NUMBERS | _OPTIONAL_NUMBERS
    parsed = frame.with_columns(
        epoch.dt.replace_time_zone("UTC").alias("epoch"),
        *(pl.col(k).cast(pl.Float64, strict=False).alias(v) for k, v in numbers.items()),
        *(pl.col(k).cast(pl.Int32, strict=False).alias(v) for k, v in _OPTIONAL_COUNTERS.items()),
        *(pl.col(k).alias(v) for k, v in _TEXT_KEYWORDS.items()),
        sat_no=pl.col("NORAD_CAT_ID").cast(pl.Int64, strict=False),
        source_format=pl.lit("OMM"),
    )
    return _apply_record_rules(parsed)


def _readable_field_rule(keyword: str, column: str, *, required: bool) -> RecordRule:
    """Reject a value that cannot be converted, or a required value that is missing."""
    is_unreadable = pl.col(column).is_null() & (pl.lit(required) | pl.col(keyword).is_not_null())
    message = pl.format("cannot read {}={}", pl.lit(keyword), pl.col(keyword).fill_null("nothing"))
    return RecordRule(RejectReason.FIELD, column, is_unreadable, message)


def _apply_record_rules(parsed: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Apply the record rules in order; the first broken rule determines the reason."""
    optional = _OPTIONAL_NUMBERS | _OPTIONAL_COUNTERS
    rules = [
        RecordRule(RejectReason.UNSUPPORTED_MESSAGE, None, pl.col("broken").is_not_null(), pl.col("broken")),
        RecordRule(
            RejectReason.CATALOGUE_NUMBER,
            "sat_no",
            (~pl.col("sat_no").is_between(1, MAX_SAT_NO)).fill_null(True),
            pl.format(
                "NORAD_CAT_ID {} is not a number of at most nine digits", pl.col("NORAD_CAT_ID").fill_null("")
            ),
        ),
        ephemeris_rule((pl.col("MEAN_ELEMENT_THEORY").str.to_uppercase() == "SGP4-XP").fill_null(False)),
        *(
            RecordRule(
                RejectReason.UNSUPPORTED_MESSAGE,
                k.lower(),
                (~pl.col(k).str.to_uppercase().is_in(allowed)).fill_null(False),
                pl.format("{} is {}, expected {}", pl.lit(k), pl.col(k), pl.lit(" or ".join(allowed))),
            )
            for k, allowed in _SUPPORTED_VALUES.items()
        ),
        _readable_field_rule("EPOCH", "epoch", required=True),
        RecordRule(
            RejectReason.FIELD,
            "epoch",
            pl.col("epoch").dt.year() < _FIRST_YEAR,
            pl.format("EPOCH={} is before the first satellite", pl.col("EPOCH")),
        ),
        *(_readable_field_rule(k, v, required=True) for k, v in _REQUIRED_NUMBERS.items()),
        *(_readable_field_rule(k, v, required=False) for k, v in optional.items()),
        *range_rules(),
    ]
    keyword_summary = pl.concat_str(
        pl.when(pl.col(k).is_not_null()).then(pl.format("{}={} ", pl.lit(k), pl.col(k))).otherwise(pl.lit(""))
        for k in ("NORAD_CAT_ID", "OBJECT_NAME", "EPOCH", *_REQUIRED_NUMBERS, *optional)
    ).str.strip_chars_end()
    parsed = parsed.with_columns(
        raw_text=pl.when(pl.col("raw_text") != "").then(pl.col("raw_text")).otherwise(keyword_summary)
    )
    accepted, rejected = split_by_rules(parsed, rules)
    if rejected.height:
        parser_reasons = parsed.filter(pl.col("broken").is_not_null()).select(
            pl.col("line_number").cast(pl.Int32), "broken_as"
        )
        rejected = (
            rejected.join(parser_reasons, on="line_number", how="left")
            .with_columns(reason=pl.coalesce("broken_as", "reason"))
            .select(list(REJECTED_COLUMNS))
            .sort("line_number")
        )
    accepted = accepted.with_columns(
        pl.col(c).fill_null(0)
        for c in (*_OPTIONAL_NUMBERS.values(), "ephemeris_type", "element_set_no", "rev_at_epoch")
    )
    elements = accepted.select(pl.col(c).cast(t) for c, t in CANDIDATE_COLUMNS.items())
    return elements, rejected
