"""Which files a discarded branch left that no other reference can reach.

Dead is what the branch's own commits made since its base: metadata files, the snapshots that are new in
them, and what each of those wrote (`made`). What stood at the base, under whatever key, is not theirs.
Needed is what any other reference reaches, under whatever key: the same snapshots (its state was copied),
or the same manifests and data files in snapshots of its own (they were replayed by a rebase, or merged into
newer manifests). Dead and not needed may be deleted. In doubt a file is kept.

What the commits of one branch made themselves, told from what they only gave a name.

`register_table` names a metadata file that others made: a copy of a table of `main`, or a restore of an
older state. `add_files` names data files of others in the same way. A sweeper that took all of it for the
run's once deleted files of `main`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from pyiceberg.manifest import ManifestFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import (
    Content,
    ContentKey,
    Delete,
    IcebergTable,
    LogEntry,
    Put,
    Reference,
)
from branchlake_dagster.runs.branch_names import is_ours, run_of
from branchlake_dagster.runs.branch_owner import at_work_on
from branchlake_dagster.runs.run_branch import branch_name, run_id_of
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix
from branchlake_dagster.tables.table_files import FileUnreadable, TableFiles, folders, home, plain, within


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
            _told(snapshot, LakeProperty.BASE_HASH)
            for metadata in self.own.values()
            for snapshot in metadata.snapshots
            if _told(snapshot, LakeProperty.RUN_ID) == run_id
            and not _told(snapshot, LakeProperty.REPLAYED_FROM)
        }
        return frozenset(filter(None, bases))

    def names(self, run_id: str, entry: LogEntry) -> bool:
        """Whether a commit says that run `run_id` made it: by its properties or, for Spark, by its snapshots.

        A commit that puts no table made no file, and counts as one that does; so does a table whose metadata
        an earlier sweep deleted.
        """
        if named := entry.commit.properties.get(LakeProperty.RUN_ID):
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
        return any(_told(snapshot, LakeProperty.RUN_ID) == run_id for snapshot in found)

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
        if number not in foreign and _told(snapshot, LakeProperty.BASE_HASH) in (None, base_hash)
    }
    return Made(frozenset(touched), named, own, mine)


def _follows(metadata: TableMetadata, before: str | None) -> bool:
    if before is None:
        return not metadata.metadata_log
    return bool(metadata.metadata_log) and plain(metadata.metadata_log[-1].metadata_file) == plain(before)


def _told(snapshot: Snapshot, name: str) -> str | None:
    return snapshot.summary.additional_properties.get(name) if snapshot.summary else None


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
        if _told(snapshot, LakeProperty.CHANGE_OF):
            return not within(path, (home(manifest.manifest_path),))
        commit = manifest.manifest_path.rpartition("/")[2].rpartition("-m")[0]
        if commit and commit in path.rpartition("/")[2]:
            return False
        if _told(snapshot, LakeProperty.STEP) and not _told(snapshot, LakeProperty.REPLAYED_FROM):
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


class StateUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Metadata that tells which files are needed is missing or damaged, so nobody can say which are not."""


class BaseUnknown(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` was set back: the commits that it shares with a discarded branch end before the branch began."""


@dataclass(frozen=True)
class SweepPlan:
    """Files by location with their size in bytes, in phases to be deleted one after the other.

    Files of a phase are named by later ones, so a sweep that died can be planned again. `held_by` are the
    references that need dead files; those, `foreign` ones outside of the tables' own folders and `borrowed`
    ones that the run only added to its tables are kept.
    """

    phases: tuple[Mapping[str, int], ...] = ()
    held_by: tuple[str, ...] = ()
    foreign: int = 0
    borrowed: int = 0

    @property
    def files(self) -> int:
        """How many files go."""
        return sum(len(phase) for phase in self.phases)

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(sum(phase.values()) for phase in self.phases)


class SweepPlanner:
    """Plans sweeps against the present references; contents and files are read once for all plans.

    `references` are all branches and tags, with metadata, listed after the fence.
    """

    def __init__(self, client: NessieClient, files: TableFiles, references: Iterable[Reference]) -> None:
        self._client = client
        self._files = files
        self._references = {ref.name: ref for ref in references}
        self._tables: dict[str, dict[ContentKey, str]] = {}
        self._by_home: dict[str, dict[str, list[str]]] = {}
        self._reach: dict[tuple[str, frozenset[str]], tuple[frozenset[str], str | None]] = {}

    def forget(self, name: str) -> None:
        """A reference is gone; what only it reached is dead now."""
        self._references.pop(name, None)

    def plan(
        self, tag: Reference, base_hash: str, base_time: datetime | None, recorded_base: str = ""
    ) -> SweepPlan:
        """What may be deleted of `tag`, which left `main` at `base_hash`, committed at `base_time`.

        `recorded_base` is the base that Dagster knows of the run; empty: it knows none. Raises
        StateUnreadable, and BaseUnknown where `main` was set back to before the branch began.
        """
        try:
            return self._plan(tag, base_hash, base_time, recorded_base)
        except FileUnreadable as error:
            raise StateUnreadable(error.message, hint="Nothing was deleted.") from error

    def _plan(
        self, tag: Reference, base_hash: str, base_time: datetime | None, recorded_base: str
    ) -> SweepPlan:
        base = self._at(f"@{base_hash}")
        log = list(self._client.log(_as_listed(tag), since=base_hash, fetch_operations=True))
        made = made_on(log, base, base_hash, self._files)
        if not _is_base(base_hash, recorded_base, log, made, tag.name):
            raise BaseUnknown(
                f"Main was set back to {base_hash[:12]}, before the commit that the branch started from,"
                " or somebody else changed the branch."
                " The commits of the branch cannot be distinguished from those that main has lost.",
                branch=tag.name,
                hint="Nothing was deleted. Set main forward again, or delete the tag: its files then stay.",
            )
        kin = [location for key, location in base.items() if related(key, location, made)]
        dead, foreign, borrowed = self._dead(made, kin, base_time)
        names_of_dead = {plain(path) for phase in dead for path in phase}
        needed: set[str] = set()
        holders: set[str] = set()
        by_home = self._homes(base_hash)
        for (key, location), names in self._others(tag, base).items():
            old = {*by_home.get(plain(home(location)), ()), *((base[key],) if key in base else ())}
            reached, unreadable = self._reached(location, frozenset(old))
            if unreadable and related(key, location, made):
                raise StateUnreadable(
                    f"{unreadable}, and a reference needs it: {', '.join(sorted(names)[:5])}.",
                    hint="Nothing was deleted.",
                )
            # Of a table elsewhere that nobody can read, no file of ours can be read either.
            if not reached.isdisjoint(names_of_dead):
                holders |= names
                needed |= reached
        free = [_keep(phase, lambda path: plain(path) not in needed) for phase in dead]
        return SweepPlan(tuple(free), tuple(sorted(holders)), foreign, borrowed)

    # -- the dead --------------------------------------------------------------------------------------

    def _dead(
        self, made: Made, kin: Collection[str], base_time: datetime | None
    ) -> tuple[list[dict[str, int]], int, int]:
        """Data files; manifests; statistics and manifest lists; metadata. Then how many stay as not ours.

        `kin` are the tables at the base that may share files with the branch's.
        """
        known, lists = self._at_base(kin)
        data: dict[str, int] = {}
        manifests: dict[str, int] = {}
        rest: dict[str, int] = {}
        foreign: set[str] = set()
        borrowed: set[str] = set()
        lent = Borrowed(self._files, kin, base_time)
        places = tuple(made.places)
        own = {number: one for number, one in made.snapshots.items() if number not in known}
        for number, snapshot in own.items():
            rest[snapshot.manifest_list] = self._files.size(snapshot.manifest_list)
            for manifest in self._files.manifests(snapshot) or ():
                if manifest.added_snapshot_id != number:
                    continue
                manifests[manifest.manifest_path] = manifest.manifest_length
                entries = self._files.entries(manifest)
                for path, size in entries.added.items() if entries else ():
                    if not within(path, places):
                        foreign.add(path)
                    elif lent(path, snapshot, manifest):
                        borrowed.add(path)
                    else:
                        data[path] = size
        for metadata in made.own.values():
            for one in (*metadata.statistics, *metadata.partition_statistics):
                if one.snapshot_id in own:
                    rest[one.statistics_path] = one.file_size_in_bytes
        files = {path: self._files.size(path) for path in made.own if plain(path) not in lists}
        phases = [data, manifests, rest, files]
        ours = [_keep(phase, lambda path: within(path, places)) for phase in phases]
        outside = len(foreign) + sum(map(len, phases)) - sum(map(len, ours))
        return ours, outside, len(borrowed - data.keys())

    def _at_base(self, kin: Iterable[str]) -> tuple[set[int], set[str]]:
        """The snapshots, and the metadata files, that tables at the base know of."""
        snapshots: set[int] = set()
        files: set[str] = set()
        for location in kin:
            metadata = self._files.metadata(location)
            if metadata is None:
                raise FileUnreadable(f"{location} is missing, and the branch started from it.")
            snapshots |= {snapshot.snapshot_id for snapshot in metadata.snapshots}
            files |= {plain(location), *(plain(entry.metadata_file) for entry in metadata.metadata_log)}
        return snapshots, files

    # -- the living ------------------------------------------------------------------------------------

    def _others(
        self, tag: Reference, base: Mapping[ContentKey, str]
    ) -> dict[tuple[ContentKey, str], set[str]]:
        """Where tables stand at the other references, other than at the base; and at which ones."""
        found: dict[tuple[ContentKey, str], set[str]] = {}
        old = set(base.values())
        for ref in self._references.values():
            # What a sweep has claimed is dead: two half-done ones would wait for each other's lost metadata.
            if ref.name != tag.name and not is_ours(ref.name, ReferencePrefix.SWEEPING):
                for key, location in self._of(ref).items():
                    if location not in old:
                        found.setdefault((key, location), set()).add(ref.name)
        return found

    def _reached(self, location: str, old: frozenset[str]) -> tuple[frozenset[str], str | None]:
        """Everything a metadata file leads to, but for the snapshots that the metadata files `old` know.

        And what of it cannot be read, if anything. One answer for all plans.
        """
        if (location, old) not in self._reach:
            known: set[int] = set()
            for one in old:
                try:
                    metadata = self._files.metadata(one)
                except FileUnreadable:
                    continue  # then more is read than is needed
                known |= {snapshot.snapshot_id for snapshot in metadata.snapshots} if metadata else set()
            found: set[str] = set()
            why = None
            try:
                self._follow(location, known, found)
            except FileUnreadable as error:
                why = error.message.rstrip(".")
            self._reach[location, old] = frozenset(found), why
        return self._reach[location, old]

    def _follow(self, location: str, known: set[int], found: set[str]) -> None:
        found.add(plain(location))
        metadata = self._files.metadata(location)
        if metadata is None:
            raise FileUnreadable(f"{location} is missing")
        found |= {plain(entry.metadata_file) for entry in metadata.metadata_log}
        found |= {
            plain(one.statistics_path) for one in (*metadata.statistics, *metadata.partition_statistics)
        }
        for snapshot in metadata.snapshots:
            if snapshot.snapshot_id in known:
                continue
            found.add(plain(snapshot.manifest_list))
            manifests = self._files.manifests(snapshot)
            if manifests is None:
                raise FileUnreadable(f"{snapshot.manifest_list} is missing")
            for manifest in manifests:
                path = plain(manifest.manifest_path)
                if path in found:
                    continue
                found.add(path)
                if manifest.added_snapshot_id in known:
                    continue
                entries = self._files.entries(manifest)
                if entries is None:
                    raise FileUnreadable(f"{manifest.manifest_path} is missing")
                found |= {plain(one) for one in entries.live}

    # -- reading ---------------------------------------------------------------------------------------

    def _of(self, ref: Reference) -> dict[ContentKey, str]:
        """The tables of a reference; of our own branches only those that they changed themselves."""
        ancestor = ref.metadata.common_ancestor_hash if ref.metadata else None
        if ancestor is None or not is_ours(ref.name, ReferencePrefix.RUN, ReferencePrefix.PUBLICATION):
            return self._at(_as_listed(ref))
        if ref.name not in self._tables:
            changed = self._client.diff(f"@{ancestor}", _as_listed(ref)) if ancestor != ref.hash else ()
            self._tables[ref.name] = _locations((entry.key, entry.to_content) for entry in changed)
        return self._tables[ref.name]

    def _at(self, ref: str) -> dict[ContentKey, str]:
        if ref not in self._tables:
            entries = self._client.entries(ref, fetch_content=True)
            self._tables[ref] = _locations((entry.key, entry.content) for entry in entries)
        return self._tables[ref]

    def _homes(self, base_hash: str) -> Mapping[str, list[str]]:
        """The tables at the base by their folders."""
        if base_hash not in self._by_home:
            found: dict[str, list[str]] = {}
            for location in self._at(f"@{base_hash}").values():
                found.setdefault(plain(home(location)), []).append(location)
            self._by_home[base_hash] = found
        return self._by_home[base_hash]


def _is_base(base_hash: str, recorded_base: str, log: Sequence[LogEntry], made: Made, name: str) -> bool:
    """Whether the branch or tag `name` began at `base_hash`, the newest commit that it shares with `main`.

    It did not if `main` was set back: other commits of `main` then lie in between. They have one parent each,
    as those of the run do. Taken for the run's, their files were deleted, published ones among them.
    Dagster or the run's snapshots record the base. Where neither does, every commit must name the run.
    """
    if any(entry.commit.properties.get(LakeProperty.PUBLICATION_ID) for entry in log):
        return False
    recorded = made.recorded_bases(run_of(name)) | frozenset(filter(None, [recorded_base]))
    if recorded:
        return recorded <= {base_hash}
    writer = run_id_of(at_work_on(branch_name(run_of(name))))
    return all(made.names(writer, entry) for entry in log)


def _as_listed(ref: Reference) -> str:
    """A reference's state for Nessie, whether or not the reference is still there."""
    return f"@{ref.hash}"


def _locations(contents: Iterable[tuple[ContentKey, Content | None]]) -> dict[ContentKey, str]:
    return {key: content.metadata_location for key, content in contents if isinstance(content, IcebergTable)}


def _keep(files: Mapping[str, int], wanted: Callable[[str], bool]) -> dict[str, int]:
    return {path: size for path, size in files.items() if wanted(path)}
