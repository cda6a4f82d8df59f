"""Who did what to a table on `main`, from its log: what a refusal tells when the files do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, Delete, IcebergTable, LogEntry, Put
from branchlake_dagster.publication.ledger.candidate import Candidate, Refused
from branchlake_dagster.publication.ledger.publications import publications_in
from branchlake_dagster.wording import Reason

_MOST = 2000
"""Commits that are looked through, the newest first, for a name to tell."""

OUTSIDE = "somebody outside branchlake"


def with_culprits(client: NessieClient, candidate: Candidate, refused: Refused, *, at: str) -> Refused:
    """`refused` with the publications it collided with, and the new names of renamed tables.

    `at`: the hash of `main` it was refused at. Reads the log since the candidate's base, once.
    """
    before = {entry.key: entry.from_content for entry in candidate.changes}
    wanted = {key.name: key for key in (*before, *(candidate.read_set or ()))}
    keys = {wanted[name] for name in refused.conflicts if name in wanted}
    entries = list(_log(client, candidate, at))
    conflicts = dict(refused.conflicts)
    runs = list(refused.runs)
    for entry in entries:
        for key in [key for key in keys if _touches(entry, key)]:
            if not refused.runs:
                runs += [one.run_id for one in publications_in(entry)] or [OUTSIDE]
            old = before.get(key)
            if isinstance(old, IcebergTable) and (name := _renamed(entry, key, old)):
                conflicts[key.name] = Reason(f"it was renamed to {name}", "renamed")
    return replace(refused, conflicts=conflicts, runs=tuple(dict.fromkeys(runs)))


def brought_by(client: NessieClient, candidate: Candidate, *, at: str) -> str | None:
    """The first commit on `main` that has the candidate's last table as its branch does; None: unknown."""
    last = next(e for e in reversed(candidate.changes) if isinstance(e.to_content, IcebergTable))
    found = None
    for entry in _log(client, candidate, at):
        if any(
            isinstance(one, Put) and one.key == last.key and one.content == last.to_content
            for one in entry.operations
        ):
            found = entry.commit.hash
    return found


def _log(client: NessieClient, candidate: Candidate, at: str) -> Iterator[LogEntry]:
    """The commits since the candidate's base, but never more than a person would wait for."""
    return islice(client.log(f"@{at}", since=candidate.base_hash, fetch_operations=True), _MOST)


def _touches(entry: LogEntry, key: ContentKey) -> bool:
    return any(isinstance(done, Put | Delete) and done.key == key for done in entry.operations)


def _renamed(entry: LogEntry, key: ContentKey, old: IcebergTable) -> str | None:
    """The key under which the same commit put the content that it deleted here."""
    if not any(isinstance(done, Delete) and done.key == key for done in entry.operations):
        return None
    puts = (done for done in entry.operations if isinstance(done, Put))
    return next((done.key.name for done in puts if done.content.content_id == old.content_id), None)
