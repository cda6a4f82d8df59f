"""The records of a receiver: the protocol of its sinks, its counters, and the buffer before a sink.

Only the event loop's thread changes the counters and the buffer.
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
"""Names of a record's headers. Values are UTF-8 text; numbers are decimal."""


class Record(NamedTuple):
    """One message as it was received.

    ``cursor`` (HTTP only) is where to ask again when this is the last record that is known.
    """

    value: bytes
    key: bytes | None
    received_ns: int
    source: bytes
    cursor: bytes | None = None


class Roll(NamedTuple):
    """How much a sink takes at once: whichever is reached first."""

    records: int
    size_bytes: int
    age_s: float


class ReceiverOrigin(NamedTuple):
    """Which receiver a topic's records come from, and by which protocol."""

    receiver: str
    protocol: str


@dataclass(frozen=True)
class ResumeState:
    """What a sink already has of a receiver: its last cursor, and `digest_value` of its last records' values."""

    cursor: bytes | None = None
    value_digests: tuple[bytes, ...] = ()


def digest_value(value: bytes) -> bytes:
    """What a value is known by, for as long as it is remembered."""
    return hashlib.blake2b(value, digest_size=16).digest()


class NotHandedOver(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """A sink did not take these records; the same call with them may be repeated."""

    def __init__(self, message: str, records: Sequence[Record], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.records = list(records)


class NotConfirmed(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """A sink was told to stop before it knew of these records; they may or may not be there."""

    def __init__(self, message: str, records: Sequence[Record]) -> None:
        super().__init__(message)
        self.records = list(records)


class PartitionTaken(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Another receiver writes to this partition."""


class Sink(Protocol):
    """Takes records in order, one call after the other, from one thread; its calls block."""

    @property
    def roll(self) -> Roll:
        """How much to collect before a call of `write`."""

    def open(self, *, resume: bool) -> ResumeState:
        """Make it ready; with ``resume`` say what it has of this receiver.

        Raises:
            Transient: not reachable now.
            Terminal: it never will be.

        """

    def write(self, records: Sequence[Record], dropped: int = 0) -> None:
        """Hand over; when this returns they are durable. ``dropped`` is how many never got here so far.

        Raises:
            NotHandedOver: with those that are not there; the others are.
            NotConfirmed: `stop_waiting` was called meanwhile.

        """

    def stop_waiting(self) -> None:
        """Let a call of `write` that waits return soon. Any thread may call it."""

    def close(self) -> None:
        """Let go of files, locks and connections."""


_BEFORE_RECEIPT = frozenset({"kernel", "too_large"})
"""Drops of what this process never had, or refused to take."""

DELAYS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the classes of a delay; above the last there is one more."""


@dataclass
class DelayHistogram:
    """How many records took how long from receipt to durable, by class."""

    classes: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Count them."""
        class_counts = np.bincount(np.searchsorted(DELAYS_S, seconds), minlength=len(self.classes))
        self.classes = [
            old_count + int(new_count)
            for old_count, new_count in zip(self.classes, class_counts, strict=True)
        ]
        self.total_s += float(seconds.sum())


@dataclass
class Counts:
    """Records of one source.

    Always ``received == handed_over + lost() + not_confirmed + not_handed_over + waiting``, where *waiting*
    is in the buffer or being written. ``not_confirmed`` and ``not_handed_over`` are what an end left: the
    sink's answer is missing, or it was never asked. ``events`` are the protocol's own.
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
        """Drops of all reasons."""
        return self.dropped.total()

    def total_lost(self) -> int:
        """Received and then dropped."""
        return sum(n for reason, n in self.dropped.items() if reason not in _BEFORE_RECEIPT)


DropPolicy = Literal["oldest", "newest"]


def record_size(record: Record) -> int:
    """Bytes that a record counts for: value and key, and 200 for Python's objects around them."""
    return len(record.value) + len(record.key or b"") + 200


class Buffer:
    """Records in the order of their arrival; one taker.

    Args:
        most_records: capacity in records.
        most_bytes: capacity in bytes, as `record_size` counts them.
        counts: where received and dropped records are counted.

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
        """No room for one more."""
        return len(self._records) >= self.most_records or self._bytes >= self.most_bytes

    def offer(self, records: Sequence[Record], drop: DropPolicy) -> None:
        """Take them without waiting; what there is no room for is dropped and counted, never refused."""
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
        """Take them as room comes: back-pressure. Cancelled meanwhile, the rest is counted as dropped."""
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
        """The next records, as many as `roll` says or has waited for; none when it is closed and empty."""
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
        """Nothing more comes: `take` gives what there is at once."""
        self.closed = True
        self._arrived.set()

    def clear(self) -> int:
        """Let go of what is left; how many records."""
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
        # A full buffer is taken although the sink would wait for more: nothing else makes room.
        return len(self._records) >= roll.records or self._bytes >= roll.size_bytes or self.is_full

    def _wake_taker(self) -> None:
        # The taker is woken when there is something to do, not for each record.
        if self._records and (
            self._idle or (self._wanted_roll is not None and self._has_enough(self._wanted_roll))
        ):
            self._arrived.set()
