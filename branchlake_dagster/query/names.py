"""The tables that a query names, and which tables of the lake they are."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from branchlake_dagster.lakehouse.sql_names import sql_name
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.query.reference import QueryFailed, TableNotThere, Where

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Path = tuple[str, ...]
"""A table's name as the query writes it, without the quotes."""

TABLES = "entry.contentType == 'ICEBERG_TABLE'"
_EXPLAIN = re.compile(r"^\s*explain(\s+analyze)?\s", re.IGNORECASE)
_PIVOT = re.compile(r"\bpivot", re.IGNORECASE)
_SHOW = re.compile(r"^\s*show\s+(all\s+)?tables\b", re.IGNORECASE)
_LIST = "`branchlake sql` without a query lists the lake's tables."
_OF_DUCKDB = ("information_schema", "pg_catalog", "system", "temp")


def named_tables(connection: DuckDBPyConnection, sql: str) -> list[Path]:
    """The table names in `sql`, each once; one without a namespace may be a CTE or a file.

    Raises QueryFailed for what is not one query.
    """
    if _SHOW.match(sql):
        raise QueryFailed(
            "DuckDB knows only the tables that a query names.", hint=_LIST, reason="show_tables"
        )
    query = _EXPLAIN.sub("", sql, count=1)
    ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    tree = json.loads(text)
    if tree.get("error"):
        syntax = tree.get("error_type") == "parser"
        told = (
            tree["error_message"] if syntax else "Only one query (SELECT, WITH, FROM, DESCRIBE …) can be run."
        )
        raise QueryFailed(
            told, hint=None if syntax else _hint(query), reason="syntax" if syntax else "not_one_query"
        )
    if len(tree.get("statements", ())) != 1:
        raise QueryFailed("Only one query can be run at a time.", reason="not_one_query")
    paths = (tuple(node["qualified_name"]["path"]) for node in _base_tables(tree))
    return list(dict.fromkeys(paths))


def _hint(query: str) -> str:
    # A PIVOT without its values is two statements for DuckDB.
    if _PIVOT.search(query):
        return "PIVOT needs its values: PIVOT t ON x IN (1, 2)."
    return "Queries only read; a run of an asset changes its table."


def _base_tables(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("type") == "BASE_TABLE":
            yield node
        for value in node.values():
            yield from _base_tables(value)
    elif isinstance(node, list):
        for value in node:
            yield from _base_tables(value)


def resolve(client: NessieClient, where: Where, paths: Sequence[Path]) -> dict[Path, ContentKey]:
    """The key of each path; those of DuckDB's own schemas are left out. Raises TableNotThere."""
    exact = client.contents(where.ref, map(ContentKey, paths)) if paths else {}
    held = {key for key, content in exact.items() if isinstance(content, IcebergTable)}
    found = {path: ContentKey(path) for path in paths if ContentKey(path) in held}
    missing = [path for path in paths if path not in found and path[0].lower() not in _OF_DUCKDB]
    if missing:
        keys = table_keys(client, where)
        found |= {path: _alike(path, keys, where) for path in missing}
    return found


def table_keys(client: NessieClient, where: Where) -> list[ContentKey]:
    """Every Iceberg table at that state, sorted."""
    return sorted(entry.key for entry in client.entries(where.ref, filter=TABLES))


def _alike(path: Path, keys: Iterable[ContentKey], where: Where) -> ContentKey:
    """The one key that is the same but for case and for how a deep namespace is written: `a."b.c".t`."""
    wanted = _folded(path)
    by_name = {key: _folded(key) for key in keys}
    same = [key for key, name in by_name.items() if name == wanted]
    if len(same) == 1:
        return same[0]
    if same:
        raise TableNotThere(f"Several tables differ from {'.'.join(path)} in case only: {_shown(same)}.")
    last = [key for key in by_name if key[-1].lower() == path[-1].lower()]
    close = difflib.get_close_matches(wanted, by_name.values(), n=3)
    likely = last[:3] or [key for key, name in by_name.items() if name in close]
    hint = f"Did you mean {_shown(likely)}?" if likely else _LIST
    raise TableNotThere(
        f"There is no table {'.'.join(path)} at {where.told}.", hint=hint, subject=".".join(path)
    )


def _folded(path: Iterable[str]) -> str:
    return ".".join(path).lower()


def _shown(keys: Iterable[ContentKey]) -> str:
    return ", ".join(sql_name(key) for key in keys)
