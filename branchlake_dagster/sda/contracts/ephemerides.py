"""Contract of close approaches of the operator's own ephemerides."""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.conjunctions.screening import Kind
from branchlake_dagster.sda.contracts.fields import (
    Contract,
    catalogue_number,
    optional_column,
    required_column,
)
from branchlake_dagster.sda.ephemerides.listing import SOURCE


class EphemerisConjunction(Contract):
    """A close approach of an own ephemeris (object 1) with a catalog object (object 2).

    Source: as of `Conjunction`.
    """

    ephemeris: T.StringType = required_column("Name of the ephemeris file.")
    sat1_source: T.StringType = required_column("Source of object 1's motion.", isin=[SOURCE])
    sat1_name: T.StringType = required_column("OBJECT_NAME of the file.")
    sat1_object_id: T.StringType = required_column("OBJECT_ID of the file.")
    kind: T.StringType = required_column(
        "encounter: a minimum of the distance; edge: closest at the start or end of the ephemeris; together:"
        " minutes within the threshold.",
        isin=[kind.value for kind in Kind],
    )
    tca: T.TimestampType = required_column("Time of closest approach, UTC.")
    miss_distance_km: T.DoubleType = required_column("Distance at the closest approach.", "km", ge=0.0)
    relative_speed_km_s: T.DoubleType = required_column(
        "Relative speed at the closest approach.", "km/s", ge=0.0, le=40.0
    )
    sat2_object_designator: T.LongType = catalogue_number("object 2")
    together_min: T.LongType = required_column(
        "Minutes at whose both ends the two are within the threshold; 0 for other kinds.", "min", ge=0
    )
    relative_position_r_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its radial axis.", "km"
    )
    relative_position_t_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its transverse (in-track) axis.", "km"
    )
    relative_position_n_km: T.DoubleType = required_column(
        "Object 2 from object 1, along its normal (cross-track) axis.", "km"
    )
    relative_velocity_r_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its radial axis.", "km/s"
    )
    relative_velocity_t_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its transverse axis.", "km/s"
    )
    relative_velocity_n_km_s: T.DoubleType = required_column(
        "Velocity of object 2 relative to object 1, along its normal axis.", "km/s"
    )
    sat2_element_epoch: T.TimestampType = required_column("Epoch of object 2's element set, UTC.")
    sat2_element_age_days: T.DoubleType = required_column("Age of object 2's element set at that time.", "d")
    sat2_name: T.StringType = optional_column("Name of object 2 in the catalog.")
    screened_from: T.TimestampType = required_column("Start of the ephemeris, UTC.")
    screened_until: T.TimestampType = required_column("End of the ephemeris, UTC; there may be gaps between.")
    threshold_km: T.DoubleType = required_column("Largest miss distance of the screening.", "km", gt=0.0)
