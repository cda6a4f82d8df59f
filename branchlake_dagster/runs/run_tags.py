"""Tags of a Dagster run that record its branch, its status and how long its branch stays.

The tags by which a run shows its branch and its fate in Dagster's UI.

Dagster may copy all tags of a run to its re-execution. Whoever reads them therefore asks `is_opened_by`
first,
and a run that opens its branch overwrites what it inherited: a re-execution once took its parent's base
hash for its own and reported a deleted branch that had never existed.

How long the branch of a run stays, recorded with the run when its branch is opened.

Commands and other code locations of the same Dagster instance have settings of their own. The run's own
settings are in its tags, so every reaper, sweeper and publisher follows them.
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

# Dagster shows no tag with this prefix; a run list full of hashes is one that nobody reads. It allows one
# slash in a name.
_HIDDEN = ".dagster/branchlake_"


PUBLISHER = "publisher"


PARKED = "set aside"


APPROVAL_REQUIRED = "required"
APPROVAL_GIVEN = "given"


class Status(StrEnum):
    """What became of a run, as `STATUS_TAG` shows it."""

    PENDING = "pending"
    PUBLISHED = "published"
    BLOCKED = "blocked"
    REFUSED = "refused"
    FAILED = "failed"
    """A step or a check of it crashed, or its process could not start."""
    CANCELED = "canceled"
    INTERRUPTED = "interrupted"
    """Its process was killed, or died."""
    DISCARDED = "discarded"
    """Its branch was ended while Dagster took the run for running or for done."""
    UNCHANGED = "nothing to publish"
    UNBRANCHED = "unbranched"
    CONTINUED = "continued by a retry"


PENDING = "pending"
"""The verdict of a run that nobody has judged yet."""
FENCED = "fenced"
"""Its branch was ended before anybody judged it."""
CONTINUED = "continued"
"""A retry took its work over."""
UNJUDGED = (PENDING, FENCED, CONTINUED)
"""No publisher's word: a run that passes in spite of it is judged."""
TAG_LENGTH = 250
"""The longest value that a tag gets."""
NO_VALUE = "none"
"""In place of an inherited value: Dagster has no way to remove a tag."""


@dataclass(frozen=True)
class RunLocation:
    """Where a run works: its branch and the hash of `main` that it started from.

    `continues` is the branch whose work a retry took over. An unbranched run stands on `main`; its base
    hash is empty when Nessie could not tell it.
    """

    branch: str
    base_hash: str
    continues: str | None = None
    unbranched: bool = False


def build_opening_tags(
    run_id: str, location: RunLocation, inherited_tags: Mapping[str, str]
) -> dict[str, str]:
    """The tags of a run that has just opened its branch; what it inherited and does not hold is undone."""
    own_tags = {
        RunTag.BRANCH: location.branch,
        RunTag.BASE_HASH: location.base_hash or NO_VALUE,
        RunTag.VERDICT: PENDING,
        RunTag.OPENED_BY: run_id,
        RunTag.STATUS: str(Status.UNBRANCHED if location.unbranched else Status.PENDING),
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
    ):  # it was given to the result of the run that this one repeats
        own_tags[RunTag.APPROVAL] = APPROVAL_REQUIRED
    return {name: NO_VALUE for name in stale_names if name in inherited_tags} | own_tags


def find_run_location(tags: Mapping[str, str], run_id: str) -> RunLocation | None:
    """Where run `run_id` works, if these tags are its own; None: it has not opened a branch."""
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
    """Whether run `run_id` itself wrote these tags, rather than a run it was made from."""
    return tags.get(RunTag.OPENED_BY) == run_id


def find_recorded_base(tags: Mapping[str, str], branch: str) -> str | None:
    """The base hash, if these tags are about this very branch."""
    return _find_tag(tags, RunTag.BASE_HASH, branch)


def is_judged(tags: Mapping[str, str], branch: str) -> bool:
    """Whether the publisher has told its verdict on this branch."""
    return tags.get(RunTag.BRANCH) == branch and tags.get(RunTag.VERDICT, PENDING) not in UNJUDGED


def find_publication(tags: Mapping[str, str], branch: str) -> str | None:
    """The commit on `main` that this branch was published as, if the publisher has told one."""
    return _find_tag(tags, RunTag.PUBLICATION, branch)


def _find_tag(tags: Mapping[str, str], name: str, branch: str) -> str | None:
    value = tags.get(name) if tags.get(RunTag.BRANCH) == branch else None
    return None if value == NO_VALUE else value


def shorten_tag_value(value: str) -> str:
    """`value` as a tag's value: at most `TAG_LENGTH` characters."""
    return value if len(value) <= TAG_LENGTH else f"{value[: TAG_LENGTH - 1]}…"


_RETENTION_SETTINGS = ("keep_failed_hours", "discard_grace_h", "orphan_max_age_h")
"""In the order of the fields of `Retention`; each counts hours."""


@dataclass(frozen=True)
class Retention:
    """The times after which what a run has left is ended.

    `keep_failed` counts from the end of a run that was not published, `discard_grace` from the discarding of
    its branch, `max_age` from the last sign of life of a run without heartbeats.
    """

    keep_failed: timedelta
    discard_grace: timedelta
    max_age: timedelta

    @classmethod
    def from_settings(cls, settings: Settings) -> Retention:
        """The retention that these settings demand."""
        return cls(*(timedelta(hours=getattr(settings, name)) for name in _RETENTION_SETTINGS))

    @classmethod
    def from_run_tags(cls, tags: Mapping[str, str], run_id: str) -> Retention | None:
        """The retention that run `run_id` has recorded.

        None if the run opened no branch, or an older version opened it: the reader's settings hold then.
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
        """The tag that records the retention with a run."""
        spans = (self.keep_failed, self.discard_grace, self.max_age)
        hours = {
            name: span / timedelta(hours=1) for name, span in zip(_RETENTION_SETTINGS, spans, strict=True)
        }
        return {RunTag.RETENTION: json.dumps(hours)}


def find_keep_failed_hours(tags: Mapping[str, str], run_id: str, settings: Settings) -> float:
    """The hours for which the branch of a run that is not published is kept; `settings` are the reader's."""
    recorded = Retention.from_run_tags(tags, run_id)
    return settings.keep_failed_hours if recorded is None else recorded.keep_failed / timedelta(hours=1)
