"""What `branchlake backfill` does and prints: plan, launch, progress, approval and comparison."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from dagster import AssetKey, DagsterInstance
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from branchlake_dagster.automation.approve_backfill import Approval, approve_results
from branchlake_dagster.automation.backfill_comparison import (
    Comparison,
    Number,
    StageComparison,
    compare_stage,
    find_base_hash,
)
from branchlake_dagster.automation.backfill_launch import launch_backfill
from branchlake_dagster.automation.backfill_plan import Stage, format_stage_size, plan_stages
from branchlake_dagster.automation.backfill_progress import (
    StageProgress,
    load_stage_progress,
    requested_partitions,
    require_backfill,
)
from branchlake_dagster.automation.backfill_retry import (
    RetryPlan,
    find_lost_partitions,
    launch_retry,
    plan_retry,
)
from branchlake_dagster.automation.incremental_sensor import DeclaredSensor, declared_sensors
from branchlake_dagster.automation.stale_partitions import find_stale_partitions
from branchlake_dagster.cli.dagster_home import dagster_home
from branchlake_dagster.cli.location import require_location
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import AssetGraph, load_tagged_backfills
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class LocationContext:
    """The code location, the lake and the Dagster instance that a backfill is about."""

    graph: AssetGraph
    lake: LakehouseResource
    instance: DagsterInstance
    sensors: Mapping[AssetKey, DeclaredSensor] = field(default_factory=dict)
    """The incremental sensor of each asset that has one."""


@contextmanager
def open_location(module: str | None) -> Iterator[LocationContext]:
    """The code location in a module, or that of the project in the working folder, with its lake's settings.

    Raises ConfigurationError.
    """
    location, loaded_settings = require_location(module)
    repository, settings = location.repository, loaded_settings.settings
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        sensors = declared_sensors(repository)
        yield LocationContext(
            repository.asset_graph, LakehouseResource.from_settings(settings), instance, sensors
        )


@dataclass(frozen=True)
class BackfillRequest:
    """Which partitions of which asset, and why."""

    key: AssetKey
    partitions: tuple[str, ...] | None
    why: str


def build_request(
    context: LocationContext, asset: str, partitions: Sequence[str], *, everything: bool
) -> BackfillRequest | None:
    """What the options mean; None: nothing is stale. Raises ConfigurationError."""
    key = AssetKey.from_user_string(asset)
    if not context.graph.has(key):
        raise ConfigurationError(
            f"There is no asset {asset} in this code location.",
            hint="Write its key as on Dagster's page: namespace/table.",
            reason="unknown_asset",
            subject=asset,
        )
    if partitions or everything:
        partition_keys = None if everything else tuple(partitions)
        return BackfillRequest(key, partition_keys, "requested")
    stale_keys = find_stale_partitions(context.graph, context.lake.lakehouse, key, instance=context.instance)
    if stale_keys == ():
        return None
    return BackfillRequest(
        key, stale_keys, f"code version {context.graph.get(key).code_version} is newer than they are"
    )


def plan_request(context: LocationContext, request: BackfillRequest) -> list[Stage]:
    """The plan."""
    return plan_stages(
        context.graph,
        context.lake.lakehouse,
        request.key,
        request.partitions,
        reason=request.why,
        instance=context.instance,
    )


def launch_request(
    context: LocationContext, request: BackfillRequest, at: float, *, approval: bool = False
) -> str:
    """Launch it; the backfill's id. With `approval`, each stage waits until the one before it is approved."""
    first_stage = plan_request(context, request)[0]
    main_hash = context.lake.lakehouse.nessie.reference(MAIN).hash
    return launch_backfill(
        context.graph,
        context.instance,
        request.key,
        first_stage.partitions,
        reason=request.why,
        base_hash=main_hash,
        approval=approval,
        requested_at=at,
    )


def report_stage_progress(context: LocationContext, backfill_id: str) -> list[StageProgress]:
    """How far it has come. Raises ConfigurationError for an id that nobody knows."""
    retries = {key: sensor.policy.retries for key, sensor in context.sensors.items()}
    now = datetime.now(UTC)
    return load_stage_progress(
        context.graph, context.lake, context.instance, backfill_id, now, retries=retries
    )


def is_computed(stage: Stage) -> bool:
    """Whether the backfill computes the stage, rather than naming it for somebody to launch."""
    return stage.launches_itself or stage.number == 0


def compare_backfill(
    context: LocationContext, backfill_id: str, asset: str | None = None
) -> list[StageComparison]:
    """Compare each stage that is computed with its rows before the backfill, or only that of one asset.

    Raises ConfigurationError for an unknown id, and for an asset that the backfill does not compute, and
    EarlierStateLost.
    """
    state = require_backfill(context.instance, context.graph, backfill_id)
    lake = context.lake.lakehouse
    planned_stages = plan_stages(
        context.graph, lake, state.key, state.partitions, reason=state.why, instance=context.instance
    )
    own_stages = [stage for stage in planned_stages if is_computed(stage)]
    if asset is not None:
        key = AssetKey.from_user_string(asset)
        names = ", ".join(stage.asset.to_user_string() for stage in own_stages)
        own_stages = [stage for stage in own_stages if stage.asset == key]
        if not own_stages:
            raise ConfigurationError(
                f"Backfill {backfill_id} does not compute asset {asset}.", hint=f"It computes {names}."
            )
    old_hash = find_base_hash(lake, state)
    return [compare_stage(context.graph, lake, stage, old_hash) for stage in own_stages]


def compare_held_stages(
    context: LocationContext, backfill_id: str, stage_progress: Sequence[StageProgress]
) -> list[StageComparison]:
    """Compare the stages whose results the stages that wait for approval would consume."""
    parents = {
        key
        for entry in stage_progress
        if entry.held_partitions
        for key in context.graph.get(entry.stage.asset).parent_keys
    }
    names = [
        entry.stage.asset
        for entry in stage_progress
        if entry.stage.asset in parents and is_computed(entry.stage)
    ]
    return [entry for key in names for entry in compare_backfill(context, backfill_id, key.to_user_string())]


def retry_backfill(context: LocationContext, backfill_id: str, at: float, *, rebuild_lost: bool) -> RetryPlan:
    """Launch again what has failed, and with `rebuild_lost` what is lost; returns what was launched.

    Called again before Dagster's daemon has made the runs, it launches nothing twice. Raises
    ConfigurationError for an id that nobody knows.
    """
    stage_progress = report_stage_progress(context, backfill_id)
    retry_backfills = load_tagged_backfills(context.instance, context.graph, {RunTag.RETRY_OF: backfill_id})
    retry_keys = {
        key: requested_partitions(backfill for backfill in retry_backfills if backfill.key == key)
        for key in {backfill.key for backfill in retry_backfills}
    }
    lost_stages = find_lost_partitions(
        context.graph, context.lake, context.instance, stage_progress, retry_keys
    )
    retry_plan = plan_retry(stage_progress, lost_stages, rebuild_lost=rebuild_lost)
    launches = launch_retry(context.graph, context.instance, backfill_id, retry_plan, at)
    return RetryPlan(launches, retry_plan.lost_stages)


_WIDE = 160
"""Columns when nobody watches."""
_SHOWN = 3


def show_plan(stages: Sequence[Stage], console: Console | None = None) -> None:
    """The stages for people."""
    console = console or _build_console()
    table = Table("stage", "asset", "partitions", "holds now", "launches itself", "why", show_edge=False)
    for stage in stages:
        launches_itself = "yes" if stage.launches_itself else "no"
        table.add_row(
            str(stage.number),
            stage.asset.to_user_string(),
            _format_partitions(stage),
            format_stage_size(stage),
            launches_itself,
            stage.reason,
        )
    console.print(table)


def show_status(stage_progress: Sequence[StageProgress], console: Console | None = None) -> None:
    """The progress for people."""
    console = console or _build_console()
    table = Table(
        "stage", "asset", "planned", "done", "running", "to do", "failed", "lost", "", show_edge=False
    )
    for entry in stage_progress:
        counts = (
            entry.planned_count,
            entry.done_count,
            entry.running_count,
            entry.left_count,
            entry.failed_count,
            entry.lost_count,
        )
        asset = entry.stage.asset.to_user_string()
        table.add_row(str(entry.stage.number), asset, *map(str, counts), escape(entry.message))
    console.print(table)


def format_module_option(module: str | None) -> str:
    """The option `-m` of a command that is shown as the next one; nothing if the project was found."""
    return "" if module is None else f" -m {module}"


def show_retry(
    retry_plan: RetryPlan, backfill_id: str, module: str | None, console: Console | None = None
) -> None:
    """What was launched again, and what stays lost, for people."""
    console = console or _build_console()
    for relaunch in retry_plan.launches:
        manner = "anew, all of their rows" if relaunch.rebuild else "again"
        names = ", ".join(_format_partition(partition) for partition in relaunch.partitions)
        asset = relaunch.asset.to_user_string()
        launch_message = (
            f"Stage {relaunch.number}, {asset}: launched {manner}: {names} (backfill {relaunch.backfill_id})."
        )
        console.print(launch_message, soft_wrap=True, highlight=False, markup=False)
    if not retry_plan.launches:
        console.print(f"Backfill {backfill_id} has no failed partitions to launch again.", soft_wrap=True)
    for lost_stage in retry_plan.lost_stages:
        names = ", ".join(_format_partition(partition) for partition in lost_stage.partitions)
        advice = f"to compute anew: {names}" if names else "a rebuild does not help before this is corrected"
        loss_message = f"Stage {lost_stage.number}, {lost_stage.asset.to_user_string()}, is {lost_stage.reason} It was not launched; {advice}."
        console.print(loss_message, soft_wrap=True, highlight=False, markup=False)
    if any(lost.partitions for lost in retry_plan.lost_stages):
        command = f"branchlake backfill retry {backfill_id}{format_module_option(module)} --rebuild-lost"
        console.print(f"Compute them anew: {command}", soft_wrap=True, highlight=False, markup=False)
    if retry_plan.launches:
        command = f"branchlake backfill status {backfill_id}{format_module_option(module)}"
        console.print(f"Next: {command}", soft_wrap=True, highlight=False, markup=False)


def _format_partition(partition: str | None) -> str:
    return "all of it" if partition is None else partition


def _build_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


def _format_partitions(stage: Stage) -> str:
    if stage.partitions is None:
        return "all of it"
    names = stage.partitions
    shown = ", ".join(names[:_SHOWN])
    return (
        shown if len(names) <= _SHOWN else f"{shown} … {names[-1]} ({format_count(len(names), 'partition')})"
    )


def stage_to_dict(stage: Stage) -> dict[str, Any]:
    """For JSON."""
    return {
        "stage": stage.number,
        "asset": stage.asset.to_user_string(),
        "partitions": None if stage.partitions is None else list(stage.partitions),
        "files": stage.files,
        "rows": stage.rows,
        "bytes": stage.bytes,
        "by_itself": stage.launches_itself,
        "why": stage.reason,
    }


def progress_to_dict(entry: StageProgress) -> dict[str, Any]:
    """For JSON."""
    return {
        "stage": entry.stage.number,
        "asset": entry.stage.asset.to_user_string(),
        "planned": entry.planned_count,
        "done": entry.done_count,
        "running": entry.running_count,
        "left": entry.left_count,
        "failed": entry.failed_count,
        "lost": entry.lost_count,
        "failed_partitions": [name for name in entry.failed_partitions if name is not None],
        "held": len(entry.held_partitions),
        "held_partitions": [name for name in entry.held_partitions if name is not None],
        "approved_as": list(entry.approval_ids),
        "told": entry.message,
    }


def retry_to_dict(retry_plan: RetryPlan) -> dict[str, Any]:
    """For JSON; an asset without partitions has null for them."""
    return {
        "launched": [
            {
                "stage": stage.number,
                "asset": stage.asset.to_user_string(),
                "partitions": _partition_names(stage.partitions),
                "rebuild": stage.rebuild,
                "backfill": stage.backfill_id,
            }
            for stage in retry_plan.launches
        ],
        "lost": [
            {
                "stage": stage.number,
                "asset": stage.asset.to_user_string(),
                "partitions": _partition_names(stage.partitions),
                "told": stage.reason,
            }
            for stage in retry_plan.lost_stages
        ],
    }


def _partition_names(partitions: Sequence[str | None]) -> list[str | None] | None:
    return None if tuple(partitions) == (None,) else list(partitions)


def show_comparisons(comparisons: Sequence[StageComparison], console: Console | None = None) -> None:
    """The rows and sums of each stage before and now, a line for each partition."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE))
    table = Table(
        "stage", "asset", "partition", "rows before", "now", "change", "changed", "sums", show_edge=False
    )
    for stage in comparisons:
        rows = [(partition or "all of it", one) for partition, one in stage.partitions.items()]
        if len(rows) != 1:
            rows.append((f"total of {format_count(len(rows), 'partition')}", stage.total))
        for name, comparison in rows:
            table.add_row(
                str(stage.number),
                stage.asset.to_user_string(),
                escape(name),
                f"{comparison.before.rows:,}",
                f"{comparison.after.rows:,}",
                f"{comparison.row_difference:+,}",
                format_share(stage, comparison),
                escape(format_sums(comparison)),
            )
    console.print(table)


def format_total(stage: StageComparison) -> str:
    """The total of a stage in a line."""
    total = stage.total
    rows = f"rows {total.before.rows:,} → {total.after.rows:,}"
    sums = format_sums(total)
    return f"{rows}, {format_share(stage, total)} changed{f', sums: {sums}' if sums else ''}"


def format_share(stage: StageComparison, comparison: Comparison) -> str:
    """The share of changed rows, or of changed keys."""
    noun = "key" if stage.keys else "row"
    return f"{comparison.share:.1%} ({comparison.changed_count:,} of {format_count(comparison.compared_count, noun)})"


def format_sums(comparison: Comparison) -> str:
    """The sums that changed, by column."""
    changed_sums = [
        f"{name} {_format_number(before)} → {_format_number(after)}"
        for name, (before, after) in comparison.sums.items()
        if _format_number(before) != _format_number(after)
    ]
    return ", ".join(changed_sums) or ("unchanged" if comparison.sums else "")


def _format_number(value: Number | None) -> str:
    """Ten digits of a floating point sum: the last ones depend on the order of the rows."""
    if value is None:
        return "none"
    return f"{value:,.10g}" if isinstance(value, float) else f"{value:,}"


def comparison_to_dict(stage: StageComparison) -> dict[str, Any]:
    """For JSON. The partition of an asset without partitions is null, decimal sums are strings."""
    return {
        "stage": stage.number,
        "asset": stage.asset.to_user_string(),
        "keys": list(stage.keys),
        "total": _counts_to_dict(stage.total),
        "partitions": [
            {"partition": name} | _counts_to_dict(comparison) for name, comparison in stage.partitions.items()
        ],
    }


def _counts_to_dict(comparison: Comparison) -> dict[str, Any]:
    sums = {
        name: {"before": _to_json_number(a), "after": _to_json_number(b)}
        for name, (a, b) in comparison.sums.items()
    }
    return {
        "rows_before": comparison.before.rows,
        "rows_after": comparison.after.rows,
        "changed": comparison.changed_count,
        "compared": comparison.compared_count,
        "share": comparison.share,
        "sums": sums,
    }


def _to_json_number(value: Number | None) -> int | float | str | None:
    return str(value) if isinstance(value, Decimal) else value


def approve_assets(settings: Settings, backfill_id: str, assets: Sequence[str]) -> Approval:
    """Approve what is on `main` of a backfill. Raises ConfigurationError for an unknown id."""
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        return approve_results(instance, backfill_id, [AssetKey.from_user_string(asset) for asset in assets])


def approval_to_dict(approval: Approval) -> dict[str, Any]:
    """For JSON: the ids of the runs."""
    return {
        "approved": [run.run_id for run in approval.approved_runs],
        "unpublished": [run.run_id for run in approval.unpublished_runs],
    }
