"""The ledger of publications: candidates, the publisher's answers, and the commits on `main`.

The ledger of publications: `main`'s log in Nessie, and nothing else.

A publication's commit says who, what and from where in its properties (prefix `branchlake.`). One commit
may carry several publications; then each property is a list, separated by commas (`tables`, itself such a
list, by semicolons).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from uuid import NAMESPACE_URL, uuid5

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import (
    ContentKey,
    Delete,
    DiffEntry,
    IcebergTable,
    LogEntry,
    Namespace,
    Put,
    Reference,
)
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.wording import Reason, named

_PUBLICATIONS = f"'{LakeProperty.PUBLICATION_ID}' in commit.properties"


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
        LakeProperty.PUBLICATION_ID: ",".join(one.publication_id for one in publications),
        LakeProperty.RUN_ID: ",".join(one.run_id for one in publications),
        LakeProperty.ROOT_RUN_ID: ",".join(one.root_run_id for one in publications),
        LakeProperty.VERDICT: ",".join(one.verdict for one in publications),
        LakeProperty.BASE_HASH: ",".join(one.base_hash for one in publications),
        LakeProperty.BRANCH: ",".join(one.branch for one in publications),
        LakeProperty.TABLES: ";".join(",".join(one.tables) for one in publications),
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
    if LakeProperty.PUBLICATION_ID not in found:
        return []
    names = (
        LakeProperty.BRANCH,
        LakeProperty.RUN_ID,
        LakeProperty.ROOT_RUN_ID,
        LakeProperty.VERDICT,
        LakeProperty.BASE_HASH,
    )
    columns = [found.get(name, "").split(",") for name in names]
    tables = (
        tuple(filter(None, listed.split(","))) for listed in found.get(LakeProperty.TABLES, "").split(";")
    )
    return [
        Publication(branch, run, root, verdict, base, changed, entry.commit.hash, entry.commit.commit_time)
        for branch, run, root, verdict, base, changed in zip(*columns, tables, strict=False)
    ]


def publications(client: NessieClient, *, limit: int | None = None) -> Iterator[Publication]:
    """Publications on `main`, newest first, of at most `limit` commits."""
    for entry in client.log(MAIN, filter=_PUBLICATIONS, limit=limit):
        yield from publications_in(entry)


@dataclass(frozen=True)
class Candidate:
    """A run's branch as it shall be published: what differs between `base_hash` and `head_hash`.

    `changes` is that difference. `read_set` are the tables a serializable run has read; None for a run
    under snapshot isolation. `table_checks` are the tables whose checks speak of all their rows and so
    must be found again when rows of other runs have come in between. `leases` are the names of which it must
    be the holder when it is published.
    """

    branch: str
    head_hash: str
    base_hash: str
    run_id: str
    root_run_id: str
    verdict: str
    changes: tuple[DiffEntry, ...]
    read_set: frozenset[ContentKey] | None = None
    table_checks: frozenset[ContentKey] = frozenset()
    leases: frozenset[str] = frozenset()

    @property
    def tables(self) -> tuple[str, ...]:
        """The write set by dotted name: tables, views, functions."""
        return tables_in(self.changes)

    @property
    def keys(self) -> frozenset[ContentKey]:
        """Everything it changes, namespaces included."""
        return frozenset(entry.key for entry in self.changes)

    @property
    def serializable(self) -> bool:
        """Whether what it read must still hold."""
        return self.read_set is not None

    @property
    def renames(self) -> bool:
        """Whether a content has moved to another key."""
        gone = {
            entry.from_content.content_id
            for entry in self.changes
            if entry.from_content and not entry.to_content
        }
        return any(
            entry.to_content.content_id in gone
            for entry in self.changes
            if entry.to_content and not entry.from_content
        )

    def publication(self) -> Publication:
        """Its entry in the ledger."""
        return Publication(
            self.branch, self.run_id, self.root_run_id, self.verdict, self.base_hash, self.tables
        )


@dataclass(frozen=True)
class Published:
    """The candidate is on `main`, in the commit `hash`.

    `now` is False when an earlier call did it, `by_hand` True when it was somebody else's: the ledger has
    nothing of it, and its rows are there. `rebased` names the tables whose changes were replayed.
    """

    hash: str
    now: bool = True
    rebased: tuple[str, ...] = ()
    by_hand: bool = False


@dataclass(frozen=True)
class Refused:
    """`main` has changed in a way that this candidate cannot follow; nothing of it was published.

    `conflicts` are the tables with the reason for each, `partitions` those that overlap, `runs` the
    publications it collided with. `only_expired`: it could follow, had it not taken snapshots out of a table.
    """

    conflicts: Mapping[str, Reason]
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    only_expired: bool = False

    @property
    def codes(self) -> tuple[str, ...]:
        """The causes, each once."""
        return tuple(dict.fromkeys(why.code for why in self.conflicts.values()))

    def reason(self) -> str:
        """The tables, partitions and who changed them meanwhile."""
        tables = "; ".join(f"{table}: {why}" for table, why in self.conflicts.items())
        where = f" ({named('partition', self.partitions)})" if self.partitions else ""
        who = f", published by {named('run', self.runs)}" if self.runs else ""
        return f"main changed meanwhile. {tables}{where}{who}"


@dataclass(frozen=True)
class NeedsChecks:
    """It can be rebased, but checks on these whole tables must pass on the result before."""

    tables: tuple[str, ...]


Result = Published | Refused | NeedsChecks


def write_set(client: NessieClient, base_hash: str, ref: Reference) -> tuple[DiffEntry, ...]:
    """What differs between the base and the branch."""
    return () if ref.hash == base_hash else tuple(client.diff(f"@{base_hash}", ref.pinned))


def tables_in(changes: tuple[DiffEntry, ...]) -> tuple[str, ...]:
    """What the changes change by dotted name: tables, views, functions; everything but namespaces."""
    return tuple(sorted(entry.key.name for entry in changes if not only_namespaces(entry)))


def only_namespaces(entry: DiffEntry) -> bool:
    """Whether a change makes, changes or removes a namespace and nothing else."""
    sides = (entry.from_content, entry.to_content)
    return all(side is None or isinstance(side, Namespace) for side in sides)


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
