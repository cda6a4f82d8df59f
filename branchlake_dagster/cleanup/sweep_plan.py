"""Plan which files of a discarded branch can be deleted because no other reference needs them.

Dead files are those that the branch's own commits made since its base: metadata files, and the files of the
snapshots that are new in them. Files that existed at the base, under any key, are not dead. Needed files are
those that another reference reaches, under any key and in any spelling of their locations, and those of
tables that `main` has dropped since: these can be restored. A copy of a branch has the same snapshots. A
rebase or a merge of manifests leads to other snapshots with the same manifests and data files. Dead files
that are not needed may be deleted. In doubt a file is kept.

A branch may also name files that it did not make. `register_table` names a metadata file of another writer: a
copy of a table of `main`, or an older state. `add_files` names data files of other writers. A sweeper that
took these for the run's own files once deleted files of `main`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np
from pyiceberg.manifest import ManifestFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.errors import BranchlakeError, Terminal, Transient
from branchlake_dagster.history.capture import summary_value
from branchlake_dagster.lakehouse.lakehouse import MAIN
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
from branchlake_dagster.runs.branch_owner import is_own_reference, strip_name_prefix, writer_branch
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix
from branchlake_dagster.tables.location_keys import Keys, LocationKeyer
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
    """The keys, metadata files and snapshots in the commits of a branch.

    `named_metadata` are all existing metadata files that the commits put, by location. `own_metadata` are
    those of them that the branch's commits wrote. `own_snapshots` are the snapshots that its commits added,
    by id.
    """

    changed_keys: frozenset[ContentKey]
    named_metadata: Mapping[str, TableMetadata]
    own_metadata: Mapping[str, TableMetadata]
    own_snapshots: Mapping[int, Snapshot]

    def recorded_bases(self, run_id: str) -> frozenset[str]:
        """Return the base hashes that the run's snapshots record, in metadata files that its branch wrote.

        Replayed snapshots are left out.
        """
        bases = {
            summary_value(snapshot, LakeProperty.BASE_HASH)
            for metadata in self.own_metadata.values()
            for snapshot in metadata.snapshots
            if summary_value(snapshot, LakeProperty.RUN_ID) == run_id
            and not summary_value(snapshot, LakeProperty.REPLAYED_FROM)
        }
        return frozenset(filter(None, bases))

    def is_commit_of_run(self, run_id: str, entry: LogEntry) -> bool:
        """Return whether run `run_id` made a commit, by its properties or, for Spark, by its snapshots.

        A commit without a table made no file, so it counts as the run's. So does a table whose metadata an
        earlier sweep has deleted.
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
        return any(summary_value(snapshot, LakeProperty.RUN_ID) == run_id for snapshot in snapshots)

    @cached_property
    def folders(self) -> frozenset[str]:
        """The folders of the branch's tables."""
        metadata_folders = {
            folder for metadata in self.named_metadata.values() for folder in table_folders(metadata)
        }
        return frozenset(metadata_folders | {table_root(location) for location in self.named_metadata})

    @cached_property
    def normalized_folders(self) -> frozenset[str]:
        """The folders of the branch's tables, as normalized locations."""
        return frozenset(map(normalize_location, self.folders))

    @cached_property
    def earlier_metadata(self) -> frozenset[str]:
        """The earlier metadata files in the logs of the named metadata files, as normalized locations."""
        return frozenset(
            normalize_location(entry.metadata_file)
            for metadata in self.named_metadata.values()
            for entry in metadata.metadata_log
        )


def collect_branch_output(
    log: Iterable[LogEntry], base_locations: Mapping[ContentKey, str], base_hash: str, files: TableFiles
) -> BranchOutput:
    """Collect the keys, metadata files and snapshots of a branch's commits, `log` (newest first).

    `base_locations` are the metadata locations of the tables at the base, by key.

    A commit wrote a metadata file, and did not only register it, if the file names the right predecessor.
    This is the file that the key had before, or none for a new key. A commit's own snapshots are those that
    are new in such a file. Raises FileUnreadable.
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
                continue  # an earlier, interrupted sweep has deleted it
            named_metadata[location] = metadata
            if is_merge or not _is_successor(metadata, previous_location):
                registered_ids |= {snapshot.snapshot_id for snapshot in metadata.snapshots}
                continue
            own_metadata[location] = metadata
            predecessor = files.metadata(previous_location) if previous_location else None
            if previous_location and predecessor is None:
                continue  # deleted by that sweep, which deletes the snapshots' files first
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
        and summary_value(snapshot, LakeProperty.BASE_HASH) in (None, base_hash)
    }
    return BranchOutput(frozenset(changed_keys), named_metadata, own_metadata, own_snapshots)


def _is_successor(metadata: TableMetadata, previous_location: str | None) -> bool:
    if previous_location is None:
        return not metadata.metadata_log
    return bool(metadata.metadata_log) and normalize_location(
        metadata.metadata_log[-1].metadata_file
    ) == normalize_location(previous_location)


class BorrowedFiles:
    """Distinguishes data files that a snapshot's writer wrote from older files that it only added.

    `base_locations` are the metadata locations of the tables at the base that may have such a file. `since`
    is the time of the base commit; if it is None, every file that the names do not prove as new counts as
    older.
    """

    def __init__(self, files: TableFiles, base_locations: Iterable[str], since: datetime | None) -> None:
        self._files = files
        self._base_locations = tuple(base_locations)
        self._since = since
        self._base_files: set[str] | None = None

    def __call__(self, path: str, snapshot: Snapshot, manifest: ManifestFile) -> bool:
        """Return whether the data file `path`, added by `manifest` of `snapshot`, may be older than the run.

        PyIceberg names the manifests and data files of one commit by one UUID, and the IO manager adds only
        files that it has just written. The files of a change table belong to its input, except for copied
        rows. Any other file must be newer than the base by the store's clock. No table at the base may
        contain it either, because a restored backup makes all files look new.
        """
        if summary_value(snapshot, LakeProperty.CHANGE_OF):
            return not is_in_folders(path, (table_root(manifest.manifest_path),))
        commit_id = manifest.manifest_path.rpartition("/")[2].rpartition("-m")[0]
        if commit_id and commit_id in path.rpartition("/")[2]:
            return False
        if summary_value(snapshot, LakeProperty.STEP) and not summary_value(
            snapshot, LakeProperty.REPLAYED_FROM
        ):
            return False
        modified_at = self._files.modified_at(path)
        if modified_at is None:
            return self._files.size(path) > 0  # a file that is gone needs no owner
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
    """Return whether the table at `key`, with its metadata file `location`, may share files with a branch.

    This is so if the branch changed the key, has a table in the same folder, or wrote a successor of the
    metadata file.
    """
    return (
        key in output.changed_keys
        or normalize_location(table_root(location)) in output.normalized_folders
        or normalize_location(location) in output.earlier_metadata
    )


class StateUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Metadata is missing or damaged, so it is unknown which files are still needed."""


class BaseUnknown(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` was set back to before a discarded branch began, so the branch's own commits are unknown."""


@dataclass(frozen=True)
class SweepPlan:
    """The files to delete. Each phase maps locations to sizes in bytes; phases are deleted in order.

    Files of one phase are named by files of later phases, so an interrupted sweep can be planned again.
    `held_by` are the names of the references that need some of the dead files; these files are kept.
    `outside_files` is the number of kept files outside of the tables' own folders, and `borrowed_files` that
    of kept files that the run added to its tables but did not write.
    """

    phases: tuple[Mapping[str, int], ...] = ()
    held_by: tuple[str, ...] = ()
    outside_files: int = 0
    borrowed_files: int = 0

    @property
    def file_count(self) -> int:
        """The number of files to delete."""
        return sum(len(phase) for phase in self.phases)

    @property
    def size_bytes(self) -> int:
        """The total size of the files to delete."""
        return sum(sum(phase.values()) for phase in self.phases)


class SweepPlanner:
    """Plans which files of discarded branches may be deleted because no present reference needs them.

    Contents and files are read once for all plans. `references` are all branches and tags, with Nessie's
    metadata. List them after the tags of the discarded branches were claimed, because another reference may
    have been created from a tag until then.
    """

    def __init__(self, client: NessieClient, files: TableFiles, references: Iterable[Reference]) -> None:
        self._client = client
        self._files = files
        self._references = {ref.name: ref for ref in references}
        self._tables: dict[str, dict[ContentKey, str]] = {}
        self._tables_by_folder: dict[str, dict[str, list[str]]] = {}
        self._reached_files: dict[tuple[str, frozenset[str]], tuple[Keys, str | None]] = {}
        self._keyer = LocationKeyer()

    def forget_reference(self, name: str) -> None:
        """Remove a deleted reference. Files that only it reached are no longer needed."""
        self._references.pop(name, None)

    def plan(
        self, tag: Reference, base_hash: str, base_time: datetime | None, recorded_base: str = ""
    ) -> SweepPlan:
        """Plan which files of the discarded branch `tag` may be deleted. Deletes nothing.

        `base_hash` is the newest commit that the branch shares with `main`, made at `base_time`.
        `recorded_base` is the base hash in the run's tags, or empty. Raises StateUnreadable if metadata is
        missing or damaged. Raises BaseUnknown if `main` was set back to before the commit that the branch
        started from.
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
                f"main was set back to {base_hash[:12]}, before the commit that the branch started from,"
                " or another writer changed the branch."
                " The commits of the branch cannot be distinguished from those that main has lost.",
                branch=tag.name,
                hint="Nothing was deleted. Set main forward again, or delete the tag, which keeps its files.",
            )
        related_locations = [
            location for key, location in base_locations.items() if may_share_files(key, location, output)
        ]
        dead_phases, outside_files, borrowed_files = self._find_dead_files(
            output, related_locations, base_time
        )
        dead_paths = [path for phase in dead_phases for path in phase]
        dead_keys = self._keyer.keys(dead_paths)
        is_needed = np.zeros(len(dead_paths), np.bool_)
        holders: set[str] = set()
        base_by_folder = self._load_base_by_folder(base_hash)
        other_tables = self._find_other_tables(tag, base_locations)
        for table in self._find_dropped_tables(base_hash, output.changed_keys):
            other_tables.setdefault(table, set()).add(MAIN)
        for (key, location), ref_names in other_tables.items():
            old_locations = {
                *base_by_folder.get(normalize_location(table_root(location)), ()),
                *((base_locations[key],) if key in base_locations else ()),
            }
            reached_keys, problem = self._find_reached_files(location, frozenset(old_locations))
            if problem and may_share_files(key, location, output):
                raise StateUnreadable(
                    f"{problem}, and a reference needs it: {', '.join(sorted(ref_names)[:5])}.",
                    hint="Nothing was deleted.",
                )
            # An unreadable table elsewhere cannot lead to files of this branch.
            is_reached = np.isin(dead_keys, reached_keys)
            if is_reached.any():
                holders |= ref_names
                is_needed |= is_reached
        needed_paths = {dead_paths[number] for number in np.flatnonzero(is_needed).tolist()}
        phases = [_filter_files(phase, lambda path: path not in needed_paths) for phase in dead_phases]
        return SweepPlan(tuple(phases), tuple(sorted(holders)), outside_files, borrowed_files)

    # -- dead files ------------------------------------------------------------------------------------

    def _find_dead_files(
        self, output: BranchOutput, related_locations: Collection[str], base_time: datetime | None
    ) -> tuple[list[dict[str, int]], int, int]:
        """Return the dead files in four phases, then the numbers of outside and of borrowed files.

        The phases are data files, manifests, statistics with manifest lists, and metadata; each maps
        locations to sizes. Outside files are not in a folder of the branch's tables. Borrowed files may be
        older than the run. `related_locations` are the metadata files of tables at the base that may share
        files with the branch.
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
            number: snapshot
            for number, snapshot in output.own_snapshots.items()
            if number not in base_snapshots
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
            for statistics in (*metadata.statistics, *metadata.partition_statistics):
                if statistics.snapshot_id in new_snapshots:
                    lists_and_statistics[statistics.statistics_path] = statistics.file_size_in_bytes
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
        """Return the snapshot ids and the normalized metadata locations that tables at the base refer to.

        Raises FileUnreadable if a metadata file is missing.
        """
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

    # -- needed files ----------------------------------------------------------------------------------

    def _find_other_tables(
        self, tag: Reference, base_locations: Mapping[ContentKey, str]
    ) -> dict[tuple[ContentKey, str], set[str]]:
        """Return the tables of other references that differ from the base.

        The result maps (key, metadata location) to the names of the references with this table.
        """
        ref_names: dict[tuple[ContentKey, str], set[str]] = {}
        old_locations = set(base_locations.values())
        for ref in self._references.values():
            # States that a sweep has claimed are dead. Otherwise two interrupted sweeps would wait for each
            # other's deleted metadata.
            if ref.name != tag.name and not is_own_reference(ref.name, ReferencePrefix.SWEEPING):
                for key, location in self._load_tables(ref).items():
                    if location not in old_locations:
                        ref_names.setdefault((key, location), set()).add(ref.name)
        return ref_names

    def _find_dropped_tables(
        self, base_hash: str, keys: Collection[ContentKey]
    ) -> set[tuple[ContentKey, str]]:
        """Return tables that `main` dropped since a base, as (key, metadata location) before the drop.

        Somebody may have merged the discarded branch into `main`. A dropped table can be restored until the
        history horizon, so its files are left to the garbage collection. Reads the log of `main` only if
        `main` lacks one of the `keys`.
        """
        main = self._references.get(MAIN)
        missing_keys = set(keys) - self._load_tables(main).keys() if main is not None else set()
        if main is None or not missing_keys:
            return set()
        tables: set[tuple[ContentKey, str]] = set()
        for entry in self._client.log(_pinned_ref(main), since=base_hash, fetch_operations=True):
            dropped_keys = [
                operation.key
                for operation in entry.operations
                if isinstance(operation, Delete) and operation.key in missing_keys
            ]
            if dropped_keys:
                contents = self._client.contents(f"@{entry.commit.parent_hashes[0]}", dropped_keys)
                tables |= set(_metadata_locations(contents.items()).items())
        return tables

    def _find_reached_files(self, location: str, old_locations: frozenset[str]) -> tuple[Keys, str | None]:
        """Return the keys of all files that a metadata file refers to (`LocationKeyer.keys`).

        Files of snapshots that are in the metadata files `old_locations` too are left out. The second value
        is a sentence about a file that could not be read, or None. Results are cached for all plans.
        """
        if (location, old_locations) not in self._reached_files:
            old_snapshots: set[int] = set()
            for old_location in old_locations:
                try:
                    metadata = self._files.metadata(old_location)
                except FileUnreadable:
                    continue  # then more is read than necessary
                old_snapshots |= (
                    {snapshot.snapshot_id for snapshot in metadata.snapshots} if metadata else set()
                )
            paths: set[str] = set()
            problem = None
            try:
                self._collect_files(location, old_snapshots, paths)
            except FileUnreadable as error:
                problem = error.message.rstrip(".")
            self._reached_files[location, old_locations] = self._keyer.keys(list(paths)), problem
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
        """Load the metadata locations of the tables at a reference, by key.

        For branchlake's branches, only the tables that they changed are returned.
        """
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
        """Return the metadata locations of the tables at the base, by the normalized folder of the table."""
        if base_hash not in self._tables_by_folder:
            locations: dict[str, list[str]] = {}
            for location in self._load_tables_at(f"@{base_hash}").values():
                locations.setdefault(normalize_location(table_root(location)), []).append(location)
            self._tables_by_folder[base_hash] = locations
        return self._tables_by_folder[base_hash]


def _is_branch_base(
    base_hash: str, recorded_base: str, log: Sequence[LogEntry], output: BranchOutput, name: str
) -> bool:
    """Return whether branch `name` started from `base_hash`, the newest commit that it shares with `main`.

    It did not if `main` was set back: then `log`, the commits since `base_hash`, also has commits that `main`
    has lost. They have one parent each, like the run's commits. When they were once taken for the run's
    commits, even published files were deleted. The base is recorded in the run's tags or its snapshots. If
    neither records it, every commit must name the run.
    """
    if any(entry.commit.properties.get(LakeProperty.PUBLICATION_ID) for entry in log):
        return False
    recorded_bases = output.recorded_bases(strip_name_prefix(name)) | frozenset(filter(None, [recorded_base]))
    if recorded_bases:
        return recorded_bases <= {base_hash}
    writer_run_id = run_id_of_branch(writer_branch(run_branch_name(strip_name_prefix(name))))
    return all(output.is_commit_of_run(writer_run_id, entry) for entry in log)


def _pinned_ref(ref: Reference) -> str:
    """Return Nessie's notation for the reference's hash. It is valid even if the reference is deleted."""
    return f"@{ref.hash}"


def _metadata_locations(contents: Iterable[tuple[ContentKey, Content | None]]) -> dict[ContentKey, str]:
    return {key: content.metadata_location for key, content in contents if isinstance(content, IcebergTable)}


def _filter_files(files: Mapping[str, int], is_wanted: Callable[[str], bool]) -> dict[str, int]:
    return {path: size for path, size in files.items() if is_wanted(path)}
