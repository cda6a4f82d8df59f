"""Which engine writes an upsert, from plain facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyiceberg import types as ice
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, VoidTransform

from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster.tables import upsert_engine as engine
from branchlake_dagster.tables.upsert_engine import (
    CandidateFacts,
    SparkReason,
    TableFacts,
    find_candidate_reason,
    find_table_reason,
    has_required_fields,
)

PLAIN = TableFacts(frame_rows=10, keys=(ice.LongType(),))
STRUCT = ice.StructType(ice.NestedField(2, "a", ice.LongType(), required=False))


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"keys": (ice.StringType(), ice.DecimalType(9, 2), ice.UUIDType(), ice.TimestamptzType())},
        {"partitioned_by": ((IdentityTransform(), ice.StringType()), (BucketTransform(4), ice.LongType()))},
        {"partitioned_by": ((DayTransform(), ice.TimestampType()),)},
        {"properties": {"write.merge.mode": "copy-on-write", "write.parquet.compression-codec": "zstd"}},
        {"properties": {"write.delete.mode": "merge-on-read"}},
        {"frame_rows": engine.MAX_FRAME_ROWS, "data_files": engine.MAX_TABLE_FILES},
    ],
    ids=str,
)
def test_nothing_requires_spark(facts: dict[str, Any]) -> None:
    assert find_table_reason(replace(PLAIN, **facts)) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"format_version": 1}, SparkReason.FORMAT_VERSION),
        ({"format_version": 3}, SparkReason.FORMAT_VERSION),
        ({"partition_specs": 2}, SparkReason.PARTITION_SPECS),
        ({"partitioned_by": ((VoidTransform(), ice.LongType()),)}, SparkReason.PARTITION_COLUMNS),
        ({"partitioned_by": ((IdentityTransform(), ice.DoubleType()),)}, SparkReason.PARTITION_COLUMNS),
        ({"partitioned_by": ((BucketTransform(4), ice.UUIDType()),)}, SparkReason.PARTITION_COLUMNS),
        ({"sorted": True}, SparkReason.SORT_ORDER),
        ({"properties": {"write.merge.mode": "merge-on-read"}}, SparkReason.MERGE_ON_READ),
        ({"delete_files": True}, SparkReason.DELETE_FILES),
        ({"required": True}, SparkReason.REQUIRED_COLUMNS),
        (
            {"properties": {"write.parquet.bloom-filter-enabled.column.id": "true"}},
            SparkReason.PROPERTIES,
        ),
        ({"properties": {"write.location-provider.impl": "org.example.Own"}}, SparkReason.PROPERTIES),
        ({"keys": (ice.DoubleType(),)}, SparkReason.KEY_TYPE),
        ({"keys": (ice.LongType(), ice.FloatType())}, SparkReason.KEY_TYPE),
        ({"keys": (STRUCT,)}, SparkReason.KEY_TYPE),
        ({"data_files": engine.MAX_TABLE_FILES + 1}, SparkReason.TABLE_FILES),
        ({"frame_rows": engine.MAX_FRAME_ROWS + 1}, SparkReason.FRAME_ROWS),
    ],
    ids=str,
)
def test_a_table_is_left_to_spark(facts: dict[str, Any], reason: SparkReason) -> None:
    assert find_table_reason(replace(PLAIN, **facts)) is reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (CandidateFacts(), None),
        (CandidateFacts(frozenset({"PARQUET"}), 10, 10), None),
        (CandidateFacts(frozenset({"PARQUET", "ORC"}), 10, 10), SparkReason.CANDIDATE_FORMAT),
        (CandidateFacts(size_bytes=engine.MAX_CANDIDATE_BYTES + 1), SparkReason.CANDIDATE_BYTES),
        (
            CandidateFacts(partition_count=engine.MAX_CANDIDATE_PARTITIONS + 1),
            SparkReason.CANDIDATE_PARTITIONS,
        ),
        (CandidateFacts(value_count=engine.MAX_CANDIDATE_VALUES + 1), SparkReason.CANDIDATE_VALUES),
    ],
)
def test_candidates_are_left_to_spark(facts: CandidateFacts, reason: SparkReason | None) -> None:
    assert find_candidate_reason(facts) is reason


@pytest.mark.parametrize(
    ("kind", "required"),
    [
        (ice.MapType(2, ice.StringType(), 3, ice.LongType(), value_required=False), False),
        (ice.MapType(2, ice.StringType(), 3, ice.LongType(), value_required=True), True),
        (ice.ListType(2, ice.LongType(), element_required=False), False),
        (ice.ListType(2, ice.LongType(), element_required=True), True),
        (ice.ListType(4, STRUCT, element_required=False), False),
        (ice.StructType(ice.NestedField(2, "a", ice.LongType(), required=True)), True),
    ],
    ids=str,
)
def test_parts_of_columns_that_must_not_be_null(kind: ice.IcebergType, required: bool) -> None:
    assert has_required_fields([ice.NestedField(1, "c", kind, required=False)]) is required


def test_a_materialization_reports_the_engine_and_why_it_is_spark() -> None:
    assert engine.engine_metadata(None) == {EventMetadata.UPSERT_ENGINE: "PyIceberg"}
    assert engine.engine_metadata(SparkReason.SORT_ORDER) == {
        EventMetadata.UPSERT_ENGINE: "Spark",
        EventMetadata.UPSERT_BY_SPARK_BECAUSE: "the table has a sort order",
    }
