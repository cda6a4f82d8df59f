"""The commands `branchlake columns drop` and `rename`. A command imports its dependencies when it runs."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP, load_command_settings


@click.group()
def columns() -> None:
    """Drop or rename columns of a published table.

    The change is made on a branch and published to main in one commit. No data file is written.
    """


module_option = click.option("-m", "--module", help=MODULE_HELP)
dry_run_option = click.option("--dry-run", is_flag=True, help="Only list the dependents of the table.")
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable.")


@columns.command()
@click.argument("table")
@click.argument("columns", nargs=-1, required=True, metavar="COLUMN...")
@module_option
@dry_run_option
@json_option
def drop(table: str, columns: tuple[str, ...], module: str | None, dry_run: bool, as_json: bool) -> None:
    """Drop columns of TABLE (namespace.name) on main.

    Older snapshots and data files keep the values. A column that belongs to the table's partitions, sort
    order, identifier fields or upsert keys is refused.
    """
    _change_columns(table, columns, None, module, dry_run=dry_run, as_json=as_json)


@columns.command()
@click.argument("table")
@click.argument("column")
@click.argument("new_name")
@module_option
@dry_run_option
@json_option
def rename(table: str, column: str, new_name: str, module: str | None, dry_run: bool, as_json: bool) -> None:
    """Rename COLUMN of TABLE (namespace.name) on main.

    Also change the code of its asset: a frame with the old name no longer fits the table.
    """
    _change_columns(table, (column,), new_name, module, dry_run=dry_run, as_json=as_json)


def _change_columns(
    table: str,
    columns: tuple[str, ...],
    new_name: str | None,
    module: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from branchlake_dagster.automation import progress
    from branchlake_dagster.automation.progress import UnreadableTable
    from branchlake_dagster.cli.dagster_home import open_instance
    from branchlake_dagster.errors import ConfigurationError
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse
    from branchlake_dagster.nessie.model import ContentKey
    from branchlake_dagster.publication.column_changes import (
        ColumnChange,
        change_columns,
        load_main_table,
        validate_column_change,
    )
    from branchlake_dagster.runs.branch_owner import load_instance_id
    from branchlake_dagster.wording import format_names

    loaded_settings = load_command_settings(module)
    settings = loaded_settings.settings if dry_run else loaded_settings.require_named_lake()
    try:
        key = ContentKey.from_path(table)
    except ValueError as error:
        raise ConfigurationError(
            f"{table!r} is not a table name.", hint="Write the name as namespace.name."
        ) from error
    identifier = key.elements if len(key) > 1 else (settings.default_namespace, *key.elements)
    change = ColumnChange(identifier, columns, new_name)
    lake = Lakehouse(settings, start=False)
    lake.endpoints(spark=False)
    tables = [*progress.iter_consuming_tables(lake, change)]
    unreadable_tables = [item for item in tables if isinstance(item, UnreadableTable)]
    dependent_objects = [item for item in tables if not isinstance(item, UnreadableTable)]
    used_columns: set[str] = set()
    for location in loaded_settings.locations:
        graph = location.repository.asset_graph
        dependent_objects += progress.iter_code_dependents(graph, change, settings.default_namespace)
        used_columns |= progress.list_asset_columns(graph, change, settings.default_namespace)
    validate_column_change(change, load_main_table(lake, change).metadata, used_columns)
    if not as_json:
        for dependent in dependent_objects:
            consumption = (
                f", which consumes its changes by {format_names('column', dependent.declares)}"
                if dependent.declares
                else ""
            )
            click.echo(f"Depends on {change.table}: {dependent.kind} {dependent.name}{consumption}")
        for unreadable_table in unreadable_tables:
            click.echo(
                f"May depend on {change.table}: table {unreadable_table.table}, {unreadable_table.trouble}"
            )
    commit = None
    if not dry_run:
        with open_instance(settings) as instance:
            commit = change_columns(
                lake, change, instance=load_instance_id(instance), required_columns=used_columns
            )
    if as_json:
        result = {
            "table": change.table,
            "columns": list(columns),
            "new_name": new_name,
            "publication": commit,
        }
        dependents_result = {
            "dependents": [item.as_dict() for item in dependent_objects],
            "unreadable": [asdict(item) for item in unreadable_tables],
        }
        click.echo(json.dumps({**result, **dependents_result}, indent=2))
    elif commit is None:
        click.echo("Nothing was changed.")
    else:
        verb = "Dropped" if new_name is None else "Renamed"
        to = "" if new_name is None else f" to {new_name}"
        click.echo(
            f"{verb} {format_names('column', columns)} of table {change.table}{to}"
            f" in commit {commit[:16]} on main."
        )
