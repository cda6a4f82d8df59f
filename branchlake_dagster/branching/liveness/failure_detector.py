"""The reader's side of heartbeats: who is alive, when clocks differ and processes are paused.

A timestamp is the writer's clock and only makes it suspect. To call it dead, the reader watches its file by
the reader's own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from branchlake_dagster.branching.liveness.heartbeat_store import MISSED, Heartbeat

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
