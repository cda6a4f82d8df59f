"""Which files the metadata of Iceberg tables refers to; every file is read once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyiceberg.io import FileIO, load_file_io
from pyiceberg.manifest import ManifestEntryStatus, ManifestFile
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot


@dataclass(frozen=True)
class Entries:
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
        self._entries: dict[str, Entries | None] = {}

    def io(self, location: str) -> FileIO:
        """A FileIO for this location."""
        return load_file_io(self._properties, location)

    def metadata(self, location: str) -> TableMetadata | None:
        """The table metadata in a file."""
        if location not in self._metadata:
            try:
                found = FromInputFile.table_metadata(self.io(location).new_input(location))
            except FileNotFoundError:
                found = None
            self._metadata[location] = found
        return self._metadata[location]

    def manifests(self, snapshot: Snapshot) -> tuple[ManifestFile, ...] | None:
        """The manifests of a snapshot."""
        location = snapshot.manifest_list
        if location not in self._lists:
            try:
                # PyIceberg keeps manifest lists of the whole process in memory, deleted ones too.
                found = tuple(snapshot.manifests(self.io(location))) if self.size(location) else None
            except FileNotFoundError:
                found = None
            self._lists[location] = found
        return self._lists[location]

    def entries(self, manifest: ManifestFile) -> Entries | None:
        """The data and delete files that a manifest names."""
        path = manifest.manifest_path
        if path not in self._entries:
            try:
                found = manifest.fetch_manifest_entry(self.io(path), discard_deleted=True)
            except FileNotFoundError:
                self._entries[path] = None
                return None
            new = [entry.data_file for entry in found if entry.status is ManifestEntryStatus.ADDED]
            self._entries[path] = Entries(
                {file.file_path: file.file_size_in_bytes for file in new},
                frozenset(entry.data_file.file_path for entry in found),
            )
        return self._entries[path]

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
        if plain(location).startswith("file:"):
            # Hadoop's local file system puts a checksum beside each file that Spark writes.
            folder, _, name = location.rpartition("/")
            with contextlib.suppress(FileNotFoundError):
                io.delete(f"{folder}/.{name}.crc")


def folders(metadata: TableMetadata) -> tuple[str, ...]:
    """Where the table itself puts its files; anything elsewhere was only registered in it."""
    named = (
        metadata.location,
        metadata.properties.get(TableProperties.WRITE_DATA_PATH),
        metadata.properties.get(TableProperties.WRITE_METADATA_PATH),
    )
    return tuple(f"{folder.rstrip('/')}/" for folder in named if folder)


def within(path: str, places: Iterable[str]) -> bool:
    """Whether a file lies in one of the folders."""
    return any(plain(path).startswith(plain(place)) for place in places)


def plain(location: str) -> str:
    """One spelling per file, for comparisons: Spark writes `file:/…` where PyIceberg writes `file:///…`."""
    scheme, separator, rest = location.partition(":")
    if not separator or scheme not in ("file", "s3", "s3a", "s3n"):
        return location
    return f"{'s3' if scheme.startswith('s3') else scheme}:/{rest.lstrip('/')}"
