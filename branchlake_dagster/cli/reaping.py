"""The output of `branchlake reap`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from branchlake_dagster.cleanup.reaper_rules import Reaping
from branchlake_dagster.cleanup.sweeper import Sweeping
from branchlake_dagster.wording import format_count

_WIDE = 200
"""Width of a table, in characters, if the output is not a terminal: one line per branch, for grep."""


def show_reaping(reapings: Sequence[Reaping], sweepings: Sequence[Sweeping], *, dry_run: bool) -> None:
    """Print a table of branches with their decisions, and a table of discarded tags with their files."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    would = "would be " if dry_run else ""
    if reapings:
        table = Table("branch", "run", "age", "heartbeat", "decision", "reason")
        for reaping in reapings:
            decision = f"{would}{reaping.action}" if reaping.deletes_branch else str(reaping.action)
            table.add_row(
                reaping.branch,
                str(reaping.state),
                _format_age(reaping.age),
                reaping.heartbeat,
                decision,
                reaping.reason,
            )
        console.print(table)
    else:
        console.print("No run branches.")
    if sweepings:
        table = Table("discarded", "decision", "files", "size", "reason")
        for sweeping in sweepings:
            decision = f"{would}swept" if sweeping.done else "kept"
            table.add_row(
                sweeping.tag, decision, str(sweeping.files), f"{sweeping.size / 1e6:.1f} MB", sweeping.reason
            )
        console.print(table)
        freed_bytes = sum(tag.size for tag in sweepings)
        console.print(
            f"{format_count(sum(tag.files for tag in sweepings), 'file')}, {freed_bytes / 1e6:.1f} MB"
            f" {would}freed."
        )


def _format_age(age: timedelta | None) -> str:
    if age is None:
        return "?"
    hours, rest = divmod(int(age.total_seconds()), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
