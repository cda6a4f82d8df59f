"""Which writers are alive, judged from heartbeats that are read twice, minutes or seconds apart.

The reader's side of heartbeats: who is alive, when clocks differ and processes are paused.

A timestamp is the writer's clock and only makes it suspect. To call it dead, the reader watches its file by
the reader's own monotonic clock.

Telling the dead from the silent by looks that are minutes apart, without waiting in between.

A sensor's tick may not sleep: Dagster gives it 60 s. So each tick looks once and remembers what it saw. Times
are of the machine's monotonic clock, which stands still while the machine sleeps; after a reboot, or on
another machine, the watch begins anew.
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
"""So often at least is a suspect looked at. Elapsed time alone would count a pause of the reader itself."""


class Heartbeats(Protocol):
    """Where heartbeats are kept; see HeartbeatStore."""

    def all(self) -> Sequence[Heartbeat]:
        """The last beat of every writer; raises HeartbeatsUnreadable when one cannot be read."""

    def remove(self, branch: str, writer: str) -> None:
        """Forget a writer."""


class Liveness(StrEnum):
    """What a writer's heartbeat says about it."""

    ALIVE = "beating"
    SUSPECT = "silent, not watched yet"
    DEAD = "dead"


def is_stale(beat: Heartbeat, now: datetime) -> bool:
    """Whether the beat's time is no proof of life: too old, missing, or in the future."""
    if beat.written_at is None:
        return True
    return abs(now - beat.written_at) > timedelta(seconds=beat.max_silence_s)


def judge_by_timestamp(beats: Iterable[Heartbeat], now: datetime) -> dict[Heartbeat, Liveness]:
    """What the timestamps alone tell: alive or suspect."""
    return {beat: Liveness.SUSPECT if is_stale(beat, now) else Liveness.ALIVE for beat in beats}


def watch_suspects(
    store: Heartbeats,
    suspects: Collection[Heartbeat],
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
) -> Mapping[Heartbeat, Liveness]:
    """Watch all `suspects` together for as long as the slowest of them may be silent.

    A file that changes proves life; one that is unchanged through three of its intervals and six looks is
    dead. A file that went away is left out: its writer ended well. Raises HeartbeatsUnreadable.
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
"""Looks, each at least an interval of the writer after the one before: a reader that was paused itself
between two of them gives the writer the time to beat before the third."""

_PROCESS = uuid.uuid4().hex
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def local_clock_id() -> str:
    """A name for the clock that `time.monotonic` reads: this boot of this machine, else this process."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return _PROCESS


@dataclass(frozen=True)
class _WriterReading:
    """What was seen of one writer: its file, when first, when last, how often."""

    content_hash: str
    first_seen: float
    last_seen: float
    count: int


def continue_watch(
    previous_state: str | None, suspects: Collection[Heartbeat], *, clock: str, now: float
) -> tuple[list[Heartbeat], str]:
    """Those of `suspects` that are dead, and what is to be remembered until the next look.

    `previous_state` is what the look before remembered, `clock` names the clock of `now` in seconds.
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
        return {}  # of another version: the watch begins anew
