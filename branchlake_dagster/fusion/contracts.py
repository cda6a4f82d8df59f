"""Row contracts of the graph's tables, as pandera PySpark models.

Limits are physics or the format's own, never what happened to be in the sample: a broken rule means that
a row cannot be true.
"""

# No `from __future__ import annotations`: pandera reads the annotations.
from typing import TYPE_CHECKING, Any

import pandera.pyspark as pa
import pyspark.sql.types as T  # noqa: N812 - pandera's and Spark's own abbreviation

from branchlake_dagster.fusion.gp.omm import MAX_SAT_NO
from branchlake_dagster.fusion.gp.records import RejectReason
from branchlake_dagster.fusion.sensors.native import SOURCE_KINDS

if TYPE_CHECKING:
    _Contract = pa.DataFrameModel[Any]
else:
    # Generic to type checkers only: at run time pandera refuses the parameter.
    _Contract = pa.DataFrameModel

MAX_MEAN_MOTION = 17.5
"""Revolutions per day; a circular orbit at the surface makes 17.0."""


class ElementSet(_Contract):
    """One object's elements in one snapshot; also the rows of ``catalogue``."""

    snapshot_id: T.StringType = pa.Field(nullable=False)
    sat_no: T.LongType = pa.Field(ge=1, le=MAX_SAT_NO, nullable=False)
    epoch: T.TimestampType = pa.Field(nullable=False)
    mean_motion: T.DoubleType = pa.Field(gt=0.0, le=MAX_MEAN_MOTION, nullable=False)
    eccentricity: T.DoubleType = pa.Field(ge=0.0, lt=1.0, nullable=False)
    inclination: T.DoubleType = pa.Field(ge=0.0, le=180.0, nullable=False)
    ra_of_asc_node: T.DoubleType = pa.Field(ge=0.0, le=360.0, nullable=False)
    arg_of_pericenter: T.DoubleType = pa.Field(ge=0.0, le=360.0, nullable=False)
    mean_anomaly: T.DoubleType = pa.Field(ge=0.0, le=360.0, nullable=False)
    bstar: T.DoubleType = pa.Field(nullable=False)
    source_format: T.StringType = pa.Field(isin=["TLE", "OMM"], nullable=False)
    data_mode: T.StringType = pa.Field(isin=["REAL", "SIMULATED", "TEST", "EXERCISE"], nullable=False)


class RejectedRecord(_Contract):
    """A record that did not become an element set."""

    snapshot_id: T.StringType = pa.Field(nullable=False)
    line_number: T.IntegerType = pa.Field(ge=1, nullable=False)
    raw_text: T.StringType = pa.Field(nullable=False)
    reason: T.StringType = pa.Field(isin=[str(reason) for reason in RejectReason], nullable=False)
    message: T.StringType = pa.Field(nullable=False)


class SensorObservation(_Contract):
    """A native measurement; which fields a kind must fill is a SQL check."""

    window_start: T.TimestampType = pa.Field(nullable=False)
    source_kind: T.StringType = pa.Field(isin=list(SOURCE_KINDS), nullable=False)
    orig_sensor_id: T.StringType = pa.Field(nullable=False)
    track_id: T.StringType = pa.Field(nullable=False)
    timestamp_ns: T.LongType = pa.Field(gt=0, nullable=False)
    received_ns: T.LongType = pa.Field(gt=0, nullable=False)
    range_m: T.DoubleType = pa.Field(gt=0.0, nullable=True)
    clock_source: T.StringType = pa.Field(nullable=False)
    clock_sync_age_s: T.DoubleType = pa.Field(ge=0.0, nullable=False)


class Observation(_Contract):
    """The envelope every later stage reads. Distances km, angles degrees."""

    observation_id: T.StringType = pa.Field(
        str_matches="^[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$", nullable=False
    )
    window_start: T.TimestampType = pa.Field(nullable=False)
    source_kind: T.StringType = pa.Field(isin=list(SOURCE_KINDS), nullable=False)
    source_id: T.StringType = pa.Field(nullable=False)
    sensor_timestamp: T.TimestampType = pa.Field(nullable=False)
    ingest_timestamp: T.TimestampType = pa.Field(nullable=False)
    sat_no: T.LongType = pa.Field(ge=1, le=MAX_SAT_NO, nullable=True)
    uct: T.BooleanType = pa.Field(nullable=False)
    classification_marking: T.StringType = pa.Field(nullable=False)
    data_mode: T.StringType = pa.Field(isin=["REAL", "SIMULATED", "TEST", "EXERCISE"], nullable=False)
    range_km: T.DoubleType = pa.Field(gt=0.0, lt=500_000.0, nullable=True)
    # Faster than two objects at escape speed can close; the seed's "impossible range rate".
    range_rate_km_s: T.DoubleType = pa.Field(ge=-25.0, le=25.0, nullable=True)
    azimuth_deg: T.DoubleType = pa.Field(ge=0.0, le=360.0, nullable=True)
    elevation_deg: T.DoubleType = pa.Field(ge=0.0, le=90.0, nullable=True)
    ra_deg: T.DoubleType = pa.Field(ge=0.0, le=360.0, nullable=True)
    declination_deg: T.DoubleType = pa.Field(ge=-90.0, le=90.0, nullable=True)
    max_skew_s: T.DoubleType = pa.Field(ge=0.0, nullable=False)


class FusedTrack(_Contract):
    """An estimated state with its formal covariance."""

    window_start: T.TimestampType = pa.Field(nullable=False)
    sat_no: T.LongType = pa.Field(ge=1, le=MAX_SAT_NO, nullable=False)
    epoch: T.TimestampType = pa.Field(nullable=False)
    ref_frame: T.StringType = pa.Field(isin=["TEME"], nullable=False)
    cx_x: T.DoubleType = pa.Field(gt=0.0, nullable=False)
    cy_y: T.DoubleType = pa.Field(gt=0.0, nullable=False)
    cz_z: T.DoubleType = pa.Field(gt=0.0, nullable=False)
    n_measurements: T.LongType = pa.Field(gt=6, nullable=False)
    chi2_per_dof: T.DoubleType = pa.Field(ge=0.0, nullable=False)
    catalogue_miss_km: T.DoubleType = pa.Field(ge=0.0, nullable=False)


class ConjunctionCandidate(_Contract):
    """A close approach of two catalogue objects."""

    window_start: T.TimestampType = pa.Field(nullable=False)
    tca: T.TimestampType = pa.Field(nullable=False)
    sat1_object_designator: T.LongType = pa.Field(ge=1, le=MAX_SAT_NO, nullable=False)
    sat2_object_designator: T.LongType = pa.Field(ge=1, le=MAX_SAT_NO, nullable=False)
    miss_distance_km: T.DoubleType = pa.Field(ge=0.0, nullable=False)
    relative_speed_km_s: T.DoubleType = pa.Field(ge=0.0, le=25.0, nullable=False)
