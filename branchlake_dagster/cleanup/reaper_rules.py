"""Decides when a run branch is ended, from facts about the branch and the history of `main`.

The rules are pure functions of the facts about a branch. The reasons for the rules are in
docs/adr/0010-fencing-and-sweeping.md. `MainHistory` reads the history of `main` as far back as needed. It
finds the commit that a branch started from, and the runs that were published since.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.runs.branch_owner import UNKNOWN_ORIGIN, BranchOrigin, Maker
from branchlake_dagster.runs.failure_detector import Liveness
from branchlake_dagster.runs.run_tags import Retention
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.wording import CodedReason

_BATCH_SIZE = 200
"""The number of commits of `main` that are read for each commit of a branch.

`main` may be thousands of commits ahead.
"""


class MainHistory:
    """The log of `main`, newest first. It is read once, on demand."""

    def __init__(self, client: NessieClient) -> None:
        self._client = client
        self._rest = iter(client.log(MAIN))
        self._entries: list[LogEntry] = []
        self._positions: dict[str, int] = {}

    def _read_entries(self, count: int) -> bool:
        more = list(islice(self._rest, count))
        for entry in more:
            self._positions[entry.commit.hash] = len(self._entries)
            self._entries.append(entry)
        return bool(more)

    def find_base(self, ref: str) -> str | None:
        """Return the hash of the newest commit of `ref` that `main` has too; None if they share no commit.

        Commits are compared along first parents, so a published branch still has its old base.
        """
        ref_hashes: list[str] = []
        for entry in self._client.log(ref):
            ref_hashes.append(entry.commit.hash)
            self._read_entries(_BATCH_SIZE)
            if (base_hash := self._first_on_main(ref_hashes)) is not None:
                return base_hash
        while self._read_entries(_BATCH_SIZE):
            if (base_hash := self._first_on_main(ref_hashes)) is not None:
                return base_hash
        return self._first_on_main(ref_hashes)

    def _first_on_main(self, hashes: list[str]) -> str | None:
        return next((hash_ for hash_ in hashes if hash_ in self._positions), None)

    def contains_commit(self, commit_hash: str) -> bool:
        """Return whether `main`'s history contains the commit. Later commits of `main` are not seen."""
        while commit_hash not in self._positions:
            if not self._read_entries(_BATCH_SIZE):
                return False
        return True

    def run_ids_published_since(self, base_hash: str) -> set[str]:
        """Return the ids of the runs that commits of `main` after `base_hash` name.

        `base_hash` must be a result of `find_base`.
        """
        entries = self._entries[: self._positions[base_hash]]
        run_id_lists = (entry.commit.properties.get(LakeProperty.RUN_ID, "") for entry in entries)
        return {run_id for run_ids in run_id_lists for run_id in run_ids.split(",") if run_id}

    def commit_time(self, base_hash: str) -> datetime | None:
        """Return the time of the commit `base_hash` by Nessie's clock.

        `base_hash` must be a result of `find_base`.
        """
        return self._entries[self._positions[base_hash]].commit.commit_time


class OwnerState(StrEnum):
    """The state of a branch's run, as the reaper derives it from Dagster's record of the run.

    It is never stored, and it distinguishes only what the reaper's rules need. A `RunState` is finer: it
    names the outcome for one run, and most of its values are stored in the run's tag `branchlake`. For
    example, blocked, refused, failed and canceled runs are all `UNPUBLISHED` here.
    """

    ACTIVE = "active"
    AWAITING_PUBLICATION = "awaiting publication"
    PUBLISHED = "published"
    UNPUBLISHED = "not published"
    """The run failed, or the publisher has rejected it."""
    MISSING = "missing"
    """This Dagster instance does not have the run."""
    ENDED = "ended"
    """The live run has ended, so its unfinished batches will not be published."""


@dataclass(frozen=True)
class Limits:
    """The times after which a branch may be ended.

    `max_age` counts from the last sign of life of an active run without heartbeats. `orphan_grace` counts
    from the last write to a branch whose run is missing or has ended. `keep_failed` counts from the end of an
    unpublished run.
    """

    max_age: timedelta
    orphan_grace: timedelta
    keep_failed: timedelta = timedelta(0)

    def for_run(self, recorded: Retention | None) -> Limits:
        """Return these limits, replaced by those that the run itself has recorded."""
        if recorded is None:
            return self
        return replace(self, max_age=recorded.max_age, keep_failed=recorded.keep_failed)


class ReapingAction(StrEnum):
    """What happens to a branch."""

    KEEP = "kept"
    DELETE = "deleted"
    """The branch is deleted: its data is on `main`, or it only prepared a publication."""
    DISCARD = "discarded"
    """The branch is deleted, which fences its writer, and a tag keeps its data for some time."""
    RESTORE = "given back"
    """The branch was discarded, but its run has passed, so the branch is created again from the tag."""


@dataclass(frozen=True)
class BranchFacts:
    """The facts about one branch.

    `age` is the time since the branch's last sign of life, `since_end` the time since the end of its run;
    both are None if unknown. `writers` and `publishers` are the liveness of the processes that send
    heartbeats for the branch. `still_reports` means that the run still writes events although a writer is
    dead, because its steps are separate processes. `is_claimed` means that a publisher has claimed the branch
    and has not reported an outcome, so the branch may be on `main` already. `has_verdict` means that a
    publisher has recorded its verdict.
    """

    state: OwnerState
    age: timedelta | None
    since_end: timedelta | None = None
    writers: frozenset[Liveness] = frozenset()
    publishers: frozenset[Liveness] = frozenset()
    still_reports: bool = False
    is_claimed: bool = False
    has_verdict: bool = False
    origin: BranchOrigin = UNKNOWN_ORIGIN
    """The Dagster instance that made the branch; examined only if this instance does not have its run."""
    is_on_main: bool = False
    """Whether `main` has the publication of a run that Dagster records as published."""


@dataclass(frozen=True)
class BranchOwner:
    """The run that a branch belongs to."""

    run_id: str
    state: OwnerState
    started_at: datetime | None = None
    ended_at: datetime | None = None
    has_verdict: bool = False
    """Whether the publisher has recorded its verdict on this branch."""
    publication: str = ""
    """The commit on `main` that published the run, by its tags; empty if they do not record it."""
    is_continued: bool = False
    """Whether a retry took over the work of this run, which waits for the publisher."""
    base_hash: str = ""
    """The commit of `main` that the branch started from, by the run's tags; empty if they name none."""
    retention: Retention | None = None
    """The retention that the run has recorded in its tags; None if they do not record it."""


@dataclass(frozen=True)
class Reaping:
    """The decision on one branch and its reason.

    `heartbeat` is the liveness of the branch's writers as text, such as `beating`; `none` without heartbeats.
    """

    branch: str
    run_id: str
    action: ReapingAction
    reason: CodedReason
    state: OwnerState = OwnerState.MISSING
    age: timedelta | None = None
    heartbeat: str = "none"
    instance: str = ""
    """The ids of the other Dagster instances that the branch belongs to, as text; empty if it is none."""

    @property
    def deletes_branch(self) -> bool:
        """Whether the decision deletes the branch.

        Discarding deletes the branch too, and keeps its state as a tag.
        """
        return self.action in (ReapingAction.DELETE, ReapingAction.DISCARD)

    def __str__(self) -> str:
        return f"{self.branch}: {self.action}, {self.reason}"


def decide_reaping(facts: BranchFacts, limits: Limits) -> tuple[ReapingAction, CodedReason]:
    """Decide what happens to the branch of a run or batch, and why. A pure function.

    For the branch of a publisher see `decide_publication_branch`.
    """
    if facts.publishers - {Liveness.DEAD}:
        return ReapingAction.KEEP, CodedReason("its publication is in progress", "being_published")
    if facts.state is OwnerState.PUBLISHED and not facts.is_on_main:
        return ReapingAction.KEEP, CodedReason(
            "Dagster records its run as published, but main does not have its publication",
            "publication_not_on_main",
        )
    if facts.state is OwnerState.PUBLISHED:
        return ReapingAction.DELETE, CodedReason(
            "its run is published, and only its cleanup was missed", "published"
        )
    if facts.is_claimed and facts.state is not OwnerState.MISSING:
        return ReapingAction.KEEP, CodedReason(
            "a publisher has claimed it and has not reported an outcome yet", "claimed"
        )
    if facts.state is OwnerState.UNPUBLISHED:
        return _decide_unpublished(facts, limits.keep_failed)
    if facts.state is OwnerState.AWAITING_PUBLICATION:
        waiting_time = f" for {_format_hours(facts.since_end)}" if facts.since_end is not None else ""
        return ReapingAction.KEEP, CodedReason(
            f"its run waits for the publisher{waiting_time}", "awaiting_publication"
        )
    if Liveness.ALIVE in facts.writers:
        return ReapingAction.KEEP, CodedReason("its writer sends heartbeats", "writer_alive")
    if Liveness.SUSPECT in facts.writers:
        return ReapingAction.KEEP, CodedReason(
            "its writer is silent, and only a watch can show whether it is dead", "writer_silent"
        )
    if facts.state is OwnerState.ACTIVE:
        return _decide_active(facts, limits)
    return _decide_ended(facts, limits) if facts.state is OwnerState.ENDED else _decide_missing(facts, limits)


def decide_publication_branch(
    publishers: frozenset[Liveness], *, run_branch_exists: bool, state: OwnerState, origin: BranchOrigin
) -> tuple[ReapingAction, CodedReason]:
    """Decide what happens to a branch on which a publisher prepares a rebase, and why.

    The branch is deleted if the run's own branch no longer exists and no publisher works on it. `publishers`
    is the liveness of the publishers that send heartbeats for it. `state` is the state of the run. `origin`
    is the Dagster instance that made the branch; it matters only if the run is missing.
    """
    if publishers - {Liveness.DEAD}:
        return ReapingAction.KEEP, CodedReason("a publication is in progress", "being_published")
    if run_branch_exists:
        return ReapingAction.KEEP, CodedReason("its run's branch waits for publication", "run_branch_waits")
    if state is OwnerState.MISSING and origin.maker is not Maker.HERE:
        return ReapingAction.KEEP, CodedReason(f"no run of that id is known: {origin}", "made_elsewhere")
    return ReapingAction.DELETE, CodedReason("the branch that it was prepared for is gone", "run_branch_gone")


def _decide_unpublished(facts: BranchFacts, keep_failed: timedelta) -> tuple[ReapingAction, CodedReason]:
    since_end = facts.since_end
    if not keep_failed and not facts.has_verdict:
        # The reaper came before the publisher, so the run will show this reason.
        return ReapingAction.DISCARD, CodedReason("its run has failed, so it is not published", "run_failed")
    if not keep_failed:
        return ReapingAction.DISCARD, CodedReason(
            "its run was not published, and only its cleanup was missed", "not_published"
        )
    if since_end is None or since_end < keep_failed:
        remaining = f" for another {_format_hours(keep_failed - since_end)}" if since_end is not None else ""
        return ReapingAction.KEEP, CodedReason(
            f"its run was not published; it is kept for debugging{remaining}", "kept_for_debugging"
        )
    return ReapingAction.DISCARD, CodedReason(
        f"its run was not published, and it was kept for {_format_hours(keep_failed)}", "kept_long_enough"
    )


def _decide_active(facts: BranchFacts, limits: Limits) -> tuple[ReapingAction, CodedReason]:
    if Liveness.DEAD in facts.writers:
        if facts.still_reports:
            return ReapingAction.KEEP, CodedReason(
                "one of its writers is dead, but the run still reports", "run_still_reports"
            )
        return ReapingAction.DISCARD, CodedReason("its writer is dead", "writer_dead")
    if facts.age is not None and facts.age > limits.max_age:
        return (
            ReapingAction.DISCARD,
            CodedReason(
                f"its run is active, but its last sign of life is {_format_hours(facts.age)} old",
                "no_sign_of_life",
            ),
        )
    return ReapingAction.KEEP, CodedReason("its run is active", "run_active")


def _decide_ended(facts: BranchFacts, limits: Limits) -> tuple[ReapingAction, CodedReason]:
    # If a run was ended only in Dagster, its process may still be alive.
    if facts.age is None or facts.age <= min(limits.orphan_grace, limits.max_age):
        return ReapingAction.KEEP, CodedReason(
            "its live run has ended, but it was written to recently", "written_recently"
        )
    return ReapingAction.DISCARD, CodedReason(
        "it is an unfinished batch of a live run that has ended", "live_run_ended"
    )


def _decide_missing(facts: BranchFacts, limits: Limits) -> tuple[ReapingAction, CodedReason]:
    # Another Dagster instance may work on the same lake. This instance must not judge its runs.
    if facts.origin.maker is Maker.ELSEWHERE:
        return ReapingAction.KEEP, CodedReason(
            f"no run of that id is known: {facts.origin}", "made_elsewhere"
        )
    if facts.age is None:
        return ReapingAction.KEEP, CodedReason(
            "no run of that id is known, and its age is unknown", "age_unknown"
        )
    if facts.age <= min(limits.orphan_grace, limits.max_age):
        return ReapingAction.KEEP, CodedReason(
            "no run of that id is known, but it was written to recently", "written_recently"
        )
    if facts.origin.maker is Maker.UNKNOWN:
        return ReapingAction.KEEP, CodedReason(
            f"no run of that id is known, and {facts.origin}", "maker_unknown"
        )
    return ReapingAction.DISCARD, CodedReason(
        "no run of that id is known any more to the Dagster instance that made it", "run_unknown"
    )


def _format_hours(span: timedelta) -> str:
    return f"{span.total_seconds() / 3600:.1f} h"
