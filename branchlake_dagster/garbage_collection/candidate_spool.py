"""Keep the listed files of a pass on disk, so that millions of names do not fill the memory.

Only files that are old enough to be orphans are stored. The spool needs at most 1 MB of memory, and about
40 bytes per file on disk, because names of one folder compress well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from branchlake_dagster.garbage_collection.location_keys import Keys, LocationKeyer
from branchlake_dagster.garbage_collection.warehouse_files import ListedFile

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

    Use it as a context manager, which deletes the temporary file.
    """

    def __init__(self, keyer: LocationKeyer) -> None:
        self._keyer = keyer
        self._folder = tempfile.TemporaryDirectory(prefix="branchlake-candidates-")
        self._path = str(Path(self._folder.name) / "candidates.arrow")
        self._writer: Any = pa.ipc.new_file(
            self._path, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")
        )
        self._rows: list[tuple[ListedFile, int, str]] = []
        self.count = 0

    def __enter__(self) -> CandidateSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._folder.cleanup()

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
        with pa.memory_map(self._path) as source:
            reader = pa.ipc.open_file(source)
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
