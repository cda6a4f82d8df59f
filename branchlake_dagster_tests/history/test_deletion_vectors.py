"""The values that a file may hold: of deletion vectors, and at the end of the calendar."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import MonthTransform, Transform, YearTransform
from pyiceberg.typedef import Record
from pyiceberg.types import NestedField, TimestamptzType

from branchlake_dagster.history.change import ChangedFile, ChangeSet, Position
from branchlake_dagster.history.ranges import ColumnRanges, Range, changed_ranges
from branchlake_dagster_tests.history.snapshot_tables import BY_DAY, SCHEMA


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


@pytest.mark.parametrize(("transform", "value"), [(MonthTransform(), 96_359), (YearTransform(), 8_029)])
def test_a_partition_that_ends_after_the_calendar_may_hold_any_value(
    transform: Transform[Any, Any], value: int
) -> None:
    """December 9999, and the year 9999. Python's calendar has no moment after them."""
    schema = Schema(NestedField(1, "at", TimestamptzType()))
    metadata: Any = SimpleNamespace(
        schema=lambda: schema, specs=lambda: {0: PartitionSpec(PartitionField(1, 1000, transform, "part"))}
    )
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path="s3://lake/t/a.parquet",
        file_format=FileFormat.PARQUET,
        partition=Record(value),
        record_count=1,
        file_size_in_bytes=1,
    )
    file.spec_id = 0
    assert ColumnRanges(metadata, "at", table="t").ranges_of(ChangedFile(file, 1, 0)).anything
