"""The intake: it moves records from one source through a buffer into one sink."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from branchlake_dagster.errors import Transient
from branchlake_dagster.receivers.records import (
    Buffer,
    Counts,
    NotConfirmed,
    NotHandedOver,
    Record,
    ResumeState,
    Sink,
)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0
_RETURN_S = 0.1
_T = TypeVar("_T")


class ReceiverSource(Protocol):
    """The part of a receiver that implements its protocol. All methods run in the event loop."""

    @property
    def protocol(self) -> str:
        """The name of the protocol."""

    @property
    def resumes(self) -> bool:
        """Whether the source continues from the records that the sink already has."""

    @property
    def address(self) -> str:
        """The address where the source listens, or that it requests."""

    @property
    def trouble(self) -> str:
        """The current problem of the source; empty if there is none."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The source's task; None if it has none.

        If it ends before `stop`, the service stops too.
        """

    def resume(self, resume_state: ResumeState) -> None:
        """Continue from this state. Called once, before `start`, after the sink was opened."""

    async def start(self) -> None:
        """Start to receive records into the buffer."""

    async def stop(self) -> None:
        """Stop receiving within two seconds. Messages that have already arrived go into the buffer."""

    def update_counts(self) -> None:
        """Update the counts that the operating system keeps. Called once a second."""


class Intake:
    """Moves the records of a source into a partition of a topic.

    Args:
        topic: The name of the topic.
        partition: The partition, None for several.
        source: The source of the records.
        buffer: The buffer that the source fills.
        sink: The sink that the records are written to.
        counts: The counts that the source and the intake update.
        now_ns: The wall clock, in nanoseconds since 1970.

    """

    def __init__(
        self,
        topic: str,
        partition: int | None,
        source: ReceiverSource,
        buffer: Buffer,
        sink: Sink,
        counts: Counts,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.topic, self.partition = topic, partition
        self.source, self.buffer, self.sink, self.counts = source, buffer, sink, counts
        self.is_open = False
        self.sink_trouble = ""
        self._current_batch: list[Record] = []
        self._now_ns = now_ns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"sink-{topic}-{partition}")
        self._sink_call: Future[Any] | None = None
        self._given_up = asyncio.Event()

    @property
    def waiting(self) -> int:
        """The number of records that are received and not yet handed over."""
        return len(self.buffer) + len(self._current_batch)

    async def run(self) -> None:
        """Open the sink, start the source, and hand records over until the buffer is closed and empty.

        Raises:
            Terminal: The sink or the source cannot be opened, and trying again would not help.

        """
        pause_s = _FIRST_PAUSE_S
        while not self.buffer.closed:
            try:
                resume_state = await self._run_in_thread(partial(self.sink.open, resume=self.source.resumes))
                break
            except Exception as error:
                if not isinstance(error, Transient):
                    raise
                self.sink_trouble = str(error)
            await self._pause(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
        else:
            return
        self.sink_trouble = ""
        self.source.resume(resume_state)
        await self.source.start()
        self.is_open = True
        while batch := await self.buffer.take(self.sink.roll):
            self._current_batch = batch
            await self._hand_over()

    async def _hand_over(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._current_batch and not self._given_up.is_set():
            batch, dropped = self._current_batch, self.counts.total_dropped()
            remaining: list[Record] = []
            try:
                await self._run_in_thread(partial(self.sink.write, batch, dropped))
                self.sink_trouble = ""
            except NotHandedOver as error:
                remaining, self.sink_trouble = error.records, str(error)
                self.counts.events["sink_failures"] += 1
            except NotConfirmed as error:
                self.counts.not_confirmed += len(error.records)
                self.counts.handed_over -= len(error.records)
                self.sink_trouble = str(error)
            self.counts.handed_over += len(batch) - len(remaining)
            self._current_batch = remaining
            if remaining:
                await self._pause(pause_s)
                pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
            else:
                received = np.array([record.received_ns for record in batch])
                self.counts.delays.add(np.maximum(self._now_ns() - received, 0) / 1e9)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._given_up.wait()
        except TimeoutError:
            pass

    def give_up(self) -> None:
        """Let a waiting hand-over return soon."""
        self._given_up.set()
        self.sink.stop_waiting()

    def count_remaining(self) -> None:
        """Count the records that are left at the end. Records in a running write count as not confirmed."""
        is_writing = not self._thread_is_free()
        if is_writing:
            self.counts.not_confirmed += len(self._current_batch)
        else:
            self.counts.not_handed_over += len(self._current_batch)
        self.counts.not_handed_over += self.buffer.clear()
        self._current_batch = []

    def close(self) -> bool:
        """Close the sink. Return False if its thread still writes; the sink then stays open."""
        is_free = self._thread_is_free()
        if is_free:
            self.sink.close()
        self._thread.shutdown(wait=is_free, cancel_futures=True)
        return is_free

    def _thread_is_free(self) -> bool:
        """Whether the thread has finished its call of the sink. Waits a moment for the call to return."""
        return self._sink_call is None or not wait([self._sink_call], timeout=_RETURN_S).not_done

    def _run_in_thread(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        self._sink_call = future = self._thread.submit(call)
        return asyncio.wrap_future(future)
