"""List, inspect and delete files of the warehouse.

Paths here are those of the warehouse's file system, without a scheme: `/data/lake/…` or `bucket/lake/…`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
from pyarrow.fs import (
    FileInfo,
    FileSelector,
    FileSystem,
    FileType,
    FSSpecHandler,
    LocalFileSystem,
    PyFileSystem,
)
from pyiceberg.io import load_file_io
from pyiceberg.io.pyarrow import PyArrowFileIO

from branchlake_dagster.catalog.recorded_repositories import RecordedRepository, load_repositories
from branchlake_dagster.catalog.stored_files import MIN_LISTED_FILES, is_chosen_name, load_prefixes
from branchlake_dagster.errors import BranchlakeError, Transient, Unsupported
from branchlake_dagster.garbage_collection.s3_deletion import (
    MAX_KEYS,
    BatchReply,
    BatchUnknown,
    BatchUnsupported,
    S3BatchDeletion,
    can_name,
)
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import LakeFolder
from branchlake_dagster.tables.location_keys import canonical_location, is_inside, split_scheme

_BATCH = 8192
_REMOTE_THREADS = 32
_BATCH_THREADS = 4
_LOCAL_THREADS = 8
"""The number of threads for local deletions. Each deletion takes up to a millisecond."""
_MIN_FOLDER_FILES = 20
"""If the stamps of at least this many files of a folder are requested, the folder is listed."""


class WarehouseUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """A folder or file of the warehouse cannot be read. The files in question were not deleted."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file: its path, its size in bytes, and its times, in µs since 1970 by the store's clock.

    `last_change_us` decides how old the file is. It is `modified_us`, or for a local file the last change of
    its status if that is later: tools such as `mv`, `cp -p` and `rsync -a` keep the time of a file's content.
    New hard links and permissions also make a file younger.
    """

    path: str
    size: int
    modified_us: int
    last_change_us: int


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The size in bytes, the times in ns since 1970, and the inode of a file.

    If a file is written or replaced, at least one of them changes. `last_change_ns` is the later of
    `modified_ns` and the last change of a local file's status. `inode` is 0 in an object store.
    """

    size: int
    modified_ns: int
    last_change_ns: int
    inode: int

    def to_list(self) -> list[int]:
        """Return the four numbers in the order of the attributes."""
        return [self.size, self.modified_ns, self.last_change_ns, self.inode]


@dataclass(frozen=True, slots=True)
class Deletion:
    """The outcome of deleting one file.

    `state` is `deleted`, `missing` (the file did not exist any more), `failed`, or `kept` (it was not tried).
    `error` names the exceptions if `state` is `failed`.
    """

    path: str
    state: str
    error: str = ""


class WarehouseFiles:
    """The files below the root of a lake's tables.

    Args:
        location: The root of the warehouse, as in the settings.
        properties: PyIceberg's FileIO properties.

    Raises:
        Unsupported: PyIceberg does not use PyArrow for this warehouse.
    """

    def __init__(self, location: str, properties: Mapping[str, str]) -> None:
        io = load_file_io(dict(properties), location)
        if not isinstance(io, PyArrowFileIO):
            raise Unsupported(
                f"Files of {location} cannot be listed, because its file IO is not PyArrow's.",
                hint="Remove `py-io-impl` from the catalog's properties.",
            )
        self.location = location.rstrip("/")
        self.canonical = canonical_location(location)
        self._io = io
        self.scheme, netloc, self.root = io.parse_location(self.location, io.properties)
        self._system: FileSystem = io.fs_by_scheme(self.scheme, netloc)
        self.is_local = isinstance(self._system, LocalFileSystem)
        self._location_prefix = "file://" if self.is_local else f"{self.scheme}://"
        self._batch_deletion = S3BatchDeletion.from_properties(self.scheme, netloc, properties)

    @classmethod
    def from_settings(cls, settings: Settings) -> WarehouseFiles:
        """Create the object for the warehouse of a lake from its settings."""
        return cls(settings.warehouse_uri, settings.file_io_properties())

    # -- names -----------------------------------------------------------------------------------------

    def is_table_folder(self, folder: str) -> bool:
        """Return whether unreachable files in a folder may be deleted. Only the path is checked.

        True for folders below the warehouse, except `_branchlake`, which has branchlake's own files, and the
        folders below it.
        """
        canonical = canonical_location(folder)
        own_folder = f"{self.canonical}/_branchlake"
        return (
            is_inside(canonical, self.canonical)
            and canonical != own_folder
            and not is_inside(canonical, own_folder)
        )

    def path_of(self, location: str) -> str:
        """Return the path of a location in the warehouse's file system: the location without its scheme."""
        family, path = split_scheme(location)
        return "/" + path.lstrip("/") if family == "file" else path

    def location_of(self, path: str) -> str:
        """Return the location of a path, with a scheme."""
        return f"{self._location_prefix}{path}"

    def locations_of(self, paths: pl.Series) -> pl.Series:
        """Return the location of each path, with a scheme."""
        return self._location_prefix + paths

    # -- reading ---------------------------------------------------------------------------------------

    def iter_batches(self, folder: str) -> Iterator[tuple[list[str], list[ListedFile] | None]]:
        """Iterate over all files below a folder, in batches of 8,192; over none if it does not exist.

        A batch is a list of paths, and for an object store the files, in the same order. Of local files only
        the names are read: `inspect` those whose size or time is needed. Local symbolic links are neither
        followed nor returned. Local files whose names are not Unicode are omitted. Remote folders are listed
        with one request per 1,000 files. Raises WarehouseUnreadable.
        """
        path = self.path_of(folder).rstrip("/")
        try:
            if self.is_local:
                local_paths = _iter_local_paths(path)
                while paths := list(islice(local_paths, _BATCH)):
                    yield paths, None
                return
            infos = self._system.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
            for start in range(0, len(infos), _BATCH):
                files = [
                    _describe_remote_file(info)
                    for info in infos[start : start + _BATCH]
                    if info.type is FileType.File
                ]
                yield [file.path for file in files], files
        except OSError as error:
            raise WarehouseUnreadable(
                f"Folder {folder} cannot be listed: {type(error).__name__}.",
                hint="Nothing was deleted. Make the folder readable, and run the collection again.",
                subject=folder,
            ) from error

    def list_recorded_folders(self) -> list[str]:
        """List the table folders that writers have recorded as prefixes. Raises WarehouseUnreadable.

        A prefix that ends with `/` is a folder. Any other prefix, such as `…/orders_`, stands for all folders
        that the catalog has created for tables of that name: their names are the prefix and a generated id.
        So `orders_old` is not a folder of the table `orders`.
        """
        try:
            prefixes = load_prefixes(self._io, self.location)
            folders = [prefix for prefix in prefixes if prefix.endswith("/")]
            bases_by_parent: dict[str, set[str]] = {}
            for prefix in prefixes:
                if not prefix.endswith("/"):
                    parent, _, base = prefix.rpartition("/")
                    bases_by_parent.setdefault(parent, set()).add(base)
            for parent, bases in bases_by_parent.items():
                for name in self._list_subfolders(self.path_of(parent)):
                    if any(is_chosen_name(name, base) for base in bases):
                        folders.append(f"{parent}/{name}/")
        except OSError as error:
            raise WarehouseUnreadable(
                f"The recorded folders of {self.location} cannot be read: {type(error).__name__}.",
                hint="Nothing was deleted. Run the collection again when the storage answers.",
            ) from error
        return folders

    def load_repositories(self) -> tuple[RecordedRepository, ...]:
        """Load the Nessie repositories that are recorded in the warehouse. Raises WarehouseUnreadable."""
        try:
            return load_repositories(self._io, self.location)
        except OSError as error:
            raise WarehouseUnreadable(
                f"The recorded repositories of {self.location} cannot be read: {type(error).__name__}.",
                hint="Nothing was deleted. Run the collection again when the storage answers.",
            ) from error

    def _list_subfolders(self, path: str) -> list[str]:
        if self.is_local:
            return _list_local_subfolders(path)
        infos = self._system.get_file_info(FileSelector(path, allow_not_found=True))
        return [info.base_name for info in infos if info.type is FileType.Directory]

    def inspect(self, paths: Sequence[str]) -> list[ListedFile | None]:
        """Return the present size and times of each file, in the order of `paths`; None for a missing file.

        The size of a local link or folder is negative. In an object store, a folder counts as missing.

        Raises WarehouseUnreadable. Costs one request per remote file, 32 of them at once.
        """
        try:
            if self.is_local:
                return [_inspect_local_file(path) for path in paths]
            with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
                infos = list(pool.map(self._system.get_file_info, paths))
        except OSError as error:
            raise WarehouseUnreadable(
                f"Files of {self.location} cannot be inspected: {type(error).__name__}.",
                hint="These files were not deleted. Run the collection again when the storage answers.",
            ) from error
        return [_describe_remote_file(info) if info.type is FileType.File else None for info in infos]

    def read_stamps(self, paths: Sequence[str]) -> list[FileStamp | None]:
        """Return the stamp of each file, in the order of `paths`.

        None if the file is missing or is not a regular file, or if the storage does not answer. If at least
        `MIN_LISTED_FILES` remote files are requested, folders with many of them are listed. Otherwise costs
        one request per remote file, 32 of them at once.
        """
        if self.is_local:
            return [_read_local_stamp(path) for path in paths]
        with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
            folder_sizes = Counter(path.rpartition("/")[0] for path in paths)
            large_folders = [folder for folder, count in folder_sizes.items() if count >= _MIN_FOLDER_FILES]
            listings: dict[str, dict[str, FileStamp]] = {}
            if len(paths) >= MIN_LISTED_FILES:
                stamps_by_folder = pool.map(self._list_stamps, large_folders)
                listings = dict(zip(large_folders, stamps_by_folder, strict=True))
            singles = [path for path in paths if path.rpartition("/")[0] not in listings]
            stamps = dict(zip(singles, pool.map(self._read_remote_stamp, singles), strict=True))
        return [
            listings[folder].get(path) if (folder := path.rpartition("/")[0]) in listings else stamps[path]
            for path in paths
        ]

    def _list_stamps(self, folder: str) -> dict[str, FileStamp]:
        try:
            infos = self._system.get_file_info(FileSelector(folder, allow_not_found=True))
        except OSError:
            return {}
        return {info.path: stamp for info in infos if (stamp := _remote_stamp(info)) is not None}

    def _read_remote_stamp(self, path: str) -> FileStamp | None:
        try:
            return _remote_stamp(self._system.get_file_info(path))
        except OSError:
            return None

    # -- writing ---------------------------------------------------------------------------------------

    def delete(self, paths: Sequence[str]) -> list[Deletion]:
        """Delete files and return what happened to each, in order. An error of one file stops no other.

        S3 deletes up to 1,000 files by one request and does not say which of them did not exist: they count
        as deleted. fsspec's file systems delete the files by batched requests first; then such a file is
        reported as `missing`. If the outcome of a file is unknown, the file is inspected: a request whose
        reply was lost may have deleted it.
        """
        deletions = self._delete_batches(paths) if self._batch_deletion is not None else {}
        others = [path for path in paths if path not in deletions]
        if isinstance(self._system, PyFileSystem) and isinstance(self._system.handler, FSSpecHandler):
            # The outcome of a batch is read from the storage: a batch that failed may be half done.
            with contextlib.suppress(Exception):
                self._system.handler.fs.rm(others)
        if others:
            with ThreadPoolExecutor(_LOCAL_THREADS if self.is_local else _REMOTE_THREADS) as pool:
                deletions |= zip(others, pool.map(self._delete_file, others), strict=True)
        return [deletions[path] for path in paths]

    def _delete_batches(self, paths: Sequence[str]) -> dict[str, Deletion]:
        """Delete files by requests with many keys. Files without an outcome must be deleted one by one."""
        nameable = [path for path in paths if can_name(path)]
        batches = [nameable[start : start + MAX_KEYS] for start in range(0, len(nameable), MAX_KEYS)]
        deletions: dict[str, Deletion] = {}
        with ThreadPoolExecutor(_BATCH_THREADS) as pool:
            for outcome in pool.map(self._delete_batch, batches):
                deletions |= {deletion.path: deletion for deletion in outcome}
        return deletions

    def _delete_batch(self, paths: Sequence[str]) -> list[Deletion]:
        """Delete files by one request. Return no outcomes if the store does not support such requests."""
        deletion = self._batch_deletion
        if deletion is None:
            return []
        try:
            reply = deletion.delete([path.partition("/")[2] for path in paths])
        except BatchUnsupported:
            self._batch_deletion = None  # the store would refuse the next request as well
            return []
        except BatchUnknown as error:
            find_outcome = partial(self._find_outcome, error=str(error))
            with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
                return list(pool.map(find_outcome, paths))
        return [self._read_reply(path, reply) for path in paths]

    def _read_reply(self, path: str, reply: BatchReply) -> Deletion:
        key = path.partition("/")[2]
        if code := reply.errors.get(key):
            return Deletion(path, "failed", code)
        if key in reply.deleted:
            return Deletion(path, "deleted")
        return self._find_outcome(path, "NoReply")

    def _delete_file(self, path: str) -> Deletion:
        if self.is_local:
            # Hadoop's local file system writes a checksum file next to each file that Spark writes. It goes
            # first: if the process is killed in between, the file is deleted later, but a hidden file is not.
            folder, _, name = path.rpartition("/")
            with contextlib.suppress(OSError):
                Path(f"{folder}/.{name}.crc").unlink()
        try:
            self._delete_one(path)
        except FileNotFoundError:
            return Deletion(path, "missing")
        except Exception as error:  # noqa: BLE001 - whatever it is, the file is looked up
            return self._find_outcome(path, type(error).__name__)
        return Deletion(path, "deleted")

    def _delete_one(self, path: str) -> None:
        if self.is_local:
            os.unlink(path)  # noqa: PTH108 - a Path object would take a third of the time
        else:
            self._system.delete_file(path)

    def _find_outcome(self, path: str, error: str) -> Deletion:
        """Return the outcome of a deletion that ended with an error: the file may be gone all the same."""
        try:
            (file,) = self.inspect([path])
        except WarehouseUnreadable as unreadable:
            return Deletion(path, "failed", f"{error}, then {type(unreadable).__name__}")
        return Deletion(path, "deleted") if file is None else Deletion(path, "failed", error)

    def write_marker(self, content: bytes) -> datetime:
        """Replace the collector's marker file. Return its modification time, by the store's clock.

        Raises OSError and WarehouseUnreadable.
        """
        path = self._marker_path()
        if self.is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            target = f"{path}.{uuid.uuid4().hex}.tmp"
            Path(target).write_bytes(content)
            Path(target).replace(path)
        else:
            with self._system.open_output_stream(path) as stream:
                stream.write(content)
        (file,) = self.inspect([path])
        assert file is not None  # noqa: S101 - it was just written
        return to_time(file.modified_us)

    def read_marker(self) -> bytes | None:
        """Return the content of the collector's marker file; None if the file does not exist.

        Raises OSError.
        """
        try:
            with self._system.open_input_stream(self._marker_path()) as stream:
                content: bytes = stream.read()
                return content
        except FileNotFoundError:
            return None

    def _marker_path(self) -> str:
        return f"{self.root}/{LakeFolder.GARBAGE_COLLECTION}/journal.json"


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_time(microseconds: int) -> datetime:
    """Return a time in µs since 1970 as a time in UTC."""
    return _EPOCH + timedelta(microseconds=microseconds)


def to_microseconds(moment: datetime) -> int:
    """Return a time in µs since 1970."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


_NO_FILE = -1
"""The size of a path that is a link or a folder now. No planned file has this size, so the path is kept."""
_FAR_FUTURE_US = 1 << 62
"""The time of a file whose modification time the store does not report. Such a file is never old enough."""
_INODE_BITS = (1 << 63) - 1
"""The bits of an inode number that a signed integer can hold; some file systems use one more."""


def _to_microseconds(modified_at: Any) -> int:
    return to_microseconds(modified_at) if modified_at is not None else _FAR_FUTURE_US


def last_change_ns(status: os.stat_result) -> int:
    """Return the time that decides how old a local file is, in ns since 1970."""
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _describe_local_file(path: str, status: os.stat_result) -> ListedFile:
    return ListedFile(path, status.st_size, status.st_mtime_ns // 1000, last_change_ns(status) // 1000)


def _describe_remote_file(info: FileInfo) -> ListedFile:
    modified_us = _to_microseconds(info.mtime)
    return ListedFile(info.path, info.size or 0, modified_us, modified_us)


def _iter_local_paths(path: str) -> Iterator[str]:
    folders = [path]
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except (FileNotFoundError, NotADirectoryError):
            continue
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and is_unicode(entry.path):
                    yield entry.path


def _list_local_subfolders(path: str) -> list[str]:
    """Return the names of the folders in a folder, without links; none if it does not exist.

    Unlike PyArrow, omits names that are not Unicode: one such file would make the folder unreadable.
    """
    try:
        entries = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with entries:
        return [
            entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and is_unicode(entry.name)
        ]


def _inspect_local_file(path: str) -> ListedFile | None:
    try:
        status = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - as above
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return ListedFile(path, _NO_FILE, 0, _FAR_FUTURE_US)
    return _describe_local_file(path, status)


def _read_local_stamp(path: str) -> FileStamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - as above; a link's target is what is read
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return FileStamp(status.st_size, status.st_mtime_ns, last_change_ns(status), status.st_ino & _INODE_BITS)


def _remote_stamp(info: FileInfo) -> FileStamp | None:
    if info.type is not FileType.File or info.mtime_ns is None or info.size is None:
        return None
    return FileStamp(info.size, info.mtime_ns, info.mtime_ns, 0)


def is_unicode(name: str) -> bool:
    """Return whether a file's name can be encoded. Python reads other bytes of names as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
