"""A bounded buffer between a source and a sink, within one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

from branchlake_dagster.ingest.receiving.records.counts import Counts
from branchlake_dagster.ingest.receiving.records.record import Record, Roll

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
