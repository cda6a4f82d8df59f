"""The command `branchlake reprocess`, which ingests dead letters or kept records again.

The command imports its dependencies when it runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP
from branchlake_dagster.cli.option_types import Moment
from branchlake_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster import RepositoryDefinition

    from branchlake_dagster.ingest.declaration import Ingest
    from branchlake_dagster.ingest.reprocessing import DeadLetterSelection
    from branchlake_dagster.settings import Settings


@click.command()
@click.argument("ingestion")
@click.option("-m", "--module", help=MODULE_HELP)
@click.option("--error-kind", "kinds", multiple=True, help="Only dead letters of this kind; may be repeated.")
@click.option("--table", help="Only dead letters of this table, namespace.name.")
@click.option("--since", type=Moment(), help="Received at this time or later (without a zone: UTC).")
@click.option("--until", type=Moment(), help="Received before this time (without a zone: UTC).")
@click.option("--from-raw", is_flag=True, help="Decode all kept records of the interval again.")
@click.option("--dry-run", is_flag=True, help="Only count the dead letters or kept records.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def reprocess(
    ingestion: str,
    module: str | None,
    kinds: tuple[str, ...],
    table: str | None,
    since: datetime | None,
    until: datetime | None,
    from_raw: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Ingest the dead letters of INGESTION again, or its kept records.

    Each dead letter is reprocessed once. If it fits now, its rows are written to their tables.
    One run of the ingestion reprocesses them on its own branch, which is checked and published like
    any other. A record that fails again becomes a new dead letter. Dead letters of tables whose rows
    are merged are skipped.

    --from-raw decodes the kept records that were received from --since on and before --until with
    today's decoder. Rows and dead letters that differ are replaced. The ingestion needs keep_value=True.
    """
    from branchlake_dagster.ingest.reprocessing import DeadLetterSelection

    if from_raw:
        if since is None or until is None or kinds or table is not None:
            raise ConfigurationError(
                "--from-raw needs an interval of receipt and takes no other selection.",
                hint="Give --since and --until, and neither --error-kind nor --table.",
                reason="interval_missing",
            )
        _reprocess_kept_records(ingestion, module, since, until, dry_run, as_json)
        return
    selection = DeadLetterSelection(kinds, table, since, until)
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


def _reprocess_kept_records(
    ingestion: str, module: str | None, since: datetime, until: datetime, dry_run: bool, as_json: bool
) -> None:
    from branchlake_dagster.ingest.batch_context import load_ingestion_tables
    from branchlake_dagster.ingest.raw_reprocessing import (
        RawInterval,
        count_kept_records,
        require_kept_records,
    )
    from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
    from branchlake_dagster.stored_names import RunTag

    interval = RawInterval(since, until)
    location, ingest = _find_ingestion(ingestion, module)
    require_kept_records(ingest)
    lake = Lakehouse(location.settings, start=False)
    namespace = location.settings.default_namespace
    existing_tables = load_ingestion_tables(ingest, lake.nessie, lake.catalog(MAIN), namespace)
    session = lake.spark_session()
    try:
        kept = count_kept_records(session, existing_tables, interval)
    finally:
        session.stop()
    tags = {RunTag.INGESTION: ingestion, RunTag.REPROCESS_RAW: interval.to_tag()}
    run_id = None if dry_run or not kept.total else location.execute(tags)
    if as_json:
        days = [{"day": day, "records": count} for day, count in kept.by_day]
        first = kept.first_received.isoformat() if kept.first_received else None
        click.echo(json.dumps({"letters": [], "days": days, "kept_since": first, "run": run_id}, indent=2))
        return
    for day, count in kept.by_day:
        click.echo(f"{count:>10,}  {day}")
    if note := kept.note(interval):
        click.echo(note)
    if not kept.total:
        click.echo("No record is kept in the interval.")
    elif run_id is not None:
        click.echo(f"Run {run_id} has decoded them on its branch, which is published like any other.")


def _reprocess_dead_letters(
    ingestion: str, module: str | None, selection: DeadLetterSelection, *, dry_run: bool
) -> tuple[list[tuple[str | None, str, int]], str | None]:
    """Count the selected dead letters, and reprocess them unless `dry_run` is set.

    Return a list of table (None if unknown), error kind and number of dead letters, and the id of the run
    that reprocessed them; the id is None if no run was started.
    """
    from branchlake_dagster.ingest.batch_context import load_ingestion_tables
    from branchlake_dagster.ingest.reprocessing import count_dead_letters
    from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
    from branchlake_dagster.stored_names import RunTag

    location, ingest = _find_ingestion(ingestion, module)
    lake = Lakehouse(location.settings, start=False)
    existing_tables = load_ingestion_tables(
        ingest, lake.nessie, lake.catalog(MAIN), location.settings.default_namespace
    )
    session = lake.spark_session()
    try:
        counts = count_dead_letters(session, existing_tables, selection)
    finally:
        session.stop()
    if dry_run or not counts:
        return counts, None
    tags = {RunTag.INGESTION: ingestion, RunTag.REPROCESS: selection.to_tag()}
    return counts, location.execute(tags)


@dataclass(frozen=True)
class _IngestionLocation:
    """The code location of an ingestion, and the settings of its lake."""

    repository: RepositoryDefinition
    settings: Settings
    job_name: str

    def execute(self, tags: dict[str, str]) -> str:
        """Execute the ingestion's job in this process with these tags. Return the id of the run."""
        from branchlake_dagster.cli.dagster_home import open_instance
        from branchlake_dagster.internals.dagster_sqlite import keep_sqlite_connections

        keep_sqlite_connections()
        with open_instance(self.settings) as instance:
            job = self.repository.get_job(self.job_name)
            return job.execute_in_process(instance=instance, tags=tags).run_id


def _find_ingestion(ingestion: str, module: str | None) -> tuple[_IngestionLocation, Ingest]:
    """Load the code location, and return it with the ingestion of this name.

    Raises ConfigurationError if the code location cannot be loaded or has no such ingestion.
    """
    from branchlake_dagster.cli.location import require_location
    from branchlake_dagster.ingest.batch_assets import ingests_by_name

    location, lake_settings = require_location(module)
    name = f"ingest_{ingestion}_job"
    if ingestion not in ingests_by_name or not location.repository.has_job(name):
        raise ConfigurationError(
            f"{location.name} has no ingestion {ingestion}.",
            hint=f"Its ingestions: {', '.join(sorted(ingests_by_name)) or 'none'}.",
        )
    found = _IngestionLocation(location.repository, lake_settings.settings, name)
    return found, ingests_by_name[ingestion]
