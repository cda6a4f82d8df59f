"""Read a table of hard-body radii by catalog number, as NASA CARA publishes it."""

from __future__ import annotations

import io

import polars as pl

from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.records import UnreadableCatalogueError
from branchlake_dagster.sda.gp.rules import MAX_SAT_NO

RADIUS_COLUMNS = {"sat_no": pl.Int64(), "radius_m": pl.Float64(), "is_default": pl.Boolean()}
"""``is_default`` is true if the table states a default radius instead of an estimate."""
_MAX_RADIUS_M = 1_000.0
"""A larger radius is an error in the file; the largest object in CARA's table has 250 m."""


def read_radius_table(content: bytes, source: str, limits: ReadLimits) -> pl.DataFrame:
    """Read radii by object (``RADIUS_COLUMNS``) from a CSV file, gzipped or not.

    The layout is that of NASA CARA's table: ``ObjectID``, ``HBR`` (m) and optionally ``HBRSource``. Rows
    without a valid catalog number or radius are left out. The last row of an object counts.

    Raises:
        TooLargeCatalogueError: the file unpacks to more than the limit.
        UnreadableCatalogueError: the file is not CSV, or lacks ``ObjectID`` or ``HBR``.

    """
    try:
        frame = pl.read_csv(io.BytesIO(decode_gp_file(content, source, limits).encode()), infer_schema=False)
    except pl.exceptions.PolarsError as error:
        raise UnreadableCatalogueError(
            source, f"the CSV is invalid ({error})", "Fetch the file again."
        ) from error
    if not {"ObjectID", "HBR"} <= set(frame.columns):
        raise UnreadableCatalogueError(
            source, "it lacks the columns ObjectID and HBR", "Give a file in the layout of NASA CARA's table."
        )
    source_column = pl.col("HBRSource") if "HBRSource" in frame.columns else pl.lit(None, pl.String)
    rows = frame.select(
        pl.col("ObjectID").str.strip_chars().cast(pl.Int64, strict=False).alias("sat_no"),
        pl.col("HBR").str.strip_chars().cast(pl.Float64, strict=False).alias("radius_m"),
        (source_column.str.strip_chars().str.to_lowercase() == "default")
        .fill_null(False)
        .alias("is_default"),
    )
    is_valid = pl.col("sat_no").is_between(1, MAX_SAT_NO) & pl.col("radius_m").is_between(
        0.0, _MAX_RADIUS_M, closed="right"
    )
    return rows.filter(is_valid).unique("sat_no", keep="last", maintain_order=True)
