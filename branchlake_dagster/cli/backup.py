"""The commands `branchlake backup` and `branchlake restore`.

The commands import their dependencies when they run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP, load_command_settings
from branchlake_dagster.cli.option_types import NamedFolder
from branchlake_dagster.cli.registry import print_progress

if TYPE_CHECKING:
    from branchlake_dagster.settings import Settings

_FOLDER = NamedFolder()


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option("-m", "--module", help=MODULE_HELP)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    help="Delete all but the newest KEEP backups of this lake in FOLDER.",
)
@click.option("--no-verify", is_flag=True, help="Do not read the tables of the backup.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def backup(folder: Path, module: str | None, keep: int | None, no_verify: bool, as_json: bool) -> None:
    """Save the embedded lake in FOLDER while runs go on.

    Each backup is a new folder with Nessie's store, the warehouse, Dagster's home and landing files. Files
    that did not change are linked to the previous backup. Nessie is suspended for some milliseconds.

    Then Nessie is started on a copy of the backup, and every table of main is read there.

    Not saved: topics of the embedded Kafka, tokens and logs.
    """
    from branchlake_dagster.backup.lake_backup import LakeBackup
    from branchlake_dagster.cli.dagster_home import dagster_home_path

    if keep is not None and no_verify:
        raise click.UsageError("--keep needs a verified backup: omit --no-verify.")
    settings = load_command_settings(module).settings
    saver = LakeBackup(settings, dagster_home_path(settings), say=print_progress)
    result = saver.make(folder, verify=not no_verify, keep=keep)
    if result.record.outside:
        names = ", ".join(result.record.outside)
        print_progress(f"Not in the backup, because their files are outside the warehouse: {names}")
    if (settings.state_dir / "kafka").is_dir():
        print_progress("Not in the backup: the topics of the embedded Kafka.")
    if as_json:
        click.echo(json.dumps({"folder": str(result.folder), "record": asdict(result.record)}, indent=2))
        return
    record = result.record
    verified = f"; {record.tables:,} tables with {record.rows:,} rows read" if record.verified_at else ""
    click.echo(f"{result.folder}: Nessie was suspended for {record.suspended_s * 1000:.0f} ms{verified}.")


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option("-m", "--module", help=MODULE_HELP)
@click.option("--replace", is_flag=True, help="Rename existing folders of the lake first, and keep them.")
def restore(folder: Path, module: str | None, replace: bool) -> None:
    """Restore the embedded lake from a backup.

    FOLDER is a backup or a folder of backups, of which the newest of this lake is taken.

    Stop Dagster and the servers first: branchlake down. The lake comes back to the folders that it had,
    because the metadata of Iceberg tables has absolute paths.
    """
    from branchlake_dagster.backup.lake_backup import load_backup
    from branchlake_dagster.backup.lake_restore import restore_lake
    from branchlake_dagster.cli.dagster_home import dagster_home_path

    settings = load_command_settings(module).settings
    _require_no_daemon(settings)
    restored = restore_lake(
        load_backup(folder, settings.state_dir),
        settings,
        dagster_home_path(settings),
        replace=replace,
        say=print_progress,
    )
    for path in restored.moved:
        print_progress(f"The former folder is {path}.")
    main = f" main is {restored.main_hash}." if restored.main_hash else ""
    click.echo(f"The lake is restored in {restored.state_dir}.{main}")
    print_progress("Next: branchlake up; branchlake doctor.")


def _require_no_daemon(settings: Settings) -> None:
    """Raise ClickException if a Dagster daemon may run. A damaged Dagster home can still be restored."""
    from branchlake_dagster.cli.run_branches import find_daemon_warning

    try:
        warning = find_daemon_warning(settings)
    except Exception as error:  # noqa: BLE001 - YAML, SQLite and Dagster raise many classes
        print_progress(
            f"Dagster's home cannot be read ({type(error).__name__}), so it is unknown whether a Dagster"
            " daemon runs. No daemon may run during the restore."
        )
        return
    if warning:
        raise click.ClickException(warning)
