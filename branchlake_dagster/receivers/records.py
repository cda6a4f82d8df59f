"""The records of a receiver: the interface of its sinks, its counts, and the buffer in front of a sink.

Only the thread of the event loop changes the counts and the buffer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, Transient
from branchlake_dagster.stored_names import RecordHeader

RECEIVER_HEADER, PROTOCOL_HEADER, RECEIVED_NS_HEADER, SOURCE_HEADER, CURSOR_HEADER = (
    *(RecordHeader.RECEIVER, RecordHeader.PROTOCOL, RecordHeader.RECEIVED_NS),
    *(RecordHeader.SOURCE, RecordHeader.CURSOR),
)
"""Names of the headers of a record. Values are UTF-8 text, numbers in decimal."""


class Record(NamedTuple):
    """One received message. `received_ns` is the time of its receipt in ns since 1970.

    ``source`` is the sender's address, or the URL that was requested. ``cursor`` (HTTP only) is the cursor
    from which the receiver continues if this is the last record in the sink.
    """

    value: bytes
    key: bytes | None
    received_ns: int
    source: bytes
    cursor: bytes | None = None


class Roll(NamedTuple):
    """The limits of one write of a sink: number, bytes or age of records, whichever is reached first."""

    records: int
    size_bytes: int
    age_s: float


class ReceiverOrigin(NamedTuple):
    """The name of a receiver and its protocol, as written to the headers of its records."""

    receiver: str
    protocol: str


@dataclass(frozen=True)
class ResumeState:
    """The state from which a restarted receiver continues, as its sink has stored it.

    It has the cursor of the receiver's last record, None without one, and the digests of its last values
    (`digest_value`), oldest first.
    """

    cursor: bytes | None = None
    value_digests: tuple[bytes, ...] = ()


def digest_value(value: bytes) -> bytes:
    """Return the digest (16 bytes) by which a source recognizes a value that it has received before."""
    return hashlib.blake2b(value, digest_size=16).digest()


class NotHandedOver(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """A sink did not store these records (`records`). The same call with them may be repeated."""

    def __init__(self, message: str, records: Sequence[Record], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.records = list(records)


class NotConfirmed(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """A sink had to stop before these records (`records`) were confirmed. They may or may not be stored."""

    def __init__(self, message: str, records: Sequence[Record]) -> None:
        super().__init__(message)
        self.records = list(records)


class PartitionTaken(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Another receiver already writes to this partition of the landing folder."""


class Sink(Protocol):
    """Stores records in order. One thread calls it, one call at a time; calls block."""

    @property
    def roll(self) -> Roll:
        """The limits up to which records are collected for a call of `write`."""

    def open(self, *, resume: bool) -> ResumeState:
        """Open the sink; with ``resume`` return the state of this receiver's stored records.

        Raises:
            Transient: The sink is not reachable now.
            Terminal: Trying again would not help.

        """

    def write(self, records: Sequence[Record], dropped: int = 0) -> None:
        """Store records. They are durable when this returns.

        ``dropped`` is the number of records that were dropped so far, for the sink's log.

        Raises:
            NotHandedOver: The records of the error are not stored; all others are.
            NotConfirmed: The records of the error may or may not be stored, for example because
                `stop_waiting` was called. All others are stored.
        """

    def stop_waiting(self) -> None:
        """Let a waiting call of `write` return soon. Any thread may call it."""

    def close(self) -> None:
        """Close files and connections, and release locks."""


_BEFORE_RECEIPT = frozenset({"kernel", "too_large"})
"""Reasons of drops that do not count as received: the kernel dropped them, or they were too large."""

DELAYS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the delay classes in seconds. One more class is above the last bound."""


@dataclass
class DelayHistogram:
    """The number of records by their delay from receipt until they are durable.

    `classes` has a number for each bound in `DELAYS_S`, and one for longer delays. `total_s` is the sum of
    all delays in seconds.
    """

    classes: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Count delays in seconds in the histogram, and add them to the sum."""
        class_counts = np.bincount(np.searchsorted(DELAYS_S, seconds), minlength=len(self.classes))
        self.classes = [
            old_count + int(new_count)
            for old_count, new_count in zip(self.classes, class_counts, strict=True)
        ]
        self.total_s += float(seconds.sum())


@dataclass
class Counts:
    """The counts of one source's records.

    It always holds that ``received == handed_over + total_lost() + not_confirmed + not_handed_over +
    waiting``, where *waiting* records are in the buffer or being written. At the end of a receiver,
    ``not_confirmed`` are records without an answer of the sink, and ``not_handed_over`` are records that the
    sink has not stored. ``events`` are counts of the protocol.
    """

    received: int = 0
    received_bytes: int = 0
    handed_over: int = 0
    not_confirmed: int = 0
    not_handed_over: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    delays: DelayHistogram = field(default_factory=DelayHistogram)

    def total_dropped(self) -> int:
        """Return the number of dropped records, for all reasons."""
        return self.dropped.total()

    def total_lost(self) -> int:
        """Return the number of records that were received and then dropped."""
        return sum(n for reason, n in self.dropped.items() if reason not in _BEFORE_RECEIPT)


DropPolicy = Literal["oldest", "newest"]


def record_size(record: Record) -> int:
    """Return the size of a record in bytes: its value and key, and 200 bytes for the Python objects."""
    return len(record.value) + len(record.key or b"") + 200


class Buffer:
    """Holds records in order of arrival, for one consumer.

    If it is full, `offer` drops the oldest or the newest records, and `put` waits.

    Args:
        most_records: The capacity in records.
        most_bytes: The capacity in bytes, as measured by `record_size`.
        counts: The counts of received and dropped records, which the buffer updates.

    """

    def __init__(self, most_records: int, most_bytes: int, counts: Counts) -> None:
        self.most_records, self.most_bytes = most_records, most_bytes
        self.closed = False
        self._counts = counts
        self._records: deque[Record] = deque()
        self._bytes = 0
        self._first_arrival = 0.0
        self._wanted_roll: Roll | None = None
        self._idle = False
        self._arrived, self._freed = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_full(self) -> bool:
        """Whether the number or the bytes of the records have reached the capacity."""
        return len(self._records) >= self.most_records or self._bytes >= self.most_bytes

    def offer(self, records: Sequence[Record], drop: DropPolicy) -> None:
        """Add records without waiting. Records beyond the capacity are dropped and counted.

        `drop` states which records are dropped: the oldest in the buffer, or the newest, which are being
        added.
        """
        self._count(records)
        for record in records:
            if self.is_full and drop == "newest":
                self._counts.dropped["buffer_full"] += 1
                continue
            self._append(record)
            while self._records and self._is_over_capacity():
                self._bytes -= record_size(self._records.popleft())
                self._counts.dropped["buffer_full"] += 1
        self._wake_taker()

    async def put(self, records: Sequence[Record]) -> None:
        """Add records and wait for capacity (back-pressure). If canceled, the rest counts as dropped."""
        self._count(records)
        for done, record in enumerate(records):
            while self.is_full:
                self._wake_taker()
                self._freed.clear()
                try:
                    await self._freed.wait()
                except asyncio.CancelledError:
                    self._counts.dropped["ended"] += len(records) - done
                    raise
            self._append(record)
        self._wake_taker()

    async def take(self, roll: Roll) -> list[Record]:
        """Remove and return the next records, up to the limits of `roll`.

        Waits until one limit is reached, or until the buffer is full or closed. Returns an empty list only if
        the buffer is closed and empty.
        """
        loop = asyncio.get_running_loop()
        self._wanted_roll = roll
        while not self.closed and not self._has_enough(roll):
            self._arrived.clear()
            if self._records:
                wait_s = self._first_arrival + roll.age_s - loop.time()
                if wait_s <= 0:
                    break
                try:
                    async with asyncio.timeout(wait_s):
                        await self._arrived.wait()
                except TimeoutError:
                    break
            else:
                self._idle = True
                await self._arrived.wait()
                self._idle = False
        batch: list[Record] = []
        size = 0
        while self._records and len(batch) < roll.records and size < roll.size_bytes:
            record = self._records.popleft()
            size += record_size(record)
            batch.append(record)
        self._bytes -= size
        self._first_arrival = loop.time()
        self._freed.set()
        return batch

    def close(self) -> None:
        """Close the buffer: no more records arrive, and `take` returns the remaining ones at once."""
        self.closed = True
        self._arrived.set()

    def clear(self) -> int:
        """Remove the remaining records and return their number."""
        left = len(self._records)
        self._records.clear()
        self._bytes = 0
        return left

    def _count(self, records: Sequence[Record]) -> None:
        self._counts.received += len(records)
        self._counts.received_bytes += sum(len(record.value) for record in records)

    def _append(self, record: Record) -> None:
        if not self._records:
            self._first_arrival = asyncio.get_running_loop().time()
        self._records.append(record)
        self._bytes += record_size(record)

    def _is_over_capacity(self) -> bool:
        return len(self._records) > self.most_records or self._bytes > self.most_bytes

    def _has_enough(self, roll: Roll) -> bool:
        # Take from a full buffer even if the sink would wait for more: nothing else frees capacity.
        return len(self._records) >= roll.records or self._bytes >= roll.size_bytes or self.is_full

    def _wake_taker(self) -> None:
        # Wake the consumer only when it has something to do, not for each record.
        if self._records and (
            self._idle or (self._wanted_roll is not None and self._has_enough(self._wanted_roll))
        ):
            self._arrived.set()
