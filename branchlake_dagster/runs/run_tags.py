"""Tags of a Dagster run that record its branch, its status and how long its branch stays.

The tags by which a run shows its branch and its fate in Dagster's UI.

Dagster may copy all tags of a run to its re-execution. Whoever reads them therefore asks `opened_by` first,
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

STATUS_TAG = "branchlake"
"""What became of the run, in one word of `Status`: the one tag that the run list shows."""

# Dagster shows no tag with this prefix; a run list full of hashes is one that nobody reads. It allows one
# slash in a name.
_HIDDEN = ".dagster/branchlake_"

BRANCH_TAG = f"{_HIDDEN}branch"
BASE_TAG = f"{_HIDDEN}base_hash"
OPENED_TAG = f"{_HIDDEN}opened_by"
"""The run that wrote these tags. Another id than the run's own: they were inherited."""
LAKE_TAG = f"{_HIDDEN}lake"
"""The lake that the run works on, by `Settings.lake_id`: one code location may have several."""
CONTINUES_TAG = f"{_HIDDEN}continues"
"""The branch of the run that this one retries, whose work it took over."""
RETENTION_TAG = f"{_HIDDEN}retention"
"""How long the branch and its discarded data stay, as JSON: settings of the run's code location."""
UNBRANCHED_TAG = f"{_HIDDEN}unbranched"
"""`true`: the run wrote to `main` directly, because its branch could not be made."""
VERDICT_TAG = f"{_HIDDEN}verdict"
PUBLICATION_TAG = f"{_HIDDEN}publication"
"""The commit on `main`."""
REASON_TAG = f"{_HIDDEN}reason"
FAILED_BY_TAG = f"{_HIDDEN}failed_by"
"""`PUBLISHER`: the run's steps have succeeded, and the publisher let it fail."""
PUBLISHER = "publisher"

CHECK_REF_TAG = f"{_HIDDEN}check_ref"
"""On a run that repeats checks for the publisher: the branch on which it stands."""
CHECK_HASH_TAG = f"{_HIDDEN}check_hash"
"""The state of that branch which its verdict is about."""
CHECKS_FOR_TAG = f"{_HIDDEN}checks_for"
"""The runs whose publication waits for it, separated by commas."""
REPORTED_TAG = f"{_HIDDEN}reported"
"""How many of the published partitions their assets were told of, while there are more to tell."""

ATTEMPTS_TAG = f"{_HIDDEN}attempts"
"""On a run that the publisher cannot judge or publish: how often it has tried."""
NEXT_ATTEMPT_TAG = f"{_HIDDEN}next_attempt"
"""When it tries again: an ISO time, or `set aside` when it waits for somebody."""
SET_ASIDE = "set aside"

APPROVAL_TAG = "branchlake/approval"
"""On a run whose result is consumed only after somebody has approved it: `REQUIRED` or `GIVEN`."""
FOLLOWS_TAG = "branchlake/follows"
"""On such a run: the ids of the backfills whose results it was computed from, separated by commas."""
HELD_TAG = f"{_HIDDEN}held_until_approved"
"""On a run that was launched because nothing that it consumes waited for approval."""
REQUIRED = "required"
GIVEN = "given"


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
NONE = "none"
"""In place of an inherited value: Dagster has no way to remove a tag."""


@dataclass(frozen=True)
class Place:
    """Where a run works: its branch and the hash of `main` that it started from.

    `continues` is the branch whose work a retry took over. An unbranched run stands on `main`; its base
    hash is empty when Nessie could not tell it.
    """

    branch: str
    base_hash: str
    continues: str | None = None
    unbranched: bool = False


def opened(run_id: str, place: Place, inherited: Mapping[str, str]) -> dict[str, str]:
    """The tags of a run that has just opened its branch; what it inherited and does not hold is undone."""
    mine = {
        BRANCH_TAG: place.branch,
        BASE_TAG: place.base_hash or NONE,
        VERDICT_TAG: PENDING,
        OPENED_TAG: run_id,
        STATUS_TAG: str(Status.UNBRANCHED if place.unbranched else Status.PENDING),
    }
    if place.continues:
        mine[CONTINUES_TAG] = place.continues
    if place.unbranched:
        mine[UNBRANCHED_TAG] = "true"
    others = (
        PUBLICATION_TAG,
        REASON_TAG,
        FAILED_BY_TAG,
        CONTINUES_TAG,
        UNBRANCHED_TAG,
        ATTEMPTS_TAG,
        NEXT_ATTEMPT_TAG,
        REPORTED_TAG,
    )
    if inherited.get(APPROVAL_TAG) == GIVEN:  # it was given to the result of the run that this one repeats
        mine[APPROVAL_TAG] = REQUIRED
    return {name: NONE for name in others if name in inherited} | mine


def place_of(tags: Mapping[str, str], run_id: str) -> Place | None:
    """Where run `run_id` works, if these tags are its own; None: it has not opened a branch."""
    if not opened_by(tags, run_id):
        return None
    base, continues = tags.get(BASE_TAG, NONE), tags.get(CONTINUES_TAG, NONE)
    return Place(
        tags[BRANCH_TAG],
        "" if base == NONE else base,
        None if continues == NONE else continues,
        tags.get(UNBRANCHED_TAG) == "true",
    )


def opened_by(tags: Mapping[str, str], run_id: str) -> bool:
    """Whether run `run_id` itself wrote these tags, rather than a run it was made from."""
    return tags.get(OPENED_TAG) == run_id


def base_hash_of(tags: Mapping[str, str], branch: str) -> str | None:
    """The base hash, if these tags are about this very branch."""
    return _told(tags, BASE_TAG, branch)


def judged(tags: Mapping[str, str], branch: str) -> bool:
    """Whether the publisher has told its verdict on this branch."""
    return tags.get(BRANCH_TAG) == branch and tags.get(VERDICT_TAG, PENDING) not in UNJUDGED


def publication_of(tags: Mapping[str, str], branch: str) -> str | None:
    """The commit on `main` that this branch was published as, if the publisher has told one."""
    return _told(tags, PUBLICATION_TAG, branch)


def _told(tags: Mapping[str, str], name: str, branch: str) -> str | None:
    found = tags.get(name) if tags.get(BRANCH_TAG) == branch else None
    return None if found == NONE else found


def shortened(text: str) -> str:
    """`text` as a tag's value: at most `TAG_LENGTH` characters."""
    return text if len(text) <= TAG_LENGTH else f"{text[: TAG_LENGTH - 1]}…"


_SETTINGS = ("keep_failed_hours", "discard_grace_h", "orphan_max_age_h")
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
    def of(cls, settings: Settings) -> Retention:
        """The retention that these settings demand."""
        return cls(*(timedelta(hours=getattr(settings, name)) for name in _SETTINGS))

    @classmethod
    def of_run(cls, tags: Mapping[str, str], run_id: str) -> Retention | None:
        """The retention that run `run_id` has recorded.

        None if the run opened no branch, or an older version opened it: the reader's settings hold then.
        """
        if not opened_by(tags, run_id):
            return None
        try:
            recorded = json.loads(tags.get(RETENTION_TAG, ""))
            hours = [float(recorded[name]) for name in _SETTINGS]
            if not all(math.isfinite(each) and each >= 0 for each in hours):
                return None
            return cls(*(timedelta(hours=each) for each in hours))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def tags(self) -> dict[str, str]:
        """The tag that records the retention with a run."""
        spans = (self.keep_failed, self.discard_grace, self.max_age)
        hours = {name: span / timedelta(hours=1) for name, span in zip(_SETTINGS, spans, strict=True)}
        return {RETENTION_TAG: json.dumps(hours)}


def keep_failed_hours(tags: Mapping[str, str], run_id: str, settings: Settings) -> float:
    """The hours for which the branch of a run that is not published is kept; `settings` are the reader's."""
    recorded = Retention.of_run(tags, run_id)
    return settings.keep_failed_hours if recorded is None else recorded.keep_failed / timedelta(hours=1)
