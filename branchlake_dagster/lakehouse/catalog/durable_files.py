"""Local files that survive a power cut: synchronized to disk, file and folder, before a commit names them.

A commit in Nessie names files. The file system writes a new file to disk half a minute later: after a power
cut in between, Nessie knew a table whose metadata file was empty. Object stores answer a write when it is
safe, and need nothing of this.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO


def is_local(location: str) -> bool:
    """Whether a location is in a file system of this machine (`file:` or a path)."""
    return location.startswith(("file:", "/"))


def synchronize(locations: Iterable[str]) -> None:
    """Wait until the disk holds these files and their names; locations that are not local are skipped.

    Costs 0.05 ms for a file that the disk holds already. Raises OSError.
    """
    paths = [Path(urlparse(location).path) for location in locations if is_local(location)]
    for path in paths:
        _synchronize_file(path)
        # Spark's file system refuses a file whose checksum, which it writes beside it, was lost.
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
        if error.errno != errno.EINVAL:  # file systems that cannot do that for a folder
            raise


class DurableFileIO(PyArrowFileIO):
    """PyArrow's FileIO, whose local files are on disk when their streams are closed."""

    def new_output(self, location: str) -> PyArrowFile:
        """A file to be written."""
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
    """The folder and those above it, as far as they do not exist yet."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    return missing


class _DurableStream:
    """A stream of PyArrow's; `close` waits for the disk."""

    def __init__(self, stream: Any, path: Path, new_folders: Iterable[Path]) -> None:
        self._stream = stream
        self._path = path
        self._new_folders = new_folders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, content: bytes) -> int:
        written: int = self._stream.write(content)
        return written

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
