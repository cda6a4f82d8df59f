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
    brought_by,
    message,
    properties,
    with_culprits,
)
from branchlake_dagster.publication.main_log import BaseNotOnMain, MainLog
from branchlake_dagster.publication.rebase_plan import CommitPlan
from branchlake_dagster.publication.replay import Tables, TableStates
from branchlake_dagster.runs.leases import lease_key
from branchlake_dagster.wording import Reason


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


def unreadable_candidates(tables: Tables, candidates: Sequence[Candidate]) -> dict[str, Exception]:
    """The error of each candidate, by branch, whose own files cannot be read by everybody.

    Reads the metadata, manifest lists and manifests of the snapshots that a candidate adds to `main`, and
    asks for the size of their data and delete files. The files are on disk afterwards (`file://`).
    """
    states = [(candidate, state) for candidate in candidates for state in table_states(candidate.changes)]
    errors: dict[str, Exception] = {}
    for (candidate, state), error in zip(
        states, tables.read_errors([state for _, state in states]), strict=True
    ):
        if error is not None and candidate.branch not in errors:
            errors[candidate.branch] = _typed(error, candidate, state[0].name)
    return errors


def table_states(changes: Sequence[DiffEntry]) -> list[TableStates]:
    """The tables that changes put, each with what it was before; a renamed one under its new name."""
    old = {
        entry.from_content.content_id: entry.from_content
        for entry in changes
        if isinstance(entry.from_content, IcebergTable)
    }
    return [
        (entry.key, old.get(entry.to_content.content_id), entry.to_content)
        for entry in changes
        if isinstance(entry.to_content, IcebergTable)
    ]


@contextmanager
def files_of(candidate: Candidate) -> Iterator[None]:
    """Name the candidate in errors of its files: they must not hold up the others, tick after tick."""
    try:
        yield
    except (OSError, StoredFileDamaged) as error:
        raise _typed(error, candidate, ", ".join(candidate.tables)) from error


def _typed(error: Exception, candidate: Candidate, table: str) -> Exception:
    """The error with its table, branch, run and file; unchanged if files are not its cause."""
    where = {"table": table, "branch": candidate.branch, "run_id": candidate.run_id}
    again = "Nothing was published. Restore the file, or launch the run again."
    typed: BranchlakeError
    if isinstance(error, StoredFileDamaged):
        typed = TableFilesDamaged(error.message, file=error.file, **where, hint=again)
    elif isinstance(error, FileNotFoundError):
        text = f"A file of the table does not exist: {error.filename or error}."
        typed = TableFilesMissing(text, file=error.filename, **where, hint=again)
    elif isinstance(error, OSError):
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        typed = TableFilesUnreadable(
            f"The storage did not let a file of the table be read or written ({name}): {error}.",
            file=error.filename,
            **where,
            hint="Nothing was published; the next ticks try again until the storage answers.",
        )
    else:
        return error
    typed.__cause__ = error
    return typed


_ATTEMPTS = 5


class PublicationContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Others kept publishing into the same tables; nothing was published, and the next tick tries again."""


class Committer:
    """Plans and sends commits; safe to be used by several publishers at once."""

    def __init__(self, client: NessieClient, tables: Tables, log: MainLog) -> None:
        self._client = client
        self._tables = tables
        self._log = log

    def publish(
        self, batch: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """CommitPlan and commit until `main` holds still in between; `alive` may object before each commit.

        What is wrong with one candidate is its own result; raised is what concerns all of them.
        """
        keys = _involved(batch)
        for _ in range(_ATTEMPTS):
            seen = self._client.contents_at(MAIN, keys)
            plan, results = self._planned(batch, seen)
            if not plan.accepted:
                return results
            try:
                alive()
            except BranchlakeError:
                plan.discard()
                raise
            hash_ = self.send(plan, MAIN)
            if hash_ is not None:
                done = {one.branch: Published(hash_, rebased=tables) for one, tables in plan.accepted.items()}
                return {**results, **done}
        raise PublicationContended(
            f"Main moved {_ATTEMPTS} times while the publication was planned.",
            table=", ".join(batch[0].tables),
            branch=batch[0].branch,
            run_id=batch[0].run_id,
            hint="Nothing is lost: the next tick of the publication sensor tries again.",
        )

    def plan_checked(self, batch: Sequence[Candidate]) -> tuple[CommitPlan, dict[str, Result | Exception]]:
        """A plan of candidates whose checks will be made on the result, and why others are not in it.

        One that only collides with others of the plan is left out without a word: whether those come to
        `main` is not known yet, and it was once refused because of a run that then failed its checks.
        """
        seen = self._client.contents_at(MAIN, _involved(batch))
        plan, results = self._planned(batch, seen, checked=True)
        for one in batch:
            if isinstance(results.get(one.branch), Refused) and plan.accepted:
                alone, _ = self._planned([one], seen, checked=True)
                if alone.accepted:
                    del results[one.branch]
                alone.discard()
        return plan, results

    def plan_state(
        self, batch: Sequence[Candidate], changes: Sequence[DiffEntry]
    ) -> tuple[CommitPlan, dict[str, Result | Exception], bool]:
        """A plan that puts a checked state of all candidates on `main`, whose `changes` it is.

        What keeps one of them out, for which the whole state is no more what was checked; and whether it
        fits: False when `main` has moved under it.
        """
        extra = [entry.key for entry in changes]
        seen = self._client.contents_at(MAIN, sorted({*_involved(batch), *extra}))
        plan = CommitPlan(seen.reference.hash, seen.contents, self._tables)
        results: dict[str, Result | Exception] = {}
        for one in batch:
            if done := self._landed(one, plan.onto):
                results[one.branch] = done
            elif stopped := plan.add_reader(one, self._reads(one)):
                results[one.branch] = with_culprits(self._client, one, stopped, at=plan.onto)
        with files_of(batch[0]):
            fits = not results and plan.add_state(changes)
        return plan, results, fits

    def unreadable(self, batch: Sequence[Candidate]) -> dict[str, Exception]:
        """The error of each candidate, by branch, whose own files cannot be read (see `table_files`)."""
        return unreadable_candidates(self._tables, batch)

    def readable(self, changes: Sequence[DiffEntry]) -> bool:
        """Whether all files that changes add to tables can be read."""
        return not any(self._tables.read_errors(table_states(changes)))

    def merged(self, source: str, *, base: str) -> Published | None:
        """The merge by hand of the state `source`, which was made from `base`; None: there is none."""
        at = self._client.reference(MAIN).hash
        try:
            merges = self._log.merges(self._client, base=base, at=at)
        except BaseNotOnMain:
            return None
        return Published(merges[source], now=False, by_hand=True) if source in merges else None

    def _planned(
        self, batch: Iterable[Candidate], seen: ContentsAt, *, checked: bool = False
    ) -> tuple[CommitPlan, dict[str, Result | Exception]]:
        plan = CommitPlan(seen.reference.hash, seen.contents, self._tables)
        results: dict[str, Result | Exception] = {}
        for candidate in batch:
            stopped = self._landed(candidate, plan.onto) or self._add(plan, candidate, checked=checked)
            if stopped is not None:
                results[candidate.branch] = stopped
        return plan, results

    def _landed(self, candidate: Candidate, at: str) -> Published | Refused | None:
        """What is on `main` of it already, or cannot come there. `at` is the hash that the plan will expect.

        Looking at exactly that hash closes the race: whatever is published after it changes keys of the
        plan, which is then refused and made again.
        """
        try:
            return self._log.already_published(
                self._client, candidate.branch, base=candidate.base_hash, head=candidate.head_hash, at=at
            )
        except BaseNotOnMain as gone:
            return Refused(dict.fromkeys(candidate.tables, Reason(gone.message, "base_not_on_main")))

    def _add(
        self, plan: CommitPlan, candidate: Candidate, *, checked: bool
    ) -> Published | Refused | NeedsChecks | Exception | None:
        """Add a candidate to a plan; why it is not in, else None."""
        try:
            with files_of(candidate):
                stopped = plan.add(candidate, self._reads(candidate), checked=checked)
            if isinstance(stopped, Refused):
                return with_culprits(self._client, candidate, stopped, at=plan.onto)
            if isinstance(stopped, Published):
                return replace(
                    stopped, hash=brought_by(self._client, candidate, at=plan.onto) or stopped.hash
                )
        except NessieError:
            raise  # the server, which all of them need
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one must not hold up the others
            return error
        return stopped

    def _reads(self, candidate: Candidate) -> Mapping[ContentKey, Content]:
        """The read set as it was at the base."""
        if not candidate.read_set:
            return {}
        return self._client.contents(f"@{candidate.base_hash}", sorted(candidate.read_set))

    def send(
        self, plan: CommitPlan, branch: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> str | None:
        """Commit the plan to `branch`; None when one of its keys has changed, or nobody can say."""
        entries = [one.publication() for one in plan.accepted]
        with files_of(next(iter(plan.accepted))):
            operations = plan.operations()
        try:
            return self._client.commit(
                branch,
                expected_hash=plan.onto,
                operations=operations,
                message=message(entries),
                properties={**properties(entries), **plan.tokens(), **more},
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


def _involved(candidates: Iterable[Candidate]) -> list[ContentKey]:
    """All keys that a plan must look at: written, read, and the namespaces they live in."""
    own = {
        key for one in candidates for key in (*one.keys, *(one.read_set or ()), *map(lease_key, one.leases))
    }
    return sorted(own | {ContentKey(key.parent) for key in own if key.parent})
