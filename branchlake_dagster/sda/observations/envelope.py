"""The envelope of observations: raw measurements of all kinds of sensors as rows of one table, on Spark.

Column names follow the Unified Data Library's radar and electro-optical observations in snake case where
they exist (``sat_no``, ``orig_sensor_id``, ``track_id``, ``uct``, ``classification_marking``,
``data_mode``, ``azimuth_unc`` …), with the unit in the name: km, km/s, degrees. The native measurement is
kept: nothing is turned into a position that was not measured.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import reduce

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.contracts.observations import MAX_RANGE_KM
from branchlake_dagster.sda.contracts.raw import RawLink, RawOptical, RawRadar
from branchlake_dagster.sda.orbits.frames import EARTH_RADIUS_KM
from branchlake_dagster.sda.partitions import FIRST_WINDOW
from branchlake_dagster.sda.wire.links import LIGHT_M_S
from branchlake_dagster.sda.wire.radar import FASTEST_M_S

OBSERVATION_NAMESPACE = uuid.UUID("5f0f8a3e-52d4-5c5e-9d0c-1b7f6c1e2a90")
"""The namespace of observation ids. If it changed, every replayed observation would be a new one."""

OBSERVATION_NAME = "concat_ws('|', source_kind, orig_sensor_id, record_id)"
"""What identifies an observation: the kind of source, the source, and the source's own record.

The record is a telescope's `obs_id` with its instant, or the digest of a radar's or link's frame. So a
repeated poll, a frame that arrives twice and a reprocessed dead letter are the same observation.
"""

MAX_CLOCK_ERROR_S = 600.0
"""A clock that may be further off says nothing of where an object is: ten minutes are a tenth of an orbit."""
RECEIPT_RESOLUTION_S = 0.001
"""Times of receipt are milliseconds, rounded down. An instant may be this much later than its receipt."""

_RAW_TYPES = {
    name: column.dtype.type
    for contract in (RawRadar, RawOptical, RawLink)
    for name, column in contract.to_schema().columns.items()
}
_RECORD_IDS = {
    "radar": "frame_digest",
    "optical": "concat(obs_id, '|', timestamp_ns)",
    "isl": "frame_digest",
}

_DIGEST = f"sha1(concat(unhex('{OBSERVATION_NAMESPACE.hex}'), encode({OBSERVATION_NAME}, 'UTF-8')))"
_VARIANT = "lower(hex((cast(conv(substr(name_digest, 17, 1), 16, 10) as int) & 3) | 8))"
_UUID5 = (
    "concat(substr(name_digest, 1, 8), '-', substr(name_digest, 9, 4), '-5', substr(name_digest, 14, 3), '-',"
    f" {_VARIANT}, substr(name_digest, 18, 3), '-', substr(name_digest, 21, 12))"
)

MAX_SKEW_S = """
    CASE clock_source
      WHEN 'gps' THEN 1e-6D
      WHEN 'ntp' THEN 0.010D + 0.001D * floor(clock_sync_age_s / 60)
      WHEN 'onboard' THEN 1e-4D * clock_sync_age_s
      ELSE 5.0D
    END"""
"""The largest error of a clock by its quality, in seconds. An unknown clock has the widest."""

_FIRST_INSTANT = datetime.strptime(FIRST_WINDOW, "%Y-%m-%d-%H:%M").replace(tzinfo=UTC)
_REJECTION = f"""
    CASE
      WHEN sensor_timestamp < timestamp_seconds({int(_FIRST_INSTANT.timestamp())}) THEN 'before_first_window'
      WHEN unix_micros(sensor_timestamp)
        > unix_micros(received_at) + 1e6D * ({MAX_SKEW_S} + {RECEIPT_RESOLUTION_S}) THEN 'time_beyond_skew'
      WHEN abs(range_rate_m_s) > {FASTEST_M_S} THEN 'impossible_range_rate'
      WHEN range_m >= {MAX_RANGE_KM * 1e3} THEN 'impossible_range'
      WHEN el_rad < 0 THEN 'below_horizon'
      WHEN sigma_range_m > 1e5 OR sigma_range_rate_m_s > 1e4 OR sigma_arcsec > 3600
        OR sigma_position_m > 1e6 OR sigma_velocity_m_s > 1e4 OR {MAX_SKEW_S} > {MAX_CLOCK_ERROR_S}
        THEN 'implausible_uncertainty'
      WHEN x_m * x_m + y_m * y_m + z_m * z_m < {(EARTH_RADIUS_KM * 1e3) ** 2} THEN 'below_surface'
      WHEN vx_m_s * vx_m_s + vy_m_s * vy_m_s + vz_m_s * vz_m_s > {LIGHT_M_S**2} THEN 'faster_than_light'
      WHEN sat_no IS NOT NULL AND object_state IS NULL THEN 'unknown_object'
      WHEN object_state = 'decayed' AND coalesce(sensor_timestamp >= decayed_on + INTERVAL 2 DAYS, true)
        THEN 'decommissioned_object'
    END"""

_OBSERVATION_COLUMNS = [
    "observation_id",
    # Not date_trunc, which depends on the session's time zone.
    "timestamp_seconds(unix_micros(sensor_timestamp) div 3600000000 * 3600) AS window_start",
    "source_kind",
    "orig_sensor_id AS source_id",
    "orig_sensor_id",
    "sensor_timestamp",
    "received_at AS ingest_timestamp",
    "sat_no",
    "track_id",
    "sat_no IS NULL AS uct",
    "'U' AS classification_marking",
    "data_mode",
    "sensor_lat_deg",
    "sensor_lon_deg",
    "sensor_alt_km",
    "range_m / 1000 AS range_km",
    "sigma_range_m / 1000 AS range_unc_km",
    "range_rate_m_s / 1000 AS range_rate_km_s",
    "sigma_range_rate_m_s / 1000 AS range_rate_unc_km_s",
    "degrees(az_rad) AS azimuth_deg",
    "degrees(sigma_angle_rad) / cos(el_rad) AS azimuth_unc_deg",
    "degrees(el_rad) AS elevation_deg",
    "degrees(sigma_angle_rad) AS elevation_unc_deg",
    "degrees(ra_rad) AS ra_deg",
    "sigma_arcsec / 3600 / cos(dec_rad) AS ra_unc_deg",
    "degrees(dec_rad) AS declination_deg",
    "sigma_arcsec / 3600 AS declination_unc_deg",
    *(f"{axis}_m / 1000 AS pos_{axis}_km" for axis in "xyz"),
    *(f"v{axis}_m_s / 1000 AS vel_{axis}_km_s" for axis in "xyz"),
    "sigma_position_m / 1000 AS position_unc_km",
    "sigma_velocity_m_s / 1000 AS velocity_unc_km_s",
    "clock_source AS clock_quality",
    f"{MAX_SKEW_S} AS max_skew_s",
]
_REJECTED_COLUMNS = [
    "observation_id",
    "reason",
    "source_kind",
    "orig_sensor_id AS source_id",
    "sensor_timestamp",
    "received_at AS ingest_timestamp",
    "sat_no",
    "track_id",
    "topic_partition",
    "topic_offset",
]


def identify_measurements(raw_by_kind: Mapping[str, DataFrame], objects: DataFrame) -> DataFrame:
    """Unite raw measurements and identify each: its `observation_id`, and the `reason` if it is rejected.

    Measurements with the same id become one row: the first received that is not rejected, else the first. The
    columns are those of the raw tables; a column that a kind does not have is null. A frame without columns
    means that the raw table does not exist yet.

    Args:
        raw_by_kind: rows of the raw tables by source kind (`radar`, `optical`, `isl`).
        objects: the registry of objects, with `sat_no`, `state` and `decay_date`.
    """
    frames = [
        frame.selectExpr(f"'{kind}' AS source_kind", f"{_RECORD_IDS[kind]} AS record_id", "*")
        for kind, frame in raw_by_kind.items()
        if frame.columns
    ]
    united = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)
    for name, kind in _RAW_TYPES.items():
        if name not in united.columns:
            united = united.withColumn(name, F.lit(None).cast(kind))
    states = F.broadcast(objects.selectExpr("sat_no", "state AS object_state", "decay_date AS decayed_on"))
    named = united.join(states, on="sat_no", how="left").withColumn("name_digest", F.expr(_DIGEST))
    identified = named.withColumn("observation_id", F.expr(_UUID5)).withColumn("reason", F.expr(_REJECTION))
    first = Window.partitionBy("observation_id").orderBy(
        F.col("reason").isNotNull(), "received_at", "topic_partition", "topic_offset"
    )
    return identified.withColumn("copy", F.row_number().over(first)).where("copy = 1").drop("copy")


def build_observations(measurements: DataFrame, *, data_mode: str) -> DataFrame:
    """Return the observations of identified measurements, without the rejected ones.

    ``observation_id`` is a version 5 UUID (RFC 9562) of `OBSERVATION_NAME`. Instants are microseconds, as
    Iceberg v2 stores them; the sensors' nanoseconds below that are truncated. State vectors, right ascension
    and declination are in TEME.
    """
    accepted = measurements.where("reason IS NULL").withColumn("data_mode", F.lit(data_mode))
    return accepted.selectExpr(*_OBSERVATION_COLUMNS)


def build_rejected_observations(measurements: DataFrame) -> DataFrame:
    """Return the rejected measurements, each with the reason and the topic position of its record."""
    return measurements.where("reason IS NOT NULL").selectExpr(*_REJECTED_COLUMNS)
