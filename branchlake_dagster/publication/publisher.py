"""Publish passed run branches on `main`: each branch completely, exactly once, even if replies are lost.

A branch whose keys did not change on `main` is merged with one call. Otherwise one commit is planned on the
current hash of `main` and sent with that hash as the expected one. This is the case if `main` changed one of
its tables, if the run asked for serializable isolation, or if several candidates change the same table.

Both ways can be repeated after a lost reply. Nessie recognizes a merge that it has, and the ledger is
searched for the commit, at the hash of the plan, before it is planned again. Two commits of one plan cannot
both succeed, because each changes keys that the other expects unchanged.

The files of a candidate are read first, because a merge in Nessie does not open them. A run whose metadata
file was empty after a power cut was once merged, and the table on `main` could not be read any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import (
    NessieConflict,
    NessieError,
    NessieOutcomeUnknown,
    ReferenceNotFound,
    may_succeed_later,
)
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    ContentsAt,
    DiffEntry,
)
from branchlake_dagster.publication.ledger import (
    BaseNotOnMain,
    Candidate,
    MainLog,
    NeedsChecks,
    Publication,
    Published,
    Refused,
    Result,
    is_namespace_change,
    publication_message,
    publication_properties,
)
from branchlake_dagster.publication.rebase_plan import CommitPlan, add_culprits, find_origin_commit
from branchlake_dagster.publication.replay import (
    IcebergTableFormat,
    TableFormat,
    find_unreadable_candidates,
    table_states,
    wrap_file_errors,
)
from branchlake_dagster.publication.snapshot_files import SnapshotFiles
from branchlake_dagster.publication.stored_log import LOG_FOLDER, LogFile
from branchlake_dagster.runs.leases import lease_key
from branchlake_dagster.wording import CodedReason

_MAX_ATTEMPTS = 5


class PublicationContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Other writers kept changing the same tables; nothing was published, and the next tick tries again."""


class Committer:
    """Plans and sends commits. Several publishers may use the same tables at once."""

    def __init__(self, client: NessieClient, tables: TableFormat, log: MainLog) -> None:
        self._client = client
        self._tables = tables
        self._log = log

    def publish(
        self, batch: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """Plan and commit until `main` does not change in between; return the results by branch name.

        `alive` is called before each commit and may raise to stop it. An error of one candidate is returned
        as its result; an error that concerns all candidates is raised. Raises PublicationContended after five
        attempts. If the outcome of an attempt is unknown and no later attempt clears it up, raises
        NessieOutcomeUnknown, whatever failed last.
        """
        keys = _involved_keys(batch)
        unknown_outcome: NessieOutcomeUnknown | None = None
        for _ in range(_MAX_ATTEMPTS):
            try:
                results = self._try_publish(batch, keys, alive)
            except NessieOutcomeUnknown as error:
                unknown_outcome = unknown_outcome or error
                continue
            except Exception as error:
                if unknown_outcome is None:
                    raise
                raise unknown_outcome from error
            if results is None:
                continue
            for branch, result in results.items():
                if unknown_outcome is not None and isinstance(result, Exception):
                    results[branch] = unknown_outcome
            return results
        if unknown_outcome is not None:
            raise unknown_outcome
        raise PublicationContended(
            f"Main changed {_MAX_ATTEMPTS} times while the publication was planned.",
            table=", ".join(batch[0].tables),
            branch=batch[0].branch,
            run_id=batch[0].run_id,
            hint="Nothing is lost. The next tick of the publication sensor tries again.",
        )

    def _try_publish(
        self, batch: Sequence[Candidate], keys: list[ContentKey], alive: Callable[[], None]
    ) -> dict[str, Result | Exception] | None:
        """Plan and commit once, and return the results by branch name.

        Returns None if `main` has changed keys of the plan meanwhile: then nothing was committed, and the
        caller may try again. `keys` are the keys of `_involved_keys`. `alive` is called immediately before
        the commit is sent, and may raise to stop it. Raises NessieOutcomeUnknown if the commit may exist.
        """
        main_contents = self._client.contents_at(MAIN, keys)
        plan, results = self._build_plan(batch, main_contents)
        if not plan.accepted:
            return results
        commit_hash = self.send_commit(plan, MAIN, alive=alive)
        if commit_hash is None:
            return None
        published = {
            candidate.branch: Published(commit_hash, rebased_tables=tables)
            for candidate, tables in plan.accepted.items()
        }
        return {**results, **published}

    def plan_for_checks(self, batch: Sequence[Candidate]) -> tuple[CommitPlan, dict[str, Result | Exception]]:
        """Return a plan whose result must pass checks, and the results of candidates that are not in it.

        The results are by branch name: why a candidate is refused, its earlier publication, or its error. A
        candidate that conflicts only with others of the plan is left out without a result, because those may
        still fail their checks. A run was once refused because of a run that failed its checks later.
        """
        main_contents = self._client.contents_at(MAIN, _involved_keys(batch))
        plan, results = self._build_plan(batch, main_contents, checked=True)
        for candidate in batch:
            if isinstance(results.get(candidate.branch), Refused) and plan.accepted:
                single_plan, _ = self._build_plan([candidate], main_contents, checked=True)
                if single_plan.accepted:
                    del results[candidate.branch]
                single_plan.discard()
        return plan, results

    def plan_checked_state(
        self, batch: Sequence[Candidate], changes: Sequence[DiffEntry]
    ) -> tuple[CommitPlan, dict[str, Result | Exception], bool]:
        """Return a plan that puts a checked state of all candidates on `main`.

        `changes` is the difference between `main` and that state. The second value has the results of
        candidates that cannot be published or already are, by branch name. The third value is True if the
        plan can be sent. It is False if there is such a result, because the checked state contains that
        candidate's changes, or if `main` has changed the same keys.
        """
        changed_keys = [entry.key for entry in changes]
        main_contents = self._client.contents_at(MAIN, sorted({*_involved_keys(batch), *changed_keys}))
        plan = CommitPlan(main_contents.reference.hash, main_contents.contents, self._tables)
        results: dict[str, Result | Exception] = {}
        for candidate in batch:
            if earlier_result := self._find_earlier_result(candidate, plan.main_hash):
                results[candidate.branch] = earlier_result
            elif obstacle := plan.add_reader(candidate, self._load_read_set(candidate)):
                results[candidate.branch] = add_culprits(
                    self._client, candidate, obstacle, main_hash=plan.main_hash
                )
        with wrap_file_errors(batch[0]):
            fits = not results and plan.add_state(changes)
        return plan, results, fits

    def find_unreadable(self, batch: Sequence[Candidate]) -> dict[str, Exception]:
        """Return, by branch name, the errors of candidates whose own files cannot be read.

        Candidates without an error are left out. See `find_unreadable_candidates`.
        """
        return find_unreadable_candidates(self._tables, batch)

    def can_read_files(self, changes: Sequence[DiffEntry]) -> bool:
        """Return whether all files that the changes add to tables can be read."""
        return not any(self._tables.find_read_errors(table_states(changes)))

    def find_outside_merge(self, source: str, *, base: str) -> Published | None:
        """Return the merge of the state `source` that was made outside branchlake; None if there is none.

        `base` is the commit of `main` from which the state was made.
        """
        try:
            merges = self._log.find_merges(self._client, base_hash=base)
        except BaseNotOnMain:
            return None
        return Published(merges[source], is_new=False, merged_outside=True) if source in merges else None

    def _build_plan(
        self, batch: Iterable[Candidate], main_contents: ContentsAt, *, checked: bool = False
    ) -> tuple[CommitPlan, dict[str, Result | Exception]]:
        plan = CommitPlan(main_contents.reference.hash, main_contents.contents, self._tables)
        results: dict[str, Result | Exception] = {}
        for candidate in batch:
            obstacle = self._find_earlier_result(candidate, plan.main_hash) or self._add_candidate(
                plan, candidate, checked=checked
            )
            if obstacle is not None:
                results[candidate.branch] = obstacle
        return plan, results

    def _find_earlier_result(self, candidate: Candidate, main_hash: str) -> Published | Refused | None:
        """Return the candidate's earlier publication, or its refusal if its base is not on `main`; else None.

        `main_hash` is the hash that the plan will expect. Searching at exactly that hash closes the race: a
        later publication of the candidate changes keys of the plan, so the commit fails and is planned again.
        """
        try:
            return self._log.find_publication(
                self._client,
                candidate.branch,
                base_hash=candidate.base_hash,
                head_hash=candidate.head_hash,
                main_hash=main_hash,
            )
        except BaseNotOnMain as error:
            return Refused(dict.fromkeys(candidate.tables, CodedReason(error.message, "base_not_on_main")))

    def _add_candidate(
        self, plan: CommitPlan, candidate: Candidate, *, checked: bool
    ) -> Published | Refused | NeedsChecks | Exception | None:
        """Add a candidate to a plan; return None, or the reason or error because of which it was not added.

        `checked` is true if the plan is for a state whose checks run again. Raises only errors of Nessie,
        because these concern all candidates.
        """
        try:
            with wrap_file_errors(candidate):
                obstacle = plan.add(candidate, self._load_read_set(candidate), checked=checked)
            if isinstance(obstacle, Refused):
                return add_culprits(self._client, candidate, obstacle, main_hash=plan.main_hash)
            if isinstance(obstacle, Published):
                return replace(
                    obstacle,
                    hash=find_origin_commit(self._client, candidate, main_hash=plan.main_hash)
                    or obstacle.hash,
                )
        except NessieError:
            raise  # all candidates need the server
        except Exception as error:  # noqa: BLE001 - an error of one candidate must not block others
            return error
        return obstacle

    def _load_read_set(self, candidate: Candidate) -> Mapping[ContentKey, Content]:
        """Load the contents of the candidate's read set at its base; empty without serializable isolation."""
        if not candidate.read_set:
            return {}
        return self._client.contents(f"@{candidate.base_hash}", sorted(candidate.read_set))

    def send_commit(
        self,
        plan: CommitPlan,
        branch: str,
        extra_properties: Mapping[str, str] = MappingProxyType({}),
        *,
        alive: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Commit the plan to `branch` and return the commit's hash; None if a key of the plan has changed.

        `alive` is called after the files of the plan are written, immediately before the request, and may
        raise. `extra_properties` are added to the properties of the commit. Raises NessieOutcomeUnknown if
        the commit may exist; the plan's files are kept then. After None or any other error they are deleted.
        """
        entries = [candidate.to_publication() for candidate in plan.accepted]
        with wrap_file_errors(next(iter(plan.accepted))):
            operations = plan.build_operations()
        try:
            alive()
            return self._client.commit(
                branch,
                expected_hash=plan.main_hash,
                operations=operations,
                message=publication_message(entries),
                properties={**publication_properties(entries), **plan.fencing_tokens(), **extra_properties},
            ).hash
        except NessieOutcomeUnknown:
            # Keep the files: the commit may exist, or still arrive. The next attempt finds it in the ledger.
            # If it arrives later, it fails because the keys have changed.
            raise
        except NessieConflict:
            plan.discard()
            return None
        except Exception:
            plan.discard()  # the commit certainly does not exist
            raise


def _involved_keys(candidates: Iterable[Candidate]) -> list[ContentKey]:
    """Return all content keys that a plan for the candidates must read from `main`, sorted.

    These are the written keys, the read sets of serializable runs, the leases, and the parent of each key.
    """
    candidate_keys = {
        key
        for candidate in candidates
        for key in (*candidate.keys, *(candidate.read_set or ()), *map(lease_key, candidate.leases))
    }
    return sorted(candidate_keys | {ContentKey(key.parent) for key in candidate_keys if key.parent})


MAX_BATCH_SIZE = 32
"""The most candidates in one commit. It limits the work that is repeated if `main` changes meanwhile."""


class PublicationUnexplained(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """Nessie reports that `main` holds the candidate, but the log of `main` does not show it."""


@lru_cache(maxsize=8)
def _get_shared_readers(uri: str, log_file: Path) -> tuple[MainLog, SnapshotFiles]:  # noqa: ARG001 - the key
    """Return the log reader and snapshot cache of a lake that all passes of this process share.

    `uri` is the address of the lake's Nessie; it is only part of the cache's key. `log_file` is the file in
    which the log of `main` is cached.
    """
    return MainLog(file=LogFile(log_file)), SnapshotFiles()


def build_publisher(lake: Lakehouse) -> Publisher:
    """Build the publisher of a lake's Iceberg tables."""
    client = lake.nessie
    log_file = lake.settings.state_dir / LOG_FOLDER / f"main_log-{lake.settings.lake_id}"
    log, files = _get_shared_readers(client.uri, log_file)
    return Publisher(client, IcebergTableFormat(lake.catalog(), files), log)


class Publisher:
    """Publishes candidates (`Candidate`): run branches that the gate has passed.

    Several publishers may work at once, in one process or in many.
    """

    def __init__(self, client: NessieClient, tables: TableFormat, log: MainLog | None = None) -> None:
        self._client = client
        self._log = log or MainLog()
        self.committer = Committer(client, tables, self._log)

    def publish(
        self, candidates: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """Publish candidates; return a result or an error for each of them, by branch name.

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
        """Return the errors of candidates whose files cannot be read, by branch name.

        If the check of all candidates fails, each candidate is checked alone, and a candidate whose check
        fails gets the error as its result.
        """
        try:
            return self.committer.find_unreadable(candidates)
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
        """Call `publish` for a batch, and return its results by branch name. Raises no error.

        If `publish` raises an error that may pass, all candidates get this error as their result. If the
        error persists (`may_succeed_later`), each candidate is tried alone.
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
        """Find the commit on `main` that published a branch, which was created from `base_hash`.

        Returns None if there is no such commit, or if `main` no longer contains the base. With `head_hash`,
        the branch's head, a merge outside branchlake counts too.
        """
        return self._log.find_on_main(self._client, branch, base_hash=base_hash, head_hash=head_hash)

    def _publish_group(
        self, group: Sequence[Candidate], *, alive: Callable[[], None]
    ) -> Mapping[str, Result | Exception]:
        """Publish candidates that share keys, and return the results by branch name.

        A single candidate is merged if possible; otherwise commits of up to `MAX_BATCH_SIZE` candidates are
        planned.
        """
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
            results |= self._publish_isolated(partial(self.committer.publish, alive=alive), batch)
        return results

    # -- one merge -------------------------------------------------------------------------------------

    def _merge(self, branch: str, head_hash: str, publication: Publication) -> Published | None:
        """Merge a branch into `main` with one call to Nessie.

        Returns an earlier publication if `main` already has the branch. Returns None if a planned commit must
        be tried: `main` changed a key of the branch, or no longer contains its base. Raises ReferenceNotFound
        if the branch does not exist, and PublicationUnexplained.
        """
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
        """Find a merge outside branchlake of a later head of the branch; None if there is none.

        A head is later than the judged head `head_hash` if its history contains that hash. This happens if a
        writer that was taken for dead changed the branch after it was judged.
        """
        for source, merge in self._log.find_merges(self._client, base_hash=base_hash).items():
            with contextlib.suppress(ReferenceNotFound):  # that branch began at another commit of main
                later = self._client.log(f"@{source}", since=base_hash)
                if any(entry.commit.hash == head_hash for entry in later):
                    return Published(merge, is_new=False, merged_outside=True)
        return None


def group_by_shared_keys(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Group the candidates that change a common key, directly or through other candidates of the group.

    Namespaces do not count as keys. A candidate that shares no key is a group of its own. Each group has its
    candidates in the order of `candidates`.
    """
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
