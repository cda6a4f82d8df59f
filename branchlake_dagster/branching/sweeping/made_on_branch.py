"""What the commits of one branch made themselves, told from what they only gave a name.

`register_table` names a metadata file that others made: a copy of a table of `main`, or a restore of an
older state. `add_files` names data files of others in the same way. A sweeper that took all of it for the
run's once deleted files of `main`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from pyiceberg.manifest import ManifestFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.branching.table.files import FileUnreadable, TableFiles, folders, home, plain, within
from branchlake_dagster.branching.table.provenance import PREFIX
from branchlake_dagster.changes.summary import RUN_ID
from branchlake_dagster.nessie.model import ContentKey, Delete, IcebergTable, LogEntry, Put


@dataclass(frozen=True)
class Made:
    """The keys a branch changed, the metadata files it named, and which of it was made by its own commits.

    All by location: `named` are all metadata files that can be read, `own` those that its commits wrote.
    `snapshots` are those that its own commits added.
    """

    touched: frozenset[ContentKey]
    named: Mapping[str, TableMetadata]
    own: Mapping[str, TableMetadata]
    snapshots: Mapping[int, Snapshot]

    def recorded_bases(self, run_id: str) -> frozenset[str]:
        """The hashes that snapshots of a run, in files that its branch wrote, record as its base."""
        bases = {
            _told(snapshot, "base_hash")
            for metadata in self.own.values()
            for snapshot in metadata.snapshots
            if _told(snapshot, "run_id") == run_id and not _told(snapshot, "replayed_from")
        }
        return frozenset(filter(None, bases))

    def names(self, run_id: str, entry: LogEntry) -> bool:
        """Whether a commit says that run `run_id` made it: by its properties or, for Spark, by its snapshots.

        A commit that puts no table made no file, and counts as one that does; so does a table whose metadata
        an earlier sweep deleted.
        """
        if named := entry.commit.properties.get(RUN_ID):
            return named == run_id
        tables = [
            operation.content
            for operation in entry.operations
            if isinstance(operation, Put) and isinstance(operation.content, IcebergTable)
        ]
        return all(self._is_of(run_id, table) for table in tables)

    def _is_of(self, run_id: str, table: IcebergTable) -> bool:
        metadata = self.named.get(table.metadata_location)
        if metadata is None:
            return True
        found = (one for one in metadata.snapshots if one.snapshot_id == table.snapshot_id)
        return any(_told(snapshot, "run_id") == run_id for snapshot in found)

    @cached_property
    def places(self) -> frozenset[str]:
        """The folders of its tables."""
        told = {place for metadata in self.named.values() for place in folders(metadata)}
        return frozenset(told | {home(location) for location in self.named})

    @cached_property
    def homes(self) -> frozenset[str]:
        """The same folders in one spelling."""
        return frozenset(map(plain, self.places))

    @cached_property
    def earlier(self) -> frozenset[str]:
        """The metadata files that the named ones came from, in one spelling."""
        return frozenset(
            plain(entry.metadata_file) for metadata in self.named.values() for entry in metadata.metadata_log
        )


def made_on(
    log: Iterable[LogEntry], base: Mapping[ContentKey, str], base_hash: str, files: TableFiles
) -> Made:
    """What the commits of `log`, newest first, made on top of the tables of `base`.

    A commit wrote a metadata file, rather than registered it, when the file says that it came from the one
    the key held before, or from none where there was none. A snapshot is a commit's own when it is new in
    such a file. Raises FileUnreadable.
    """
    state: dict[ContentKey, str | None] = dict(base)
    old = {plain(location) for location in base.values()}
    touched: set[ContentKey] = set()
    named: dict[str, TableMetadata] = {}
    own: dict[str, TableMetadata] = {}
    snapshots: dict[int, Snapshot] = {}
    foreign: set[int] = set()
    for entry in reversed(list(log)):
        merged = len(entry.commit.parent_hashes) > 1
        for operation in entry.operations:
            key = operation.key
            touched.add(key)
            before = state.get(key)
            if isinstance(operation, Delete):
                state[key] = None
            if not isinstance(operation, Put) or not isinstance(operation.content, IcebergTable):
                continue
            location = state[key] = operation.content.metadata_location
            if plain(location) in old:
                continue
            old.add(plain(location))
            metadata = files.metadata(location)
            if metadata is None:
                continue  # an earlier sweep died when only metadata was left
            named[location] = metadata
            if merged or not _follows(metadata, before):
                foreign |= {snapshot.snapshot_id for snapshot in metadata.snapshots}
                continue
            own[location] = metadata
            predecessor = files.metadata(before) if before else None
            if before and predecessor is None:
                continue  # deleted by that sweep, which had deleted the snapshots' files before
            known = {snapshot.snapshot_id for snapshot in predecessor.snapshots} if predecessor else set()
            snapshots |= {one.snapshot_id: one for one in metadata.snapshots if one.snapshot_id not in known}
    mine = {
        number: snapshot
        for number, snapshot in snapshots.items()
        if number not in foreign and _told(snapshot, "base_hash") in (None, base_hash)
    }
    return Made(frozenset(touched), named, own, mine)


def _follows(metadata: TableMetadata, before: str | None) -> bool:
    if before is None:
        return not metadata.metadata_log
    return bool(metadata.metadata_log) and plain(metadata.metadata_log[-1].metadata_file) == plain(before)


def _told(snapshot: Snapshot, name: str) -> str | None:
    return snapshot.summary.additional_properties.get(f"{PREFIX}{name}") if snapshot.summary else None


class Borrowed:
    """Tells data files that a snapshot's writer wrote from older ones that it only added to the table.

    `base` are the tables at the base that may hold such a file, `since` is the time of the base commit.
    """

    def __init__(self, files: TableFiles, base: Iterable[str], since: datetime | None) -> None:
        self._files = files
        self._base = tuple(base)
        self._since = since
        self._at_base: set[str] | None = None

    def __call__(self, path: str, snapshot: Snapshot, manifest: ManifestFile) -> bool:
        """Whether the file may be older than the run.

        PyIceberg names manifests and data files of a commit by one UUID, and our IO manager adds only what
        it has just written. A change table's files are its input's, but for rows that were copied. Of any
        other file the store's clock must say that it is younger than the base, and the base's tables must
        not name it: a restored backup makes all files young.
        """
        if _told(snapshot, "change_of"):
            return not within(path, (home(manifest.manifest_path),))
        commit = manifest.manifest_path.rpartition("/")[2].rpartition("-m")[0]
        if commit and commit in path.rpartition("/")[2]:
            return False
        if _told(snapshot, "step") and not _told(snapshot, "replayed_from"):
            return False
        written = self._files.modified(path)
        if written is None:
            return self._files.size(path) > 0  # one that is gone already is nobody's
        return self._since is None or written < self._since or plain(path) in self._named()

    def _named(self) -> set[str]:
        if self._at_base is None:
            self._at_base = set()
            for location in self._base:
                self._at_base |= self._in(location)
        return self._at_base

    def _in(self, location: str) -> set[str]:
        metadata = self._files.metadata(location)
        if metadata is None:
            raise FileUnreadable(f"{location} is missing.")
        head = next((s for s in metadata.snapshots if s.snapshot_id == metadata.current_snapshot_id), None)
        found: set[str] = set()
        for manifest in (self._files.manifests(head) or ()) if head else ():
            entries = self._files.entries(manifest)
            if entries is None:
                raise FileUnreadable(f"{manifest.manifest_path} is missing.")
            found |= {plain(path) for path in entries.live}
        return found


def related(key: ContentKey, location: str, made: Made) -> bool:
    """Whether a table, by its key and metadata file, may share files with what a branch made."""
    return key in made.touched or plain(home(location)) in made.homes or plain(location) in made.earlier
