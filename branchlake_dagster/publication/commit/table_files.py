"""The files that candidates would bring to `main`: opened before they are published, and on disk.

A merge in Nessie opens no file. A run whose metadata file was empty, after a power cut, was merged, and
nobody could read the table on `main` any more.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from branchlake_dagster.catalog.stored_files import StoredFileDamaged
from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.nessie.model import DiffEntry, IcebergTable
from branchlake_dagster.publication.ledger.candidate import Candidate
from branchlake_dagster.publication.rebase.replay import Tables, TableStates


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
