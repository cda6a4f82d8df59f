"""Finds the damaged data file after a read has failed, because Arrow's errors do not name it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.manifest import FileFormat
from pyiceberg.table import DataScan, FileScanTask

from branchlake_dagster.catalog.stored_files import StoredFileDamaged, read_content, wrap_parse_errors


def read_scan(scan: DataScan) -> pa.Table:
    """Read the rows of a scan. Raises StoredFileDamaged as `name_damaged_file`."""
    with name_damaged_file(scan.io, scan.plan_files):
        return scan.to_arrow()


@contextmanager
def name_damaged_file(io: FileIO, list_tasks: Callable[[], Iterable[FileScanTask]]) -> Iterator[None]:
    """Raise StoredFileDamaged if the block fails because it reads a damaged Parquet file.

    `list_tasks` returns what the block reads. After an error of Arrow, these files are read again, one after
    the other, until one of them cannot be parsed. If all can be parsed, or the storage does not answer, the
    error is raised as it is.
    """
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an answer of the storage, which names the file
        if damaged := _find_damaged(io, list_tasks()):
            raise damaged from error
        raise


def _find_damaged(io: FileIO, tasks: Iterable[FileScanTask]) -> StoredFileDamaged | None:
    """Return the error of the first file that cannot be parsed; None if there is none or it is not known."""
    files = (file for task in tasks for file in (task.file, *task.delete_files))
    try:
        for file in files:
            if file.file_format == FileFormat.PARQUET:
                _parse(read_content(io, file.file_path), file.file_path)
    except StoredFileDamaged as damaged:
        return damaged
    except OSError:
        return None
    return None


def _parse(content: bytes, location: str) -> None:
    with wrap_parse_errors(location):
        parquet = pq.ParquetFile(pa.BufferReader(content))
        for number in range(parquet.num_row_groups):
            parquet.read_row_group(number)
