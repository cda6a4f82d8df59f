"""The contract of the table of pictures."""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import Contract, required_column, window_column

PICTURE_NAMES = ["outcomes", "residuals", "track_quality", "ground_tracks", "alerts"]


class HourReport(Contract):
    """A picture of an hour's results, as a PNG file."""

    window_start: T.TimestampType = window_column()
    name: T.StringType = required_column("What is drawn.", isin=PICTURE_NAMES)
    title: T.StringType = required_column("The picture's title.")
    drawn_rows: T.LongType = required_column(
        "Rows that are drawn: sensors, tracks, alerts, or pairs of kind and result.", ge=1
    )
    media_type: T.StringType = required_column("Format of the picture.", isin=["image/png"])
    image: T.BinaryType = required_column("The picture.")
