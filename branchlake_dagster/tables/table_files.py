"""List the files that the metadata of Iceberg tables refers to. Every metadata file is read once."""

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
from branchlake_dagster.history.manifests import read_manifest_entries, read_manifests

T = TypeVar("T")


class FileUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """A metadata file of a table exists but cannot be read, or a required file is missing."""


@dataclass(frozen=True)
class ManifestFiles:
    """The data or delete files in a manifest.

    `added` maps the files that the manifest's snapshot added to their size in bytes. `live` are all files
    that were not deleted.
    """

    added: Mapping[str, int]
    live: frozenset[str]


class TableFiles:
    """Reads table metadata, manifest lists and manifests, each file once.

    `properties` are PyIceberg's FileIO properties. Methods that load a file return None if it is missing.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = dict(properties)
        self._metadata: dict[str, TableMetadata | None] = {}
        self._lists: dict[str, tuple[ManifestFile, ...] | None] = {}
        self._entries: dict[str, ManifestFiles | None] = {}

    def io(self, location: str) -> FileIO:
        """Return a FileIO for this location."""
        return load_file_io(self._properties, location)

    def metadata(self, location: str) -> TableMetadata | None:
        """Load the table metadata in a file; None if the file is missing.

        Raises FileUnreadable.
        """
        if location not in self._metadata:
            self._metadata[location] = _read_or_none(
                location, lambda: FromInputFile.table_metadata(self.io(location).new_input(location))
            )
        return self._metadata[location]

    def manifests(self, snapshot: Snapshot) -> tuple[ManifestFile, ...] | None:
        """Load the manifest list of a snapshot; None if the file is missing or empty, as after a power cut.

        Raises FileUnreadable.
        """
        location = snapshot.manifest_list
        if location not in self._lists:
            # After a power cut, a file may exist without content. It counts as missing.
            size = self.size(location)
            io = self.io(location)
            manifests = _read_or_none(location, lambda: tuple(read_manifests(io, snapshot))) if size else None
            self._lists[location] = manifests
        return self._lists[location]

    def manifest_files(self, manifest: ManifestFile) -> ManifestFiles | None:
        """Load the data and delete files that a manifest lists; None if the manifest is missing.

        Raises FileUnreadable.
        """
        path = manifest.manifest_path
        if path not in self._entries:
            io = self.io(path)
            self._entries[path] = _read_or_none(path, lambda: _read_manifest_files(io, manifest))
        return self._entries[path]

    def modified_at(self, location: str) -> datetime | None:
        """Return when a file was written, by the store's clock.

        None if the file is missing or the time is unknown. Raises FileUnreadable.
        """
        io = self.io(location)
        if not isinstance(io, PyArrowFileIO):
            return None

        def read_time() -> datetime | None:
            scheme, netloc, path = io.parse_location(location, io.properties)
            modified_at: datetime | None = io.fs_by_scheme(scheme, netloc).get_file_info(path).mtime
            return modified_at

        return _read_or_none(location, read_time)

    def size(self, location: str) -> int:
        """Return the size in bytes of the file at `location`; 0 if it is missing. Raises FileUnreadable."""
        return _read_or_none(location, lambda: len(self.io(location).new_input(location))) or 0

    def delete(self, location: str) -> None:
        """Delete a file if it exists, and the checksum file that Spark may have written for it.

        Raises OSError.
        """
        io = self.io(location)
        with contextlib.suppress(FileNotFoundError):
            io.delete(location)
        if normalize_location(location).startswith("file:"):
            # Hadoop's local file system writes a checksum file next to each file that Spark writes.
            folder, _, name = location.rpartition("/")
            with contextlib.suppress(FileNotFoundError):
                io.delete(f"{folder}/.{name}.crc")


def _read_manifest_files(io: FileIO, manifest: ManifestFile) -> ManifestFiles:
    added: dict[str, int] = {}
    live: set[str] = set()
    for entry in read_manifest_entries(io, manifest):
        file = entry.data_file
        if entry.status != ManifestEntryStatus.DELETED:
            live.add(file.file_path)
        if entry.status == ManifestEntryStatus.ADDED:
            added[file.file_path] = file.file_size_in_bytes
    return ManifestFiles(added, frozenset(live))


def _read_or_none(location: str, read_file: Callable[[], T]) -> T | None:
    """Return the result of `read_file`, which reads the file at `location`; None if the file is missing.

    Any other error becomes FileUnreadable, which names `location`.
    """
    try:
        return read_file()
    except FileNotFoundError:
        return None
    except Exception as error:
        # JSON, gzip, Avro, pydantic and the store raise many types of errors for a truncated or wrong file.
        raise FileUnreadable(f"File {location} cannot be read: {type(error).__name__}.") from error


def table_folders(metadata: TableMetadata) -> tuple[str, ...]:
    """Return the folders to which the table writes files, each with a slash at the end.

    Files elsewhere were only registered in the table.
    """
    locations = (
        metadata.location,
        metadata.properties.get(TableProperties.WRITE_DATA_PATH),
        metadata.properties.get(TableProperties.WRITE_METADATA_PATH),
    )
    return tuple(f"{folder.rstrip('/')}/" for folder in locations if folder)


def table_root(location: str) -> str:
    """Return the root folder of the table that owns the metadata file at `location`.

    The folder has a slash at the end. Only the path is used: the root is the parent of the folder `metadata`,
    or else the file's own folder.
    """
    folder = location.rpartition("/")[0]
    return f"{folder.removesuffix('/metadata')}/"


def is_in_folders(path: str, folders: Iterable[str]) -> bool:
    """Return whether a file lies in one of the folders, at any depth.

    Each folder must end with a slash. Different spellings of a location are equal (see `normalize_location`).
    """
    return any(normalize_location(path).startswith(normalize_location(folder)) for folder in folders)


def normalize_location(location: str) -> str:
    """Return the location in one spelling, so that paths can be compared.

    Spark writes `file:/…`, PyIceberg `file:///…`. All S3 schemes become `s3`.
    """
    scheme, separator, rest = location.partition(":")
    if not separator or scheme not in ("file", "s3", "s3a", "s3n"):
        return location
    return f"{'s3' if scheme.startswith('s3') else scheme}:/{rest.lstrip('/')}"
