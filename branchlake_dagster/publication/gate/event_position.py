"""The position of an event in the runs that worked on one branch, oldest run first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class EventPosition:
    """Where an event is: first by its run, then within that run.

    Dagster's `storage_id` alone does not order events of several runs. The default SQLite storage has one
    database, and so one counter, for each run: a retry's first events have smaller ids than its parent's
    last ones. Both fields are private, so that nobody compares one of them alone.

    Args:
        _run_index (int): Position of the run among the runs whose work is on the branch, oldest first.
        _storage_id (int): Dagster's id of the event, which only grows within one run.
    """

    _run_index: int
    _storage_id: int

    def is_same_run(self, other: EventPosition) -> bool:
        """Whether both events are of one run."""
        return self._run_index == other._run_index
