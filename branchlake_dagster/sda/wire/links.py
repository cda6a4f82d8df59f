"""Encode and decode frames of inter-satellite links: 88 bytes, little-endian, packed.

Over TCP, each frame follows its length.

========  ======  =====================  =====================================================
offset    type    field                  meaning
========  ======  =====================  =====================================================
0         u32     version                1
4         u32     observer               catalog number of the sending satellite
8         u32     target                 catalog number of the partner; 0: unknown
12        u32     reserved               zero when sent, ignored when read
16        u64     timestamp_ns           onboard clock, nanoseconds since 1970 UTC
24        3 f64   position_m             of the partner, TEME
48        3 f64   velocity_m_s           of the partner, TEME
72        f32     sigma_position_m       one standard deviation, each axis
76        f32     sigma_velocity_m_s     one standard deviation, each axis
80        f64     since_sync_s           seconds since the clock was last set
========  ======  =====================  =====================================================

The requirements list the fields of the frame (position, velocity and the time since the clock was set), but
not its layout. This project chose the layout. TEME is the inertial frame of SGP4.
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
    build_decoded,
    join_binary,
    number_texts,
    one_array,
    split_fixed,
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
"""The layout of a frame, without the length in front of it."""

KEY_BYTES = (4, 8)
"""The bytes of the key: the observer. So its frames stay in one partition, in order."""

UNKNOWN_VERSION, BELOW_SURFACE = "unknown version", "below the Earth's surface"
FASTER_THAN_LIGHT, BAD_AGE = "faster than light", "clock age is negative"
LIGHT_M_S = 299_792_458.0
"""The speed of light in vacuum, m/s."""
_SCALARS = ("sigma_position_m", "sigma_velocity_m_s", "since_sync_s")


def link_rows(native: pl.DataFrame) -> npt.NDArray[np.void]:
    """Convert simulated measurements of links to frames, as records of `LINK`."""
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
    """Encode simulated measurements of links as frames, without the lengths in front of them."""
    return join_binary(link_rows(native))


def decode_links(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Decode link frames to rows of `DECODED`, and return each row's error (null if it is valid).

    An error is the reason why the frame is not a measurement; its row is null.
    """
    values = one_array(values)
    reasons = Reasons(len(values))
    rows, right = split_fixed(values, LINK)
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
        "orig_sensor_id": number_texts("isl", rows["observer"]),
        "track_id": pc.if_else(
            pa.array(target != 0), number_texts("isl", rows["observer"], rows["target"]), None
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
    return build_decoded(columns, where, reasons)
