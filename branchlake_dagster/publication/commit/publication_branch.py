"""Rebased states that wait on a branch of their own for the checks on their whole tables.

One state carries all runs that wait for the same tables: with a state for each, every publication moved the
table away under all the others, and nine waiting runs took forty check runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from branchlake_dagster.branching.branch.reference_names import branches
from branchlake_dagster.branching.branch.run_branch import branch_name
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, DiffEntry
from branchlake_dagster.publication.commit.committer import Committer, PublicationContended
from branchlake_dagster.publication.ledger.candidate import Candidate, Published, Result, only_namespaces
from branchlake_dagster.publication.ledger.publications import publications_in

PUBLICATION_BRANCH_PREFIX = "publish-"
"""They are called `publish-{run_id}`, after the oldest of their runs."""

PUBLICATION_BRANCHES = branches(PUBLICATION_BRANCH_PREFIX)
"""Nessie's filter for them."""

REBASED = "branchlake.rebased"
"""On the state's commit: the tables whose changes were replayed."""


def publication_branch(run_id: str) -> str:
    """Where the rebased state of a run, and of those that share it, waits for its checks."""
    return f"{PUBLICATION_BRANCH_PREFIX}{run_id}"


@dataclass(frozen=True)
class Prepared:
    """A state on a branch of its own: `main` at `onto` plus one commit, for checks to run on.

    `members` are the run branches whose changes are in it, the oldest first; `tables` those of its tables
    that were replayed; `changes` what the commit does.
    """

    branch: str
    hash: str
    onto: str
    members: tuple[str, ...]
    tables: tuple[str, ...]
    changes: tuple[DiffEntry, ...]

    @property
    def tables_changed(self) -> frozenset[ContentKey]:
        """What it would change on `main`, but for namespaces."""
        return frozenset(one.key for one in self.changes if not only_namespaces(one))


class PreparedStates:
    """Puts states there, finds them again in a later process, and publishes what was checked."""

    def __init__(self, client: NessieClient, committer: Committer) -> None:
        self._client = client
        self._committer = committer

    def prepare(self, batch: Sequence[Candidate]) -> tuple[Prepared | None, dict[str, Result | Exception]]:
        """Put the rebased candidates on a branch, and why some are not in it; None when none is."""
        plan, results = self._committer.plan_checked(batch)
        if not plan.accepted:
            return None, results
        accepted = list(plan.accepted)
        name = publication_branch(accepted[0].run_id)
        self.forget(name)
        try:
            self._client.create_branch(name, from_ref=MAIN, from_hash=plan.onto)
        except Exception:
            plan.discard()
            raise
        tables = tuple(sorted({table for rebased in plan.accepted.values() for table in rebased}))
        hash_ = self._committer.send(plan, name, {REBASED: ",".join(tables)})
        if hash_ is None:
            raise PublicationContended(
                "The rebased state could not be stored for its checks.",
                branch=name,
                run_id=accepted[0].run_id,
                hint="Nothing is lost: the next tick of the publication sensor tries again.",
            )
        changes = tuple(self._client.diff(f"@{plan.onto}", f"@{hash_}"))
        members = tuple(one.branch for one in accepted)
        return Prepared(name, hash_, plan.onto, members, tables, changes), results

    def all(self, names: Iterable[str] | None = None) -> list[Prepared]:
        """What `prepare` of this or an earlier process has put there; a half-made one is left out.

        `names` are those of the publication branches, where they are known already.
        """
        if names is None:
            names = [ref.name for ref in self._client.references(filter=PUBLICATION_BRANCHES)]
        return [found for name in names if (found := self._find(name))]

    def _find(self, name: str) -> Prepared | None:
        try:
            entries = list(self._client.log(name, limit=1))
        except ReferenceNotFound:
            return None
        if not entries or REBASED not in (properties := entries[0].commit.properties):
            return None  # it died between the branch and the commit, or it is somebody else's branch
        commit = entries[0].commit
        onto = commit.parent_hashes[0]
        members = tuple(one.branch for one in publications_in(entries[0]))
        if not members or publication_branch(members[0].removeprefix(branch_name(""))) != name:
            return None
        tables = tuple(filter(None, properties[REBASED].split(",")))
        changes = tuple(self._client.diff(f"@{onto}", f"@{commit.hash}"))
        return Prepared(name, commit.hash, onto, members, tables, changes)

    def publish(self, prepared: Prepared, batch: Sequence[Candidate]) -> dict[str, Result | Exception] | None:
        """Publish exactly the state that was checked, for all its candidates.

        None when `main` has moved under it since. Otherwise the results of all of them, or of those
        because of whom the state must be made anew.
        """
        plan, results, fits = self._committer.plan_state(batch, prepared.changes)
        if results:
            return results
        if not fits:
            return None
        if not self._committer.readable(prepared.changes):
            # A file of a run stays lost. One of the state itself is written anew with the next state.
            return dict(self._committer.unreadable(batch)) or None
        hash_ = self._committer.send(plan, MAIN)
        if hash_ is None:
            return None
        return {
            one.branch: Published(
                hash_, rebased=tuple(table for table in prepared.tables if table in one.tables)
            )
            for one in batch
        }

    def merged_by_hand(self, prepared: Prepared) -> Published | None:
        """The merge by somebody who did not wait for the checks; None: there is none."""
        return self._committer.merged(prepared.hash, base=prepared.onto)

    def forget(self, name: str) -> None:
        """Delete the branch of a prepared state, if there is one."""
        try:
            self._client.delete_branch(name, expected_hash=self._client.reference(name).hash)
        except ReferenceNotFound:
            return
