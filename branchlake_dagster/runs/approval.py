"""Hold results back from downstream assets until a person approves them, by tags on runs.

A run whose tag `RunTag.APPROVAL` is `required` is judged and published like any other run. Only consumers of
its change wait. The tag is the only state, so it survives restarts. An approval sets it to `given`.
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
from branchlake_dagster.runs.run_tags import (
    APPROVAL_GIVEN,
    APPROVAL_REQUIRED,
    RunState,
    find_publication,
    find_run_location,
)
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import NotApproved

_CHUNK_SIZE = 200
"""The number of run ids in one query."""
_MAX_FOLLOWED = 20
"""The most ids of backfills and runs in one tag, because Dagster limits the length of tags."""


def approval_names(run_id: str, tags: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids under which a run's result is approved: the backfills that it belongs to or follows.

    A run outside of backfills has only its own id.
    """
    followed = tags.get(RunTag.FOLLOWS) or tags.get(BACKFILL_ID_TAG) or run_id
    return tuple(name for name in followed.split(",") if name)


def inherited_approval_tags(
    tags: Mapping[str, str], consumed: Iterable[tuple[str, Mapping[str, str]]]
) -> dict[str, str]:
    """Return the tags to add to a run that consumed the results of other runs.

    `tags` are the run's present tags; `consumed` has the ids and tags of the other runs. If one of these runs
    or the run itself is subject to approval, approved or not, the run's result must be approved too.
    Otherwise the result is empty. Tags that the run already has are left out.
    """
    names: dict[str, None] = {}
    if RunTag.APPROVAL in tags:
        names |= dict.fromkeys(approval_names("", tags))
    for run_id, consumed_tags in consumed:
        if RunTag.APPROVAL in consumed_tags:
            names |= dict.fromkeys(approval_names(run_id, consumed_tags))
    approval_tags = (
        {RunTag.APPROVAL: APPROVAL_REQUIRED, RunTag.FOLLOWS: ",".join([*names][-_MAX_FOLLOWED:])}
        if names
        else {}
    )
    return {name: value for name, value in approval_tags.items() if tags.get(name) != value}


def requires_approval(run: DagsterRun) -> bool:
    """Return whether a run must only consume approved results, because it was not launched by a person.

    Such runs are those of the incremental sensor and of automation conditions. A person's re-execution copies
    their tags but does not wait, because a person launched it. Dagster's automatic retries are numbered and
    wait like the first run.
    """
    launched_by_machine = not run.tags.keys().isdisjoint(
        (RunTag.HELD_UNTIL_APPROVED, AUTOMATION_CONDITION_TAG)
    )
    return launched_by_machine and (run.parent_run_id is None or RETRY_NUMBER_TAG in run.tags)


class Approvals:
    """Finds the runs whose approval tag has one of `states`, by default those that wait for approval.

    Create one object per tick, because the tags of each run are read once. No run is read if no run of the
    Dagster instance has such a tag.
    """

    def __init__(self, instance: DagsterInstance, states: Sequence[str] = (APPROVAL_REQUIRED,)) -> None:
        self._instance = instance
        self._state_filter = {RunTag.APPROVAL: states}
        self._tags: dict[str, Mapping[str, str]] = {}
        """The tags by run id; empty for a run without such a state."""

    @cached_property
    def has_any(self) -> bool:
        """Whether a run of the instance has one of the approval `states`. Costs a query for one row."""
        return bool(self._instance.get_run_ids(RunsFilter(tags=self._state_filter), limit=1))

    def filter_runs(self, run_ids: Collection[str]) -> set[str]:
        """Return the ids among `run_ids` whose run has one of the approval `states`."""
        if not self.has_any:
            return set()
        unread_run_ids = [run_id for run_id in run_ids if run_id not in self._tags]
        self._tags |= {run_id: {} for run_id in unread_run_ids}
        for start in range(0, len(unread_run_ids), _CHUNK_SIZE):
            runs_filter = RunsFilter(
                run_ids=unread_run_ids[start : start + _CHUNK_SIZE], tags=self._state_filter
            )
            self._tags |= {run.run_id: run.tags for run in self._instance.get_runs(runs_filter)}
        return {run_id for run_id in run_ids if self._tags[run_id]}

    def approval_names(self, run_ids: Collection[str]) -> tuple[str, ...]:
        """Return the sorted ids under which the results of these runs are approved.

        Runs without one of the states are skipped.
        """
        matching_run_ids = self.filter_runs(run_ids)
        return tuple(
            sorted(
                {name for run_id in matching_run_ids for name in approval_names(run_id, self._tags[run_id])}
            )
        )

    def inherit_approval(self, run_id: str, consumed: Collection[str], *, asset: str) -> None:
        """Let the result of run `run_id` wait for approval if a run in `consumed` has one of `states`.

        `consumed` are the ids of the runs whose results the run has read for `asset`. Raises NotApproved if
        the run must only consume approved results (`requires_approval`) and one of them is not approved.
        """
        consumed_tags = {consumed_id: self._tags[consumed_id] for consumed_id in self.filter_runs(consumed)}
        own_run = self._instance.get_run_by_id(run_id) if consumed_tags else None
        if own_run is None:
            return
        waiting_tags = {
            consumed_id: tags
            for consumed_id, tags in consumed_tags.items()
            if tags[RunTag.APPROVAL] == APPROVAL_REQUIRED
        }
        if waiting_tags and requires_approval(own_run):
            names = sorted(
                {
                    name
                    for consumed_id, tags in waiting_tags.items()
                    for name in approval_names(consumed_id, tags)
                }
            )
            raise NotApproved(
                f"Asset {asset} has consumed unapproved results. They were published after the run was"
                " launched.",
                run_id=run_id,
                hint=f"Run `branchlake backfill approve {names[0]}`. The sensor then launches a new run.",
            )
        if new_tags := inherited_approval_tags(own_run.tags, consumed_tags.items()):
            self._instance.add_run_tags(run_id, new_tags)


def is_on_main(run: DagsterRun) -> bool:
    """Return whether the run's tags record that its result is on `main` and was not undone."""
    location = find_run_location(run.tags, run.run_id)
    if run.tags.get(RunTag.STATUS) == RunState.UNDONE:
        return False
    return location is not None and (
        location.unbranched or find_publication(run.tags, location.branch) is not None
    )


def approve_run(instance: DagsterInstance, run: DagsterRun) -> None:
    """Allow downstream assets to consume the run's result, and record the approval in the run's log."""
    instance.add_run_tags(run.run_id, {RunTag.APPROVAL: APPROVAL_GIVEN})
    report_engine_event(instance, "Approved: the assets that consume this result may be computed.", run)
