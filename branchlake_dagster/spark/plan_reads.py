"""Which tables a Spark Connect session reads: each plan is explained before it is executed.

The client passes every execution through its hooks, whatever call it came from: `sql`, `table`, actions on
frames, writers, temporary views. The server resolves the names: `EXPLAIN EXTENDED` for statements (which it
does not execute), the same analysis for frames. That costs about as much as planning the query once more.

The analyzed plan names every relation in full, also in views, subqueries, common table expressions, and
sources of INSERT and MERGE. Optimized plans do not: a count may come from metadata alone.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from branchlake_dagster.internals.pyspark import add_session_hook

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import SparkConnectClient
    from pyspark.sql.connect.proto import ExecutePlanRequest, Plan, Relation

_PART = r"(?:`(?:[^`]|``)+`|[A-Za-z0-9_]+)"
_NAME = rf"{_PART}(?:\.{_PART})*"
_PARTS = re.compile(_PART)
_ANALYSED = "== Analyzed Logical Plan =="
_OPTIMISED = "== Optimized Logical Plan =="
_TREE = re.compile(r"^[\s:|+*-]*")
# The columns stand first and may be called anything, so the name is what follows the last bracket.
_RELATION = re.compile(rf"RelationV2\[.*\] (?P<name>{_NAME})(?: (?:VERSION|TIMESTAMP) AS OF .*)?\s*$")
_RESOLVED = re.compile(rf"ResolvedTable \S+, .*?, (?P<name>{_NAME}), \[")
_BLIND = {
    "Call ": "a procedure",
    "StreamingRelation": "a stream",
    "StreamingDataSourceV2": "a stream",
}

Name = tuple[str, ...]
"""A name in parts, the catalogue first."""


@dataclass(frozen=True)
class Scanned:
    """The tables a plan scans by name, and what it reads that cannot be named.

    `merged` are the targets of a frame's `mergeInto`: its plan does not contain them.
    """

    tables: frozenset[Name] = frozenset()
    untold: frozenset[str] = frozenset()
    merged: frozenset[Name] = frozenset()

    def __or__(self, other: Scanned) -> Scanned:
        return Scanned(self.tables | other.tables, self.untold | other.untold, self.merged | other.merged)

    def __bool__(self) -> bool:
        return bool(self.tables or self.untold or self.merged)


def scanned(explained: str) -> Scanned:
    """What the plan of `EXPLAIN EXTENDED` scans. A target that is only written to is not among it."""
    tables: set[Name] = set()
    untold: set[str] = set()
    for line in _analysed(explained):
        node = _TREE.sub("", line)
        if node.startswith("RelationV2["):
            match = _RELATION.match(node)
            if match is None:
                untold.add("a relation without a name")
            else:
                tables.add(parts(match["name"]))
        elif node.startswith("ResolvedTable "):
            match = _RESOLVED.match(node)
            if match is None:
                untold.add("a relation without a name")
            else:
                tables.add(parts(match["name"]))
        else:
            untold |= {what for start, what in _BLIND.items() if node.startswith(start)}
    by_path = {name for name in tables if any("/" in part for part in name)}
    if by_path:
        untold.add("a table by its path")
    return Scanned(frozenset(tables - by_path), frozenset(untold))


def _analysed(explained: str) -> list[str]:
    """The lines of the analysed plan; all of them from there on when its end cannot be told."""
    _, _, rest = explained.partition(_ANALYSED)
    plan, found, after = rest.partition(_OPTIMISED)
    # A text in the query may look like the headline.
    return (rest if found and _OPTIMISED in after else plan).split("\n")


def parts(name: str) -> Name:
    """A dotted name apart, without its backticks."""
    found = _PARTS.findall(name)
    return tuple(p[1:-1].replace("``", "`") if p.startswith("`") else p for p in found)


CATALOG = "nessie"
"""What sessions call the lake's catalogue."""

_CONF = "spark.sql.catalog."
_READING = frozenset(
    {
        "read",
        "sql",
        "catalog",
        "extension",
        "cached_remote_relation",
        "common_inline_user_defined_data_source",
        "unresolved_table_valued_function",
        "unknown",
    }
)
"""Kinds of relation that may lead to a table; a plan without any need not be explained."""


def watch(session: SparkSession, wanted: Callable[[], bool], note: Callable[[Scanned], None]) -> None:
    """Call `note` before each execution that scans tables, while `wanted()`; names without the catalogue."""
    client = cast("Any", session).client
    _attach(client, wanted, note)
    clone = client.clone

    def watched(*given: Any, **named: Any) -> Any:
        copy = clone(*given, **named)
        _attach(copy, wanted, note)
        return copy

    client.clone = watched


def _attach(client: SparkConnectClient, wanted: Callable[[], bool], note: Callable[[Scanned], None]) -> None:
    add_session_hook(client, _Watch(client, wanted, note))


class _Watch:
    """A hook of one client (pyspark's `SparkSession.Hook`)."""

    def __init__(
        self, client: SparkConnectClient, wanted: Callable[[], bool], note: Callable[[Scanned], None]
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._note = note
        self._asking = threading.local()
        self._ours: dict[str, bool] = {CATALOG: True}

    def on_execute_plan(self, request: ExecutePlanRequest) -> ExecutePlanRequest:
        """Called by the client before it sends the request."""
        if getattr(self._asking, "now", False) or not self._wanted():
            return request
        self._asking.now = True
        try:
            found = self._reads(request.plan)
        finally:
            self._asking.now = False
        if found:
            self._note(found)
        return request

    def _reads(self, plan: Plan) -> Scanned:
        plan = _plain(plan)
        found = Scanned(frozenset(_asked_for(plan)), merged=frozenset(_merged(plan)))
        for relation, statement in _questions(plan):
            found |= self._scanned(relation, statement=statement)
        tables, merged = (
            frozenset(name[1:] for name in names if self._in_lake(name))
            for names in (found.tables, found.merged)
        )
        return Scanned(tables, found.untold, merged)

    def _scanned(self, relation: Relation, *, statement: bool) -> Scanned:
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql.connect.proto import Plan

        plan = Plan(root=relation)
        try:
            if not statement:
                return scanned(self._client.explain_string(plan, "extended"))
            answer = self._client.to_table(plan, {})[0]
            return scanned("\n".join(answer.column(0).to_pylist()))
        except ParseException:
            return Scanned(untold=frozenset({"a statement that cannot be explained"}))
        except AnalysisException:
            return Scanned()  # it will fail for the same reason, and read nothing

    def _in_lake(self, name: Name) -> bool:
        """Whether the catalogue is the lake's own, or another name for it."""
        if len(name) < 2:
            return False
        alias = name[0]
        if alias not in self._ours:
            uri, ours = self._client.get_configs(f"{_CONF}{alias}.uri", f"{_CONF}{CATALOG}.uri")
            self._ours[alias] = uri is not None and uri == ours
        return self._ours[alias]


def _plain(plan: Plan) -> Plan:
    """The plan, if need be decompressed."""
    from pyspark.sql.connect.proto import Command, Plan, Relation

    if plan.WhichOneof("op_type") != "compressed_operation":
        return plan
    import zstandard

    operation = plan.compressed_operation
    data = zstandard.decompress(operation.data)
    if operation.op_type == Plan.CompressedOperation.OpType.OP_TYPE_RELATION:
        return Plan(root=Relation.FromString(data))
    return Plan(command=Command.FromString(data))


def _questions(plan: Plan) -> Iterator[tuple[Relation, bool]]:
    """The relations to ask the server about, and whether one is a statement that must not be executed."""
    if plan.WhichOneof("op_type") == "command" and plan.command.HasField("sql_command"):
        command = plan.command.sql_command
        asked = type(command.input)()
        asked.CopyFrom(command.input)
        inner = asked.with_relations.root if asked.HasField("with_relations") else asked
        text = inner.sql.query
        # A query is not executed by this: it will be asked about when its rows are.
        if not text.lstrip().lower().startswith("select"):
            inner.sql.query = f"EXPLAIN EXTENDED {text}"
            yield asked, True
        return
    for relation in _outermost(plan):
        if _may_read(relation):
            yield relation, False


def _outermost(message: Any) -> Iterator[Relation]:
    """The relations in a message that are not inside of another one."""
    from pyspark.sql.connect.proto import Relation

    for child in _children(message):
        if isinstance(child, Relation):
            yield child
        else:
            yield from _outermost(child)


def _may_read(message: Any) -> bool:
    from pyspark.sql.connect.proto import Relation

    if isinstance(message, Relation) and message.WhichOneof("rel_type") in _READING:
        return message.WhichOneof("rel_type") != "catalog"
    return any(map(_may_read, _children(message)))


def _children(message: Any) -> Iterator[Any]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                yield from value.values()
        elif hasattr(value, "ListFields"):
            yield value
        else:
            yield from value


def _merged(plan: Plan) -> Iterator[Name]:
    """The target of a frame's merge."""
    if plan.WhichOneof("op_type") == "command" and plan.command.HasField("merge_into_table_command"):
        yield parts(plan.command.merge_into_table_command.target_table_name)


def _asked_for(plan: Plan) -> Iterator[Name]:
    """The table that `spark.catalog` is asked about."""
    if plan.WhichOneof("op_type") == "root" and plan.root.HasField("catalog"):
        asked = getattr(plan.root.catalog, plan.root.catalog.WhichOneof("cat_type") or "")
        known = {field.name: value for field, value in asked.ListFields()}
        if "table_name" in known:
            home = parts(known["db_name"]) if "db_name" in known else ()
            yield (*home, *parts(known["table_name"]))
