"""Which steps can have made a commit that names no step, from the events of the runs on the branch.

Spark's deletes of whole files name neither a run nor a step, only a Spark application. The code of a step
gets a session after the event with the application (`RunBranch.record_application`), and the branch's head is
recorded when the step ends (`RunBranch.record_head`). So a commit was made after the older heads and before
the newer ones, by a step that could use the session at that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dagster import DagsterEventType, DagsterInstance

from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.run_events import (
    STEP_ENDS,
    EventPosition,
    RecordedHead,
    StepOfRun,
    event_metadata,
    find_recorded_head,
    iter_positioned_events,
)
from branchlake_dagster.stored_names import EventMetadata

_EVENT_TYPES = {DagsterEventType.ENGINE_EVENT, DagsterEventType.ASSET_MATERIALIZATION, *STEP_ENDS}


@dataclass(frozen=True)
class SessionUse:
    """The time in which the code of one attempt of a step could write in a session of a Spark application.

    `step` is None if the code runs in a thread whose step is not known. `end` is the position of the head
    that was recorded at the step's end. If none was recorded, it is the step's end, or the end of its run.
    """

    application: str
    step: str | None
    start: EventPosition
    end: EventPosition


@dataclass(frozen=True)
class BranchTimeline:
    """The uses of Spark sessions by the runs on a branch, and the recorded heads of the branch."""

    uses: tuple[SessionUse, ...] = ()
    heads: tuple[RecordedHead, ...] = ()


class StepFinder:
    """Finds the steps that can have made a commit in a Spark session.

    `numbers` maps the hashes of the branch's commits to their numbers, from 1; the base has 0.
    """

    def __init__(self, timeline: BranchTimeline, numbers: Mapping[str, int]) -> None:
        self._uses = timeline.uses
        self._positions = [
            (numbers[head.hash], head.position) for head in timeline.heads if head.hash in numbers
        ]

    def find_possible_steps(self, application: str, number: int) -> frozenset[str | None]:
        """Return the keys of the steps that can have made the commit `number` in a session of `application`.

        The result contains None for code whose step is not known. It is empty if no use explains the commit.
        """
        latest = min((at for commit, at in self._positions if commit >= number), default=None)
        # If steps run in parallel, an older head may be stored after a newer one. It shows nothing then.
        earliest = max(
            (at for commit, at in self._positions if commit < number and (latest is None or at < latest)),
            default=None,
        )
        return frozenset(
            use.step
            for use in self._uses
            if use.application == application
            and (latest is None or use.start < latest)
            and (earliest is None or use.end > earliest)
        )


def load_timeline(instance: DagsterInstance, branch: str) -> BranchTimeline:
    """Load the timeline of a branch. Costs one query to Dagster's event log per run and 1,000 events."""
    runs = load_runs_on_branch(instance, branch)
    heads: list[RecordedHead] = []
    uses: list[SessionUse] = []
    active: dict[StepOfRun, list[SessionUse]] = {}
    last_heads: dict[StepOfRun, EventPosition] = {}
    ends_of_runs = {run.run_id: EventPosition.end_of_run(index) for index, run in enumerate(runs)}
    for position, record in iter_positioned_events(instance, runs, _EVENT_TYPES):
        event, step_key = record.event_log_entry.dagster_event, record.event_log_entry.step_key
        if event is None:
            continue
        step = StepOfRun(record.run_id, step_key or "")
        if (head := find_recorded_head(position, record)) is not None:
            heads.append(head)
            if event.event_type == DagsterEventType.ENGINE_EVENT:
                last_heads[step] = position
        if application := event_metadata(event).get(EventMetadata.SPARK_APPLICATION):
            use = SessionUse(str(application.value), step_key, position, ends_of_runs[record.run_id])
            active.setdefault(step, []).append(use)
        if event.event_type in STEP_ENDS:
            uses += _end_uses(active.pop(step, ()), last_heads.get(step), position)
    for remaining in active.values():
        uses += remaining
    return BranchTimeline(tuple(uses), tuple(heads))


def _end_uses(
    uses: Sequence[SessionUse], last_head: EventPosition | None, end: EventPosition
) -> Iterator[SessionUse]:
    """Yield the uses of one attempt of a step with their end.

    `last_head` is the position of the newest head that the step recorded at its end, or None.
    """
    for use in uses:
        yield replace(use, end=last_head if last_head is not None and last_head > use.start else end)
