"""Mark the files that are reachable from live states of tables.

A state leads to its metadata file, the manifest lists of its snapshots, their manifests, the data and
delete files that these manifests list and do not mark as removed, and its statistics. It does not lead to
earlier metadata files: an earlier metadata file is reachable only if a live commit has it.

A metadata file, manifest list or manifest that is missing or damaged hides the files that it names:

- A metadata file hides all files of its table, which may lie in the folders of other tables. Then all files
  of the warehouse are kept.
- A manifest list or manifest hides only some files. Then all files of the table's folders are kept, and of
  the folders where its other files lie.

Files outside the warehouse may belong to others. If such a file can never be read again (its bucket is
gone, or its scheme is unknown), its table is kept as if a manifest could not be read. If a storage does not
answer or refuses access, the pass ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntryStatus, ManifestFile
from pyiceberg.table import TableProperties

from branchlake_dagster.catalog.stored_files import (
    Answer,
    Item,
    StoredFileDamaged,
    map_concurrently,
    read_content,
    read_metadata_fields,
    wrap_parse_errors,
)
from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.garbage_collection.live_history import LiveState
from branchlake_dagster.garbage_collection.metadata_cache import ManifestKeys, MetadataCache, StateFiles
from branchlake_dagster.internals.manifest_files import iter_entries, iter_manifests
from branchlake_dagster.tables.location_keys import (
    KeySet,
    LocationKeyer,
    canonical_location,
    is_inside,
)
from branchlake_dagster.tables.table_files import table_root

_FILES_AT_ONCE = 256
_MAX_FORMAT_VERSION = 3
"""The newest format version of Iceberg whose metadata is understood."""
_ABSOLUTE = r"^(?:/|[A-Za-z][A-Za-z0-9+.\-]*:)"
_POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""The errors that Polars raises for an Avro file with a codec or type that it does not support."""
_FOLDER_PROPERTIES = (
    TableProperties.WRITE_DATA_PATH,
    TableProperties.WRITE_METADATA_PATH,
    "write.object-storage.path",
    "write.folder-storage.path",
)


_PERMANENT_ERRORS = (FileNotFoundError, ValueError, ImportError, NotImplementedError)
"""Errors that every later attempt would raise again. PyIceberg raises ValueError for an unknown scheme.

PermissionError is not among them: credentials expire, and the file may lead to files of the warehouse.
"""
_MISSING_BUCKET = "NO_SUCH_BUCKET"
"""The object store's error code for a missing bucket.

PyArrow raises OSError with this code in its message.
"""


def is_permanent(error: Exception) -> bool:
    """Return whether reading the file again would fail in the same way."""
    return isinstance(error, _PERMANENT_ERRORS) or _MISSING_BUCKET in str(error)


class RootsUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """The storage did not answer for a metadata file, so it is unknown which files are still needed."""


def parse_state(metadata: Mapping[str, Any]) -> StateFiles:
    """Return the files and folders that table metadata names. `metadata` are the fields of its JSON.

    Raises ValueError for a format version above 3, whose locations may mean something else, and for a
    relative location.
    """
    if metadata["format-version"] > _MAX_FORMAT_VERSION:
        raise ValueError(f"The format version {metadata['format-version']} is not known.")
    snapshots = metadata.get("snapshots") or ()
    properties = metadata.get("properties") or {}
    folders = [metadata.get("location"), *(properties.get(name) for name in _FOLDER_PROPERTIES)]
    statistics = [*(metadata.get("statistics") or ()), *(metadata.get("partition-statistics") or ())]
    files = StateFiles(
        tuple(each["manifest-list"] for each in snapshots if each.get("manifest-list")),
        tuple((path, 0) for each in snapshots for path in each.get("manifests") or ()),
        tuple(each["statistics-path"] for each in statistics),
        tuple(f"{folder.rstrip('/')}/" for folder in folders if folder),
    )
    _require_absolute(
        pl.Series([*files.manifest_lists, *files.statistics, *(path for path, _ in files.manifests)])
    )
    return files


def _require_absolute(paths: pl.Series) -> None:
    """Raise ValueError if a path is null or relative: its file would not count as reachable."""
    if paths.is_empty():
        return
    is_absolute = paths.cast(pl.String).str.contains(_ABSOLUTE).fill_null(value=False)
    if not is_absolute.all():
        raise ValueError(f"The location {paths.filter(~is_absolute)[0]!r} is relative.")


def conventional_folders(location: str) -> tuple[str, ...]:
    """Return the folder of a table, from the path of its metadata file: a tuple of one folder, or of none.

    The result is empty unless the file lies in a folder `metadata`. So if somebody copied a metadata file
    to another folder and registered the copy, that folder does not count as a table's folder.
    """
    return (table_root(location),) if location.rpartition("/")[0].endswith("/metadata") else ()


def read_manifest_list(io: FileIO, location: str, size: int = 0) -> list[tuple[str, int]]:
    """Return the path and the length in bytes of each manifest in a manifest list.

    `size` is the size of the file in bytes; 0 if unknown. If fewer bytes are read, the list is damaged,
    although its first blocks may be readable. Raises FileNotFoundError or another OSError if the list cannot
    be read, and StoredFileDamaged.
    """
    content = read_content(io, location, size)
    with wrap_parse_errors(location):
        try:
            columns = pl.read_avro(BytesIO(content), columns=["manifest_path", "manifest_length"])
            paths, lengths = columns["manifest_path"].to_list(), columns["manifest_length"].to_list()
            manifests = list(zip(paths, lengths, strict=True))
        except _POLARS_ERRORS:
            manifests = [(each.manifest_path, each.manifest_length) for each in iter_manifests(content)]
        _require_absolute(pl.Series([path for path, _ in manifests]))
    return manifests


@dataclass(frozen=True)
class ManifestPaths:
    """The paths of files in a manifest.

    `live` are the files that the manifest does not mark as removed. `removed_by` has the id of the snapshot
    that removed each file of `removed`, or -1 if it is unknown.
    """

    live: pl.Series
    removed: pl.Series
    removed_by: npt.NDArray[np.int64]


def read_manifest_paths(io: FileIO, location: str, length: int) -> ManifestPaths:
    """Return the files that a manifest lists, live and removed. Raises the errors of `read_manifest_list`.

    `length` is the recorded length in bytes; 0 if unknown. A manifest that is shorter is damaged, although
    its first blocks may be readable.
    """
    content = read_content(io, location, length)
    try:
        rows = pl.read_avro(BytesIO(content), columns=["status", "snapshot_id", "data_file"]).select(
            "status", "snapshot_id", pl.col("data_file").struct.field("file_path")
        )
    except _POLARS_ERRORS:
        with wrap_parse_errors(location):
            rows = _read_entries(content, location)
    with wrap_parse_errors(location):
        _require_absolute(rows["file_path"])
    is_removed = rows["status"] == ManifestEntryStatus.DELETED.value
    removed = rows.filter(is_removed)
    live = rows.filter(~is_removed)["file_path"]
    return ManifestPaths(live, removed["file_path"], removed["snapshot_id"].fill_null(-1).to_numpy())


def _read_entries(content: bytes, location: str) -> pl.DataFrame:
    manifest = ManifestFile.from_args(
        manifest_path=location,
        manifest_length=len(content),
        partition_spec_id=0,
        content=ManifestContent.DATA,
        sequence_number=0,
        min_sequence_number=0,
        added_snapshot_id=-1,
    )
    entries = list(iter_entries(manifest, content))
    files: list[DataFile] = [entry.data_file for entry in entries]
    return pl.DataFrame(
        {
            "status": [entry.status.value for entry in entries],
            "snapshot_id": [entry.snapshot_id for entry in entries],
            "file_path": [file.file_path for file in files],
        },
        schema={"status": pl.Int32, "snapshot_id": pl.Int64, "file_path": pl.String},
    )


def _first(item: tuple[str, Any]) -> str:
    return item[0]


@dataclass(frozen=True)
class TableSource:
    """The name of the table whose metadata names a file, and the folders where the table's files lie."""

    table: str
    folders: tuple[str, ...]


@dataclass
class RemovedFiles:
    """Keys of files that live manifests list as removed, with the ids of the snapshots that removed them."""

    keys: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    snapshot_ids: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def find(self, wanted: npt.NDArray[np.uint64]) -> list[int | None]:
        """Return for each key the id of a snapshot that removed the file; None if the snapshot is unknown."""
        if not self.keys:
            return [None] * wanted.size
        keys, ids = np.concatenate(self.keys), np.concatenate(self.snapshot_ids)
        order = np.argsort(keys, kind="stable")
        keys, ids = keys[order], ids[order]
        positions = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
        found = keys[positions] == wanted
        return [int(ids[p]) if f else None for p, f in zip(positions.tolist(), found.tolist(), strict=True)]


class ReachableFiles:
    """The keys of all files that are reachable from the added states. Each metadata file is read once.

    Args:
        properties: PyIceberg's FileIO properties.
        keyer: Computes the keys. Use the same object for the files that are compared with `keys`.
        warehouse: The canonical location of the warehouse, in which all files lie that may be deleted.
        cache: What metadata files lead to, from earlier passes. Files that were read are added to it.
        progress: Called with a sentence.
    """

    def __init__(
        self,
        properties: Mapping[str, str],
        keyer: LocationKeyer,
        warehouse: str,
        cache: MetadataCache,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._properties = dict(properties)
        self._keyer = keyer
        self._warehouse = warehouse
        self._cache = cache
        self._progress = progress
        self._read_digests: set[bytes] = set()
        """Digests of locations that were read.

        They have 16 bytes, because after a collision a file is not read.
        """
        self._ios: dict[str, FileIO] = {}
        self.keys = KeySet()
        self.removed = RemovedFiles()
        self.table_folders: dict[str, str] = {}
        """Folders of live tables -> the table's name."""
        self.protected_folders: dict[str, str] = {}
        """Canonical folders whose files are all kept -> the file that is unreadable or of an unknown type."""
        self.unreadable_files: set[str] = set()
        """All files that could not be read."""
        self.unreadable_states: set[str] = set()
        """Metadata files in the warehouse that could not be read.

        If there are any, all its files are kept.
        """
        self.damaged_tables: dict[str, str] = {}
        """Names of tables with a file that could not be read -> the location of the first such file."""

    def replace_damage(self, other: ReachableFiles) -> None:
        """Replace the unreadable files, and the folders that they protect, by those of `other`.

        The keys of the reachable files are not changed.
        """
        self.protected_folders = dict(other.protected_folders)
        self.unreadable_files = set(other.unreadable_files)
        self.unreadable_states = set(other.unreadable_states)
        self.damaged_tables = dict(other.damaged_tables)

    def add_states(self, states: Sequence[LiveState]) -> None:
        """Mark all files that are reachable from these states.

        Raises RootsUnreadable if the storage does not answer.
        """
        self.keys.add(self._keyer.keys([state.location for state in states]))
        for state in states:
            if not state.is_table and state.content_type != "ICEBERG_VIEW":
                # A content of an unknown type may use all files next to the file that it names, and below it.
                for folder in (f"{state.location.rstrip('/')}/", table_root(state.location)):
                    self._protect(folder, state.location)
        tables = self._select_unread([state for state in states if state.is_table], lambda one: one.location)
        for start in range(0, len(tables), _FILES_AT_ONCE):
            self._progress(f"Reading the metadata of table states: {start:,} of {len(tables):,}.")
            self._add_tables(tables[start : start + _FILES_AT_ONCE])

    def _add_tables(self, states: Sequence[LiveState]) -> None:
        lists: dict[str, TableSource] = {}
        manifests: dict[str, tuple[int, TableSource]] = {}
        statistics: list[str] = []
        for state, files in zip(states, self._load_states(states), strict=True):
            source = TableSource(state.key.name, (table_root(state.location), *files.folders))
            for folder in (*conventional_folders(state.location), *files.folders):
                self.table_folders.setdefault(folder, state.key.name)
            statistics += files.statistics
            lists |= {path: source for path in files.manifest_lists if path not in lists}
            manifests |= {path: (size, source) for path, size in files.manifests}
        self.keys.add(self._keyer.keys(statistics))
        self.keys.add(self._keyer.keys(list(lists)))
        unread_lists = self._select_unread(list(lists.items()), _first)
        for (_, source), rows in zip(unread_lists, self._load_lists(unread_lists), strict=True):
            for path, length in rows:
                manifests.setdefault(path, (length, source))
        self.keys.add(self._keyer.keys(list(manifests)))
        unread = self._select_unread(list(manifests.items()), _first)
        for start in range(0, len(unread), _FILES_AT_ONCE):
            self._add_manifests(unread[start : start + _FILES_AT_ONCE])

    def _load_states(self, states: Sequence[LiveState]) -> list[StateFiles]:
        """Return the files and folders that each state names, from the cache or its metadata file.

        A state whose file is unreadable names nothing.
        """

        def read(unread: Sequence[LiveState]) -> list[StateFiles | None]:
            return map_concurrently(self._read_state, unread, lambda state: state.location)

        loaded = self._load(
            states, lambda state: state.location, self._cache.find_state, read, self._cache.add_state
        )
        return [files or StateFiles() for files in loaded]

    def _load_lists(self, lists: Sequence[tuple[str, TableSource]]) -> list[list[tuple[str, int]]]:
        """Return the manifests of each manifest list; none if the list is unreadable."""

        def read(unread: Sequence[tuple[str, TableSource]]) -> list[list[tuple[str, int]] | None]:
            return map_concurrently(self._read_list, unread, _first)

        return [
            rows or []
            for rows in self._load(lists, _first, self._cache.find_list, read, self._cache.add_list)
        ]

    def _load(
        self,
        items: Sequence[Item],
        location: Callable[[Item], str],
        find: Callable[[str], Answer | None],
        read: Callable[[Sequence[Item]], list[Answer | None]],
        add: Callable[[str, Answer], None],
    ) -> list[Answer | None]:
        """Return the answer for each item: from the cache by `find`, or else by `read`, which is then added.

        None if the file is missing or damaged. Such a file is not added, so each pass notices the damage.
        """
        answers = [find(location(item)) for item in items]
        missing = [number for number, answer in enumerate(answers) if answer is None]
        unread = [items[number] for number in missing]
        self._cache.note_reading([location(item) for item in unread])
        for number, answer in zip(missing, read(unread), strict=True):
            answers[number] = answer
            if answer is not None:
                add(location(items[number]), answer)
        return answers

    def _add_manifests(self, manifests: Sequence[tuple[str, tuple[int, TableSource]]]) -> None:
        unread: list[tuple[str, tuple[int, TableSource]]] = []
        for item in manifests:
            location, (length, _) = item
            keys = self._cache.find_manifest(location, length)
            if keys is None:
                unread.append(item)
            else:
                self._add_manifest_keys(keys)
        self._cache.note_reading([location for location, _ in unread])
        paths_of_files = map_concurrently(self._read_manifest, unread, _first)
        read_manifests = [
            (location, paths)
            for (location, _), paths in zip(unread, paths_of_files, strict=True)
            if paths is not None
        ]
        for (location, paths), keys in zip(read_manifests, self._compute_keys(read_manifests), strict=True):
            self._add_manifest_keys(keys)
            all_paths = pl.concat([paths.live, paths.removed])
            self._cache.add_manifest(location, keys, self._keyer.folders(all_paths))

    def _compute_keys(self, manifests: Sequence[tuple[str, ManifestPaths]]) -> list[ManifestKeys]:
        """Return the keys of the files in each manifest. Computes those of all manifests at once."""
        columns = [column for _, paths in manifests for column in (paths.live, paths.removed)]
        if not columns:
            return []
        ends = np.cumsum([len(column) for column in columns])[:-1]
        parts = np.split(self._keyer.keys(pl.concat(columns)), ends)
        return [
            ManifestKeys(live, removed, paths.removed_by)
            for (_, paths), live, removed in zip(manifests, parts[::2], parts[1::2], strict=True)
        ]

    def _add_manifest_keys(self, keys: ManifestKeys) -> None:
        self.keys.add(keys.live)
        if keys.removed.size:
            self.removed.keys.append(keys.removed)
            self.removed.snapshot_ids.append(keys.removed_by)

    def find_borrowed_folders(self, states: Iterable[LiveState]) -> set[str]:
        """Return all folders in which live files of damaged tables lie, as far as manifests can be read.

        Reads all metadata of these tables again. Raises RootsUnreadable if the storage does not answer.
        """
        damaged = [state for state in states if state.is_table and state.key.name in self.damaged_tables]
        lists: dict[str, TableSource] = {}
        manifests: dict[str, tuple[int, TableSource]] = {}
        for state, parsed in zip(
            damaged, map_concurrently(self._read_state, damaged, lambda one: one.location), strict=True
        ):
            files = parsed or StateFiles()
            source = TableSource(state.key.name, (table_root(state.location), *files.folders))
            lists |= dict.fromkeys(files.manifest_lists, source)
            manifests |= {path: (size, source) for path, size in files.manifests}
        items = list(lists.items())
        for (_, source), rows in zip(items, map_concurrently(self._read_list, items, _first), strict=True):
            manifests |= {path: (length, source) for path, length in rows or ()}
        folders: set[str] = set()
        unread = list(manifests.items())
        for start in range(0, len(unread), _FILES_AT_ONCE):
            chunk = unread[start : start + _FILES_AT_ONCE]
            for paths in map_concurrently(self._read_manifest, chunk, _first):
                if paths is not None:
                    folders |= set(paths.live.str.replace(r"/[^/]*$", "/").unique().to_list())
        return folders

    # -- reading ---------------------------------------------------------------------------------------

    def _read_state(self, state: LiveState) -> StateFiles | None:
        def read() -> StateFiles:
            fields = read_metadata_fields(self._io(state.location), state.location)
            with wrap_parse_errors(state.location):
                return parse_state(fields)

        source = TableSource(state.key.name, (table_root(state.location),))
        files: StateFiles | None = self._read(state.location, source, read)
        if files is None and self._is_in_warehouse(state.location):
            self.unreadable_states.add(state.location)
            self._protect(self._warehouse, state.location)
        return files

    def _read_list(self, item: tuple[str, TableSource]) -> list[tuple[str, int]] | None:
        location, source = item
        rows: list[tuple[str, int]] | None = self._read(
            location,
            source,
            lambda: read_manifest_list(self._io(location), location, self._cache.find_size(location)),
        )
        return rows

    def _read_manifest(self, item: tuple[str, tuple[int, TableSource]]) -> ManifestPaths | None:
        location, (length, source) = item
        paths: ManifestPaths | None = self._read(
            location, source, lambda: read_manifest_paths(self._io(location), location, length)
        )
        return paths

    def _read(self, location: str, source: TableSource, read_file: Callable[[], Any]) -> Any:
        """Return the result of `read_file`; None if the file is missing or damaged.

        In this case the folders of its table are protected.
        Raises RootsUnreadable after any other error.
        """
        try:
            return read_file()
        except (FileNotFoundError, StoredFileDamaged):
            self._note_damage(location, source)
            return None
        except Exception as error:
            if is_permanent(error) and not self._is_in_warehouse(location):
                self._note_damage(location, source)
                return None
            raise RootsUnreadable(
                f"File {location} cannot be read: {type(error).__name__}.",
                hint="No further file was deleted. Run the collection again when the storage answers.",
                subject=location,
            ) from error

    def _note_damage(self, location: str, source: TableSource) -> None:
        self.unreadable_files.add(location)
        self.damaged_tables.setdefault(source.table, location)
        for folder in (*source.folders, table_root(location)):
            self._protect(folder, location)

    def _is_in_warehouse(self, location: str) -> bool:
        return is_inside(canonical_location(location), self._warehouse)

    def _protect(self, folder: str, location: str) -> None:
        self.protected_folders.setdefault(canonical_location(folder), location)

    def _select_unread(self, items: Sequence[Any], location: Callable[[Any], str]) -> list[Any]:
        unread = []
        for item in items:
            digest = hashlib.blake2b(location(item).encode(), digest_size=16).digest()
            if digest not in self._read_digests:
                self._read_digests.add(digest)
                unread.append(item)
        return unread

    def _io(self, location: str) -> FileIO:
        scheme, _, _ = location.rpartition("://")
        if scheme not in self._ios:
            self._ios[scheme] = load_file_io(self._properties, location)
        return self._ios[scheme]
