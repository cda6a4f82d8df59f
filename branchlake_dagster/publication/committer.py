"""Commits on `main`, each for one or several candidates; their files are read before the commit is sent.

A commit expects the hash of `main` that its plan was made for. Before each new plan, the ledger is searched
at that hash for an earlier, unacknowledged commit. Two commits of one plan cannot both succeed, because each
changes keys that the other expects unchanged.

Files are read first because a merge in Nessie does not open them. A run whose metadata file was empty after a
power cut was once merged, and the table on `main` could not be read any more.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from branchlake_dagster.catalog.stored_files import StoredFileDamaged
from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieError, NessieOutcomeUnknown
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    ContentsAt,
    Delete,
    DiffEntry,
    IcebergTable,
    LogEntry,
    Put,
)
from branchlake_dagster.publication.ledger import (
    BaseNotOnMain,
    Candidate,
    MainLog,
    NeedsChecks,
    Published,
    Refused,
    Result,
    parse_publications,
    publication_message,
    publication_properties,
)
from branchlake_dagster.publication.rebase_plan import CommitPlan
from branchlake_dagster.publication.replay import TableFormat, TableStates
from branchlake_dagster.runs.leases import lease_key
from branchlake_dagster.wording import CodedReason


class _FileError(BranchlakeError):
    """An error of one file. `file` is its location; None if it is not known."""

    def __init__(self, message: str, *, file: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.file = file


class TableFilesMissing(_FileError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file that a publication needs does not exist; nothing was published."""


class TableFilesDamaged(_FileError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file that a publication needs is empty, truncated or has another content; nothing was published."""


class TableFilesUnreadable(_FileError, Transient):  # noqa: N818 - named like the other outcomes
    """The storage refused to read or write files of a table; nothing was published."""


def find_unreadable_candidates(tables: TableFormat, candidates: Sequence[Candidate]) -> dict[str, Exception]:
    """Return the error of each candidate, by branch, whose own files cannot be read.

    Reads the metadata, manifest lists and manifests of the snapshots that a candidate adds to `main`, and
    asks for the size of their data and delete files. Files with `file://` locations are flushed to disk.
    """
    states = [(candidate, state) for candidate in candidates for state in table_states(candidate.changes)]
    errors: dict[str, Exception] = {}
    for (candidate, state), error in zip(
        states, tables.find_read_errors([state for _, state in states]), strict=True
    ):
        if error is not None and candidate.branch not in errors:
            errors[candidate.branch] = _to_file_error(error, candidate, state[0].name)
    return errors


def table_states(changes: Sequence[DiffEntry]) -> list[TableStates]:
    """Return the tables that the changes write, each with its content before and after.

    A renamed table is returned under its new name.
    """
    old_tables = {
        entry.from_content.content_id: entry.from_content
        for entry in changes
        if isinstance(entry.from_content, IcebergTable)
    }
    return [
        (entry.key, old_tables.get(entry.to_content.content_id), entry.to_content)
        for entry in changes
        if isinstance(entry.to_content, IcebergTable)
    ]


@contextmanager
def wrap_file_errors(candidate: Candidate) -> Iterator[None]:
    """Add the candidate to errors of its files, so that they do not block other candidates in every tick."""
    try:
        yield
    except (OSError, StoredFileDamaged) as error:
        raise _to_file_error(error, candidate, ", ".join(candidate.tables)) from error


def _to_file_error(error: Exception, candidate: Candidate, table: str) -> Exception:
    """Return the error with its table, branch, run and file; other errors are returned unchanged."""
    context = {"table": table, "branch": candidate.branch, "run_id": candidate.run_id}
    hint = "Nothing was published. Restore the file, or launch the run again."
    file_error: BranchlakeError
    if isinstance(error, StoredFileDamaged):
        file_error = TableFilesDamaged(error.message, file=error.file, **context, hint=hint)
    elif isinstance(error, FileNotFoundError):
        missing_message = f"A file of the table does not exist: {error.filename or error}."
        file_error = TableFilesMissing(missing_message, file=error.filename, **context, hint=hint)
    elif isinstance(error, OSError):
        error_name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        file_error = TableFilesUnreadable(
            f"The storage refused to read or write a file of the table ({error_name}): {error}.",
            file=error.filename,
            **context,
            hint="Nothing was published. The next ticks try again until the storage answers.",
        )
    else:
        return error
    file_error.__cause__ = error
    return file_error


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
        """Plan and commit until `main` does not change in between; return the result of each branch.

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
        """Plan and commit once. Return None if `main` has changed keys of the plan meanwhile."""
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
        """Return a plan whose result must pass checks, and the reasons why other candidates are not in it.

        A candidate that conflicts only with others of the plan is left out without a reason, because those
        may still fail their checks. A run was once refused because of a run that failed its checks later.
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

        `changes` is the difference between `main` and that state. Also returns the reasons of candidates that
        cannot be published, and whether the plan is complete. It is incomplete if there is such a reason,
        because the state is then not what was checked, or if `main` has changed the same keys.
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
        """Return the error of each candidate, by branch, whose own files cannot be read.

        See `find_unreadable_candidates`.
        """
        return find_unreadable_candidates(self._tables, batch)

    def can_read_files(self, changes: Sequence[DiffEntry]) -> bool:
        """Return whether all files that the changes add to tables can be read."""
        return not any(self._tables.find_read_errors(table_states(changes)))

    def find_outside_merge(self, source: str, *, base: str) -> Published | None:
        """Return the merge of the state `source` that was made outside branchlake; None if there is none.

        `base` is the commit of `main` from which the state was made.
        """
        main_hash = self._client.reference(MAIN).hash
        try:
            merges = self._log.find_merges(self._client, base_hash=base, main_hash=main_hash)
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
        """Add a candidate to a plan; return None, or the reason why it was not added."""
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
        """Load the contents of the read set at the candidate's base."""
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
        """Commit the plan to `branch` and return the hash; None if one of its keys has changed.

        `alive` is called after the files of the plan are written, immediately before the request, and may
        raise. Raises NessieOutcomeUnknown if the commit may exist; the plan's files are kept then.
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
    """Return all keys that a plan must read: written keys, read keys, leases, and their namespaces."""
    candidate_keys = {
        key
        for candidate in candidates
        for key in (*candidate.keys, *(candidate.read_set or ()), *map(lease_key, candidate.leases))
    }
    return sorted(candidate_keys | {ContentKey(key.parent) for key in candidate_keys if key.parent})


_MAX_COMMITS = 2000
"""The number of commits, newest first, that are searched for the runs of a conflict."""

OUTSIDE_WRITER = "somebody outside branchlake"


def add_culprits(client: NessieClient, candidate: Candidate, refusal: Refused, *, main_hash: str) -> Refused:
    """Add to a refusal the publications that it conflicts with, and the new names of renamed tables.

    `main_hash` is the hash of `main` at which the candidate was refused. Reads the log since the candidate's
    base, once.
    """
    old_contents = {entry.key: entry.from_content for entry in candidate.changes}
    key_by_name = {key.name: key for key in (*old_contents, *(candidate.read_set or ()))}
    keys = {key_by_name[name] for name in refusal.conflicts if name in key_by_name}
    entries = list(_iter_commits(client, candidate, main_hash))
    conflicts = dict(refusal.conflicts)
    runs = list(refusal.runs)
    for entry in entries:
        for key in [key for key in keys if _changes_key(entry, key)]:
            if not refusal.runs:
                runs += [publication.run_id for publication in parse_publications(entry)] or [OUTSIDE_WRITER]
            old_table = old_contents.get(key)
            if isinstance(old_table, IcebergTable) and (new_name := _find_new_name(entry, key, old_table)):
                conflicts[key.name] = CodedReason(f"it was renamed to {new_name}", "renamed")
    return replace(refusal, conflicts=conflicts, runs=tuple(dict.fromkeys(runs)))


def find_origin_commit(client: NessieClient, candidate: Candidate, *, main_hash: str) -> str | None:
    """Return the first commit on `main` that has the candidate's last table as on its branch.

    None if that commit is not among the newest 2,000 since the base.
    """
    last_change = next(e for e in reversed(candidate.changes) if isinstance(e.to_content, IcebergTable))
    commit_hash = None
    for entry in _iter_commits(client, candidate, main_hash):
        if any(
            isinstance(operation, Put)
            and operation.key == last_change.key
            and operation.content == last_change.to_content
            for operation in entry.operations
        ):
            commit_hash = entry.commit.hash
    return commit_hash


def _iter_commits(client: NessieClient, candidate: Candidate, main_hash: str) -> Iterator[LogEntry]:
    """Yield the commits since the candidate's base, at most `_MAX_COMMITS`."""
    return islice(client.log(f"@{main_hash}", since=candidate.base_hash, fetch_operations=True), _MAX_COMMITS)


def _changes_key(entry: LogEntry, key: ContentKey) -> bool:
    return any(isinstance(operation, Put | Delete) and operation.key == key for operation in entry.operations)


def _find_new_name(entry: LogEntry, key: ContentKey, old_table: IcebergTable) -> str | None:
    """Return the dotted name under which the same commit put the content that it deleted at `key`."""
    if not any(isinstance(operation, Delete) and operation.key == key for operation in entry.operations):
        return None
    puts = (operation for operation in entry.operations if isinstance(operation, Put))
    return next(
        (operation.key.name for operation in puts if operation.content.content_id == old_table.content_id),
        None,
    )
