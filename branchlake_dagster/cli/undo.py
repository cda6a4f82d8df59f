"""The commands `branchlake undo`, which undoes a publication, and `branchlake undrop`.

The commands import their dependencies when they run.
"""

from __future__ import annotations

import json
import time

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP, load_command_settings
from branchlake_dagster.cli.registry import print_progress
from branchlake_dagster.errors import ConfigurationError, format_first_line

_WIDE = 160
"""Width of a table in characters if the output is not a terminal."""


@click.command()
@click.argument("publication")
@click.option("-m", "--module", help=MODULE_HELP)
@click.option("--with-followers", is_flag=True, help="Also undo later publications that build on it.")
@click.option(
    "--keep-positions",
    is_flag=True,
    help="Do not read again what it had read: records of topics, changes of other tables.",
)
@click.option(
    "--recompute",
    is_flag=True,
    help="Also request backfills of assets that read the undone rows and do not recompute themselves.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be undone.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def undo(
    publication: str,
    module: str | None,
    with_followers: bool,
    keep_positions: bool,
    recompute: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Undo PUBLICATION in all of its tables, and keep later publications.

    PUBLICATION is a run's id or a commit on main, or the beginning of one of them. `branchlake status` lists
    the newest ones.

    One commit on main gives each table the rows that it would have without the publication. Created tables
    are dropped, dropped ones come back, and positions of consumers and ingestions move back. Reads and writes
    metadata only. Assets that consumed the publication get the undo as a change.

    If later publications changed the same rows, nothing is undone, and the message names them.

    Other tables that were computed from the undone rows are listed, with what computes them again.
    """
    from rich.table import Table

    from branchlake_dagster.cli.consoles import open_console
    from branchlake_dagster.cli.dagster_home import open_instance
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.undo.find_publication import find_publication
    from branchlake_dagster.undo.publication_undo import PublicationUndo
    from branchlake_dagster.undo.recomputation import report_stale_readers, request_recomputation
    from branchlake_dagster.undo.report import report_undo
    from branchlake_dagster.undo.stale_readers import StaleReaders, find_stale_readers
    from branchlake_dagster.undo.summary import (
        HEADERS,
        READER_HEADERS,
        format_readers,
        format_undo,
        list_columns,
        list_reader_columns,
        undo_to_json,
    )

    loaded_settings = load_command_settings(module)
    settings = loaded_settings.settings if dry_run else loaded_settings.require_named_lake()
    lake = Lakehouse(settings, say=print_progress, start=False)
    lake.endpoints(spark=False)
    undoer = PublicationUndo.of_lake(lake)
    found = find_publication(lake.nessie, publication)
    repositories = [location.repository for location in loaded_settings.locations]
    report_error: Exception | None = None
    stale, backfills = StaleReaders(), dict[str, str]()
    if dry_run:
        result = undoer.plan(found, with_followers=with_followers, keep_positions=keep_positions)
        with open_instance(settings, read_only=True) as instance:
            if not result.dependencies:
                stale = find_stale_readers(lake, result, repositories, instance)
    else:
        with open_instance(settings) as instance:  # before the commit, so that an undo can be reported
            result = undoer.undo(found, with_followers=with_followers, keep_positions=keep_positions)
            try:
                report_undo(instance, lake, result)
                if result.commit is not None:
                    stale = find_stale_readers(lake, result, repositories, instance)
                report_stale_readers(instance, result, stale)
                if recompute:
                    backfills = request_recomputation(
                        instance, result, stale, repositories, requested_at=time.time()
                    )
            except Exception as error:  # noqa: BLE001 - the undo is done, whatever the report failed by
                report_error = error
    if as_json:
        click.echo(json.dumps(undo_to_json(result, stale, backfills), indent=2))
        _require_report(report_error, publication)
        return
    console = open_console(_WIDE)
    if result.tables:
        table = Table(*HEADERS)
        for undone_table in result.tables:
            table.add_row(*list_columns(undone_table))
        console.print(table)
    click.echo(format_undo(result, dry_run=dry_run))
    if stale.readers:
        table = Table(*READER_HEADERS)
        for reader in stale.readers:
            table.add_row(*list_reader_columns(reader, backfills.get(reader.table)))
        console.print(table)
    if not result.dependencies and (message := format_readers(stale, backfills)):
        click.echo(message)
    _require_report(report_error, publication)


def _require_report(error: Exception | None, publication: str) -> None:
    """Raise ClickException if the undo was committed, but not reported to Dagster because of `error`."""
    if error is not None:
        raise click.ClickException(
            f"The undo is done, but Dagster does not show it yet: {format_first_line(error)}. Repeat"
            f" `branchlake undo {publication}` to report it; nothing is undone twice."
        ) from error


@click.command()
@click.argument("table")
@click.option("-m", "--module", help=MODULE_HELP)
def undrop(table: str, module: str | None) -> None:
    """Bring back the dropped TABLE, namespace.name, as it was before it was dropped.

    The files of a dropped table stay for BRANCHLAKE_HISTORY_HORIZON_DAYS, 30 days by default.
    """
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.nessie.model import ContentKey
    from branchlake_dagster.undo.undrop import undrop_table

    try:
        ContentKey.from_path(table)
    except ValueError as error:
        raise ConfigurationError(
            f"{table!r} is not a table name.", hint="Write the name as namespace.name."
        ) from error
    settings = load_command_settings(module).require_named_lake()
    lake = Lakehouse(settings, say=print_progress, start=False)
    lake.endpoints(spark=False)
    restored = undrop_table(lake, table)
    click.echo(f"{table} is back as {restored.commit}, as it was at {restored.from_commit}.")
