"""Deletion vectors of several partitions lie in one file; none of them may be passed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record

from branchlake_dagster.history.change import ChangedFile, ChangeSet, Position
from branchlake_dagster.history.ranges import Range, changed_ranges
from branchlake_dagster_tests.changes.tables import BY_DAY, SCHEMA


def vector(day: str) -> ChangedFile:
    file = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path="s3://lake/t/deletes.puffin",
        file_format=FileFormat.PUFFIN,
        partition=Record(day),
        record_count=1,
        file_size_in_bytes=1,
    )
    file.spec_id = 0
    return ChangedFile(file, 1, 0)


@pytest.mark.parametrize("days", [("a", "b"), ("b", "a")])
def test_vectors_of_two_partitions_in_one_file(days: tuple[str, str]) -> None:
    at = Position("uuid", 1)
    change = ChangeSet("t", at, at, (), (), (), tuple(map(vector, days)))
    metadata: Any = SimpleNamespace(schema=lambda: SCHEMA, specs=lambda: {0: BY_DAY})
    assert changed_ranges(change, "day", metadata).parts == (Range("a", "a"), Range("b", "b"))
