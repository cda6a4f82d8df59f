"""Decides which tables have rows that were computed from undone ones, by following the log of `main`.

A run has read each input as it was at the run's base. So the log is followed in its order, and for each table
the partitions are kept that have such rows, with the commits that changed them. A run whose base has stale
partitions of an input makes the dependent partitions stale. A run that replaces partitions from correct
inputs makes them correct again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.ledger import Publication, list_undone_publications, parse_publications
from branchlake_dagster.undo.result import Undo

Partitions = Set[str | None] | None
"""Partitions of a table; {None} for a table without partitions, None if they are unknown: perhaps all."""


@dataclass(frozen=True)
class LaterPublication:
    """A publication since the oldest undone one, with positions in the log of `main`.

    `position` is the number of its commit, counted from the oldest undone publication, which has 0.
    `base_position` is the number of the commit whose state the run has read; -1 for an older commit.
    """

    publication: Publication
    position: int
    base_position: int = -1


@dataclass(frozen=True)
class LogSinceUndone:
    """The log of `main` since the oldest undone publication.

    `undone` are the undone publications. `later` are all others that are not undone, oldest first.
    `undo_position` is the position of the undo's commit; None before it exists.
    """

    undone: Sequence[LaterPublication]
    later: Sequence[LaterPublication]
    undo_position: int | None = None


class PartitionLookup(Protocol):
    """What must be known of partitions to follow the log. Without Dagster, all answers may be unknown."""

    def load_written(self, publication: Publication, table: str) -> Partitions:
        """Return the partitions of `table` that the publication wrote."""

    def map_downstream(self, input_table: str, partitions: Partitions, table: str) -> Partitions:
        """Return the partitions of `table` that are computed from `partitions` of `input_table`."""

    def overwrites_partitions(self, table: str) -> bool:
        """Return whether a run of the table removes all earlier rows of the partitions that it writes."""

    def recomputes_partitions(self, table: str) -> bool:
        """Return whether no stale rows are left in partitions that a run writes from correct inputs."""


class _PartitionHistory:
    """Partitions of a table that change from commit to commit. Commits are added in the order of the log."""

    def __init__(self) -> None:
        self._states: list[tuple[int, Partitions]] = []

    @property
    def newest(self) -> Partitions:
        return self._states[-1][1] if self._states else frozenset()

    def change(self, position: int, partitions: Partitions) -> None:
        self._states.append((position, partitions))

    def at(self, position: int) -> Partitions:
        """Return the partitions after the commit at `position`."""
        for changed_at, partitions in reversed(self._states):
            if changed_at <= position:
                return partitions
        return frozenset()


@dataclass
class StaleTable:
    """A table with rows that were computed from undone rows.

    `inputs` are the undone and stale tables that its runs have read, and `publications` the publications of
    these runs, oldest first.
    """

    table: str
    inputs: set[str] = field(default_factory=set)
    publications: list[Publication] = field(default_factory=list)
    history: _PartitionHistory = field(default_factory=_PartitionHistory)

    @property
    def partitions(self) -> Partitions:
        """The partitions with such rows."""
        return self.history.newest


def read_log_since_undone(client: NessieClient, undo: Undo) -> LogSinceUndone:
    """Read the log of `main` since the oldest publication of the undo, about 7,000 commits a second."""
    oldest = undo.publications[-1]
    entries = list(client.log(MAIN, since=oldest.hash))[::-1]
    positions = {oldest.hash: 0} | {
        entry.commit.hash: number for number, entry in enumerate(entries, start=1)
    }
    undone_ids = {publication.publication_id for publication in undo.publications}
    undone_ids |= {name for entry in entries for name in list_undone_publications(entry)}
    later = [
        LaterPublication(publication, positions[publication.hash], positions.get(publication.base_hash, -1))
        for entry in entries
        for publication in parse_publications(entry)
        if publication.publication_id not in undone_ids
    ]
    undone = [
        LaterPublication(publication, positions.get(publication.hash, 0)) for publication in undo.publications
    ]
    return LogSinceUndone(undone, later, positions.get(undo.commit or ""))


def find_stale_tables(
    log: LogSinceUndone, reads: Mapping[str, Collection[str]], lookup: PartitionLookup
) -> list[StaleTable]:
    """Return the tables that have rows which were computed from undone rows, each after its inputs.

    `reads` has the tables that the runs of each table read. Rows that were computed from stale tables are
    stale too. The undone rows themselves are not.
    """
    follower = _LogFollower(lookup, log.undo_position)
    undone_ids = {undone.publication.publication_id for undone in log.undone}
    for entry in sorted([*log.undone, *log.later], key=lambda entry: entry.position):
        for table in entry.publication.tables:
            if entry.publication.publication_id in undone_ids:
                follower.add_undone(entry, table)
            else:
                follower.overwrite_undone(entry, table)
                follower.follow_reads(entry, table, reads.get(table, ()))
    return [stale for stale in follower.stale_tables.values() if stale.partitions is None or stale.partitions]


class _LogFollower:
    def __init__(self, lookup: PartitionLookup, undo_position: int | None) -> None:
        self._lookup = lookup
        self._undo_position = undo_position
        self._undone: dict[str, _PartitionHistory] = {}
        """The partitions with undone rows, by table, as they were before the undo."""
        self.stale_tables: dict[str, StaleTable] = {}

    def add_undone(self, undone: LaterPublication, table: str) -> None:
        history = self._undone.setdefault(table, _PartitionHistory())
        written = self._lookup.load_written(undone.publication, table)
        history.change(undone.position, _join(history.newest, written))

    def overwrite_undone(self, later: LaterPublication, table: str) -> None:
        """Remove the undone partitions that a publication has overwritten."""
        history = self._undone.get(table)
        if history is not None and self._lookup.overwrites_partitions(table):
            written = self._lookup.load_written(later.publication, table)
            history.change(later.position, _subtract(history.newest, written))

    def follow_reads(self, later: LaterPublication, table: str, inputs: Collection[str]) -> None:
        """Apply a publication that computed `table` from `inputs`."""
        wrong_inputs: set[str] = set()
        dependents: Partitions = frozenset()
        for name in inputs:
            wrong = self._wrong_partitions(name, later.base_position)
            if wrong is None or wrong:
                mapped = self._lookup.map_downstream(name, wrong, table)
                if mapped is None or mapped:
                    wrong_inputs.add(name)
                    dependents = _join(dependents, mapped)
        stale = self.stale_tables.get(table)
        if stale is None and not wrong_inputs:
            return
        written = self._lookup.load_written(later.publication, table)
        made_stale = _intersect(written, dependents)
        if stale is None:
            stale = self.stale_tables[table] = StaleTable(table)
        if made_stale is None or made_stale:
            stale.inputs |= wrong_inputs
            stale.publications.append(later.publication)
        partitions = stale.partitions
        if self._lookup.recomputes_partitions(table):
            partitions = _subtract(partitions, written)
        stale.history.change(later.position, _join(partitions, made_stale))

    def _wrong_partitions(self, table: str, position: int) -> Partitions:
        """Return the partitions of a table with undone or stale rows after the commit at `position`."""
        wrong: Partitions = frozenset()
        if table in self._undone and (self._undo_position is None or position < self._undo_position):
            wrong = self._undone[table].at(position)
        stale = self.stale_tables.get(table)
        return wrong if stale is None else _join(wrong, stale.history.at(position))


def _join(first: Partitions, second: Partitions) -> Partitions:
    return None if first is None or second is None else first | second


def _intersect(written: Partitions, dependents: Partitions) -> Partitions:
    """Return the written partitions that depend on wrong ones. An unknown side counts as all partitions."""
    if dependents is None:
        return written
    if written is None:
        return dependents
    return written & dependents


def _subtract(partitions: Partitions, written: Partitions) -> Partitions:
    """Return the partitions that are left. Unknown ones stay unknown, except in an unpartitioned table."""
    if written == {None}:
        return frozenset()
    return partitions if partitions is None or written is None else partitions - written
