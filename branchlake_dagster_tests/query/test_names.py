"""Which tables a query names, and how their names are written."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pytest

from branchlake_dagster.lakehouse.lakehouse import sql_name
from branchlake_dagster.query.reference import QueryFailed, find_table_paths
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as made:
        yield made


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("SELECT 1", []),
        ("FROM shop.prices", [("shop", "prices")]),
        ("FROM a.b.c.d", [("a", "b", "c", "d")]),
        ('FROM "a b"."c""d#?&+"', [("a b", 'c"d#?&+')]),
        ("SELECT * FROM a.t JOIN b.u USING (id) JOIN a.t AS again USING (id)", [("a", "t"), ("b", "u")]),
        ("WITH z AS (FROM a.t) FROM z WHERE x IN (SELECT y FROM b.u)", [("z",), ("a", "t"), ("b", "u")]),
        ("DESCRIBE a.t", [("a", "t")]),
        ("SUMMARIZE a.t", [("a", "t")]),
        (" explain analyze FROM a.t;", [("a", "t")]),
        ("FROM a.t UNION ALL BY NAME FROM b.u", [("a", "t"), ("b", "u")]),
        ("PIVOT a.t ON x IN (1, 2) USING sum(y)", [("a", "t")]),
        ("FROM 'x.csv'", [("x.csv",)]),
    ],
)
def test_the_tables_of_a_query(
    connection: duckdb.DuckDBPyConnection, sql: str, named: list[tuple[str, ...]]
) -> None:
    assert sorted(find_table_paths(connection, sql)) == sorted(named)


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELEC 1", "syntax"),
        ("", "not_one_query"),
        ("SELECT 1; SELECT 2", "not_one_query"),
        ("INSERT INTO a.t VALUES (1)", "not_one_query"),
        ("DROP TABLE a.t", "not_one_query"),
        ("COPY (SELECT 1) TO 'x'", "not_one_query"),
        ("PIVOT a.t ON x USING sum(y)", "not_one_query"),
        ("SHOW TABLES", "show_tables"),
    ],
)
def test_what_is_no_query(connection: duckdb.DuckDBPyConnection, sql: str, reason: str) -> None:
    with raising(QueryFailed, reason=reason) as failed:
        find_table_paths(connection, sql)
    assert ("PIVOT" in (failed.value.hint or "")) == ("PIVOT" in sql)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        (("shop", "prices"), "shop.prices"),
        (("a", "b", "c", "t"), 'a."b.c".t'),
        (("Shop", 'a"b', "x.y"), '"Shop"."a""b"."x.y"'),
    ],
)
def test_a_table_as_a_query_writes_it(key: tuple[str, ...], written: str) -> None:
    assert sql_name(key) == written
