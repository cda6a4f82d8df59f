"""Find a publication on `main` by the name that a user gives: a run, a publication or a commit."""

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.ledger import Publication, parse_publications

_SHORTEST_NAME = 4
_MAX_NAMED = 10


class PublicationNotFound(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` has no publication with this name, or several."""


def find_publication(client: NessieClient, name: str) -> Publication:
    """Find a publication by the first four or more characters of its run id, publication id or commit.

    A complete commit hash or publication id ends the search. Otherwise the whole log of `main` is read, 7,000
    commits a second, because another publication may match too. Raises PublicationNotFound if no publication
    matches, if several match, or if the commit has several publications.
    """
    if len(name) < _SHORTEST_NAME:
        raise PublicationNotFound(
            f"{name!r} is too short to name a publication.",
            hint=f"Write at least {_SHORTEST_NAME} characters of the run's id or of the commit.",
        )
    matches: list[Publication] = []
    for entry in client.log(MAIN):
        publications = parse_publications(entry)
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
            return matches[-1]
    if not matches:
        raise PublicationNotFound(
            f"Main has no publication of a run, and no publication or commit, that begins with {name!r}.",
            hint="List the newest publications: branchlake status.",
        )
    if len(matches) > 1:
        commits = ", ".join(publication.hash[:16] for publication in matches[:_MAX_NAMED])
        raise PublicationNotFound(
            f"{len(matches)} publications on main have the name {name!r}.",
            hint=f"Name the publication by its commit. The newest ones are {commits}.",
        )
    return matches[0]
