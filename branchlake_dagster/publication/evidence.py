"""The facts about a finished run that the gate needs, read from Dagster as plain values."""

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
from branchlake_dagster.tables.specification import format_table_name, parse_exclusive_name, table_identifier


@dataclass(frozen=True, order=True)
class EventPosition:
    """The order of an event: first by its run, then within that run.

    Dagster's `storage_id` alone does not order events of several runs. The default SQLite storage has one
    database, and so one counter, for each run: a retry's first events have smaller ids than its parent's last
    ones. Both fields are private, so that they are only compared together.

    Args:
        _run_index (int): Position of the run among the runs whose work is on the branch, oldest first.
        _storage_id (int): Dagster's id of the event, which only grows within one run.
    """

    _run_index: int
    _storage_id: int

    def is_same_run(self, other: EventPosition) -> bool:
        """Return whether both events belong to the same run."""
        return self._run_index == other._run_index


CheckName = tuple[str, str]
"""(asset key as text, check name)."""


@dataclass(frozen=True)
class CheckEvaluation:
    """The result of one check. `is_blocking` is True if its severity is ERROR."""

    passed: bool
    is_blocking: bool
    position: EventPosition
    step_key: str | None
    description: str
    failing_rows: int | None = None
    """The number of rows that fail the check; None if the check does not count them."""


@dataclass(frozen=True)
class WrittenPartition:
    """A materialization on the run's branch, with the numbers that it reported.

    `rows` is the row count of the whole table on the branch, `partition_rows` that of the partition.
    `timestamp` is in seconds since 1970. `is_whole_partition` is True if the run replaced the partition, so
    that the published partition holds only its rows.
    """

    position: EventPosition
    step_key: str | None
    run_id: str = ""
    rows: int | None = None
    partition_rows: int | None = None
    timestamp: float = 0.0
    is_whole_partition: bool = False
    preview: str | None = None


@dataclass(frozen=True)
class AssetRules:
    """The rules of an asset in the current definitions.

    `table` is its table and `checks` are the names of its checks. `demands_checks`: it may not be published
    without a check. `whole_table_checks` has the checked tables of each check that reads all rows.
    `serializable`: the asset asks for serializable isolation. `upstream_tables` are the tables of the assets
    that it is made from. `lease_name` is the name under which it is exclusive. `columns_frozen`: runs may not
    change the columns of its table.
    """

    table: str
    checks: frozenset[str]
    demands_checks: bool
    whole_table_checks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    serializable: bool = False
    upstream_tables: frozenset[str] = frozenset()
    lease_name: str | None = None
    columns_frozen: bool = False


@dataclass(frozen=True)
class RunEvidence:
    """All facts that the verdict on a run depends on. A partition is None for an event without partition."""

    run_id: str
    succeeded: bool
    planned_checks: frozenset[tuple[CheckName, str | None]] = frozenset()
    evaluations: Mapping[tuple[CheckName, str | None], CheckEvaluation] = field(default_factory=dict)
    written_partitions: Mapping[tuple[str, str | None], WrittenPartition] = field(default_factory=dict)
    rules: Mapping[str, AssetRules] = field(default_factory=dict)
    write_set: frozenset[str] = frozenset()
    loaded_tables: frozenset[tuple[str | None, str]] = frozenset()
    """(step, table) of every input that the IO manager loaded."""
    read_tables: frozenset[str] = frozenset()
    """The tables that serializable assets read by SQL or through the catalog, in any step."""
    unnamed_reads: frozenset[str] = frozenset()
    """Descriptions of reads by serializable assets whose tables are not known."""
    branch_heads: frozenset[str] = frozenset()
    """The branch hashes that the runs recorded after their writes."""
    changed_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The columns that differ between base and branch, by frozen table; without unchanged tables."""

    @property
    def read_set(self) -> frozenset[str] | None:
        """The tables that must be unchanged on `main` since the run's base; None if no asset is serializable.

        For each serializable asset these are its declared upstream tables, the inputs loaded for it, and the
        tables that it read itself.
        """
        strict_assets = self.serializable_assets
        if not strict_assets:
            return None
        step_keys = {
            written.step_key
            for (asset, _), written in self.written_partitions.items()
            if asset in strict_assets
        }
        declared_tables = {table for asset in strict_assets for table in self.rules[asset].upstream_tables}
        return frozenset(
            declared_tables
            | self.read_tables
            | {table for step_key, table in self.loaded_tables if step_key in step_keys}
        )

    @property
    def serializable_assets(self) -> frozenset[str]:
        """The written assets that ask for serializable isolation."""
        return frozenset(asset for asset, rules in self.rules.items() if rules.serializable)

    @property
    def leases(self) -> frozenset[str]:
        """The names under which written assets are exclusive."""
        return frozenset(rules.lease_name for rules in self.rules.values() if rules.lease_name)

    @property
    def fully_checked_tables(self) -> frozenset[str]:
        """The tables of which at least one check reads all rows."""
        table_sets = (tables for rules in self.rules.values() for tables in rules.whole_table_checks.values())
        return frozenset().union(*table_sets)

    @property
    def frozen_tables(self) -> frozenset[str]:
        """The tables of written assets whose columns runs may not change."""
        return frozenset(rules.table for rules in self.rules.values() if rules.columns_frozen)

    def materialized_assets(self) -> tuple[str, ...]:
        """Return the assets that the run materialized, in that order."""
        ordered = sorted(self.written_partitions.items(), key=lambda entry: entry[1].position)
        return tuple(dict.fromkeys(asset for (asset, _), _ in ordered))


_EVENT_TYPES = {
    DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.LOADED_INPUT,
    DagsterEventType.ENGINE_EVENT,
}


def collect_evidence(
    instance: DagsterInstance,
    runs: Sequence[DagsterRun],
    graph: AssetGraph,
    *,
    write_set: frozenset[str],
    default_namespace: str,
    require_checks: bool,
) -> RunEvidence:
    """Read the check, materialization and input events of the runs that worked on one branch.

    `runs` are in order, oldest first. A later event of the same check or asset replaces an earlier one. The
    work has succeeded if the last run has. Costs one query to Dagster's event log per run and 1,000 events.
    """
    planned_checks: set[tuple[CheckName, str | None]] = set()
    evaluations: dict[tuple[CheckName, str | None], CheckEvaluation] = {}
    written_partitions: dict[tuple[str, str | None], WrittenPartition] = {}
    loaded_tables: set[tuple[str | None, str]] = set()
    read_tables: set[str] = set()
    unnamed_reads: set[str] = set()
    branch_heads: set[str] = set()
    for position, record in _iter_positioned_events(instance, runs):
        event = record.event_log_entry.dagster_event
        if event is None:
            continue
        step_key = record.event_log_entry.step_key
        if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED:
            planned_check = event.asset_check_planned_data
            check_name = (planned_check.asset_key.to_user_string(), planned_check.check_name)
            subset = planned_check.partitions_subset
            planned_checks |= (
                {(check_name, key) for key in subset.get_partition_keys()} if subset else {(check_name, None)}
            )
        elif event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
            result = event.asset_check_evaluation_data
            check_name = (result.asset_key.to_user_string(), result.check_name)
            evaluations[check_name, result.partition] = CheckEvaluation(
                passed=result.passed,
                is_blocking=result.severity == AssetCheckSeverity.ERROR,
                position=position,
                step_key=step_key,
                description=result.description or "",
                failing_rows=_get_int(result.metadata, "failing_rows"),
            )
        elif event.event_type == DagsterEventType.LOADED_INPUT:
            table = _event_metadata(event).get(EventMetadata.TABLE)
            if table is not None:
                loaded_tables.add((step_key, str(table.value)))
        elif event.event_type == DagsterEventType.ENGINE_EVENT:
            read_tables |= _get_json_set(event, EventMetadata.READ_TABLES)
            unnamed_reads |= _get_json_set(event, EventMetadata.UNNAMED_READS)
            branch_heads |= _get_string_set(_event_metadata(event), EventMetadata.BRANCH_HEAD)
        else:
            materialization = event.step_materialization_data.materialization
            branch_heads |= _get_string_set(materialization.metadata, EventMetadata.BRANCH_HEAD)
            written_partitions[materialization.asset_key.to_user_string(), materialization.partition] = (
                _to_written_partition(position, record, materialization)
            )
    rules = {
        asset: _build_asset_rules(AssetKey.from_user_string(asset), graph, default_namespace, require_checks)
        for asset in {asset for asset, _ in written_partitions}
    }
    last_run = runs[-1]
    return RunEvidence(
        last_run.run_id,
        last_run.is_success,
        frozenset(planned_checks),
        evaluations,
        written_partitions,
        rules,
        write_set,
        frozenset(loaded_tables),
        frozenset(read_tables),
        frozenset(unnamed_reads),
        frozenset(branch_heads),
    )


def _iter_positioned_events(
    instance: DagsterInstance, runs: Sequence[DagsterRun]
) -> Iterator[tuple[EventPosition, EventLogRecord]]:
    for index, run in enumerate(runs):
        for record in _iter_event_records(instance, run):
            yield EventPosition(index, record.storage_id), record


def _to_written_partition(
    position: EventPosition, record: EventLogRecord, materialization: AssetMaterialization
) -> WrittenPartition:
    mode, preview = (
        materialization.metadata.get(AssetMetadata.WRITE_MODE),
        materialization.metadata.get(EventMetadata.PREVIEW),
    )
    return WrittenPartition(
        position,
        record.event_log_entry.step_key,
        record.run_id,
        _get_int(materialization.metadata, EventMetadata.ROWS_ON_BRANCH),
        _get_int(materialization.metadata, EventMetadata.PARTITION_ROWS_ON_BRANCH),
        record.timestamp,
        mode is not None and mode.value == "replace_partitions",
        str(preview.value) if preview is not None else None,
    )


def _get_int(metadata: Mapping[str, MetadataValue[Any]], name: str) -> int | None:
    value = metadata.get(name)
    return value.value if value is not None and isinstance(value.value, int) else None


def _get_string_set(metadata: Mapping[str, MetadataValue[Any]], name: str) -> set[str]:
    value = metadata.get(name)
    return set() if value is None else {str(value.value)}


def _get_json_set(event: DagsterEvent, name: str) -> set[str]:
    """Return the strings of a JSON list in an event's metadata."""
    value = _event_metadata(event).get(name)
    return set() if value is None else set(json.loads(str(value.value)))


def _event_metadata(event: DagsterEvent) -> Mapping[str, Any]:
    data: Any = event.event_specific_data
    return getattr(data, "metadata", None) or {}


def _iter_event_records(instance: DagsterInstance, run: DagsterRun) -> Iterator[EventLogRecord]:
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(run.run_id, cursor=cursor, of_type=_EVENT_TYPES, limit=1000)
        yield from page.records
        if not page.has_more:
            return
        cursor = page.cursor


def _build_asset_rules(
    key: AssetKey, graph: AssetGraph, default_namespace: str, require_checks: bool
) -> AssetRules:
    table = format_table_name(table_identifier(key, default_namespace))
    if not graph.has(key):
        # The asset was removed from the code after the run's launch, so its required checks are not known.
        return AssetRules(table, frozenset(), demands_checks=True)
    node = graph.get(key)
    demands_checks = _unwrap_value(node.metadata.get(AssetMetadata.REQUIRE_CHECKS, require_checks))
    return AssetRules(
        table,
        frozenset(check.name for check in node.check_keys),
        bool(demands_checks),
        {
            check.name: frozenset(
                format_table_name(table_identifier(entity_key, default_namespace))
                for entity_key in graph.get(check).parent_entity_keys
            )
            for check in node.check_keys
            if covers_whole_table(graph.get(check))
        },
        _unwrap_value(node.metadata.get(AssetMetadata.ISOLATION)) == "serializable",
        frozenset(
            format_table_name(table_identifier(parent, default_namespace)) for parent in node.parent_keys
        ),
        parse_exclusive_name(node.metadata, table),
        _unwrap_value(node.metadata.get(AssetMetadata.COLUMNS)) == "freeze",
    )


def covers_whole_table(check: Any) -> bool:
    """Return whether a check covers all rows of its table.

    The check's metadata decides; without that metadata, a check without partitions covers all rows.
    """
    scope = _unwrap_value((check.metadata or {}).get(AssetMetadata.CHECK_SCOPE))
    return scope == "table" if scope is not None else check.partitions_def is None


def _unwrap_value(value: Any) -> Any:
    return getattr(value, "value", value)
