"""The tables that a Spark Connect session reads, found by explaining each plan before its execution.

The client passes every execution through its hooks: `sql`, `table`, actions on frames, writers, temporary
views. The server resolves the names, with `EXPLAIN EXTENDED` for statements (which it does not execute) and
the same analysis for frames. That costs about as much as planning the query once more.

The analyzed plan contains the full name of every relation, also in views, subqueries, common table
expressions, and sources of INSERT and MERGE. Optimized plans do not: a count may come from metadata alone.
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
_PART_PATTERN = re.compile(_PART)
_ANALYZED_HEADER = "== Analyzed Logical Plan =="
_OPTIMIZED_HEADER = "== Optimized Logical Plan =="
_TREE_PREFIX = re.compile(r"^[\s:|+*-]*")
# The columns come first and may have any name, so the table name is the text after the last bracket.
_RELATION = re.compile(rf"RelationV2\[.*\] (?P<name>{_NAME})(?: (?:VERSION|TIMESTAMP) AS OF .*)?\s*$")
_RESOLVED_TABLE = re.compile(rf"ResolvedTable \S+, .*?, (?P<name>{_NAME}), \[")
_UNNAMED_NODES = {
    "Call ": "a procedure",
    "StreamingRelation": "a stream",
    "StreamingDataSourceV2": "a stream",
}

NameParts = tuple[str, ...]
"""The parts of a table name, the catalog first."""


@dataclass(frozen=True)
class PlanReads:
    """The tables that a plan scans, and descriptions of reads whose tables are not known (`a stream`).

    `merge_targets` are the targets of a frame's `mergeInto`, which its plan does not contain.
    """

    tables: frozenset[NameParts] = frozenset()
    unnamed_reads: frozenset[str] = frozenset()
    merge_targets: frozenset[NameParts] = frozenset()

    def __or__(self, other: PlanReads) -> PlanReads:
        return PlanReads(
            self.tables | other.tables,
            self.unnamed_reads | other.unnamed_reads,
            self.merge_targets | other.merge_targets,
        )

    def __bool__(self) -> bool:
        return bool(self.tables or self.unnamed_reads or self.merge_targets)


def parse_plan(explained: str) -> PlanReads:
    """Return the tables that the plan in the output of `EXPLAIN EXTENDED` scans.

    Tables that the plan only writes to are left out.
    """
    tables: set[NameParts] = set()
    unnamed_reads: set[str] = set()
    for line in _analyzed_lines(explained):
        node = _TREE_PREFIX.sub("", line)
        if node.startswith("RelationV2["):
            match = _RELATION.match(node)
            if match is None:
                unnamed_reads.add("a relation without a name")
            else:
                tables.add(split_name(match["name"]))
        elif node.startswith("ResolvedTable "):
            match = _RESOLVED_TABLE.match(node)
            if match is None:
                unnamed_reads.add("a relation without a name")
            else:
                tables.add(split_name(match["name"]))
        else:
            unnamed_reads |= {
                description
                for node_prefix, description in _UNNAMED_NODES.items()
                if node.startswith(node_prefix)
            }
    path_tables = {name for name in tables if any("/" in part for part in name)}
    if path_tables:
        unnamed_reads.add("a table by its path")
    return PlanReads(frozenset(tables - path_tables), frozenset(unnamed_reads))


def _analyzed_lines(explained: str) -> list[str]:
    """Return the lines of the analyzed plan.

    If the end of that plan is ambiguous, all following lines are returned too.
    """
    _, _, rest = explained.partition(_ANALYZED_HEADER)
    plan, separator, after = rest.partition(_OPTIMIZED_HEADER)
    # A string in the query may contain the text of the header.
    return (rest if separator and _OPTIMIZED_HEADER in after else plan).split("\n")


def split_name(name: str) -> NameParts:
    """Split a dotted name into its parts, without backticks: `` a.`b.c` `` gives `("a", "b.c")`."""
    name_parts = _PART_PATTERN.findall(name)
    return tuple(p[1:-1].replace("``", "`") if p.startswith("`") else p for p in name_parts)


CATALOG = "nessie"
"""The name of the lake's catalog in sessions."""

_CATALOG_CONF = "spark.sql.catalog."
_READING_RELATIONS = frozenset(
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
"""The kinds of relation that may read a table. A plan without them is not explained."""


def watch_reads(
    session: SparkSession, is_enabled: Callable[[], bool], on_read: Callable[[PlanReads], None]
) -> None:
    """Call `on_read` before each execution that scans tables, while `is_enabled()` is true.

    Only tables of the lake are reported, and their names lack the catalog. Reads whose tables are not known
    are reported as `unnamed_reads`. Clones of the session are watched too.
    """
    client = cast("Any", session).client
    _add_read_hook(client, is_enabled, on_read)
    clone = client.clone

    def watched_clone(*args: Any, **kwargs: Any) -> Any:
        cloned_client = clone(*args, **kwargs)
        _add_read_hook(cloned_client, is_enabled, on_read)
        return cloned_client

    client.clone = watched_clone


def _add_read_hook(
    client: SparkConnectClient, is_enabled: Callable[[], bool], on_read: Callable[[PlanReads], None]
) -> None:
    add_session_hook(client, _ReadHook(client, is_enabled, on_read))


class _ReadHook:
    """The hook of one client that reports reads (pyspark's `SparkSession.Hook`)."""

    def __init__(
        self, client: SparkConnectClient, is_enabled: Callable[[], bool], on_read: Callable[[PlanReads], None]
    ) -> None:
        self._client = client
        self._is_enabled = is_enabled
        self._on_read = on_read
        self._explaining = threading.local()
        self._is_lake_catalog: dict[str, bool] = {CATALOG: True}

    def on_execute_plan(self, request: ExecutePlanRequest) -> ExecutePlanRequest:
        """Explain the plan before the client sends the request; return the request unchanged."""
        if getattr(self._explaining, "now", False) or not self._is_enabled():
            return request
        self._explaining.now = True
        try:
            reads = self._find_reads(request.plan)
        finally:
            self._explaining.now = False
        if reads:
            self._on_read(reads)
        return request

    def _find_reads(self, plan: Plan) -> PlanReads:
        plan = _decompress_plan(plan)
        reads = PlanReads(frozenset(_catalog_tables(plan)), merge_targets=frozenset(_merge_targets(plan)))
        for relation, is_statement in _iter_relations(plan):
            reads |= self._explain_relation(relation, is_statement=is_statement)
        tables, merge_targets = (
            frozenset(name[1:] for name in names if self._in_lake(name))
            for names in (reads.tables, reads.merge_targets)
        )
        return PlanReads(tables, reads.unnamed_reads, merge_targets)

    def _explain_relation(self, relation: Relation, *, is_statement: bool) -> PlanReads:
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql.connect.proto import Plan

        plan = Plan(root=relation)
        try:
            if not is_statement:
                return parse_plan(self._client.explain_string(plan, "extended"))
            plan_table = self._client.to_table(plan, {})[0]
            return parse_plan("\n".join(plan_table.column(0).to_pylist()))
        except ParseException:
            return PlanReads(unnamed_reads=frozenset({"a statement that cannot be explained"}))
        except AnalysisException:
            return PlanReads()  # the execution will fail for the same reason, and reads nothing

    def _in_lake(self, name: NameParts) -> bool:
        """Return whether the name's catalog is the lake's: `nessie`, or one with the same Nessie URI."""
        if len(name) < 2:
            return False
        catalog_name = name[0]
        if catalog_name not in self._is_lake_catalog:
            uri, lake_uri = self._client.get_configs(
                f"{_CATALOG_CONF}{catalog_name}.uri", f"{_CATALOG_CONF}{CATALOG}.uri"
            )
            self._is_lake_catalog[catalog_name] = uri is not None and uri == lake_uri
        return self._is_lake_catalog[catalog_name]


def _decompress_plan(plan: Plan) -> Plan:
    """Return the plan; a compressed plan (pyspark compresses large ones) is decompressed."""
    from pyspark.sql.connect.proto import Command, Plan, Relation

    if plan.WhichOneof("op_type") != "compressed_operation":
        return plan
    import zstandard

    operation = plan.compressed_operation
    data = zstandard.decompress(operation.data)
    if operation.op_type == Plan.CompressedOperation.OpType.OP_TYPE_RELATION:
        return Plan(root=Relation.FromString(data))
    return Plan(command=Command.FromString(data))


def _iter_relations(plan: Plan) -> Iterator[tuple[Relation, bool]]:
    """Yield the relations that the server must explain, and whether each is a SQL statement.

    A statement must not be executed, so the yielded copy of it starts with `EXPLAIN EXTENDED`.
    """
    if plan.WhichOneof("op_type") == "command" and plan.command.HasField("sql_command"):
        command = plan.command.sql_command
        relation_copy = type(command.input)()
        relation_copy.CopyFrom(command.input)
        root_relation = (
            relation_copy.with_relations.root if relation_copy.HasField("with_relations") else relation_copy
        )
        query = root_relation.sql.query
        # This request does not execute a query. It is explained when its rows are requested.
        if not query.lstrip().lower().startswith("select"):
            root_relation.sql.query = f"EXPLAIN EXTENDED {query}"
            yield relation_copy, True
        return
    for relation in _outermost_relations(plan):
        if _may_read(relation):
            yield relation, False


def _outermost_relations(message: Any) -> Iterator[Relation]:
    """Yield the relations in a protobuf message that are not inside another relation."""
    from pyspark.sql.connect.proto import Relation

    for child in _child_messages(message):
        if isinstance(child, Relation):
            yield child
        else:
            yield from _outermost_relations(child)


def _may_read(message: Any) -> bool:
    from pyspark.sql.connect.proto import Relation

    if isinstance(message, Relation) and message.WhichOneof("rel_type") in _READING_RELATIONS:
        return message.WhichOneof("rel_type") != "catalog"
    return any(map(_may_read, _child_messages(message)))


def _child_messages(message: Any) -> Iterator[Any]:
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


def _merge_targets(plan: Plan) -> Iterator[NameParts]:
    """Yield the name of the table that a frame's `mergeInto` changes. Yields nothing for other plans."""
    if plan.WhichOneof("op_type") == "command" and plan.command.HasField("merge_into_table_command"):
        yield split_name(plan.command.merge_into_table_command.target_table_name)


def _catalog_tables(plan: Plan) -> Iterator[NameParts]:
    """Yield the name of the table that a `spark.catalog` call has as its argument, if it has one.

    The name is (level…, table), as the call gives it. Yields nothing for plans of other kinds.
    """
    if plan.WhichOneof("op_type") == "root" and plan.root.HasField("catalog"):
        catalog_call = getattr(plan.root.catalog, plan.root.catalog.WhichOneof("cat_type") or "")
        field_values = {field.name: value for field, value in catalog_call.ListFields()}
        if "table_name" in field_values:
            namespace = split_name(field_values["db_name"]) if "db_name" in field_values else ()
            yield (*namespace, *split_name(field_values["table_name"]))
