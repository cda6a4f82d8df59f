"""Convert raw measurements of all kinds of sensors to rows of one table, the envelope, on Spark.

Column names follow the Unified Data Library's radar and electro-optical observations in snake case if they
have a name there (``sat_no``, ``orig_sensor_id``, ``track_id``, ``uct``, ``classification_marking``,
``data_mode``, ``azimuth_unc`` …), with the unit in the name: km, km/s, degrees. The envelope contains only
measured values: for example, a direction is not converted to a position.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.orbits.frames import EARTH_RADIUS_KM
from branchlake_dagster.sda.partitions import FIRST_WINDOW
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensors.models import MAX_RANGE_KM, MEASUREMENT_COLUMNS
from branchlake_dagster.sda.uuid_sql import uuid5_digest_sql, uuid5_from_digest_sql
from branchlake_dagster.sda.wire.links import LIGHT_M_S
from branchlake_dagster.sda.wire.radar import FASTEST_M_S

OBSERVATION_NAMESPACE = uuid.UUID("5f0f8a3e-52d4-5c5e-9d0c-1b7f6c1e2a90")
"""The namespace of observation ids. If it changed, every replayed observation would be a new one."""

OBSERVATION_NAME = "concat_ws('|', source_kind, source_id, record_id)"
"""SQL of the text that identifies an observation: kind of source, source, and record id.

The record id is a telescope's `obs_id` with its time, or the digest of a radar's or link's frame. So a
repeated poll, a frame that arrives twice and a reprocessed dead letter are the same observation.
"""

MAX_CLOCK_ERROR_S = 600.0
"""The largest accepted error of a clock: in ten minutes an object moves by a tenth of its orbit."""
RECEIPT_RESOLUTION_S = 0.001
"""The resolution of times of receipt, s. They are rounded down, so a measurement may be this much later."""

SMALLEST_UNCERTAINTY = 1e-12
"""The smallest accepted standard deviation, in km, km/s or degrees: a nanometer, or 4 nanoarcseconds.

No sensor is that precise, and the squares of much smaller numbers overflow when tracks are estimated.
"""
_UNCERTAINTIES = [name for name in MEASUREMENT_COLUMNS if "_unc" in name]

_FIRST_INSTANT = datetime.strptime(FIRST_WINDOW, "%Y-%m-%d-%H:%M").replace(tzinfo=UTC)
_REJECTION = f"""
    CASE
      WHEN sensor_timestamp < timestamp_seconds({int(_FIRST_INSTANT.timestamp())}) THEN 'before_first_window'
      WHEN unix_micros(sensor_timestamp)
        > unix_micros(received_at) + 1e6D * (max_skew_s + {RECEIPT_RESOLUTION_S}) THEN 'time_beyond_skew'
      WHEN abs(range_rate_km_s) > {FASTEST_M_S / 1e3} THEN 'impossible_range_rate'
      WHEN range_km <= 0 OR range_km >= {MAX_RANGE_KM} THEN 'impossible_range'
      WHEN elevation_deg < 0 THEN 'below_horizon'
      WHEN elevation_deg > 90 OR declination_deg NOT BETWEEN -90 AND 90
        OR azimuth_deg NOT BETWEEN 0 AND 360 OR ra_deg NOT BETWEEN 0 AND 360
        THEN 'impossible_direction'
      WHEN abs(pos_x_km) >= {MAX_RANGE_KM} OR abs(pos_y_km) >= {MAX_RANGE_KM}
        OR abs(pos_z_km) >= {MAX_RANGE_KM}
        THEN 'impossible_position'
      WHEN range_unc_km > 100 OR range_rate_unc_km_s > 10 OR elevation_unc_deg > 1
        OR declination_unc_deg > 1 OR position_unc_km > 1000 OR velocity_unc_km_s > 10
        OR least({", ".join(_UNCERTAINTIES)}) < {SMALLEST_UNCERTAINTY}
        OR max_skew_s > {MAX_CLOCK_ERROR_S}
        THEN 'implausible_uncertainty'
      WHEN pos_x_km * pos_x_km + pos_y_km * pos_y_km + pos_z_km * pos_z_km < {EARTH_RADIUS_KM**2}
        THEN 'below_surface'
      WHEN vel_x_km_s * vel_x_km_s + vel_y_km_s * vel_y_km_s + vel_z_km_s * vel_z_km_s
        > {(LIGHT_M_S / 1e3) ** 2} THEN 'faster_than_light'
      WHEN sat_no IS NOT NULL AND object_state IS NULL THEN 'unknown_object'
      WHEN object_state = 'decayed' AND coalesce(sensor_timestamp >= decayed_on + INTERVAL 2 DAYS, true)
        THEN 'decommissioned_object'
    END"""

_OBSERVATION_COLUMNS = [
    "observation_id",
    # Not date_trunc, which depends on the session's time zone.
    "timestamp_seconds(unix_micros(sensor_timestamp) div 3600000000 * 3600) AS window_start",
    "source_kind",
    "source_id",
    "source_id AS orig_sensor_id",
    "sensor_timestamp",
    "received_at AS ingest_timestamp",
    "sat_no",
    "track_id",
    "sat_no IS NULL AS uct",
    "'U' AS classification_marking",
    "data_mode",
    *MEASUREMENT_COLUMNS,
    "clock_quality",
    "max_skew_s",
]
_REJECTED_COLUMNS = [
    "observation_id",
    "reason",
    "source_kind",
    "source_id",
    "sensor_timestamp",
    "received_at AS ingest_timestamp",
    "sat_no",
    "track_id",
    "topic_partition",
    "topic_offset",
]


def to_envelope(raw: DataFrame, kind: SensorKind) -> DataFrame:
    """Convert the rows of a raw table to the columns of the envelope, as the kind's declaration defines."""
    return raw.selectExpr(
        f"'{kind.source_kind}' AS source_kind",
        "orig_sensor_id AS source_id",
        f"{kind.record_name} AS record_id",
        "sensor_timestamp",
        "received_at",
        "topic_partition",
        "topic_offset",
        f"CAST({kind.claim} AS BIGINT) AS sat_no",
        "track_id",
        *kind.envelope_columns,
        f"{kind.clock_quality} AS clock_quality",
        f"CAST({kind.max_skew_s} AS DOUBLE) AS max_skew_s",
    )


def identify_measurements(
    raw_by_kind: Mapping[str, DataFrame], objects: DataFrame, kinds: Sequence[SensorKind]
) -> DataFrame:
    """Unite raw measurements, and add to each an `observation_id`, and a `reason` if it is rejected.

    Measurements with the same id become one row: the first one that is rejected as `time_beyond_skew`, else
    the first one received that is not rejected, else the first one. The other columns are those of
    `to_envelope`.

    Args:
        raw_by_kind: Rows of the raw tables by source kind. A frame without columns means that the table does
            not exist yet; at least one must exist.
        objects: The registry of objects, with `sat_no`, `state` and `decay_date`.
        kinds: The declarations of these kinds.
    """
    frames = [
        to_envelope(raw_by_kind[kind.source_kind], kind)
        for kind in kinds
        if raw_by_kind[kind.source_kind].columns
    ]
    united = reduce(DataFrame.unionByName, frames)
    states = F.broadcast(objects.selectExpr("sat_no", "state AS object_state", "decay_date AS decayed_on"))
    named = united.join(states, on="sat_no", how="left").withColumn(
        "name_digest", F.expr(uuid5_digest_sql(OBSERVATION_NAMESPACE, OBSERVATION_NAME))
    )
    identified = named.withColumn("observation_id", F.expr(uuid5_from_digest_sql("name_digest"))).withColumn(
        "reason", F.expr(_REJECTION)
    )
    # The first copy shows how far a clock is ahead. A copy that arrives much later looks punctual.
    rank = F.when(F.col("reason") == "time_beyond_skew", 0).when(F.col("reason").isNull(), 1).otherwise(2)
    first = Window.partitionBy("observation_id").orderBy(
        rank, "received_at", "topic_partition", "topic_offset"
    )
    # Not row_number() = 1: Spark would sort all rows once more before the shuffle, to leave out few copies.
    return (
        identified.withColumn("earlier_copy", F.lag(F.lit(True)).over(first))
        .where("earlier_copy IS NULL")
        .drop("earlier_copy")
    )


def build_observations(measurements: DataFrame, *, data_mode: str) -> DataFrame:
    """Return the accepted rows of `identify_measurements` as observations.

    ``observation_id`` is a version 5 UUID (RFC 9562) of `OBSERVATION_NAME`. Times are in microseconds, as
    Iceberg v2 stores them; the sensors' nanoseconds are truncated. Positions, velocities, right ascension and
    declination are in TEME, the inertial frame of SGP4.
    """
    accepted = measurements.where("reason IS NULL").withColumn("data_mode", F.lit(data_mode))
    return accepted.selectExpr(*_OBSERVATION_COLUMNS)


def build_rejected_observations(measurements: DataFrame) -> DataFrame:
    """Return the rejected measurements, each with the reason and the topic position of its record."""
    return measurements.where("reason IS NOT NULL").selectExpr(*_REJECTED_COLUMNS)
