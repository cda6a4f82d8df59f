"""`branchlake consumers`: tables that were computed from changes, and what they have left."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from branchlake_dagster.incremental.standings import TableStanding, Unreadable, standings
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted

_WIDE = 200
"""Columns when nobody watches: a line each, for grep."""


def gather(settings: Settings) -> dict[str, Any]:
    """Each consumer and input with its position and what is left; starts nothing."""
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    now = datetime.now(UTC)
    found = list(standings(lake))
    return {
        "consumers": [_told(one, now) for one in found if isinstance(one, TableStanding)],
        "unreadable": [
            {"table": one.table, "trouble": one.trouble} for one in found if isinstance(one, Unreadable)
        ],
    }


def _told(one: TableStanding, now: datetime) -> dict[str, Any]:
    change, age = one.change, one.oldest_s(now)
    return {
        "table": one.table,
        "input": one.input,
        "run_id": one.run_id,
        "snapshot": one.position.snapshot_id,
        "partitions_ahead": one.ahead,
        "unconsumed_files": change.files_changed if change else None,
        "unconsumed_rows": change.rows_changed if change else None,
        "unconsumed_age_s": None if age is None else round(age, 1),
        "valid_through": None if one.valid_through is None else one.valid_through.isoformat(),
        "trouble": one.trouble,
    }


def show(found: dict[str, Any], console: Console | None = None) -> None:
    """The same for people."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=_WIDE))
    if not found["consumers"] and not found["unreadable"]:
        console.print("No table on main was computed from changes.")
    else:
        columns = ("table", "input", "left", "since", "ahead", "valid through", "by run")
        table = Table(*columns, show_edge=False, pad_edge=False)
        for one in found["consumers"]:
            age = one["unconsumed_age_s"]
            table.add_row(
                one["table"],
                one["input"],
                escape(one["trouble"] or _left(one)),
                "" if age is None else f"{age:,.0f} s",
                str(one["partitions_ahead"] or ""),
                one["valid_through"] or "",
                one["run_id"],
            )
        for one in found["unreadable"]:
            table.add_row(one["table"], "?", escape(one["trouble"]), "", "", "", "")
        console.print(table)


def _left(one: dict[str, Any]) -> str:
    rows, files = one["unconsumed_rows"], one["unconsumed_files"]
    return f"{counted(rows, 'row')} in {counted(files, 'file')}" if files else "nothing"
