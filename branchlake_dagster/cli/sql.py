"""The command `branchlake sql`, which queries the lake and writes a table, CSV or Arrow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP, load_command_settings

_FORMATS = ("table", "csv", "arrow")


@click.command()
@click.argument("query", required=False)
@click.option("-m", "--module", help=MODULE_HELP)
@click.option("--branch", help="A branch or tag instead of main; also name@hash.")
@click.option(
    "--run",
    "run_id",
    help="The id of a run or its start: reads its branch, its discarded tag or its publication.",
)
@click.option("--at", help="main at a time (2026-11-20T12:00, UTC without a zone) or at a commit hash.")
@click.option("--format", "kind", type=click.Choice(_FORMATS), default="table", show_default=True)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write to this file instead of the terminal.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Maximum rows of a table; 0: all. CSV and Arrow always write all.",
)
def sql(
    query: str | None,
    module: str | None,
    branch: str | None,
    run_id: str | None,
    at: str | None,
    kind: str,
    output: Path | None,
    rows: int,
) -> None:
    """Query the lake in DuckDB's SQL.

    Without QUERY, lists the tables. Starts nothing and changes nothing.

    Tables are written namespace.table. "-" as QUERY reads it from standard input.

    \b
    branchlake sql "SELECT count(*) FROM shop.prices"
    branchlake sql "FROM shop.prices WHERE eur <= 0" --run a8960950
    branchlake sql "FROM shop.prices" --at 2026-11-20T12:00 --format csv > prices.csv
    """
    from branchlake_dagster.cli import output as writers
    from branchlake_dagster.query import connect

    lake = connect(load_command_settings(module).settings)
    selection: dict[str, Any] = {"branch": branch, "run": run_id, "at": at}
    if query is None:
        ref_selection = lake.find_state(**selection)
        for name in lake.tables(branch=ref_selection.ref):
            click.echo(name)
        click.echo(f"Tables at {ref_selection.label}.", err=True)
        return
    statement = sys.stdin.read() if query == "-" else query
    with lake.sql(statement, **selection) as result:
        if kind == "table":
            writers.write_table(result, rows, output)
        else:
            write_all = writers.write_csv if kind == "csv" else writers.write_arrow
            write_all(result, output)
