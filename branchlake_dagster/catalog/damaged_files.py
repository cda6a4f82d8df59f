"""Finds the damaged data file after a read has failed, because Arrow's errors do not name it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.table import DataScan, FileScanTask

from branchlake_dagster.catalog.stored_files import StoredFileDamaged, read_content, wrap_parse_errors


def read_scan(scan: DataScan) -> pa.Table:
    """Read the rows of a scan. Raises StoredFileDamaged as `name_damaged_file`."""
    with name_damaged_file(scan.io, scan.plan_files):
        return scan.to_arrow()


@contextmanager
def name_damaged_file(io: FileIO, list_tasks: Callable[[], Iterable[FileScanTask]]) -> Iterator[None]:
    """Raise StoredFileDamaged if the block fails because it reads a damaged Parquet file.

    `list_tasks` returns what the block reads. If all files can be parsed, or the storage does not answer, the
    error is raised as it is.

    Cost: after an error of Arrow, the footers of the files are read again. Their rows are read too if Arrow
    could not read a page, one file after the other, until one cannot be parsed.
    """
    try:
        yield
    except pa.ArrowInvalid as error:
        if damaged := _find_damaged(io, list_tasks, reads_rows=False):
            raise damaged from error
        raise
    except OSError as error:
        # The storage's own errors have an error number and name the file. Arrow's errors of pages have none.
        if error.errno is None and (damaged := _find_damaged(io, list_tasks, reads_rows=True)):
            raise damaged from error
        raise


def _find_damaged(
    io: FileIO, list_tasks: Callable[[], Iterable[FileScanTask]], *, reads_rows: bool
) -> StoredFileDamaged | None:
    """Return the error of the first file that cannot be parsed; None if there is none or it is not known."""
    try:
        for task in list_tasks():
            for file in (task.file, *task.delete_files):
                if file.file_format == FileFormat.PARQUET and (reads_rows or not _has_footer(io, file)):
                    _parse(read_content(io, file.file_path), file.file_path)
    except StoredFileDamaged as damaged:
        return damaged
    except OSError:
        return None
    return None


def _has_footer(io: FileIO, file: DataFile) -> bool:
    try:
        with io.new_input(file.file_path).open() as stream:
            pq.ParquetFile(stream)
    except (pa.ArrowInvalid, OSError):
        return False  # the file may be damaged, or the storage may not answer
    return True


def _parse(content: bytes, location: str) -> None:
    with wrap_parse_errors(location):
        parquet = pq.ParquetFile(pa.BufferReader(content))
        for number in range(parquet.num_row_groups):
            parquet.read_row_group(number)
