"""Find a publication on `main` by the name that a user gives: a run, a publication or a commit."""

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.publication.ledger import Publication, list_undone_runs, parse_publications
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.wording import format_names

_SHORTEST_NAME = 4
_MAX_NAMED = 10


class PublicationNotFound(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The given text does not name one publication on `main`: it fits none or several, or is too short."""


class UndoNotReversible(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The named commit is itself the undo of publications, which cannot be undone.

    Attributes:
        commit: The hash of the undo's commit on `main`.
        run_ids: The runs whose publications it undid.
    """

    def __init__(self, message: str, *, commit: str, run_ids: tuple[str, ...], hint: str) -> None:
        super().__init__(message, branch=MAIN, hint=hint)
        self.commit = commit
        self.run_ids = run_ids


class PublicationDamaged(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The record of the named publication on `main` is damaged, so its changes are not known.

    Attributes:
        commit: The hash of the publication's commit on `main`.
        properties: The properties of that commit that cannot be read.
    """

    def __init__(self, message: str, *, commit: str, properties: tuple[str, ...], hint: str) -> None:
        super().__init__(message, branch=MAIN, hint=hint)
        self.commit = commit
        self.properties = properties


def find_publication(client: NessieClient, name: str) -> Publication:
    """Find a publication by the first four or more characters of its run id, publication id or commit.

    A complete commit hash or publication id ends the search. Otherwise the whole log of `main` is read, 7,000
    commits a second, because another publication may match too. Raises PublicationNotFound if no publication
    matches, if several match, or if the commit has several publications; UndoNotReversible if only the commit
    of an undo matches; PublicationDamaged if the record of the publication cannot be read whole.
    """
    if len(name) < _SHORTEST_NAME:
        raise PublicationNotFound(
            f"{name!r} is too short to name a publication.",
            hint=f"Write at least {_SHORTEST_NAME} characters of the run's id or of the commit.",
        )
    matches: list[Publication] = []
    undo_entries: list[LogEntry] = []
    for entry in client.log(MAIN):
        publications = parse_publications(entry)
        if LakeProperty.UNDONE_PUBLICATIONS in entry.commit.properties and entry.commit.hash.startswith(name):
            undo_entries.append(entry)
            if entry.commit.hash == name:
                raise _not_reversible_error(entry)
        if publications and entry.commit.hash.startswith(name):
            if len(publications) > 1:
                runs = ", ".join(publication.run_id for publication in publications)
                raise PublicationNotFound(
                    f"The commit {name} has {len(publications)} publications.",
                    hint=f"Name one of its runs: {runs}.",
                )
            matches += publications
        else:
            matches += [
                publication
                for publication in publications
                if publication.run_id.startswith(name) or publication.publication_id.startswith(name)
            ]
        if matches and name in (matches[-1].publication_id, matches[-1].hash):
            return _require_intact(matches[-1])
    if not matches and len(undo_entries) == 1:
        raise _not_reversible_error(undo_entries[0])
    if not matches and not undo_entries:
        raise PublicationNotFound(
            f"Main has no publication of a run, and no publication or commit, that begins with {name!r}.",
            hint="List the newest publications: branchlake status.",
        )
    if len(matches) + len(undo_entries) > 1:
        hashes = [publication.hash for publication in matches]
        hashes += [entry.commit.hash for entry in undo_entries]
        commits = ", ".join(commit[:16] for commit in hashes[:_MAX_NAMED])
        raise PublicationNotFound(
            f"{len(hashes)} publications or undos on main have the name {name!r}.",
            hint=f"Name the publication by its commit. The newest ones are {commits}.",
        )
    return _require_intact(matches[0])


def _require_intact(publication: Publication) -> Publication:
    """Return the publication. Raises PublicationDamaged if its record cannot be read whole."""
    if publication.damaged_properties:
        raise PublicationDamaged(
            f"The record of the publication in commit {publication.hash} is damaged, so it cannot be undone."
            f" Unreadable properties: {', '.join(publication.damaged_properties)}.",
            commit=publication.hash,
            properties=publication.damaged_properties,
            hint="Compare main before and after the commit in Nessie, and correct the tables by a new run.",
        )
    return publication


def _not_reversible_error(entry: LogEntry) -> UndoNotReversible:
    run_ids = tuple(list_undone_runs(entry))
    return UndoNotReversible(
        f"The commit {entry.commit.hash} is the undo of {format_names('run', run_ids)}."
        " An undo cannot be undone.",
        commit=entry.commit.hash,
        run_ids=run_ids,
        hint=f"Nothing was changed. To have the changes again, launch {format_names('run', run_ids)} again.",
    )
