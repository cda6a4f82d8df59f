"""One commit on `main` for several candidates: their files are opened, then it is sent expecting a hash.

It is looked for in the ledger before it is planned again, at the very hash that the plan expects. Two
commits of one plan cannot both succeed, because each changes keys that the other expects unchanged.

The files that candidates would bring to `main`: opened before they are published, and on disk.

A merge in Nessie opens no file. A run whose metadata file was empty, after a power cut, was merged, and
nobody could read the table on `main` any more.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from branchlake_dagster.catalog.stored_files import StoredFileDamaged
from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieError, NessieOutcomeUnknown
from branchlake_dagster.nessie.model import Content, ContentKey, ContentsAt, DiffEntry, IcebergTable
from branchlake_dagster.publication.ledger import (
    Candidate,
    NeedsChecks,
    Published,
    Refused,
    Result,
    add_culprits,
    find_origin_commit,
    publication_message,
    publication_properties,
)
from branchlake_dagster.publication.main_log import BaseNotOnMain, MainLog
from branchlake_dagster.publication.rebase_plan import CommitPlan
from branchlake_dagster.publication.replay import TableFormat, TableStates
from branchlake_dagster.runs.leases import lease_key
from branchlake_dagster.wording import CodedReason


class _FileError(BranchlakeError):
    """`file` is the location of the file; None if it is not known."""

    def __init__(self, message: str, *, file: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.file = file


class TableFilesMissing(_FileError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file that a publication needs does not exist; nothing was published."""


class TableFilesDamaged(_FileError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file that a publication needs is empty, truncated or something else; nothing was published."""


class TableFilesUnreadable(_FileError, Transient):  # noqa: N818 - named like the other outcomes
    """The storage did not let files of a table be read or written; nothing was published."""


def find_unreadable_candidates(tables: TableFormat, candidates: Sequence[Candidate]) -> dict[str, Exception]:
    """The error of each candidate, by branch, whose own files cannot be read by everybody.

    Reads the metadata, manifest lists and manifests of the snapshots that a candidate adds to `main`, and
    asks for the size of their data and delete files. The files are on disk afterwards (`file://`).
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
    """The tables that changes put, each with what it was before; a renamed one under its new name."""
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
    """Name the candidate in errors of its files: they must not hold up the others, tick after tick."""
    try:
        yield
    except (OSError, StoredFileDamaged) as error:
        raise _to_file_error(error, candidate, ", ".join(candidate.tables)) from error


def _to_file_error(error: Exception, candidate: Candidate, table: str) -> Exception:
    """The error with its table, branch, run and file; unchanged if files are not its cause."""
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
            f"The storage did not let a file of the table be read or written ({error_name}): {error}.",
            file=error.filename,
            **context,
            hint="Nothing was published; the next ticks try again until the storage answers.",
        )
    else:
        return error
    file_error.__cause__ = error
    return file_error


_MAX_ATTEMPTS = 5


class PublicationContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Others kept publishing into the same tables; nothing was published, and the next tick tries again."""


class Committer:
    """Plans and sends commits; safe to be used by several publishers at once."""

    def __init__(self, client: NessieClient, tables: TableFormat, log: MainLog) -> None:
        self._client = client
        self._tables = tables
        self._log = log

    def publish(
        self, batch: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """CommitPlan and commit until `main` holds still in between; `alive` may object before each commit.

        What is wrong with one candidate is its own result; raised is what concerns all of them.
        """
        keys = _involved_keys(batch)
        for _ in range(_MAX_ATTEMPTS):
            main_contents = self._client.contents_at(MAIN, keys)
            plan, results = self._build_plan(batch, main_contents)
            if not plan.accepted:
                return results
            try:
                alive()
            except BranchlakeError:
                plan.discard()
                raise
            commit_hash = self.send_commit(plan, MAIN)
            if commit_hash is not None:
                published = {
                    candidate.branch: Published(commit_hash, rebased_tables=tables)
                    for candidate, tables in plan.accepted.items()
                }
                return {**results, **published}
        raise PublicationContended(
            f"Main moved {_MAX_ATTEMPTS} times while the publication was planned.",
            table=", ".join(batch[0].tables),
            branch=batch[0].branch,
            run_id=batch[0].run_id,
            hint="Nothing is lost: the next tick of the publication sensor tries again.",
        )

    def plan_for_checks(self, batch: Sequence[Candidate]) -> tuple[CommitPlan, dict[str, Result | Exception]]:
        """A plan of candidates whose checks will be made on the result, and why others are not in it.

        One that only collides with others of the plan is left out without a word: whether those come to
        `main` is not known yet, and it was once refused because of a run that then failed its checks.
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
        """A plan that puts a checked state of all candidates on `main`, whose `changes` it is.

        What keeps one of them out, for which the whole state is no more what was checked; and whether it
        fits: False when `main` has moved under it.
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
        """The error of each candidate, by branch, whose own files cannot be read (see `table_files`)."""
        return find_unreadable_candidates(self._tables, batch)

    def can_read_files(self, changes: Sequence[DiffEntry]) -> bool:
        """Whether all files that changes add to tables can be read."""
        return not any(self._tables.find_read_errors(table_states(changes)))

    def find_outside_merge(self, source: str, *, base: str) -> Published | None:
        """The merge by hand of the state `source`, which was made from `base`; None: there is none."""
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
        """What is on `main` of it already, or cannot come there. `main_hash` is the hash that the plan will expect.

        Looking at exactly that hash closes the race: whatever is published after it changes keys of the
        plan, which is then refused and made again.
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
        """Add a candidate to a plan; why it is not in, else None."""
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
            raise  # the server, which all of them need
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one must not hold up the others
            return error
        return obstacle

    def _load_read_set(self, candidate: Candidate) -> Mapping[ContentKey, Content]:
        """The read set as it was at the base."""
        if not candidate.read_set:
            return {}
        return self._client.contents(f"@{candidate.base_hash}", sorted(candidate.read_set))

    def send_commit(
        self, plan: CommitPlan, branch: str, extra_properties: Mapping[str, str] = MappingProxyType({})
    ) -> str | None:
        """Commit the plan to `branch`; None when one of its keys has changed, or nobody can say."""
        entries = [candidate.to_publication() for candidate in plan.accepted]
        with wrap_file_errors(next(iter(plan.accepted))):
            operations = plan.build_operations()
        try:
            return self._client.commit(
                branch,
                expected_hash=plan.main_hash,
                operations=operations,
                message=publication_message(entries),
                properties={**publication_properties(entries), **plan.fencing_tokens(), **extra_properties},
            ).hash
        except NessieOutcomeUnknown:
            # The files stay: the commit may be there, or still come. The ledger tells at the next attempt;
            # should it come after that, the keys have changed under it.
            return None
        except NessieConflict:
            plan.discard()
            return None
        except Exception:
            plan.discard()  # it certainly did not happen
            raise


def _involved_keys(candidates: Iterable[Candidate]) -> list[ContentKey]:
    """All keys that a plan must look at: written, read, and the namespaces they live in."""
    candidate_keys = {
        key
        for candidate in candidates
        for key in (*candidate.keys, *(candidate.read_set or ()), *map(lease_key, candidate.leases))
    }
    return sorted(candidate_keys | {ContentKey(key.parent) for key in candidate_keys if key.parent})
