"""Telling the dead from the silent by looks that are minutes apart, without waiting in between.

A sensor's tick may not sleep: Dagster gives it 60 s. So each tick looks once and remembers what it saw. Times
are of the machine's monotonic clock, which stands still while the machine sleeps; after a reboot, or on
another machine, the watch begins anew.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from branchlake_dagster.branching.liveness.heartbeat_store import Heartbeat

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
