"""Reads what needs snapshots of tables on `main`: references of branchlake, the horizon of undo, positions.

A run's branch needs the snapshots of its tables since its base, because a rebase compares both histories from
there, and so does the publication of a compaction. A consumer's position is a property of the consumer's own
table. An undo within its horizon sets positions back, so the positions at the horizon count as well as the
present ones.

All of this is read before the decision: first the hash of `main`, then the references, then the positions on
`main`. Whatever begins later starts from `main` as it was at first, or from a newer one, so the snapshots
that were current then are kept too. A run that is published between these reads is no reference any more,
but its positions are read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime

from cachetools import LRUCache
from pyiceberg.io import FileIO

from branchlake_dagster.catalog.catalog import NO_SNAPSHOT
from branchlake_dagster.catalog.stored_files import StoredFileDamaged, map_concurrently
from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.expiry.metadata_document import read_document
from branchlake_dagster.expiry.retention import (
    ConsumerPosition,
    ExpiryPolicy,
    TableHistory,
    TableRoots,
    list_ancestors,
    resolve_position,
)
from branchlake_dagster.history.change import Position
from branchlake_dagster.incremental.positions import read_positions
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Reference, ReferenceType
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.errors import PositionUnreadable

_BRANCH_PREFIXES = (ReferencePrefix.RUN, ReferencePrefix.PUBLICATION, ReferencePrefix.COMPACTION)
_TAG_PREFIXES = (ReferencePrefix.DISCARDED, ReferencePrefix.SWEEPING, ReferencePrefix.CLAIM)
_FILES_CACHED = 50_000
_HORIZON = "undo"
"""The holder of snapshots that only the horizon of undo needs."""


class ConsumersUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """It is not known which snapshots consumers need, because the storage did not answer.

    Nothing was changed.
    """


@dataclass(frozen=True)
class _RecordedPosition:
    """A position that a consumer's table records for one input."""

    consumer: str
    input_table: str
    position: Position


@dataclass(frozen=True)
class LakeRoots:
    """What needs snapshots of `main` at `main_hash`.

    `bases` maps commits of `main` to the reference that needs the tables since then, the oldest first.
    `undo_since_ms` is the horizon of undo in ms since 1970, and `horizon` the newest commit of `main` before
    it. Both are None if no publication is to be undone; `horizon` is also None if all commits are younger.
    `tags` are branchlake's tags of runs. Nessie does not know where a tag left `main`. `unreadable_tables`
    are tables whose metadata file is missing or damaged: they cannot be continued, so they have no positions.
    """

    main_hash: str
    bases: Mapping[str, str]
    positions: tuple[_RecordedPosition, ...]
    horizon: str | None = None
    undo_since_ms: int | None = None
    tags: tuple[Reference, ...] = ()
    unreadable_tables: tuple[str, ...] = ()

    def positions_of(self, table: str, table_uuid: str, history: TableHistory) -> list[ConsumerPosition]:
        """Return the snapshots of a table that consumers' positions need.

        A position belongs to a table by its UUID, because tables are renamed. It also belongs by name: if
        two runs both create a table, the rows of the second come into the table of the first.
        """
        positions: dict[ConsumerPosition, None] = {}
        for recorded in self.positions:
            if recorded.position.table_uuid != table_uuid and recorded.input_table != table:
                continue
            snapshot_id = resolve_position(history, recorded.position)
            if snapshot_id is not None:
                positions[ConsumerPosition(recorded.consumer, snapshot_id)] = None
        return list(positions)


@dataclass(frozen=True)
class RootedTable:
    """A table on `main` whose roots are to be found."""

    key: ContentKey
    content: IcebergTable
    table_uuid: str
    history: TableHistory


class PositionCache:
    """The positions in metadata files, by location. Metadata files never change. Safe to share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._positions: LRUCache[str, tuple[tuple[str, Position], ...]] = LRUCache(_FILES_CACHED)

    def get(self, location: str) -> tuple[tuple[str, Position], ...] | None:
        """Return the inputs with their positions in a file; None if the file was not read."""
        with self._lock:
            return self._positions.get(location)

    def add(self, location: str, properties: Mapping[str, str]) -> None:
        """Add the positions in a table's properties.

        Positions that cannot be read do not count: their consumer must compute everything anew.
        """
        try:
            positions = read_positions(properties, table=location)
        except PositionUnreadable:
            found: tuple[tuple[str, Position], ...] = ()
        else:
            records = [*positions.partitions.values()]
            records += [positions.common_position] if positions.common_position is not None else []
            found = tuple(
                dict.fromkeys((name, position) for one in records for name, position in one.inputs.items())
            )
        with self._lock:
            self._positions[location] = found


class RootsReader:
    """Reads the roots of a lake. `find_io` returns the FileIO for a location."""

    def __init__(
        self,
        client: NessieClient,
        find_io: Callable[[str], FileIO],
        cache: PositionCache | None = None,
    ) -> None:
        self._client = client
        self._find_io = find_io
        self._cache = cache or PositionCache()

    def read(self, policy: ExpiryPolicy, now: datetime, *, deadline: float | None = None) -> LakeRoots | None:
        """Read the roots; None if `deadline`, by the monotonic clock, passes before all files are read.

        Costs one listing of the references, one of `main` and one of `main` at the horizon of undo, and one
        metadata file for each table that changed since the last call. Files that were read before a deadline
        are not read again. A table whose file is missing or damaged has no positions. Raises
        ConsumersUnreadable if the storage does not answer, and Nessie's errors.
        """
        main = self._client.reference(MAIN)
        horizon = self._find_horizon(policy, now)
        references = list(filter(_needs_history, self._client.references(fetch_metadata=True)))
        bases = self._order_bases(references)
        tags = tuple(one for one in references if one.type is ReferenceType.TAG)
        # Read again: a run that was published after the first read is not among the references.
        states = [self._client.reference(MAIN).pinned_ref, *([f"@{horizon}"] if horizon is not None else [])]
        positions: dict[_RecordedPosition, None] = {}
        unreadable_tables: dict[str, None] = {}
        for state in states:
            locations = self._list_tables(state)
            unreadable = self._read_positions(locations, deadline)
            if unreadable is None:
                return None
            unreadable_tables |= dict.fromkeys(unreadable)
            positions |= dict.fromkeys(
                _RecordedPosition(name, input_table, position)
                for name, location in locations.items()
                for input_table, position in self._cache.get(location) or ()
            )
        undo_since_ms = int((now - policy.undo_age).timestamp() * 1000) if policy.undo_age else None
        return LakeRoots(
            main.hash, bases, tuple(positions), horizon, undo_since_ms, tags, tuple(unreadable_tables)
        )

    def _find_horizon(self, policy: ExpiryPolicy, now: datetime) -> str | None:
        """Return the newest commit of `main` before the horizon of undo; None if there is none."""
        if not policy.undo_age:
            return None
        since = (now - policy.undo_age).isoformat()
        older = self._client.log(MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{since}')", limit=1)
        entry = next(iter(older), None)
        return entry.commit.hash if entry is not None else None

    def _order_bases(self, references: Iterable[Reference]) -> dict[str, str]:
        """Return the commits at which branches left `main`, oldest first, each with a branch."""
        bases: dict[str, str] = {}
        for reference in sorted(references, key=_commits_behind, reverse=True):
            if reference.metadata is not None and reference.metadata.common_ancestor_hash:
                bases.setdefault(reference.metadata.common_ancestor_hash, reference.name)
        bases.pop(self._client.config().no_ancestor_hash, None)
        return bases

    def _list_tables(self, ref: str) -> dict[str, str]:
        return {
            entry.key.name: entry.content.metadata_location
            for entry in self._client.entries(
                ref, filter="entry.contentType == 'ICEBERG_TABLE'", fetch_content=True
            )
            if isinstance(entry.content, IcebergTable)
        }

    def _read_positions(self, locations: Mapping[str, str], deadline: float | None) -> list[str] | None:
        """Read the positions of tables into the cache.

        Returns the tables whose metadata files are missing or damaged; None if the deadline passed.
        """
        unread = [(name, one) for name, one in locations.items() if self._cache.get(one) is None]

        def read(table: tuple[str, str]) -> bool | None:
            """Return whether the file could be read; None after the deadline."""
            if deadline is not None and time.monotonic() > deadline:
                return None
            name, location = table
            try:
                properties = read_document(self._find_io(location), location).properties
            except Exception as error:
                if is_unreadable(error):
                    return False
                raise ConsumersUnreadable(
                    f"The storage did not answer when the metadata file {location} was read, so the positions"
                    f" of its table are not known: {error}.",
                    table=name,
                    branch=MAIN,
                    hint="Nothing was changed. Run the expiry again when the storage answers.",
                ) from error
            self._cache.add(location, properties)
            return True

        answers = map_concurrently(read, unread, lambda table: table[1])
        if None in answers:
            return None
        return [name for (name, _), is_read in zip(unread, answers, strict=True) if not is_read]

    def find_table_roots(
        self, roots: LakeRoots, tables: Iterable[RootedTable]
    ) -> dict[ContentKey, TableRoots]:
        """Return the snapshots of each table that are needed.

        The oldest base that has a table decides: the chain of snapshots since then contains those of newer
        bases. So this usually costs three requests, however many branches exist, and one for each tag.
        """
        tables = list(tables)
        bases: dict[ContentKey, dict[int, str]] = {table.key: {} for table in tables}
        ancestor_ids = {
            table.key: {one.snapshot_id for one in list_ancestors(table.history, table.history.current_id)}
            for table in tables
        }
        self._add_bases(bases, tables, roots.main_hash, MAIN)
        if roots.undo_since_ms is not None:
            self._add_horizon(bases, tables, roots.horizon, roots.undo_since_ms)
        unresolved = {table.key: table for table in tables}
        for commit, holder in roots.bases.items():
            if not unresolved:
                break
            for key, snapshot_id in self._add_bases(bases, unresolved.values(), commit, holder).items():
                if snapshot_id in ancestor_ids[key]:
                    del unresolved[key]
        for tag in roots.tags:
            self._add_tag(bases, tables, ancestor_ids, tag)
        return {
            table.key: TableRoots(
                bases[table.key],
                tuple(roots.positions_of(table.key.name, table.table_uuid, table.history)),
            )
            for table in tables
        }

    def _add_bases(
        self,
        bases: Mapping[ContentKey, dict[int, str]],
        tables: Iterable[RootedTable],
        commit: str,
        holder: str,
    ) -> dict[ContentKey, int]:
        """Add and return the snapshot of each table at a commit.

        If a table was empty then, all snapshots of its chain came later, so the oldest one is its base.
        Tables that the commit does not have are left out: they were created later, perhaps after an older one
        of the same name was dropped.
        """
        by_key = {table.key: table for table in tables}
        snapshot_ids: dict[ContentKey, int] = {}
        for key, content in self._client.contents(f"@{commit}", sorted(by_key)).items():
            if isinstance(content, IcebergTable) and content.content_id == by_key[key].content.content_id:
                is_empty = content.snapshot_id == NO_SNAPSHOT
                base_id = _find_oldest(by_key[key].history) if is_empty else content.snapshot_id
                if base_id is not None:
                    snapshot_ids[key] = base_id
                    bases[key].setdefault(base_id, holder)
        return snapshot_ids

    def _add_tag(
        self,
        bases: Mapping[ContentKey, dict[int, str]],
        tables: Iterable[RootedTable],
        ancestor_ids: Mapping[ContentKey, Set[int]],
        tag: Reference,
    ) -> None:
        """Add the newest snapshot of each table that `main` and the tagged state share.

        A table that the run changed costs a read of its metadata file. If that file is missing or damaged,
        the run cannot be continued any more.
        """
        by_key = {table.key: table for table in tables}
        for key, content in self._client.contents(f"@{tag.hash}", sorted(by_key)).items():
            if not isinstance(content, IcebergTable) or content.content_id != by_key[key].content.content_id:
                continue
            if content.snapshot_id in ancestor_ids[key]:
                bases[key].setdefault(content.snapshot_id, tag.name)
                continue
            location = content.metadata_location
            try:
                history = read_document(self._find_io(location), location).history
            except (FileNotFoundError, StoredFileDamaged):
                continue
            ancestors = list_ancestors(history, history.current_id)
            shared_ids = (one.snapshot_id for one in ancestors if one.snapshot_id in ancestor_ids[key])
            shared_id = next(shared_ids, None)
            if shared_id is None and (not ancestors or ancestors[-1].parent_id is None):
                shared_id = _find_oldest(by_key[key].history)  # the table was empty where the run began
            if shared_id is not None:
                bases[key].setdefault(shared_id, tag.name)

    def _add_horizon(
        self,
        bases: Mapping[ContentKey, dict[int, str]],
        tables: Iterable[RootedTable],
        horizon: str | None,
        undo_since_ms: int,
    ) -> None:
        """Add what an undo needs: the state at the horizon, or else that before the younger snapshots."""
        tables = list(tables)
        known = self._add_bases(bases, tables, horizon, _HORIZON) if horizon is not None else {}
        for table in tables:
            if table.key in known:
                continue
            ancestors = list_ancestors(table.history, table.history.current_id)
            older = (one.snapshot_id for one in ancestors if one.timestamp_ms < undo_since_ms)
            oldest_id = next(older, _find_oldest(table.history))
            if oldest_id is not None:
                bases[table.key].setdefault(oldest_id, _HORIZON)


def is_unreadable(error: Exception) -> bool:
    """Whether a file is missing, damaged, or at a location that PyIceberg does not know.

    Any other error may be gone the next time: the storage does not answer, or memory is short.
    """
    if isinstance(error, StoredFileDamaged):
        return not isinstance(error.__cause__, MemoryError)
    return isinstance(error, FileNotFoundError | ValueError)


def _find_oldest(history: TableHistory) -> int | None:
    """Return the oldest snapshot of the current one's chain; None if the table is empty."""
    ancestors = list_ancestors(history, history.current_id)
    return ancestors[-1].snapshot_id if ancestors else None


def _needs_history(reference: Reference) -> bool:
    """Whether branchlake may rebase what a reference holds: its name has a prefix of branchlake's."""
    is_branch = reference.type is ReferenceType.BRANCH
    return reference.name.startswith(_BRANCH_PREFIXES if is_branch else _TAG_PREFIXES)


def _commits_behind(reference: Reference) -> int:
    metadata = reference.metadata
    return metadata.commits_behind or 0 if metadata is not None else 0
