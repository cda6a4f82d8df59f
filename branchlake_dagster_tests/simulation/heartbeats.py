"""Heartbeats of the simulation's processes, without their threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster_tests.simulation.scheduler import Clock

INTERVAL_S = 10.0


@dataclass
class _Heart:
    beat: Heartbeat
    beats: bool = True


class Hearts:
    """What `HeartbeatStore` is to the reaper. A heart that stopped leaves its last beat."""

    def __init__(self, clock: Clock, pause: Callable[[], None]) -> None:
        self._clock = clock
        self._pause = pause
        self._hearts: dict[str, _Heart] = {}

    def begin(self, branch: str, run_id: str, instance: str) -> str:
        """A process beats for a branch; the name it goes by."""
        writer = f"writer-{len(self._hearts)}-{run_id}"
        beat = Heartbeat(branch, writer, run_id, interval_s=INTERVAL_S, instance=instance)
        self._hearts[writer] = _Heart(self._now(beat))
        return writer

    def stop(self, writer: str) -> None:
        """The process is paused, or it is gone and could not clean up."""
        if heart := self._hearts.get(writer):
            heart.beat, heart.beats = self._now(heart.beat), False

    def resume(self, writer: str) -> None:
        """A paused process goes on."""
        if heart := self._hearts.get(writer):
            heart.beats = True

    def end(self, writer: str) -> None:
        """The process ends and cleans up."""
        self._hearts.pop(writer, None)

    def alive(self, writer: str) -> bool:
        """Whether it beats."""
        return writer in self._hearts and self._hearts[writer].beats

    def _now(self, beat: Heartbeat) -> Heartbeat:
        seconds = self._clock.monotonic()
        counter = int(seconds / INTERVAL_S)
        written_at = self._clock.now() - timedelta(seconds=seconds % INTERVAL_S)
        return Heartbeat(
            beat.branch, beat.writer, beat.run_id, "run", counter, written_at, INTERVAL_S, text=str(counter)
        )

    # -- what the reaper asks --------------------------------------------------------------------------

    def all(self) -> Sequence[Heartbeat]:
        """The last beat of every process that did not clean up."""
        self._pause()
        return [self._now(heart.beat) if heart.beats else heart.beat for heart in self._hearts.values()]

    def remove(self, branch: str, writer: str) -> None:
        """Forget a process."""
        self._pause()
        self._hearts.pop(writer, None)
