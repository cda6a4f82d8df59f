"""Dagster's database as publishers, reapers and people meet it: sometimes away, for a single query."""

from __future__ import annotations

from random import Random

from sqlalchemy.exc import OperationalError

from branchlake_dagster_tests.simulation.scheduler import Scheduler

StorageAwayError = OperationalError
"""What SQLAlchemy raises for a database that is locked or gone."""

_SHARE = 0.02
_ACTORS = ("publisher", "reaper")
"""Who meets it: of a run it would be just another failure."""


class Storage:
    """The time that a query takes, and whether it is answered. `random` is its own."""

    def __init__(self, random: Random, scheduler: Scheduler) -> None:
        self._random = random
        self._scheduler = scheduler
        self._healthy = random.random() < 0.7

    def heal(self) -> None:
        """From now on every query is answered."""
        self._healthy = True

    def pause(self) -> None:
        """One query. Raises StorageAwayError."""
        self._scheduler.pause()
        meets = self._scheduler.current.startswith(_ACTORS)
        if not self._healthy and meets and self._random.random() < _SHARE:
            raise StorageAwayError("SELECT", {}, Exception("database is locked"))
