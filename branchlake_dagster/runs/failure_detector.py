"""Decide which writers are alive, by reading their heartbeats repeatedly.

Clocks differ and processes are paused, so a timestamp, which is from the writer's clock, only makes a writer
suspect. To declare it dead, the reader watches the writer's file by the reader's own monotonic clock.

`watch_suspects` waits between its readings. `continue_watch` does not wait, because a sensor's tick has only
60 s: each tick reads once and stores its readings for the next tick. Its times are of the machine's monotonic
clock, which stops while the machine sleeps. After a reboot, or on another machine, the watch starts again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from branchlake_dagster.runs.heartbeats import MISSED_INTERVALS, Heartbeat

MIN_READINGS = 2 * MISSED_INTERVALS
"""The least number of readings of a suspect. Elapsed time alone would include pauses of the reader."""


class Heartbeats(Protocol):
    """Reads and removes stored heartbeats. `HeartbeatStore` implements it for the warehouse."""

    def all(self) -> Sequence[Heartbeat]:
        """Load the last heartbeat of every writer.

        Raises HeartbeatsUnreadable if the heartbeats cannot be listed.
        """

    def remove(self, branch: str, writer: str) -> None:
        """Remove the heartbeat of a writer for one branch. A missing heartbeat is not an error."""


class Liveness(StrEnum):
    """The state of a writer according to its heartbeat."""

    ALIVE = "beating"
    SUSPECT = "silent, not watched yet"
    DEAD = "dead"


def is_stale(beat: Heartbeat, now: datetime) -> bool:
    """Return whether the heartbeat's time does not prove life: it is too old, missing, or in the future."""
    if beat.written_at is None:
        return True
    return abs(now - beat.written_at) > timedelta(seconds=beat.max_silence_s)


def judge_by_timestamp(beats: Iterable[Heartbeat], now: datetime) -> dict[Heartbeat, Liveness]:
    """Judge each writer by the time of its heartbeat alone, and return its liveness by heartbeat.

    A writer is ALIVE, or SUSPECT if the time is stale at `now` (see `is_stale`). Time alone never shows that
    a writer is dead.
    """
    return {beat: Liveness.SUSPECT if is_stale(beat, now) else Liveness.ALIVE for beat in beats}


def watch_suspects(
    store: Heartbeats,
    suspects: Collection[Heartbeat],
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
) -> Mapping[Heartbeat, Liveness]:
    """Watch all `suspects` together, until each is judged, and return their liveness.

    A writer is alive if its file changes, and dead if its file stays unchanged for three of its intervals and
    through six readings. A writer whose file disappears is omitted from the result, because it ended
    normally. `store` reads the heartbeats. `monotonic` is a clock in seconds, and `sleep` waits for a number
    of seconds. Raises HeartbeatsUnreadable. Cost: the call waits up to three of the longest interval.
    """
    verdicts: dict[Heartbeat, Liveness] = {}
    undecided = set(suspects)
    removed_beats: set[Heartbeat] = set()
    if not undecided:
        return verdicts
    pause = min(beat.max_silence_s for beat in undecided) / MIN_READINGS
    started_at, readings = monotonic(), 0
    while undecided:
        sleep(pause)
        readings += 1
        elapsed = monotonic() - started_at
        contents = {(beat.branch, beat.writer): beat.text for beat in store.all()}
        for beat in list(undecided):
            content = contents.get((beat.branch, beat.writer))
            if content is None:
                removed_beats.add(beat)
            elif content != beat.text:
                verdicts[beat] = Liveness.ALIVE
            elif elapsed >= beat.max_silence_s and readings >= MIN_READINGS:
                verdicts[beat] = Liveness.DEAD
        undecided -= verdicts.keys() | removed_beats
    return verdicts


MIN_TICK_READINGS = 3
"""The least number of readings in ticks, each at least one interval of the writer after the previous one.

If the reader was paused between two readings, the writer has time to beat before the third.
"""

_PROCESS = uuid.uuid4().hex
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def local_clock_id() -> str:
    """Return an id for the clock of `time.monotonic`: this boot of this machine, or else this process."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return _PROCESS


@dataclass(frozen=True)
class _WriterReading:
    """The readings in which one writer's file had the same content.

    `first_seen` and `last_seen` are times of the monotonic clock in seconds, `count` is the number of
    readings.
    """

    content_hash: str
    first_seen: float
    last_seen: float
    count: int


def continue_watch(
    previous_state: str | None, suspects: Collection[Heartbeat], *, clock: str, now: float
) -> tuple[list[Heartbeat], str]:
    """Return the dead writers among `suspects`, and the state to pass to the next call.

    A writer is dead if its file stayed unchanged for three of its intervals and through three readings, each
    at least one interval after the previous one. `previous_state` is the state that the previous call
    returned; None, or the state of another clock, starts the watch again. `now` is a time in seconds of the
    monotonic clock with the id `clock`.
    """
    previous_readings = _parse_watch_state(previous_state, clock)
    new_readings: dict[str, _WriterReading] = {}
    dead: list[Heartbeat] = []
    for beat in suspects:
        name = f"{beat.branch}/{beat.writer}"
        content_hash = sha256(beat.text.encode(errors="replace")).hexdigest()[:16]
        reading = previous_readings.get(name)
        if reading is None or reading.content_hash != content_hash:
            reading = _WriterReading(content_hash, now, now, 1)
        elif now - reading.last_seen >= beat.interval_s:
            reading = _WriterReading(content_hash, reading.first_seen, now, reading.count + 1)
        if reading.count >= MIN_TICK_READINGS and now - reading.first_seen >= beat.max_silence_s:
            dead.append(beat)
        new_readings[name] = reading
    state = {
        name: [entry.content_hash, entry.first_seen, entry.last_seen, entry.count]
        for name, entry in new_readings.items()
    }
    return dead, json.dumps({"clock": clock, "seen": state})


def _parse_watch_state(recorded_state: str | None, clock: str) -> dict[str, _WriterReading]:
    try:
        state = json.loads(recorded_state or "{}")
        if state.get("clock") != clock:
            return {}
        return {
            str(name): _WriterReading(str(content_hash), float(first), float(last), int(count))
            for name, (content_hash, first, last, count) in state["seen"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}  # the state is of another version: the watch starts again
