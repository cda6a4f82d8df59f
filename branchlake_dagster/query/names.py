"""The tables that a query names, and the search for these tables in the lake."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from branchlake_dagster.lakehouse.lakehouse import sql_name
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.query.reference import LakeState, QueryFailed, TableNotThere

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TablePath = tuple[str, ...]
"""A table name as written in the query, split into levels, without quotes."""

TABLE_FILTER = "entry.contentType == 'ICEBERG_TABLE'"
_EXPLAIN = re.compile(r"^\s*explain(\s+analyze)?\s", re.IGNORECASE)
_PIVOT = re.compile(r"\bpivot", re.IGNORECASE)
_SHOW = re.compile(r"^\s*show\s+(all\s+)?tables\b", re.IGNORECASE)
_LIST_HINT = "`branchlake sql` without a query lists the lake's tables."
_DUCKDB_SCHEMAS = ("information_schema", "pg_catalog", "system", "temp")


def find_table_paths(connection: DuckDBPyConnection, sql: str) -> list[TablePath]:
    """Return the table names in `sql`, each once. A name without a namespace may be a CTE or a file.

    Raises QueryFailed if `sql` is not exactly one query.
    """
    if _SHOW.match(sql):
        raise QueryFailed(
            "SHOW TABLES does not list the lake's tables.", hint=_LIST_HINT, reason="show_tables"
        )
    query = _EXPLAIN.sub("", sql, count=1)
    ((serialized_query,),) = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    tree = json.loads(serialized_query)
    if tree.get("error"):
        is_syntax_error = tree.get("error_type") == "parser"
        message = (
            tree["error_message"]
            if is_syntax_error
            else "Only one query (SELECT, WITH, FROM, DESCRIBE …) can be run."
        )
        raise QueryFailed(
            message,
            hint=None if is_syntax_error else _query_hint(query),
            reason="syntax" if is_syntax_error else "not_one_query",
        )
    if len(tree.get("statements", ())) != 1:
        raise QueryFailed("Only one query can be run at a time.", reason="not_one_query")
    paths = (tuple(node["qualified_name"]["path"]) for node in _iter_base_tables(tree))
    return list(dict.fromkeys(paths))


def _query_hint(query: str) -> str:
    # DuckDB splits a PIVOT without values into two statements.
    if _PIVOT.search(query):
        return "Write the values of the PIVOT: PIVOT t ON x IN (1, 2)."
    return "A query only reads. Change a table by a run of its asset."


def _iter_base_tables(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("type") == "BASE_TABLE":
            yield node
        for value in node.values():
            yield from _iter_base_tables(value)
    elif isinstance(node, list):
        for value in node:
            yield from _iter_base_tables(value)


def resolve_tables(
    client: NessieClient, state: LakeState, paths: Sequence[TablePath]
) -> dict[TablePath, ContentKey]:
    """Return the key of each path; paths in DuckDB's own schemas are left out. Raises TableNotThere."""
    exact_contents = client.contents(state.ref, map(ContentKey, paths)) if paths else {}
    existing_tables = {key for key, content in exact_contents.items() if isinstance(content, IcebergTable)}
    key_by_path = {path: ContentKey(path) for path in paths if ContentKey(path) in existing_tables}
    missing_paths = [
        path for path in paths if path not in key_by_path and path[0].lower() not in _DUCKDB_SCHEMAS
    ]
    if missing_paths:
        keys = load_table_keys(client, state)
        key_by_path |= {path: _find_similar_key(path, keys, state) for path in missing_paths}
    return key_by_path


def load_table_keys(client: NessieClient, state: LakeState) -> list[ContentKey]:
    """Load the keys of all Iceberg tables at that state, sorted."""
    return sorted(entry.key for entry in client.entries(state.ref, filter=TABLE_FILTER))


def _find_similar_key(path: TablePath, keys: Iterable[ContentKey], state: LakeState) -> ContentKey:
    """Return the only key that equals the path except for case and the notation of its namespace.

    A deep namespace may be written as `a."b.c".t`. Raises TableNotThere if several keys match, or none.
    """
    folded_path = _fold_case(path)
    folded_names = {key: _fold_case(key) for key in keys}
    matches = [key for key, name in folded_names.items() if name == folded_path]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise TableNotThere(
            f"Several tables differ from {'.'.join(path)} in case only: {_format_keys(matches)}."
        )
    same_table_name = [key for key in folded_names if key[-1].lower() == path[-1].lower()]
    close_names = difflib.get_close_matches(folded_path, folded_names.values(), n=3)
    suggestions = same_table_name[:3] or [key for key, name in folded_names.items() if name in close_names]
    hint = f"Did you mean {_format_keys(suggestions)}?" if suggestions else _LIST_HINT
    raise TableNotThere(
        f"Table {'.'.join(path)} does not exist at {state.label}.", hint=hint, subject=".".join(path)
    )


def _fold_case(path: Iterable[str]) -> str:
    return ".".join(path).lower()


def _format_keys(keys: Iterable[ContentKey]) -> str:
    return ", ".join(sql_name(key) for key in keys)
