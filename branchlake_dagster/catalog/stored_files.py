"""Reads, checks and synchronizes the files of Iceberg tables in storage, and records where files are written.

PyIceberg caches what it has read, and loads a table without checking its data files. The functions here find
out whether a table can be read now, so every call sends requests to the storage.

A commit in Nessie names files. A file system writes a new file to disk up to half a minute later. After a
power cut in between, Nessie had a table whose metadata file was empty. Therefore local files are synchronized
to disk, with their folder, before a commit names them. Object stores answer a write when the object is safe.

The prefixes under which writers create files are recorded in the warehouse before the first file is written.
A search for orphaned files must list the files of tables that no reference names any more. It must not list
other files in the same bucket. Therefore each prefix is recorded as a small file in the warehouse, which
outlives dropped tables, deleted branches and a restored Nessie.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from pyarrow.fs import FileSelector
from pydantic_core import from_json
from pyiceberg.io import FileIO, OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.serializers import Compressor
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog.shared_snapshots import SnapshotCache
from branchlake_dagster.errors import BranchlakeError, Terminal
from branchlake_dagster.stored_names import LakeFolder


def is_local(location: str) -> bool:
    """Check whether a location is in a file system of this machine (`file:` or a path)."""
    return location.startswith(("file:", "/"))


def local_path(location: str) -> Path:
    """Return the path of a local location. Percent signs are not decoded, as in PyIceberg and Spark."""
    return Path(urlparse(location).path if location.startswith("file:") else location)


def synchronize_files(locations: Iterable[str]) -> None:
    """Wait until these files and their folder entries are on disk. Remote locations are skipped.

    Costs 0.05 ms for a file that is on disk already. Raises OSError.
    """
    paths = [local_path(location) for location in locations if is_local(location)]
    for path in paths:
        _synchronize_file(path)
        # Spark's file system writes a checksum file, and refuses a file if the checksum was lost.
        checksum = path.with_name(f".{path.name}.crc")
        if checksum.exists():
            _synchronize_file(checksum)
    for folder in dict.fromkeys(path.parent for path in paths):
        _synchronize_folder(folder)


def _synchronize_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _synchronize_folder(path: Path) -> None:
    try:
        _synchronize_file(path)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot synchronize a folder
            raise


class DurableFileIO(PyArrowFileIO):
    """PyArrow's FileIO, except that closing a new local file waits until the file is on disk."""

    def new_output(self, location: str) -> PyArrowFile:
        """Return a file to write at `location`, a URI or a local path. Nothing is created yet.

        Closing the stream of a local file waits until the file is on disk; other files are PyArrow's.
        """
        scheme, netloc, path = self.parse_location(location, self.properties)
        if scheme != "file":
            return super().new_output(location)
        return _DurableFile(location, path, self.fs_by_scheme(scheme, netloc))


class _DurableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        path = Path(self._path)
        new_folders = _missing_folders(path.parent)
        return _DurableStream(super().create(overwrite), path, new_folders)


def _missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist yet, innermost first."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    return missing


class _DurableStream:
    """A stream of PyArrow whose `close` waits for the disk."""

    def __init__(self, stream: Any, path: Path, new_folders: Iterable[Path]) -> None:
        self._stream = stream
        self._path = path
        self._new_folders = new_folders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, content: bytes) -> int:
        size: int = self._stream.write(content)
        return size

    def __enter__(self) -> _DurableStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._stream.closed:
            return
        self._stream.close()
        _synchronize_file(self._path)
        for entry in (self._path, *self._new_folders):
            _synchronize_folder(entry.parent)


REQUESTS_AT_ONCE = 16
"""The largest number of concurrent requests to a remote storage."""

MIN_LISTED_FILES = 300
"""If at least this many remote files are requested, folders with many of them are listed instead."""

_MIN_FOLDER_FILES = 20
"""If at least this many files of a folder are requested, listing the folder takes fewer requests.

A page of a listing has 1,000 files.
"""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class StoredFileDamaged(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A file of a table exists, but it is shorter than recorded or cannot be parsed.

    `file` is its location.
    """

    def __init__(self, message: str, *, file: str) -> None:
        super().__init__(message)
        self.file = file


_snapshots = SnapshotCache()


def read_content(io: FileIO, location: str, size: int = 0) -> bytes:
    """Return the bytes of a file that must have at least `size` bytes.

    Raises FileNotFoundError, with the location as `filename`, or another OSError. Raises StoredFileDamaged if
    the file is shorter.
    """
    with _wrap_io_errors(location), io.new_input(location).open() as stream:
        content = stream.read()
    if len(content) < size:
        raise _truncation_error(location, len(content), size)
    return content


def read_metadata(io: FileIO, location: str) -> TableMetadata:
    """Read the table metadata in a file, which may be compressed.

    Raises the errors of `read_content`, and StoredFileDamaged if the file cannot be parsed.
    """
    content = read_content(io, location)
    with wrap_parse_errors(location):
        stream = Compressor.get_compressor(location).stream_decompressor(BytesIO(content))
        return _snapshots.parse_metadata(stream.read())


def read_metadata_fields(io: FileIO, location: str) -> dict[str, Any]:
    """Return the JSON object of a table metadata file. Raises the errors of `read_metadata`.

    PyIceberg creates objects of all snapshots, which takes four times as long. Pydantic's parser takes half
    the time of Python's.
    """
    content = read_content(io, location)
    with wrap_parse_errors(location):
        decompressed = Compressor.get_compressor(location).stream_decompressor(BytesIO(content))
        fields = from_json(decompressed.read())
        if fields["format-version"] < 1:
            raise ValueError("This is not table metadata.")
        return dict(fields)


@contextmanager
def _wrap_io_errors(location: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "The file does not exist", location) from error
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"{type(error).__name__}: {error}", location) from error


@contextmanager
def wrap_parse_errors(location: str) -> Iterator[None]:
    """Raise StoredFileDamaged for any error of the block, which parses the file at `location`."""
    try:
        yield
    except Exception as error:
        # JSON, gzip, Avro and pydantic raise many classes for a file that is empty, truncated or of another
        # kind.
        raise StoredFileDamaged(
            f"{location} cannot be parsed: {type(error).__name__}.", file=location
        ) from error


@dataclass(frozen=True)
class StoredFile:
    """A file that must exist with at least `size` bytes."""

    io: FileIO
    location: str
    size: int


def file_errors(files: Sequence[StoredFile]) -> list[Exception | None]:
    """Return the error of each file, in the order of `files`; None if it exists and is long enough.

    FileNotFoundError and StoredFileDamaged are answers of the storage; any other OSError means that the
    storage did not answer. An error of another class, as for an unknown scheme, concerns its file alone. No
    file is opened. Costs one request per file, or one listing per folder if many files are requested.
    """
    sizes = _list_sizes([file for file in files if not is_local(file.location)])
    return map_concurrently(lambda file: _file_error(file, sizes.get(file.location)), files, _get_location)


def _get_location(file: StoredFile) -> str:
    return file.location


def _file_error(file: StoredFile, size: int | None) -> Exception | None:
    try:
        if size is None:
            with _wrap_io_errors(file.location):
                size = len(file.io.new_input(file.location))
    except Exception as error:  # noqa: BLE001 - PyIceberg raises ValueError for a scheme that it does not know
        return error
    if size >= file.size:
        return None
    return _truncation_error(file.location, size, file.size)


def _truncation_error(location: str, size: int, recorded: int) -> StoredFileDamaged:
    # After a power cut, a file system may have the name of a file but not all of its content.
    message = f"{location} has {size:,} of the {recorded:,} bytes that its table records."
    return StoredFileDamaged(message, file=location)


def _list_sizes(files: Sequence[StoredFile]) -> dict[str, int]:
    """Return the sizes of files in bytes, by location, from listings of folders.

    Only folders with at least `_MIN_FOLDER_FILES` of the files are listed, because a listing costs more than
    a few requests. Files of other folders are not in the result. It is empty if there are fewer than
    `MIN_LISTED_FILES` files.
    """
    if len(files) < MIN_LISTED_FILES:
        return {}
    folders: dict[str, list[StoredFile]] = {}
    for file in files:
        folders.setdefault(file.location.rpartition("/")[0], []).append(file)
    large_folders = [
        folder_files for folder_files in folders.values() if len(folder_files) >= _MIN_FOLDER_FILES
    ]
    listings = map_concurrently(_list_folder, large_folders, lambda folder_files: folder_files[0].location)
    return {location: size for listing in listings for location, size in listing.items()}


def _list_folder(files: Sequence[StoredFile]) -> dict[str, int]:
    io = files[0].io
    if not isinstance(io, PyArrowFileIO):
        return {}
    locations = {}
    try:
        for file in files:
            scheme, netloc, path = io.parse_location(file.location, io.properties)
            locations[path] = file.location
        selector = FileSelector(path.rpartition("/")[0], allow_not_found=True)
        listing = io.fs_by_scheme(scheme, netloc).get_file_info(selector)
    except Exception:  # noqa: BLE001 - the requests for single files give the errors, or work without listing
        return {}
    return {locations[info.path]: info.size for info in listing if info.path in locations and info.is_file}


def map_concurrently(
    call: Callable[[Item], Answer], items: Sequence[Item], location: Callable[[Item], str]
) -> list[Answer]:
    """Call `call` for each item and return the answers in order.

    Items with a remote `location` are called concurrently. For local files a thread costs more than the
    answer.
    """
    remote_count = sum(not is_local(location(item)) for item in items)
    if remote_count < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, remote_count)) as pool:
        return list(pool.map(call, items))


_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")
_UNIQUE = re.compile(r"(?<=_)(?:[0-9a-f]{16}_)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
"""The end of a location that the catalog chose: the table's UUID, after the batch id of a staging table."""
_recorded_prefixes: set[tuple[str, str]] = set()
"""Pairs of a warehouse and a prefix that this process has recorded; about one for each table name."""


def list_prefixes(location: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """List the prefixes of all files that writers of a table create.

    Args:
        location: The location of the table.
        properties: The table's properties; those with paths are read.

    Returns:
        The prefix of the table's location, then the paths outside it. A prefix ends with a slash, except if
        the catalog chose the location: then the table's UUID is omitted, so that all tables of one name
        have the same prefix.
    """
    table_folder = f"{location.rstrip('/')}/"
    paths = [f"{properties[name].rstrip('/')}/" for name in _PATHS if properties.get(name)]
    outside_paths = [path for path in paths if not path.startswith(table_folder)]
    base, _, name = location.rstrip("/").rpartition("/")
    unique = _UNIQUE.search(name)
    shared = f"{base}/{name[: unique.start()]}" if unique else table_folder
    return tuple(dict.fromkeys((shared, *outside_paths)))


def is_chosen_name(name: str, base: str) -> bool:
    """Return whether the catalog has built a folder's name from `base`, which ends with `_`.

    The catalog appends the table's UUID, after a batch id for a staging table.
    """
    unique = _UNIQUE.search(name)
    return unique is not None and name[: unique.start()] == base


def record_prefixes(io: FileIO, warehouse: str, metadata: TableMetadata) -> None:
    """Record the prefixes of a table, if they are not recorded yet. Writers call this before they write.

    Costs one request to the storage for each prefix that is new to this process, and another one if it is new
    to the warehouse. Raises OSError.
    """
    for prefix in list_prefixes(metadata.location, metadata.properties):
        if (warehouse, prefix) in _recorded_prefixes:
            continue
        content = prefix.encode()
        name = hashlib.sha256(content).hexdigest()[:32]
        location = f"{_prefix_folder(warehouse)}/{name}"
        if _find_file_size(io, location) != len(content):  # a power cut may have left an empty file
            with io.new_output(location).create(overwrite=True) as stream:
                stream.write(content)
        _recorded_prefixes.add((warehouse, prefix))


def load_prefixes(io: FileIO, warehouse: str) -> frozenset[str]:
    """Load all prefixes that writers have recorded in a warehouse.

    Costs one listing, and one request for each prefix. Raises OSError.
    """
    if not isinstance(io, PyArrowFileIO):
        return frozenset()
    folder = _prefix_folder(warehouse)
    scheme, netloc, path = io.parse_location(folder, io.properties)
    listing = io.fs_by_scheme(scheme, netloc).get_file_info(FileSelector(path, allow_not_found=True))
    locations = [f"{folder}/{info.base_name}" for info in listing if info.is_file]
    contents = map_concurrently(lambda location: read_content(io, location), locations, str)
    return frozenset(content.decode() for content in contents if content)


def _prefix_folder(warehouse: str) -> str:
    return f"{warehouse.rstrip('/')}/{LakeFolder.PREFIXES}"


def _find_file_size(io: FileIO, location: str) -> int | None:
    try:
        return len(io.new_input(location))
    except FileNotFoundError:
        return None
