"""Encode and decode radar datagrams: 64 bytes, little-endian, packed.

========  ======  =================  ==========================================================
offset    type    field              meaning
========  ======  =================  ==========================================================
0         u32     array_id           the radar: 1 is ``radar-01``
4         u32     target_track_id    the radar's own track number; 0: none
8         u64     timestamp_ns       the sensor's clock, nanoseconds since 1970 UTC
16        f64     range_m
24        f64     range_rate_m_s     positive away from the radar
32        f64     azimuth_rad        from north over east
40        f64     elevation_rad
48        f32     sigma_range_m      one standard deviation
52        f32     sigma_rate_m_s     one standard deviation
56        8 bytes reserved           zero when sent, ignored when read
========  ======  =================  ==========================================================

The requirements state a size of 64 bytes, but list fields of 60 bytes, with four reserved bytes. Receivers
check the size, so this layout has eight reserved bytes. The uncertainty of the angles is not sent; decoding
adds the value of the simulated network (`Noise.angle_rad`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.sda.sensors.hashing import track_numbers
from branchlake_dagster.sda.sensors.network import RADARS, Noise
from branchlake_dagster.sda.wire.columns import (
    BAD_ANGLE,
    BAD_TIME,
    BAD_UNCERTAINTY,
    LATEST_NS,
    NOT_FINITE,
    UNKNOWN_SENSOR,
    WRONG_SIZE,
    Reasons,
    build_decoded,
    join_binary,
    one_array,
    split_fixed,
)

RADAR = np.dtype(
    [
        ("array_id", "<u4"),
        ("target_track_id", "<u4"),
        ("timestamp_ns", "<u8"),
        ("range_m", "<f8"),
        ("range_rate_m_s", "<f8"),
        ("azimuth_rad", "<f8"),
        ("elevation_rad", "<f8"),
        ("sigma_range_m", "<f4"),
        ("sigma_rate_m_s", "<f4"),
        ("reserved", "<u8"),
    ]
)
"""The layout of a datagram."""

KEY_BYTES = (0, 16)
"""The bytes of the key: radar, track and time, which identify the measurement."""

BAD_RANGE, IMPOSSIBLE_RATE = "range is not positive", "impossible range rate"
FASTEST_M_S = 25_000.0
"""The largest accepted range rate, m/s: two objects at escape speed approach each other more slowly."""

_FLOATS = ("range_m", "range_rate_m_s", "azimuth_rad", "elevation_rad", "sigma_range_m", "sigma_rate_m_s")
_NUMBERS = np.array([int(site.sensor_id.removeprefix("radar-")) for site in RADARS])
_PLACES = np.array([[site.lat_deg, site.lon_deg, site.alt_km] for site in RADARS])


def radar_rows(native: pl.DataFrame) -> npt.NDArray[np.void]:
    """Convert simulated measurements of radars to datagrams, as records of `RADAR`."""
    rows = np.zeros(native.height, RADAR)
    number = native["orig_sensor_id"].str.strip_prefix("radar-").cast(pl.UInt32)
    rows["array_id"] = number.to_numpy()
    rows["target_track_id"] = track_numbers(native["track_id"])
    same = {"azimuth_rad": "az_rad", "elevation_rad": "el_rad", "sigma_rate_m_s": "sigma_range_rate_m_s"}
    for name in ("timestamp_ns", *_FLOATS):
        rows[name] = native[same.get(name, name)].to_numpy()
    return rows


def encode_radar(native: pl.DataFrame) -> pa.BinaryArray:
    """Encode simulated measurements of radars as datagrams."""
    return join_binary(radar_rows(native))


def decode_radar(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Decode radar datagrams to rows of `DECODED`, and return each row's error (null if it is valid).

    An error is the reason why the datagram is not a measurement; its row is null.
    """
    values = one_array(values)
    reasons = Reasons(len(values))
    rows, right = split_fixed(values, RADAR)
    reasons.add(~right, WRONG_SIZE)
    where = np.flatnonzero(right)
    site = np.searchsorted(_NUMBERS, rows["array_id"])
    known = _NUMBERS[np.minimum(site, len(_NUMBERS) - 1)] == rows["array_id"]
    site = np.where(known, site, 0)
    finite = np.all([np.isfinite(rows[name]) for name in _FLOATS], axis=0)
    azimuth, elevation = rows["azimuth_rad"], rows["elevation_rad"]
    with np.errstate(invalid="ignore"):
        faults = {
            NOT_FINITE: ~finite,
            UNKNOWN_SENSOR: ~known,
            BAD_TIME: (rows["timestamp_ns"] == 0) | (rows["timestamp_ns"] > LATEST_NS),
            BAD_RANGE: ~(rows["range_m"] > 0),
            IMPOSSIBLE_RATE: ~(np.abs(rows["range_rate_m_s"]) <= FASTEST_M_S),
            BAD_ANGLE: ~((azimuth >= 0) & (azimuth <= 2 * np.pi) & (np.abs(elevation) <= np.pi / 2)),
            BAD_UNCERTAINTY: ~((rows["sigma_range_m"] > 0) & (rows["sigma_rate_m_s"] > 0)),
        }
    for text, fault in faults.items():
        whole = np.zeros(len(values), dtype=np.bool_)
        whole[where] = fault
        reasons.add(whole, text)
    track = rows["target_track_id"]
    sensors = pa.array([one.sensor_id for one in RADARS]).take(pa.array(site))
    columns = {
        "source_kind": "radar",
        "orig_sensor_id": sensors,
        "track_id": pc.binary_join_element_wise(
            sensors, pa.array(track, mask=track == 0).cast(pa.string()), "-", null_handling="emit_null"
        ),
        "timestamp_ns": rows["timestamp_ns"].astype(np.int64),
        "sensor_lat_deg": _PLACES[site, 0],
        "sensor_lon_deg": _PLACES[site, 1],
        "sensor_alt_km": _PLACES[site, 2],
        "range_m": rows["range_m"],
        "range_rate_m_s": rows["range_rate_m_s"],
        "az_rad": azimuth,
        "el_rad": elevation,
        "sigma_range_m": rows["sigma_range_m"].astype(np.float64),
        "sigma_range_rate_m_s": rows["sigma_rate_m_s"].astype(np.float64),
        "sigma_angle_rad": Noise().angle_rad,
        "clock_source": "gps",
        "clock_sync_age_s": 0.0,
    }
    return build_decoded(columns, where, reasons)
