"""The receivers of one process: they start together, are monitored, and are drained at the end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from branchlake_dagster.receivers.intake import Intake

DRAIN_S = 4.3
"""Seconds from the signal to the end of all hand-overs, so that the process ends within five seconds."""

_STOPPING_S, _LAST_WORD_S, _EVERY_S, _RECENT_S = 2.0, 0.3, 1.0, 60
_NEARLY_FULL = 0.8

HealthState = Literal["starting", "ready", "degraded", "draining"]


@dataclass(frozen=True)
class Health:
    """The state of a receiver process, and the reasons if it is degraded."""

    state: HealthState
    reasons: tuple[str, ...] = ()


class Receivers:
    """Runs several intakes in one process.

    Args:
        intakes: The intakes to run.
        drain_s: The longest time to drain them at the end, in seconds.
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
        """Return the final counts, one entry for each intake."""
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
        """Update counts every second. Return when `stop` is set, or when a task has ended."""
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
    """Set `stop` on SIGTERM and on SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
