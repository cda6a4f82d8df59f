"""What `branchlake reap` did or would do, for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from branchlake_dagster.cleanup.reaper_rules import Reaping
from branchlake_dagster.cleanup.sweeper import Sweeping
from branchlake_dagster.wording import counted

_WIDE = 200
"""Columns when nobody watches: a line per branch, for grep."""


def show(reaped: Sequence[Reaping], swept: Sequence[Sweeping], *, dry_run: bool) -> None:
    """Two tables: branches with their decisions, and discarded states with what they free."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    would = "would be " if dry_run else ""
    if reaped:
        table = Table("branch", "run", "age", "heartbeat", "decision", "reason")
        for one in reaped:
            decision = f"{would}{one.action}" if one.delete else str(one.action)
            table.add_row(one.branch, str(one.state), _age(one.age), one.heartbeat, decision, one.reason)
        console.print(table)
    else:
        console.print("No run branches.")
    if swept:
        table = Table("discarded", "decision", "files", "size", "reason")
        for tag in swept:
            decision = f"{would}swept" if tag.done else "kept"
            table.add_row(tag.tag, decision, str(tag.files), f"{tag.size / 1e6:.1f} MB", tag.reason)
        console.print(table)
        freed = sum(tag.size for tag in swept)
        console.print(
            f"{counted(sum(tag.files for tag in swept), 'file')}, {freed / 1e6:.1f} MB {would}freed."
        )


def _age(age: timedelta | None) -> str:
    if age is None:
        return "?"
    hours, rest = divmod(int(age.total_seconds()), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
