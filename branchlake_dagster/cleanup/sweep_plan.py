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
from branchlake_dagster.runs.branch_names import is_own_reference, strip_name_prefix
from branchlake_dagster.runs.branch_owner import writer_branch
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix
from branchlake_dagster.tables.table_files import (
    FileUnreadable,
    TableFiles,
    is_in_folders,
    normalize_location,
    table_folders,
    table_root,
)


@dataclass(frozen=True)
class BranchOutput:
    """The keys a branch changed, the metadata files it named, and which of it was made by its own commits.

    All by location: `named_metadata` are all metadata files that can be read, `own_metadata` those that its
    commits wrote. `own_snapshots` are those that its own commits added.
    """

    changed_keys: frozenset[ContentKey]
    named_metadata: Mapping[str, TableMetadata]
    own_metadata: Mapping[str, TableMetadata]
    own_snapshots: Mapping[int, Snapshot]

    def recorded_bases(self, run_id: str) -> frozenset[str]:
        """The hashes that snapshots of a run, in files that its branch wrote, record as its base."""
        bases = {
            _summary_entry(snapshot, LakeProperty.BASE_HASH)
            for metadata in self.own_metadata.values()
            for snapshot in metadata.snapshots
            if _summary_entry(snapshot, LakeProperty.RUN_ID) == run_id
            and not _summary_entry(snapshot, LakeProperty.REPLAYED_FROM)
        }
        return frozenset(filter(None, bases))

    def is_commit_of_run(self, run_id: str, entry: LogEntry) -> bool:
        """Whether a commit says that run `run_id` made it: by its properties or, for Spark, by its snapshots.

        A commit that puts no table made no file, and counts as one that does; so does a table whose metadata
        an earlier sweep deleted.
        """
        if recorded_run_id := entry.commit.properties.get(LakeProperty.RUN_ID):
            return recorded_run_id == run_id
        tables = [
            operation.content
            for operation in entry.operations
            if isinstance(operation, Put) and isinstance(operation.content, IcebergTable)
        ]
        return all(self._is_table_of_run(run_id, table) for table in tables)

    def _is_table_of_run(self, run_id: str, table: IcebergTable) -> bool:
        metadata = self.named_metadata.get(table.metadata_location)
        if metadata is None:
            return True
        snapshots = (snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id == table.snapshot_id)
        return any(_summary_entry(snapshot, LakeProperty.RUN_ID) == run_id for snapshot in snapshots)

    @cached_property
    def folders(self) -> frozenset[str]:
        """The folders of its tables."""
        metadata_folders = {
            folder for metadata in self.named_metadata.values() for folder in table_folders(metadata)
        }
        return frozenset(metadata_folders | {table_root(location) for location in self.named_metadata})

    @cached_property
    def normalized_folders(self) -> frozenset[str]:
        """The same folders in one spelling."""
        return frozenset(map(normalize_location, self.folders))

    @cached_property
    def earlier_metadata(self) -> frozenset[str]:
        """The metadata files that the named ones came from, in one spelling."""
        return frozenset(
            normalize_location(entry.metadata_file)
            for metadata in self.named_metadata.values()
            for entry in metadata.metadata_log
        )


def collect_branch_output(
    log: Iterable[LogEntry], base_locations: Mapping[ContentKey, str], base_hash: str, files: TableFiles
) -> BranchOutput:
    """What the commits of `log`, newest first, made on top of the tables of `base_locations`.

    A commit wrote a metadata file, rather than registered it, when the file says that it came from the one
    the key held before, or from none where there was none. A snapshot is a commit's own when it is new in
    such a file. Raises FileUnreadable.
    """
    locations: dict[ContentKey, str | None] = dict(base_locations)
    seen_locations = {normalize_location(location) for location in base_locations.values()}
    changed_keys: set[ContentKey] = set()
    named_metadata: dict[str, TableMetadata] = {}
    own_metadata: dict[str, TableMetadata] = {}
    snapshots: dict[int, Snapshot] = {}
    registered_ids: set[int] = set()
    for entry in reversed(list(log)):
        is_merge = len(entry.commit.parent_hashes) > 1
        for operation in entry.operations:
            key = operation.key
            changed_keys.add(key)
            previous_location = locations.get(key)
            if isinstance(operation, Delete):
                locations[key] = None
            if not isinstance(operation, Put) or not isinstance(operation.content, IcebergTable):
                continue
            location = locations[key] = operation.content.metadata_location
            if normalize_location(location) in seen_locations:
                continue
            seen_locations.add(normalize_location(location))
            metadata = files.metadata(location)
            if metadata is None:
                continue  # an earlier sweep died when only metadata was left
            named_metadata[location] = metadata
            if is_merge or not _is_successor(metadata, previous_location):
                registered_ids |= {snapshot.snapshot_id for snapshot in metadata.snapshots}
                continue
            own_metadata[location] = metadata
            predecessor = files.metadata(previous_location) if previous_location else None
            if previous_location and predecessor is None:
                continue  # deleted by that sweep, which had deleted the snapshots' files before
            previous_ids = (
                {snapshot.snapshot_id for snapshot in predecessor.snapshots} if predecessor else set()
            )
            snapshots |= {
                snapshot.snapshot_id: snapshot
                for snapshot in metadata.snapshots
                if snapshot.snapshot_id not in previous_ids
            }
    own_snapshots = {
        snapshot_id: snapshot
        for snapshot_id, snapshot in snapshots.items()
        if snapshot_id not in registered_ids
        and _summary_entry(snapshot, LakeProperty.BASE_HASH) in (None, base_hash)
    }
    return BranchOutput(frozenset(changed_keys), named_metadata, own_metadata, own_snapshots)


def _is_successor(metadata: TableMetadata, previous_location: str | None) -> bool:
    if previous_location is None:
        return not metadata.metadata_log
    return bool(metadata.metadata_log) and normalize_location(
        metadata.metadata_log[-1].metadata_file
    ) == normalize_location(previous_location)


def _summary_entry(snapshot: Snapshot, name: str) -> str | None:
    return snapshot.summary.additional_properties.get(name) if snapshot.summary else None


class BorrowedFiles:
    """Tells data files that a snapshot's writer wrote from older ones that it only added to the table.

    `base` are the tables at the base that may hold such a file, `since` is the time of the base commit.
    """

    def __init__(self, files: TableFiles, base_locations: Iterable[str], since: datetime | None) -> None:
        self._files = files
        self._base_locations = tuple(base_locations)
        self._since = since
        self._base_files: set[str] | None = None

    def __call__(self, path: str, snapshot: Snapshot, manifest: ManifestFile) -> bool:
        """Whether the file may be older than the run.

        PyIceberg names manifests and data files of a commit by one UUID, and our IO manager adds only what
        it has just written. A change table's files are its input's, but for rows that were copied. Of any
        other file the store's clock must say that it is younger than the base, and the base's tables must
        not name it: a restored backup makes all files young.
        """
        if _summary_entry(snapshot, LakeProperty.CHANGE_OF):
            return not is_in_folders(path, (table_root(manifest.manifest_path),))
        commit_id = manifest.manifest_path.rpartition("/")[2].rpartition("-m")[0]
        if commit_id and commit_id in path.rpartition("/")[2]:
            return False
        if _summary_entry(snapshot, LakeProperty.STEP) and not _summary_entry(
            snapshot, LakeProperty.REPLAYED_FROM
        ):
            return False
        modified_at = self._files.modified_at(path)
        if modified_at is None:
            return self._files.size(path) > 0  # one that is gone already is nobody's
        return (
            self._since is None
            or modified_at < self._since
            or normalize_location(path) in self._load_base_files()
        )

    def _load_base_files(self) -> set[str]:
        if self._base_files is None:
            self._base_files = set()
            for location in self._base_locations:
                self._base_files |= self._load_live_files(location)
        return self._base_files

    def _load_live_files(self, location: str) -> set[str]:
        metadata = self._files.metadata(location)
        if metadata is None:
            raise FileUnreadable(f"{location} is missing.")
        current_snapshot = next(
            (s for s in metadata.snapshots if s.snapshot_id == metadata.current_snapshot_id), None
        )
        paths: set[str] = set()
        for manifest in (self._files.manifests(current_snapshot) or ()) if current_snapshot else ():
            entries = self._files.manifest_files(manifest)
            if entries is None:
                raise FileUnreadable(f"{manifest.manifest_path} is missing.")
            paths |= {normalize_location(path) for path in entries.live}
        return paths


def may_share_files(key: ContentKey, location: str, output: BranchOutput) -> bool:
    """Whether a table, by its key and metadata file, may share files with what a branch made."""
    return (
        key in output.changed_keys
        or normalize_location(table_root(location)) in output.normalized_folders
        or normalize_location(location) in output.earlier_metadata
    )


class StateUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Metadata that tells which files are needed is missing or damaged, so nobody can say which are not."""


class BaseUnknown(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` was set back: the commits that it shares with a discarded branch end before the branch began."""


@dataclass(frozen=True)
class SweepPlan:
    """Files by location with their size in bytes, in phases to be deleted one after the other.

    Files of a phase are named by later ones, so a sweep that died can be planned again. `held_by` are the
    references that need dead files; those, `outside_files` ones outside of the tables' own folders and
    `borrowed_files` ones that the run only added to its tables are kept.
    """

    phases: tuple[Mapping[str, int], ...] = ()
    held_by: tuple[str, ...] = ()
    outside_files: int = 0
    borrowed_files: int = 0

    @property
    def file_count(self) -> int:
        """How many files go."""
        return sum(len(phase) for phase in self.phases)

    @property
    def size_bytes(self) -> int:
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
        self._tables_by_folder: dict[str, dict[str, list[str]]] = {}
        self._reached_files: dict[tuple[str, frozenset[str]], tuple[frozenset[str], str | None]] = {}

    def forget_reference(self, name: str) -> None:
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
            return self._plan_sweep(tag, base_hash, base_time, recorded_base)
        except FileUnreadable as error:
            raise StateUnreadable(error.message, hint="Nothing was deleted.") from error

    def _plan_sweep(
        self, tag: Reference, base_hash: str, base_time: datetime | None, recorded_base: str
    ) -> SweepPlan:
        base_locations = self._load_tables_at(f"@{base_hash}")
        log = list(self._client.log(_pinned_ref(tag), since=base_hash, fetch_operations=True))
        output = collect_branch_output(log, base_locations, base_hash, self._files)
        if not _is_branch_base(base_hash, recorded_base, log, output, tag.name):
            raise BaseUnknown(
                f"Main was set back to {base_hash[:12]}, before the commit that the branch started from,"
                " or somebody else changed the branch."
                " The commits of the branch cannot be distinguished from those that main has lost.",
                branch=tag.name,
                hint="Nothing was deleted. Set main forward again, or delete the tag: its files then stay.",
            )
        related_locations = [
            location for key, location in base_locations.items() if may_share_files(key, location, output)
        ]
        dead_phases, outside_files, borrowed_files = self._find_dead_files(
            output, related_locations, base_time
        )
        dead_paths = {normalize_location(path) for phase in dead_phases for path in phase}
        needed_paths: set[str] = set()
        holders: set[str] = set()
        base_by_folder = self._load_base_by_folder(base_hash)
        for (key, location), ref_names in self._find_other_tables(tag, base_locations).items():
            old_locations = {
                *base_by_folder.get(normalize_location(table_root(location)), ()),
                *((base_locations[key],) if key in base_locations else ()),
            }
            reached_paths, problem = self._find_reached_files(location, frozenset(old_locations))
            if problem and may_share_files(key, location, output):
                raise StateUnreadable(
                    f"{problem}, and a reference needs it: {', '.join(sorted(ref_names)[:5])}.",
                    hint="Nothing was deleted.",
                )
            # Of a table elsewhere that nobody can read, no file of ours can be read either.
            if not reached_paths.isdisjoint(dead_paths):
                holders |= ref_names
                needed_paths |= reached_paths
        phases = [
            _filter_files(phase, lambda path: normalize_location(path) not in needed_paths)
            for phase in dead_phases
        ]
        return SweepPlan(tuple(phases), tuple(sorted(holders)), outside_files, borrowed_files)

    # -- the dead --------------------------------------------------------------------------------------

    def _find_dead_files(
        self, output: BranchOutput, related_locations: Collection[str], base_time: datetime | None
    ) -> tuple[list[dict[str, int]], int, int]:
        """Data files; manifests; statistics and manifest lists; metadata. Then how many stay as not ours.

        `related_locations` are the tables at the base that may share files with the branch's.
        """
        base_snapshots, base_metadata = self._load_base_state(related_locations)
        data: dict[str, int] = {}
        manifests: dict[str, int] = {}
        lists_and_statistics: dict[str, int] = {}
        outside_paths: set[str] = set()
        borrowed_paths: set[str] = set()
        is_borrowed = BorrowedFiles(self._files, related_locations, base_time)
        own_folders = tuple(output.folders)
        new_snapshots = {
            number: one for number, one in output.own_snapshots.items() if number not in base_snapshots
        }
        for snapshot_id, snapshot in new_snapshots.items():
            lists_and_statistics[snapshot.manifest_list] = self._files.size(snapshot.manifest_list)
            for manifest in self._files.manifests(snapshot) or ():
                if manifest.added_snapshot_id != snapshot_id:
                    continue
                manifests[manifest.manifest_path] = manifest.manifest_length
                entries = self._files.manifest_files(manifest)
                for path, size in entries.added.items() if entries else ():
                    if not is_in_folders(path, own_folders):
                        outside_paths.add(path)
                    elif is_borrowed(path, snapshot, manifest):
                        borrowed_paths.add(path)
                    else:
                        data[path] = size
        for metadata in output.own_metadata.values():
            for one in (*metadata.statistics, *metadata.partition_statistics):
                if one.snapshot_id in new_snapshots:
                    lists_and_statistics[one.statistics_path] = one.file_size_in_bytes
        metadata_files = {
            path: self._files.size(path)
            for path in output.own_metadata
            if normalize_location(path) not in base_metadata
        }
        phases = [data, manifests, lists_and_statistics, metadata_files]
        inside_phases = [
            _filter_files(phase, lambda path: is_in_folders(path, own_folders)) for phase in phases
        ]
        outside_count = len(outside_paths) + sum(map(len, phases)) - sum(map(len, inside_phases))
        return inside_phases, outside_count, len(borrowed_paths - data.keys())

    def _load_base_state(self, locations: Iterable[str]) -> tuple[set[int], set[str]]:
        """The snapshots, and the metadata files, that tables at the base know of."""
        snapshots: set[int] = set()
        metadata_files: set[str] = set()
        for location in locations:
            metadata = self._files.metadata(location)
            if metadata is None:
                raise FileUnreadable(f"{location} is missing, and the branch started from it.")
            snapshots |= {snapshot.snapshot_id for snapshot in metadata.snapshots}
            metadata_files |= {
                normalize_location(location),
                *(normalize_location(entry.metadata_file) for entry in metadata.metadata_log),
            }
        return snapshots, metadata_files

    # -- the living ------------------------------------------------------------------------------------

    def _find_other_tables(
        self, tag: Reference, base_locations: Mapping[ContentKey, str]
    ) -> dict[tuple[ContentKey, str], set[str]]:
        """Where tables stand at the other references, other than at the base; and at which ones."""
        ref_names: dict[tuple[ContentKey, str], set[str]] = {}
        old_locations = set(base_locations.values())
        for ref in self._references.values():
            # What a sweep has claimed is dead: two half-done ones would wait for each other's lost metadata.
            if ref.name != tag.name and not is_own_reference(ref.name, ReferencePrefix.SWEEPING):
                for key, location in self._load_tables(ref).items():
                    if location not in old_locations:
                        ref_names.setdefault((key, location), set()).add(ref.name)
        return ref_names

    def _find_reached_files(
        self, location: str, old_locations: frozenset[str]
    ) -> tuple[frozenset[str], str | None]:
        """Everything a metadata file leads to, but for the snapshots that the metadata files `old_locations` know.

        And what of it cannot be read, if anything. One answer for all plans.
        """
        if (location, old_locations) not in self._reached_files:
            old_snapshots: set[int] = set()
            for old_location in old_locations:
                try:
                    metadata = self._files.metadata(old_location)
                except FileUnreadable:
                    continue  # then more is read than is needed
                old_snapshots |= (
                    {snapshot.snapshot_id for snapshot in metadata.snapshots} if metadata else set()
                )
            paths: set[str] = set()
            problem = None
            try:
                self._collect_files(location, old_snapshots, paths)
            except FileUnreadable as error:
                problem = error.message.rstrip(".")
            self._reached_files[location, old_locations] = frozenset(paths), problem
        return self._reached_files[location, old_locations]

    def _collect_files(self, location: str, old_snapshots: set[int], paths: set[str]) -> None:
        paths.add(normalize_location(location))
        metadata = self._files.metadata(location)
        if metadata is None:
            raise FileUnreadable(f"{location} is missing")
        paths |= {normalize_location(entry.metadata_file) for entry in metadata.metadata_log}
        paths |= {
            normalize_location(live_path.statistics_path)
            for live_path in (*metadata.statistics, *metadata.partition_statistics)
        }
        for snapshot in metadata.snapshots:
            if snapshot.snapshot_id in old_snapshots:
                continue
            paths.add(normalize_location(snapshot.manifest_list))
            manifests = self._files.manifests(snapshot)
            if manifests is None:
                raise FileUnreadable(f"{snapshot.manifest_list} is missing")
            for manifest in manifests:
                path = normalize_location(manifest.manifest_path)
                if path in paths:
                    continue
                paths.add(path)
                if manifest.added_snapshot_id in old_snapshots:
                    continue
                entries = self._files.manifest_files(manifest)
                if entries is None:
                    raise FileUnreadable(f"{manifest.manifest_path} is missing")
                paths |= {normalize_location(live_path) for live_path in entries.live}

    # -- reading ---------------------------------------------------------------------------------------

    def _load_tables(self, ref: Reference) -> dict[ContentKey, str]:
        """The tables of a reference; of our own branches only those that they changed themselves."""
        ancestor = ref.metadata.common_ancestor_hash if ref.metadata else None
        if ancestor is None or not is_own_reference(
            ref.name, ReferencePrefix.RUN, ReferencePrefix.PUBLICATION
        ):
            return self._load_tables_at(_pinned_ref(ref))
        if ref.name not in self._tables:
            changed = self._client.diff(f"@{ancestor}", _pinned_ref(ref)) if ancestor != ref.hash else ()
            self._tables[ref.name] = _metadata_locations((entry.key, entry.to_content) for entry in changed)
        return self._tables[ref.name]

    def _load_tables_at(self, ref: str) -> dict[ContentKey, str]:
        if ref not in self._tables:
            entries = self._client.entries(ref, fetch_content=True)
            self._tables[ref] = _metadata_locations((entry.key, entry.content) for entry in entries)
        return self._tables[ref]

    def _load_base_by_folder(self, base_hash: str) -> Mapping[str, list[str]]:
        """The tables at the base by their folders."""
        if base_hash not in self._tables_by_folder:
            locations: dict[str, list[str]] = {}
            for location in self._load_tables_at(f"@{base_hash}").values():
                locations.setdefault(normalize_location(table_root(location)), []).append(location)
            self._tables_by_folder[base_hash] = locations
        return self._tables_by_folder[base_hash]


def _is_branch_base(
    base_hash: str, recorded_base: str, log: Sequence[LogEntry], output: BranchOutput, name: str
) -> bool:
    """Whether the branch or tag `name` began at `base_hash`, the newest commit that it shares with `main`.

    It did not if `main` was set back: other commits of `main` then lie in between. They have one parent each,
    as those of the run do. Taken for the run's, their files were deleted, published ones among them.
    Dagster or the run's snapshots record the base. Where neither does, every commit must name the run.
    """
    if any(entry.commit.properties.get(LakeProperty.PUBLICATION_ID) for entry in log):
        return False
    recorded_bases = output.recorded_bases(strip_name_prefix(name)) | frozenset(filter(None, [recorded_base]))
    if recorded_bases:
        return recorded_bases <= {base_hash}
    writer_run_id = run_id_of_branch(writer_branch(run_branch_name(strip_name_prefix(name))))
    return all(output.is_commit_of_run(writer_run_id, entry) for entry in log)


def _pinned_ref(ref: Reference) -> str:
    """A reference's state for Nessie, whether or not the reference is still there."""
    return f"@{ref.hash}"


def _metadata_locations(contents: Iterable[tuple[ContentKey, Content | None]]) -> dict[ContentKey, str]:
    return {key: content.metadata_location for key, content in contents if isinstance(content, IcebergTable)}


def _filter_files(files: Mapping[str, int], is_wanted: Callable[[str], bool]) -> dict[str, int]:
    return {path: size for path, size in files.items() if is_wanted(path)}
