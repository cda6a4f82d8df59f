"""Null structs with required fields that PyIceberg writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog

from branchlake_dagster.internals import pyiceberg as pyiceberg_internals


def _required(kind: pa.DataType) -> pa.DataType:
    return pa.struct([pa.field("a", kind, nullable=False), pa.field("b", pa.string())])


INNER = _required(pa.int64())
ONE = {"a": 1, "b": None}


@pytest.mark.parametrize("is_sliced", [False, True])
@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([ONE, None], INNER),
        ([{"a": ONE, "b": "c"}, None], _required(INNER)),
        ([{"a": [ONE], "b": "c"}, None], _required(pa.list_(INNER))),
        ([{"a": [("k", ONE)], "b": "c"}, None], _required(pa.map_(pa.string(), INNER))),
        ([[ONE, None], None, []], pa.list_(INNER)),
        ([[("k", ONE), ("l", None)], None, []], pa.map_(pa.string(), INNER)),
        ([{"a": "c", "b": None}, None], _required(pa.string())),
        ([{"a": b"c", "b": None}, None], _required(pa.binary())),
        ([{"a": b"cdef", "b": None}, None], _required(pa.binary(4))),
        ([{"a": True, "b": None}, None], _required(pa.bool_())),
    ],
    ids=str,
)
def test_a_null_struct_with_required_fields_is_written_and_read(
    tmp_path: Path, rows: list[Any], kind: pa.DataType, *, is_sliced: bool
) -> None:
    assert pyiceberg_internals.null_structs
    catalog = InMemoryCatalog("memory", warehouse=tmp_path.as_uri())
    catalog.create_namespace("db")
    column = pa.array([rows[0], *rows], kind).slice(1) if is_sliced else pa.array(rows, kind)
    table = catalog.create_table("db.t", pa.schema([("c", kind)]))
    table.append(pa.table({"c": column}))
    (file,) = tmp_path.rglob("*.parquet")
    assert pq.read_table(file)["c"].to_pylist() == rows
    assert table.scan().to_arrow()["c"].to_pylist() == rows


@pytest.mark.parametrize("values", [["c", None], [b"c", None], [5, None]])
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_null_struct_with_an_encoded_required_field_is_written(
    tmp_path: Path, values: list[Any], *, is_inner: bool
) -> None:
    encoded = pa.array(values).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.array(values).type))
    column = _structs(encoded)
    if is_inner:
        column = _structs(column)
    catalog = InMemoryCatalog("memory", warehouse=tmp_path.as_uri())
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", pa.schema([("c", column.type)]))
    table.append(pa.table({"c": column}))
    assert table.scan().to_arrow()["c"].to_pylist() == column.to_pylist()


def _structs(values: pa.Array) -> pa.StructArray:
    """Return structs with the values as a required field. A struct is null if its value is null."""
    field = pa.field("a", values.type, nullable=False)
    return pa.StructArray.from_arrays([values], fields=[field], mask=values.is_null())


def test_a_missing_value_of_a_required_field_is_refused(tmp_path: Path) -> None:
    catalog = InMemoryCatalog("memory", warehouse=tmp_path.as_uri())
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", pa.schema([("c", INNER)]))
    column = pa.array([None, {"a": None, "b": "c"}], INNER)  # Arrow does not look for nulls here
    with pytest.raises(pa.ArrowInvalid):
        table.append(pa.table({"c": column}))
