"""Finds the state of the lake that a query reads, and the tables that the query names.

The state is that of `main`, a branch, a tag or a run, or an earlier state of `main`. A `LakeState` fixes it
at one commit.
"""

# Named like the other outcomes of the package.
# ruff: noqa: N818

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN, sql_name
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieNotFound, ReferenceNotFound
from branchlake_dagster.nessie.model import ContentKey, IcebergTable, Reference
from branchlake_dagster.publication.ledger import parse_publications
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class QueryFailed(BranchlakeError, Terminal):
    """The SQL cannot be run; the message quotes DuckDB."""


class TableNotThere(QueryFailed, NoSuchTableError):
    """A query names a table that does not exist at that state of the lake."""


class NoSuchState(BranchlakeError, Terminal):
    """The lake does not have the branch, tag, run, time or commit that a query asks for."""


class MomentExpired(NoSuchState):
    """The state is older than the history horizon, and its files were deleted.

    Attributes:
        oldest_moment: The oldest time whose state can be read.
    """

    def __init__(self, message: str, *, oldest_moment: datetime, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.oldest_moment = oldest_moment


_RUN_ID = re.compile(r"[0-9a-f]{6}[0-9a-f-]{0,30}")
_HASH = re.compile(r"[0-9a-f]{8,64}")
_LIST_HINT = "`branchlake status` lists branches, discarded runs and publications."


@dataclass(frozen=True)
class LakeState:
    """A fixed state of the lake.

    `ref` is `name@hash`, where `name` is a branch or tag. `label` describes the state in messages.
    """

    ref: str
    label: str

    @classmethod
    def find(
        cls,
        client: NessieClient,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> LakeState:
        """Find the state that one of the arguments names; without arguments, `main`.

        `branch` is a branch, a tag or `name@hash`, of which the existence is not checked. `run` is a run's
        id, or its first six or more characters: its branch, else its discarded branch, else `main` as its
        publication left it. `at` is a time (UTC if it has no zone), or the first eight or more characters of
        a commit hash of `main`. Eight digits that are a date, such as `20261120`, are that date.

        Raises NoSuchState if there is no such state, and ConfigurationError for more than one argument or an
        invalid argument.
        """
        if sum(value is not None for value in (branch, run, at)) > 1:
            raise ConfigurationError("Give only one of branch, run and at.", reason="several_states")
        if run is not None:
            return _find_by_run(client, run)
        if at is not None:
            return (
                _find_by_time(client, at)
                if isinstance(at, datetime)
                else _find_by_time_or_hash(client, str(at))  # a date is the midnight at which it begins
            )
        return _find_by_branch(client, MAIN if branch is None else branch)


def _pin_reference(reference: Reference, label: str) -> LakeState:
    return LakeState(f"{reference.name}@{reference.hash}", label)


def _find_by_branch(client: NessieClient, name: str) -> LakeState:
    if "@" in name:
        return LakeState(name, name)
    try:
        return _pin_reference(client.reference(name), name)
    except ReferenceNotFound as missing:
        raise NoSuchState(
            f"The branch or tag {name!r} does not exist.",
            hint=_LIST_HINT,
            reason="no_reference",
            subject=name,
        ) from missing


def _find_by_run(client: NessieClient, run: str) -> LakeState:
    """Return the state of the run's branch; else of its discarded branch; else of its commit on `main`.

    `run` is the beginning of a run's id. Raises NoSuchState if the run left none of these, and
    ConfigurationError if `run` is not the beginning of an id or several runs match.
    """
    prefix = run.strip().lower()
    if not _RUN_ID.fullmatch(prefix):
        raise ConfigurationError(
            f"{run!r} is not a run id.",
            hint="Give the first six or more characters of the run's UUID.",
            reason="run_id",
            subject=run,
        )
    references = _load_references(client, prefix)
    for name_prefix, label in (
        (ReferencePrefix.RUN, "on its branch"),
        (ReferencePrefix.DISCARDED, "as it was discarded"),
    ):
        names = [name for name in references if name.startswith(name_prefix)]
        if len(names) > 1:
            raise ConfigurationError(
                f"{len(names)} runs begin with {run!r}.", hint="Give more characters of the id."
            )
        if names:
            return _pin_reference(references[names[0]], f"run {names[0].removeprefix(name_prefix)}, {label}")
    published_state = _find_publication(client, prefix)
    if published_state is not None:
        return published_state
    if references:
        raise NoSuchState(
            f"The files of run {run} are being deleted.",
            hint="Launch the run again.",
            reason="being_deleted",
            subject=run,
        )
    raise NoSuchState(
        f"Run {run} was not published, and its branch was discarded and deleted, or never existed.",
        hint=f"A discarded branch is deleted after BRANCHLAKE_DISCARD_GRACE_H hours. {_LIST_HINT}",
        reason="run_left_nothing",
        subject=run,
    )


def _load_references(client: NessieClient, prefix: str) -> dict[str, Reference]:
    kinds = "|".join((ReferencePrefix.RUN, ReferencePrefix.DISCARDED, ReferencePrefix.SWEEPING))
    matches = client.references(filter=f"ref.name.matches('^({kinds}){prefix}')")
    return {reference.name: reference for reference in matches}


def _find_publication(client: NessieClient, prefix: str) -> LakeState | None:
    name = LakeProperty.RUN_ID
    commit_filter = f"'{name}' in commit.properties && commit.properties['{name}'].contains('{prefix}')"
    for entry in client.log(MAIN, filter=commit_filter):
        for publication in parse_publications(entry):
            if publication.run_id.startswith(prefix):
                return LakeState(
                    f"{MAIN}@{publication.hash}", f"run {publication.run_id}, as it was published on main"
                )
    return None


def _find_by_time_or_hash(client: NessieClient, at: str) -> LakeState:
    value = at.strip()
    if _HASH.fullmatch(value.lower()) and not _is_compact_date(value):
        return _find_by_hash(client, value.lower())
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise ConfigurationError(
            f"{at!r} is neither a time nor a commit hash of main.",
            hint="Write 2026-11-20T12:00 (UTC), 2026-11-20T12:00+01:00, or eight characters of a hash.",
            reason="neither_time_nor_hash",
            subject=str(at),
        ) from error
    return _find_by_time(client, moment)


def _is_compact_date(value: str) -> bool:
    """Whether the text is a date without hyphens, such as `20261120`; it could also begin a hash."""
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return len(value) == len("20261120")


def _find_by_time(client: NessieClient, moment: datetime) -> LakeState:
    """Return the state of `main` at a time: its newest commit that is not younger than `moment`.

    A time without a zone is UTC, not local time. Raises NoSuchState if the first commit is younger.
    """
    utc = _to_utc(moment)
    formatted_time = utc.isoformat().replace("+00:00", "Z")
    # Nessie counts nanoseconds. Python cuts a commit's time to microseconds, a little before that commit.
    after = (utc + timedelta(microseconds=1)).isoformat()
    older_commits = client.log(MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{after}')", limit=1)
    entry = next(iter(older_commits), None)
    if entry is None:
        raise NoSuchState(
            f"Main has no commit at {formatted_time} or earlier.",
            hint="`branchlake status` lists publications. Give the time of one, or a later time.",
            reason="before_first_commit",
            subject=formatted_time,
        )
    return LakeState(
        f"{MAIN}@{entry.commit.hash}", f"main at {formatted_time} (commit {entry.commit.hash[:16]})"
    )


_LAST_MOMENT = datetime.max.replace(tzinfo=UTC) - timedelta(microseconds=1)


def _to_utc(moment: datetime) -> datetime:
    """Return a time in UTC, at most `_LAST_MOMENT`. A time without a zone is UTC."""
    try:
        utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:  # Python has no time before year 1 or after year 9999
        return _LAST_MOMENT if moment.year > 1 else datetime.min.replace(tzinfo=UTC)
    return min(utc, _LAST_MOMENT)


def _find_by_hash(client: NessieClient, commit_hash: str) -> LakeState:
    if len(commit_hash) == 64:
        try:
            list(client.log(f"{MAIN}@{commit_hash}", limit=1))
        except NessieNotFound as missing:
            raise _no_such_commit(commit_hash) from missing
        return LakeState(f"{MAIN}@{commit_hash}", f"main at commit {commit_hash[:16]}")
    entries = list(client.log(MAIN, filter=f"commit.hash.startsWith('{commit_hash}')", limit=2))
    if not entries:
        raise _no_such_commit(commit_hash)
    if len(entries) > 1:
        raise ConfigurationError(
            f"Several commits of main begin with {commit_hash}.", hint="Give more characters of the hash."
        )
    return LakeState(f"{MAIN}@{entries[0].commit.hash}", f"main at commit {entries[0].commit.hash[:16]}")


def _no_such_commit(commit_hash: str) -> NoSuchState:
    return NoSuchState(
        f"main does not contain the commit {commit_hash}.",
        hint=_LIST_HINT,
        reason="no_commit",
        subject=commit_hash,
    )


def find_expiry(
    client: NessieClient, state: LakeState, horizon: timedelta, now: datetime
) -> MomentExpired | None:
    """Return the error to raise for a state whose files are missing, if its commit is older than `horizon`.

    Returns None if the commit is younger, because then its files should exist. Costs one request to Nessie.
    """
    entry = next(iter(client.log(state.ref, limit=1)), None)
    commit_time = entry.commit.commit_time if entry is not None else None
    oldest_moment = now - horizon
    if commit_time is None or commit_time >= oldest_moment:
        return None
    formatted_time = oldest_moment.isoformat(timespec="seconds").replace("+00:00", "Z")
    return MomentExpired(
        f"{state.label} has expired: its files were deleted. The oldest moment is {formatted_time}.",
        oldest_moment=oldest_moment,
        hint="Give a later time. BRANCHLAKE_HISTORY_HORIZON_DAYS says how long states stay; a tag keeps one.",
        reason="expired",
        subject=state.ref,
    )


TablePath = tuple[str, ...]
"""A table name as written in the query, split into levels, without quotes."""

TABLE_FILTER = "entry.contentType == 'ICEBERG_TABLE'"
_EXPLAIN = re.compile(r"^\s*explain(\s+analyze)?\s", re.IGNORECASE)
_PIVOT = re.compile(r"\bpivot", re.IGNORECASE)
_SHOW = re.compile(r"^\s*show\s+(all\s+)?tables\b", re.IGNORECASE)
_LIST_TABLES_HINT = "`branchlake sql` without a query lists the lake's tables."
_DUCKDB_SCHEMAS = ("information_schema", "pg_catalog", "system", "temp")


def find_table_paths(connection: DuckDBPyConnection, sql: str) -> list[TablePath]:
    """Return the table names in `sql`, each once and in order. A name of one level may be a CTE or a file.

    Raises QueryFailed if `sql` has a syntax error or is not exactly one query.
    """
    if _SHOW.match(sql):
        raise QueryFailed(
            "SHOW TABLES does not list the lake's tables.", hint=_LIST_TABLES_HINT, reason="show_tables"
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
    statement_count = len(tree.get("statements", ()))
    if statement_count == 0:
        raise QueryFailed(
            "The query is empty.", hint="Write a query, such as FROM shop.prices.", reason="not_one_query"
        )
    if statement_count > 1:
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
    """Return the content key of the table that each path names, at that state of the lake.

    A path may differ from the key in case. Paths in DuckDB's own schemas are left out. Raises TableNotThere
    if a path matches no table, or several.
    """
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
    raise table_not_there(path, folded_names, state)


def table_not_there(path: TablePath, keys: Iterable[ContentKey], state: LakeState) -> TableNotThere:
    """Return the error for a path that names none of the tables `keys`, with those of a similar name."""
    folded_path = _fold_case(path)
    folded_names = {key: _fold_case(key) for key in keys}
    same_table_name = [key for key in folded_names if key[-1].lower() == path[-1].lower()]
    close_names = difflib.get_close_matches(folded_path, folded_names.values(), n=3)
    suggestions = same_table_name[:3] or [key for key, name in folded_names.items() if name in close_names]
    hint = f"Did you mean {_format_keys(suggestions)}?" if suggestions else _LIST_TABLES_HINT
    return TableNotThere(
        f"Table {'.'.join(path)} does not exist at {state.label}.", hint=hint, subject=".".join(path)
    )


def _fold_case(path: Iterable[str]) -> str:
    return ".".join(path).lower()


def _format_keys(keys: Iterable[ContentKey]) -> str:
    return ", ".join(sql_name(key) for key in keys)
