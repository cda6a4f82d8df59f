"""The command `branchlake reprocess`, which ingests dead letters again.

The command imports its dependencies when it runs.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP
from branchlake_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from branchlake_dagster.ingest.reprocessing import DeadLetterSelection


@click.command()
@click.argument("ingestion")
@click.option("-m", "--module", help=MODULE_HELP)
@click.option("--error-kind", "kinds", multiple=True, help="Only dead letters of this kind; may be repeated.")
@click.option("--table", help="Only dead letters of this table, namespace.name.")
@click.option("--since", type=click.DateTime(), help="Received at this time or later, UTC.")
@click.option("--until", type=click.DateTime(), help="Received before this time, UTC.")
@click.option("--dry-run", is_flag=True, help="Only count the dead letters.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def reprocess(
    ingestion: str,
    module: str | None,
    kinds: tuple[str, ...],
    table: str | None,
    since: datetime | None,
    until: datetime | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Ingest the dead letters of INGESTION again.

    Each dead letter is reprocessed once. If it fits now, its rows are written to their tables.
    One run of the ingestion reprocesses them on its own branch, which is checked and published like
    any other. A record that fails again becomes a new dead letter. Dead letters of tables whose rows
    are merged are skipped.
    """
    from branchlake_dagster.ingest.reprocessing import DeadLetterSelection

    selection = DeadLetterSelection(kinds, table, _to_utc(since), _to_utc(until))
    counts, run_id = _reprocess_dead_letters(ingestion, module, selection, dry_run=dry_run)
    if as_json:
        dead_letters = [
            {"table": table_name, "error_kind": kind, "letters": count} for table_name, kind, count in counts
        ]
        click.echo(json.dumps({"letters": dead_letters, "run": run_id}, indent=2))
        return
    for table_name, kind, count in counts:
        click.echo(f"{count:>10,}  {kind:<12} {table_name or '(no table)'}")
    if not counts:
        click.echo("No dead letters match.")
    elif run_id is not None:
        click.echo(f"Run {run_id} has reprocessed them on its branch, which is published like any other.")


def _to_utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(tzinfo=UTC)


def _reprocess_dead_letters(
    ingestion: str, module: str | None, selection: DeadLetterSelection, *, dry_run: bool
) -> tuple[list[tuple[str | None, str, int]], str | None]:
    """Return the number of dead letters by table and kind, and the id of the run that reprocessed them."""
    from dagster import DagsterInstance

    from branchlake_dagster.cli.dagster_home import dagster_home
    from branchlake_dagster.cli.location import require_location
    from branchlake_dagster.ingest.batch_assets import ingests_by_name
    from branchlake_dagster.ingest.batch_context import load_ingestion_tables
    from branchlake_dagster.ingest.reprocessing import count_dead_letters
    from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse

    location, lake_settings = require_location(module)
    repository, settings = location.repository, lake_settings.settings
    name = f"ingest_{ingestion}_job"
    if ingestion not in ingests_by_name or not repository.has_job(name):
        raise ConfigurationError(
            f"{location.name} has no ingestion {ingestion}.",
            hint=f"Its ingestions: {', '.join(sorted(ingests_by_name)) or 'none'}.",
        )
    ingest = ingests_by_name[ingestion]
    lake = Lakehouse(settings)
    existing_tables = load_ingestion_tables(
        ingest, lake.nessie, lake.catalog(MAIN), settings.default_namespace
    )
    session = lake.spark_session()
    try:
        counts = count_dead_letters(session, existing_tables, selection)
    finally:
        session.stop()
    if dry_run or not counts:
        return counts, None
    dagster_home(settings)
    from branchlake_dagster.stored_names import RunTag

    tags = {RunTag.INGESTION: ingestion, RunTag.REPROCESS: selection.to_tag()}
    with DagsterInstance.get() as instance:
        run_result = repository.get_job(name).execute_in_process(instance=instance, tags=tags)
    return counts, run_result.run_id
