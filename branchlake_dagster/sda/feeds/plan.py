"""The plan of a simulated feed, the counts of its messages, and batches of messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

RATES = {"radar": 5_000.0, "optical": 50.0, "isl": 100.0}
"""Measurements per second of each kind of sensor, from the requirements."""


@dataclass(frozen=True)
class Burst:
    """Periods with a higher rate of messages, which repeat.

    Args:
        every_s: Seconds from the start of a burst to the start of the next; 0 means no bursts.
        first_s: Seconds from the start of the feed to the first burst.
        length_s: The length of a burst, s.
        factor: The factor on the rates.
    """

    every_s: float = 0.0
    first_s: float = 60.0
    length_s: float = 60.0
    factor: float = 10.0

    def factors(self, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the factor (n,) on the message rates at instants (n,), in seconds after the start."""
        if not self.every_s:
            return np.ones(len(seconds))
        since = seconds - self.first_s
        inside = (since >= 0) & (since % self.every_s < self.length_s)
        return np.where(inside, self.factor, 1.0)


@dataclass(frozen=True)
class Plan:
    """The rates, duration and faults of a simulated feed.

    Args:
        rates: Measurements per second by kind of sensor (`RATES`). A kind that is absent sends nothing.
        seconds: The duration, s. None means without end.
        seed: The seed of all random numbers, together with the start.
        duplicates: The share of measurements that are sent twice.
        stragglers: The share that arrives later than its kind allows.
        corrupted: The share whose bytes are damaged.
        burst: The periods with higher rates.
    """

    rates: dict[str, float] = field(default_factory=lambda: dict(RATES))
    seconds: float | None = None
    seed: int = 2026
    duplicates: float = 0.001
    stragglers: float = 0.001
    corrupted: float = 0.001
    burst: Burst = field(default_factory=Burst)


@dataclass
class Tally:
    """Counts of messages of one kind of sensor. ``measured`` includes ``stragglers`` and ``corrupted``."""

    measured: int = 0
    duplicates: int = 0
    stragglers: int = 0
    corrupted: Counter[str] = field(default_factory=Counter)

    @property
    def sent_count(self) -> int:
        """The number of all records: measurements and duplicates."""
        return self.measured + self.duplicates

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as values for JSON; ``corrupted`` by the reason with which decoding rejects."""
        return {
            "measured": self.measured,
            "duplicates": self.duplicates,
            "sent": self.sent_count,
            "stragglers": self.stragglers,
            "corrupted": dict(sorted(self.corrupted.items())),
        }


@dataclass(frozen=True)
class Batch:
    """Records of one kind of sensor, n rows in the order of sending.

    ``send_ns`` (n,) is the time of sending, ``measured_ns`` (n,) the time of the measurement (both
    nanoseconds since 1970), ``values`` the encoded messages, and ``sensor`` (n,) the number of the sensor.
    """

    send_ns: npt.NDArray[np.int64]
    measured_ns: npt.NDArray[np.int64]
    values: pa.BinaryArray
    sensor: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.send_ns)

    def take(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Return the given rows, in the given order."""
        return Batch(
            self.send_ns[rows], self.measured_ns[rows], self.values.take(pa.array(rows)), self.sensor[rows]
        )

    @staticmethod
    def concatenate(parts: list[Batch]) -> Batch:
        """Join batches, ordered by the time of sending."""
        send = np.concatenate([part.send_ns for part in parts])
        joined = Batch(
            send,
            np.concatenate([part.measured_ns for part in parts]),
            pa.concat_arrays([part.values for part in parts]),
            np.concatenate([part.sensor for part in parts]),
        )
        return joined.take(np.argsort(send, kind="stable"))

    @staticmethod
    def empty() -> Batch:
        """Return a batch without records."""
        none = np.zeros(0, np.int64)
        return Batch(none, none, pa.array([], pa.binary()), none)


def split_bytes(values: pa.BinaryArray) -> list[memoryview]:
    """Return the bytes of each value, without a copy."""
    if not len(values):
        return []
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4).tolist()
    whole = memoryview(data) if data is not None else memoryview(b"")
    return [whole[start:end] for start, end in pairwise(ends)]
