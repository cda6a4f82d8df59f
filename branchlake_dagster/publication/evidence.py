"""What Dagster knows about a finished run that the gate needs, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagster import AssetCheckSeverity, AssetKey, DagsterEventType, DagsterInstance, DagsterRun
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph

from branchlake_dagster.branching.tables import REQUIRE_CHECKS, identifier_of

CheckName = tuple[str, str]
"""(asset key as text, check name)."""


@dataclass(frozen=True)
class Evaluation:
    """One check result. `order` is its place in Dagster's event log."""

    passed: bool
    blocks: bool
    order: int
    step: str | None
    description: str


@dataclass(frozen=True)
class Written:
    """A materialisation of this run: its place in the event log, the step and the rows it reported."""

    order: int
    step: str | None
    rows: int | None


@dataclass(frozen=True)
class AssetRules:
    """What the definitions say about an asset now: its table, its checks, whether it demands one."""

    table: str
    checks: frozenset[str]
    demands_checks: bool


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

    def assets(self) -> tuple[str, ...]:
        """The assets the run materialised, in the order it did."""
        ordered = sorted(self.written.items(), key=lambda entry: entry[1].order)
        return tuple(dict.fromkeys(asset for (asset, _), _ in ordered))


_EVENTS = {
    DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.ASSET_MATERIALIZATION,
}


def collect(
    instance: DagsterInstance,
    run: DagsterRun,
    graph: BaseAssetGraph[Any],
    *,
    write_set: frozenset[str],
    default_namespace: str,
    require_checks: bool,
) -> RunEvidence:
    """Read the run's check and materialisation events. Later events of the same check or asset win."""
    planned: set[tuple[CheckName, str | None]] = set()
    evaluations: dict[tuple[CheckName, str | None], Evaluation] = {}
    written: dict[tuple[str, str | None], Written] = {}
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(run.run_id, cursor=cursor, of_type=_EVENTS, limit=1000)
        for record in page.records:
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
                    order=record.storage_id,
                    step=step,
                    description=result.description or "",
                )
            else:
                made = event.step_materialization_data.materialization
                rows = made.metadata.get(
                    "dagster/partition_row_count", made.metadata.get("dagster/row_count")
                )
                written[made.asset_key.to_user_string(), made.partition] = Written(
                    record.storage_id,
                    step,
                    rows.value if rows is not None and isinstance(rows.value, int) else None,
                )
        if not page.has_more:
            break
        cursor = page.cursor
    rules = {
        asset: _rules(AssetKey.from_user_string(asset), graph, default_namespace, require_checks)
        for asset in {asset for asset, _ in written}
    }
    return RunEvidence(run.run_id, run.is_success, frozenset(planned), evaluations, written, rules, write_set)


def _rules(
    key: AssetKey, graph: BaseAssetGraph[Any], default_namespace: str, require_checks: bool
) -> AssetRules:
    table = ".".join(identifier_of(key, default_namespace))
    if not graph.has(key):
        # Removed from the code since the run was launched: nobody says any more which checks it needs.
        return AssetRules(table, frozenset(), demands_checks=True)
    node = graph.get(key)
    demanded = node.metadata.get(REQUIRE_CHECKS, require_checks)
    return AssetRules(
        table, frozenset(check.name for check in node.check_keys), bool(getattr(demanded, "value", demanded))
    )
