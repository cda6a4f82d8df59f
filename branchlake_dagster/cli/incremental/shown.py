"""A backfill's plan and progress for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from branchlake_dagster.automation.backfill_plan import Stage, size_text
from branchlake_dagster.automation.backfill_progress import Progress
from branchlake_dagster.automation.backfill_retry import RetryPlan
from branchlake_dagster.wording import counted

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
    for launch in done.launches:
        how = "anew, all of their rows" if launch.rebuild else "again"
        names = ", ".join(_partition(one) for one in launch.partitions)
        asset = launch.asset.to_user_string()
        text = f"Stage {launch.number}, {asset}: launched {how}: {names} (backfill {launch.backfill})."
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
