"""Contracts of the raw tables: measurements as they were received, one table for each kind of sensor.

Names and units are those of the sensors' messages. Columns that come from the record and not from the
measurement have no checks, because the ingestion fills them in every row.
"""

# No `from __future__ import annotations`: pandera reads the annotations.
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import Contract, optional_column, required_column


class Received(Contract):
    """The columns of every raw table: sensor, track, time, clock, and the position of the record."""

    orig_sensor_id: T.StringType = required_column("Sensor, as its owner calls it.")
    track_id: T.StringType = optional_column("The sensor's own track that the measurement belongs to.")
    timestamp_ns: T.LongType = required_column("Instant by the sensor's clock, since 1970 UTC.", "ns", gt=0)
    sensor_timestamp: T.TimestampType = required_column("The same instant in microseconds, UTC.")
    clock_source: T.StringType = required_column(
        "Source of the sensor clock's time.", isin=["gps", "ntp", "onboard", "unknown"]
    )
    clock_sync_age_s: T.DoubleType = required_column("Time since that clock was last set.", "s", ge=0.0)
    received_at: T.TimestampType = optional_column("Instant of the receipt, UTC.")
    topic_partition: T.IntegerType = optional_column("Topic partition of the record.")
    topic_offset: T.LongType = optional_column("Offset of the record in that partition.")


class OnGround(Received):
    """The columns of every raw table of ground sensors: those of `Received`, and the sensor's coordinates."""

    sensor_lat_deg: T.DoubleType = required_column(
        "Geodetic latitude of the sensor, WGS-84.", "deg", ge=-90.0, le=90.0
    )
    sensor_lon_deg: T.DoubleType = required_column("Longitude of the sensor, east positive, WGS-84.", "deg")
    sensor_alt_km: T.DoubleType = required_column("Height of the sensor above the WGS-84 ellipsoid.", "km")


class RawRadar(OnGround):
    """The measurement in a radar's datagram."""

    frame_digest: T.StringType = optional_column("SHA-256 digest of the datagram, in hexadecimal.")

    range_m: T.DoubleType = required_column("Distance from the sensor.", "m", gt=0.0)
    range_rate_m_s: T.DoubleType = required_column(
        "Rate of the distance, positive away from the sensor.", "m/s", ge=-25_000.0, le=25_000.0
    )
    az_rad: T.DoubleType = required_column("Azimuth from north over east.", "rad", ge=0.0)
    el_rad: T.DoubleType = required_column("Elevation above the horizon.", "rad")
    sigma_range_m: T.DoubleType = required_column("Standard deviation of the distance.", "m", gt=0.0)
    sigma_range_rate_m_s: T.DoubleType = required_column(
        "Standard deviation of the range rate.", "m/s", gt=0.0
    )
    sigma_angle_rad: T.DoubleType = required_column(
        "Standard deviation of a direction on the sphere.", "rad", gt=0.0
    )


class RawOptical(OnGround):
    """The measurement in an item of a telescope's page."""

    obs_id: T.StringType = required_column("UUID that the telescope gave the measurement, in lower case.")
    ra_rad: T.DoubleType = required_column("Topocentric right ascension, axes of TEME.", "rad", ge=0.0)
    dec_rad: T.DoubleType = required_column("Topocentric declination, axes of TEME.", "rad")
    sigma_arcsec: T.DoubleType = required_column(
        "Standard deviation of a direction on the sphere.", "arcsec", gt=0.0
    )


class RawLink(Received):
    """The measurement in a frame of an inter-satellite link: the position and velocity of its partner."""

    frame_digest: T.StringType = optional_column("SHA-256 digest of the frame, in hexadecimal.")
    sat_no: T.LongType = optional_column("Catalog number of the partner, as the sending satellite names it.")

    x_m: T.DoubleType = required_column("Position along x, TEME.", "m")
    y_m: T.DoubleType = required_column("Position along y, TEME.", "m")
    z_m: T.DoubleType = required_column("Position along z, TEME.", "m")
    vx_m_s: T.DoubleType = required_column("Velocity along x, TEME.", "m/s")
    vy_m_s: T.DoubleType = required_column("Velocity along y, TEME.", "m/s")
    vz_m_s: T.DoubleType = required_column("Velocity along z, TEME.", "m/s")
    sigma_position_m: T.DoubleType = required_column(
        "Standard deviation of the position, per axis.", "m", gt=0.0
    )
    sigma_velocity_m_s: T.DoubleType = required_column(
        "Standard deviation of the velocity, per axis.", "m/s", gt=0.0
    )
