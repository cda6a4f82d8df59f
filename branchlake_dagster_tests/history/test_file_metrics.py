"""What may be relied upon in a file's metadata, case by case."""

from __future__ import annotations

import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg import types as ice
from pyiceberg.conversions import to_bytes
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import BucketTransform, IdentityTransform, Transform
from pyiceberg.typedef import Record

from branchlake_dagster.checks.constraints import Among, Compared, NotAmong, NotNull, StartsWith
from branchlake_dagster.checks.proof import can_prove
from branchlake_dagster.checks.stored_rows import Footers
from branchlake_dagster.history.manifests import ColumnFacts, column_facts

PLAIN = PartitionSpec()
DOUBLE, LONG, TEXT = ice.DoubleType(), ice.LongType(), ice.StringType()


def _file(**told: Any) -> DataFile:
    """Four rows of a column with the field id 1."""
    known: dict[str, Any] = {
        "content": DataFileContent.DATA,
        "file_path": "file:///f.parquet",
        "file_format": FileFormat.PARQUET,
        "partition": Record(),
        "record_count": 4,
        "file_size_in_bytes": 1,
        "split_offsets": [4],
        "value_counts": {1: 4},
        "null_value_counts": {1: 0},
        "nan_value_counts": {1: 0},
    }
    return DataFile.from_args(**{**known, **told})


def _facts(kind: ice.IcebergType, spec: PartitionSpec = PLAIN, **told: Any) -> ColumnFacts:
    return column_facts(_file(**told), ice.NestedField(1, "c", kind, required=False), spec)


def _bounds(kind: ice.PrimitiveType, low: Any, high: Any) -> dict[str, Any]:
    return {"lower_bounds": {1: to_bytes(kind, low)}, "upper_bounds": {1: to_bytes(kind, high)}}


def _spec(transform: Transform[Any, Any]) -> PartitionSpec:
    return PartitionSpec(PartitionField(source_id=1, field_id=1000, transform=transform, name="by"))


@pytest.mark.parametrize(
    "told",
    [
        {"null_value_counts": None},
        {"null_value_counts": {}},
        {"value_counts": None},
        {"value_counts": {2: 4}},
        {"value_counts": {1: 3}},  # of a list's elements, or a writer that counts otherwise
        {"null_value_counts": {1: 1}},
    ],
)
def test_not_null_needs_every_count(told: dict[str, Any]) -> None:
    assert can_prove(_facts(LONG), NotNull(), LONG)
    assert not can_prove(_facts(LONG, **told), NotNull(), LONG)


def test_nested_columns_are_not_known() -> None:
    assert _facts(ice.ListType(2, LONG)) == ColumnFacts()
    assert _facts(ice.StructType(ice.NestedField(2, "x", LONG))) == ColumnFacts()


def test_nan_is_above_every_number() -> None:
    told = _bounds(DOUBLE, 1.0, 2.0)
    for nan in ({1: 1}, {}, None):
        known = _facts(DOUBLE, **told, nan_value_counts=nan)
        assert can_prove(known, Compared(">=", 1.0), DOUBLE)
        assert not can_prove(known, Compared("<=", 2.0), DOUBLE)
        assert not can_prove(
            _facts(DOUBLE, **_bounds(DOUBLE, 1.0, 1.0), nan_value_counts=nan), Compared("=", 1.0), DOUBLE
        )
    assert can_prove(_facts(DOUBLE, **told), Compared("<=", 2.0), DOUBLE)
    assert not can_prove(_facts(DOUBLE, **told), Compared("<=", float("nan")), DOUBLE)
    assert _facts(DOUBLE, **_bounds(DOUBLE, float("nan"), 2.0)).low is None


def test_zero_has_two_signs() -> None:
    known = _facts(DOUBLE, **_bounds(DOUBLE, -0.0, 0.0))
    assert can_prove(known, Compared(">=", 0.0), DOUBLE)
    assert not can_prove(known, Compared(">", -0.0), DOUBLE)
    assert not can_prove(known, Among((0.0, 1.0)), DOUBLE)


def test_bounds_of_promoted_columns_are_read_in_their_old_type() -> None:
    assert _facts(LONG, lower_bounds={1: struct.pack("<i", -7)}).low == -7
    assert _facts(DOUBLE, lower_bounds={1: struct.pack("<f", 0.5)}).low == 0.5
    decimal = ice.DecimalType(18, 2)
    assert _facts(decimal, lower_bounds={1: (-150).to_bytes(2, "big", signed=True)}).low == Decimal("-1.50")
    assert _facts(ice.TimestamptzType(), lower_bounds={1: struct.pack("<i", 20000)}).low is None  # was a date
    assert _facts(ice.IntegerType(), lower_bounds={1: struct.pack("<q", 1)}).low is None
    assert _facts(LONG, lower_bounds={1: b""}).low is None


def test_cut_texts_are_bounds_and_no_values() -> None:
    cut = _facts(TEXT, **_bounds(TEXT, "abcdefghijklmnop", "abcdefghijklmnoq"))
    assert can_prove(cut, StartsWith("abcdefghijklmno"), TEXT)
    assert not can_prove(cut, Compared("=", "abcdefghijklmnop"), TEXT)
    assert can_prove(cut, NotAmong(("b", "abc")), TEXT)
    assert not can_prove(cut, Compared("!=", "abcdefghijklmnopq"), TEXT)
    open_end = _facts(TEXT, lower_bounds={1: b"ab"})
    assert not can_prove(open_end, StartsWith("a"), TEXT)
    assert _facts(TEXT, lower_bounds={1: b"\xff"}).low is None


@pytest.mark.parametrize("offsets", [[4, 900], [], None])
def test_texts_of_several_row_groups_ask_the_footer(offsets: list[int] | None) -> None:
    file = _file(**_bounds(TEXT, "a", "a"), split_offsets=offsets)
    field = ice.NestedField(1, "c", TEXT, required=False)
    assert column_facts(file, field, PLAIN).low is None
    assert column_facts(file, field, PLAIN, lambda *_: False).low is None
    assert column_facts(file, field, PLAIN, lambda *_: True).low == "a"


def test_footers_know_which_row_groups_have_bounds(tmp_path: Path) -> None:
    """Arrow writes none for a row group with a value of over 4 kB; only nulls need none."""
    schema = pa.schema(
        [
            pa.field(name, pa.string(), metadata={"PARQUET:field_id": str(number)})
            for number, name in enumerate("ab", start=1)
        ]
    )
    path = tmp_path / "f.parquet"
    rows = {"a": ["x", "y", None, None], "b": ["x", "y", "z" * 5000, "y"]}
    pq.write_table(pa.table(rows, schema=schema), path, row_group_size=2)
    file = _file(file_path=f"file://{path}")
    footers = Footers(PyArrowFileIO(), max_files=1)
    assert footers.has_all_bounds(file, 1)
    assert not footers.has_all_bounds(file, 2)
    assert not footers.has_all_bounds(file, 3)
    assert not footers.has_all_bounds(_file(file_path=f"file://{path}.other"), 1)  # one is enough here
    assert not Footers(PyArrowFileIO(), max_files=1).has_all_bounds(
        _file(file_path="file:///gone.parquet"), 1
    )


def test_an_identity_partition_is_the_value_whatever_the_files_bounds() -> None:
    told = {**_bounds(TEXT, "a", "z"), "null_value_counts": None, "split_offsets": None}
    one = _facts(TEXT, _spec(IdentityTransform()), partition=Record("k"), **told)
    assert one == ColumnFacts(no_null=True, no_nan=True, low="k", high="k")
    assert _facts(TEXT, _spec(IdentityTransform()), partition=Record(None), **told).all_null
    bucket = _facts(LONG, _spec(BucketTransform(4)), partition=Record(3), **_bounds(LONG, 10, 20))
    assert (bucket.low, bucket.high) == (10, 20)
    nan = _facts(DOUBLE, _spec(IdentityTransform()), partition=Record(float("nan")))
    assert nan == ColumnFacts(no_null=True)


def test_only_nulls_keep_all_but_one() -> None:
    nulls = _facts(LONG, null_value_counts={1: 4})
    assert can_prove(nulls, Compared("<", 0), LONG)
    assert can_prove(nulls, Among((1, 2)), LONG)
    assert not can_prove(nulls, NotNull(), LONG)
    assert not can_prove(nulls, Among(()), LONG)  # Spark's answer depends on a setting


@pytest.mark.parametrize(
    ("kind", "value", "bound"),
    [
        (LONG, 5, True),
        (LONG, 5, "1"),
        (LONG, 5, 2**63),
        (ice.FloatType(), 5.0, 2**24 + 1),
        (DOUBLE, 5.0, 2**53 + 1),
        (TEXT, "b", b"a"),
        (ice.DateType(), 5, "1960-01-01"),
        (ice.DecimalType(9, 2), Decimal("5.00"), 1.5),
        (ice.DecimalType(9, 2), Decimal("5.00"), Decimal("1e-19")),
        (ice.DecimalType(38, 20), Decimal("5.00"), Decimal(1)),
    ],
)
def test_what_spark_would_cast_in_its_own_way_is_left_to_it(
    kind: ice.PrimitiveType, value: Any, bound: Any
) -> None:
    known = ColumnFacts(no_null=True, no_nan=True, low=value, high=value)
    assert not can_prove(known, Compared("!=", bound), kind)
    assert not can_prove(known, Compared(">", bound), kind)
