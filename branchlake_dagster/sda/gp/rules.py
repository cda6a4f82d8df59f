"""What a record must be to become an element set, and what is said of one that is not.

The rules of both formats are written as one list of conditions over columns. They stand in the order of what
they prove, and the first broken one names the reason and the field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import polars as pl

MAX_SAT_NO = 999_999_999
MAX_MEAN_MOTION = 17.5
"""Revolutions per day; a circular orbit at the surface makes 17.0."""

MAX_BSTAR = 10.0
"""Per Earth radius. Fits of objects under thrust reach 3.6 in real catalogues; lines can state 1e9."""

MAX_AHEAD = timedelta(days=2)
"""How far an epoch may lie ahead of the file's collection: operators issue elements for planned manoeuvres a
day ahead. A later one would win over every true one that follows."""

SGP4 = 0
MAX_RAW_CHARS = 4_096
"""Of a rejected record's text that is kept; a damaged file may be one line."""


class RejectReason(StrEnum):
    """Why a record did not become an element set."""

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
"""Columns of ``ParsedCatalogue.rejected``; ``field`` is the column of the element set that is at fault."""


@dataclass(frozen=True)
class Rule:
    """A condition over a row that makes it no element set; a null condition is not broken."""

    reason: RejectReason
    field: str | pl.Expr | None
    broken: pl.Expr
    message: str | pl.Expr


def rejections(
    frame: pl.DataFrame,
    *,
    reason: RejectReason | pl.Expr,
    message: str | pl.Expr,
    field: str | pl.Expr | None = None,
) -> pl.DataFrame:
    """Rejected-record rows from a frame with ``line_number``, ``raw_text`` and perhaps ``sat_no``."""
    sat_no = pl.col("sat_no") if "sat_no" in frame.columns else pl.lit(None)
    return frame.select(
        pl.col("line_number").cast(pl.Int32),
        sat_no.cast(pl.Int64).alias("sat_no"),
        pl.col("raw_text").cast(pl.String).str.slice(0, MAX_RAW_CHARS),
        _expression(reason).cast(pl.String).alias("reason"),
        _expression(field).cast(pl.String).alias("field"),
        _expression(message).cast(pl.String).str.slice(0, MAX_RAW_CHARS).alias("message"),
    )


def split(frame: pl.DataFrame, rules: Sequence[Rule]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows that keep all rules, and rejected rows (``REJECTED_COLUMNS``) for the others.

    ``frame`` has ``line_number``, ``raw_text`` and what the rules ask for.
    """
    # One pass to find the broken rows; the words are made for these alone, and of what they broke first.
    first = pl.coalesce(
        pl.when(rule.broken).then(pl.lit(number, dtype=pl.Int32)) for number, rule in enumerate(rules)
    )
    numbered = frame.with_columns(first.alias("_rule"))
    good = numbered.filter(pl.col("_rule").is_null()).drop("_rule")
    bad = numbered.filter(pl.col("_rule").is_not_null())
    broken = {number: rules[number] for number in bad["_rule"].unique().sort()}

    def of_first_broken(value: Callable[[Rule], str | pl.Expr | None]) -> pl.Expr:
        # Null stands for none: a frame without broken rows has no words, and coalesce wants something.
        return pl.coalesce(
            *(
                pl.when(pl.col("_rule") == number).then(_expression(value(rule)).cast(pl.String))
                for number, rule in broken.items()
            ),
            pl.lit(None, dtype=pl.String),
        )

    rejected = rejections(
        bad,
        reason=of_first_broken(lambda rule: str(rule.reason)),
        field=of_first_broken(lambda rule: rule.field),
        message=of_first_broken(lambda rule: rule.message),
    )
    return good, rejected


def _expression(value: str | pl.Expr | None) -> pl.Expr:
    return value if isinstance(value, pl.Expr) else pl.lit(value)


def range_rules() -> list[Rule]:
    """Limits of the format and of physics, on the columns of both formats. NaN is outside of every range."""
    return [
        *(_within(name, 0.0, 360.0) for name in ("ra_of_asc_node", "arg_of_pericenter", "mean_anomaly")),
        _within("inclination", 0.0, 180.0),
        _within("eccentricity", 0.0, 1.0, above=False),
        _within("mean_motion", 0.0, MAX_MEAN_MOTION, below=False),
        _within("bstar", -MAX_BSTAR, MAX_BSTAR),
        *(
            Rule(
                RejectReason.FIELD,
                name,
                ~pl.col(name).is_finite(),
                pl.format("{} is {}, which is no number", pl.lit(name), pl.col(name)),
            )
            for name in ("mean_motion_dot", "mean_motion_ddot")
        ),
        *(
            Rule(
                RejectReason.FIELD,
                name,
                pl.col(name) < 0,
                pl.format("{} is {}, a count below zero", pl.lit(name), pl.col(name)),
            )
            for name in ("element_set_no", "rev_at_epoch")
        ),
    ]


def _within(name: str, low: float, high: float, *, below: bool = True, above: bool = True) -> Rule:
    """`below` and `above`: whether the limit itself is allowed."""
    column = pl.col(name)
    inside = (column >= low if below else column > low) & (column <= high if above else column < high)
    words = f"{'[' if below else '('}{low:g}, {high:g}{']' if above else ')'}"
    message = pl.format("{} is {}, outside of {}", pl.lit(name), column, pl.lit(words))
    return Rule(RejectReason.FIELD, name, ~inside | column.is_nan(), message)


def ephemeris_rule(also: pl.Expr | None = None) -> Rule:
    """Only SGP4's mean elements may be propagated by SGP4; `also` tells other theories by another field."""
    other = (pl.col("ephemeris_type") != SGP4).fill_null(False)
    return Rule(
        RejectReason.EPHEMERIS_TYPE,
        "ephemeris_type",
        other | also if also is not None else other,
        pl.format(
            "ephemeris type {} (4 is SGP4-XP): plain SGP4, type 0, would propagate it wrongly",
            pl.col("ephemeris_type").fill_null(SGP4),
        ),
    )


def future_rule(collected_at: datetime) -> Rule:
    """Elements of a later time than the file can know of."""
    limit = collected_at + MAX_AHEAD
    return Rule(
        RejectReason.FUTURE_EPOCH,
        "epoch",
        pl.col("epoch") > pl.lit(limit),
        pl.format(
            "the epoch {} is more than {} days after the file's collection at {}",
            pl.col("epoch").dt.strftime("%Y-%m-%dT%H:%M:%S"),
            pl.lit(MAX_AHEAD.days),
            pl.lit(f"{collected_at:%Y-%m-%dT%H:%M:%SZ}"),
        ),
    )
