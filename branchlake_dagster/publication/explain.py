"""Who did what to a table on `main`, from its log: what a refusal tells when the files do not."""

from __future__ import annotations

from dataclasses import replace

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import ContentKey, Delete, IcebergTable, LogEntry, Put
from branchlake_dagster.publication.candidate import Candidate, Refused
from branchlake_dagster.publication.ledger import publications_in

OUTSIDE = "somebody outside branchlake"


def explained(client: NessieClient, candidate: Candidate, refused: Refused, *, at: str) -> Refused:
    """`refused` with the publications it collided with, and the new names of renamed tables.

    `at`: the hash of `main` it was refused at. Reads the log since the candidate's base, once.
    """
    before = {entry.key: entry.from_content for entry in candidate.changes}
    wanted = {key.name: key for key in (*before, *(candidate.read_set or ()))}
    keys = {wanted[name] for name in refused.conflicts if name in wanted}
    entries = list(client.log(f"{MAIN}@{at}", since=candidate.base_hash, fetch_operations=True))
    conflicts = dict(refused.conflicts)
    runs = list(refused.runs)
    for entry in entries:
        for key in [key for key in keys if _touches(entry, key)]:
            if not refused.runs:
                runs += [one.run_id for one in publications_in(entry)] or [OUTSIDE]
            old = before.get(key)
            if isinstance(old, IcebergTable) and (name := _renamed(entry, key, old)):
                conflicts[key.name] = f"it was renamed to {name}"
    return replace(refused, conflicts=conflicts, runs=tuple(dict.fromkeys(runs)))


def _touches(entry: LogEntry, key: ContentKey) -> bool:
    return any(isinstance(done, Put | Delete) and done.key == key for done in entry.operations)


def _renamed(entry: LogEntry, key: ContentKey, old: IcebergTable) -> str | None:
    """The key under which the same commit put the content that it deleted here."""
    if not any(isinstance(done, Delete) and done.key == key for done in entry.operations):
        return None
    puts = (done for done in entry.operations if isinstance(done, Put))
    return next((done.key.name for done in puts if done.content.content_id == old.content_id), None)
