"""Which steps can have made a commit that names no step, from the events of the runs on the branch.

Spark's deletes of whole files name neither a run nor a step, only a Spark application. The code of a step
gets a session after the event with the application (`RunBranch.record_application`), and the branch's head is
recorded when the step ends (`RunBranch.record_head`). So a commit was made after the older heads and before
the newer ones, by a step that could use the session at that time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dagster import DagsterEventType, DagsterInstance, EventLogRecord

from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.stored_names import EventMetadata

_STEP_ENDS = {
    DagsterEventType.STEP_SUCCESS,
    DagsterEventType.STEP_FAILURE,
    DagsterEventType.STEP_UP_FOR_RETRY,
}
_EVENT_TYPES = {DagsterEventType.ENGINE_EVENT, DagsterEventType.ASSET_MATERIALIZATION, *_STEP_ENDS}
_PAGE_SIZE = 1000

EventIndex = tuple[int, int]
"""The order of an event: the index of its run among the runs on the branch, and Dagster's id in that run."""


@dataclass(frozen=True)
class SessionUse:
    """The time in which the code of one attempt of a step could write in a session of a Spark application.

    `step` is None if the code runs in a thread whose step is not known. `end` is the position of the head
    that was recorded at the step's end. If none was recorded, it is the step's end, or the end of its run.
    """

    application: str
    step: str | None
    start: EventIndex
    end: EventIndex


@dataclass(frozen=True)
class BranchTimeline:
    """The uses of Spark sessions by the runs on a branch, and the (position, hash) of each recorded head."""

    uses: tuple[SessionUse, ...] = ()
    heads: tuple[tuple[EventIndex, str], ...] = ()

    def find_possible_steps(
        self, application: str, number: int, numbers: Mapping[str, int]
    ) -> frozenset[str | None]:
        """Return the keys of the steps that can have made the commit `number` in a session of `application`.

        `numbers` maps the hashes of the branch's commits to their numbers, from 1; the base has 0. The result
        contains None for code whose step is not known. It is empty if no use explains the commit.
        """
        positions = [(numbers[hash_], position) for position, hash_ in self.heads if hash_ in numbers]
        latest = min((at for commit, at in positions if commit >= number), default=(sys.maxsize, 0))
        # If steps run in parallel, an older head may be stored after a newer one. It shows nothing then.
        earliest = max((at for commit, at in positions if commit < number and at < latest), default=(-1, 0))
        return frozenset(
            use.step
            for use in self.uses
            if use.application == application and use.start < latest and use.end > earliest
        )


def load_timeline(instance: DagsterInstance, branch: str) -> BranchTimeline:
    """Load the timeline of a branch. Costs one query to Dagster's event log per run and 1,000 events."""
    heads: list[tuple[EventIndex, str]] = []
    uses: list[SessionUse] = []
    for index, run in enumerate(load_runs_on_branch(instance, branch)):
        last_head: dict[str | None, EventIndex] = {}
        active: list[SessionUse] = []
        for record in _iter_events(instance, run.run_id):
            position = (index, record.storage_id)
            event, step = record.event_log_entry.dagster_event, record.event_log_entry.step_key
            metadata = _get_metadata(record)
            if head := metadata.get(EventMetadata.BRANCH_HEAD):
                heads.append((position, str(head.value)))
                if event is not None and event.event_type == DagsterEventType.ENGINE_EVENT:
                    last_head[step] = position
            if application := metadata.get(EventMetadata.SPARK_APPLICATION):
                active.append(SessionUse(str(application.value), step, position, (index, sys.maxsize)))
            if event is not None and event.event_type in _STEP_ENDS:
                uses += _end_uses(active, step, last_head.get(step), position)
                active = [use for use in active if use.step != step]
        uses += active
    return BranchTimeline(tuple(uses), tuple(heads))


def _end_uses(
    uses: Sequence[SessionUse], step: str | None, last_head: EventIndex | None, end: EventIndex
) -> Iterator[SessionUse]:
    """Yield the uses of a step with their end.

    `last_head` is the position of the newest head that the step recorded at its end, or None.
    """
    for use in uses:
        if use.step == step:
            yield replace(use, end=last_head if last_head is not None and last_head > use.start else end)


def _iter_events(instance: DagsterInstance, run_id: str) -> Iterator[EventLogRecord]:
    cursor: str | None = None
    has_more = True
    while has_more:
        page = instance.get_records_for_run(run_id, cursor=cursor, of_type=_EVENT_TYPES, limit=_PAGE_SIZE)
        yield from page.records
        cursor, has_more = page.cursor, page.has_more


def _get_metadata(record: EventLogRecord) -> Mapping[str, Any]:
    event = record.event_log_entry.dagster_event
    if event is None:
        return {}
    if event.event_type == DagsterEventType.ASSET_MATERIALIZATION:
        return event.step_materialization_data.materialization.metadata
    return getattr(event.event_specific_data, "metadata", None) or {}
