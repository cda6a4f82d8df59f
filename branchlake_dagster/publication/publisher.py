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
from branchlake_dagster.nessie.errors import NessieConflict, ReferenceNotFound, may_succeed_later
from branchlake_dagster.nessie.model import ContentKey, DiffEntry
from branchlake_dagster.publication.committer import Committer, PublicationContended
from branchlake_dagster.publication.ledger import (
    Candidate,
    Publication,
    Published,
    Result,
    is_namespace_change,
    parse_publications,
    publication_message,
    publication_properties,
)
from branchlake_dagster.publication.main_log import MainLog
from branchlake_dagster.publication.replay import IcebergTableFormat, TableFormat
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.runs.branch_names import branch_filter
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix

PUBLICATION_BRANCH_FILTER = branch_filter(ReferencePrefix.PUBLICATION)
"""Nessie's filter for them."""


def publication_branch_name(run_id: str) -> str:
    """Where the rebased state of a run, and of those that share it, waits for its checks."""
    return f"{ReferencePrefix.PUBLICATION}{run_id}"


@dataclass(frozen=True)
class PreparedState:
    """A state on a branch of its own: `main` at `main_hash` plus one commit, for checks to run on.

    `run_branches` are the run branches whose changes are in it, the oldest first; `tables` those of its
    tables that were replayed; `changes` what the commit does.
    """

    branch: str
    hash: str
    main_hash: str
    run_branches: tuple[str, ...]
    tables: tuple[str, ...]
    changes: tuple[DiffEntry, ...]

    @property
    def changed_keys(self) -> frozenset[ContentKey]:
        """What it would change on `main`, but for namespaces."""
        return frozenset(change.key for change in self.changes if not is_namespace_change(change))


class PreparedStates:
    """Puts states there, finds them again in a later process, and publishes what was checked."""

    def __init__(self, client: NessieClient, committer: Committer) -> None:
        self._client = client
        self._committer = committer

    def prepare(
        self, batch: Sequence[Candidate]
    ) -> tuple[PreparedState | None, dict[str, Result | Exception]]:
        """Put the rebased candidates on a branch, and why some are not in it; None when none is."""
        plan, results = self._committer.plan_for_checks(batch)
        if not plan.accepted:
            return None, results
        candidates = list(plan.accepted)
        name = publication_branch_name(candidates[0].run_id)
        self.delete(name)
        try:
            self._client.create_branch(name, from_ref=MAIN, from_hash=plan.main_hash)
        except Exception:
            plan.discard()
            raise
        tables = tuple(sorted({table for rebased in plan.accepted.values() for table in rebased}))
        commit_hash = self._committer.send_commit(plan, name, {LakeProperty.REBASED: ",".join(tables)})
        if commit_hash is None:
            raise PublicationContended(
                "The rebased state could not be stored for its checks.",
                branch=name,
                run_id=candidates[0].run_id,
                hint="Nothing is lost: the next tick of the publication sensor tries again.",
            )
        changes = tuple(self._client.diff(f"@{plan.main_hash}", f"@{commit_hash}"))
        run_branches = tuple(candidate.branch for candidate in candidates)
        return PreparedState(name, commit_hash, plan.main_hash, run_branches, tables, changes), results

    def load_all(self, names: Iterable[str] | None = None) -> list[PreparedState]:
        """What `prepare` of this or an earlier process has put there; a half-made one is left out.

        `names` are those of the publication branches, where they are known already.
        """
        if names is None:
            names = [ref.name for ref in self._client.references(filter=PUBLICATION_BRANCH_FILTER)]
        return [state for name in names if (state := self._load_state(name))]

    def _load_state(self, name: str) -> PreparedState | None:
        try:
            entries = list(self._client.log(name, limit=1))
        except ReferenceNotFound:
            return None
        if not entries or LakeProperty.REBASED not in (properties := entries[0].commit.properties):
            return None  # it died between the branch and the commit, or it is somebody else's branch
        commit = entries[0].commit
        main_hash = commit.parent_hashes[0]
        run_branches = tuple(publication.branch for publication in parse_publications(entries[0]))
        if (
            not run_branches
            or publication_branch_name(run_branches[0].removeprefix(run_branch_name(""))) != name
        ):
            return None
        tables = tuple(filter(None, properties[LakeProperty.REBASED].split(",")))
        changes = tuple(self._client.diff(f"@{main_hash}", f"@{commit.hash}"))
        return PreparedState(name, commit.hash, main_hash, run_branches, tables, changes)

    def publish(
        self, prepared: PreparedState, batch: Sequence[Candidate]
    ) -> dict[str, Result | Exception] | None:
        """Publish exactly the state that was checked, for all its candidates.

        None when `main` has moved under it since. Otherwise the results of all of them, or of those
        because of whom the state must be made anew.
        """
        plan, results, is_current = self._committer.plan_checked_state(batch, prepared.changes)
        if results:
            return results
        if not is_current:
            return None
        if not self._committer.can_read_files(prepared.changes):
            # A file of a run stays lost. One of the state itself is written anew with the next state.
            return dict(self._committer.find_unreadable(batch)) or None
        commit_hash = self._committer.send_commit(plan, MAIN)
        if commit_hash is None:
            return None
        return {
            candidate.branch: Published(
                commit_hash,
                rebased_tables=tuple(table for table in prepared.tables if table in candidate.tables),
            )
            for candidate in batch
        }

    def find_outside_merge(self, prepared: PreparedState) -> Published | None:
        """The merge by somebody who did not wait for the checks; None: there is none."""
        return self._committer.find_outside_merge(prepared.hash, base=prepared.main_hash)

    def delete(self, name: str) -> None:
        """Delete the branch of a prepared state, if there is one."""
        try:
            self._client.delete_branch(name, expected_hash=self._client.reference(name).hash)
        except ReferenceNotFound:
            return


MAX_BATCH_SIZE = 32
"""Most publications in one commit: bounds what is planned again when `main` moves meanwhile."""


class PublicationUnexplained(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """`main` is said to hold the candidate, and its log does not know it."""


@lru_cache(maxsize=8)
def _get_shared_readers(uri: str) -> tuple[MainLog, SnapshotFiles]:  # noqa: ARG001 - the key
    """One reading of a lake's log, and of its tables' snapshots, for all passes of this process."""
    return MainLog(), SnapshotFiles()


def build_publisher(lake: Lakehouse) -> Publisher:
    """The publisher of a lake's Iceberg tables."""
    client = lake.nessie
    log, files = _get_shared_readers(client.uri)
    return Publisher(client, IcebergTableFormat(lake.catalog(), files), log)


class Publisher:
    """Publishes candidates. Several publishers may run at once, in one process or many."""

    def __init__(self, client: NessieClient, tables: TableFormat, log: MainLog | None = None) -> None:
        self._client = client
        self._log = log or MainLog()
        self._committer = Committer(client, tables, self._log)
        self.prepared_states = PreparedStates(client, self._committer)

    def publish(
        self, candidates: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """The result for each candidate by branch; an error where there is none yet.

        `alive` is called right before a commit is sent, and raises when it must not be: a commit needs no
        run branch, so that of a run which was fenced meanwhile would be accepted.

        A candidate whose files cannot be read gets TableFilesMissing, TableFilesDamaged or
        TableFilesUnreadable: Nessie's merge opens no file.

        Safe to call again after any failure. An error that `may_succeed_later` means "again", and what fails
        of one candidate, by an error of any class, does not hold up another.
        """
        results: dict[str, Result | Exception] = {**self._committer.find_unreadable(candidates)}
        for group in group_by_shared_keys(
            candidate for candidate in candidates if candidate.branch not in results
        ):
            results |= self._publish_isolated(partial(self._publish_group, alive=alive), group)
        return results

    def _publish_isolated(
        self,
        publish: Callable[[Sequence[Candidate]], Mapping[str, Result | Exception]],
        batch: Sequence[Candidate],
    ) -> Mapping[str, Result | Exception]:
        """What `publish` says of a batch; when it fails for a reason that stays, each one is tried alone."""
        try:
            return publish(batch)
        except Exception as error:  # noqa: BLE001 - it becomes the outcome of those whom it concerns
            if len(batch) == 1 or may_succeed_later(error):
                return dict.fromkeys((one.branch for one in batch), error)
        results: dict[str, Result | Exception] = {}
        for candidate in batch:
            results |= self._publish_isolated(publish, [candidate])
        return results

    def is_on_main(self, commit: str) -> bool:
        """Whether `main`'s history holds this commit now."""
        return self._log.contains_commit(self._client, commit)

    def find_publication(self, branch: str, base_hash: str, head_hash: str | None = None) -> Published | None:
        """How a branch that was made from `base_hash` is on `main` already; None: it is not.

        With `head_hash` a merge by somebody else counts too.
        """
        return self._log.find_on_main(self._client, branch, base_hash=base_hash, head_hash=head_hash)

    def _publish_group(
        self, group: Sequence[Candidate], *, alive: Callable[[], None]
    ) -> Mapping[str, Result | Exception]:
        """Candidates that share keys. One alone is merged if it can be."""
        first = group[0]
        # Nessie 0.99 merges a rename as a deletion: the table was lost. A commit of ours carries it over.
        is_mergeable = not (first.is_serializable or first.leases or first.has_renames)
        if len(group) == 1 and is_mergeable:
            merged = self._merge(first.branch, first.head_hash, first.to_publication())
            if merged is not None:
                return {first.branch: merged}
        results: dict[str, Result | Exception] = {}
        waiting = iter(group)
        while batch := list(islice(waiting, MAX_BATCH_SIZE)):
            results |= self._publish_isolated(partial(self._committer.publish, alive=alive), batch)
        return results

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
                message=publication_message([publication]),
                properties=publication_properties([publication]),
            )
        except NessieConflict:
            # Of a dropped namespace Nessie tells by an error, as it does when it lost a race with itself.
            return None
        except ReferenceNotFound:
            if not self._log.contains_commit(self._client, publication.base_hash):
                return None  # the commit says so, in words
            raise  # the branch itself is gone
        if result.applied:
            return Published(result.target_hash)
        if not result.successful:
            return None
        earlier_merge = self.find_publication(branch, publication.base_hash, head_hash)
        earlier_merge = earlier_merge or self._find_later_merge(publication.base_hash, head_hash)
        if earlier_merge is None:
            raise PublicationUnexplained(
                "Nessie says that main holds this branch, but main's log has no merge of it.",
                branch=publication.branch,
                run_id=publication.run_id,
                hint="Look at main's log for who merged it; if its rows are there, delete the branch.",
            )
        return earlier_merge

    def _find_later_merge(self, base_hash: str, head_hash: str) -> Published | None:
        """The merge by hand of a later state: a zombie had written to the branch after it was judged."""
        main_hash = self._client.reference(MAIN).hash
        for source, merge in self._log.find_merges(
            self._client, base_hash=base_hash, main_hash=main_hash
        ).items():
            with contextlib.suppress(ReferenceNotFound):  # made from another commit of main
                later = self._client.log(f"@{source}", since=base_hash)
                if any(entry.commit.hash == head_hash for entry in later):
                    return Published(merge, is_new=False, merged_outside=True)
        return None


def group_by_shared_keys(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates that change a common key together, in their order."""
    groups: list[tuple[set[ContentKey], list[Candidate]]] = []
    for candidate in candidates:
        # Two branches that made one namespace do not collide: a merge takes either.
        keys = {entry.key for entry in candidate.changes if not is_namespace_change(entry)}
        members = [candidate]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            members = [*group[1], *members]
        groups.append((keys, members))
    return [members for _, members in groups]
