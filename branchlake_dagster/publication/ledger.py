"""The ledger of publications, which is `main`'s log in Nessie, with the publisher's candidates and answers.

The properties of a publication's commit (prefix `branchlake.`) record run, branch, base, verdict and tables.
If one commit carries several publications, each property is a list separated by commas. The property `tables`
is itself such a list, so its lists are separated by semicolons.
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
from branchlake_dagster.wording import CodedReason, format_names

_PUBLICATIONS = f"'{LakeProperty.PUBLICATION_ID}' in commit.properties"


def publication_id(branch: str) -> str:
    """Return the id of a branch's publication.

    It depends only on the branch name, because a branch is published at most once.
    """
    return str(uuid5(NAMESPACE_URL, f"branchlake:{branch}"))


@dataclass(frozen=True)
class Publication:
    """One run's branch made visible on `main`. `hash` is the commit on `main` (empty until it exists)."""

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
        """The id, derived from the branch name."""
        return publication_id(self.branch)


def publication_properties(publications: Sequence[Publication]) -> dict[str, str]:
    """Return the properties of a commit that carries these publications."""
    return {
        LakeProperty.PUBLICATION_ID: ",".join(publication.publication_id for publication in publications),
        LakeProperty.RUN_ID: ",".join(publication.run_id for publication in publications),
        LakeProperty.ROOT_RUN_ID: ",".join(publication.root_run_id for publication in publications),
        LakeProperty.VERDICT: ",".join(publication.verdict for publication in publications),
        LakeProperty.BASE_HASH: ",".join(publication.base_hash for publication in publications),
        LakeProperty.BRANCH: ",".join(publication.branch for publication in publications),
        LakeProperty.TABLES: ";".join(",".join(publication.tables) for publication in publications),
    }


def publication_message(publications: Sequence[Publication]) -> str:
    """Return the commit message for these publications."""
    tables = ", ".join(dict.fromkeys(table for publication in publications for table in publication.tables))
    runs = ", ".join(publication.run_id for publication in publications)
    return (
        f"Publish {tables} from run {runs}"
        if len(publications) == 1
        else f"Publish {tables} from runs {runs}"
    )


def parse_publications(entry: LogEntry) -> list[Publication]:
    """Return the publications of one commit; none if branchlake did not publish the commit."""
    commit_properties = entry.commit.properties
    if LakeProperty.PUBLICATION_ID not in commit_properties:
        return []
    names = (
        LakeProperty.BRANCH,
        LakeProperty.RUN_ID,
        LakeProperty.ROOT_RUN_ID,
        LakeProperty.VERDICT,
        LakeProperty.BASE_HASH,
    )
    value_lists = [commit_properties.get(name, "").split(",") for name in names]
    tables = (
        tuple(filter(None, table_list.split(",")))
        for table_list in commit_properties.get(LakeProperty.TABLES, "").split(";")
    )
    return [
        Publication(
            branch, run, root, verdict, base, changed_tables, entry.commit.hash, entry.commit.commit_time
        )
        for branch, run, root, verdict, base, changed_tables in zip(*value_lists, tables, strict=False)
    ]


def iter_publications(client: NessieClient, *, limit: int | None = None) -> Iterator[Publication]:
    """Yield publications on `main`, newest first, of at most `limit` commits."""
    for entry in client.log(MAIN, filter=_PUBLICATIONS, limit=limit):
        yield from parse_publications(entry)


@dataclass(frozen=True)
class Candidate:
    """A run's branch to be published: its changes between `base_hash` and `head_hash`.

    `changes` is that difference. `read_set` has the tables that a serializable run has read; None under
    snapshot isolation. `fully_checked_tables` are tables with a check that reads all rows; these checks must
    run again if rows of other runs were published meanwhile. `leases` are the names whose holder the run must
    be when it is published.
    """

    branch: str
    head_hash: str
    base_hash: str
    run_id: str
    root_run_id: str
    verdict: str
    changes: tuple[DiffEntry, ...]
    read_set: frozenset[ContentKey] | None = None
    fully_checked_tables: frozenset[ContentKey] = frozenset()
    leases: frozenset[str] = frozenset()

    @property
    def tables(self) -> tuple[str, ...]:
        """The changed contents by dotted name: tables, views, functions."""
        return changed_tables(self.changes)

    @property
    def keys(self) -> frozenset[ContentKey]:
        """All changed keys, namespaces included."""
        return frozenset(entry.key for entry in self.changes)

    @property
    def is_serializable(self) -> bool:
        """Whether the tables that the run has read must be unchanged."""
        return self.read_set is not None

    @property
    def has_renames(self) -> bool:
        """Whether a content has moved to another key."""
        removed_ids = {
            entry.from_content.content_id
            for entry in self.changes
            if entry.from_content and not entry.to_content
        }
        return any(
            entry.to_content.content_id in removed_ids
            for entry in self.changes
            if entry.to_content and not entry.from_content
        )

    def to_publication(self) -> Publication:
        """Return the candidate's entry in the ledger."""
        return Publication(
            self.branch, self.run_id, self.root_run_id, self.verdict, self.base_hash, self.tables
        )


@dataclass(frozen=True)
class Published:
    """The candidate is on `main`, in the commit `hash`.

    `is_new` is False if an earlier call published it. `merged_outside` is True if the rows came to `main`
    outside branchlake, so the ledger has no entry. `rebased_tables` names the tables whose changes were
    replayed.
    """

    hash: str
    is_new: bool = True
    rebased_tables: tuple[str, ...] = ()
    merged_outside: bool = False


@dataclass(frozen=True)
class Refused:
    """`main` has changed in conflict with this candidate; none of its changes were published.

    `conflicts` has the reason for each table, `partitions` the overlapping partitions, `runs` the
    publications that it conflicts with. `only_expired`: the candidate would not conflict if it had not
    expired snapshots of a table.
    """

    conflicts: Mapping[str, CodedReason]
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    only_expired: bool = False

    @property
    def codes(self) -> tuple[str, ...]:
        """The causes, each once."""
        return tuple(dict.fromkeys(reason.code for reason in self.conflicts.values()))

    def format_reason(self) -> str:
        """Return a sentence with the tables, the partitions, and the runs that changed them meanwhile."""
        tables = "; ".join(f"{table}: {reason}" for table, reason in self.conflicts.items())
        partition_note = f" ({format_names('partition', self.partitions)})" if self.partitions else ""
        run_note = f", published by {format_names('run', self.runs)}" if self.runs else ""
        return f"main changed meanwhile. {tables}{partition_note}{run_note}"


@dataclass(frozen=True)
class NeedsChecks:
    """The candidate can be rebased, but checks on these whole tables must first pass on the result."""

    tables: tuple[str, ...]


Result = Published | Refused | NeedsChecks


def load_write_set(client: NessieClient, base_hash: str, ref: Reference) -> tuple[DiffEntry, ...]:
    """Load the differences between the base and the branch."""
    return () if ref.hash == base_hash else tuple(client.diff(f"@{base_hash}", ref.pinned_ref))


def changed_tables(changes: tuple[DiffEntry, ...]) -> tuple[str, ...]:
    """Return the dotted names of changed tables, views and functions; namespaces are left out."""
    return tuple(sorted(entry.key.name for entry in changes if not is_namespace_change(entry)))


def is_namespace_change(entry: DiffEntry) -> bool:
    """Return whether an entry creates, changes or removes only a namespace."""
    sides = (entry.from_content, entry.to_content)
    return all(side is None or isinstance(side, Namespace) for side in sides)


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
