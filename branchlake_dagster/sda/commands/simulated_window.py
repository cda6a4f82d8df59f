"""Write simulated measurements of one window as landing files, in the format of the receivers."""

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

    The same elements, window and seed give the same records, so a repeated call writes the measurements
    again.

    Args:
        folder: The landing folder.
        elements: The catalog, sorted by ``sat_no``.
        start: The start of the window, UTC microseconds since 1970, inclusive.
        end: The end of the window, exclusive.
        seed: All random numbers follow from the seed, the window and the kind of sensor.
        topics: The prefix of the topics' names, before the kind of sensor.

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
