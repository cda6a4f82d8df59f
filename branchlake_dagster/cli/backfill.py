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

from branchlake_dagster.automation.approve_backfill import Approval, approve
from branchlake_dagster.automation.backfill_comparison import (
    Comparison,
    Number,
    StageComparison,
    compare_stage,
    hash_before,
)
from branchlake_dagster.automation.backfill_launch import launch
from branchlake_dagster.automation.backfill_plan import Stage, plan, size_text
from branchlake_dagster.automation.backfill_progress import (
    Progress,
    progress,
    requested_partitions,
    require_backfill,
)
from branchlake_dagster.automation.backfill_retry import RetryPlan, launch_retry, lost_partitions, plan_retry
from branchlake_dagster.automation.incremental_sensor import DeclaredSensor, declared_sensors
from branchlake_dagster.automation.stale_partitions import stale_partitions
from branchlake_dagster.cli.dagster_home import dagster_home
from branchlake_dagster.cli.location import required_location
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import AssetGraph, backfills_tagged
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.wording import counted


@dataclass(frozen=True)
class Place:
    """The code location, the lake and the Dagster instance that a backfill is about."""

    graph: AssetGraph
    lake: LakehouseResource
    instance: DagsterInstance
    sensors: Mapping[AssetKey, DeclaredSensor] = field(default_factory=dict)
    """The incremental sensor of each asset that has one."""


@contextmanager
def place(module: str | None) -> Iterator[Place]:
    """The code location in a module, or that of the project in the working folder, with its lake's settings.

    Raises ConfigurationError.
    """
    location, chosen = required_location(module)
    repository, settings = location.repository, chosen.settings
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        sensors = declared_sensors(repository)
        yield Place(repository.asset_graph, LakehouseResource.of(settings), instance, sensors)


@dataclass(frozen=True)
class Asked:
    """Which partitions of which asset, and why."""

    key: AssetKey
    partitions: tuple[str, ...] | None
    why: str


def asked(where: Place, asset: str, partitions: Sequence[str], *, everything: bool) -> Asked | None:
    """What the options mean; None: nothing is stale. Raises ConfigurationError."""
    key = AssetKey.from_user_string(asset)
    if not where.graph.has(key):
        raise ConfigurationError(
            f"There is no asset {asset} in this code location.",
            hint="Write its key as on Dagster's page: namespace/table.",
            reason="unknown_asset",
            subject=asset,
        )
    if partitions or everything:
        given = None if everything else tuple(partitions)
        return Asked(key, given, "requested")
    stale = stale_partitions(where.graph, where.lake.lakehouse, key, instance=where.instance)
    if stale == ():
        return None
    return Asked(key, stale, f"code version {where.graph.get(key).code_version} is newer than they are")


def stages(where: Place, what: Asked) -> list[Stage]:
    """The plan."""
    return plan(
        where.graph, where.lake.lakehouse, what.key, what.partitions, why=what.why, instance=where.instance
    )


def run(where: Place, what: Asked, at: float, *, approval: bool = False) -> str:
    """Launch it; the backfill's id. With `approval`, each stage waits until the one before it is approved."""
    found = stages(where, what)[0]
    head = where.lake.lakehouse.nessie.reference(MAIN).hash
    return launch(
        where.graph,
        where.instance,
        what.key,
        found.partitions,
        why=what.why,
        base_hash=head,
        approval=approval,
        at=at,
    )


def status(where: Place, backfill_id: str) -> list[Progress]:
    """How far it has come. Raises ConfigurationError for an id that nobody knows."""
    retries = {key: one.policy.retries for key, one in where.sensors.items()}
    now = datetime.now(UTC)
    return progress(where.graph, where.lake, where.instance, backfill_id, now, retries=retries)


def is_computed(stage: Stage) -> bool:
    """Whether the backfill computes the stage, rather than naming it for somebody to launch."""
    return stage.by_itself or stage.number == 0


def compare(where: Place, backfill_id: str, asset: str | None = None) -> list[StageComparison]:
    """Compare each stage that is computed with its rows before the backfill, or only that of one asset.

    Raises ConfigurationError for an unknown id, and for an asset that the backfill does not compute, and
    EarlierStateLost.
    """
    state = require_backfill(where.instance, where.graph, backfill_id)
    lake = where.lake.lakehouse
    found = plan(where.graph, lake, state.key, state.partitions, why=state.why, instance=where.instance)
    computed = [one for one in found if is_computed(one)]
    if asset is not None:
        key = AssetKey.from_user_string(asset)
        names = ", ".join(one.asset.to_user_string() for one in computed)
        computed = [one for one in computed if one.asset == key]
        if not computed:
            raise ConfigurationError(
                f"Backfill {backfill_id} does not compute asset {asset}.", hint=f"It computes {names}."
            )
    before = hash_before(lake, state)
    return [compare_stage(where.graph, lake, one, before) for one in computed]


def compare_held(where: Place, backfill_id: str, found: Sequence[Progress]) -> list[StageComparison]:
    """Compare the stages whose results the stages that wait for approval would consume."""
    parents = {
        key for one in found if one.held_partitions for key in where.graph.get(one.stage.asset).parent_keys
    }
    names = [one.stage.asset for one in found if one.stage.asset in parents and is_computed(one.stage)]
    return [one for key in names for one in compare(where, backfill_id, key.to_user_string())]


def retry(where: Place, backfill_id: str, at: float, *, rebuild_lost: bool) -> RetryPlan:
    """Launch again what has failed, and with `rebuild_lost` what is lost; returns what was launched.

    Called again before Dagster's daemon has made the runs, it launches nothing twice. Raises
    ConfigurationError for an id that nobody knows.
    """
    found = status(where, backfill_id)
    again = backfills_tagged(where.instance, where.graph, {RunTag.RETRY_OF: backfill_id})
    requested = {
        key: requested_partitions(one for one in again if one.key == key)
        for key in {one.key for one in again}
    }
    lost = lost_partitions(where.graph, where.lake, where.instance, found, requested)
    planned = plan_retry(found, lost, rebuild_lost=rebuild_lost)
    launched = launch_retry(where.graph, where.instance, backfill_id, planned, at)
    return RetryPlan(launched, planned.lost)


_WIDE = 160
"""Columns when nobody watches."""
_SHOWN = 3


def show_plan(found: Sequence[Stage], console: Console | None = None) -> None:
    """The stages for people."""
    console = console or _console()
    table = Table("stage", "asset", "partitions", "holds now", "launches itself", "why", show_edge=False)
    for one in found:
        itself = "yes" if one.by_itself else "no"
        table.add_row(
            str(one.number), one.asset.to_user_string(), _keys(one), size_text(one), itself, one.why
        )
    console.print(table)


def show_status(found: Sequence[Progress], console: Console | None = None) -> None:
    """The progress for people."""
    console = console or _console()
    table = Table(
        "stage", "asset", "planned", "done", "running", "to do", "failed", "lost", "", show_edge=False
    )
    for one in found:
        counts = (one.planned, one.done, one.running, one.left, one.failed, one.lost)
        name = one.stage.asset.to_user_string()
        table.add_row(str(one.stage.number), name, *map(str, counts), escape(one.told))
    console.print(table)


def module_option(module: str | None) -> str:
    """The option `-m` of a command that is shown as the next one; nothing if the project was found."""
    return "" if module is None else f" -m {module}"


def show_retry(done: RetryPlan, backfill_id: str, module: str | None, console: Console | None = None) -> None:
    """What was launched again, and what stays lost, for people."""
    console = console or _console()
    for relaunch in done.launches:
        how = "anew, all of their rows" if relaunch.rebuild else "again"
        names = ", ".join(_partition(one) for one in relaunch.partitions)
        asset = relaunch.asset.to_user_string()
        text = f"Stage {relaunch.number}, {asset}: launched {how}: {names} (backfill {relaunch.backfill})."
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    if not done.launches:
        console.print(f"Backfill {backfill_id} has no failed partitions to launch again.", soft_wrap=True)
    for lost in done.lost:
        names = ", ".join(_partition(one) for one in lost.partitions)
        what = f"to compute anew: {names}" if names else "a rebuild does not help before this is corrected"
        told = (
            f"Stage {lost.number}, {lost.asset.to_user_string()}, is {lost.why} It was not launched; {what}."
        )
        console.print(told, soft_wrap=True, highlight=False, markup=False)
    if any(lost.partitions for lost in done.lost):
        command = f"branchlake backfill retry {backfill_id}{module_option(module)} --rebuild-lost"
        console.print(f"Compute them anew: {command}", soft_wrap=True, highlight=False, markup=False)
    if done.launches:
        command = f"branchlake backfill status {backfill_id}{module_option(module)}"
        console.print(f"Next: {command}", soft_wrap=True, highlight=False, markup=False)


def _partition(name: str | None) -> str:
    return "all of it" if name is None else name


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


def _keys(stage: Stage) -> str:
    if stage.partitions is None:
        return "all of it"
    names = stage.partitions
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} … {names[-1]} ({counted(len(names), 'partition')})"


def stage_dict(one: Stage) -> dict[str, Any]:
    """For JSON."""
    return {
        "stage": one.number,
        "asset": one.asset.to_user_string(),
        "partitions": None if one.partitions is None else list(one.partitions),
        "files": one.files,
        "rows": one.rows,
        "bytes": one.bytes,
        "by_itself": one.by_itself,
        "why": one.why,
    }


def progress_dict(one: Progress) -> dict[str, Any]:
    """For JSON."""
    return {
        "stage": one.stage.number,
        "asset": one.stage.asset.to_user_string(),
        "planned": one.planned,
        "done": one.done,
        "running": one.running,
        "left": one.left,
        "failed": one.failed,
        "lost": one.lost,
        "failed_partitions": [name for name in one.failed_partitions if name is not None],
        "held": len(one.held_partitions),
        "held_partitions": [name for name in one.held_partitions if name is not None],
        "approved_as": list(one.approved_as),
        "told": one.told,
    }


def retry_dict(done: RetryPlan) -> dict[str, Any]:
    """For JSON; an asset without partitions has null for them."""
    return {
        "launched": [
            {
                "stage": one.number,
                "asset": one.asset.to_user_string(),
                "partitions": _names(one.partitions),
                "rebuild": one.rebuild,
                "backfill": one.backfill,
            }
            for one in done.launches
        ],
        "lost": [
            {
                "stage": one.number,
                "asset": one.asset.to_user_string(),
                "partitions": _names(one.partitions),
                "told": one.why,
            }
            for one in done.lost
        ],
    }


def _names(partitions: Sequence[str | None]) -> list[str | None] | None:
    return None if tuple(partitions) == (None,) else list(partitions)


def show_comparisons(found: Sequence[StageComparison], console: Console | None = None) -> None:
    """The rows and sums of each stage before and now, a line for each partition."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE))
    table = Table(
        "stage", "asset", "partition", "rows before", "now", "change", "changed", "sums", show_edge=False
    )
    for stage in found:
        lines = [(partition or "all of it", one) for partition, one in stage.partitions.items()]
        if len(lines) != 1:
            lines.append((f"total of {counted(len(lines), 'partition')}", stage.total))
        for name, one in lines:
            table.add_row(
                str(stage.number),
                stage.asset.to_user_string(),
                escape(name),
                f"{one.before.rows:,}",
                f"{one.after.rows:,}",
                f"{one.difference:+,}",
                share_text(stage, one),
                escape(sums_text(one)),
            )
    console.print(table)


def total_text(stage: StageComparison) -> str:
    """The total of a stage in a line."""
    whole = stage.total
    rows = f"rows {whole.before.rows:,} → {whole.after.rows:,}"
    sums = sums_text(whole)
    return f"{rows}, {share_text(stage, whole)} changed{f', sums: {sums}' if sums else ''}"


def share_text(stage: StageComparison, one: Comparison) -> str:
    """The share of changed rows, or of changed keys."""
    what = "key" if stage.keys else "row"
    return f"{one.share:.1%} ({one.changed:,} of {counted(one.compared, what)})"


def sums_text(one: Comparison) -> str:
    """The sums that changed, by column."""
    changed = [
        f"{name} {_number(before)} → {_number(after)}"
        for name, (before, after) in one.sums.items()
        if _number(before) != _number(after)
    ]
    return ", ".join(changed) or ("unchanged" if one.sums else "")


def _number(value: Number | None) -> str:
    """Ten digits of a floating point sum: the last ones depend on the order of the rows."""
    if value is None:
        return "none"
    return f"{value:,.10g}" if isinstance(value, float) else f"{value:,}"


def comparison_dict(found: StageComparison) -> dict[str, Any]:
    """For JSON. The partition of an asset without partitions is null, decimal sums are strings."""
    return {
        "stage": found.number,
        "asset": found.asset.to_user_string(),
        "keys": list(found.keys),
        "total": _dict(found.total),
        "partitions": [{"partition": name} | _dict(one) for name, one in found.partitions.items()],
    }


def _dict(one: Comparison) -> dict[str, Any]:
    sums = {name: {"before": _plain(a), "after": _plain(b)} for name, (a, b) in one.sums.items()}
    return {
        "rows_before": one.before.rows,
        "rows_after": one.after.rows,
        "changed": one.changed,
        "compared": one.compared,
        "share": one.share,
        "sums": sums,
    }


def _plain(value: Number | None) -> int | float | str | None:
    return str(value) if isinstance(value, Decimal) else value


def approve_backfill(settings: Settings, backfill_id: str, assets: Sequence[str]) -> Approval:
    """Approve what is on `main` of a backfill. Raises ConfigurationError for an unknown id."""
    dagster_home(settings)
    with DagsterInstance.get() as instance:
        return approve(instance, backfill_id, [AssetKey.from_user_string(one) for one in assets])


def approval_dict(found: Approval) -> dict[str, Any]:
    """For JSON: the ids of the runs."""
    return {
        "approved": [run.run_id for run in found.approved],
        "unpublished": [run.run_id for run in found.unpublished],
    }
