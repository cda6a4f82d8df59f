"""The commands `branchlake maintain …`: compaction, expiry of snapshots, and collection of files.

The commands import their dependencies when they run.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP, load_command_settings
from branchlake_dagster.cli.option_types import FiniteRange
from branchlake_dagster.cli.registry import print_progress

if TYPE_CHECKING:
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.maintenance.maintenance_result import MaintenancePart
    from branchlake_dagster.maintenance.maintenance_run import MaintenanceOptions
    from branchlake_dagster.maintenance.summary import Section

_WIDE = 160
"""Width of a table in characters if the output is not a terminal."""
_PARTS = ("compaction", "expiry", "collection")

_module_option = click.option("-m", "--module", help=MODULE_HELP)
_json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
_tables_argument = click.argument("tables", nargs=-1, metavar="[TABLE]...")
_only_option = click.option(
    "--only", type=click.Choice(_PARTS), multiple=True, help="Only this part. May be given more than once."
)
_strategy_option = click.option(
    "--strategy",
    type=click.Choice(("bin_pack", "sort", "z_order")),
    default="bin_pack",
    show_default=True,
    help="How a compaction arranges rows. sort and z_order rewrite all files of the tables.",
)
_columns_option = click.option("--columns", help="Columns of sort and z_order, separated by commas.")
_hot_option = click.option("--hot", is_flag=True, help="Also compact partitions that were just written.")
_minutes_option = click.option(
    "--minutes",
    type=FiniteRange(min=0, min_open=True),
    help="Minutes after which a compaction, and then a collection, begins no further work.",
)


@click.group()
def maintain() -> None:
    """Compact tables, expire snapshots, and delete files that nothing can read."""


@maintain.command()
@_tables_argument
@_module_option
@_only_option
@_strategy_option
@_columns_option
@_hot_option
@_json_option
def plan(
    tables: tuple[str, ...],
    module: str | None,
    only: tuple[str, ...],
    strategy: str,
    columns: str | None,
    hot: bool,
    as_json: bool,
) -> None:
    """Show what a run would compact, expire and plan to delete. Change nothing.

    Without TABLEs, all tables of main. The collection is always about the whole lake; with TABLEs, it is left
    out unless you ask for it.
    """
    from branchlake_dagster.maintenance.maintenance_run import plan_maintenance
    from branchlake_dagster.maintenance.summary import list_plan_sections, plan_to_json

    lake = _open_lake(module)
    planned = plan_maintenance(
        lake,
        _choose_parts(only, tables),
        tables=tables or None,
        options=_build_options(strategy, columns, hot, None),
        progress=print_progress,
    )
    _show(list_plan_sections(planned), plan_to_json(planned), as_json)
    if planned.errors:
        raise click.exceptions.Exit(1)


@maintain.command()
@_tables_argument
@_module_option
@_only_option
@_strategy_option
@_columns_option
@_hot_option
@_minutes_option
@click.option(
    "--adopt-journal",
    is_flag=True,
    help="Continue after a restore of Nessie: files of lost commits are planned.",
)
@_json_option
def run(
    tables: tuple[str, ...],
    module: str | None,
    only: tuple[str, ...],
    strategy: str,
    columns: str | None,
    hot: bool,
    minutes: float | None,
    adopt_journal: bool,
    as_json: bool,
) -> None:
    """Compact tables, expire snapshots, and collect files, beside running pipelines.

    Without TABLEs, all tables of main. The collection is always about the whole lake; with TABLEs, it is left
    out unless you ask for it. It deletes only files that an earlier run planned at least a day ago.

    A run may be interrupted and started again.
    """
    from branchlake_dagster.maintenance.maintenance_result import MaintenancePart
    from branchlake_dagster.maintenance.maintenance_run import run_maintenance
    from branchlake_dagster.maintenance.summary import list_result_sections, result_to_json

    parts = _choose_parts(only, tables)
    if adopt_journal and MaintenancePart.COLLECTION not in parts:
        raise click.UsageError(
            "--adopt-journal concerns the collection, which this run leaves out. Add --only collection, or"
            " leave out the tables."
        )
    lake = _open_lake(module, changes=True)
    result = run_maintenance(
        lake,
        parts,
        tables=tables or None,
        options=_build_options(strategy, columns, hot, minutes),
        adopt_journal=adopt_journal,
        progress=print_progress,
    )
    _show(list_result_sections(result), result_to_json(result), as_json)
    if result.has_failed:
        raise click.exceptions.Exit(1)


@maintain.command()
@_module_option
@_json_option
def status(module: str | None, as_json: bool) -> None:
    """Show the plans whose files are not deleted yet, and the last collection."""
    from branchlake_dagster.garbage_collection.collector import FileCollector
    from branchlake_dagster.garbage_collection.summary import (
        PLAN_HEADERS,
        format_size,
        list_plan_rows,
        status_to_json,
    )
    from branchlake_dagster.maintenance.maintenance_result import MaintenancePart
    from branchlake_dagster.maintenance.summary import Section

    journal_status = FileCollector.of_lake(_open_lake(module)).status()
    started = journal_status.last_pass_started_at
    last_pass = started.isoformat(timespec="minutes") if started else "never"
    is_open = started is not None and journal_status.last_pass_ended_at is None
    sentence = (
        f"Last collection: {last_pass}{' (running, or interrupted)' if is_open else ''}."
        f" Deleted in the last 90 days: {journal_status.deleted_files:,} files,"
        f" {format_size(journal_status.deleted_bytes)}."
    )
    rows = list_plan_rows(journal_status.open_plans)
    section = Section(MaintenancePart.COLLECTION, sentence, PLAN_HEADERS, rows)
    _show([section], status_to_json(journal_status), as_json)


@maintain.command()
@_module_option
def metrics(module: str | None) -> None:
    """Print counters of the maintenance in Prometheus' text format.

    They count the runs that use this state folder. A scheduled call can write them to a file for the textfile
    collector of Prometheus' node exporter.
    """
    from branchlake_dagster.maintenance.metrics import load_metrics

    click.echo(load_metrics(load_command_settings(module).settings.state_dir).format_text(), nl=False)


@maintain.command()
@click.argument("what")
@_module_option
@_json_option
def explain(what: str, module: str | None, as_json: bool) -> None:
    """Show what keeps a file, or whether an earlier state of a table can be read.

    WHAT is the path of a file, or namespace.table@2026-11-20T12:00. The path of a local file may be relative
    to the present folder.
    """
    from branchlake_dagster.catalog.stored_files import is_local
    from branchlake_dagster.garbage_collection.collector import FileCollector
    from branchlake_dagster.garbage_collection.explanation import FileExplanation, is_moment
    from branchlake_dagster.garbage_collection.summary import (
        HOLDER_HEADERS,
        explanation_to_json,
        format_explanation,
        list_holder_rows,
    )
    from branchlake_dagster.maintenance.maintenance_result import MaintenancePart
    from branchlake_dagster.maintenance.summary import Section

    lake = _open_lake(module)
    # A missing file is looked up in the same way: a table may need it.
    is_relative = is_local(lake.settings.warehouse_uri) and ":" not in what and not is_moment(what)
    if is_relative or os.path.exists(what):  # noqa: PTH110 - Path raises OSError for a long name
        what = str(Path(what).absolute())
    explanation = FileCollector.of_lake(lake, progress=print_progress).explain(what)
    rows = list_holder_rows(explanation) if isinstance(explanation, FileExplanation) else ()
    section = Section(MaintenancePart.COLLECTION, format_explanation(explanation), HOLDER_HEADERS, rows)
    _show([section], explanation_to_json(explanation), as_json)


def _open_lake(module: str | None, *, changes: bool = False) -> Lakehouse:
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse

    loaded_settings = load_command_settings(module)
    settings = loaded_settings.require_named_lake() if changes else loaded_settings.settings
    lake = Lakehouse(settings, say=print_progress, start=False)
    lake.endpoints(spark=False)
    return lake


def _choose_parts(only: Sequence[str], tables: Sequence[str]) -> tuple[MaintenancePart, ...]:
    from branchlake_dagster.maintenance.maintenance_result import ALL_PARTS, MaintenancePart

    if only:
        return tuple(MaintenancePart(name) for name in only)
    return (
        tuple(part for part in ALL_PARTS if part is not MaintenancePart.COLLECTION) if tables else ALL_PARTS
    )


def _build_options(
    strategy: str, columns: str | None, hot: bool, minutes: float | None
) -> MaintenanceOptions:
    from branchlake_dagster.compaction.compaction_plan import CompactionOptions, Strategy
    from branchlake_dagster.maintenance.maintenance_run import MaintenanceOptions

    terms = re.split(r",(?![^()]*\))", columns or "")  # not at the comma of `bucket(8, id)`
    names = tuple(term.strip() for term in terms if term.strip())
    compaction = CompactionOptions(
        strategy=Strategy(strategy),
        sort_columns=names,
        include_hot=hot,
        include_healthy=strategy != Strategy.BIN_PACK,
    )
    return MaintenanceOptions(compaction, max_seconds=None if minutes is None else minutes * 60)


def _show(sections: Sequence[Section], as_object: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        click.echo(json.dumps(as_object, indent=2))
        return
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    for section in sections:
        click.echo(f"{section.part.capitalize()}: {section.sentence}")
        if section.rows:
            table = Table(*section.headers)
            for row in section.rows:
                table.add_row(*map(escape, row))
            console.print(table)
