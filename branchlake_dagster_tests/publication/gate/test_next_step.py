"""The command that a blocked run names for its rows."""

from __future__ import annotations

import shlex

import pytest

from branchlake_dagster.publication.verdict import format_rows_hint

RUN = "4b4115ec-54c0-4d26-a07d-6a7a9ba4e3f1"


@pytest.mark.parametrize(
    ("table", "query"),
    [
        ("shop.prices", "FROM shop.prices"),
        ("shop.`a.b`", 'FROM shop."a.b"'),
        ('shop.O\'Neill "q" $HOME', 'FROM shop."O\'Neill ""q"" $HOME"'),
    ],
)
def test_the_query_survives_the_shell(table: str, query: str) -> None:
    command = format_rows_hint([table], RUN).removeprefix("Look at the rows: ").removesuffix(".")
    assert shlex.split(command) == ["branchlake", "sql", query, "--run", "4b4115ec"]


def test_no_table_no_command() -> None:
    assert format_rows_hint([], RUN) == ""
