"""Whether the bounds that a manifest entry has for a text column are of all row groups, by the file's footer.

The footer is read where the manifest entry does not show it: for files of several row groups that PyIceberg
wrote outside this package.
"""

from __future__ import annotations

import logging

import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, FileFormat

_FIELD_ID = b"PARQUET:field_id"
_log = logging.getLogger(__name__)


class Footers:
    """The footers of a table's data files, each read once, and at most `most` of them."""

    def __init__(self, io: FileIO, *, most: int) -> None:
        self._io = io
        self._most = most
        self._read: dict[str, pq.FileMetaData | None] = {}

    def bound_all(self, file: DataFile, field_id: int) -> bool:
        """Whether every row group of `file` has bounds for the column, or only nulls in it."""
        footer = self._footer(file)
        if footer is None:
            return False
        names = [
            field.name
            for field in footer.schema.to_arrow_schema()
            if (field.metadata or {}).get(_FIELD_ID) == str(field_id).encode()
        ]
        if len(names) != 1:
            return False
        return all(_bounded(footer.row_group(number), names[0]) for number in range(footer.num_row_groups))

    def _footer(self, file: DataFile) -> pq.FileMetaData | None:
        path = file.file_path
        if path not in self._read:
            if file.file_format is not FileFormat.PARQUET or len(self._read) >= self._most:
                return None
            try:
                with self._io.new_input(path).open() as source:
                    self._read[path] = pq.read_metadata(source)
            except Exception as error:  # noqa: BLE001 - what is wrong is said when the rows are read
                _log.info("No footer of %s: %s: %s", path, type(error).__name__, error)
                self._read[path] = None
        return self._read[path]


def _bounded(group: pq.RowGroupMetaData, name: str) -> bool:
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == name:
            told = column.statistics
            if told is None:
                return False
            only_nulls = told.has_null_count and told.null_count == group.num_rows
            return bool(told.has_min_max or only_nulls)
    return False
