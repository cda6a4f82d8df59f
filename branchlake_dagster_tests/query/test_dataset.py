"""Iceberg tables as DuckDB reads them: the right rows, and no file or column more than a query needs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyiceberg.types import LongType

from branchlake_dagster.query import dataset
from branchlake_dagster.query.dataset import IcebergDataset
from branchlake_dagster.query.reference import QueryFailed
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    found = load_catalog("local", type="in-memory", warehouse=f"file://{tmp_path}")
    found.create_namespace("db")
    yield found
    found.close()


@pytest.fixture
def table(catalog: Catalog) -> Table:
    """Three files of ten rows; `n` counts on, `day` is one a file, `word` is null in the last."""
    rows = [rows_of(number) for number in range(3)]
    found = catalog.create_table("db.t", rows[0].schema)
    for one in rows:
        found.append(one)
    return found


def rows_of(number: int) -> pa.Table:
    return pa.table(
        {
            "n": pa.array(range(10 * number, 10 * number + 10), pa.int32()),
            "day": [date(2026, 11, number + 1)] * 10,
            "x": [float("nan") if number == 1 else float(number)] * 10,
            "word": pa.array([None if number == 2 else f"w{number}"] * 10, pa.string()),
        }
    )


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """The columns and the number of files of each scan."""
    seen: list[tuple[list[str], int]] = []

    class Scan(dataset.ArrowScan):
        def to_record_batches(self, tasks: Any) -> Iterator[pa.RecordBatch]:
            seen.append(([field.name for field in self._projected_schema.fields], len(tasks)))
            return super().to_record_batches(tasks)

    monkeypatch.setattr(dataset, "ArrowScan", Scan)
    return seen


def ask(table: Table, query: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        connection.register("t", IcebergDataset(table))
        return connection.sql(query).fetchall()


def test_only_the_columns_of_the_query_are_read(table: Table, scanned: list[Any]) -> None:
    assert ask(table, "SELECT sum(n) FROM t") == [(435,)]
    assert ask(table, "SELECT count(*) FROM t WHERE word = 'w1'") == [(10,)]
    assert [set(columns) for columns, _ in scanned] == [{"n"}, {"n", "word"}]


@pytest.mark.parametrize(
    ("condition", "rows", "files"),
    [
        ("n = 15", 1, 1),
        ("n >= 20", 10, 1),
        ("n < 5 OR n > 25", 9, 2),
        ("day = DATE '2026-11-02'", 10, 1),
        ("day > DATE '2026-11-30'", 0, 0),
        ("word = 'w0'", 10, 1),
        ("word IS NULL", 10, 1),
        ("x > 1e9", 10, 3),  # NaN is above every number, and no bound tells of it
        ("n % 10 = 3", 3, 3),
    ],
)
def test_files_that_cannot_hold_a_row_are_not_read(
    table: Table, scanned: list[Any], condition: str, rows: int, files: int
) -> None:
    assert ask(table, f"SELECT count(*) FROM t WHERE {condition}") == [(rows,)]
    assert sum(count for _, count in scanned) <= files


def test_a_table_is_read_in_groups_of_small_files(
    table: Table, scanned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(table, "SELECT count(*) FROM t") == [(30,)]
    monkeypatch.setattr(dataset, "_GROUP_BYTES", 1)
    assert ask(table, "SELECT count(*) FROM t") == [(30,)]
    assert [count for _, count in scanned] == [3, 1, 1, 1]


def test_a_query_that_stops_early_ends(table: Table) -> None:
    assert len(ask(table, "SELECT * FROM t LIMIT 1")) == 1


def test_a_join_of_a_table_with_itself_reads_it_twice(table: Table) -> None:
    assert ask(table, "SELECT count(*) FROM t AS a JOIN t AS b ON a.n = b.n + 1") == [(29,)]


def test_columns_that_were_renamed_widened_and_added(table: Table) -> None:
    with table.update_schema() as update:
        update.rename_column("word", "text")
        update.update_column("n", LongType())
        update.add_column("later", LongType())
    table.append(
        pa.table({"n": [1 << 40], "day": [date(2026, 12, 1)], "x": [1.0], "text": ["new"], "later": [7]})
    )
    assert ask(table, "SELECT n, later FROM t WHERE text = 'new'") == [(1 << 40, 7)]
    assert ask(table, "SELECT count(*), count(text), count(later), max(n) FROM t") == [(31, 21, 1, 1 << 40)]


def test_an_empty_table(catalog: Catalog) -> None:
    empty = catalog.create_table("db.empty", rows_of(0).schema)
    assert ask(empty, "SELECT * FROM t") == []
    assert ask(empty, "SELECT count(*) FROM t WHERE n > 1") == [(0,)]


def test_equality_deletes_are_refused_rather_than_ignored(table: Table) -> None:
    delete_equal(table, "n", 3)
    with raising(QueryFailed, table="db.t", reason="not_readable"):
        IcebergDataset(table.refresh()).plan_files()


def test_rows_of_row_groups_without_bounds_are_found(catalog: Catalog) -> None:
    """Arrow writes no bounds for a row group with a text of over 4 kB."""
    rows = pa.table({"t": ["bcd", "bcd", "a" * 5000, "z" * 6000]})
    table = catalog.create_table("db.long", rows.schema, properties={"write.parquet.row-group-limit": "2"})
    table.append(rows)
    assert ask(table, "SELECT count(*) FROM t WHERE t >= 'y'") == [(1,)]
    assert ask(table, "SELECT count(*) FROM t WHERE t < 'b'") == [(1,)]
    assert ask(table, "SELECT count(*) FROM t WHERE t = 'bcd'") == [(2,)]
