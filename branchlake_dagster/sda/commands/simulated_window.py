"""Simulated measurements of one window as landing files, as receivers would have written them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa

from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster.sda.wire import links, optical, radar

_PROTOCOLS = {"radar": "udp", "optical": "http", "isl": "tcp"}
_ENCODERS: dict[str, Callable[[pl.DataFrame], pa.BinaryArray]] = {
    "radar": radar.encode_radar,
    "optical": optical.encode_optical,
    "isl": links.encode_links,
}


def land_simulated_window(
    folder: Path, elements: Elements, *, start: int, end: int, seed: int, topics: str = "sda."
) -> dict[str, int]:
    """Simulate the sensors of one window, and write their records to landing files.

    The same elements, window and seed give the same records, so a repeated call repeats measurements.

    Args:
        folder: the landing folder.
        elements: the catalogue, sorted by ``sat_no``.
        start: the start of the window, UTC microseconds since 1970, inclusive.
        end: the end of the window, exclusive.
        seed: everything random follows from the seed, the window and the kind of sensor.
        topics: what the topics' names begin with; the kind of sensor follows.

    Returns:
        The number of records by kind of sensor.

    """
    counts = {}
    for kind, encode in _ENCODERS.items():
        native = simulate(elements, kind=kind, start=start, end=end, seed=seed)
        received = native["received_ns"].to_list()
        records = [
            Record(value, kind.encode(), at, b"simulated")
            for value, at in zip(encode(native).to_pylist(), received, strict=True)
        ]
        sink = LandingSink(
            folder, f"{topics}{kind}", 0, ReceiverOrigin(f"simulator/{kind}", _PROTOCOLS[kind])
        )
        sink.open(resume=False)
        try:
            for first in range(0, len(records), sink.roll.records):
                sink.write(records[first : first + sink.roll.records])
        finally:
            sink.close()
        counts[kind] = len(records)
    return counts
