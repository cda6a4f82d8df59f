"""Filters of PyIceberg by columns whose names have dots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.expressions import EqualTo

from branchlake_dagster.internals import pyiceberg as pyiceberg_internals

INNER = {"b": 1, "c.d": 5}
OTHER = {"b": 2, "c.d": 6}


@pytest.mark.parametrize("column", ["a.b", "s.b", "s.c.d", "plain"])
def test_a_filter_finds_the_column_by_its_whole_name(tmp_path: Path, column: str) -> None:
    assert pyiceberg_internals.field_paths
    catalog = InMemoryCatalog("memory", warehouse=tmp_path.as_uri())
    catalog.create_namespace("db")
    rows: list[dict[str, Any]] = [
        {"a.b": 1, "plain": 1, "s": INNER},
        {"a.b": 2, "plain": 2, "s": OTHER},
    ]
    frame = pa.Table.from_pylist(rows)
    table = catalog.create_table("db.t", frame.schema)
    table.append(frame)
    wanted = EqualTo(column, 5 if column == "s.c.d" else 1)
    assert table.scan(row_filter=wanted).to_arrow().to_pylist() == rows[:1]
    table.delete(wanted)
    assert table.scan().to_arrow().to_pylist() == rows[1:]
