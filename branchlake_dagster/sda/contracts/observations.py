"""Contracts of observations, of rejected ones, and of associations.

The envelope is the common set of columns that observations of all kinds of sensor have.
"""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.association.associate import REASON_NAMES, RESULT_NAMES
from branchlake_dagster.sda.contracts.fields import (
    DATA_MODES,
    UUID5_PATTERN,
    Contract,
    catalogue_number,
    optional_column,
    required_column,
    window_column,
)
from branchlake_dagster.sda.sensors.models import MAX_RANGE_KM

REJECTION_REASONS = (
    "before_first_window",
    "time_beyond_skew",
    "impossible_range_rate",
    "impossible_range",
    "below_horizon",
    "impossible_direction",
    "impossible_position",
    "implausible_uncertainty",
    "below_surface",
    "faster_than_light",
    "unknown_object",
    "decommissioned_object",
)
"""The reasons for which a measurement is rejected. The first one that applies is recorded."""


class Observation(Contract):
    """A measurement in the envelope that all later tables read. Distances are in km, angles in degrees.

    Source: the Unified Data Library's radar and electro-optical observations (``sat_no``, ``uct``,
    ``orig_sensor_id``, ``track_id``, ``data_mode`` and the names with ``_unc``), with its units added to the
    names.
    """

    observation_id: T.StringType = required_column(
        "UUID version 5 of source kind, source and the source's own record: a replay has the same.",
        str_matches=UUID5_PATTERN,
    )
    window_start: T.TimestampType = window_column()
    source_kind: T.StringType = required_column("Kind of sensor; isl is an inter-satellite link.")
    source_id: T.StringType = required_column("Source of the observation: the sensor.")
    orig_sensor_id: T.StringType = optional_column("Sensor, as its owner calls it.")
    sensor_timestamp: T.TimestampType = required_column(
        "Instant of the reception by the sensor's clock, UTC; links: of the state."
    )
    ingest_timestamp: T.TimestampType = optional_column("Instant of the receipt, UTC.")
    sat_no: T.LongType = catalogue_number(
        "the object that the source claims to observe; most sources do not know it", nullable=True
    )
    track_id: T.StringType = optional_column("Track of the sensor that the observation belongs to.")
    uct: T.BooleanType = required_column("Whether the source does not name the object.")
    classification_marking: T.StringType = required_column("Classification marking: U is unclassified.")
    data_mode: T.StringType = required_column(
        "Real, simulated, of a test or of an exercise.", isin=DATA_MODES
    )
    sensor_lat_deg: T.DoubleType = optional_column("Geodetic latitude of a ground sensor, WGS-84.", "deg")
    sensor_lon_deg: T.DoubleType = optional_column(
        "Longitude of a ground sensor, east positive, WGS-84.", "deg"
    )
    sensor_alt_km: T.DoubleType = optional_column(
        "Height of a ground sensor above the WGS-84 ellipsoid.", "km"
    )
    range_km: T.DoubleType = optional_column(
        "Radar, laser: distance from the sensor.", "km", gt=0.0, lt=MAX_RANGE_KM
    )
    range_unc_km: T.DoubleType = optional_column("Radar, laser: standard deviation of the distance.", "km")
    # Two objects at escape speed approach each other more slowly than this.
    range_rate_km_s: T.DoubleType = optional_column(
        "Radar: rate of the distance, positive away from the sensor.", "km/s", ge=-25.0, le=25.0
    )
    range_rate_unc_km_s: T.DoubleType = optional_column(
        "Radar: standard deviation of the range rate.", "km/s"
    )
    azimuth_deg: T.DoubleType = optional_column(
        "Radar: azimuth from north over east.", "deg", ge=0.0, le=360.0
    )
    azimuth_unc_deg: T.DoubleType = optional_column("Radar: standard deviation of the azimuth.", "deg")
    elevation_deg: T.DoubleType = optional_column(
        "Radar: elevation above the horizon, corrected for refraction.", "deg", ge=0.0, le=90.0
    )
    elevation_unc_deg: T.DoubleType = optional_column("Radar: standard deviation of the elevation.", "deg")
    ra_deg: T.DoubleType = optional_column(
        "Optical: topocentric right ascension, axes of TEME, relative to the stars.", "deg", ge=0.0, le=360.0
    )
    ra_unc_deg: T.DoubleType = optional_column("Optical: standard deviation of the right ascension.", "deg")
    declination_deg: T.DoubleType = optional_column(
        "Optical: topocentric declination, axes of TEME.", "deg", ge=-90.0, le=90.0
    )
    declination_unc_deg: T.DoubleType = optional_column(
        "Optical: standard deviation of the declination.", "deg"
    )
    pos_x_km: T.DoubleType = optional_column("ISL: position along x, TEME.", "km")
    pos_y_km: T.DoubleType = optional_column("ISL: position along y, TEME.", "km")
    pos_z_km: T.DoubleType = optional_column("ISL: position along z, TEME.", "km")
    vel_x_km_s: T.DoubleType = optional_column("ISL: velocity along x, TEME.", "km/s")
    vel_y_km_s: T.DoubleType = optional_column("ISL: velocity along y, TEME.", "km/s")
    vel_z_km_s: T.DoubleType = optional_column("ISL: velocity along z, TEME.", "km/s")
    position_unc_km: T.DoubleType = optional_column(
        "ISL: standard deviation of the position, per axis.", "km"
    )
    velocity_unc_km_s: T.DoubleType = optional_column(
        "ISL: standard deviation of the velocity, per axis.", "km/s"
    )
    clock_quality: T.StringType = optional_column(
        "Source of the sensor clock's time: gps, ntp, onboard or unknown."
    )
    max_skew_s: T.DoubleType = required_column(
        "Largest error of the sensor's clock, by its quality.", "s", ge=0.0
    )


class RejectedObservation(Contract):
    """A rejected measurement and the reason. The measured values are in the raw table of its kind."""

    observation_id: T.StringType = required_column(
        "The id that the observation would have.", str_matches=UUID5_PATTERN
    )
    reason: T.StringType = required_column(
        "Why it is rejected: the first reason.", isin=list(REJECTION_REASONS)
    )
    source_kind: T.StringType = required_column("Kind of sensor.")
    source_id: T.StringType = required_column("Source of the measurement: the sensor.")
    sensor_timestamp: T.TimestampType = required_column(
        "Instant of the measurement by the sensor's clock, UTC."
    )
    ingest_timestamp: T.TimestampType = optional_column("Instant of the receipt, UTC.")
    sat_no: T.LongType = optional_column("Catalog number of the object, as the sensor names it.")
    track_id: T.StringType = optional_column("Track of the sensor that the measurement belongs to.")
    topic_partition: T.IntegerType = optional_column("Topic partition of the record.")
    topic_offset: T.LongType = optional_column("Offset of the record in that partition.")


class Association(Contract):
    """The object that an observation belongs to.

    ``confirmed``: the object that it claims, or that its track was assigned to. ``reassigned``: another
    object, which fits clearly better. ``claimed``: the claimed object, which has no usable prediction, so the
    claim was not tested. ``uncorrelated``: no object.
    """

    window_start: T.TimestampType = window_column()
    observation_id: T.StringType = required_column("The observation.", str_matches=UUID5_PATTERN)
    source_kind: T.StringType = required_column("Kind of sensor.")
    source_id: T.StringType = required_column("Source of the observation: the sensor.")
    track_id: T.StringType = required_column(
        "The sensor's own track; that of a single observation is its id."
    )
    sensor_timestamp: T.TimestampType = required_column(
        "Instant of the measurement by the sensor's clock, UTC."
    )
    claimed_sat_no: T.LongType = catalogue_number(
        "the object that the source claims to observe", nullable=True
    )
    sat_no: T.LongType = catalogue_number("the object; none if uncorrelated", nullable=True)
    result: T.StringType = required_column("How the association treated the claim.", isin=list(RESULT_NAMES))
    reason: T.StringType = optional_column(
        "Why it is uncorrelated.", isin=[name for name in REASON_NAMES if name != "none"]
    )
    normalized_distance: T.DoubleType = optional_column(
        "Mahalanobis distance of the observation from the object's prediction.", ge=0.0
    )
    degrees_of_freedom: T.LongType = required_column("Measured values of the observation.", ge=1, le=6)
    candidates: T.LongType = required_column("Objects whose predictions are within the gate.", ge=0)
    element_age_days: T.DoubleType = optional_column("Time since the epoch of the object's elements.", "d")
