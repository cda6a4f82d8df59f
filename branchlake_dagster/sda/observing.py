"""Normalisation: three kinds of native measurement to one envelope, on Spark.

Field names follow the Unified Data Library's radar and electro-optical observations in snake case where
they exist (``sat_no``, ``orig_sensor_id``, ``track_id``, ``uct``, ``classification_marking``,
``data_mode``, ``azimuth_unc`` …), with its units in the names: km, km/s, degrees. The native measurement is
kept; nothing is turned into a position that was not measured.
"""

from __future__ import annotations

import uuid

from pyspark.sql import DataFrame

OBSERVATION_NAMESPACE = uuid.UUID("5f0f8a3e-52d4-5c5e-9d0c-1b7f6c1e2a90")
"""Name space of observation ids. Changing it would make every replayed observation a new one."""

OBSERVATION_NAME = "concat_ws('|', source_kind, orig_sensor_id, track_id, cast(timestamp_ns as string))"
"""What identifies a measurement at its source. A replay of the same measurement gives the same id."""

_DIGEST = f"sha1(concat(unhex('{OBSERVATION_NAMESPACE.hex}'), encode({OBSERVATION_NAME}, 'UTF-8')))"
_VARIANT = "lower(hex((cast(conv(substr(digest, 17, 1), 16, 10) as int) & 3) | 8))"
_UUID5 = (
    "concat(substr(digest, 1, 8), '-', substr(digest, 9, 4), '-5', substr(digest, 14, 3), '-', "
    f"{_VARIANT}, substr(digest, 18, 3), '-', substr(digest, 21, 12))"
)

MAX_SKEW_S = """
    CASE clock_source
      WHEN 'gps' THEN 1e-6D
      WHEN 'ntp' THEN 0.010D + 0.001D * floor(clock_sync_age_s / 60)
      WHEN 'onboard' THEN 1e-4D * clock_sync_age_s
      ELSE 5.0D
    END"""
"""Largest clock error by clock quality, in seconds; an unknown clock gets the widest."""

_COLUMNS = [
    f"{_UUID5} AS observation_id",
    "window_start",
    "source_kind",
    "orig_sensor_id AS source_id",
    "orig_sensor_id",
    "timestamp_micros(timestamp_ns div 1000) AS sensor_timestamp",
    "timestamp_micros(received_ns div 1000) AS ingest_timestamp",
    "sat_no",
    "track_id",
    "sat_no IS NULL AS uct",
    "'U' AS classification_marking",
    "'SIMULATED' AS data_mode",
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


def normalise(native: DataFrame) -> DataFrame:
    """The envelope of native measurements (`NATIVE_COLUMNS`), one row each, lazily.

    ``observation_id`` is a version 5 UUID (RFC 9562) of `OBSERVATION_NAME`. Instants are microseconds, as
    Iceberg v2 stores them; the sensors' nanoseconds below that are cut. State vectors and right
    ascension and declination are in TEME.
    """
    return native.selectExpr("*", f"{_DIGEST} AS digest").selectExpr(*_COLUMNS)
