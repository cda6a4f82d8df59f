"""Publishing: making passed branches visible on `main`, each wholly, exactly once, whatever is lost.

A branch whose keys nobody else touched is merged: one call. Where `main` has moved under a table, or the
run asked for serializable isolation, or several candidates want the same table, one commit is planned on
`main`'s present hash and sent expecting that hash. Both can be repeated after a lost reply: Nessie
recognises a merge that it has, and a commit is looked for in the ledger before it is planned again. Two
commits of one plan cannot both succeed, because each changes keys that the other expects unchanged.

Rebased states that wait on a branch of their own for the checks on their whole tables.

One state carries all runs that wait for the same tables: with a state for each, every publication moved the
table away under all the others, and nine waiting runs took forty check runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, ReferenceNotFound, may_pass
from branchlake_dagster.nessie.model import ContentKey, DiffEntry
from branchlake_dagster.publication.committer import Committer, PublicationContended
from branchlake_dagster.publication.ledger import (
    Candidate,
    Publication,
    Published,
    Result,
    message,
    only_namespaces,
    properties,
    publications_in,
)
from branchlake_dagster.publication.main_log import MainLog
from branchlake_dagster.publication.replay import IcebergTables, Tables
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.runs.branch_names import branches
from branchlake_dagster.runs.run_branch import branch_name
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix

PUBLICATION_BRANCHES = branches(ReferencePrefix.PUBLICATION)
"""Nessie's filter for them."""


def publication_branch(run_id: str) -> str:
    """Where the rebased state of a run, and of those that share it, waits for its checks."""
    return f"{ReferencePrefix.PUBLICATION}{run_id}"


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
        hash_ = self._committer.send(plan, name, {LakeProperty.REBASED: ",".join(tables)})
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
        if not entries or LakeProperty.REBASED not in (properties := entries[0].commit.properties):
            return None  # it died between the branch and the commit, or it is somebody else's branch
        commit = entries[0].commit
        onto = commit.parent_hashes[0]
        members = tuple(one.branch for one in publications_in(entries[0]))
        if not members or publication_branch(members[0].removeprefix(branch_name(""))) != name:
            return None
        tables = tuple(filter(None, properties[LakeProperty.REBASED].split(",")))
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


GROUP = 32
"""Most publications in one commit: bounds what is planned again when `main` moves meanwhile."""


class PublicationUnexplained(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """`main` is said to hold the candidate, and its log does not know it."""


@lru_cache(maxsize=8)
def _read(uri: str) -> tuple[MainLog, SnapshotFiles]:  # noqa: ARG001 - the key
    """One reading of a lake's log, and of its tables' snapshots, for all passes of this process."""
    return MainLog(), SnapshotFiles()


def publisher_of(lake: Lakehouse) -> Publisher:
    """The publisher of a lake's Iceberg tables."""
    client = lake.nessie
    log, files = _read(client.uri)
    return Publisher(client, IcebergTables(lake.catalog(), files), log)


class Publisher:
    """Publishes candidates. Several publishers may run at once, in one process or many."""

    def __init__(self, client: NessieClient, tables: Tables, log: MainLog | None = None) -> None:
        self._client = client
        self._log = log or MainLog()
        self._committer = Committer(client, tables, self._log)
        self.states = PreparedStates(client, self._committer)

    def publish(
        self, candidates: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """The result for each candidate by branch; an error where there is none yet.

        `alive` is called right before a commit is sent, and raises when it must not be: a commit needs no
        run branch, so that of a run which was fenced meanwhile would be accepted.

        A candidate whose files cannot be read gets TableFilesMissing, TableFilesDamaged or
        TableFilesUnreadable: Nessie's merge opens no file.

        Safe to call again after any failure. An error that `may_pass` means "again", and what fails of one
        candidate, by an error of any class, does not hold up another.
        """
        results: dict[str, Result | Exception] = {**self._committer.unreadable(candidates)}
        for group in groups(one for one in candidates if one.branch not in results):
            results |= self._guarded(partial(self._group, alive=alive), group)
        return results

    def _guarded(
        self,
        publish: Callable[[Sequence[Candidate]], Mapping[str, Result | Exception]],
        batch: Sequence[Candidate],
    ) -> Mapping[str, Result | Exception]:
        """What `publish` says of a batch; when it fails for a reason that stays, each one is tried alone."""
        try:
            return publish(batch)
        except Exception as error:  # noqa: BLE001 - it becomes the outcome of those whom it concerns
            if len(batch) == 1 or may_pass(error):
                return dict.fromkeys((one.branch for one in batch), error)
        found: dict[str, Result | Exception] = {}
        for one in batch:
            found |= self._guarded(publish, [one])
        return found

    def is_on_main(self, commit: str) -> bool:
        """Whether `main`'s history holds this commit now."""
        return self._log.holds(self._client, commit)

    def already_published(
        self, branch: str, base_hash: str, head_hash: str | None = None
    ) -> Published | None:
        """How a branch that was made from `base_hash` is on `main` already; None: it is not.

        With `head_hash` a merge by somebody else counts too.
        """
        return self._log.on_main(self._client, branch, base=base_hash, head=head_hash)

    def _group(
        self, group: Sequence[Candidate], *, alive: Callable[[], None]
    ) -> Mapping[str, Result | Exception]:
        """Candidates that share keys. One alone is merged if it can be."""
        only = group[0]
        # Nessie 0.99 merges a rename as a deletion: the table was lost. A commit of ours carries it over.
        plain = not (only.serializable or only.leases or only.renames)
        if len(group) == 1 and plain:
            merged = self._merge(only.branch, only.head_hash, only.publication())
            if merged is not None:
                return {only.branch: merged}
        found: dict[str, Result | Exception] = {}
        waiting = iter(group)
        while batch := list(islice(waiting, GROUP)):
            found |= self._guarded(partial(self._committer.publish, alive=alive), batch)
        return found

    # -- one merge -------------------------------------------------------------------------------------

    def _merge(self, branch: str, head_hash: str, publication: Publication) -> Published | None:
        """Merge a branch into `main`; None when `main` changed one of its keys since, or lost its base."""
        try:
            result = self._client.merge(
                from_name=branch,
                from_hash=head_hash,
                into=MAIN,
                # Any hash of main will do: Nessie compares from the common ancestor. This one is at hand, and
                # the server refuses it when main was rolled back below it: a merge would bring back what
                # was rolled back.
                expected_hash=publication.base_hash,
                message=message([publication]),
                properties=properties([publication]),
            )
        except NessieConflict:
            # Of a dropped namespace Nessie tells by an error, as it does when it lost a race with itself.
            return None
        except ReferenceNotFound:
            if not self._log.holds(self._client, publication.base_hash):
                return None  # the commit says so, in words
            raise  # the branch itself is gone
        if result.applied:
            return Published(result.target_hash)
        if not result.successful:
            return None
        found = self.already_published(branch, publication.base_hash, head_hash)
        found = found or self._within_a_merge(publication.base_hash, head_hash)
        if found is None:
            raise PublicationUnexplained(
                "Nessie says that main holds this branch, but main's log has no merge of it.",
                branch=publication.branch,
                run_id=publication.run_id,
                hint="Look at main's log for who merged it; if its rows are there, delete the branch.",
            )
        return found

    def _within_a_merge(self, base_hash: str, head_hash: str) -> Published | None:
        """The merge by hand of a later state: a zombie had written to the branch after it was judged."""
        at = self._client.reference(MAIN).hash
        for source, merge in self._log.merges(self._client, base=base_hash, at=at).items():
            with contextlib.suppress(ReferenceNotFound):  # made from another commit of main
                later = self._client.log(f"@{source}", since=base_hash)
                if any(entry.commit.hash == head_hash for entry in later):
                    return Published(merge, now=False, by_hand=True)
        return None


def groups(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates that change a common key together, in their order."""
    groups: list[tuple[set[ContentKey], list[Candidate]]] = []
    for candidate in candidates:
        # Two branches that made one namespace do not collide: a merge takes either.
        keys = {entry.key for entry in candidate.changes if not only_namespaces(entry)}
        members = [candidate]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            members = [*group[1], *members]
        groups.append((keys, members))
    return [members for _, members in groups]
