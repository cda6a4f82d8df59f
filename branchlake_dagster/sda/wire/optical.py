"""Encode and decode measurements of telescopes: each is an item of a page of JSON.

Fields: ``obs_id`` (text, a UUID), ``timestamp_ns`` (integer, nanoseconds since 1970 UTC), ``ra_rad`` and
``dec_rad`` (right ascension and declination as seen from the telescope, along the axes of TEME, the inertial
frame of SGP4), ``sigma_arcsec`` (one standard deviation), ``site_id`` (such as ``optical-01``). This project
added two optional fields: ``track_id`` (text: the telescope's own track) and ``clock_sync_age_s`` (seconds
since the clock was set; without it the clock counts as unknown). Other fields are ignored.

A request for a page has the parameter ``since``, an integer in the unit of ``timestamp_ns`` (another part of
the requirements has a time in RFC 3339). The page has items later than ``since``; an item with exactly this
time is not repeated, which the requirements leave open.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from branchlake_dagster.sda.sensors.hashing import hash_keys, track_numbers
from branchlake_dagster.sda.sensors.network import TELESCOPES
from branchlake_dagster.sda.wire.columns import (
    BAD_ANGLE,
    BAD_TIME,
    BAD_UNCERTAINTY,
    NOT_FINITE,
    UNKNOWN_SENSOR,
    Reasons,
    build_decoded,
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


def format_missing(field: str) -> str:
    """Return the reason for an item that lacks a field."""
    return f"{field} is missing"


def encode_optical(native: pl.DataFrame) -> pa.BinaryArray:
    """Encode simulated measurements of telescopes as items. ``obs_id`` is a hash of site, object and time."""
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
    """Return a UUID for each measurement of a telescope, from a hash of time, object and site.

    The UUIDs are of version 8 (RFC 9562), which allows any hash.
    """
    site = native["orig_sensor_id"].str.strip_prefix("optical-").cast(pl.Int64).to_numpy()
    objects = native["sat_no"].fill_null(0).to_numpy()
    words = np.stack(
        [hash_keys(native["timestamp_ns"].to_numpy(), salt, objects, site) for salt in (1, 2)], axis=1
    )
    raw = words.astype(">u8").view(np.uint8).reshape(-1, 16)
    raw[:, 6] = raw[:, 6] & 0x0F | 0x80
    raw[:, 8] = raw[:, 8] & 0x3F | 0x80
    digits = np.frombuffer(raw.tobytes().hex().encode(), np.uint8).reshape(-1, 32)
    text = np.insert(digits, (8, 12, 16, 20), ord("-"), axis=1)
    return np.ascontiguousarray(text).view("S36").ravel().astype(str).tolist()


def decode_optical(values: pa.Array | pa.ChunkedArray) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Decode telescopes' JSON items to rows of `DECODED`, and return each row's error (null if it is valid).

    An error is the reason why the item is not a measurement; its row is null.
    """
    values = one_array(values)
    reasons = Reasons(len(values))
    where, items = _parse_items(values)
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
    faults: dict[str, Any] = {format_missing(name): _bools(pc.is_null(fields[name])) for name in _REQUIRED}
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
    return build_decoded(columns, where, reasons)


def _parse_items(values: pa.BinaryArray) -> tuple[npt.NDArray[np.int64], pa.StructArray]:
    """Return the rows (k,) that are JSON objects with fields of the right types, and the objects.

    Arrow's reader rejects a whole text if one line is bad. So a rejected text is halved until the bad lines
    are alone. A few bad lines cost little, and Python does not parse single rows.
    """
    rows = np.flatnonzero(_bools(pc.is_valid(values)))
    # In JSON a line break is white space, but the reader takes it for the end of a row.
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
            # The last entry is read first.
            waiting += [(middle, end), (start, middle)]
    if not found:
        return np.zeros(0, np.int64), pa.array([], _ITEM)
    items = pa.concat_arrays(found)
    there = _bools(pc.is_valid(items))
    return np.concatenate(found_rows)[there], items.filter(pa.array(there))


def _read(lines: pa.BinaryArray) -> pa.StructArray | None:
    """Parse lines to one item each. None if one of the lines cannot be parsed."""
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32, len(lines) + 1, lines.offset * 4)
    data = data.slice(int(ends[0]), int(ends[-1] - ends[0]))
    try:
        # The reader does not check that the bytes are UTF-8.
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
