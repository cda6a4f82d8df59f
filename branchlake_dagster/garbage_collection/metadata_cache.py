"""Cache the contents of metadata files, so that a collection reads only new ones.

A metadata file, manifest list or manifest is written once and never changes. An entry of the cache is the
result of reading one such file. References, their histories and folders are read by every pass; they are not
in the cache. So the cache cannot make a state live. It only replaces the reading of a file, and an entry is
used only if reading the file again would give the same result:

- The file's name contains a UUID. Other names (`v3.metadata.json`) are written again by some tools.
- The file exists, and its size, times and inode are those that it had when it was read. So the file that a
  restored backup has is read again, and the damage of a missing or truncated file is noticed as before.
- The last change of the file was at least ten seconds before the pass that read it. A store may report times
  in whole seconds, so a younger file could change without a new time.
- The keys of a manifest's files are those that this process would compute. All folders of the files are
  resolved again, because a symbolic link may have changed, and some locations are hashed for comparison.
- The code that reads files and computes keys is the same.

The cache is one file in the state folder of the machine that runs the collection. A file that is damaged, of
another version or of another warehouse counts as missing. The next pass replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.garbage_collection.warehouse_files import FileStamp, WarehouseFiles, to_microseconds
from branchlake_dagster.tables.location_keys import (
    Keys,
    LocationKeyer,
    canonical_location,
    is_inside,
)

CACHE_FILE = "collection-cache"
MAX_CACHE_BYTES = 256 << 20
"""The largest size of the cache. Files that do not fit are read by each pass."""
_SETTLING = timedelta(seconds=10)
_MAGIC = b"branchlake-cache"
_FORMAT = 1
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8
_ALIGNMENT = 64
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}[^/]*\Z", re.IGNORECASE)
_AMBIGUOUS = re.compile(r"[?#;]")
"""Characters at which PyIceberg and `WarehouseFiles.path_of` may cut a location differently."""
_CODE = (
    "catalog/stored_files.py",
    "tables/location_keys.py",
    "garbage_collection/metadata_cache.py",
    "garbage_collection/reachable_files.py",
    "internals/manifest_files.py",
)
"""The modules that read files and compute keys."""


def _hash_code() -> str:
    """Return a hash of the modules in `_CODE` as they are now; a random text if they cannot be read."""
    package = files("branchlake_dagster")
    try:
        return hashlib.sha256(b"".join(package.joinpath(name).read_bytes() for name in _CODE)).hexdigest()
    except OSError:
        return secrets.token_hex()


_CODE_DIGEST = _hash_code()
"""Computed at import: a process that began before an upgrade runs the old code."""
_PROBES = ("file:///probe/a.parquet", "s3a://Probe//b=%31/C d+e.parquet", "/probe/\u0041\u030a/\u212b.avro")
"""Locations whose keys are stored with the cache and compared."""


@dataclass(frozen=True)
class StateFiles:
    """The files and folders that a metadata file names directly.

    `folders` are the table's location and the folders of its properties, in which writers create files.
    """

    manifest_lists: tuple[str, ...] = ()
    manifests: tuple[tuple[str, int], ...] = ()
    """Manifests that snapshots name without a manifest list (format version 1): path, and 0 as length."""
    statistics: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class ManifestKeys:
    """The keys of the files in a manifest.

    `live` are the files that the manifest does not mark as removed. `removed_by` has the id of the snapshot
    that removed each file of `removed`, or -1 if it is unknown.
    """

    live: Keys
    removed: Keys
    removed_by: npt.NDArray[np.int64]


@dataclass
class _Ragged:
    """A column of arrays with different lengths: row `i` is `values[offsets[i]:offsets[i + 1]]`."""

    offsets: npt.NDArray[np.int64]
    values: npt.NDArray[Any]

    @classmethod
    def from_rows(cls, rows: Sequence[npt.NDArray[Any]], dtype: Any) -> _Ragged:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([row.size for row in rows], out=offsets[1:])
        return cls(offsets, np.concatenate([np.empty(0, dtype), *rows]))

    @classmethod
    def from_arrow(cls, column: pa.LargeListArray) -> _Ragged:
        offsets = column.offsets.to_numpy()
        return cls(offsets - offsets[0], column.flatten().to_numpy())

    def to_arrow(self) -> pa.LargeListArray:
        return pa.LargeListArray.from_arrays(self.offsets, pa.array(self.values))

    def row(self, number: int) -> npt.NDArray[Any]:
        return self.values[self.offsets[number] : self.offsets[number + 1]]


_NUMBERS: Mapping[str, Any] = {
    "lengths": np.int64,
    "live": np.uint64,
    "removed": np.uint64,
    "removed_by": np.int64,
}
"""The columns of numbers. Other columns have positions in the lists of names or folders."""
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "manifests": ("folder_ids", "live", "removed", "removed_by"),
    "lists": ("manifest_ids", "lengths"),
    "states": ("list_ids", "manifest_ids", "statistics_ids", "location_ids"),
}
"""The kinds of entries and their columns. If the cache is full, entries of the last kinds are omitted."""


@dataclass
class _Entries:
    """The entries of one kind: those of the cache file, and those that this pass has added."""

    locations: list[str] = field(default_factory=list)
    stamps: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 4), np.int64))
    columns: dict[str, _Ragged] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """The locations of usable entries -> their rows."""
    used_rows: set[int] = field(default_factory=set)
    added: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Locations of new entries -> a value for each column."""

    def find(self, location: str) -> int | None:
        """Return the row of a usable entry and note that the pass has used it; None without such an entry."""
        row = self.rows.get(location)
        if row is not None:
            self.used_rows.add(row)
        return row


class MetadataCache:
    """The cached contents of a warehouse's metadata files, as one collection reads and stores them.

    Args:
        path: The cache file. None if nothing is kept.
        files: The files of the warehouse. Files outside the warehouse are not kept.
        keyer: Computes the keys. It must be the one of the pass.
        now: A time before the first file is read, the earliest of all clocks.
        lake_identity: A text that two warehouses with the same location do not share.
        max_bytes: The largest size of the cache file.
        progress: Called with a sentence.
    """

    def __init__(
        self,
        path: Path | None,
        files: WarehouseFiles,
        keyer: LocationKeyer,
        now: datetime,
        *,
        lake_identity: str = "",
        max_bytes: int = MAX_CACHE_BYTES,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._files = files
        self._keyer = keyer
        self._newest_ns = to_microseconds(now - _SETTLING) * 1000
        self._identity = hashlib.sha256(f"{files.canonical}\n{lake_identity}".encode()).hexdigest()
        self._max_bytes = max_bytes
        self._progress = progress
        self._entries = {kind: _Entries() for kind in _COLUMNS}
        self._names: list[str] = []
        self._folders: list[str] = []
        self._canonical_folders: list[str] = []
        self._stamps: dict[str, FileStamp] = {}
        """Stamps of the files of new entries."""
        self._earlier_stamps: dict[str, FileStamp | None] = {}
        """Stamps of local files immediately before they were read."""
        self._added_bytes = 0
        self._is_loaded = False

    # -- entries ---------------------------------------------------------------------------------------

    def find_state(self, location: str) -> StateFiles | None:
        """Return the files and folders that a metadata file names; None if the file must be read."""
        columns = self._find("states", location)
        if columns is None:
            return None
        lists, manifests, statistics, folders = (self._name(ids) for ids in columns)
        return StateFiles(
            tuple(lists), tuple((path, 0) for path in manifests), tuple(statistics), tuple(folders)
        )

    def find_list(self, location: str) -> list[tuple[str, int]] | None:
        """Return the paths and lengths of the manifests in a manifest list; None if it must be read."""
        columns = self._find("lists", location)
        return list(zip(self._name(columns[0]), columns[1].tolist(), strict=True)) if columns else None

    def find_manifest(self, location: str, length: int) -> ManifestKeys | None:
        """Return the keys of the files in a manifest; None if it must be read.

        `length` is the recorded length in bytes. A shorter file is damaged, so it is read.
        """
        entries = self._load()["manifests"]
        row = entries.rows.get(location)
        if row is None or entries.stamps[row, 0] < length:
            return None
        columns = self._find("manifests", location)
        return ManifestKeys(*columns[1:]) if columns else None

    def find_size(self, location: str) -> int:
        """Return the size in bytes that a file had before it was read; 0 if it is not known."""
        stamp = self._earlier_stamps.get(location)
        return stamp.size if stamp is not None else 0

    def note_reading(self, locations: Sequence[str]) -> None:
        """Record the present stamps of files. Call it before the files are read and added to the cache."""
        if self._path is not None and self._files.is_local:
            kept = [location for location in locations if self._may_keep(location)]
            self._earlier_stamps.update(zip(kept, self._read_stamps(kept), strict=True))

    def add_state(self, location: str, files: StateFiles) -> None:
        """Add the files and folders that a metadata file names."""
        manifests = [path for path, _ in files.manifests]
        values = files.manifest_lists, manifests, files.statistics, files.folders
        self._add("states", location, values, 4 * sum(map(len, values)))

    def add_list(self, location: str, manifests: Sequence[tuple[str, int]]) -> None:
        """Add the paths and lengths of the manifests in a manifest list."""
        values = [path for path, _ in manifests], [length for _, length in manifests]
        self._add("lists", location, values, 12 * len(manifests))

    def add_manifest(self, location: str, keys: ManifestKeys, folders: Sequence[str]) -> None:
        """Add the keys of the files in a manifest. `folders` are the folders of the files, as spelled."""
        size = 4 * len(folders) + keys.live.nbytes + keys.removed.nbytes + keys.removed_by.nbytes
        self._add("manifests", location, (folders, keys.live, keys.removed, keys.removed_by), size)

    def _find(self, kind: str, location: str) -> list[npt.NDArray[Any]] | None:
        entries = self._load()[kind]
        row = entries.find(location)
        return None if row is None else [entries.columns[name].row(row) for name in _COLUMNS[kind]]

    def _add(self, kind: str, location: str, values: tuple[Any, ...], size: int) -> None:
        if self._path is None or self._added_bytes > self._max_bytes or not self._may_keep(location):
            return
        self._added_bytes += size
        self._load()[kind].added[location] = values

    def _name(self, ids: npt.NDArray[np.int64]) -> list[str]:
        return [self._names[number] for number in ids.tolist()]

    def _may_keep(self, location: str) -> bool:
        return (
            _UUID.search(location) is not None
            and _AMBIGUOUS.search(location) is None
            and is_inside(canonical_location(location), self._files.canonical)
        )

    def _read_stamps(self, locations: Sequence[str]) -> list[FileStamp | None]:
        return self._files.read_stamps([self._files.path_of(location) for location in locations])

    # -- reading the cache file ------------------------------------------------------------------------

    def _load(self) -> dict[str, _Entries]:
        if not self._is_loaded:
            self._is_loaded = True
            if self._path is not None:
                try:
                    self._read_file(self._path)
                    self._select_usable()
                except FileNotFoundError:
                    pass  # no collection has written one yet
                except Exception as error:  # noqa: BLE001 - without a cache, all files are read
                    # Damaged, of another version or of another warehouse.
                    self._entries = {kind: _Entries() for kind in _COLUMNS}
                    self._progress(
                        "The metadata cache is not used, so all metadata files are read:"
                        f" {type(error).__name__}: {error}"
                    )
        return self._entries

    def _read_file(self, path: Path) -> None:
        """Read the cache file. Raises FileNotFoundError without one, and any error if it cannot be used."""
        # Not mapped: another process may write to the file after its digest was compared.
        content = pa.py_buffer(path.read_bytes())
        body = memoryview(content)[:-_DIGEST_BYTES]
        digest = bytes(memoryview(content)[-_DIGEST_BYTES:])
        if bytes(body[: len(_MAGIC)]) != _MAGIC or _digest(body) != digest:
            raise ValueError("This is not a cache, or it is damaged.")
        footer_end = len(body) - _LENGTH_BYTES
        footer_start = footer_end - int.from_bytes(body[footer_end:], "little")
        footer = json.loads(bytes(body[footer_start:footer_end]))
        if footer["origin"] != self._origin():
            raise ValueError("This cache has another version, or belongs to another warehouse.")
        tables = {
            name: pa.ipc.open_stream(content.slice(start, size)).read_all().combine_chunks()
            for name, (start, size) in footer["sections"].items()
        }
        self._names = tables["names"]["name"].to_pylist()
        self._folders = tables["folders"]["folder"].to_pylist()
        self._canonical_folders = tables["folders"]["canonical"].to_pylist()
        for kind, columns in _COLUMNS.items():
            table = tables[kind]
            self._entries[kind] = _Entries(
                table["location"].to_pylist(),
                np.stack([table[name].to_numpy() for name in FileStamp.__slots__], axis=1),
                {name: _Ragged.from_arrow(_only_chunk(table[name])) for name in columns},
            )

    def _origin(self) -> dict[str, Any]:
        """Return the values that must be equal when a cache is written and when it is used.

        The code is one of them: a correction of a parser must reach all files, also those in the cache.
        """
        return {
            "format": _FORMAT,
            "code": _CODE_DIGEST,
            "pyiceberg": version("pyiceberg"),
            "warehouse": self._identity,
            "polars": pl.__version__,
            "python": platform.python_version(),
            "unicode": unicodedata.unidata_version,
            "probes": LocationKeyer().keys(_PROBES).tolist(),
        }

    def _select_usable(self) -> None:
        """Find the entries whose files are as they were, and whose folders have the same real paths."""
        for entries in self._entries.values():
            stamps = self._read_stamps(entries.locations)
            stored = entries.stamps.tolist()
            entries.rows = {
                location: row
                for row, (location, stamp) in enumerate(zip(entries.locations, stamps, strict=True))
                if stamp is not None and stamp.to_list() == stored[row]
            }
        canonical_folders = self._keyer.canonical_folders(self._folders)
        is_moved = np.array(
            [now != then for now, then in zip(canonical_folders, self._canonical_folders, strict=True)],
            np.bool_,
        )
        manifests = self._entries["manifests"]
        folder_ids = manifests.columns["folder_ids"]
        if is_moved.any():
            manifests.rows = {
                location: row
                for location, row in manifests.rows.items()
                if not is_moved[folder_ids.row(row)].any()
            }

    # -- writing the cache file ------------------------------------------------------------------------

    def save(self) -> None:
        """Write the entries that this pass found or added to the cache file, if its contents differ.

        An error is reported to `progress` and ignored. Another collection that writes at the same time
        replaces the file as a whole.
        """
        if self._path is None:
            return
        try:
            self._write_changes(self._path)
        except Exception as error:  # noqa: BLE001 - the next pass reads the files again
            self._progress(f"The metadata cache is not written: {type(error).__name__}.")

    def _write_changes(self, path: Path) -> None:
        entries_by_kind = self._load()
        self._drop_unsettled()
        if all(
            not entries.added and len(entries.used_rows) == len(entries.locations)
            for entries in entries_by_kind.values()
        ):
            return
        tables = self._build_tables()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.new")
        with file_lock(path.with_name(f"{path.name}.lock")):
            try:
                _write_file(scratch, tables, self._origin())
                scratch.replace(path)
            finally:
                scratch.unlink(missing_ok=True)

    def _drop_unsettled(self) -> None:
        """Give each new entry its file's stamp. Drop entries whose files may have changed since the reading.

        A local file's stamp must be the one from before the reading. A remote file's time is set by the store
        when the file is written, so a time before the pass proves that the file has not changed since then.
        """
        for entries in self._entries.values():
            locations = list(entries.added)
            for location, stamp in zip(locations, self._read_stamps(locations), strict=True):
                if (
                    stamp is None
                    or stamp.last_change_ns > self._newest_ns
                    or (self._files.is_local and self._earlier_stamps.get(location) != stamp)
                ):
                    del entries.added[location]
                else:
                    self._stamps[location] = stamp

    def _build_tables(self) -> dict[str, pa.Table]:
        """Return the sections of the cache file. Stop adding entries when they have `max_bytes`."""
        names, folders = _NameTable(self._names), _NameTable(self._folders)
        tables = {}
        size = 0
        for kind, columns in _COLUMNS.items():
            entries = self._entries[kind]
            name_table = folders if kind == "manifests" else names
            locations: list[str] = []
            stamps: list[Sequence[int]] = []
            rows: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in columns}
            for location, stamp, values in self._iter_stored(entries, columns, name_table):
                size += len(location) + 32 + sum(value.nbytes for value in values)
                if size + names.size + folders.size > self._max_bytes:
                    break
                locations.append(location)
                stamps.append(stamp)
                for name, value in zip(columns, values, strict=True):
                    rows[name].append(value)
            times = np.array(stamps, np.int64).reshape(-1, 4)
            tables[kind] = pa.table(
                {"location": pa.array(locations, pa.string())}
                | {name: times[:, number] for number, name in enumerate(FileStamp.__slots__)}
                | {
                    name: _Ragged.from_rows(rows[name], _NUMBERS.get(name, np.int32)).to_arrow()
                    for name in columns
                }
            )
        canonical = self._keyer.canonical_folders(folders.names)
        tables["names"] = pa.table({"name": pa.array(names.names, pa.string())})
        tables["folders"] = pa.table(
            {"folder": pa.array(folders.names, pa.string()), "canonical": pa.array(canonical, pa.string())}
        )
        return tables

    def _iter_stored(
        self, entries: _Entries, columns: Sequence[str], name_table: _NameTable
    ) -> Iterator[tuple[str, Sequence[int], list[npt.NDArray[Any]]]]:
        """Iterate over the entries to store: those that the pass has used, then those that it has added.

        Yields the location, the stamp, and the values of `columns` with the numbers of `name_table`.
        """
        for row in sorted(entries.used_rows):
            values = [
                entries.columns[name].row(row)
                if name in _NUMBERS
                else name_table.renumber(entries.columns[name].row(row))
                for name in columns
            ]
            yield entries.locations[row], entries.stamps[row].tolist(), values
        for location, added in entries.added.items():
            values = [
                np.asarray(value, _NUMBERS[name]) if name in _NUMBERS else name_table.number(value)
                for name, value in zip(columns, added, strict=True)
            ]
            yield location, self._stamps[location].to_list(), values


class _NameTable:
    """Numbers the names that are stored, from 0. `size` is the number of their characters."""

    def __init__(self, stored_names: Sequence[str]) -> None:
        self._stored_names = stored_names
        self._numbers: dict[str, int] = {}
        self._new_numbers = np.full(len(stored_names), -1, np.int32)
        self.size = 0

    @property
    def names(self) -> list[str]:
        """The names in the order of their numbers."""
        return list(self._numbers)

    def number(self, names: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return the number of each name."""
        return np.array([self._number(name) for name in names], np.int32)

    def renumber(self, stored_numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the number of each name of the cache file, which is given by its position there."""
        unseen = stored_numbers[self._new_numbers[stored_numbers] < 0]
        for stored_number in np.unique(unseen).tolist():
            self._new_numbers[stored_number] = self._number(self._stored_names[stored_number])
        return self._new_numbers[stored_numbers]

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            self.size += len(name)
        return number


def _digest(body: memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _only_chunk(column: pa.ChunkedArray) -> Any:
    return column.chunk(0) if column.num_chunks else column.combine_chunks()


def _write_file(path: Path, tables: Mapping[str, pa.Table], origin: Mapping[str, Any]) -> None:
    """Write magic bytes, one Arrow stream per table, a footer with their positions, its length, and a digest.

    Only the owner can read the file.
    """
    path.unlink(missing_ok=True)
    sections = {}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_MAGIC)
        for name, table in tables.items():
            file.write(bytes(-file.seek(0, os.SEEK_END) % _ALIGNMENT))
            start = file.seek(0, os.SEEK_END)
            codec = None if name == "manifests" else "zstd"  # keys are random, so they cannot be compressed
            options = pa.ipc.IpcWriteOptions(compression=codec)
            with pa.ipc.new_stream(file, table.schema, options=options) as writer:
                writer.write_table(table)
            sections[name] = start, file.seek(0, os.SEEK_END) - start
        footer = json.dumps({"origin": origin, "sections": sections}).encode()
        file.write(footer)
        file.write(len(footer).to_bytes(_LENGTH_BYTES, "little"))
    with pa.memory_map(str(path)) as source:
        digest = _digest(memoryview(source.read_buffer()))
    with path.open("ab") as file:
        file.write(digest)
