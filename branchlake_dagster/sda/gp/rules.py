"""The rules that a record must satisfy to become an element set, and the report of a rejected record.

The rules of each format are one list of conditions over columns. Their order matters: the first broken rule
determines the reason, the field and the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import polars as pl

MAX_SAT_NO = 999_999_999
MAX_MEAN_MOTION = 17.5
"""Revolutions per day. A circular orbit at the Earth's surface would make 17.0."""

MAX_BSTAR = 10.0
"""In 1/Earth radii. Fits of objects under thrust reach 3.6 in real catalogs; the TLE format allows 1e9."""

MAX_EPOCH_LEAD = timedelta(days=2)
"""How far an epoch may be after the file's collection. Operators issue elements for planned maneuvers a day
ahead. An epoch further in the future would win over all correct element sets until then."""

SGP4_EPHEMERIS_TYPE = 0
MAX_RAW_CHARS = 4_096
"""Maximum stored length of a rejected record's text; a damaged file may be a single line."""


class RejectReason(StrEnum):
    """The reason why a record did not become an element set."""

    ORPHAN_LINE = "orphan_line"
    LINE_LENGTH = "line_length"
    RECORD_LENGTH = "record_length"
    TRUNCATED = "truncated"
    CHECKSUM = "checksum"
    CATALOGUE_NUMBER = "catalogue_number"
    EPHEMERIS_TYPE = "ephemeris_type"
    UNSUPPORTED_MESSAGE = "unsupported_message"
    FIELD = "field"
    FUTURE_EPOCH = "future_epoch"
    DUPLICATE_OBJECT = "duplicate_object"


REJECTED_COLUMNS: dict[str, pl.DataType] = {
    "line_number": pl.Int32(),
    "sat_no": pl.Int64(),
    "raw_text": pl.String(),
    "reason": pl.String(),
    "field": pl.String(),
    "message": pl.String(),
}
"""Columns of ``ParsedCatalogue.rejected``; ``field`` is the element-set column with the error."""


@dataclass(frozen=True)
class RecordRule:
    """A condition that rejects a row. A row whose condition is null passes."""

    reason: RejectReason
    field: str | pl.Expr | None
    is_broken: pl.Expr
    message: str | pl.Expr


def build_rejections(
    frame: pl.DataFrame,
    *,
    reason: RejectReason | pl.Expr,
    message: str | pl.Expr,
    field: str | pl.Expr | None = None,
) -> pl.DataFrame:
    """Build ``REJECTED_COLUMNS`` from a frame with ``line_number``, ``raw_text`` and perhaps ``sat_no``."""
    sat_no = pl.col("sat_no") if "sat_no" in frame.columns else pl.lit(None)
    return frame.select(
        pl.col("line_number").cast(pl.Int32),
        sat_no.cast(pl.Int64).alias("sat_no"),
        pl.col("raw_text").cast(pl.String).str.slice(0, MAX_RAW_CHARS),
        _to_expression(reason).cast(pl.String).alias("reason"),
        _to_expression(field).cast(pl.String).alias("field"),
        _to_expression(message).cast(pl.String).str.slice(0, MAX_RAW_CHARS).alias("message"),
    )


def split_by_rules(frame: pl.DataFrame, rules: Sequence[RecordRule]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split rows into those that pass all rules and rejected rows (``REJECTED_COLUMNS``).

    ``frame`` has ``line_number``, ``raw_text`` and the columns that the rules use.
    """
    # One pass finds the failing rows. Messages are built for these rows only, by their first broken rule.
    first_rule = pl.coalesce(
        pl.when(rule.is_broken).then(pl.lit(number, dtype=pl.Int32)) for number, rule in enumerate(rules)
    )
    numbered_rows = frame.with_columns(first_rule.alias("_rule"))
    accepted = numbered_rows.filter(pl.col("_rule").is_null()).drop("_rule")
    failing_rows = numbered_rows.filter(pl.col("_rule").is_not_null())
    rules_by_number = {number: rules[number] for number in failing_rows["_rule"].unique().sort()}

    def first_rule_value(value: Callable[[RecordRule], str | pl.Expr | None]) -> pl.Expr:
        # The null literal serves frames without failing rows: coalesce needs at least one expression.
        return pl.coalesce(
            *(
                pl.when(pl.col("_rule") == number).then(_to_expression(value(rule)).cast(pl.String))
                for number, rule in rules_by_number.items()
            ),
            pl.lit(None, dtype=pl.String),
        )

    rejected = build_rejections(
        failing_rows,
        reason=first_rule_value(lambda rule: str(rule.reason)),
        field=first_rule_value(lambda rule: rule.field),
        message=first_rule_value(lambda rule: rule.message),
    )
    return accepted, rejected


def _to_expression(value: str | pl.Expr | None) -> pl.Expr:
    return value if isinstance(value, pl.Expr) else pl.lit(value)


def range_rules() -> list[RecordRule]:
    """Return the rules that check formal and physical limits of values. NaN is outside of every range."""
    return [
        *(_range_rule(name, 0.0, 360.0) for name in ("ra_of_asc_node", "arg_of_pericenter", "mean_anomaly")),
        _range_rule("inclination", 0.0, 180.0),
        _range_rule("eccentricity", 0.0, 1.0, high_allowed=False),
        _range_rule("mean_motion", 0.0, MAX_MEAN_MOTION, low_allowed=False),
        _range_rule("bstar", -MAX_BSTAR, MAX_BSTAR),
        *(
            RecordRule(
                RejectReason.FIELD,
                name,
                ~pl.col(name).is_finite(),
                pl.format("{} is {}, which is not a finite number", pl.lit(name), pl.col(name)),
            )
            for name in ("mean_motion_dot", "mean_motion_ddot")
        ),
        *(
            RecordRule(
                RejectReason.FIELD,
                name,
                pl.col(name) < 0,
                pl.format("{} is {}, but a count cannot be negative", pl.lit(name), pl.col(name)),
            )
            for name in ("element_set_no", "rev_at_epoch")
        ),
    ]


def _range_rule(
    name: str, low: float, high: float, *, low_allowed: bool = True, high_allowed: bool = True
) -> RecordRule:
    """Build a range rule; `low_allowed` and `high_allowed` state whether the limits belong to the range."""
    column = pl.col(name)
    is_inside = (column >= low if low_allowed else column > low) & (
        column <= high if high_allowed else column < high
    )
    interval = f"{'[' if low_allowed else '('}{low:g}, {high:g}{']' if high_allowed else ')'}"
    message = pl.format("{} is {}, outside of {}", pl.lit(name), column, pl.lit(interval))
    return RecordRule(RejectReason.FIELD, name, ~is_inside | column.is_nan(), message)


def ephemeris_rule(is_other_theory: pl.Expr | None = None) -> RecordRule:
    """Return the rule that rejects mean elements of theories other than SGP4.

    `is_other_theory` is an additional condition that detects such a theory by another field.
    """
    is_not_sgp4 = (pl.col("ephemeris_type") != SGP4_EPHEMERIS_TYPE).fill_null(False)
    return RecordRule(
        RejectReason.EPHEMERIS_TYPE,
        "ephemeris_type",
        is_not_sgp4 | is_other_theory if is_other_theory is not None else is_not_sgp4,
        pl.format(
            "ephemeris type {} (4 is SGP4-XP): plain SGP4, type 0, would propagate it wrongly",
            pl.col("ephemeris_type").fill_null(SGP4_EPHEMERIS_TYPE),
        ),
    )


def future_epoch_rule(collected_at: datetime) -> RecordRule:
    """Return the rule that rejects epochs more than `MAX_EPOCH_LEAD` after the file's collection."""
    limit = collected_at + MAX_EPOCH_LEAD
    return RecordRule(
        RejectReason.FUTURE_EPOCH,
        "epoch",
        pl.col("epoch") > pl.lit(limit),
        pl.format(
            "the epoch {} is more than {} days after the file's collection at {}",
            pl.col("epoch").dt.strftime("%Y-%m-%dT%H:%M:%S"),
            pl.lit(MAX_EPOCH_LEAD.days),
            pl.lit(f"{collected_at:%Y-%m-%dT%H:%M:%SZ}"),
        ),
    )
