"""Read and write the tags of a Dagster run that record its branch, its status and its retention.

Dagster may copy all tags of a run to a re-execution. So readers call `is_opened_by` first, and a run that
opens its branch overwrites inherited tags. A re-execution once took its parent's base hash for its own and
reported a deleted branch that had never existed.

The tags also record how long the branch of a run is kept. Commands and other code locations of the same
Dagster instance may have other settings, but every reaper, sweeper and publisher follows the run's own.

Hold results back from downstream assets until a person approves them, by tags on runs.

A run with `APPROVAL_TAG` = `required` is judged and published like any other run; only consumers of its
change wait. The tag is the only state, so it survives restarts. An approval sets it to `given`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import cached_property

from dagster import DagsterInstance, DagsterRun, RunsFilter

from branchlake_dagster.internals.dagster import (
    AUTOMATION_CONDITION_TAG,
    BACKFILL_ID_TAG,
    RETRY_NUMBER_TAG,
    report_engine_event,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.errors import NotApproved

# Dagster hides tags with this prefix, so that hashes do not fill the run list. Dagster allows one slash in a
# tag name.
_HIDDEN = ".dagster/branchlake_"


PUBLISHER = "publisher"


APPROVAL_REQUIRED = "required"
APPROVAL_GIVEN = "given"


class RunState(StrEnum):
    """The state of a run that writes to the lake, or what a pass did with its branch.

    The run's tag `branchlake` holds one of `RECORDED_STATES`. The other states are reported by a pass or by
    `publish()`; they describe a run that the pass left as it was.
    """

    PENDING = "pending"
    PUBLISHED = "published"
    BLOCKED = "blocked"
    REFUSED = "refused"
    FAILED = "failed"
    """A step or a check of the run crashed, or its process could not start."""
    CANCELED = "canceled"
    INTERRUPTED = "interrupted"
    """The run's process was killed or died."""
    DISCARDED = "discarded"
    """Nothing was published and the branch was ended. As a tag: while Dagster considered the run running or
    successful."""
    UNCHANGED = "nothing to publish"
    UNBRANCHED = "unbranched"
    CONTINUED = "continued by a retry"
    CHECKING = "checking"
    """Checks run again on the rebased tables."""
    WAITING = "waiting"
    KEPT = "kept"
    """The branch of the unpublished run is kept for debugging."""
    UNKNOWN_RUN = "unknown run"
    TRY_AGAIN = "try again"
    PARKED = "set aside"
    """Judging or publishing the run failed repeatedly. An operator decides on it."""


RECORDED_STATES = frozenset(
    {
        RunState.PENDING,
        RunState.PUBLISHED,
        RunState.BLOCKED,
        RunState.REFUSED,
        RunState.FAILED,
        RunState.CANCELED,
        RunState.INTERRUPTED,
        RunState.DISCARDED,
        RunState.UNCHANGED,
        RunState.UNBRANCHED,
        RunState.CONTINUED,
    }
)
"""The states that the run's tag `branchlake` may hold."""


PENDING = "pending"
"""The verdict of a run that has not been judged yet."""
FENCED = "fenced"
"""The branch was ended before the run was judged."""
CONTINUED = "continued"
"""A retry took over the run's work."""
UNJUDGED = (PENDING, FENCED, CONTINUED)
"""Verdicts that are not a publisher's. A run that passes in spite of them is judged."""
TAG_LENGTH = 250
"""The longest tag value in characters."""
NO_VALUE = "none"
"""Replaces an inherited value, because Dagster cannot remove tags."""


@dataclass(frozen=True)
class RunLocation:
    """Where a run works: its branch and the hash of `main` that it started from.

    `continues` is the branch whose work a retry took over. An unbranched run uses `main`; its base hash is
    empty if Nessie did not answer.
    """

    branch: str
    base_hash: str
    continues: str | None = None
    unbranched: bool = False


def build_opening_tags(
    run_id: str, location: RunLocation, inherited_tags: Mapping[str, str]
) -> dict[str, str]:
    """Return the tags of a run that has just opened its branch. They overwrite inherited tags."""
    own_tags = {
        RunTag.BRANCH: location.branch,
        RunTag.BASE_HASH: location.base_hash or NO_VALUE,
        RunTag.VERDICT: PENDING,
        RunTag.OPENED_BY: run_id,
        RunTag.STATUS: str(RunState.UNBRANCHED if location.unbranched else RunState.PENDING),
    }
    if location.continues:
        own_tags[RunTag.CONTINUES] = location.continues
    if location.unbranched:
        own_tags[RunTag.UNBRANCHED] = "true"
    stale_names = (
        RunTag.PUBLICATION,
        RunTag.REASON,
        RunTag.FAILED_BY,
        RunTag.CONTINUES,
        RunTag.UNBRANCHED,
        RunTag.ATTEMPTS,
        RunTag.NEXT_ATTEMPT,
        RunTag.REPORTED,
    )
    if (
        inherited_tags.get(RunTag.APPROVAL) == APPROVAL_GIVEN
    ):  # the approval was for the run that this one repeats
        own_tags[RunTag.APPROVAL] = APPROVAL_REQUIRED
    return {name: NO_VALUE for name in stale_names if name in inherited_tags} | own_tags


def find_run_location(tags: Mapping[str, str], run_id: str) -> RunLocation | None:
    """Find where run `run_id` works, if these tags are its own. None if the run has not opened a branch."""
    if not is_opened_by(tags, run_id):
        return None
    base_hash, continues = tags.get(RunTag.BASE_HASH, NO_VALUE), tags.get(RunTag.CONTINUES, NO_VALUE)
    return RunLocation(
        tags[RunTag.BRANCH],
        "" if base_hash == NO_VALUE else base_hash,
        None if continues == NO_VALUE else continues,
        tags.get(RunTag.UNBRANCHED) == "true",
    )


def is_opened_by(tags: Mapping[str, str], run_id: str) -> bool:
    """Return whether run `run_id` itself wrote these tags, and did not inherit them."""
    return tags.get(RunTag.OPENED_BY) == run_id


def find_recorded_base(tags: Mapping[str, str], branch: str) -> str | None:
    """Find the base hash, if these tags are about this branch."""
    return _find_tag(tags, RunTag.BASE_HASH, branch)


def is_judged(tags: Mapping[str, str], branch: str) -> bool:
    """Return whether the publisher has recorded its verdict on this branch."""
    return tags.get(RunTag.BRANCH) == branch and tags.get(RunTag.VERDICT, PENDING) not in UNJUDGED


def find_publication(tags: Mapping[str, str], branch: str) -> str | None:
    """Find the commit on `main` that published this branch, if the publisher has recorded one."""
    return _find_tag(tags, RunTag.PUBLICATION, branch)


def _find_tag(tags: Mapping[str, str], name: str, branch: str) -> str | None:
    value = tags.get(name) if tags.get(RunTag.BRANCH) == branch else None
    return None if value == NO_VALUE else value


def shorten_tag_value(value: str) -> str:
    """Shorten `value` to at most `TAG_LENGTH` characters."""
    return value if len(value) <= TAG_LENGTH else f"{value[: TAG_LENGTH - 1]}…"


_RETENTION_SETTINGS = ("keep_failed_hours", "discard_grace_h", "orphan_max_age_h")
"""Settings in hours, in the order of the fields of `Retention`."""


@dataclass(frozen=True)
class Retention:
    """How long a run's branch and its discarded data are kept.

    `keep_failed` counts from the end of an unpublished run. `discard_grace` counts from the discarding of its
    branch. `max_age` counts from the last sign of life of a run without heartbeats.
    """

    keep_failed: timedelta
    discard_grace: timedelta
    max_age: timedelta

    @classmethod
    def from_settings(cls, settings: Settings) -> Retention:
        """Return the retention that these settings define."""
        return cls(*(timedelta(hours=getattr(settings, name)) for name in _RETENTION_SETTINGS))

    @classmethod
    def from_run_tags(cls, tags: Mapping[str, str], run_id: str) -> Retention | None:
        """Parse the retention that run `run_id` has recorded.

        None if the run opened no branch, or if an older version opened it. Then the reader's settings apply.
        """
        if not is_opened_by(tags, run_id):
            return None
        try:
            recorded = json.loads(tags.get(RunTag.RETENTION, ""))
            hours = [float(recorded[name]) for name in _RETENTION_SETTINGS]
            if not all(math.isfinite(each) and each >= 0 for each in hours):
                return None
            return cls(*(timedelta(hours=each) for each in hours))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def to_tags(self) -> dict[str, str]:
        """Return the tag that records the retention with a run."""
        spans = (self.keep_failed, self.discard_grace, self.max_age)
        hours = {
            name: span / timedelta(hours=1) for name, span in zip(_RETENTION_SETTINGS, spans, strict=True)
        }
        return {RunTag.RETENTION: json.dumps(hours)}


def find_keep_failed_hours(tags: Mapping[str, str], run_id: str, settings: Settings) -> float:
    """Return for how many hours an unpublished run's branch is kept.

    `settings` apply if the run recorded none.
    """
    recorded = Retention.from_run_tags(tags, run_id)
    return settings.keep_failed_hours if recorded is None else recorded.keep_failed / timedelta(hours=1)


_CHUNK_SIZE = 200
"""The number of run ids in one query."""
_MAX_FOLLOWED = 20
"""The most backfills in one tag, because Dagster limits the length of tags."""


def approval_names(run_id: str, tags: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids under which a run's result is approved: the backfills that it belongs to or follows.

    A run outside of backfills has only its own id.
    """
    followed = tags.get(RunTag.FOLLOWS) or tags.get(BACKFILL_ID_TAG) or run_id
    return tuple(name for name in followed.split(",") if name)


def inherited_approval_tags(
    tags: Mapping[str, str], consumed: Iterable[tuple[str, Mapping[str, str]]]
) -> dict[str, str]:
    """Return the new tags of a run that consumed the results of other runs.

    `consumed` has their ids and tags.

    The run's result waits for approval if a consumed result did, whether that one is approved or not. The
    tags are empty if no consumed run is subject to approval.
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
    """Finds the runs whose results wait for approval, or have one of `states`. Create one object per tick.

    Each run is queried once. No run is queried if no run of the Dagster instance has such a state.
    """

    def __init__(self, instance: DagsterInstance, states: Sequence[str] = (APPROVAL_REQUIRED,)) -> None:
        self._instance = instance
        self._state_filter = {RunTag.APPROVAL: states}
        self._tags: dict[str, Mapping[str, str]] = {}
        """The tags by run id; empty for a run without such a state."""

    @cached_property
    def has_any(self) -> bool:
        """Whether the Dagster instance has such runs. Cost: one query for at most one row."""
        return bool(self._instance.get_run_ids(RunsFilter(tags=self._state_filter), limit=1))

    def filter_runs(self, run_ids: Collection[str]) -> set[str]:
        """Return the runs that have one of the states."""
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
        """Return the ids under which the results of these runs are approved."""
        matching_run_ids = self.filter_runs(run_ids)
        return tuple(
            sorted(
                {name for run_id in matching_run_ids for name in approval_names(run_id, self._tags[run_id])}
            )
        )

    def inherit_approval(self, run_id: str, consumed: Collection[str], *, asset: str) -> None:
        """Let the result of run `run_id` wait for approval if a run that it consumed has one of the states.

        Raises NotApproved if no person launched the run for `asset` (`requires_approval`), and an unapproved
        result was published before the run began to read.
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
    """Return whether Dagster has a record that the run's result is on `main`."""
    location = find_run_location(run.tags, run.run_id)
    return location is not None and (
        location.unbranched or find_publication(run.tags, location.branch) is not None
    )


def approve_run(instance: DagsterInstance, run: DagsterRun) -> None:
    """Allow downstream assets to consume the run's result, and record the approval in the run's log."""
    instance.add_run_tags(run.run_id, {RunTag.APPROVAL: APPROVAL_GIVEN})
    report_engine_event(instance, "Approved: the assets that consume this result may be computed.", run)
