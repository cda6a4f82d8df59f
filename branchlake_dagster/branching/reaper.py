"""Reaping: deleting run branches that nobody will publish (seed 000, "Orphan Branch Cleanup").

The rules are a pure function; `reap` applies them. A branch is deleted by the hash it was judged at, so a
write in between keeps it. Whatever is kept has its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from branchlake_dagster.branching.run_branch import run_id_of
from branchlake_dagster.lakehouse.errors import NessieConflict, ReferenceNotFound
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import Reference


class RunState(StrEnum):
    """What Dagster says about the run of a branch."""

    ACTIVE = "active"
    AWAITING_PUBLICATION = "awaiting publication"
    SETTLED = "settled"
    MISSING = "missing"


@dataclass(frozen=True)
class Reaping:
    """The decision on one branch and its reason."""

    branch: str
    run_id: str
    delete: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.branch}: {'deleted' if self.delete else 'kept'}, {self.reason}"


def decide(
    state: RunState, age: timedelta | None, *, max_age: timedelta, orphan_grace: timedelta
) -> tuple[bool, str]:
    """Whether to delete, and why. `age` is the time since the last sign of life; None: unknown."""
    old = age is not None and age > max_age
    if state is RunState.SETTLED:
        return True, "its run is settled and only the clean-up was missed"
    if old:
        hours = age.total_seconds() / 3600 if age else 0
        return True, f"its last sign of life is {hours:.1f} h old ({state}), over the limit"
    if state is RunState.ACTIVE:
        return False, "its run is active"
    if state is RunState.AWAITING_PUBLICATION:
        return False, "its run waits for the publisher"
    if age is None:
        return False, "no run of that id is known, and its age is unknown"
    if age > orphan_grace:
        return True, "no run of that id is known"
    # Another Dagster instance may work on the same lake; its runs are not ours to judge.
    return False, "no run of that id is known, but it was written to a short while ago"


def reap(
    client: NessieClient,
    *,
    listing: str,
    state_of: Callable[[str], tuple[RunState, datetime | None]],
    now: datetime,
    max_age: timedelta,
    orphan_grace: timedelta,
    dry_run: bool = False,
) -> Iterator[Reaping]:
    """Judge every branch of the Nessie filter `listing` and delete those the rules allow.

    `state_of(run_id)` gives the run's state and start. The whole listing is read first: when a page of it
    fails, the error comes before anything was deleted.
    """
    for branch in list(client.references(filter=listing, fetch_metadata=True)):
        run_id = run_id_of(branch.name)
        state, started = state_of(run_id)
        age = _age(branch, started, now)
        delete, reason = decide(state, age, max_age=max_age, orphan_grace=orphan_grace)
        if delete and not dry_run:
            try:
                client.delete_branch(branch.name, expected_hash=branch.hash)
            except NessieConflict:
                delete, reason = False, "it was written to while we looked"
            except ReferenceNotFound:
                reason = "somebody else deleted it meanwhile"
        yield Reaping(branch.name, run_id, delete, reason)


def _age(branch: Reference, started: datetime | None, now: datetime) -> timedelta | None:
    """Time since the branch's own last commit, or since its run's start when it has none.

    Nessie keeps no creation time of a branch; a branch without commits has its base's head commit.
    """
    metadata = branch.metadata
    own = metadata.head_commit if metadata and metadata.commits_ahead else None
    signs = [moment for moment in (own.commit_time if own else None, started) if moment]
    return now - max(signs) if signs else None
