"""Copy folders of a lake into a backup. Files that the previous backup has are linked to it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

_SQLITE_HEADER = b"SQLite format 3\x00"
_SQLITE_COMPANIONS = ("-wal", "-shm", "-journal")
_PROGRESS_FILES = 5_000


@dataclass
class CopyCount:
    """How many files and bytes of a part of the lake are in a backup."""

    files: int = 0
    bytes: int = 0
    linked_files: int = 0
    """Those that the previous backup already had."""
    vanished_files: int = 0
    """Those that were deleted between the listing and the copy, for instance by the clean-up."""


def copy_folder(
    source: Path,
    target: Path,
    *,
    previous: Path | None = None,
    has_databases: bool = False,
    report: Callable[[CopyCount], None] = lambda _: None,
) -> CopyCount:
    """Copy all files below `source` to the new folder `target`. Raises OSError.

    A file with the same size and modification time in `previous`, the same folder of an earlier backup, is
    linked to that. With `has_databases`, SQLite databases are copied by SQLite, so the copies are
    consistent. A database without changes in its write-ahead log may be linked. Symbolic links are skipped.
    `report` is called every 5,000 files.
    """
    count = CopyCount()
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in _iter_files(source):
        if has_databases and _is_companion(path):
            continue
        relative_path = path.relative_to(source)
        copy = target / relative_path
        copy.parent.mkdir(parents=True, exist_ok=True)
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
    return count


def _iter_files(folder: Path) -> Iterator[Path]:
    """List the regular files below a folder."""
    pending = [folder]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except FileNotFoundError:
            continue  # deleted since it was listed
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def _is_companion(path: Path) -> bool:
    """Check whether SQLite keeps this file beside a database."""
    suffix = next((suffix for suffix in _SQLITE_COMPANIONS if path.name.endswith(suffix)), None)
    return suffix is not None and _is_database(path.with_name(path.name.removesuffix(suffix)))


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            return handle.read(len(_SQLITE_HEADER)) == _SQLITE_HEADER
    except OSError:
        return False


def _copy_file(path: Path, copy: Path, earlier_copy: Path | None, is_database: bool) -> bool:
    """Copy or link one file. Return whether it was linked."""
    has_pending_changes = is_database and _has_companion(path)
    if earlier_copy is not None and not has_pending_changes and _is_same_file(path, earlier_copy):
        os.link(earlier_copy, copy)
        return True
    if not is_database:
        shutil.copy2(path, copy)
        return False
    status = path.stat()
    with (
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=60.0)) as database,
        closing(sqlite3.connect(copy)) as backup,
    ):
        database.backup(backup)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    return False


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
