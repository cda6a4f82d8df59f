"""The columns of simulated measurements, in the units of the sensors' messages."""

from __future__ import annotations

import polars as pl

SOURCE_KINDS = ("radar", "optical", "isl")
"""The simulated kinds of sensor; `isl` are inter-satellite links."""

NATIVE_COLUMNS: dict[str, pl.DataType] = {
    "window_start": pl.Datetime("us", "UTC"),
    "source_kind": pl.String(),
    "orig_sensor_id": pl.String(),
    "track_id": pl.String(),
    "sat_no": pl.Int64(),
    "timestamp_ns": pl.Int64(),
    "received_ns": pl.Int64(),
    "sensor_lat_deg": pl.Float64(),
    "sensor_lon_deg": pl.Float64(),
    "sensor_alt_km": pl.Float64(),
    "range_m": pl.Float64(),
    "range_rate_m_s": pl.Float64(),
    "az_rad": pl.Float64(),
    "el_rad": pl.Float64(),
    "ra_rad": pl.Float64(),
    "dec_rad": pl.Float64(),
    "x_m": pl.Float64(),
    "y_m": pl.Float64(),
    "z_m": pl.Float64(),
    "vx_m_s": pl.Float64(),
    "vy_m_s": pl.Float64(),
    "vz_m_s": pl.Float64(),
    "sigma_range_m": pl.Float64(),
    "sigma_range_rate_m_s": pl.Float64(),
    "sigma_angle_rad": pl.Float64(),
    "sigma_arcsec": pl.Float64(),
    "sigma_position_m": pl.Float64(),
    "sigma_velocity_m_s": pl.Float64(),
    "clock_source": pl.String(),
    "clock_sync_age_s": pl.Float64(),
}
"""One row per measurement.

Radars fill the columns from range to elevation, telescopes `ra_rad` and `dec_rad`, links position and
velocity in TEME. ``timestamp_ns`` is the time by the sensor's clock and ``received_ns`` the time of receipt,
nanoseconds since 1970 UTC. ``sigma_angle_rad`` and ``sigma_arcsec`` are errors of a direction on the sphere:
the errors of azimuth and right ascension are larger by 1/cos of elevation and declination.
"""
