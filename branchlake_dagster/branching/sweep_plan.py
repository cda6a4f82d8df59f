"""Which files a discarded branch left that no other reference can reach.

Dead is what was committed on the branch since its base: metadata files, the snapshots that are new in them,
and what each of those added. Needed is what any other reference reaches: the same snapshots (its state was
copied), or the same manifests and data files in snapshots of its own (they were replayed by a rebase, or
merged into newer manifests). Dead and not needed may be deleted. In doubt a file is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.branching.discard import SWEEPING_PREFIX
from branchlake_dagster.branching.reaper import PUBLICATION_PREFIX
from branchlake_dagster.branching.table_files import TableFiles, folders, plain, within
from branchlake_dagster.lakehouse.errors import BranchlakeError, Transient
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import Content, ContentKey, IcebergTable, Put, Reference
from branchlake_dagster.settings import RUN_BRANCH_PREFIX


class StateUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Metadata that another reference needs is missing, so nobody can say which files it reaches."""


@dataclass(frozen=True)
class Plan:
    """Files by location with their size in bytes, in phases to be deleted one after the other.

    Files of a phase are named by later ones, so a sweep that died can be planned again. `held_by` are the
    references that need dead files; those, and `foreign` ones outside of the tables' own folders, are kept.
    """

    phases: tuple[Mapping[str, int], ...] = ()
    held_by: tuple[str, ...] = ()
    foreign: int = 0

    @property
    def files(self) -> int:
        """How many files go."""
        return sum(len(phase) for phase in self.phases)

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(sum(phase.values()) for phase in self.phases)


class Planner:
    """Plans sweeps against the present references; contents and files are read once for all plans.

    `references` are all branches and tags, with metadata, listed after the fence.
    """

    def __init__(self, client: NessieClient, files: TableFiles, references: Iterable[Reference]) -> None:
        self._client = client
        self._files = files
        self._references = {ref.name: ref for ref in references}
        self._tables: dict[str, dict[ContentKey, str]] = {}

    def forget(self, name: str) -> None:
        """A reference is gone; what only it reached is dead now."""
        self._references.pop(name, None)

    def plan(self, tag: Reference, base_hash: str) -> Plan:
        """What may be deleted of `tag`, which left `main` at `base_hash`. Raises StateUnreadable."""
        base = self._at(f"@{base_hash}")
        written, touched = self._written(tag, base_hash)
        for location in base.values():
            written.pop(location, None)
        known = self._snapshot_ids(base[key] for key in touched if key in base)
        dead = self._dead(written, known)
        needed: set[str] = set()
        holders: set[str] = set()
        names_of_dead = {plain(path) for phase in dead for path in phase}
        for (key, location), names in self._others(tag, base).items():
            reached = set(self._reached(location, self._snapshot_ids([base[key]] if key in base else [])))
            if reached & names_of_dead:
                holders |= names
                needed |= reached
        places = {place for metadata in written.values() for place in folders(metadata)}
        free = [_keep(phase, lambda path: plain(path) not in needed) for phase in dead]
        ours = [_keep(phase, lambda path: within(path, places)) for phase in free]
        foreign = sum(map(len, free)) - sum(map(len, ours))
        return Plan(tuple(ours), tuple(sorted(holders)), foreign)

    # -- the dead --------------------------------------------------------------------------------------

    def _written(self, tag: Reference, base_hash: str) -> tuple[dict[str, TableMetadata], set[ContentKey]]:
        """The metadata files that were committed since the base, and the keys of those commits."""
        written: dict[str, TableMetadata] = {}
        touched: set[ContentKey] = set()
        for entry in self._client.log(_as_listed(tag), since=base_hash, fetch_operations=True):
            for operation in entry.operations:
                touched.add(operation.key)
                if isinstance(operation, Put) and isinstance(operation.content, IcebergTable):
                    location = operation.content.metadata_location
                    metadata = self._files.metadata(location)
                    if metadata is not None:  # else an earlier sweep died when only metadata was left
                        written[location] = metadata
        return written, touched

    def _dead(self, written: Mapping[str, TableMetadata], known: set[int]) -> list[dict[str, int]]:
        """Data files; manifests; statistics and manifest lists; metadata."""
        data: dict[str, int] = {}
        manifests: dict[str, int] = {}
        rest: dict[str, int] = {}
        for metadata in written.values():
            for snapshot in metadata.snapshots:
                number, listed = snapshot.snapshot_id, snapshot.manifest_list
                if number in known or listed in rest:
                    continue
                rest[listed] = self._files.size(listed)
                for manifest in self._files.manifests(snapshot) or ():
                    if manifest.added_snapshot_id == number:
                        manifests[manifest.manifest_path] = manifest.manifest_length
                        entries = self._files.entries(manifest)
                        data |= entries.added if entries else {}
            for one in metadata.statistics:
                if one.snapshot_id not in known:
                    rest[one.statistics_path] = one.file_size_in_bytes
        return [data, manifests, rest, {path: self._files.size(path) for path in written}]

    # -- the living ------------------------------------------------------------------------------------

    def _others(
        self, tag: Reference, base: Mapping[ContentKey, str]
    ) -> dict[tuple[ContentKey, str], set[str]]:
        """Where tables stand at the other references, other than at the base; and at which ones."""
        found: dict[tuple[ContentKey, str], set[str]] = {}
        old = set(base.values())
        for ref in self._references.values():
            # What a sweep has claimed is dead: two half-done ones would wait for each other's lost metadata.
            if ref.name != tag.name and not ref.name.startswith(SWEEPING_PREFIX):
                for key, location in self._of(ref).items():
                    if location not in old:
                        found.setdefault((key, location), set()).add(ref.name)
        return found

    def _reached(self, location: str, known: set[int]) -> Iterator[str]:
        """Everything that a metadata file leads to, but for what was there in the snapshots `known`."""
        metadata = self._require(location)
        yield plain(location)
        yield from (plain(entry.metadata_file) for entry in metadata.metadata_log)
        yield from (plain(one.statistics_path) for one in metadata.statistics)
        for snapshot in metadata.snapshots:
            if snapshot.snapshot_id in known:
                continue
            yield plain(snapshot.manifest_list)
            manifests = self._files.manifests(snapshot)
            if manifests is None:
                raise _missing(snapshot.manifest_list)
            for manifest in manifests:
                yield plain(manifest.manifest_path)
                if manifest.added_snapshot_id in known:
                    continue
                entries = self._files.entries(manifest)
                if entries is None:
                    raise _missing(manifest.manifest_path)
                yield from (plain(path) for path in entries.live)

    # -- reading ---------------------------------------------------------------------------------------

    def _of(self, ref: Reference) -> dict[ContentKey, str]:
        """The tables of a reference; of our own branches only those that they changed themselves."""
        ancestor = ref.metadata.common_ancestor_hash if ref.metadata else None
        if ancestor is None or not ref.name.startswith((RUN_BRANCH_PREFIX, PUBLICATION_PREFIX)):
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

    def _snapshot_ids(self, locations: Iterable[str]) -> set[int]:
        return {snapshot.snapshot_id for one in locations for snapshot in self._require(one).snapshots}

    def _require(self, location: str) -> TableMetadata:
        found = self._files.metadata(location)
        if found is None:
            raise _missing(location)
        return found


def _as_listed(ref: Reference) -> str:
    """A reference's state for Nessie, whether or not the reference is still there."""
    return f"@{ref.hash}"


def _locations(contents: Iterable[tuple[ContentKey, Content | None]]) -> dict[ContentKey, str]:
    return {key: content.metadata_location for key, content in contents if isinstance(content, IcebergTable)}


def _keep(files: Mapping[str, int], wanted: Callable[[str], bool]) -> dict[str, int]:
    return {path: size for path, size in files.items() if wanted(path)}


def _missing(location: str) -> StateUnreadable:
    return StateUnreadable(f"{location} is missing, and a reference needs it.", hint="Nothing was deleted.")
