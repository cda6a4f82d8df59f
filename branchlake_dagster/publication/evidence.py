"""What Dagster knows about a finished run that the gate needs, as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster import (
    AssetCheckSeverity,
    AssetKey,
    AssetMaterialization,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    EventLogRecord,
    MetadataValue,
)

from branchlake_dagster.internals.dagster import AssetGraph
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata
from branchlake_dagster.tables.specification import exclusive_name, identifier_of, table_name


@dataclass(frozen=True, order=True)
class EventPosition:
    """Where an event is: first by its run, then within that run.

    Dagster's `storage_id` alone does not order events of several runs. The default SQLite storage has one
    database, and so one counter, for each run: a retry's first events have smaller ids than its parent's
    last ones. Both fields are private, so that nobody compares one of them alone.

    Args:
        _run_index (int): Position of the run among the runs whose work is on the branch, oldest first.
        _storage_id (int): Dagster's id of the event, which only grows within one run.
    """

    _run_index: int
    _storage_id: int

    def is_same_run(self, other: EventPosition) -> bool:
        """Whether both events are of one run."""
        return self._run_index == other._run_index


CheckName = tuple[str, str]
"""(asset key as text, check name)."""


@dataclass(frozen=True)
class Evaluation:
    """One check result."""

    passed: bool
    blocks: bool
    position: EventPosition
    step: str | None
    description: str
    failing: int | None = None
    """Rows that fail it; None where it does not count."""


@dataclass(frozen=True)
class Written:
    """A materialization on the run's branch, and what it reported of that branch.

    `rows` are those of the whole table there, `partition_rows` those of the partition, `at` is its time as a
    POSIX time stamp; `whole` says that nobody else can have rows in its partition once it is published.
    """

    position: EventPosition
    step: str | None
    run_id: str = ""
    rows: int | None = None
    partition_rows: int | None = None
    at: float = 0.0
    whole: bool = False
    preview: str | None = None


@dataclass(frozen=True)
class AssetRules:
    """What the definitions say about an asset now.

    Its table, its checks and whether it demands one; for each check that sees all rows, of which
    tables; whether it asks for serializable isolation, and the tables of the assets it is made from; the
    name under which it is exclusive; whether runs may not change the columns of its table.
    """

    table: str
    checks: frozenset[str]
    demands_checks: bool
    whole_tables: Mapping[str, frozenset[str]] = field(default_factory=dict)
    serializable: bool = False
    upstream: frozenset[str] = frozenset()
    exclusive: str | None = None
    frozen: bool = False


@dataclass(frozen=True)
class RunEvidence:
    """Everything the verdict on a run rests on. A partition is None for an unpartitioned event."""

    run_id: str
    succeeded: bool
    planned: frozenset[tuple[CheckName, str | None]] = frozenset()
    evaluations: Mapping[tuple[CheckName, str | None], Evaluation] = field(default_factory=dict)
    written: Mapping[tuple[str, str | None], Written] = field(default_factory=dict)
    rules: Mapping[str, AssetRules] = field(default_factory=dict)
    write_set: frozenset[str] = frozenset()
    loaded: frozenset[tuple[str | None, str]] = frozenset()
    """(step, table) of every input that the IO manager loaded."""
    noted: frozenset[str] = frozenset()
    """The tables that serializable assets have read by SQL or through the catalogue, in whatever step."""
    untold: frozenset[str] = frozenset()
    """What serializable assets may have read that has no name, in words."""
    branch_heads: frozenset[str] = frozenset()
    """The hashes of the branch that the runs recorded after their writes."""
    changed_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The columns that differ between base and branch, of each table in `frozen_tables` that has such."""

    @property
    def read_set(self) -> frozenset[str] | None:
        """The tables that must be on `main` as the run has seen them; None when no asset asks for that.

        Of each serializable asset: what it is declared to be made from, what was loaded for it, and what it
        has read itself.
        """
        strict = self.serializable
        if not strict:
            return None
        steps = {written.step for (asset, _), written in self.written.items() if asset in strict}
        declared = {table for asset in strict for table in self.rules[asset].upstream}
        return frozenset(declared | self.noted | {table for step, table in self.loaded if step in steps})

    @property
    def serializable(self) -> frozenset[str]:
        """The written assets that ask for it."""
        return frozenset(asset for asset, rules in self.rules.items() if rules.serializable)

    @property
    def leases(self) -> frozenset[str]:
        """The names under which written assets are exclusive."""
        return frozenset(rules.exclusive for rules in self.rules.values() if rules.exclusive)

    @property
    def whole_tables(self) -> frozenset[str]:
        """The tables of which some check sees all rows."""
        seen = (tables for rules in self.rules.values() for tables in rules.whole_tables.values())
        return frozenset().union(*seen)

    @property
    def frozen_tables(self) -> frozenset[str]:
        """The tables of written assets whose columns runs may not change."""
        return frozenset(rules.table for rules in self.rules.values() if rules.frozen)

    def assets(self) -> tuple[str, ...]:
        """The assets the run materialised, in the order it did."""
        ordered = sorted(self.written.items(), key=lambda entry: entry[1].position)
        return tuple(dict.fromkeys(asset for (asset, _), _ in ordered))


_EVENTS = {
    DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.LOADED_INPUT,
    DagsterEventType.ENGINE_EVENT,
}


def collect(
    instance: DagsterInstance,
    runs: Sequence[DagsterRun],
    graph: AssetGraph,
    *,
    write_set: frozenset[str],
    default_namespace: str,
    require_checks: bool,
) -> RunEvidence:
    """Read the check, materialization and input events of the runs that worked on one branch, oldest first.

    A later event of the same check or asset replaces an earlier one. Whether the work succeeded is the last
    run's status. Cost: one query to Dagster's event log per run and 1,000 events.
    """
    planned: set[tuple[CheckName, str | None]] = set()
    evaluations: dict[tuple[CheckName, str | None], Evaluation] = {}
    written: dict[tuple[str, str | None], Written] = {}
    loaded: set[tuple[str | None, str]] = set()
    noted: set[str] = set()
    untold: set[str] = set()
    heads: set[str] = set()
    for position, record in _positioned(instance, runs):
        event = record.event_log_entry.dagster_event
        if event is None:
            continue
        step = record.event_log_entry.step_key
        if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED:
            plan = event.asset_check_planned_data
            name = (plan.asset_key.to_user_string(), plan.check_name)
            subset = plan.partitions_subset
            planned |= {(name, key) for key in subset.get_partition_keys()} if subset else {(name, None)}
        elif event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
            result = event.asset_check_evaluation_data
            name = (result.asset_key.to_user_string(), result.check_name)
            evaluations[name, result.partition] = Evaluation(
                passed=result.passed,
                blocks=result.severity == AssetCheckSeverity.ERROR,
                position=position,
                step=step,
                description=result.description or "",
                failing=_count(result.metadata, "failing_rows"),
            )
        elif event.event_type == DagsterEventType.LOADED_INPUT:
            table = _metadata(event).get(EventMetadata.TABLE)
            if table is not None:
                loaded.add((step, str(table.value)))
        elif event.event_type == DagsterEventType.ENGINE_EVENT:
            noted |= _listed(event, EventMetadata.READ_TABLES)
            untold |= _listed(event, EventMetadata.UNNAMED_READS)
            heads |= _text(_metadata(event), EventMetadata.BRANCH_HEAD)
        else:
            made = event.step_materialization_data.materialization
            heads |= _text(made.metadata, EventMetadata.BRANCH_HEAD)
            written[made.asset_key.to_user_string(), made.partition] = _written(position, record, made)
    rules = {
        asset: _rules(AssetKey.from_user_string(asset), graph, default_namespace, require_checks)
        for asset in {asset for asset, _ in written}
    }
    last = runs[-1]
    return RunEvidence(
        last.run_id,
        last.is_success,
        frozenset(planned),
        evaluations,
        written,
        rules,
        write_set,
        frozenset(loaded),
        frozenset(noted),
        frozenset(untold),
        frozenset(heads),
    )


def _positioned(
    instance: DagsterInstance, runs: Sequence[DagsterRun]
) -> Iterator[tuple[EventPosition, EventLogRecord]]:
    for index, run in enumerate(runs):
        for record in _records(instance, run):
            yield EventPosition(index, record.storage_id), record


def _written(position: EventPosition, record: EventLogRecord, made: AssetMaterialization) -> Written:
    mode, preview = made.metadata.get(AssetMetadata.WRITE_MODE), made.metadata.get(EventMetadata.PREVIEW)
    return Written(
        position,
        record.event_log_entry.step_key,
        record.run_id,
        _count(made.metadata, EventMetadata.ROWS_ON_BRANCH),
        _count(made.metadata, EventMetadata.PARTITION_ROWS_ON_BRANCH),
        record.timestamp,
        mode is not None and mode.value == "replace_partitions",
        str(preview.value) if preview is not None else None,
    )


def _count(metadata: Mapping[str, MetadataValue[Any]], name: str) -> int | None:
    found = metadata.get(name)
    return found.value if found is not None and isinstance(found.value, int) else None


def _text(metadata: Mapping[str, MetadataValue[Any]], name: str) -> set[str]:
    value = metadata.get(name)
    return set() if value is None else {str(value.value)}


def _listed(event: DagsterEvent, name: str) -> set[str]:
    """The texts of a JSON list in an event's metadata."""
    value = _metadata(event).get(name)
    return set() if value is None else set(json.loads(str(value.value)))


def _metadata(event: DagsterEvent) -> Mapping[str, Any]:
    data: Any = event.event_specific_data
    return getattr(data, "metadata", None) or {}


def _records(instance: DagsterInstance, run: DagsterRun) -> Iterator[EventLogRecord]:
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(run.run_id, cursor=cursor, of_type=_EVENTS, limit=1000)
        yield from page.records
        if not page.has_more:
            return
        cursor = page.cursor


def _rules(key: AssetKey, graph: AssetGraph, default_namespace: str, require_checks: bool) -> AssetRules:
    table = table_name(identifier_of(key, default_namespace))
    if not graph.has(key):
        # Removed from the code since the run was launched: nobody says any more which checks it needs.
        return AssetRules(table, frozenset(), demands_checks=True)
    node = graph.get(key)
    demanded = _plain(node.metadata.get(AssetMetadata.REQUIRE_CHECKS, require_checks))
    return AssetRules(
        table,
        frozenset(check.name for check in node.check_keys),
        bool(demanded),
        {
            check.name: frozenset(
                table_name(identifier_of(seen, default_namespace))
                for seen in graph.get(check).parent_entity_keys
            )
            for check in node.check_keys
            if whole_table(graph.get(check))
        },
        _plain(node.metadata.get(AssetMetadata.ISOLATION)) == "serializable",
        frozenset(table_name(identifier_of(parent, default_namespace)) for parent in node.parent_keys),
        exclusive_name(node.metadata, table),
        _plain(node.metadata.get(AssetMetadata.COLUMNS)) == "freeze",
    )


def whole_table(check: Any) -> bool:
    """Whether a check speaks of all rows of its table: said by its author, else by its lack of partitions."""
    scope = _plain((check.metadata or {}).get(AssetMetadata.CHECK_SCOPE))
    return scope == "table" if scope is not None else check.partitions_def is None


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
