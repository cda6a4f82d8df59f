"""Which files the metadata of Iceberg tables refers to; every file is read once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestEntryStatus, ManifestFile
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from branchlake_dagster.errors import BranchlakeError, Transient

T = TypeVar("T")


class FileUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """A file of a table's metadata is there and cannot be read, or is missing where it must not be."""


@dataclass(frozen=True)
class ManifestFiles:
    """The files a manifest names: those that were new in it with their size in bytes, and all live ones."""

    added: Mapping[str, int]
    live: frozenset[str]


class TableFiles:
    """Reads table metadata, manifest lists and manifests; `properties` are PyIceberg's for FileIO.

    None stands for a file that is missing.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = dict(properties)
        self._metadata: dict[str, TableMetadata | None] = {}
        self._lists: dict[str, tuple[ManifestFile, ...] | None] = {}
        self._entries: dict[str, ManifestFiles | None] = {}

    def io(self, location: str) -> FileIO:
        """A FileIO for this location."""
        return load_file_io(self._properties, location)

    def metadata(self, location: str) -> TableMetadata | None:
        """The table metadata in a file. Raises FileUnreadable."""
        if location not in self._metadata:
            source = self.io(location).new_input(location)
            self._metadata[location] = _read_or_none(location, lambda: FromInputFile.table_metadata(source))
        return self._metadata[location]

    def manifests(self, snapshot: Snapshot) -> tuple[ManifestFile, ...] | None:
        """The manifests of a snapshot. Raises FileUnreadable."""
        location = snapshot.manifest_list
        if location not in self._lists:
            # PyIceberg keeps manifest lists of the whole process in memory, deleted ones too.
            size = self.size(location)
            io = self.io(location)
            manifests = _read_or_none(location, lambda: tuple(snapshot.manifests(io))) if size else None
            self._lists[location] = manifests
        return self._lists[location]

    def manifest_files(self, manifest: ManifestFile) -> ManifestFiles | None:
        """The data and delete files that a manifest names. Raises FileUnreadable."""
        path = manifest.manifest_path
        if path not in self._entries:
            io = self.io(path)
            entries = _read_or_none(path, lambda: manifest.fetch_manifest_entry(io, discard_deleted=True))
            if entries is None:
                self._entries[path] = None
                return None
            new_files = [entry.data_file for entry in entries if entry.status is ManifestEntryStatus.ADDED]
            self._entries[path] = ManifestFiles(
                {file.file_path: file.file_size_in_bytes for file in new_files},
                frozenset(entry.data_file.file_path for entry in entries),
            )
        return self._entries[path]

    def modified_at(self, location: str) -> datetime | None:
        """When a file was written, by the store's clock; None when it is missing or the store cannot tell."""
        io = self.io(location)
        if not isinstance(io, PyArrowFileIO):
            return None
        scheme, netloc, path = io.parse_location(location, io.properties)
        modified_at: datetime | None = io.fs_by_scheme(scheme, netloc).get_file_info(path).mtime
        return modified_at

    def size(self, location: str) -> int:
        """The size of a file in bytes; 0 when it is missing."""
        try:
            return len(self.io(location).new_input(location))
        except FileNotFoundError:
            return 0

    def delete(self, location: str) -> None:
        """Delete a file, if it is there. Raises OSError."""
        io = self.io(location)
        with contextlib.suppress(FileNotFoundError):
            io.delete(location)
        if normalize_location(location).startswith("file:"):
            # Hadoop's local file system puts a checksum beside each file that Spark writes.
            folder, _, name = location.rpartition("/")
            with contextlib.suppress(FileNotFoundError):
                io.delete(f"{folder}/.{name}.crc")


def _read_or_none(location: str, read_file: Callable[[], T]) -> T | None:
    """What is in a file; None when it is missing."""
    try:
        return read_file()
    except FileNotFoundError:
        return None
    except Exception as error:
        # Whatever JSON, gzip, Avro, pydantic and the store make of a file that is cut off or something else.
        raise FileUnreadable(f"{location} cannot be read: {type(error).__name__}.") from error


def table_folders(metadata: TableMetadata) -> tuple[str, ...]:
    """Where the table itself puts its files; anything elsewhere was only registered in it."""
    locations = (
        metadata.location,
        metadata.properties.get(TableProperties.WRITE_DATA_PATH),
        metadata.properties.get(TableProperties.WRITE_METADATA_PATH),
    )
    return tuple(f"{folder.rstrip('/')}/" for folder in locations if folder)


def table_root(location: str) -> str:
    """The folder of the table that a metadata file belongs to, by its path alone."""
    folder = location.rpartition("/")[0]
    return f"{folder.removesuffix('/metadata')}/"


def is_in_folders(path: str, folders: Iterable[str]) -> bool:
    """Whether a file lies in one of the folders."""
    return any(normalize_location(path).startswith(normalize_location(folder)) for folder in folders)


def normalize_location(location: str) -> str:
    """One spelling per file, for comparisons: Spark writes `file:/…` where PyIceberg writes `file:///…`."""
    scheme, separator, rest = location.partition(":")
    if not separator or scheme not in ("file", "s3", "s3a", "s3n"):
        return location
    return f"{'s3' if scheme.startswith('s3') else scheme}:/{rest.lstrip('/')}"
