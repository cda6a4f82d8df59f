"""What a simulated feed is to do, and the account of what it did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

RATES = {"radar": 5_000.0, "optical": 50.0, "isl": 100.0}
"""Measurements a second of each kind, as the requirements count them."""


@dataclass(frozen=True)
class Burst:
    """More of everything for a while, again and again.

    Args:
        every_s: from the begin of one to that of the next; 0: none.
        first_s: begin of the first, after the start.
        length_s: how long it lasts.
        factor: how much more.

    """

    every_s: float = 0.0
    first_s: float = 60.0
    length_s: float = 60.0
    factor: float = 10.0

    def factors(self, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The factor at instants, in seconds after the start."""
        if not self.every_s:
            return np.ones(len(seconds))
        since = seconds - self.first_s
        inside = (since >= 0) & (since % self.every_s < self.length_s)
        return np.where(inside, self.factor, 1.0)


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Args:
        rates: measurements a second by kind (`RATES`); a kind that is absent sends nothing.
        seconds: how long it measures; None: without end.
        seed: everything random follows from it and the start.
        duplicates: share of measurements that are sent twice.
        stragglers: share that comes later than its kind may.
        corrupted: share whose bytes are damaged.
        burst: when there is more.

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
    """What one kind of source made. ``sent`` is ``measured`` and ``duplicates``; the rest are among them."""

    measured: int = 0
    duplicates: int = 0
    stragglers: int = 0
    corrupted: Counter[str] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        """Records in all."""
        return self.measured + self.duplicates

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``corrupted`` by the reason that decoding gives."""
        return {
            "measured": self.measured,
            "duplicates": self.duplicates,
            "sent": self.sent,
            "stragglers": self.stragglers,
            "corrupted": dict(sorted(self.corrupted.items())),
        }


@dataclass(frozen=True)
class Batch:
    """Records of one kind in the order of sending: when each is sent, measured, its value and its sensor."""

    send_ns: npt.NDArray[np.int64]
    measured_ns: npt.NDArray[np.int64]
    values: pa.BinaryArray
    sensor: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.send_ns)

    def take(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Some rows, in their order."""
        return Batch(
            self.send_ns[rows], self.measured_ns[rows], self.values.take(pa.array(rows)), self.sensor[rows]
        )

    @staticmethod
    def together(parts: list[Batch]) -> Batch:
        """All of them, by the time of sending."""
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
        """No record."""
        none = np.zeros(0, np.int64)
        return Batch(none, none, pa.array([], pa.binary()), none)


def pieces(values: pa.BinaryArray) -> list[memoryview]:
    """The bytes of each value, without a copy."""
    if not len(values):
        return []
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4).tolist()
    whole = memoryview(data) if data is not None else memoryview(b"")
    return [whole[start:end] for start, end in pairwise(ends)]
