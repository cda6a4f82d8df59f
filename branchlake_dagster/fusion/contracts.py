"""Row contracts of the graph's tables, as pandera PySpark models.

Limits are physics or the format's own, never what happened to be in the sample: a broken rule means that
a row cannot be true. Every column of a table is here in the table's order, with its meaning and unit; those
without a limit add nothing but their name and type to what is promised.

Names and units are those of the Orbit Data Messages (CCSDS 502.0-B-3: OMM for elements, OPM for state and
covariance), the Conjunction Data Message (CCSDS 508.0-B-1) and the Unified Data Library's observation
services, in snake case. Where ours differ from the source, the unit is in the column's name.
"""

# No `from __future__ import annotations`: pandera reads the annotations.
from typing import TYPE_CHECKING, Any

import pandera.pyspark as pa
import pyspark.sql.types as T  # noqa: N812 - pandera's and Spark's own abbreviation

from branchlake_dagster.fusion.gp.rules import MAX_MEAN_MOTION, MAX_SAT_NO, RejectReason
from branchlake_dagster.fusion.sensors.native import SOURCE_KINDS

if TYPE_CHECKING:
    _Contract = pa.DataFrameModel[Any]
else:
    # Generic to type checkers only: at run time pandera refuses the parameter.
    _Contract = pa.DataFrameModel

_DATA_MODES = ["REAL", "SIMULATED", "TEST", "EXERCISE"]
_UUID5 = "^[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"


def _must(description: str, unit: str | None = None, **promises: Any) -> Any:
    """A column that every row fills, with pandera's promises on its values."""
    return _may(description, unit, nullable=False, **promises)


def _may(description: str, unit: str | None = None, *, nullable: bool = True, **promises: Any) -> Any:
    """A column that may be empty."""
    metadata = {"unit": unit} if unit else None
    return pa.Field(nullable=nullable, description=description, metadata=metadata, **promises)


def _sat_no(whose: str = "the object", *, nullable: bool = False) -> Any:
    return _may(
        f"Satellite catalogue number of {whose} (NORAD_CAT_ID).", nullable=nullable, ge=1, le=MAX_SAT_NO
    )


def _window() -> Any:
    return _must("Start of the hourly window, UTC.")


def _variance(of: str, unit: str) -> Any:
    return _must(f"Variance of {of}.", unit, gt=0.0)


def _covariance(one: str, other: str, unit: str) -> Any:
    what = f"Variance of {one}." if one == other else f"Covariance of {one} and {other}."
    return _may(what, unit)


class ElementSet(_Contract):
    """One object's elements in one snapshot; also the rows of ``catalogue``.

    Source: OMM, CCSDS 502.0-B-3 section 4, mean elements of SGP4 in TEME, and Hoots and Roehrich, Spacetrack
    Report No. 3, for what only the lines have. ``sat_no`` and ``data_mode`` are the Unified Data Library's.
    """

    snapshot_id: T.StringType = _must("GP snapshot that the element set is from: its file's name, no ending.")
    sat_no: T.LongType = _sat_no()
    object_name: T.StringType = _may("Name of the object, where the file gives one.")
    object_id: T.StringType = _may("International designator: launch year, number and piece.")
    epoch: T.TimestampType = _must("Instant of the mean elements, UTC.")
    mean_motion: T.DoubleType = _must("Mean motion.", "rev/day", gt=0.0, le=MAX_MEAN_MOTION)
    eccentricity: T.DoubleType = _must("Eccentricity.", ge=0.0, lt=1.0)
    inclination: T.DoubleType = _must("Inclination.", "deg", ge=0.0, le=180.0)
    ra_of_asc_node: T.DoubleType = _must("Right ascension of the ascending node.", "deg", ge=0.0, le=360.0)
    arg_of_pericenter: T.DoubleType = _must("Argument of pericentre.", "deg", ge=0.0, le=360.0)
    mean_anomaly: T.DoubleType = _must("Mean anomaly.", "deg", ge=0.0, le=360.0)
    ephemeris_type: T.IntegerType = _may("Ephemeris type: 0, SGP4; others are rejected.")
    classification_type: T.StringType = _may("Classification of the element set: U is unclassified.")
    element_set_no: T.IntegerType = _may("Number of the element set, counted by its issuer.")
    rev_at_epoch: T.IntegerType = _may("Number of the revolution at the epoch.", "rev")
    bstar: T.DoubleType = _must("Drag term of SGP4.", "1/Earth radii")
    mean_motion_dot: T.DoubleType = _may(
        "First derivative of the mean motion over two, as element lines state it.",
        "rev/day²",
    )
    mean_motion_ddot: T.DoubleType = _may(
        "Second derivative of the mean motion over six, as element lines state it.",
        "rev/day³",
    )
    source_format: T.StringType = _must("Format of the file it is from.", isin=["TLE", "OMM"])
    line_number: T.IntegerType = _may("Line in the file, from 1; in JSON the ordinal of the message.")
    data_mode: T.StringType = _must("Real, simulated, of a test or of an exercise.", isin=_DATA_MODES)


class RejectedRecord(_Contract):
    """A record that did not become an element set. The names are this graph's own."""

    snapshot_id: T.StringType = _must("GP snapshot that the record is from: its file's name, no ending.")
    line_number: T.IntegerType = _must("Line in the file, from 1; in JSON the ordinal of the message.", ge=1)
    # Also numbers that are no catalogue numbers: they may be why it was rejected.
    sat_no: T.LongType = _may("Catalogue number, as far as the record has a readable one.")
    raw_text: T.StringType = _must("The record as it is in the file.")
    reason: T.StringType = _must("Rule that it breaks.", isin=[str(reason) for reason in RejectReason])
    field: T.StringType = _may("Column of the element set that is at fault, where it is one.")
    message: T.StringType = _must("What is wrong, in words.")


class SensorObservation(_Contract):
    """A native measurement; which fields a kind must fill is a SQL check.

    Source: names of the sensors' own making with the units that they deliver in; ``orig_sensor_id``,
    ``track_id`` and ``sat_no`` are the Unified Data Library's.
    """

    window_start: T.TimestampType = _window()
    source_kind: T.StringType = _must(
        "Kind of sensor; isl is an inter-satellite link.", isin=list(SOURCE_KINDS)
    )
    orig_sensor_id: T.StringType = _must("Sensor, as its owner calls it.")
    track_id: T.StringType = _must("Track of the sensor that the measurement belongs to.")
    sat_no: T.LongType = _may("Catalogue number that the sensor gives the object; none if uncorrelated.")
    timestamp_ns: T.LongType = _must("Instant by the sensor's clock, since 1970 UTC.", "ns", gt=0)
    received_ns: T.LongType = _must("Instant of the receipt, since 1970 UTC.", "ns", gt=0)
    sensor_lat_deg: T.DoubleType = _may("Geodetic latitude of a ground sensor, WGS-84.", "deg")
    sensor_lon_deg: T.DoubleType = _may("Longitude of a ground sensor, east positive, WGS-84.", "deg")
    sensor_alt_km: T.DoubleType = _may("Height of a ground sensor above the WGS-84 ellipsoid.", "km")
    range_m: T.DoubleType = _may("Radar: distance from the sensor.", "m", gt=0.0)
    range_rate_m_s: T.DoubleType = _may("Radar: rate of the distance, positive away from the sensor.", "m/s")
    az_rad: T.DoubleType = _may("Radar: azimuth from north over east.", "rad")
    el_rad: T.DoubleType = _may("Radar: elevation above the horizon.", "rad")
    ra_rad: T.DoubleType = _may("Optical: topocentric right ascension, axes of TEME.", "rad")
    dec_rad: T.DoubleType = _may("Optical: topocentric declination, axes of TEME.", "rad")
    x_m: T.DoubleType = _may("ISL: position along x, TEME.", "m")
    y_m: T.DoubleType = _may("ISL: position along y, TEME.", "m")
    z_m: T.DoubleType = _may("ISL: position along z, TEME.", "m")
    vx_m_s: T.DoubleType = _may("ISL: velocity along x, TEME.", "m/s")
    vy_m_s: T.DoubleType = _may("ISL: velocity along y, TEME.", "m/s")
    vz_m_s: T.DoubleType = _may("ISL: velocity along z, TEME.", "m/s")
    sigma_range_m: T.DoubleType = _may("Radar: standard deviation of the distance.", "m")
    sigma_range_rate_m_s: T.DoubleType = _may("Radar: standard deviation of the range rate.", "m/s")
    sigma_angle_rad: T.DoubleType = _may("Radar: standard deviation of a direction on the sphere.", "rad")
    sigma_arcsec: T.DoubleType = _may("Optical: standard deviation of a direction on the sphere.", "arcsec")
    sigma_position_m: T.DoubleType = _may("ISL: standard deviation of the position, per axis.", "m")
    sigma_velocity_m_s: T.DoubleType = _may("ISL: standard deviation of the velocity, per axis.", "m/s")
    clock_source: T.StringType = _must("What disciplines the sensor's clock: gps, ntp or onboard.")
    clock_sync_age_s: T.DoubleType = _must("Time since that clock was last set.", "s", ge=0.0)


class Observation(_Contract):
    """The envelope every later stage reads. Distances km, angles degrees.

    Source: the Unified Data Library's radar and electro-optical observations (``sat_no``, ``uct``,
    ``orig_sensor_id``, ``track_id``, ``data_mode`` and the names with ``_unc``), with its units added to the
    names.
    """

    observation_id: T.StringType = _must(
        "UUID version 5 of source kind, sensor, track and instant: a replay has the same.", str_matches=_UUID5
    )
    window_start: T.TimestampType = _window()
    source_kind: T.StringType = _must(
        "Kind of sensor; isl is an inter-satellite link.", isin=list(SOURCE_KINDS)
    )
    source_id: T.StringType = _must("Source of the observation: the sensor.")
    orig_sensor_id: T.StringType = _may("Sensor, as its owner calls it.")
    sensor_timestamp: T.TimestampType = _must("Instant of the measurement by the sensor's clock, UTC.")
    ingest_timestamp: T.TimestampType = _must("Instant of the receipt, UTC.")
    sat_no: T.LongType = _sat_no("the observed object; none if it is uncorrelated", nullable=True)
    track_id: T.StringType = _may("Track of the sensor that the observation belongs to.")
    uct: T.BooleanType = _must("Whether the observation is of an uncorrelated track.")
    classification_marking: T.StringType = _must("Classification marking: U is unclassified.")
    data_mode: T.StringType = _must("Real, simulated, of a test or of an exercise.", isin=_DATA_MODES)
    sensor_lat_deg: T.DoubleType = _may("Geodetic latitude of a ground sensor, WGS-84.", "deg")
    sensor_lon_deg: T.DoubleType = _may("Longitude of a ground sensor, east positive, WGS-84.", "deg")
    sensor_alt_km: T.DoubleType = _may("Height of a ground sensor above the WGS-84 ellipsoid.", "km")
    range_km: T.DoubleType = _may("Radar: distance from the sensor.", "km", gt=0.0, lt=500_000.0)
    range_unc_km: T.DoubleType = _may("Radar: standard deviation of the distance.", "km")
    # Faster than two objects at escape speed can close; the seed's "impossible range rate".
    range_rate_km_s: T.DoubleType = _may(
        "Radar: rate of the distance, positive away from the sensor.", "km/s", ge=-25.0, le=25.0
    )
    range_rate_unc_km_s: T.DoubleType = _may("Radar: standard deviation of the range rate.", "km/s")
    azimuth_deg: T.DoubleType = _may("Radar: azimuth from north over east.", "deg", ge=0.0, le=360.0)
    azimuth_unc_deg: T.DoubleType = _may("Radar: standard deviation of the azimuth.", "deg")
    elevation_deg: T.DoubleType = _may("Radar: elevation above the horizon.", "deg", ge=0.0, le=90.0)
    elevation_unc_deg: T.DoubleType = _may("Radar: standard deviation of the elevation.", "deg")
    ra_deg: T.DoubleType = _may(
        "Optical: topocentric right ascension, axes of TEME.", "deg", ge=0.0, le=360.0
    )
    ra_unc_deg: T.DoubleType = _may("Optical: standard deviation of the right ascension.", "deg")
    declination_deg: T.DoubleType = _may(
        "Optical: topocentric declination, axes of TEME.", "deg", ge=-90.0, le=90.0
    )
    declination_unc_deg: T.DoubleType = _may("Optical: standard deviation of the declination.", "deg")
    pos_x_km: T.DoubleType = _may("ISL: position along x, TEME.", "km")
    pos_y_km: T.DoubleType = _may("ISL: position along y, TEME.", "km")
    pos_z_km: T.DoubleType = _may("ISL: position along z, TEME.", "km")
    vel_x_km_s: T.DoubleType = _may("ISL: velocity along x, TEME.", "km/s")
    vel_y_km_s: T.DoubleType = _may("ISL: velocity along y, TEME.", "km/s")
    vel_z_km_s: T.DoubleType = _may("ISL: velocity along z, TEME.", "km/s")
    position_unc_km: T.DoubleType = _may("ISL: standard deviation of the position, per axis.", "km")
    velocity_unc_km_s: T.DoubleType = _may("ISL: standard deviation of the velocity, per axis.", "km/s")
    clock_quality: T.StringType = _may("What disciplines the sensor's clock: gps, ntp or onboard.")
    max_skew_s: T.DoubleType = _must("Largest error of the sensor's clock, by its quality.", "s", ge=0.0)


class FusedTrack(_Contract):
    """An estimated state with its formal covariance.

    Source: OPM, CCSDS 502.0-B-3 section 3: state vector and the lower triangle of its covariance matrix
    (CX_X, CY_X, CY_Y …), km and s.
    """

    window_start: T.TimestampType = _window()
    sat_no: T.LongType = _sat_no()
    epoch: T.TimestampType = _must("Instant of the state, UTC: the middle of the window.")
    ref_frame: T.StringType = _must("Reference frame of state and covariance.", isin=["TEME"])
    x_km: T.DoubleType = _may("Position along x.", "km")
    y_km: T.DoubleType = _may("Position along y.", "km")
    z_km: T.DoubleType = _may("Position along z.", "km")
    x_dot_km_s: T.DoubleType = _may("Velocity along x.", "km/s")
    y_dot_km_s: T.DoubleType = _may("Velocity along y.", "km/s")
    z_dot_km_s: T.DoubleType = _may("Velocity along z.", "km/s")
    cx_x: T.DoubleType = _variance("x", "km²")
    cy_x: T.DoubleType = _covariance("y", "x", "km²")
    cy_y: T.DoubleType = _variance("y", "km²")
    cz_x: T.DoubleType = _covariance("z", "x", "km²")
    cz_y: T.DoubleType = _covariance("z", "y", "km²")
    cz_z: T.DoubleType = _variance("z", "km²")
    cx_dot_x: T.DoubleType = _covariance("x_dot", "x", "km²/s")
    cx_dot_y: T.DoubleType = _covariance("x_dot", "y", "km²/s")
    cx_dot_z: T.DoubleType = _covariance("x_dot", "z", "km²/s")
    cx_dot_x_dot: T.DoubleType = _covariance("x_dot", "x_dot", "km²/s²")
    cy_dot_x: T.DoubleType = _covariance("y_dot", "x", "km²/s")
    cy_dot_y: T.DoubleType = _covariance("y_dot", "y", "km²/s")
    cy_dot_z: T.DoubleType = _covariance("y_dot", "z", "km²/s")
    cy_dot_x_dot: T.DoubleType = _covariance("y_dot", "x_dot", "km²/s²")
    cy_dot_y_dot: T.DoubleType = _covariance("y_dot", "y_dot", "km²/s²")
    cz_dot_x: T.DoubleType = _covariance("z_dot", "x", "km²/s")
    cz_dot_y: T.DoubleType = _covariance("z_dot", "y", "km²/s")
    cz_dot_z: T.DoubleType = _covariance("z_dot", "z", "km²/s")
    cz_dot_x_dot: T.DoubleType = _covariance("z_dot", "x_dot", "km²/s²")
    cz_dot_y_dot: T.DoubleType = _covariance("z_dot", "y_dot", "km²/s²")
    cz_dot_z_dot: T.DoubleType = _covariance("z_dot", "z_dot", "km²/s²")
    n_radar: T.LongType = _may("Radar observations that were used.")
    n_optical: T.LongType = _may("Optical observations that were used.")
    n_isl: T.LongType = _may("Inter-satellite link observations that were used.")
    n_measurements: T.LongType = _must("Measured numbers that were used: an observation has several.", gt=6)
    chi2_per_dof: T.DoubleType = _must(
        "Squared residuals over their variances, per degree of freedom.", ge=0.0
    )
    weighted_rms: T.DoubleType = _may("Root mean square of residuals over their standard deviations.")
    catalogue_miss_km: T.DoubleType = _must("Distance from the catalogue's position.", "km", ge=0.0)
    offset_radial_km: T.DoubleType = _may("Offset from the catalogue's position, radial.", "km")
    offset_in_track_km: T.DoubleType = _may("Offset from the catalogue's position, in-track.", "km")
    offset_cross_track_km: T.DoubleType = _may("Offset from the catalogue's position, cross-track.", "km")
    catalogue_snapshot_id: T.StringType = _may("GP snapshot of the element set that it is compared with.")
    catalogue_epoch: T.TimestampType = _may("Epoch of that element set, UTC.")


class ConjunctionCandidate(_Contract):
    """A close approach of two catalogue objects.

    Source: CDM, CCSDS 508.0-B-1, with kilometres where it has metres. Object 1 has the smaller number.
    """

    window_start: T.TimestampType = _window()
    tca: T.TimestampType = _must("Time of closest approach, UTC.")
    sat1_object_designator: T.LongType = _sat_no("object 1")
    sat2_object_designator: T.LongType = _sat_no("object 2")
    miss_distance_km: T.DoubleType = _must("Distance at the closest approach.", "km", ge=0.0)
    relative_speed_km_s: T.DoubleType = _must(
        "Relative speed at the closest approach.", "km/s", ge=0.0, le=25.0
    )
    relative_position_r_km: T.DoubleType = _may("Object 2 from object 1, along its radial axis.", "km")
    relative_position_t_km: T.DoubleType = _may(
        "Object 2 from object 1, along its transverse (in-track) axis.", "km"
    )
    relative_position_n_km: T.DoubleType = _may(
        "Object 2 from object 1, along its normal (cross-track) axis.", "km"
    )
    sat1_element_epoch: T.TimestampType = _may("Epoch of object 1's element set, UTC.")
    sat2_element_epoch: T.TimestampType = _may("Epoch of object 2's element set, UTC.")
