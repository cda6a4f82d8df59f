"""A backfill's plan and progress for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from branchlake_dagster.incremental.backfill.plan import Stage, size_text
from branchlake_dagster.incremental.backfill.progress import Progress
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
    table = Table("stage", "asset", "planned", "done", "running", "to do", "failed", "", show_edge=False)
    for one in found:
        counts = (one.planned, one.done, one.running, one.left, one.failed)
        name = one.stage.asset.to_user_string()
        table.add_row(str(one.stage.number), name, *map(str, counts), one.told)
    console.print(table)


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
        "told": one.told,
    }
