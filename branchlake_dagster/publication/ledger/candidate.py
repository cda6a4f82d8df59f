"""A run's branch that passed the gate, and the answers a publisher may give to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, DiffEntry, Namespace, Reference
from branchlake_dagster.publication.ledger.publications import Publication
from branchlake_dagster.wording import Reason, named


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
