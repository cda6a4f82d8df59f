"""A receiver in the test's own event loop, and what it has handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from branchlake_dagster.receivers.landing import Landing
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import (
    Buffer,
    Counts,
    ReceiverOrigin,
    Record,
    ResumeState,
    Roll,
    Sink,
)
from branchlake_dagster.receivers.service import Intake, Receivers, ReceiverSource

QUICK = Roll(records=1_000, size_bytes=10_000_000, age_s=0.02)
ORIGIN = ReceiverOrigin("r1", "udp")


def record(
    value: bytes, key: bytes | None = b"k", ns: int = 1_000_000_001, cursor: bytes | None = None
) -> Record:
    return Record(value, key, ns, b"127.0.0.1:1", cursor)


class MemorySink:
    """Keeps what it is given; `behave` is called before each write and may raise."""

    def __init__(
        self, roll: Roll = QUICK, behave: Callable[[Sequence[Record]], None] = lambda _: None
    ) -> None:
        self.roll, self.records, self.behave = roll, list[Record](), behave
        self.resumed = ResumeState()
        self.stopped = self.closed = False

    def open(self, *, resume: bool) -> ResumeState:
        return self.resumed if resume else ResumeState()

    def write(self, records: Sequence[Record], dropped: int = 0) -> None:
        self.behave(records)
        self.records += records

    def stop_waiting(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.closed = True


def an_intake(
    make: Callable[[Buffer, Counts], ReceiverSource],
    sink: Sink,
    *,
    most: int = 100_000,
    most_bytes: int = 1 << 30,
) -> Intake:
    counts = Counts()
    buffer = Buffer(most, most_bytes, counts)
    return Intake("t", 0, make(buffer, counts), buffer, sink, counts)


@asynccontextmanager
async def running(intake: Intake, *, drain_s: float = 4.3) -> AsyncIterator[Receivers]:
    receivers = Receivers([intake], drain_s=drain_s)
    stop = asyncio.Event()
    task = asyncio.create_task(receivers.run(stop))
    try:
        await until(lambda: intake.is_open or task.done())
        yield receivers
    finally:
        stop.set()
        await task


async def until(holds: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until it holds; a test that waits for what never comes fails."""
    for _ in range(int(seconds / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


def adds_up(intake: Intake) -> bool:
    counts = intake.counts
    accounted = counts.handed_over + counts.total_lost() + counts.not_confirmed + counts.not_handed_over
    return counts.received == accounted + intake.waiting


def landing_sink(
    folder: Path, *, partition: int = 0, roll: Roll = QUICK, origin: ReceiverOrigin = ORIGIN
) -> LandingSink:
    return LandingSink(folder, "t", partition, origin, roll=roll)


def landed(folder: Path, topic: str = "t", partition: int = 0) -> pa.Table:
    """All rows of a partition; its offsets have no gap and no double."""
    files = Landing(folder).files(topic, partition)
    table = pa.concat_tables([pq.read_table(file.path) for file in files])
    offsets = table["offset"].to_pylist()
    assert offsets == list(range(files[0].first, files[-1].last + 1))
    return table
