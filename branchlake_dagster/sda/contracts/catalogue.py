"""Contracts of the tables in the asset group ``catalogue``."""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import (
    DATA_MODES,
    Contract,
    catalogue_number,
    optional_column,
    required_column,
)
from branchlake_dagster.sda.gp.rules import MAX_MEAN_MOTION, RejectReason
from branchlake_dagster.sda.registry.life_cycle import STATES
from branchlake_dagster.sda.registry.merge import OUTCOMES
from branchlake_dagster.sda.registry.sources import SOURCES


class ElementSet(Contract):
    """The orbital elements of one object at one epoch, from one snapshot.

    Also the rows of ``element_history``.

    Source: OMM, CCSDS 502.0-B-3 section 4 (mean elements of SGP4 in TEME), and for fields that only element
    lines (TLE) have, Hoots and Roehrich, Spacetrack Report No. 3. ``sat_no`` and ``data_mode`` are names of
    the Unified Data Library.
    """

    snapshot_id: T.StringType = required_column(
        "GP snapshot of the element set: its file's name without suffixes."
    )
    sat_no: T.LongType = catalogue_number()
    object_name: T.StringType = optional_column("Name of the object, if the file has one.")
    object_id: T.StringType = optional_column("International designator: launch year, number and piece.")
    epoch: T.TimestampType = required_column("Instant of the mean elements, UTC.")
    mean_motion: T.DoubleType = required_column("Mean motion.", "rev/day", gt=0.0, le=MAX_MEAN_MOTION)
    eccentricity: T.DoubleType = required_column("Eccentricity.", ge=0.0, lt=1.0)
    inclination: T.DoubleType = required_column("Inclination.", "deg", ge=0.0, le=180.0)
    ra_of_asc_node: T.DoubleType = required_column(
        "Right ascension of the ascending node.", "deg", ge=0.0, le=360.0
    )
    arg_of_pericenter: T.DoubleType = required_column("Argument of pericentre.", "deg", ge=0.0, le=360.0)
    mean_anomaly: T.DoubleType = required_column("Mean anomaly.", "deg", ge=0.0, le=360.0)
    ephemeris_type: T.IntegerType = optional_column("Ephemeris type: 0, SGP4; others are rejected.")
    classification_type: T.StringType = optional_column(
        "Classification of the element set: U is unclassified."
    )
    element_set_no: T.IntegerType = optional_column("Number of the element set, counted by its issuer.")
    rev_at_epoch: T.IntegerType = optional_column("Number of the revolution at the epoch.", "rev")
    bstar: T.DoubleType = required_column("Drag term of SGP4.", "1/Earth radii")
    mean_motion_dot: T.DoubleType = optional_column(
        "First derivative of the mean motion over two, as element lines state it.",
        "rev/day²",
    )
    mean_motion_ddot: T.DoubleType = optional_column(
        "Second derivative of the mean motion over six, as element lines state it.",
        "rev/day³",
    )
    source_format: T.StringType = required_column("Format of the file.", isin=["TLE", "OMM"])
    line_number: T.IntegerType = optional_column(
        "Line in the file, from 1; in JSON the ordinal of the message."
    )
    data_mode: T.StringType = required_column(
        "Real, simulated, of a test or of an exercise.", isin=DATA_MODES
    )
    source: T.StringType = required_column("Who issued the element set.", isin=list(SOURCES))
    collected_at: T.TimestampType = required_column("When the snapshot was collected, UTC.")


class CatalogueEntry(ElementSet):
    """The current element set of an object, as it was first collected, and the state of the object."""

    state: T.StringType = required_column(
        "tracked; stale: old elements, or missing in its source; decayed; invalid: elements of the future.",
        isin=[state for state in STATES if state != "untracked"],
    )

    class Config:
        """Each object has one current element set."""

        unique = ["sat_no"]  # noqa: RUF012 - pandera's name and type


class MergeOutcome(Contract):
    """The result of merging a pulled element set into the catalog. The column names follow no standard."""

    snapshot_id: T.StringType = required_column("GP snapshot of the element set.")
    sat_no: T.LongType = catalogue_number()
    source: T.StringType = required_column("Who issued the element set.", isin=list(SOURCES))
    epoch: T.TimestampType = required_column("Its epoch, UTC.")
    outcome: T.StringType = required_column(
        "won; repeated the winner; older; outranked by another source; superseded by a correction.",
        isin=list(OUTCOMES),
    )
    conflict: T.BooleanType = required_column("Whether the winner has other values for the same epoch.")
    winner_source: T.StringType = required_column("Source of the winner.", isin=list(SOURCES))
    winner_snapshot_id: T.StringType = required_column("GP snapshot of the winner.")
    winner_epoch: T.TimestampType = required_column("Epoch of the winner, UTC.")


class RegisteredObject(Contract):
    """An object and its state. Times and states are computed by the graph, other facts are the SATCAT's."""

    sat_no: T.LongType = catalogue_number()
    object_name: T.StringType = optional_column("Name of the object.")
    object_id: T.StringType = optional_column("International designator: launch year, number and piece.")
    state: T.StringType = required_column(
        "tracked; stale; decayed; invalid: elements of the future; untracked: no elements.", isin=list(STATES)
    )
    first_seen: T.TimestampType = optional_column("First collection of a snapshot that has it, UTC.")
    last_seen: T.TimestampType = optional_column("Last collection of a snapshot that has it, UTC.")
    feed: T.StringType = optional_column("Series of snapshots in which it was seen last.")
    epoch: T.TimestampType = optional_column("Epoch of its current element set, UTC.")
    source: T.StringType = optional_column("Source of its current element set.")
    owner: T.StringType = optional_column("Owner or operator, by the satellite catalog.")
    object_type: T.StringType = optional_column(
        "Payload, rocket body, debris or unknown, by the satellite catalog."
    )
    launch_date: T.DateType = optional_column("Day of its launch.")
    decay_date: T.DateType = optional_column("Day of its decay.")
    rcs_m2: T.DoubleType = optional_column("Radar cross section.", "m²")
    rcs_size: T.StringType = optional_column("Size class by radar cross section: SMALL, MEDIUM or LARGE.")
    satcat_at: T.TimestampType = optional_column(
        "Collection time of the satellite catalog with these facts, UTC."
    )


class SatelliteEntry(Contract):
    """An entry of one satellite catalog. Source: CelesTrak's SATCAT, in snake case."""

    snapshot_id: T.StringType = required_column("Snapshot of the entry: its file's name without suffixes.")
    sat_no: T.LongType = catalogue_number()
    object_name: T.StringType = optional_column("Name of the object.")
    object_id: T.StringType = optional_column("International designator: launch year, number and piece.")
    object_type: T.StringType = optional_column("Payload, rocket body, debris or unknown.")
    owner: T.StringType = optional_column("Owner or operator.")
    launch_date: T.DateType = optional_column("Day of its launch.")
    decay_date: T.DateType = optional_column("Day of its decay.")
    period_min: T.DoubleType = optional_column("Orbital period.", "min")
    inclination_deg: T.DoubleType = optional_column("Inclination.", "deg")
    apogee_km: T.DoubleType = optional_column("Height of the apogee.", "km")
    perigee_km: T.DoubleType = optional_column("Height of the perigee.", "km")
    rcs_m2: T.DoubleType = optional_column("Radar cross section.", "m²")
    rcs_size: T.StringType = optional_column("Size class by radar cross section: SMALL, MEDIUM or LARGE.")
    collected_at: T.TimestampType = required_column("When the snapshot was collected, UTC.")


class Satellite(Contract):
    """The facts that the satellite catalog stated about an object in a period.

    Column names as in its entries.
    """

    sat_no: T.LongType = catalogue_number()
    object_name: T.StringType = optional_column("Name of the object.")
    object_id: T.StringType = optional_column("International designator: launch year, number and piece.")
    object_type: T.StringType = optional_column("Payload, rocket body, debris or unknown.")
    owner: T.StringType = optional_column("Owner or operator.")
    launch_date: T.DateType = optional_column("Day of its launch.")
    decay_date: T.DateType = optional_column("Day of its decay.")
    rcs_m2: T.DoubleType = optional_column("Radar cross section.", "m²")
    rcs_size: T.StringType = optional_column("Size class by radar cross section: SMALL, MEDIUM or LARGE.")
    valid_from: T.TimestampType = required_column("First collection with these facts, UTC.")
    valid_to: T.TimestampType = optional_column(
        "First collection with other facts, UTC; empty for the current period."
    )
    snapshot_id: T.StringType = required_column("Snapshot of the first collection.")


class RejectedRecord(Contract):
    """A record of a file that did not become an element set. The column names follow no standard."""

    snapshot_id: T.StringType = required_column(
        "GP snapshot of the record: its file's name without suffixes."
    )
    line_number: T.IntegerType = required_column(
        "Line in the file, from 1; in JSON the ordinal of the message.", ge=1
    )
    # The number may be invalid: then it is the reason of the rejection.
    sat_no: T.LongType = optional_column("Catalog number, if the record has a readable one.")
    raw_text: T.StringType = required_column("The record as it is in the file.")
    reason: T.StringType = required_column(
        "Rule that it breaks.", isin=[str(reason) for reason in RejectReason]
    )
    field: T.StringType = optional_column("Column of the element set with the error, if one column is wrong.")
    message: T.StringType = required_column("Explanation of the error.")
