"""Frames of inter-satellite links: 88 bytes, little-endian, packed, after the length that TCP frames have.

========  ======  =====================  =====================================================
offset    type    field                  meaning
========  ======  =====================  =====================================================
0         u32     version                1
4         u32     observer               catalogue number of the satellite that sends
8         u32     target                 that of the one it tells of; 0: unknown
12        u32     reserved               zero when sent, not read
16        u64     timestamp_ns           on-board clock, nanoseconds since 1970 UTC
24        3 f64   position_m             TEME
48        3 f64   velocity_m_s           TEME
72        f32     sigma_position_m       one standard deviation, each axis
76        f32     sigma_velocity_m_s     one standard deviation, each axis
80        f64     since_sync_s           since the clock was last set
========  ======  =====================  =====================================================

The layout is ours: the requirements name the frame (a state vector and the time since the clock was set),
not its bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.sda.orbits.frames import EARTH_RADIUS_KM
from branchlake_dagster.sda.wire.columns import (
    BAD_TIME,
    BAD_UNCERTAINTY,
    LATEST_NS,
    NOT_FINITE,
    WRONG_SIZE,
    Reasons,
    binary,
    decoded,
    fixed,
    numbered,
    one_array,
)

VERSION = 1
LINK = np.dtype(
    [
        ("version", "<u4"),
        ("observer", "<u4"),
        ("target", "<u4"),
        ("reserved", "<u4"),
        ("timestamp_ns", "<u8"),
        ("position_m", "<f8", 3),
        ("velocity_m_s", "<f8", 3),
        ("sigma_position_m", "<f4"),
        ("sigma_velocity_m_s", "<f4"),
        ("since_sync_s", "<f8"),
    ]
)
"""The frame without its length."""

KEY_BYTES = (4, 8)
"""The observer: its frames are in order among themselves, so they stay in one partition."""

UNKNOWN_VERSION, BELOW_SURFACE = "unknown version", "below the Earth's surface"
FASTER_THAN_LIGHT, BAD_AGE = "faster than light", "clock age is negative"
LIGHT_M_S = 299_792_458.0
"""The speed of light in vacuum."""
_SCALARS = ("sigma_position_m", "sigma_velocity_m_s", "since_sync_s")


def link_rows(native: pl.DataFrame) -> npt.NDArray[np.void]:
    """Frames of native measurements of links, not yet bytes."""
    rows = np.zeros(native.height, LINK)
    rows["version"] = VERSION
    rows["observer"] = native["orig_sensor_id"].str.strip_prefix("isl-").cast(pl.UInt32).to_numpy()
    rows["target"] = native["sat_no"].fill_null(0).to_numpy()
    rows["timestamp_ns"] = native["timestamp_ns"].to_numpy()
    rows["position_m"] = native.select("x_m", "y_m", "z_m").to_numpy()
    rows["velocity_m_s"] = native.select("vx_m_s", "vy_m_s", "vz_m_s").to_numpy()
    rows["sigma_position_m"] = native["sigma_position_m"].to_numpy()
    rows["sigma_velocity_m_s"] = native["sigma_velocity_m_s"].to_numpy()
    rows["since_sync_s"] = native["clock_sync_age_s"].to_numpy()
    return rows


def encode_links(native: pl.DataFrame) -> pa.BinaryArray:
    """Frames of native measurements of links, without their lengths."""
    return binary(link_rows(native))


def decode_links(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Native measurements (`DECODED`) of frames, row by row, and why a row is none (else null)."""
    values = one_array(values)
    reasons = Reasons(len(values))
    rows, right = fixed(values, LINK)
    reasons.add(~right, WRONG_SIZE)
    where = np.flatnonzero(right)
    position, velocity = rows["position_m"], rows["velocity_m_s"]
    vectors = np.isfinite(position).all(axis=1) & np.isfinite(velocity).all(axis=1)
    finite = vectors & np.all([np.isfinite(rows[name]) for name in _SCALARS], axis=0)
    with np.errstate(invalid="ignore", over="ignore"):
        faults: dict[str, Any] = {
            UNKNOWN_VERSION: rows["version"] != VERSION,
            NOT_FINITE: ~finite,
            BAD_TIME: (rows["timestamp_ns"] == 0) | (rows["timestamp_ns"] > LATEST_NS),
            BELOW_SURFACE: ~(np.linalg.norm(position, axis=1) >= EARTH_RADIUS_KM * 1e3),
            FASTER_THAN_LIGHT: ~(np.linalg.norm(velocity, axis=1) <= LIGHT_M_S),
            BAD_UNCERTAINTY: ~((rows["sigma_position_m"] > 0) & (rows["sigma_velocity_m_s"] > 0)),
            BAD_AGE: ~(rows["since_sync_s"] >= 0),
        }
    for text, fault in faults.items():
        whole = np.zeros(len(values), dtype=np.bool_)
        whole[where] = fault
        reasons.add(whole, text)
    target = rows["target"].astype(np.int64)
    columns = {
        "source_kind": "isl",
        "orig_sensor_id": numbered("isl", rows["observer"]),
        "track_id": pc.if_else(
            pa.array(target != 0), numbered("isl", rows["observer"], rows["target"]), None
        ),
        "sat_no": pa.array(target, mask=target == 0),
        "timestamp_ns": rows["timestamp_ns"].astype(np.int64),
        **{f"{axis}_m": position[:, number] for number, axis in enumerate("xyz")},
        **{f"v{axis}_m_s": velocity[:, number] for number, axis in enumerate("xyz")},
        "sigma_position_m": rows["sigma_position_m"].astype(np.float64),
        "sigma_velocity_m_s": rows["sigma_velocity_m_s"].astype(np.float64),
        "clock_source": "onboard",
        "clock_sync_age_s": rows["since_sync_s"],
    }
    return decoded(columns, where, reasons)
