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

RECEIVER, PROTOCOL, RECEIVED_NS, SOURCE, CURSOR = (
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


class Origin(NamedTuple):
    """Which receiver a topic's records come from, and by which protocol."""

    receiver: str
    protocol: str


@dataclass(frozen=True)
class Resumed:
    """What a sink already has of a receiver: its last cursor, and `digest` of its last records' values."""

    cursor: bytes | None = None
    known: tuple[bytes, ...] = ()


def digest(value: bytes) -> bytes:
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

    def open(self, *, resume: bool) -> Resumed:
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
class Delays:
    """How many records took how long from receipt to durable, by class."""

    classes: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Count them."""
        found = np.bincount(np.searchsorted(DELAYS_S, seconds), minlength=len(self.classes))
        self.classes = [before + int(more) for before, more in zip(self.classes, found, strict=True)]
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
    delays: Delays = field(default_factory=Delays)

    def dropped_in_all(self) -> int:
        """Drops of all reasons."""
        return self.dropped.total()

    def lost(self) -> int:
        """Received and then dropped."""
        return sum(n for reason, n in self.dropped.items() if reason not in _BEFORE_RECEIPT)


Drop = Literal["oldest", "newest"]


def size_of(record: Record) -> int:
    """Bytes that a record counts for: value and key, and 200 for Python's objects around them."""
    return len(record.value) + len(record.key or b"") + 200


class Buffer:
    """Records in the order of their arrival; one taker.

    Args:
        most_records: capacity in records.
        most_bytes: capacity in bytes, as `size_of` counts them.
        counts: where received and dropped records are counted.

    """

    def __init__(self, most_records: int, most_bytes: int, counts: Counts) -> None:
        self.most_records, self.most_bytes = most_records, most_bytes
        self.closed = False
        self._counts = counts
        self._records: deque[Record] = deque()
        self._bytes = 0
        self._since = 0.0
        self._wanted: Roll | None = None
        self._idle = False
        self._arrived, self._room = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def full(self) -> bool:
        """No room for one more."""
        return len(self._records) >= self.most_records or self._bytes >= self.most_bytes

    def offer(self, records: Sequence[Record], drop: Drop) -> None:
        """Take them without waiting; what there is no room for is dropped and counted, never refused."""
        self._count(records)
        for record in records:
            if self.full and drop == "newest":
                self._counts.dropped["buffer_full"] += 1
                continue
            self._append(record)
            while self._records and self._over():
                self._bytes -= size_of(self._records.popleft())
                self._counts.dropped["buffer_full"] += 1
        self._tell()

    async def put(self, records: Sequence[Record]) -> None:
        """Take them as room comes: back-pressure. Cancelled meanwhile, the rest is counted as dropped."""
        self._count(records)
        for done, record in enumerate(records):
            while self.full:
                self._tell()
                self._room.clear()
                try:
                    await self._room.wait()
                except asyncio.CancelledError:
                    self._counts.dropped["ended"] += len(records) - done
                    raise
            self._append(record)
        self._tell()

    async def take(self, roll: Roll) -> list[Record]:
        """The next records, as many as `roll` says or has waited for; none when it is closed and empty."""
        loop = asyncio.get_running_loop()
        self._wanted = roll
        while not self.closed and not self._enough(roll):
            self._arrived.clear()
            if self._records:
                left = self._since + roll.age_s - loop.time()
                if left <= 0:
                    break
                try:
                    async with asyncio.timeout(left):
                        await self._arrived.wait()
                except TimeoutError:
                    break
            else:
                self._idle = True
                await self._arrived.wait()
                self._idle = False
        taken: list[Record] = []
        size = 0
        while self._records and len(taken) < roll.records and size < roll.size_bytes:
            record = self._records.popleft()
            size += size_of(record)
            taken.append(record)
        self._bytes -= size
        self._since = loop.time()
        self._room.set()
        return taken

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
            self._since = asyncio.get_running_loop().time()
        self._records.append(record)
        self._bytes += size_of(record)

    def _over(self) -> bool:
        return len(self._records) > self.most_records or self._bytes > self.most_bytes

    def _enough(self, roll: Roll) -> bool:
        # A full buffer is taken although the sink would wait for more: nothing else makes room.
        return len(self._records) >= roll.records or self._bytes >= roll.size_bytes or self.full

    def _tell(self) -> None:
        # The taker is woken when there is something to do, not for each record.
        if self._records and (self._idle or (self._wanted is not None and self._enough(self._wanted))):
            self._arrived.set()
