"""The ledger of publications: `main`'s log in Nessie, and nothing else.

A publication's commit says who, what and from where in its properties (prefix `branchlake.`). One commit
may carry several publications; then each property is a list, separated by commas (`tables`, itself such a
list, by semicolons).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import NAMESPACE_URL, uuid5

from branchlake_dagster.branching.table.provenance import PUBLICATION_ID
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import LogEntry

RUN_ID = "branchlake.run_id"
ROOT_RUN_ID = "branchlake.root_run_id"
VERDICT = "branchlake.verdict"
BASE_HASH = "branchlake.base_hash"
BRANCH = "branchlake.branch"
TABLES = "branchlake.tables"

_PUBLICATIONS = f"'{PUBLICATION_ID}' in commit.properties"


def publication_id(branch: str) -> str:
    """The id of a branch's publication: one branch is published at most once, whatever is tried again."""
    return str(uuid5(NAMESPACE_URL, f"branchlake:{branch}"))


@dataclass(frozen=True)
class Publication:
    """One run's branch made visible on `main`. `hash` is the commit on `main` (empty until there is one)."""

    branch: str
    run_id: str
    root_run_id: str
    verdict: str
    base_hash: str
    tables: tuple[str, ...]
    hash: str = ""
    time: datetime | None = None

    @property
    def publication_id(self) -> str:
        """Derived from the branch."""
        return publication_id(self.branch)


def properties(publications: Sequence[Publication]) -> dict[str, str]:
    """The properties of a commit that carries these publications."""
    return {
        PUBLICATION_ID: ",".join(one.publication_id for one in publications),
        RUN_ID: ",".join(one.run_id for one in publications),
        ROOT_RUN_ID: ",".join(one.root_run_id for one in publications),
        VERDICT: ",".join(one.verdict for one in publications),
        BASE_HASH: ",".join(one.base_hash for one in publications),
        BRANCH: ",".join(one.branch for one in publications),
        TABLES: ";".join(",".join(one.tables) for one in publications),
    }


def message(publications: Sequence[Publication]) -> str:
    """The commit message of these publications."""
    tables = ", ".join(dict.fromkeys(table for one in publications for table in one.tables))
    runs = ", ".join(one.run_id for one in publications)
    return (
        f"Publish {tables} from run {runs}"
        if len(publications) == 1
        else f"Publish {tables} from runs {runs}"
    )


def publications_in(entry: LogEntry) -> list[Publication]:
    """The publications of one commit; none for a commit that is no publication of ours."""
    found = entry.commit.properties
    if PUBLICATION_ID not in found:
        return []
    names = (BRANCH, RUN_ID, ROOT_RUN_ID, VERDICT, BASE_HASH)
    columns = [found.get(name, "").split(",") for name in names]
    tables = (tuple(filter(None, listed.split(","))) for listed in found.get(TABLES, "").split(";"))
    return [
        Publication(branch, run, root, verdict, base, changed, entry.commit.hash, entry.commit.commit_time)
        for branch, run, root, verdict, base, changed in zip(*columns, tables, strict=False)
    ]


def publications(client: NessieClient, *, limit: int | None = None) -> Iterator[Publication]:
    """Publications on `main`, newest first, of at most `limit` commits."""
    for entry in client.log(MAIN, filter=_PUBLICATIONS, limit=limit):
        yield from publications_in(entry)
