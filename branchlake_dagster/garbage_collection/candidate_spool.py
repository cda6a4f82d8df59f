"""Select the listed files of a pass that may be orphans, and keep them on disk.

Most files are reachable, so the names of a batch are compared with the reachable files first. Only the other
files of a local file system are inspected, because that takes longer than all else.

Millions of names would fill the memory. So the files that may be orphans are stored in a spool. The spool
needs at most 1 MB of memory, and about 40 bytes per file on disk, because names of one folder compress well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from branchlake_dagster.garbage_collection.orphan_rule import FileVerdict, find_hidden
from branchlake_dagster.garbage_collection.warehouse_files import ListedFile, WarehouseFiles
from branchlake_dagster.tables.location_keys import Keys, KeySet, LocationKeyer

_BATCH = 8192
_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("modified_us", pa.int64()),
        ("last_change_us", pa.int64()),
        ("folder", pa.int32()),
        ("key", pa.uint64()),
    ]
)


@dataclass(frozen=True)
class Candidates:
    """A batch of listed files, as parallel columns. `folders` are the folder numbers passed to `add`."""

    paths: list[str]
    sizes: npt.NDArray[np.int64]
    modified_us: npt.NDArray[np.int64]
    last_change_us: npt.NDArray[np.int64]
    folders: npt.NDArray[np.int32]
    keys: Keys


class CandidateSpool:
    """A temporary file of listed files that may be orphans. Add all files, then iterate over the batches.

    Use it as a context manager, which frees the disk space. The file has no name, so the operating system
    also frees the space of a process that was killed.
    """

    def __init__(self, keyer: LocationKeyer) -> None:
        self._keyer = keyer
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._writer: Any = pa.ipc.new_file(
            pa.PythonFile(self._file, mode="w"),
            _SCHEMA,
            options=pa.ipc.IpcWriteOptions(compression="zstd"),
        )
        self._rows: list[tuple[ListedFile, int, str]] = []
        self.count = 0

    def __enter__(self) -> CandidateSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._file.close()

    def add(self, file: ListedFile, folder: int, location: str) -> None:
        """Store a file. `folder` is a number chosen by the caller.

        `location` is the file's path with a scheme.
        """
        self._rows.append((file, folder, location))
        self.count += 1
        if len(self._rows) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = [
            pa.array([file.path for file, _, _ in self._rows], pa.string()),
            pa.array([file.size for file, _, _ in self._rows], pa.int64()),
            pa.array([file.modified_us for file, _, _ in self._rows], pa.int64()),
            pa.array([file.last_change_us for file, _, _ in self._rows], pa.int64()),
            pa.array([folder for _, folder, _ in self._rows], pa.int32()),
            pa.array(self._keyer.keys([location for _, _, location in self._rows])),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        self._rows = []

    def __iter__(self) -> Iterator[Candidates]:
        """Iterate over all files in batches of 8,192. Files cannot be added afterwards."""
        self._flush()
        self._writer.close()
        self._file.seek(0)
        reader = pa.ipc.open_file(pa.PythonFile(self._file, mode="r"))
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            yield Candidates(
                batch["path"].to_pylist(),
                batch["size"].to_numpy(),
                batch["modified_us"].to_numpy(),
                batch["last_change_us"].to_numpy(),
                batch["folder"].to_numpy(),
                batch["key"].to_numpy(),
            )


class CandidateSelector:
    """Adds the listed files to a spool that are neither hidden, nor reachable, nor too young.

    Args:
        files: The files of the warehouse.
        keyer: Computes the keys of the files.
        reachable: The keys of the files that are reachable so far.
        newest_change_us: The latest time, in µs since 1970, that an orphan may have.
        spool: Receives the files.
    """

    def __init__(
        self,
        files: WarehouseFiles,
        keyer: LocationKeyer,
        reachable: KeySet,
        newest_change_us: int,
        spool: CandidateSpool,
    ) -> None:
        self._files = files
        self._keyer = keyer
        self._reachable = reachable
        self._newest_change_us = newest_change_us
        self._spool = spool
        self._paths: list[str] = []
        self._relative_paths: list[str] = []
        self._folders: list[int] = []
        self._listed_files: list[ListedFile] = []
        self.file_count = 0
        """The number of files that were added."""
        self.kept = {FileVerdict.YOUNG.value: 0, FileVerdict.HIDDEN.value: 0, FileVerdict.REACHABLE.value: 0}
        """The number of files that were not added to the spool, by verdict."""

    def add_folder(self, folder: str, number: int) -> None:
        """List all files below a folder, and select from them. `number` stands for the folder in the spool.

        Raises WarehouseUnreadable. Call `flush` after the last folder.
        """
        prefix = len(self._files.path_of(folder).rstrip("/")) + 1
        for paths, listed_files in self._files.iter_batches(folder):
            self._paths += paths
            self._relative_paths += [path[prefix:] for path in paths]
            self._folders += [number] * len(paths)
            self._listed_files += listed_files or ()
            if len(self._paths) >= _BATCH:
                self.flush()

    def flush(self) -> None:
        """Select from the files that were listed, but not compared yet."""
        if not self._paths:
            return
        paths = pl.Series("path", self._paths, dtype=pl.String)
        locations = self._files.locations_of(paths)
        is_hidden = find_hidden(pl.Series("path", self._relative_paths, dtype=pl.String))
        is_reachable = self._reachable.contains(self._keyer.keys(locations)) & ~is_hidden
        self.file_count += len(paths)
        self.kept[FileVerdict.HIDDEN.value] += int(is_hidden.sum())
        self.kept[FileVerdict.REACHABLE.value] += int(is_reachable.sum())
        others = np.flatnonzero(~is_hidden & ~is_reachable).tolist()
        for number, file in zip(others, self._describe(others), strict=True):
            if file is None:
                continue  # the file was deleted after its folder was listed
            if file.last_change_us > self._newest_change_us:
                self.kept[FileVerdict.YOUNG.value] += 1
            else:
                self._spool.add(file, self._folders[number], locations[number])
        self._paths, self._relative_paths, self._folders, self._listed_files = [], [], [], []

    def _describe(self, numbers: Sequence[int]) -> Sequence[ListedFile | None]:
        if self._files.is_local:
            return self._files.inspect([self._paths[number] for number in numbers])
        return [self._listed_files[number] for number in numbers]
