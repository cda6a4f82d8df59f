"""Sweeping radars that send datagrams of 24 bytes, big-endian: each return by itself, every 250 ms.

========  ======  =================  ==========================================================
offset    type    field              meaning
========  ======  =================  ==========================================================
0         u32     sensor_id          the radar: 1 is ``sweep-01``
4         f32     azimuth            degrees
8         f32     elevation          degrees
12        f32     range              km
16        u64     timestamp          milliseconds
========  ======  =================  ==========================================================

The requirements give offsets, types, byte order and units. They leave open, and this module decides:

- Longer datagrams: the example reads their first 24 bytes. Here they are dead letters, because a frame of the
  other radar format would be read as noise. Shorter ones are discarded there and are dead letters here.
- The zero of the azimuth: north, over east. The zero of the elevation: the horizon.
- The time scale: UTC since 1970. What disciplines the clock: NTP, with an error of up to 10 ms.
- The places of the radars: those of the simulated network, by number.
- The uncertainty: 50 m of range, which contains 10 ms of the clock at 7.5 km/s, and 0.03 degrees.

The format has neither a range rate nor a number of the track. Range and direction give a position, so each
return is associated alone: there is no track whose other returns could decide between neighbors.
"""

# No `from __future__ import annotations`: pandera reads the annotations.
import numpy as np
import pyarrow as pa
import pyspark.sql.types as T  # noqa: N812 - Spark's own abbreviation

from branchlake_dagster.sda.contracts.fields import optional_column, required_column
from branchlake_dagster.sda.contracts.raw import OnGround
from branchlake_dagster.sda.sensor_kinds.declaration import ON_GROUND, SensorKind, decoded_columns
from branchlake_dagster.sda.sensors.network import RADARS
from branchlake_dagster.sda.wire.columns import (
    BAD_ANGLE,
    BAD_TIME,
    LATEST_NS,
    NOT_FINITE,
    UNKNOWN_SENSOR,
    WRONG_SIZE,
    Reasons,
    build_decoded,
    one_array,
    split_fixed,
)

SWEEP = np.dtype(
    [
        ("sensor_id", ">u4"),
        ("azimuth_deg", ">f4"),
        ("elevation_deg", ">f4"),
        ("range_km", ">f4"),
        ("timestamp_ms", ">u8"),
    ]
)
"""The layout of a datagram."""

BAD_RANGE = "range is not positive"
_VALUES = ("range_km", "azimuth_deg", "elevation_deg")
_NUMBERS = np.array([int(site.sensor_id.removeprefix("radar-")) for site in RADARS])
_NAMES = pa.array([f"sweep-{number:02d}" for number in _NUMBERS])
_PLACES = np.array([[site.lat_deg, site.lon_deg, site.alt_km] for site in RADARS])


class RawSweepRadar(OnGround):
    """The measurement in a datagram of a sweeping radar."""

    frame_digest: T.StringType = optional_column("SHA-256 digest of the datagram, in hexadecimal.")

    range_km: T.DoubleType = required_column("Distance from the sensor.", "km", gt=0.0)
    azimuth_deg: T.DoubleType = required_column("Azimuth from north over east.", "deg", ge=0.0, le=360.0)
    elevation_deg: T.DoubleType = required_column("Elevation above the horizon.", "deg", ge=-90.0, le=90.0)


def decode_sweep(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Decode datagrams to one row each, and return each row's error (null if it is a measurement)."""
    values = one_array(values)
    reasons = Reasons(len(values))
    rows, right = split_fixed(values, SWEEP)
    reasons.add(~right, WRONG_SIZE)
    where = np.flatnonzero(right)
    site = np.minimum(np.searchsorted(_NUMBERS, rows["sensor_id"]), len(_NUMBERS) - 1)
    milliseconds = rows["timestamp_ms"].astype(np.uint64)
    measured = {name: rows[name].astype(np.float64) for name in _VALUES}
    azimuth, elevation = measured["azimuth_deg"], measured["elevation_deg"]
    with np.errstate(invalid="ignore"):
        faults = {
            NOT_FINITE: ~np.all([np.isfinite(one) for one in measured.values()], axis=0),
            UNKNOWN_SENSOR: _NUMBERS[site] != rows["sensor_id"],
            BAD_TIME: (milliseconds == 0) | (milliseconds > LATEST_NS // 1_000_000),
            BAD_RANGE: ~(measured["range_km"] > 0),
            BAD_ANGLE: ~((azimuth >= 0) & (azimuth <= 360) & (np.abs(elevation) <= 90)),
        }
    for text, fault in faults.items():
        whole = np.zeros(len(values), dtype=np.bool_)
        whole[where] = fault
        reasons.add(whole, text)
    columns = {
        **measured,
        "orig_sensor_id": _NAMES.take(pa.array(site)),
        "timestamp_ns": np.minimum(milliseconds, LATEST_NS // 1_000_000).astype(np.int64) * 1_000_000,
        "clock_source": "ntp",
        "clock_sync_age_s": 0.0,
        **{name: _PLACES[site, k] for k, name in enumerate(ON_GROUND)},
    }
    return build_decoded(columns, where, reasons, decoded_columns(RawSweepRadar))


SWEEP_RADAR = SensorKind(
    source_kind="sweep_radar",
    name="sweep_radar",
    decode=decode_sweep,
    contract=RawSweepRadar,
    measures=("range_km", "azimuth_deg", "elevation_deg"),
    envelope={
        **ON_GROUND,
        "range_km": "range_km",
        "range_unc_km": "0.05D",
        "azimuth_deg": "azimuth_deg",
        "azimuth_unc_deg": "0.03D / cos(radians(elevation_deg))",
        "elevation_deg": "elevation_deg",
        "elevation_unc_deg": "0.03D",
    },
    # The next sweep comes after 250 ms, so a later message is outdated.
    allowed_lateness_s=0.25,
)
