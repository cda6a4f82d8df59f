"""The receivers of one process: they start together, are monitored, and are drained at the end.

The intake of each receiver moves records from its source through a buffer into its sink.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

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
        """Whether the source can continue after the last record in the sink. Then `resume` gets its state."""

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
    """Moves the records of one source through a buffer into one sink.

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
        """The number of records that are in the buffer or being written."""
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
        """Let a waiting hand-over return soon. Its records remain, and `count_remaining` counts them."""
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
        """Close the sink and return True. If its thread still writes, leave it open and return False."""
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


DRAIN_S = 4.3
"""Seconds from the signal to the end of all hand-overs, so that the process ends within five seconds."""

_STOPPING_S, _LAST_WORD_S, _EVERY_S, _RECENT_S = 2.0, 0.3, 1.0, 60
_NEARLY_FULL = 0.8

HealthState = Literal["starting", "ready", "degraded", "draining"]


@dataclass(frozen=True)
class Health:
    """The state of a receiver process, and its current problems.

    The state is `degraded` if the process is ready but has problems. While it starts or drains, `reasons` may
    have problems too.
    """

    state: HealthState
    reasons: tuple[str, ...] = ()


class Receivers:
    """Runs several intakes (each a source, a buffer and a sink) in one process.

    Args:
        intakes: The intakes to run.
        drain_s: The longest time to empty their buffers at the end, in seconds.
        clock: Monotonic seconds.

    """

    def __init__(
        self,
        intakes: Sequence[Intake],
        *,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.intakes = list(intakes)
        self.finished = True
        """False if a thread of a sink still writes after the end. Only the end of the process stops it."""
        self._drain_s, self._clock = drain_s, clock
        self._draining = False
        self._dropped: deque[int] = deque([0], maxlen=_RECENT_S + 1)

    async def run(self, stop: asyncio.Event) -> None:
        """Receive until `stop` is set, then drain.

        Raises:
            BranchlakeError: A source or a sink cannot be opened. The others are drained first.

        """
        pumps = [asyncio.create_task(intake.run()) for intake in self.intakes]
        watching = asyncio.create_task(self._watch(stop, pumps))
        try:
            await watching
        finally:
            watching.cancel()
            await self._drain(pumps)
        for pump in pumps:
            if pump.done() and not pump.cancelled() and (error := pump.exception()) is not None:
                raise error
        for intake in self.intakes:
            task = intake.source.task
            if task is not None and task.done() and not task.cancelled() and (broken := task.exception()):
                raise broken

    def health(self) -> Health:
        """Return the current state. Drops in the last minute or a nearly full buffer make it degraded."""
        reasons = []
        for intake in self.intakes:
            for trouble in (intake.source.trouble, intake.sink_trouble):
                if trouble:
                    reasons.append(f"{intake.topic}: {trouble}")
            if len(intake.buffer) > _NEARLY_FULL * intake.buffer.most_records:
                reasons.append(f"{intake.topic}: its buffer is nearly full ({len(intake.buffer)} records)")
        recent_drops = self._dropped[-1] - self._dropped[0]
        if recent_drops:
            reasons.append(f"{recent_drops} records were dropped in the last minute")
        if self._draining:
            return Health("draining", tuple(reasons))
        if not all(intake.is_open for intake in self.intakes):
            return Health("starting", tuple(reasons))
        return Health("degraded" if reasons else "ready", tuple(reasons))

    def summary(self) -> list[dict[str, Any]]:
        """Return the counts of each intake as a dictionary for JSON, in the order of `intakes`."""
        return [
            {
                "topic": intake.topic,
                "partition": intake.partition,
                "protocol": intake.source.protocol,
                "received": intake.counts.received,
                "handed_over": intake.counts.handed_over,
                "dropped": {reason: n for reason, n in sorted(intake.counts.dropped.items()) if n},
                "not_handed_over": intake.counts.not_handed_over,
                "not_confirmed": intake.counts.not_confirmed,
                "waiting": intake.waiting,
                "events": dict(sorted(intake.counts.events.items())),
            }
            for intake in self.intakes
        ]

    async def _watch(self, stop: asyncio.Event, pumps: Sequence[asyncio.Task[None]]) -> None:
        """Update counts every second. Return when `stop` is set, or when a task has ended.

        The watched tasks are `pumps`, which send records to the sinks, and those of the sources.
        """
        while not stop.is_set():
            for intake in self.intakes:
                intake.source.update_counts()
            self._dropped.append(sum(intake.counts.total_dropped() for intake in self.intakes))
            tasks = [*pumps, *(i.source.task for i in self.intakes if i.source.task is not None)]
            if any(task.done() for task in tasks):
                return
            try:
                async with asyncio.timeout(_EVERY_S):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _drain(self, pumps: Sequence[asyncio.Task[None]]) -> None:
        self._draining = True
        until = self._clock() + self._drain_s
        stopping = [asyncio.create_task(intake.source.stop()) for intake in self.intakes]
        if stopping:
            _, slow = await asyncio.wait(stopping, timeout=_STOPPING_S)
            for task in slow:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)
        for intake in self.intakes:
            intake.buffer.close()
        await asyncio.wait(pumps, timeout=max(0.0, until - self._clock() - _LAST_WORD_S))
        for intake in self.intakes:
            intake.give_up()
        _, unfinished = await asyncio.wait(pumps, timeout=_LAST_WORD_S)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for intake in self.intakes:
            intake.count_remaining()
            # Close each intake, even if another one is not finished.
            self.finished = intake.close() and self.finished


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM, SIGINT, and SIGHUP. A SIGHUP that `nohup` ignores stays ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
