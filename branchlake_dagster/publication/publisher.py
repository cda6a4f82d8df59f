"""Publish passed run branches on `main`: each branch completely, exactly once, even if replies are lost.

A branch whose keys did not change on `main` is merged with one call. Otherwise one commit is planned on the
current hash of `main` and sent with that hash as the expected one. This is the case if `main` changed one of
its tables, if the run asked for serializable isolation, or if several candidates change the same table.

Both ways can be repeated after a lost reply. Nessie recognizes a merge that it has, and the ledger is
searched for the commit before it is planned again. Two commits of one plan cannot both succeed, because each
changes keys that the other expects unchanged.

A rebased state that needs checks on whole tables waits on a branch of its own. One state holds all runs that
wait for the same tables. With one state per run, every publication changed the table under all the others,
and nine waiting runs took forty check runs.
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
from branchlake_dagster.nessie.errors import NessieConflict, NessieError, ReferenceNotFound, may_succeed_later
from branchlake_dagster.nessie.model import ContentKey, DiffEntry
from branchlake_dagster.publication.committer import Committer, PublicationContended
from branchlake_dagster.publication.ledger import (
    Candidate,
    MainLog,
    Publication,
    Published,
    Result,
    is_namespace_change,
    parse_publications,
    publication_message,
    publication_properties,
)
from branchlake_dagster.publication.replay import IcebergTableFormat, TableFormat
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.runs.branch_owner import branch_filter
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix

PUBLICATION_BRANCH_FILTER = branch_filter(ReferencePrefix.PUBLICATION)
"""Nessie's filter for publication branches. They are named `publish-{run_id}`, after the oldest of their
runs."""


def publication_branch_name(run_id: str) -> str:
    """Return the name of the branch on which the rebased state of a run waits for its checks."""
    return f"{ReferencePrefix.PUBLICATION}{run_id}"


@dataclass(frozen=True)
class PreparedState:
    """A state on a branch of its own: `main` at `main_hash` plus one commit, on which checks can run.

    `run_branches` are the branches whose changes the state holds, oldest first. `tables` are those of their
    tables that were replayed. `changes` are the changes of the commit.
    """

    branch: str
    hash: str
    main_hash: str
    run_branches: tuple[str, ...]
    tables: tuple[str, ...]
    changes: tuple[DiffEntry, ...]

    @property
    def changed_keys(self) -> frozenset[ContentKey]:
        """The content keys that the state would change on `main`, without namespaces."""
        return frozenset(change.key for change in self.changes if not is_namespace_change(change))


class PreparedStates:
    """Creates prepared states, finds them again in a later process, and publishes them after their checks."""

    def __init__(self, client: NessieClient, committer: Committer) -> None:
        self._client = client
        self._committer = committer

    def prepare(
        self, batch: Sequence[Candidate]
    ) -> tuple[PreparedState | None, dict[str, Result | Exception]]:
        """Commit the rebased candidates to a publication branch.

        Returns the state, or None if it would hold no candidate, and the results of the candidates that it
        does not hold.
        """
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
                "The rebased state could not be committed to its branch for the checks.",
                branch=name,
                run_id=candidates[0].run_id,
                hint="Nothing is lost: the next tick of the publication sensor tries again.",
            )
        changes = tuple(self._client.diff(f"@{plan.main_hash}", f"@{commit_hash}"))
        run_branches = tuple(candidate.branch for candidate in candidates)
        return PreparedState(name, commit_hash, plan.main_hash, run_branches, tables, changes), results

    def load_all(self, names: Iterable[str] | None = None) -> list[PreparedState]:
        """Load the states that this or an earlier process has prepared. Incomplete ones are left out.

        `names` are the names of the publication branches, if the caller has listed them already.
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
            return None  # the process died before the commit, or the branch is not ours
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

        Returns None if `main` has changed the same keys since. Otherwise returns the results of all
        candidates, or of those because of which a new state must be prepared.
        """
        plan, results, is_current = self._committer.plan_checked_state(batch, prepared.changes)
        if results:
            return results
        if not is_current:
            return None
        if not self._committer.can_read_files(prepared.changes):
            # A lost file of a run stays lost. A lost file of the state is written again with the next state.
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
        """Find a merge of the state outside branchlake, before its checks ended; None if there is none."""
        return self._committer.find_outside_merge(prepared.hash, base=prepared.main_hash)

    def delete(self, name: str) -> None:
        """Delete the branch of a prepared state, if it exists."""
        try:
            self._client.delete_branch(name, expected_hash=self._client.reference(name).hash)
        except ReferenceNotFound:
            return


MAX_BATCH_SIZE = 32
"""Most publications in one commit. It limits how much is planned again when `main` changes meanwhile."""


class PublicationUnexplained(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """Nessie reports that `main` holds the candidate, but the log of `main` does not show it."""


@lru_cache(maxsize=8)
def _get_shared_readers(uri: str) -> tuple[MainLog, SnapshotFiles]:  # noqa: ARG001 - the key
    """Return the log reader and snapshot cache of a lake that all passes of this process share."""
    return MainLog(), SnapshotFiles()


def build_publisher(lake: Lakehouse) -> Publisher:
    """Build the publisher of a lake's Iceberg tables."""
    client = lake.nessie
    log, files = _get_shared_readers(client.uri)
    return Publisher(client, IcebergTableFormat(lake.catalog(), files), log)


class Publisher:
    """Publishes candidates. Several publishers may work at once, in one process or in many."""

    def __init__(self, client: NessieClient, tables: TableFormat, log: MainLog | None = None) -> None:
        self._client = client
        self._log = log or MainLog()
        self._committer = Committer(client, tables, self._log)
        self.prepared_states = PreparedStates(client, self._committer)

    def publish(
        self, candidates: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """Publish candidates; return a result or an error for each branch name.

        Safe to call again after any failure. An error for which `may_succeed_later` is true means "try
        again". The failure of one candidate, with an error of any class, does not delay another.

        `alive` is called immediately before a merge or commit is sent, and raises if it must not be sent. A
        commit does not need the run branch, so Nessie would accept it for a run that was fenced meanwhile.

        A candidate whose files cannot be read gets TableFilesMissing, TableFilesDamaged or
        TableFilesUnreadable, because Nessie's merge does not open files.
        """
        results: dict[str, Result | Exception] = {**self._find_unreadable(candidates)}
        for group in group_by_shared_keys(
            candidate for candidate in candidates if candidate.branch not in results
        ):
            results |= self._publish_isolated(partial(self._publish_group, alive=alive), group)
        return results

    def _find_unreadable(self, candidates: Sequence[Candidate]) -> dict[str, Exception]:
        """Return the errors of candidates whose files cannot be read, by branch.

        An error of any class concerns its candidate alone.
        """
        try:
            return self._committer.find_unreadable(candidates)
        except Exception as error:  # noqa: BLE001 - the error becomes the outcome of its candidate
            if len(candidates) == 1:
                return {candidates[0].branch: error}
        return {
            branch: error
            for candidate in candidates
            for branch, error in self._find_unreadable([candidate]).items()
        }

    def _publish_isolated(
        self,
        publish: Callable[[Sequence[Candidate]], Mapping[str, Result | Exception]],
        batch: Sequence[Candidate],
    ) -> Mapping[str, Result | Exception]:
        """Return the results of `publish` for a batch.

        If the batch fails with an error that persists, each candidate is tried alone.
        """
        try:
            return publish(batch)
        except Exception as error:  # noqa: BLE001 - the error becomes the outcome of its candidates
            if len(batch) == 1 or may_succeed_later(error):
                return dict.fromkeys((one.branch for one in batch), error)
        results: dict[str, Result | Exception] = {}
        for candidate in batch:
            results |= self._publish_isolated(publish, [candidate])
        return results

    def is_on_main(self, commit: str) -> bool:
        """Check whether the history of `main` holds this commit now."""
        return self._log.contains_commit(self._client, commit)

    def find_publication(self, branch: str, base_hash: str, head_hash: str | None = None) -> Published | None:
        """Find how `main` holds a branch that was created from `base_hash`; None if it does not.

        With `head_hash`, a merge outside branchlake counts too.
        """
        return self._log.find_on_main(self._client, branch, base_hash=base_hash, head_hash=head_hash)

    def _publish_group(
        self, group: Sequence[Candidate], *, alive: Callable[[], None]
    ) -> Mapping[str, Result | Exception]:
        """Publish candidates that share keys. A single candidate is merged if possible."""
        first = group[0]
        # Nessie 0.99 merges a rename as a deletion, so the table was lost. A planned commit keeps it.
        is_mergeable = not (first.is_serializable or first.leases or first.has_renames)
        if len(group) == 1 and is_mergeable:
            alive()
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
        """Merge a branch into `main`; None if `main` changed one of its keys, or no longer has its base."""
        try:
            result = self._client.merge(
                from_name=branch,
                from_hash=head_hash,
                into=MAIN,
                # Nessie compares from the common ancestor, so any hash of main would do. With the base hash
                # the server refuses the merge if main was rolled back below the base. Otherwise the merge
                # would bring back what was rolled back.
                expected_hash=publication.base_hash,
                message=publication_message([publication]),
                properties=publication_properties([publication]),
            )
        except NessieConflict:
            # Nessie answers so for a dropped namespace, and if it lost a race with itself.
            return None
        except ReferenceNotFound:
            if not self._log.contains_commit(self._client, publication.base_hash):
                return None  # the planned commit returns the reason
            raise  # the branch does not exist any more
        if result.applied:
            return Published(result.target_hash)
        if not result.successful:
            return None
        unexplained = PublicationUnexplained(
            "Nessie reports that main holds this branch, but main's log has no merge of it.",
            branch=publication.branch,
            run_id=publication.run_id,
            hint="Look in main's log for who merged it. If main has its rows, delete the branch.",
        )
        try:
            earlier_merge = self.find_publication(branch, publication.base_hash, head_hash)
            earlier_merge = earlier_merge or self._find_later_merge(publication.base_hash, head_hash)
        except NessieError as error:
            raise unexplained from error  # main has the branch, so this is no failure that changed nothing
        if earlier_merge is None:
            raise unexplained
        return earlier_merge

    def _find_later_merge(self, base_hash: str, head_hash: str) -> Published | None:
        """Find a merge outside branchlake of a later head of the branch.

        The head is later if a writer that was taken for dead changed the branch after it was judged.
        """
        main_hash = self._client.reference(MAIN).hash
        for source, merge in self._log.find_merges(
            self._client, base_hash=base_hash, main_hash=main_hash
        ).items():
            with contextlib.suppress(ReferenceNotFound):  # that branch began at another commit of main
                later = self._client.log(f"@{source}", since=base_hash)
                if any(entry.commit.hash == head_hash for entry in later):
                    return Published(merge, is_new=False, merged_outside=True)
        return None


def group_by_shared_keys(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Group the candidates that change a common key, directly or through others, in their order."""
    groups: list[tuple[set[ContentKey], list[Candidate]]] = []
    for candidate in candidates:
        # Two branches that created one namespace do not conflict: a merge takes either.
        keys = {entry.key for entry in candidate.changes if not is_namespace_change(entry)}
        members = [candidate]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            members = [*group[1], *members]
        groups.append((keys, members))
    return [members for _, members in groups]
