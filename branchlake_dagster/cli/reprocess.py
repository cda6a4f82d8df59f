"""`branchlake reprocess`: dead letters back through the input. What it needs is imported when it runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP
from branchlake_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from branchlake_dagster.ingest.reprocessing import Chosen


@click.command()
@click.argument("ingestion")
@click.option("-m", "--module", help=MODULE_HELP)
@click.option("--error-kind", "kinds", multiple=True, help="Only letters of this kind; may be repeated.")
@click.option("--table", help="Only letters of this table, namespace.name.")
@click.option("--since", type=click.DateTime(), help="Received then or later, UTC.")
@click.option("--until", type=click.DateTime(), help="Received before, UTC.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
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

    Each is put back once; what fits now comes into its tables.
    One run of the ingestion does it, on a branch of its own, gated and published as any other. What
    fails again is a new dead letter. Letters of tables whose rows are merged are left out.
    """
    from branchlake_dagster.ingest.reprocessing import Chosen

    chosen = Chosen(kinds, table, _utc(since), _utc(until))
    counts, run_id = _put_back(ingestion, module, chosen, dry_run=dry_run)
    if as_json:
        letters = [{"table": one, "error_kind": kind, "letters": count} for one, kind, count in counts]
        click.echo(json.dumps({"letters": letters, "run": run_id}, indent=2))
        return
    for one, kind, count in counts:
        click.echo(f"{count:>10,}  {kind:<12} {one or '(no table)'}")
    if not counts:
        click.echo("No dead letter is chosen.")
    elif run_id is not None:
        click.echo(f"Run {run_id} has put them back on its branch; it is published as any other.")


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(tzinfo=UTC)


def _put_back(
    ingestion: str, module: str | None, chosen: Chosen, *, dry_run: bool
) -> tuple[list[tuple[str | None, str, int]], str | None]:
    """How many letters are chosen by table and kind, and the run that has put them back."""
    from dagster import DagsterInstance

    from branchlake_dagster.cli.dagster_home import dagster_home
    from branchlake_dagster.cli.location import required_location
    from branchlake_dagster.ingest.batch_assets import declared
    from branchlake_dagster.ingest.batch_context import known_tables
    from branchlake_dagster.ingest.reprocessing import waiting_letters
    from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse

    location, lake_settings = required_location(module)
    repository, settings = location.repository, lake_settings.settings
    name = f"ingest_{ingestion}_job"
    if ingestion not in declared or not repository.has_job(name):
        raise ConfigurationError(
            f"{location.name} has no ingestion {ingestion}.",
            hint=f"It has {', '.join(sorted(declared)) or 'none'}.",
        )
    ingest = declared[ingestion]
    lake = Lakehouse(settings)
    known = known_tables(ingest, lake.nessie, lake.catalog(MAIN), settings.default_namespace)
    session = lake.spark_session()
    try:
        counts = waiting_letters(session, known, chosen)
    finally:
        session.stop()
    if dry_run or not counts:
        return counts, None
    dagster_home(settings)
    from branchlake_dagster.stored_names import RunTag

    tags = {RunTag.INGESTION: ingestion, RunTag.REPROCESS: chosen.text()}
    with DagsterInstance.get() as instance:
        done = repository.get_job(name).execute_in_process(instance=instance, tags=tags)
    return counts, done.run_id
