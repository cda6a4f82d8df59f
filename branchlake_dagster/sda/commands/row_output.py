"""Print rows of the pipeline's tables as a table, CSV or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table

from branchlake_dagster.sda.alerts.log_entries import entry_to_json

CSV_TIME = "%Y-%m-%dT%H:%M:%S%.6fZ"
_WIDE = 10_000
"""Width of a table, in characters, if the output is not a terminal: one line per row, for grep."""


def print_table(table: Table) -> None:
    """Print a table. A terminal's width limits it; elsewhere each row is one line."""
    console = Console()
    console.print(table) if console.is_terminal else Console(width=_WIDE).print(table)


def print_csv(rows: pl.DataFrame) -> None:
    """Print rows as CSV. Times are in UTC."""
    sys.stdout.write(rows.write_csv(datetime_format=CSV_TIME))


def print_csv_header(columns: Sequence[str]) -> None:
    """Print the first line of a CSV, for rows of a table that does not exist yet."""
    print_csv(pl.DataFrame(schema=dict.fromkeys(columns, pl.String)))


def rows_to_json(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return rows as values for JSON. Times are ISO 8601 in UTC."""
    return [entry_to_json(row) for row in rows.iter_rows(named=True)]
