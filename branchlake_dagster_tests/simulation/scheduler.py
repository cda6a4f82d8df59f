"""Actors that take turns at the points where the world could interrupt them, in an order given by a seed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random

from greenlet import getcurrent, greenlet


class Died(BaseException):
    """The process that ran an actor is gone. No `except Exception` survives it."""


class Stuck(AssertionError):  # noqa: N818 - reads as a verdict
    """The actors never came to an end."""


class Clock:
    """Simulated time: it goes on a little whenever it is asked, and by what somebody sleeps."""

    def __init__(self) -> None:
        self._now = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        """The time of day; never the same twice."""
        self._now += timedelta(milliseconds=1)
        return self._now

    def monotonic(self) -> float:
        """Seconds."""
        return self._now.timestamp()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += timedelta(seconds=seconds)


class Scheduler:
    """Runs actors one at a time. `pause` is where another one may go on."""

    def __init__(self, random: Random, *, steps: int = 20_000) -> None:
        self._random = random
        self._steps = steps
        self._actors: dict[greenlet, str] = {}

    def spawn(self, name: str, actor: Callable[[], None]) -> None:
        """Add an actor; it begins when its turn comes."""

        def life() -> None:
            try:
                actor()
            except Died:
                return

        self._actors[greenlet(life)] = name

    @property
    def current(self) -> str:
        """The name of the actor whose turn it is; empty outside of any."""
        return self._actors.get(getcurrent(), "")

    def pause(self) -> None:
        """Let others go on; outside of an actor nothing happens."""
        me = getcurrent()
        if me in self._actors and me.parent is not None:
            me.parent.switch()

    def run(self) -> None:
        """Run until every actor has ended."""
        random = self._random
        for _ in range(self._steps):
            if not self._actors:
                return
            waiting = list(self._actors)
            actor = waiting[int(random.random() * len(waiting))]
            # Some stay at it for a while: long and short runs of one actor both occur.
            turns = 1 if random.random() < 0.5 else 1 + int(random.random() * 12)
            while turns and not actor.dead:
                actor.switch()
                turns -= 1
            if actor.dead:
                del self._actors[actor]
        raise Stuck(f"still busy after {self._steps} turns: {sorted(self._actors.values())}")
