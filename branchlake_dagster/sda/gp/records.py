"""The result of parsing a GP file: typed element sets, rejected records, and errors of the whole file.

A GP file (general perturbations) has element sets: for each object, the parameters of its orbit at one time,
the epoch, from which the model SGP4 predicts positions. Field names follow the CCSDS Orbit Mean-Elements
Message (502.0-B-3, section 4) in snake case, with its units: degrees, revolutions per day, and 1/earth-radii
for BSTAR. ``sat_no`` is the Unified Data Library's name for NORAD_CAT_ID; it is 64-bit because OMM carries
nine digits and the five-digit range ended in 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from branchlake_dagster.sda.gp.rules import RejectReason, build_rejections

ELEMENT_COLUMNS: dict[str, pl.DataType] = {
    "sat_no": pl.Int64(),
    "object_name": pl.String(),
    "object_id": pl.String(),
    "epoch": pl.Datetime("us", "UTC"),
    "mean_motion": pl.Float64(),
    "eccentricity": pl.Float64(),
    "inclination": pl.Float64(),
    "ra_of_asc_node": pl.Float64(),
    "arg_of_pericenter": pl.Float64(),
    "mean_anomaly": pl.Float64(),
    "ephemeris_type": pl.Int32(),
    "classification_type": pl.String(),
    "element_set_no": pl.Int32(),
    "rev_at_epoch": pl.Int32(),
    "bstar": pl.Float64(),
    "mean_motion_dot": pl.Float64(),
    "mean_motion_ddot": pl.Float64(),
    "source_format": pl.String(),
    "line_number": pl.Int32(),
}
"""Columns of ``ParsedCatalogue.elements``; angles in degrees, mean motion in rev/day and its derivatives."""

CANDIDATE_COLUMNS: dict[str, pl.DataType] = {**ELEMENT_COLUMNS, "raw_text": pl.String()}
"""Columns of the format parsers' results: every readable record with its text, duplicates included."""


class CatalogueError(Exception):
    """A GP file as a whole cannot be used; none of its records were accepted."""

    def __init__(self, source: str, problem: str, remedy: str) -> None:
        super().__init__(f"GP file {source}: {problem}. {remedy}")
        self.source = source
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[CatalogueError], tuple[str, str, str]]:
        """Pickle by fields, because Dagster sends errors to other processes."""
        return (type(self), (self.source, self.problem, self.remedy))


class EmptyCatalogueError(CatalogueError):
    """The file has no records. Publishing it would suggest that every object had decayed."""


class UnreadableCatalogueError(CatalogueError):
    """The file has an unknown format, is damaged or is cut short."""


class TooLargeCatalogueError(CatalogueError):
    """The file, or its unpacked content, exceeds the size limit; reading stopped there."""


@dataclass(frozen=True)
class ParsedCatalogue:
    """Result of reading one GP file.

    ``elements`` has ``ELEMENT_COLUMNS``, one row per object, sorted by ``sat_no``; ``rejected`` has
    ``REJECTED_COLUMNS``. Every non-blank record of the file is in exactly one of the two. ``line_number``
    is the 1-based line of a TLE's line 1, of a CSV row, of a KVN message's first keyword or of an XML
    message's element. In JSON it is the ordinal of the message.
    """

    elements: pl.DataFrame
    rejected: pl.DataFrame


def latest_per_object(candidates: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split candidates into one element set per object and the rejected duplicates.

    The latest epoch wins. At equal epochs the later record wins, because corrections come later in a file.
    """
    ordered = candidates.sort("sat_no", "epoch", "line_number")
    is_latest = pl.col("sat_no") != pl.col("sat_no").shift(-1)
    latest = ordered.filter(is_latest.fill_null(True))
    elements = latest.select(list(ELEMENT_COLUMNS))
    duplicates = ordered.filter(~is_latest.fill_null(True)).join(
        latest.select("sat_no", kept_line="line_number"), on="sat_no", how="left"
    )
    return elements, build_rejections(
        duplicates,
        reason=RejectReason.DUPLICATE_OBJECT,
        field="sat_no",
        message=pl.format(
            "object {} is also at record {} with the same or a later epoch",
            pl.col("sat_no"),
            pl.col("kept_line"),
        ),
    )
