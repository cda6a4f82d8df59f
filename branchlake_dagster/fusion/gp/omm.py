"""Orbit Mean-Elements Messages (CCSDS 502.0-B-3) in their four encodings.

JSON and CSV are read as CelesTrak and Space-Track serve them, XML by NDM/XML (505.0-B), and KVN. Each
encoding is first brought to one frame of keyword columns, all text; one function then reads those, so that
the encodings cannot disagree about a rule.
"""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET

import polars as pl

from branchlake_dagster.fusion.gp.records import (
    CANDIDATE_COLUMNS,
    REJECTED_COLUMNS,
    RejectReason,
    UnreadableCatalogueError,
    rejections,
)
from branchlake_dagster.fusion.gp.tle import SGP4_XP

_REQUIRED = {
    "EPOCH": "epoch",
    "MEAN_MOTION": "mean_motion",
    "ECCENTRICITY": "eccentricity",
    "INCLINATION": "inclination",
    "RA_OF_ASC_NODE": "ra_of_asc_node",
    "ARG_OF_PERICENTER": "arg_of_pericenter",
    "MEAN_ANOMALY": "mean_anomaly",
    "BSTAR": "bstar",
}
_OPTIONAL_NUMBERS = {"MEAN_MOTION_DOT": "mean_motion_dot", "MEAN_MOTION_DDOT": "mean_motion_ddot"}
_OPTIONAL_COUNTERS = {
    "EPHEMERIS_TYPE": "ephemeris_type",
    "ELEMENT_SET_NO": "element_set_no",
    "REV_AT_EPOCH": "rev_at_epoch",
}
_TEXTS = {
    "OBJECT_NAME": "object_name",
    "OBJECT_ID": "object_id",
    "CLASSIFICATION_TYPE": "classification_type",
}
_FIXED = {
    "CENTER_NAME": ("EARTH",),
    "REF_FRAME": ("TEME",),
    "TIME_SYSTEM": ("UTC",),
    "MEAN_ELEMENT_THEORY": ("SGP4", "SGP", "SGP/SGP4"),
}
"""What an SGP4 propagator can use at all; a message that states something else is rejected by name."""

KEYWORDS = (
    *_REQUIRED,
    *_OPTIONAL_NUMBERS,
    *_OPTIONAL_COUNTERS,
    *_TEXTS,
    *_FIXED,
    "NORAD_CAT_ID",
)
MAX_SAT_NO = 999_999_999
_BAD_RECORD = "_bad"


def parse_omm_json(text: str, source: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Parse a JSON array of messages (or one message), numbers given as numbers or as text.

    Raises:
        UnreadableCatalogueError: the text is not JSON, or is no array of objects.

    """
    try:
        # Decimals stay text: the columns below convert all of them at once, and exactly once.
        loaded = json.loads(text, parse_float=str, parse_int=str)
    except json.JSONDecodeError as error:
        raise UnreadableCatalogueError(
            source, f"not JSON at line {error.lineno}, column {error.colno}", "Fetch the file again."
        ) from error
    records = [loaded] if isinstance(loaded, dict) else loaded
    if not isinstance(records, list):
        raise UnreadableCatalogueError(source, "the JSON is no array of messages", "Give an OMM JSON file.")
    raw = [json.dumps(r) if not _is_flat(r) else "" for r in records]
    frame = _keyword_frame([r if _is_flat(r) else {} for r in records]).with_columns(
        pl.Series("raw_text", raw, dtype=pl.String),
        pl.Series(_BAD_RECORD, [bool(text) for text in raw], dtype=pl.Boolean),
    )
    return elements_from_keywords(frame)


def _is_flat(record: object) -> bool:
    return isinstance(record, dict) and not any(isinstance(v, dict | list) for v in record.values())


def _keyword_frame(records: list[dict[str, str | None]]) -> pl.DataFrame:
    return pl.DataFrame(records, schema=dict.fromkeys(KEYWORDS, pl.String), strict=False, orient="row")


def parse_omm_csv(text: str, source: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Parse CSV whose header holds OMM keywords (CelesTrak's and Space-Track's CSV).

    Raises:
        UnreadableCatalogueError: no CSV, or the header lacks the keywords.

    """
    try:
        frame = pl.read_csv(io.StringIO(text), infer_schema=False, truncate_ragged_lines=True)
    except pl.exceptions.PolarsError as error:
        raise UnreadableCatalogueError(source, f"not CSV ({error})", "Fetch the file again.") from error
    if "NORAD_CAT_ID" not in frame.columns:
        raise UnreadableCatalogueError(source, "the CSV header has no NORAD_CAT_ID", "Give an OMM CSV file.")
    return elements_from_keywords(frame)


def parse_omm_xml(text: str, source: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Parse NDM/XML: any number of ``omm`` elements, below ``ndm`` or alone.

    Raises:
        UnreadableCatalogueError: the text is not well-formed XML or declares entities.

    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        # Entities are the way to blow up an XML parser, and no NDM message needs them.
        raise UnreadableCatalogueError(source, "the XML declares a DTD", "NDM/XML needs none: remove it.")
    try:
        root = ET.fromstring(text)  # noqa: S314  (documents with a DTD were refused above)
    except ET.ParseError as error:
        raise UnreadableCatalogueError(source, f"not XML ({error})", "Fetch the file again.") from error
    messages = [
        {e.tag: (e.text or "").strip() for e in omm.iter() if e.tag in KEYWORDS} for omm in root.iter("omm")
    ]
    return elements_from_keywords(_keyword_frame([dict(m) for m in messages]))


def parse_omm_kvn(text: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Parse keyword = value notation; each ``CCSDS_OMM_VERS`` starts a message. Units in [] are dropped."""
    lines = pl.DataFrame({"text": pl.Series(text.split("\n"), dtype=pl.String)}).select(
        pl.col("text").str.extract(r"^\s*([A-Z_0-9]+)\s*=", 1).alias("key"),
        pl.col("text").str.extract(r"=\s*(.*?)\s*(?:\[[^\]]*\])?\s*$", 1).alias("value"),
    )
    lines = lines.with_columns(message=(pl.col("key") == "CCSDS_OMM_VERS").fill_null(False).cum_sum())
    wanted = lines.filter(pl.col("key").is_in(KEYWORDS) & (pl.col("message") > 0))
    frame = wanted.pivot(on="key", index="message", values="value", aggregate_function="last")
    return elements_from_keywords(frame.sort("message").drop("message"))


def elements_from_keywords(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Typed candidates and rejected rows from text columns named by OMM keyword.

    Keywords may be missing altogether (null then). ``raw_text`` is kept where a decoder set it; otherwise
    a rejected row shows the keywords that were read.
    """
    absent = [k for k in KEYWORDS if k not in frame.columns]
    frame = frame.with_columns(pl.lit(None, dtype=pl.String).alias(k) for k in absent)
    frame = frame.with_columns(
        pl.when(pl.col(k).str.strip_chars() != "").then(pl.col(k).str.strip_chars()).alias(k)
        for k in KEYWORDS
    ).with_row_index("line_number", offset=1)
    if _BAD_RECORD not in frame.columns:
        frame = frame.with_columns(pl.lit(False).alias(_BAD_RECORD), pl.lit("").alias("raw_text"))
    epoch_text = pl.col("EPOCH").str.replace("Z$", "")
    epoch = pl.coalesce(
        epoch_text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False),
        epoch_text.str.to_datetime("%Y-%jT%H:%M:%S%.f", time_unit="us", strict=False),
        epoch_text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False),
    ).dt.replace_time_zone("UTC")
    numbers = {k: v for k, v in (_REQUIRED | _OPTIONAL_NUMBERS).items() if k != "EPOCH"}
    parsed = frame.with_columns(
        epoch.alias("epoch"),
        *(pl.col(k).cast(pl.Float64, strict=False).alias(v) for k, v in numbers.items()),
        *(pl.col(k).cast(pl.Int32, strict=False).alias(v) for k, v in _OPTIONAL_COUNTERS.items()),
        *(pl.col(k).alias(v) for k, v in _TEXTS.items()),
        sat_no=pl.col("NORAD_CAT_ID").cast(pl.Int64, strict=False),
        source_format=pl.lit("OMM"),
    )
    return _judge(parsed)


def _judge(parsed: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Apply the record rules in order; the first that fails names the reason."""
    every_number = _REQUIRED | _OPTIONAL_NUMBERS | _OPTIONAL_COUNTERS
    unread = pl.concat_str(
        pl.when(pl.col(v).is_null() & (pl.lit(k in _REQUIRED) | pl.col(k).is_not_null()))
        .then(pl.format("{}={} ", pl.lit(k), pl.col(k).fill_null("nothing")))
        .otherwise(pl.lit(""))
        for k, v in every_number.items()
    ).str.strip_chars_end()
    not_finite = pl.any_horizontal(
        (~pl.col(v).is_finite()).fill_null(False)
        for v in [*_REQUIRED.values(), *_OPTIONAL_NUMBERS.values()]
        if v != "epoch"
    )
    foreign = [
        (
            RejectReason.UNSUPPORTED_MESSAGE,
            (~pl.col(k).str.to_uppercase().is_in(allowed)).fill_null(False),
            pl.format("{} is {}, expected {}", pl.lit(k), pl.col(k), pl.lit(" or ".join(allowed))),
        )
        for k, allowed in _FIXED.items()
    ]
    rules: list[tuple[RejectReason, pl.Expr, pl.Expr]] = [
        (
            RejectReason.UNSUPPORTED_MESSAGE,
            pl.col(_BAD_RECORD),
            pl.lit("the record is no flat object of OMM keywords"),
        ),
        (
            RejectReason.CATALOGUE_NUMBER,
            (~pl.col("sat_no").is_between(1, MAX_SAT_NO)).fill_null(True),
            pl.format(
                "NORAD_CAT_ID {} is no number of at most nine digits", pl.col("NORAD_CAT_ID").fill_null("")
            ),
        ),
        (
            RejectReason.EPHEMERIS_TYPE,
            ((pl.col("ephemeris_type") == SGP4_XP) | (pl.col("MEAN_ELEMENT_THEORY") == "SGP4-XP")).fill_null(
                False
            ),
            pl.lit("SGP4-XP elements: a plain SGP4 would propagate them wrongly"),
        ),
        *foreign,
        (RejectReason.FIELD, unread != "", pl.format("cannot read {}", unread)),
        (
            RejectReason.FIELD,
            not_finite
            | (pl.col("mean_motion") <= 0)
            | ~pl.col("eccentricity").is_between(0, 1, closed="left")
            | ~pl.col("inclination").is_between(0, 180),
            pl.lit("need mean motion > 0, 0 <= eccentricity < 1 and inclination within 0 to 180 degrees"),
        ),
    ]
    shown = pl.concat_str(
        pl.when(pl.col(k).is_not_null()).then(pl.format("{}={} ", pl.lit(k), pl.col(k))).otherwise(pl.lit(""))
        for k in ("NORAD_CAT_ID", "OBJECT_NAME", *_REQUIRED)
    ).str.strip_chars_end()
    judged = parsed.with_columns(
        reason=pl.coalesce([pl.when(bad).then(pl.lit(str(code))) for code, bad, _ in rules]),
        message=pl.coalesce([pl.when(bad).then(text) for _, bad, text in rules]),
        raw_text=pl.when(pl.col("raw_text") != "").then(pl.col("raw_text")).otherwise(shown),
    )
    rejected = rejections(
        judged.filter(pl.col("reason").is_not_null()), reason=pl.col("reason"), message=pl.col("message")
    )
    good = judged.filter(pl.col("reason").is_null()).with_columns(
        pl.col(c).fill_null(0)
        for c in ("mean_motion_dot", "mean_motion_ddot", "ephemeris_type", "element_set_no", "rev_at_epoch")
    )
    elements = good.select(pl.col(c).cast(t) for c, t in CANDIDATE_COLUMNS.items())
    return elements, rejected.select(list(REJECTED_COLUMNS))
