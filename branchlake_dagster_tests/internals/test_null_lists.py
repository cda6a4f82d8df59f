"""Null lists of structs, and null maps with structs, that PyIceberg writes and reads."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog

from branchlake_dagster.internals import pyiceberg as pyiceberg_internals

PART = pa.struct([("a", pa.int64())])
LISTS = [None, [{"a": 1}, None], [], None]
MAPS = [None, [("k", {"a": 1}), ("l", None)], [], None]


@pytest.mark.parametrize("is_sliced", [False, True])
@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (LISTS, pa.list_(PART)),
        (MAPS, pa.map_(pa.string(), PART)),
        ([None, [LISTS[1], None]], pa.list_(pa.list_(PART))),
        ([None, {"l": None}, {"l": LISTS[1]}], pa.struct([("l", pa.list_(PART))])),
    ],
    ids=["list", "map", "list_of_lists", "struct"],
)
def test_null_is_not_the_empty_list(
    tmp_path: Path, rows: list[object], kind: pa.DataType, *, is_sliced: bool
) -> None:
    assert pyiceberg_internals.null_lists
    catalog = InMemoryCatalog("memory", warehouse=tmp_path.as_uri())
    catalog.create_namespace("db")
    column = pa.array([rows[1], *rows], kind).slice(1) if is_sliced else pa.array(rows, kind)
    table = catalog.create_table("db.t", pa.schema([("c", kind)]))
    table.append(pa.table({"c": column}))
    (file,) = tmp_path.rglob("*.parquet")
    assert pq.read_table(file)["c"].to_pylist() == rows
    assert table.scan().to_arrow()["c"].to_pylist() == rows
