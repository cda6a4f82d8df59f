"""Contracts of the catalogue's tables."""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.fusion.contracts.fields import DATA_MODES, Contract, catalogue_number, may, must
from branchlake_dagster.fusion.gp.rules import MAX_MEAN_MOTION, RejectReason


class ElementSet(Contract):
    """One object's elements in one snapshot; also the rows of ``catalogue``.

    Source: OMM, CCSDS 502.0-B-3 section 4, mean elements of SGP4 in TEME, and Hoots and Roehrich, Spacetrack
    Report No. 3, for what only the lines have. ``sat_no`` and ``data_mode`` are the Unified Data Library's.
    """

    snapshot_id: T.StringType = must("GP snapshot that the element set is from: its file's name, no ending.")
    sat_no: T.LongType = catalogue_number()
    object_name: T.StringType = may("Name of the object, where the file gives one.")
    object_id: T.StringType = may("International designator: launch year, number and piece.")
    epoch: T.TimestampType = must("Instant of the mean elements, UTC.")
    mean_motion: T.DoubleType = must("Mean motion.", "rev/day", gt=0.0, le=MAX_MEAN_MOTION)
    eccentricity: T.DoubleType = must("Eccentricity.", ge=0.0, lt=1.0)
    inclination: T.DoubleType = must("Inclination.", "deg", ge=0.0, le=180.0)
    ra_of_asc_node: T.DoubleType = must("Right ascension of the ascending node.", "deg", ge=0.0, le=360.0)
    arg_of_pericenter: T.DoubleType = must("Argument of pericentre.", "deg", ge=0.0, le=360.0)
    mean_anomaly: T.DoubleType = must("Mean anomaly.", "deg", ge=0.0, le=360.0)
    ephemeris_type: T.IntegerType = may("Ephemeris type: 0, SGP4; others are rejected.")
    classification_type: T.StringType = may("Classification of the element set: U is unclassified.")
    element_set_no: T.IntegerType = may("Number of the element set, counted by its issuer.")
    rev_at_epoch: T.IntegerType = may("Number of the revolution at the epoch.", "rev")
    bstar: T.DoubleType = must("Drag term of SGP4.", "1/Earth radii")
    mean_motion_dot: T.DoubleType = may(
        "First derivative of the mean motion over two, as element lines state it.",
        "rev/day²",
    )
    mean_motion_ddot: T.DoubleType = may(
        "Second derivative of the mean motion over six, as element lines state it.",
        "rev/day³",
    )
    source_format: T.StringType = must("Format of the file it is from.", isin=["TLE", "OMM"])
    line_number: T.IntegerType = may("Line in the file, from 1; in JSON the ordinal of the message.")
    data_mode: T.StringType = must("Real, simulated, of a test or of an exercise.", isin=DATA_MODES)


class RejectedRecord(Contract):
    """A record that did not become an element set. The names are this graph's own."""

    snapshot_id: T.StringType = must("GP snapshot that the record is from: its file's name, no ending.")
    line_number: T.IntegerType = must("Line in the file, from 1; in JSON the ordinal of the message.", ge=1)
    # Also numbers that are no catalogue numbers: they may be why it was rejected.
    sat_no: T.LongType = may("Catalogue number, as far as the record has a readable one.")
    raw_text: T.StringType = must("The record as it is in the file.")
    reason: T.StringType = must("Rule that it breaks.", isin=[str(reason) for reason in RejectReason])
    field: T.StringType = may("Column of the element set that is at fault, where it is one.")
    message: T.StringType = must("What is wrong, in words.")
