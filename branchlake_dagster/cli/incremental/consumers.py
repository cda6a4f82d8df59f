"""`branchlake consumers`: tables that were computed from changes, and what they have left."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from branchlake_dagster.automation.progress import TableStanding, Unreadable, standings
from branchlake_dagster.history.change import ChangeSet
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted

_WIDE = 200
"""Columns when nobody watches: a line each, for grep."""
_LEGEND = """
left: published change of the input that the table has not consumed. Files are counted, no row is read: a file
that was rewritten for one row counts all its rows, before and after ("at most").
since: the age of the oldest change that is left. ahead: partitions that have consumed more than the others.
valid through: the table has all records up to this time. by run: the run that consumed last.
Why no run is launched: branchlake consumers --partitions -m MODULE""".lstrip()


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
        "unconsumed_rows_are": _meaning_of_rows(change) if change else None,
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
        console.print(_LEGEND, soft_wrap=True, highlight=False)


def _meaning_of_rows(change: ChangeSet) -> str:
    """What the number of rows counts: no row is read, so it comes from the files that were added and removed.

    `exact` of files that were only added. `at most`: a rewritten file counts its rows twice, as removed and
    as added. `with deleted values`: a value may have deleted any number of rows.
    """
    if change.only_appends:
        return "exact"
    return "with deleted values" if change.equality_deletes else "at most"


def _left(one: dict[str, Any]) -> str:
    rows, files = counted(one["unconsumed_rows"], "row"), counted(one["unconsumed_files"], "file")
    if not one["unconsumed_files"]:
        return "nothing"
    if one["unconsumed_rows_are"] == "with deleted values":
        return f"{rows} and deleted values in {files}"
    return f"{'' if one['unconsumed_rows_are'] == 'exact' else 'at most '}{rows} in {files}"
