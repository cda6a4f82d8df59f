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

from branchlake_dagster.runs.heartbeats import MISSED, Heartbeat

LOOKS = 2 * MISSED
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


def stale(beat: Heartbeat, now: datetime) -> bool:
    """Whether the beat's time is no proof of life: too old, missing, or in the future."""
    if beat.written_at is None:
        return True
    return abs(now - beat.written_at) > timedelta(seconds=beat.silent_s)


def by_timestamp(beats: Iterable[Heartbeat], now: datetime) -> dict[Heartbeat, Liveness]:
    """What the timestamps alone tell: alive or suspect."""
    return {beat: Liveness.SUSPECT if stale(beat, now) else Liveness.ALIVE for beat in beats}


def watch(
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
    settled: dict[Heartbeat, Liveness] = {}
    waiting = set(suspects)
    gone: set[Heartbeat] = set()
    if not waiting:
        return settled
    pause = min(beat.silent_s for beat in waiting) / LOOKS
    began, looks = monotonic(), 0
    while waiting:
        sleep(pause)
        looks += 1
        elapsed = monotonic() - began
        seen = {(beat.branch, beat.writer): beat.text for beat in store.all()}
        for beat in list(waiting):
            text = seen.get((beat.branch, beat.writer))
            if text is None:
                gone.add(beat)
            elif text != beat.text:
                settled[beat] = Liveness.ALIVE
            elif elapsed >= beat.silent_s and looks >= LOOKS:
                settled[beat] = Liveness.DEAD
        waiting -= settled.keys() | gone
    return settled


NEEDED = 3
"""Looks, each at least an interval of the writer after the one before: a reader that was paused itself
between two of them gives the writer the time to beat before the third."""

_PROCESS = uuid.uuid4().hex
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_clock() -> str:
    """A name for the clock that `time.monotonic` reads: this boot of this machine, else this process."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return _PROCESS


@dataclass(frozen=True)
class _Look:
    """What was seen of one writer: its file, when first, when last, how often."""

    text: str
    first: float
    last: float
    looks: int


def look_again(
    told: str | None, suspects: Collection[Heartbeat], *, clock: str, now: float
) -> tuple[list[Heartbeat], str]:
    """Those of `suspects` that are dead, and what is to be remembered until the next look.

    `told` is what the look before remembered, `clock` names the clock of `now` in seconds.
    """
    before = _read(told, clock)
    seen: dict[str, _Look] = {}
    dead: list[Heartbeat] = []
    for beat in suspects:
        name = f"{beat.branch}/{beat.writer}"
        text = sha256(beat.text.encode(errors="replace")).hexdigest()[:16]
        found = before.get(name)
        if found is None or found.text != text:
            found = _Look(text, now, now, 1)
        elif now - found.last >= beat.interval_s:
            found = _Look(text, found.first, now, found.looks + 1)
        if found.looks >= NEEDED and now - found.first >= beat.silent_s:
            dead.append(beat)
        seen[name] = found
    kept = {name: [one.text, one.first, one.last, one.looks] for name, one in seen.items()}
    return dead, json.dumps({"clock": clock, "seen": kept})


def _read(told: str | None, clock: str) -> dict[str, _Look]:
    try:
        found = json.loads(told or "{}")
        if found.get("clock") != clock:
            return {}
        return {
            str(name): _Look(str(text), float(first), float(last), int(looks))
            for name, (text, first, last, looks) in found["seen"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}  # of another version: the watch begins anew
