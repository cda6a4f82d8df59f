"""Reads and writes the tags of a Dagster run that record its branch, its state and its retention.

Dagster may copy all tags of a run to a re-execution. So readers call `is_opened_by` first, and a run that
opens its branch overwrites inherited tags. A re-execution once took its parent's base hash for its own and
reported a deleted branch that had never existed.

The tags also record how long the branch of a run is kept. Commands and other code locations of the same
Dagster instance may have other settings, but every reaper, sweeper and publisher follows the run's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag

PUBLISHER = "publisher"
APPROVAL_REQUIRED = "required"
APPROVAL_GIVEN = "given"


class RunState(StrEnum):
    """The state of a run that writes to the lake, or what a pass did with its branch.

    The run's tag `branchlake` holds one of `RECORDED_STATES`. The other states are outcomes of one pass. Only
    `PARKED` is also stored, in the tag `NEXT_ATTEMPT`.
    """

    PENDING = "pending"
    PUBLISHED = "published"
    BLOCKED = "blocked"
    """The gate did not let the run pass, for example because a check failed."""
    REFUSED = "refused"
    """The run passed, but it conflicts with newer changes of `main`, or its branch was changed or lost."""
    FAILED = "failed"
    """A step or a check of the run crashed, or its process could not start."""
    CANCELED = "canceled"
    INTERRUPTED = "interrupted"
    """The run's process was killed or died."""
    DISCARDED = "discarded"
    """Nothing was published and the branch was ended. As a tag: while Dagster considered the run running or
    successful."""
    UNCHANGED = "nothing to publish"
    """The run succeeded and changed no table."""
    UNBRANCHED = "unbranched"
    """The run wrote to `main` directly, because Nessie was not available when it needed a branch."""
    CONTINUED = "continued by a retry"
    UNDONE = "undone"
    """The run's publication was undone later."""
    CHECKING = "checking"
    """Checks run again on the rebased tables."""
    WAITING = "waiting"
    """The pass left the branch as it is, for example because the run is active."""
    KEPT = "kept"
    """The branch of the unpublished run is kept for debugging."""
    UNKNOWN_RUN = "unknown run"
    """This Dagster instance does not have the run of the branch."""
    TRY_AGAIN = "try again"
    """The pass failed for this branch, and a later pass tries again."""
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
        RunState.UNDONE,
    }
)
"""The states that the run's tag `branchlake` may hold."""


def build_status_tag(state: RunState) -> dict[str, str]:
    """Return the tag `branchlake` that records `state` on a run.

    Raises ValueError if `state` is not one of `RECORDED_STATES`, because readers of the tag do not expect it.
    """
    if state not in RECORDED_STATES:
        raise ValueError(f"The status tag cannot record {str(state)!r}, which is an outcome of one pass.")
    return {RunTag.STATUS: str(state)}


PENDING = "pending"
"""The verdict of a run that has not been judged yet."""
FENCED = "fenced"
"""The verdict of a run whose branch was ended before the run was judged."""
CONTINUED = "continued"
"""The verdict of a run whose work a retry took over."""
UNJUDGED = (PENDING, FENCED, CONTINUED)
"""Verdicts that are not a publisher's. A run that passes in spite of them is judged."""
TAG_LENGTH = 250
"""The longest tag value in characters."""
NO_VALUE = "none"
"""The tag value that means "no value". It replaces old values, because Dagster cannot remove tags."""


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
    """Return the tags to add to a run that has just opened its branch at `location`.

    `inherited_tags` are the tags that the run has already; a retry has those of the run that it repeats. Tags
    that would be wrong for this run are overwritten: with its own value, or with NO_VALUE. A given approval
    is required again.
    """
    own_tags = {
        RunTag.BRANCH: location.branch,
        RunTag.BASE_HASH: location.base_hash or NO_VALUE,
        RunTag.VERDICT: PENDING,
        RunTag.OPENED_BY: run_id,
        **build_status_tag(RunState.UNBRANCHED if location.unbranched else RunState.PENDING),
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
    """Return the branch and base hash of run `run_id` from its tags.

    Returns None if the run has not opened a branch; its tags may be inherited from another run then.
    """
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
    """Return the recorded base hash of `branch`; None if the tags record another branch or no base."""
    return _find_tag(tags, RunTag.BASE_HASH, branch)


def is_judged(tags: Mapping[str, str], branch: str) -> bool:
    """Return whether these tags record a publisher's verdict on `branch`."""
    return tags.get(RunTag.BRANCH) == branch and tags.get(RunTag.VERDICT, PENDING) not in UNJUDGED


def find_publication(tags: Mapping[str, str], branch: str) -> str | None:
    """Return the hash of the commit on `main` that published `branch`; None if the tags do not record it."""
    return _find_tag(tags, RunTag.PUBLICATION, branch)


def _find_tag(tags: Mapping[str, str], name: str, branch: str) -> str | None:
    value = tags.get(name) if tags.get(RunTag.BRANCH) == branch else None
    return None if value == NO_VALUE else value


def shorten_tag_value(value: str) -> str:
    """Return `value`, cut to `TAG_LENGTH` characters with an ellipsis at the end if it is longer."""
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
    """Return the hours for which an unpublished run's branch is kept for debugging; 0 means not at all.

    `settings` apply if the run has not recorded its retention.
    """
    recorded = Retention.from_run_tags(tags, run_id)
    return settings.keep_failed_hours if recorded is None else recorded.keep_failed / timedelta(hours=1)
