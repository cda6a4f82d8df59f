"""Copy folders of a lake into a backup. Unchanged files become hard links to the previous backup's copies."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

_SQLITE_HEADER = b"SQLite format 3\x00"
_SQLITE_COMPANIONS = ("-wal", "-shm", "-journal")
_PROGRESS_FILES = 5_000


@dataclass
class CopyCount:
    """The numbers of files and bytes that were copied or linked from one folder of the lake."""

    files: int = 0
    bytes: int = 0
    linked_files: int = 0
    """The number of files that are hard links to copies of the previous backup."""
    vanished_files: int = 0
    """The number of files that were deleted between the listing and the copy, such as by the clean-up."""
    skipped_links: list[str] = field(default_factory=list)
    """Symbolic links to folders or missing files, as paths relative to the source. They are not copied."""


@dataclass(frozen=True)
class _FolderEntries:
    """The files and links in the source or in a folder below it. Paths are relative to the source.

    `mode` has the folder's permissions.
    """

    folder: Path
    mode: int
    files: tuple[Path, ...]
    skipped_links: tuple[Path, ...]
    early_contents: Mapping[Path, bytes] = field(default_factory=dict)
    """The contents of the early files, which are not among ``files``."""


def copy_folder(
    source: Path,
    target: Path,
    *,
    previous: Path | None = None,
    has_databases: bool = False,
    early_files: Collection[str] = (),
    report: Callable[[CopyCount], None] = lambda _: None,
) -> CopyCount:
    """Copy all folders and files below `source` to the folder `target`. Return the counts. Raises OSError.

    `previous` is the same folder of an earlier backup, or None. If it has a copy with the same path, size and
    modification time, the new file is a hard link to this copy. With `has_databases`, SQLite databases are
    copied by SQLite, so the copies are consistent; a database with an empty or no write-ahead log may be
    linked. A symbolic link to a file becomes a file with the same content. Folders get the permissions of
    their sources after all files are copied. Files with one of the names `early_files` are read before their
    folder is listed; they must be small. `report` is called every 5,000 files.
    """
    count = CopyCount()
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder_modes: list[tuple[Path, int]] = []
    for entries in _walk_folders(source, early_files):
        (target / entries.folder).mkdir(mode=0o700, exist_ok=True)
        folder_modes.append((target / entries.folder, entries.mode))
        count.skipped_links += [str(link) for link in entries.skipped_links]
        for relative_path, content in entries.early_contents.items():
            (target / relative_path).write_bytes(content)
            count.files += 1
            count.bytes += len(content)
        for relative_path in entries.files:
            path, copy = source / relative_path, target / relative_path
            if has_databases and _is_companion(path):
                continue
            earlier_copy = previous / relative_path if previous is not None else None
            try:
                is_linked = _copy_file(path, copy, earlier_copy, has_databases and _is_database(path))
            except FileNotFoundError:
                if path.exists():
                    raise
                count.vanished_files += 1
                continue
            count.files += 1
            count.bytes += copy.stat().st_size
            count.linked_files += is_linked
            if count.files % _PROGRESS_FILES == 0:
                report(count)
    for folder, mode in reversed(folder_modes):  # a folder may be read-only, so its parents come later
        folder.chmod(mode)
    return count


def remove_folder(folder: Path) -> None:
    """Delete a folder and its contents, even if subfolders are read-only. Raises OSError."""
    try:
        shutil.rmtree(folder)
    except PermissionError:
        for path, _, _ in os.walk(folder):
            Path(path).chmod(0o700)  # os.walk lists a folder before it enters the folders in it
        shutil.rmtree(folder)


def _walk_folders(source: Path, early_files: Collection[str]) -> Iterator[_FolderEntries]:
    """Yield a folder and all folders below it, each before its subfolders.

    Links to folders are not followed.
    """
    pending = [Path()]
    while pending:
        folder = pending.pop()
        early_contents = {}
        for name in early_files:
            with suppress(FileNotFoundError):
                early_contents[folder / name] = (source / folder / name).read_bytes()
        try:
            with os.scandir(source / folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
            mode = stat.S_IMODE((source / folder).stat().st_mode)
        except FileNotFoundError:
            continue  # deleted since it was listed
        files, skipped_links = [], []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(folder / entry.name)
            elif entry.is_symlink() and not Path(entry.path).is_file():
                skipped_links.append(folder / entry.name)
            elif entry.is_file() and folder / entry.name not in early_contents:
                files.append(folder / entry.name)
        yield _FolderEntries(folder, mode, tuple(files), tuple(skipped_links), early_contents)


def _is_companion(path: Path) -> bool:
    """Return whether a file belongs to an SQLite database: its write-ahead log, shared memory or journal."""
    suffix = next((suffix for suffix in _SQLITE_COMPANIONS if path.name.endswith(suffix)), None)
    return suffix is not None and _is_database(path.with_name(path.name.removesuffix(suffix)))


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            return handle.read(len(_SQLITE_HEADER)) == _SQLITE_HEADER
    except OSError:
        return False


def _copy_file(path: Path, copy: Path, earlier_copy: Path | None, is_database: bool) -> bool:
    """Copy one file, or link it to `earlier_copy` if it has not changed. Return whether it was linked.

    A SQLite database (`is_database`) is copied by SQLite. It is not linked while a log or journal that is not
    empty lies beside it.

    The copy gets the modification time that the file had before it was read. So if the file is changed during
    the copy, the times differ, and the next backup copies the file again.
    """
    if is_database:
        path = path.resolve()  # SQLite keeps the companions beside the file, not beside a link to it
    has_pending_changes = is_database and _has_companion(path)
    if earlier_copy is not None and not has_pending_changes and _is_same_file(path, earlier_copy):
        try:
            os.link(earlier_copy, copy)
        except OSError:
            pass  # the file system has no hard links, or no more of them for this file
        else:
            return True
    status = path.stat()
    if is_database:
        _copy_sqlite(path, copy)
    else:
        shutil.copy2(path, copy)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    return False


def _copy_sqlite(path: Path, copy: Path) -> None:
    """Copy a database by SQLite. Raises OSError, also for SQLite's own errors."""
    try:
        with (
            closing(
                sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=60.0)
            ) as database,
            closing(sqlite3.connect(copy)) as backup,
        ):
            database.backup(backup)
    except sqlite3.Error as error:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy)) from error
        raise OSError(errno.EIO, f"SQLite cannot copy it ({error})", str(path)) from error
    shutil.copymode(path, copy)


def _has_companion(path: Path) -> bool:
    for suffix in _SQLITE_COMPANIONS:
        companion = path.with_name(path.name + suffix)
        if companion.exists() and companion.stat().st_size > 0 and suffix != "-shm":
            return True
    return False


def _is_same_file(path: Path, earlier_copy: Path) -> bool:
    try:
        now, earlier = path.stat(), earlier_copy.stat()
    except FileNotFoundError:
        return False
    return (now.st_size, now.st_mtime_ns) == (earlier.st_size, earlier.st_mtime_ns)
