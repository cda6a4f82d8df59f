"""Optical measurements: an item of a page of JSON each.

Fields: ``obs_id`` (text, a UUID), ``timestamp_ns`` (integer, nanoseconds since 1970 UTC), ``ra_rad``,
``dec_rad`` (topocentric, TEME), ``sigma_arcsec``, ``site_id`` (as ``optical-01``). Ours beside these, each of
which may be absent: ``track_id`` (text: the telescope's own track), ``clock_sync_age_s``; without it the
clock counts as unknown. Other fields are not read: a telescope does not know which object it sees.

A page is asked for with ``since`` as an integer in ``timestamp_ns``' unit (elsewhere in the requirements it
is a time of RFC 3339); items after it come, it itself not (the requirements leave that open).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from branchlake_dagster.sda.sensors.hashing import mixed, track_numbers
from branchlake_dagster.sda.sensors.network import TELESCOPES
from branchlake_dagster.sda.wire.columns import (
    BAD_ANGLE,
    BAD_TIME,
    BAD_UNCERTAINTY,
    NOT_FINITE,
    UNKNOWN_SENSOR,
    Reasons,
    decoded,
    one_array,
)

KEY_FIELD, CURSOR_FIELD = "obs_id", "timestamp_ns"

MALFORMED, BAD_ID, BAD_AGE = "not the JSON of a measurement", "malformed UUID", "clock age is negative"
_REQUIRED = {
    "obs_id": pa.string(),
    "timestamp_ns": pa.int64(),
    "ra_rad": pa.float64(),
    "dec_rad": pa.float64(),
    "sigma_arcsec": pa.float64(),
    "site_id": pa.string(),
}
_OPTIONAL = {"track_id": pa.string(), "clock_sync_age_s": pa.float64()}
_ITEM = pa.struct([*_REQUIRED.items(), *_OPTIONAL.items()])
_UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_SITES = {site.sensor_id: number for number, site in enumerate(TELESCOPES)}
_PLACES = np.array([[site.lat_deg, site.lon_deg, site.alt_km] for site in TELESCOPES])


def missing(field: str) -> str:
    """The reason for an item without a field."""
    return f"{field} is missing"


def encode_optical(native: pl.DataFrame) -> pa.BinaryArray:
    """Items of native measurements of telescopes. ``obs_id`` follows from site, object and instant."""
    numbers = track_numbers(native["track_id"])
    named = native.select(
        obs_id=pl.Series(observation_ids(native), dtype=pl.String),
        timestamp_ns="timestamp_ns",
        ra_rad="ra_rad",
        dec_rad="dec_rad",
        sigma_arcsec="sigma_arcsec",
        site_id="orig_sensor_id",
        track_id=native["orig_sensor_id"] + "-" + pl.Series(numbers).cast(pl.String),
        clock_sync_age_s="clock_sync_age_s",
    )
    texts = named.select(pl.struct(pl.all()).struct.json_encode().cast(pl.Binary)).to_series()
    return texts.to_arrow().cast(pa.binary())


def observation_ids(native: pl.DataFrame) -> list[str]:
    """A UUID (version 8 of RFC 9562: by a hash of our own) for each measurement of a telescope."""
    site = native["orig_sensor_id"].str.strip_prefix("optical-").cast(pl.Int64).to_numpy()
    objects = native["sat_no"].fill_null(0).to_numpy()
    words = np.stack(
        [mixed(native["timestamp_ns"].to_numpy(), salt, objects, site) for salt in (1, 2)], axis=1
    )
    raw = words.astype(">u8").view(np.uint8).reshape(-1, 16)
    raw[:, 6] = raw[:, 6] & 0x0F | 0x80
    raw[:, 8] = raw[:, 8] & 0x3F | 0x80
    digits = np.frombuffer(raw.tobytes().hex().encode(), np.uint8).reshape(-1, 32)
    text = np.insert(digits, (8, 12, 16, 20), ord("-"), axis=1)
    return np.ascontiguousarray(text).view("S36").ravel().astype(str).tolist()


def decode_optical(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Native measurements (`DECODED`) of items, row by row, and why a row is none (else null)."""
    values = one_array(values)
    reasons = Reasons(len(values))
    where, items = _parsed(values)
    there = np.zeros(len(values), dtype=np.bool_)
    there[where] = True
    reasons.add(~there, MALFORMED)
    fields = dict(zip((*_REQUIRED, *_OPTIONAL), items.flatten(), strict=True))
    numbers = {name: _floats(fields[name]) for name in ("ra_rad", "dec_rad", "sigma_arcsec")}
    age = _floats(pc.fill_null(fields["clock_sync_age_s"], 0.0))
    time = pc.fill_null(fields["timestamp_ns"], 0).to_numpy(zero_copy_only=False)
    site = pc.index_in(fields["site_id"], pa.array(list(_SITES)))
    finite = np.all([np.isfinite(one) for one in (*numbers.values(), age)], axis=0)
    ra, dec = numbers["ra_rad"], numbers["dec_rad"]
    faults: dict[str, Any] = {missing(name): _bools(pc.is_null(fields[name])) for name in _REQUIRED}
    with np.errstate(invalid="ignore"):
        faults |= {
            BAD_ID: ~_bools(pc.fill_null(pc.match_substring_regex(fields["obs_id"], _UUID), False)),
            NOT_FINITE: ~finite,
            UNKNOWN_SENSOR: _bools(pc.is_null(site)),
            BAD_TIME: ~(time > 0),
            BAD_ANGLE: ~((ra >= 0) & (ra <= 2 * np.pi) & (np.abs(dec) <= np.pi / 2)),
            BAD_UNCERTAINTY: ~(numbers["sigma_arcsec"] > 0),
            BAD_AGE: ~(age >= 0),
        }
    for reason, fault in faults.items():
        whole = np.zeros(len(values), dtype=np.bool_)
        whole[where] = fault
        reasons.add(whole, reason)
    place = _PLACES[pc.fill_null(site, 0).to_numpy(zero_copy_only=False)]
    synced = pc.is_valid(fields["clock_sync_age_s"])
    columns = {
        "obs_id": pc.utf8_lower(fields["obs_id"]),
        "source_kind": "optical",
        "orig_sensor_id": fields["site_id"],
        "track_id": pc.coalesce(fields["track_id"], fields["obs_id"]),
        "timestamp_ns": time,
        "sensor_lat_deg": place[:, 0],
        "sensor_lon_deg": place[:, 1],
        "sensor_alt_km": place[:, 2],
        "ra_rad": ra,
        "dec_rad": dec,
        "sigma_arcsec": numbers["sigma_arcsec"],
        "clock_source": pc.if_else(synced, "ntp", "unknown"),
        "clock_sync_age_s": age,
    }
    return decoded(columns, where, reasons)


def _parsed(values: pa.BinaryArray) -> tuple[npt.NDArray[np.int64], pa.StructArray]:
    """The rows that are an object with fields of the right types, and those objects.

    The reader refuses a whole text for one bad line, so what it refuses is halved until the bad ones stand
    alone: few of them cost little, and no row is looked at by Python.
    """
    rows = np.flatnonzero(_bools(pc.is_valid(values)))
    # A line break is only white space in JSON; the reader takes it for the end of a row.
    lines = values.drop_null()
    for byte in (b"\r", b"\n"):
        lines = pc.replace_substring(lines, byte, b" ")
    lines = pc.binary_join_element_wise(b'{"v":', lines, b"}\n", b"")
    found_rows: list[npt.NDArray[np.int64]] = []
    found: list[pa.StructArray] = []
    waiting = [(0, len(rows))] if len(rows) else []
    while waiting:
        start, end = waiting.pop()
        items = _read(lines[start:end])
        if items is not None:
            found_rows.append(rows[start:end])
            found.append(items)
        elif end - start > 1:
            middle = (start + end) // 2
            # The last one is read first.
            waiting += [(middle, end), (start, middle)]
    if not found:
        return np.zeros(0, np.int64), pa.array([], _ITEM)
    items = pa.concat_arrays(found)
    there = _bools(pc.is_valid(items))
    return np.concatenate(found_rows)[there], items.filter(pa.array(there))


def _read(lines: pa.BinaryArray) -> pa.StructArray | None:
    """One item for each line; None if one of them is none."""
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32, len(lines) + 1, lines.offset * 4)
    data = data.slice(int(ends[0]), int(ends[-1] - ends[0]))
    try:
        # The reader would take other bytes for text.
        str(data, "utf-8")
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(data.size, 1_024)),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([("v", _ITEM)]), unexpected_field_behavior="ignore"
            ),
        )
    except (UnicodeDecodeError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if table.num_rows != len(lines):
        return None
    return table["v"].combine_chunks() if table.num_rows else pa.array([], _ITEM)


def _floats(column: pa.Array) -> npt.NDArray[np.float64]:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _bools(column: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.bool_)
