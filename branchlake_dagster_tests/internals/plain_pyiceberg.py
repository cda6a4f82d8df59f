"""Manifest entries as writers other than this package leave them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyiceberg.io import pyarrow as arrow_files
from pyiceberg.manifest import DATA_FILE_TYPE, DataFile

from branchlake_dagster.internals import column_metrics


@contextmanager
def plain_pyiceberg() -> Iterator[None]:
    """Within it, PyIceberg's own writer writes: with bounds that may leave row groups out, without a mark."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(
            arrow_files, "data_file_statistics_from_parquet_metadata", column_metrics._plain_statistics
        )
        context.setattr(arrow_files, "write_file", column_metrics._plain_write_file)
        yield


_NULL_COUNTS = [field.name for field in DATA_FILE_TYPE[2].fields].index("null_value_counts")


def without_null_counts(file: DataFile) -> DataFile:
    """The entry of a writer that counts no nulls, at another path."""
    found = DataFile(*file._data)
    found.spec_id = file.spec_id
    found[1] = f"{file.file_path}.uncounted"
    found[_NULL_COUNTS] = None
    return found
