"""Null structs with required fields, as workers write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
    TimeType,
)

from branchlake_dagster.ingest import worker_writer as writer
from branchlake_dagster.ingest.required_fields import fill_null_structs
from branchlake_dagster.ingest.worker_writer import Work, WorkerTarget
from branchlake_dagster_tests.history.snapshot_tables import catalogue

LONG = StructType(NestedField(10, "a", LongType(), required=True), NestedField(11, "b", StringType()))
LONG_ARROW = pa.struct([("a", pa.int64()), ("b", pa.string())])
ROW = {"a": 1, "b": None}


def _nested(kind: IcebergType) -> StructType:
    return StructType(NestedField(20, "in", kind, required=True))


@pytest.mark.parametrize(
    ("kind", "arrow_kind", "rows"),
    [
        (LONG, LONG_ARROW, [ROW, None, ROW]),
        (_nested(LONG), pa.struct([("in", LONG_ARROW)]), [{"in": ROW}, None]),
        (
            _nested(ListType(21, LONG, element_required=True)),
            pa.struct([("in", pa.list_(LONG_ARROW))]),
            [{"in": [ROW]}, None],
        ),
        (
            _nested(MapType(21, StringType(), 22, LONG, value_required=True)),
            pa.struct([("in", pa.map_(pa.string(), LONG_ARROW))]),
            [{"in": [("k", ROW)]}, None],
        ),
        (ListType(21, LONG, element_required=False), pa.list_(LONG_ARROW), [[ROW, None], None, []]),
        (
            MapType(21, StringType(), 22, LONG, value_required=False),
            pa.map_(pa.string(), LONG_ARROW),
            [[("k", ROW), ("l", None)], None, []],
        ),
    ],
    ids=["struct", "struct_in_struct", "list_in_struct", "map_in_struct", "list", "map"],
)
@pytest.mark.parametrize("is_sliced", [False, True])
def test_a_null_struct_with_required_fields_is_stored_as_null(
    tmp_path: Path, kind: IcebergType, arrow_kind: pa.DataType, rows: list[Any], *, is_sliced: bool
) -> None:
    """Spark writes null into the fields of a null struct."""
    column = _as_spark_sends([rows[0], *rows] if is_sliced else rows, arrow_kind)
    assert _write(tmp_path, kind, column.slice(1) if is_sliced else column) == rows


def test_a_column_that_the_records_lack_is_null(tmp_path: Path) -> None:
    assert _write(tmp_path, LONG, None) == [None, None]


@pytest.mark.parametrize(
    ("kind", "arrow_kind"),
    [
        (IntegerType(), pa.int32()),
        (BooleanType(), pa.bool_()),
        (DoubleType(), pa.float64()),
        (DecimalType(20, 3), pa.decimal128(20, 3)),
        (DateType(), pa.date32()),
        (TimeType(), pa.time64("us")),
        (TimestamptzType(), pa.timestamp("us", "UTC")),
        (FixedType(4), pa.binary()),
    ],
    ids=str,
)
def test_a_required_field_of_any_type_is_filled(
    tmp_path: Path, kind: IcebergType, arrow_kind: pa.DataType
) -> None:
    column = _as_spark_sends([None, None], pa.struct([("in", arrow_kind)]))
    assert _write(tmp_path, _nested(kind), column) == [None, None]


def test_a_missing_value_in_a_struct_is_not_filled() -> None:
    column = pa.array([{"a": None}, None], pa.struct([("a", pa.int64())]))
    filled = fill_null_structs(column, pa.struct([pa.field("a", pa.int64(), nullable=False)]))
    assert filled.to_pylist() == [{"a": None}, None]
    assert filled.field(0).null_count == 1


def _as_spark_sends(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the rows as an array in which the fields of null structs are null."""
    if pa.types.is_struct(kind):
        fields = [
            _as_spark_sends([None if row is None else row[field.name] for row in rows], field.type)
            for field in kind
        ]
        is_null = pa.array([row is None for row in rows])
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=is_null)
    column = pa.array(rows, kind)
    if not pa.types.is_nested(kind):
        return column
    values = [value for row in rows for value in row or ()]
    if pa.types.is_list(kind):
        inner = _as_spark_sends(values, kind.value_type)
        offsets = pa.array(column.offsets.to_pylist(), pa.int32())
        return pa.ListArray.from_arrays(offsets, inner, type=kind, mask=column.is_null())
    inner = _as_spark_sends([value for _, value in values], kind.item_type)
    offsets = pa.array(column.offsets.to_pylist(), pa.int32())
    return pa.MapArray.from_arrays(offsets, column.keys, inner, type=kind, mask=column.is_null())


def _write(folder: Path, kind: IcebergType, column: pa.Array | None) -> list[Any]:
    """Write a column of this type as a worker does, or two rows without it, and read the file."""
    with catalogue(folder) as catalog:
        table = catalog.create_table(("shop", "t"), Schema(NestedField(1, "c", kind)))
        target = WorkerTarget(table.metadata.model_dump_json(), "__row0", {}, "shop.t")
        table_writer = writer._TableWriter(Work("b", [], [], [target]), target)
        count = 2 if column is None else len(column)
        table_writer.append(table_writer.fit_columns({} if column is None else {"c": column}, count))
        (file,) = table_writer.flush()
    rows: list[Any] = pq.read_table(file.file_path.removeprefix("file://"))["c"].to_pylist()
    return rows
