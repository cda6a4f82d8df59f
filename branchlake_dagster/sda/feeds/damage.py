"""Damage messages before they are sent, so that decoders reject them with a known reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from branchlake_dagster.sda.wire import columns, links, optical, radar
from branchlake_dagster.sda.wire.columns import join_binary

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]


def _set(name: str, value: Any) -> Callable[[Records, Rows], None]:
    def do(records: Records, rows: Rows) -> None:
        records[name][rows] = value

    return do


_RADAR = {
    columns.NOT_FINITE: _set("range_m", np.nan),
    columns.UNKNOWN_SENSOR: _set("array_id", 9_999),
    columns.BAD_TIME: _set("timestamp_ns", 0),
    radar.IMPOSSIBLE_RATE: _set("range_rate_m_s", 1e6),
}
_LINKS = {
    links.UNKNOWN_VERSION: _set("version", 7),
    columns.NOT_FINITE: _set("position_m", np.nan),
    links.BELOW_SURFACE: _set("position_m", 1e6),
    links.FASTER_THAN_LIGHT: _set("velocity_m_s", 1e9),
}
# Each remains a whole item of JSON, because half an item would damage its whole page.
_OPTICAL: dict[str, dict[str, Any]] = {
    optical.MALFORMED: {"timestamp_ns": "soon"},
    optical.format_missing("ra_rad"): {"ra_rad": None},
    optical.BAD_ID: {"obs_id": "no-uuid"},
    columns.BAD_ANGLE: {"dec_rad": 9.0},
}


def encode_with_damage(
    kind: str, native: pl.DataFrame, damaged: Rows, rng: np.random.Generator
) -> tuple[pa.BinaryArray, dict[str, int]]:
    """Encode measurements, and damage those in the rows ``damaged``.

    Returns:
        The encoded messages, and the number of damaged ones by the reason with which decoding rejects them.
    """
    if kind == "optical":
        return _encode_items(native, damaged, rng)
    records, ways = (
        (radar.radar_rows(native), _RADAR) if kind == "radar" else (links.link_rows(native), _LINKS)
    )
    reasons = [*ways, columns.WRONG_SIZE]
    drawn = rng.integers(0, len(reasons), len(damaged))
    for number, change in enumerate(ways.values()):
        change(records, damaged[drawn == number])
    lengths = np.full(len(records), records.dtype.itemsize)
    cut = damaged[drawn == len(ways)]
    # A frame is never empty.
    lengths[cut] = rng.integers(1, records.dtype.itemsize, len(cut))
    return join_binary(records, lengths), _count_reasons(reasons, drawn)


def _encode_items(
    native: pl.DataFrame, damaged: Rows, rng: np.random.Generator
) -> tuple[pa.BinaryArray, dict[str, int]]:
    values = optical.encode_optical(native)
    reasons = list(_OPTICAL)
    drawn = rng.integers(0, len(reasons), len(damaged))
    if len(damaged):
        changes = list(_OPTICAL.values())
        # These are few, so a loop in Python is fast enough.
        texts = [
            json.dumps(json.loads(values[int(row)].as_py()) | changes[way], separators=(",", ":")).encode()
            for row, way in zip(damaged, drawn, strict=True)
        ]
        order = np.arange(len(values))
        order[damaged] = len(values) + np.arange(len(damaged))
        values = pa.concat_arrays([values, pa.array(texts, pa.binary())]).take(pa.array(order))
    return values, _count_reasons(reasons, drawn)


def _count_reasons(reasons: list[str], drawn: Rows) -> dict[str, int]:
    numbers = np.bincount(drawn, minlength=len(reasons))
    return {reason: int(number) for reason, number in zip(reasons, numbers, strict=True) if number}
