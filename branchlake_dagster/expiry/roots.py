"""Find the snapshots on `main` that branchlake's references, the horizon of undo and consumers need.

A run's branch needs the snapshots of its tables since its base, because a rebase and the publication of a
compaction compare both histories from the base on. A consumer's position is a property of the consumer's own
table. An undo sets positions back to earlier ones, so the positions at the horizon of undo count as well as
the present positions.

All of this is read before the decision: first the hash of `main`, then the references, then the positions on
`main`. A run that begins later starts from this hash or from a newer one, so the snapshots that were current
at this hash are kept too. A run that is published between these reads has no reference any more, but its
positions are read.
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
"""The name in reports for the holder of snapshots that only the horizon of undo needs."""


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
    """The commits, tags and consumers' positions that need snapshots of `main`, read at `main_hash`.

    `bases` maps a commit of `main` to a branch that left `main` there and needs all snapshots since, oldest
    commit first. `undo_since_ms` is the horizon of undo in ms since 1970, and `horizon` the newest commit of
    `main` before it. Both are None if the policy's `undo_age` is 0; `horizon` is also None if all commits
    are younger. `tags` are branchlake's tags of runs; Nessie does not record where a tag left `main`.
    `unreadable_tables` are tables whose metadata file is missing or damaged: their positions are ignored,
    because no run can consume into them any more.
    """

    main_hash: str
    bases: Mapping[str, str]
    positions: tuple[_RecordedPosition, ...]
    horizon: str | None = None
    undo_since_ms: int | None = None
    tags: tuple[Reference, ...] = ()
    unreadable_tables: tuple[str, ...] = ()

    def positions_of(self, table: str, table_uuid: str, history: TableHistory) -> list[ConsumerPosition]:
        """Return the snapshots of a table that consumers' positions need, each with its consumer.

        A position belongs to a table with the same UUID, because tables can be renamed, or with the same
        name: if two runs both create a table, the rows of the second run are added to the first run's table.
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
    """A table on `main` for which needed snapshots are searched."""

    key: ContentKey
    content: IcebergTable
    table_uuid: str
    history: TableHistory


class PositionCache:
    """A cache of consumers' positions by metadata file, which never changes. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._positions: LRUCache[str, tuple[tuple[str, Position], ...]] = LRUCache(_FILES_CACHED)

    def get(self, location: str) -> tuple[tuple[str, Position], ...] | None:
        """Return the pairs (input table, position) that the metadata file at `location` records.

        Returns () if the file records no positions, and None if the file is not in the cache.
        """
        with self._lock:
            return self._positions.get(location)

    def add(self, location: str, properties: Mapping[str, str]) -> None:
        """Add the positions in a table's properties.

        Properties that cannot be parsed count as no positions: their consumer must compute all rows again.
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
    """Finds the snapshots that references and consumers of a lake need.

    `find_io` returns the FileIO for a location.
    """

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
        """Read the references and positions of the lake.

        Returns None if `deadline`, in seconds of `time.monotonic()`, passes before all files are read.

        Costs one listing of the references, one of `main` and one of `main` at the horizon of undo, and one
        metadata file for each table that changed since the last call. Files that were read before a deadline
        passed are not read again. A table whose file is missing or damaged has no positions. Raises
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
        """Return the hash of the newest commit of `main` that is older than the policy's `undo_age` at `now`.

        Returns None if all commits are newer, or if `undo_age` is 0.
        """
        if not policy.undo_age:
            return None
        since = (now - policy.undo_age).isoformat()
        older = self._client.log(MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{since}')", limit=1)
        entry = next(iter(older), None)
        return entry.commit.hash if entry is not None else None

    def _order_bases(self, references: Iterable[Reference]) -> dict[str, str]:
        """Return the hashes at which branches left `main`, oldest first, each with the name of one branch.

        `references` were read with their metadata. References without common history with `main` are omitted.
        """
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

        Returns the names of tables whose metadata files are missing or damaged; None if the deadline passed.
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
        """Return the needed snapshots of each table, by the table's key.

        The oldest base that has a table decides, because the chain since the oldest base contains the
        snapshots of newer bases. So this usually costs three requests, however many branches exist, and one
        for each tag.
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
        """Add the snapshot that each table had at a commit to `bases`, and return the snapshot ids by key.

        If a table was empty at the commit, its base is the oldest snapshot of its chain. Tables that the
        commit does not have are omitted: they were created later, perhaps after an older table of the same
        name was dropped. `holder` is the name of the branch or rule that needs the snapshots.
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
        """Add to `bases`, for each table, the newest snapshot that `main` and the tagged state share.

        For a table that the run changed, the tagged metadata file is read. If this file is missing or
        damaged, the table is skipped, because the run cannot be published any more. `ancestor_ids` has the
        ids of each table's snapshots on `main`.
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
        """Add the snapshot of each table that an undo may return to.

        This is the table's snapshot at the commit `horizon`. For a table that the commit does not have, it is
        the newest snapshot older than `undo_since_ms`, else the oldest snapshot.
        """
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
    """Return whether an error means that a file is missing, damaged, or has a scheme unknown to PyIceberg.

    Other errors may disappear: the storage did not answer, or too little memory was free.
    """
    if isinstance(error, StoredFileDamaged):
        return not isinstance(error.__cause__, MemoryError)
    return isinstance(error, FileNotFoundError | ValueError)


def _find_oldest(history: TableHistory) -> int | None:
    """Return the id of the oldest ancestor of the current snapshot that still exists in the table's metadata.

    Without older ancestors, this is the current snapshot. None if the table is empty.
    """
    ancestors = list_ancestors(history, history.current_id)
    return ancestors[-1].snapshot_id if ancestors else None


def _needs_history(reference: Reference) -> bool:
    """Return whether a reference may still be rebased: its name begins with one of branchlake's prefixes."""
    is_branch = reference.type is ReferenceType.BRANCH
    return reference.name.startswith(_BRANCH_PREFIXES if is_branch else _TAG_PREFIXES)


def _commits_behind(reference: Reference) -> int:
    metadata = reference.metadata
    return metadata.commits_behind or 0 if metadata is not None else 0
