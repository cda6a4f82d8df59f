"""Results that wait for somebody's approval before the assets after them consume them, by tags on runs.

A run with `APPROVAL_TAG` = `required` is judged and published as any other; only consumers of its change
wait. The tag is the only state, so it survives restarts; `given` takes its place once the result is approved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from dagster import DagsterInstance, DagsterRun, RunsFilter

from branchlake_dagster.internals.dagster import (
    AUTOMATION_CONDITION_TAG,
    BACKFILL_ID_TAG,
    RETRY_NUMBER_TAG,
    report_engine_event,
)
from branchlake_dagster.runs.run_tags import GIVEN, REQUIRED, place_of, publication_of
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import NotApproved

_CHUNK = 200
"""Run ids in one query."""
_MOST_FOLLOWED = 20
"""Backfills that one tag names: Dagster limits its length."""


def approval_names(run_id: str, tags: Mapping[str, str]) -> tuple[str, ...]:
    """The ids under which a run's result is approved: of the backfills that it belongs to or follows.

    A run outside of backfills has its own id.
    """
    followed = tags.get(RunTag.FOLLOWS) or tags.get(BACKFILL_ID_TAG) or run_id
    return tuple(name for name in followed.split(",") if name)


def inherited_tags(
    tags: Mapping[str, str], consumed: Iterable[tuple[str, Mapping[str, str]]]
) -> dict[str, str]:
    """The new tags of a run that has consumed the results of other runs, given as run ids with their tags.

    Its own result waits for approval as theirs did, whether they were approved or not. Empty if none of the
    other runs has to do with approval.
    """
    names: dict[str, None] = {}
    if RunTag.APPROVAL in tags:
        names |= dict.fromkeys(approval_names("", tags))
    for run_id, its in consumed:
        if RunTag.APPROVAL in its:
            names |= dict.fromkeys(approval_names(run_id, its))
    new = {RunTag.APPROVAL: REQUIRED, RunTag.FOLLOWS: ",".join([*names][-_MOST_FOLLOWED:])} if names else {}
    return {name: value for name, value in new.items() if tags.get(name) != value}


def requires_approval(run: DagsterRun) -> bool:
    """Whether a run must not consume results that are not approved: one that no person launched.

    These are the runs of the incremental sensor and of automation conditions. A person's re-execution copies
    the tags of such a run, but it is a launch by a person and does not wait. Dagster's automatic retries are
    numbered, and wait as the first run does.
    """
    launched_by_machine = not run.tags.keys().isdisjoint(
        (RunTag.HELD_UNTIL_APPROVED, AUTOMATION_CONDITION_TAG)
    )
    return launched_by_machine and (run.parent_run_id is None or RETRY_NUMBER_TAG in run.tags)


class Approvals:
    """Which runs' results wait for approval, or have one of `states`; make a new one for each tick.

    Each run is looked up once, and none if no run of the Dagster instance has such a state.
    """

    def __init__(self, instance: DagsterInstance, states: Sequence[str] = (REQUIRED,)) -> None:
        self._instance = instance
        self._wanted = {RunTag.APPROVAL: states}
        self._tags: dict[str, Mapping[str, str]] = {}
        """By run id; empty for a run without such a state."""

    @cached_property
    def any(self) -> bool:
        """Whether there are such runs at all. One query for at most one row."""
        return bool(self._instance.get_run_ids(RunsFilter(tags=self._wanted), limit=1))

    def chosen(self, run_ids: Collection[str]) -> set[str]:
        """Those of the runs that have one of the states."""
        if not self.any:
            return set()
        unknown = [one for one in run_ids if one not in self._tags]
        self._tags |= {one: {} for one in unknown}
        for start in range(0, len(unknown), _CHUNK):
            part = RunsFilter(run_ids=unknown[start : start + _CHUNK], tags=self._wanted)
            self._tags |= {run.run_id: run.tags for run in self._instance.get_runs(part)}
        return {one for one in run_ids if self._tags[one]}

    def names(self, run_ids: Collection[str]) -> tuple[str, ...]:
        """The ids under which the results of these runs are approved."""
        chosen = self.chosen(run_ids)
        return tuple(sorted({name for one in chosen for name in approval_names(one, self._tags[one])}))

    def inherit(self, run_id: str, consumed: Collection[str], *, asset: str) -> None:
        """Let the result of run `run_id` wait for approval if a run that it consumed has one of the states.

        Raises NotApproved if no person launched the run for `asset` (`requires_approval`), and a result that
        was not approved was published before the run began to read.
        """
        consumed_tags = {one: self._tags[one] for one in self.chosen(consumed)}
        own = self._instance.get_run_by_id(run_id) if consumed_tags else None
        if own is None:
            return
        waiting = {one: tags for one, tags in consumed_tags.items() if tags[RunTag.APPROVAL] == REQUIRED}
        if waiting and requires_approval(own):
            names = sorted({name for one, tags in waiting.items() for name in approval_names(one, tags)})
            raise NotApproved(
                f"Asset {asset} has consumed results that are not approved: they were published after the run"
                " was launched.",
                run_id=run_id,
                hint=f"After `branchlake backfill approve {names[0]}` the sensor launches a new run.",
            )
        if new := inherited_tags(own.tags, consumed_tags.items()):
            self._instance.add_run_tags(run_id, new)


def on_main(run: DagsterRun) -> bool:
    """Whether Dagster knows that the run's result is on `main`."""
    place = place_of(run.tags, run.run_id)
    return place is not None and (place.unbranched or publication_of(run.tags, place.branch) is not None)


def give_approval(instance: DagsterInstance, run: DagsterRun) -> None:
    """Let the assets after a run consume its result, and record that in the run's log."""
    instance.add_run_tags(run.run_id, {RunTag.APPROVAL: GIVEN})
    report_engine_event(instance, "Approved: the assets that consume this result may be computed.", run)
