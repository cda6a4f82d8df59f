"""Rebased states that wait on a branch of their own for the checks on their whole tables."""

from __future__ import annotations

from dataclasses import replace

from branchlake_dagster.lakehouse.errors import ReferenceNotFound
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.publication.candidate import Candidate, Prepared, Published, Refused
from branchlake_dagster.publication.committer import Committer, PublicationContended
from branchlake_dagster.publication.rebase import Plan

PUBLICATION_BRANCH_PREFIX = "publish-"
"""They are called `publish-{run_id}`."""

REBASED = "branchlake.rebased"
"""On the state's commit: the tables whose changes were replayed."""


def publication_branch(run_id: str) -> str:
    """Where the rebased state of a run waits for its checks."""
    return f"{PUBLICATION_BRANCH_PREFIX}{run_id}"


class PreparedStates:
    """Puts states there, finds them again in a later process, and publishes what was checked."""

    def __init__(self, client: NessieClient, committer: Committer) -> None:
        self._client = client
        self._committer = committer

    def prepare(self, candidate: Candidate) -> Prepared | Published | Refused:
        """Put the rebased candidate on a branch of its own, for the checks on its whole tables to run on."""
        name = publication_branch(candidate.run_id)
        plan, known = self._committer.plan_one(candidate)
        if not isinstance(plan, Plan):
            return plan
        if known is not None:
            return known
        self.forget(candidate.run_id)
        self._client.create_branch(name, from_ref=MAIN, from_hash=plan.onto)
        tables = next(iter(plan.accepted.values()))
        hash_ = self._committer.send(plan, name, {REBASED: ",".join(tables)})
        if hash_ is None:
            raise PublicationContended(
                "The rebased state could not be stored for its checks.",
                branch=name,
                run_id=candidate.run_id,
                hint="Nothing is lost: the next tick of the publication sensor tries again.",
            )
        return Prepared(name, hash_, plan.onto, tables)

    def find(self, run_id: str) -> Prepared | None:
        """What `prepare` of this or an earlier process has put there; None when there is nothing whole."""
        name = publication_branch(run_id)
        try:
            (entry,) = self._client.log(name, limit=1)
        except ReferenceNotFound:
            return None
        rebased = entry.commit.properties.get(REBASED)
        if rebased is None:
            return None  # it died between the branch and the commit
        onto = entry.commit.parent_hashes[0]
        return Prepared(name, entry.commit.hash, onto, tuple(filter(None, rebased.split(","))))

    def publish(self, candidate: Candidate, prepared: Prepared) -> Published | Refused | None:
        """Publish exactly the state that was checked; None when `main` has moved under it since."""
        changes = tuple(self._client.diff(f"@{prepared.onto}", f"@{prepared.hash}"))
        checked = replace(candidate, changes=changes)
        plan, known = self._committer.plan_one(checked)
        if not isinstance(plan, Plan):
            return plan
        if known is not None:
            return known
        if plan.accepted[checked]:
            plan.discard()
            return None
        hash_ = self._committer.send(plan, MAIN)
        return Published(hash_, rebased=prepared.tables) if hash_ else None

    def forget(self, run_id: str) -> None:
        """Delete the branch of a prepared state, if there is one."""
        name = publication_branch(run_id)
        try:
            self._client.delete_branch(name, expected_hash=self._client.reference(name).hash)
        except ReferenceNotFound:
            return
