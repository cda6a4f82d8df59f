"""The actions and the output of `branchlake backfill`: plan, launch, progress, approval and comparison."""

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

from branchlake_dagster.automation.backfill_comparison import (
    Comparison,
    Number,
    StageComparison,
    compare_stage,
    find_base_hash,
)
from branchlake_dagster.automation.backfill_plan import (
    Stage,
    StalePartitions,
    find_stale_partitions,
    format_stage_size,
    plan_stages,
)
from branchlake_dagster.automation.backfill_progress import (
    StageProgress,
    load_stage_progress,
    requested_partitions,
    require_backfill,
)
from branchlake_dagster.automation.backfill_stages import (
    Approval,
    RetryPlan,
    approve_results,
    find_lost_partitions,
    launch_backfill,
    launch_retry,
    plan_retry,
)
from branchlake_dagster.automation.incremental_sensor import DeclaredSensor, declared_sensors
from branchlake_dagster.cli.dagster_home import open_instance
from branchlake_dagster.cli.location import require_location
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import AssetGraph, load_tagged_backfills
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class LocationContext:
    """The code location, the lake and the Dagster instance that a command works with."""

    graph: AssetGraph
    lake: LakehouseResource
    instance: DagsterInstance
    sensors: Mapping[AssetKey, DeclaredSensor] = field(default_factory=dict)
    """The incremental sensor by the key of the asset that it launches. Other assets are missing."""


@contextmanager
def open_location(module: str | None) -> Iterator[LocationContext]:
    """Open the code location of a module, or of the project in the working folder, with its lake and Dagster.

    Raises ConfigurationError if the code location cannot be loaded, click.UsageError if none is named, and
    LakeNotRunning.
    """
    location, loaded_settings = require_location(module)
    repository, settings = location.repository, loaded_settings.settings
    Lakehouse(settings, start=False).endpoints(spark=False)  # fails if the lake does not run
    with open_instance(settings) as instance:
        sensors = declared_sensors(repository)
        yield LocationContext(
            repository.asset_graph, LakehouseResource.from_settings(settings), instance, sensors
        )


@dataclass(frozen=True)
class BackfillRequest:
    """A request to compute partitions of the asset `key`. `partitions` is None for the whole asset.

    `why` is the reason, which is recorded with the backfill. `unknown_partitions` are not computed: an older
    code version may have computed them, but the snapshots do not show it.
    """

    key: AssetKey
    partitions: tuple[str, ...] | None
    why: str
    unknown_partitions: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.partitions == ()


def build_request(
    context: LocationContext, asset: str, partitions: Sequence[str], *, everything: bool
) -> BackfillRequest | None:
    """Return the request for the given partitions, or for the whole asset with `everything`.

    Without both, the request has the partitions that another code version of the asset computed. It also
    names the partitions that another version may have computed; they are not computed again. The result is
    None if there are neither.

    Raises ConfigurationError if the code location has no such asset, or without both for an asset that has no
    code version.
    """
    key = AssetKey.from_user_string(asset)
    if not context.graph.has(key):
        raise ConfigurationError(
            f"This code location has no asset {asset}.",
            hint="Write the asset's key as Dagster's pages show it: namespace/table.",
            reason="unknown_asset",
            subject=asset,
        )
    if partitions or everything:
        partition_keys = None if everything else tuple(partitions)
        return BackfillRequest(key, partition_keys, "requested")
    stale = find_stale_partitions(context.graph, context.lake.lakehouse, key, instance=context.instance)
    if stale == StalePartitions(()):
        return None
    return BackfillRequest(
        key,
        stale.keys,
        f"computed by an older code version than {context.graph.get(key).code_version}",
        stale.unknown,
    )


def plan_request(context: LocationContext, request: BackfillRequest) -> list[Stage]:
    """Return the planned stages of a backfill; launch nothing. The first stage is the requested asset."""
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
    """Launch the first stage of a backfill and return the backfill's id.

    `at` is the time of the request in seconds since 1970. With `approval`, each stage waits until the
    results of the stage before it are approved.
    """
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
    """Return the progress of each stage of a backfill. Raises ConfigurationError for an unknown id."""
    retries = {key: sensor.policy.retries for key, sensor in context.sensors.items()}
    now = datetime.now(UTC)
    return load_stage_progress(
        context.graph, context.lake, context.instance, backfill_id, now, retries=retries
    )


def is_computed(stage: Stage) -> bool:
    """Return whether the backfill computes the stage itself. The user launches the other stages."""
    return stage.launches_itself or stage.number == 0


def compare_backfill(
    context: LocationContext, backfill_id: str, asset: str | None = None
) -> list[StageComparison]:
    """Compare the rows of each stage on `main` with the rows before the backfill.

    Skips stages that the backfill does not compute itself. With `asset`, compares only the stage of that
    asset.

    Raises:
        ConfigurationError: The id is unknown, or the backfill does not compute the asset.
        EarlierStateLost: The rows before the backfill cannot be read any more.
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
                f"Backfill {backfill_id} does not compute asset {asset}.",
                hint=f"Name one of its assets: {names}.",
            )
    old_hash = find_base_hash(lake, state)
    return [compare_stage(context.graph, lake, stage, old_hash) for stage in own_stages]


def compare_held_stages(
    context: LocationContext, backfill_id: str, stage_progress: Sequence[StageProgress]
) -> list[StageComparison]:
    """Compare the rows of stages whose results wait for approval with the rows before the backfill.

    These are the stages whose assets are inputs of held stages. The result is empty if no stage is held.
    Raises the errors of `compare_backfill`.
    """
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
    return [
        comparison
        for key in names
        for comparison in compare_backfill(context, backfill_id, key.to_user_string())
    ]


def retry_backfill(context: LocationContext, backfill_id: str, at: float, *, rebuild_lost: bool) -> RetryPlan:
    """Launch the failed partitions of a backfill again, and with `rebuild_lost` also the lost stages.

    Idempotent: a second call launches nothing twice, even if Dagster's daemon has not created the runs yet.

    Args:
        context: The code location of the backfill.
        backfill_id: The backfill.
        at: The time of the request, in seconds since 1970.
        rebuild_lost: Also recompute stages whose changes are no longer known.

    Returns:
        The launched partitions, and the stages that are still lost.

    Raises:
        ConfigurationError: The id is unknown.
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
"""Width of a table, in characters, if the output is not a terminal."""
_SHOWN = 3


def show_plan(stages: Sequence[Stage], console: Console | None = None) -> None:
    """Print the planned stages as a table, to standard output if `console` is None."""
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
    """Print the progress of the stages as a table, to standard output if `console` is None."""
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
    """Format the option `-m` for a suggested command. Empty if `module` is None."""
    return "" if module is None else f" -m {module}"


def show_retry(
    retry_plan: RetryPlan, backfill_id: str, module: str | None, console: Console | None = None
) -> None:
    """Print the partitions that were launched again, the stages that are lost, and the next commands.

    `retry_plan` is the result of `retry_backfill` for the backfill `backfill_id`. `module` is the value of
    the user's option `-m`, or None; the printed commands repeat it. `console` is None for standard output.
    """
    console = console or _build_console()
    for relaunch in retry_plan.launches:
        manner = "to recompute all rows" if relaunch.rebuild else "again"
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
        asset = lost_stage.asset.to_user_string()
        advice = f"Recompute: {names}." if names else "Correct the cause before a rebuild."
        loss_message = (
            f"Stage {lost_stage.number}, {asset}, is {lost_stage.reason} It was not launched. {advice}"
        )
        console.print(loss_message, soft_wrap=True, highlight=False, markup=False)
    if any(lost.partitions for lost in retry_plan.lost_stages):
        command = f"branchlake backfill retry {backfill_id}{format_module_option(module)} --rebuild-lost"
        console.print(f"Recompute the lost stages: {command}", soft_wrap=True, highlight=False, markup=False)
    if retry_plan.launches:
        command = f"branchlake backfill status {backfill_id}{format_module_option(module)}"
        console.print(f"Next: {command}", soft_wrap=True, highlight=False, markup=False)


def format_unknown_partitions(request: BackfillRequest) -> str | None:
    """Return a sentence about the partitions whose code version is unknown; None without such partitions."""
    if not request.unknown_partitions:
        return None
    return (
        f"{format_count(len(request.unknown_partitions), 'other partition')} of"
        f" {request.key.to_user_string()} may be {request.why}, because the snapshots do not list all"
        f" partitions: {_shorten_names(request.unknown_partitions)}. Select them with --partition, or --all."
    )


def _format_partition(partition: str | None) -> str:
    return "all of it" if partition is None else partition


def _build_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


def _format_partitions(stage: Stage) -> str:
    if stage.partitions is None:
        return "all of it"
    return _shorten_names(stage.partitions)


def _shorten_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return (
        shown if len(names) <= _SHOWN else f"{shown} … {names[-1]} ({format_count(len(names), 'partition')})"
    )


def stage_to_dict(stage: Stage) -> dict[str, Any]:
    """Convert a stage to a JSON object."""
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
    """Convert the progress of a stage to a JSON object.

    The lists of failed and held partitions are empty for an asset without partitions.
    """
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
    """Convert a retry to a JSON object. `partitions` is null for an asset without partitions."""
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
    """Print the rows and sums of each stage before the backfill and now, with one line per partition.

    A last line has the total of a stage, unless the stage has exactly one partition. `console` is None for
    standard output.
    """
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE))
    table = Table(
        "stage", "asset", "partition", "rows before", "now", "change", "changed", "sums", show_edge=False
    )
    for stage in comparisons:
        rows = [(partition or "all of it", counts) for partition, counts in stage.partitions.items()]
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
    """Format the comparison of a whole stage in one line: rows before and now, changed rows and sums."""
    total = stage.total
    rows = f"rows {total.before.rows:,} → {total.after.rows:,}"
    sums = format_sums(total)
    return f"{rows}, {format_share(stage, total)} changed{f', sums: {sums}' if sums else ''}"


def format_share(stage: StageComparison, comparison: Comparison) -> str:
    """Format the share of changed rows, or of changed keys if the stage has keys, with the two counts.

    `comparison` is the comparison of one partition of the stage, or the total of the stage.
    """
    noun = "key" if stage.keys else "row"
    compared = format_count(comparison.compared_count, noun)
    return f"{comparison.share:.1%} ({comparison.changed_count:,} of {compared})"


def format_sums(comparison: Comparison) -> str:
    """Format the changed sums of a comparison as `column before → now`, separated by commas.

    Returns `unchanged` if no sum changed, and "" if there are no sums.
    """
    changed_sums = [
        f"{name} {_format_number(before)} → {_format_number(after)}"
        for name, (before, after) in comparison.sums.items()
        if _format_number(before) != _format_number(after)
    ]
    return ", ".join(changed_sums) or ("unchanged" if comparison.sums else "")


def _format_number(value: Number | None) -> str:
    # The last digits of a floating point sum depend on the order of the rows, so ten digits are shown.
    if value is None:
        return "none"
    return f"{value:,.10g}" if isinstance(value, float) else f"{value:,}"


def comparison_to_dict(stage: StageComparison) -> dict[str, Any]:
    """Convert the comparison of a stage to a JSON object.

    `partition` is null for an asset without partitions. Sums of decimals are strings.
    """
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
    """Approve the published results of a backfill for these assets; no assets means all.

    Raises ConfigurationError for an unknown id.
    """
    with open_instance(settings) as instance:
        return approve_results(instance, backfill_id, [AssetKey.from_user_string(asset) for asset in assets])


def approval_to_dict(approval: Approval) -> dict[str, Any]:
    """Convert an approval to a JSON object with the ids of approved runs and of unpublished runs."""
    return {
        "approved": [run.run_id for run in approval.approved_runs],
        "unpublished": [run.run_id for run in approval.unpublished_runs],
    }
