"""The comparison of a backfill's stages for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from branchlake_dagster.automation.backfill_comparison import Comparison, Number, StageComparison
from branchlake_dagster.wording import counted

_WIDE = 160
"""Columns when nobody watches."""


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
