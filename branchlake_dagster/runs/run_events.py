"""The events of the runs on a branch: their order, and what they record about the branch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster import DagsterEvent, DagsterEventType, DagsterInstance, DagsterRun, EventLogRecord

from branchlake_dagster.stored_names import EventMetadata

STEP_ENDS = frozenset(
    {DagsterEventType.STEP_SUCCESS, DagsterEventType.STEP_FAILURE, DagsterEventType.STEP_UP_FOR_RETRY}
)
_HEAD_EVENTS = frozenset({DagsterEventType.ENGINE_EVENT, DagsterEventType.ASSET_MATERIALIZATION})
_PAGE_SIZE = 1000


@dataclass(frozen=True, order=True)
class EventPosition:
    """The order of an event: first by its run, then within that run.

    Dagster's `storage_id` alone does not order events of several runs. The default SQLite storage has one
    database, and so one counter, for each run: a retry's first events have smaller ids than its parent's last
    ones. Both fields are private, so that they are only compared together.

    Args:
        _run_index (int): Position of the run among the runs whose work is on the branch, oldest first.
        _storage_id (int): Dagster's id of the event, which only grows within one run.
    """

    _run_index: int
    _storage_id: int

    def is_same_run(self, other: EventPosition) -> bool:
        """Return whether both events belong to the same run."""
        return self._run_index == other._run_index

    @classmethod
    def end_of_run(cls, run_index: int) -> EventPosition:
        """Return the position after all events of a run, and before those of the runs that continue it."""
        return cls(run_index, sys.maxsize)


@dataclass(frozen=True)
class StepOfRun:
    """A step of one of the runs that worked on the branch."""

    run_id: str
    step_key: str


@dataclass(frozen=True)
class RecordedHead:
    """A hash of the branch that a run recorded after its writes. `step` is None if no step recorded it."""

    hash: str
    position: EventPosition
    step: StepOfRun | None = None


def iter_positioned_events(
    instance: DagsterInstance, runs: Sequence[DagsterRun], event_types: Collection[DagsterEventType]
) -> Iterator[tuple[EventPosition, EventLogRecord]]:
    """Yield the events of these types with their positions, in order.

    `runs` are all runs on the branch, oldest first. Costs one query to Dagster's event log per run and 1,000
    events.
    """
    for index, run in enumerate(runs):
        cursor: str | None = None
        has_more = True
        while has_more:
            page = instance.get_records_for_run(
                run.run_id, cursor=cursor, of_type={*event_types}, limit=_PAGE_SIZE
            )
            for record in page.records:
                yield EventPosition(index, record.storage_id), record
            cursor, has_more = page.cursor, page.has_more


def event_metadata(event: DagsterEvent) -> Mapping[str, Any]:
    """Return the metadata entries of an event; those of the materialization for a materialization."""
    if event.event_type == DagsterEventType.ASSET_MATERIALIZATION:
        return event.step_materialization_data.materialization.metadata
    return getattr(event.event_specific_data, "metadata", None) or {}


def find_recorded_head(position: EventPosition, record: EventLogRecord) -> RecordedHead | None:
    """Return the hash of the branch that an event records; None if it records none."""
    event = record.event_log_entry.dagster_event
    if event is None or event.event_type not in _HEAD_EVENTS:
        return None
    value = event_metadata(event).get(EventMetadata.BRANCH_HEAD)
    if value is None:
        return None
    step_key = record.event_log_entry.step_key
    return RecordedHead(str(value.value), position, StepOfRun(record.run_id, step_key) if step_key else None)
