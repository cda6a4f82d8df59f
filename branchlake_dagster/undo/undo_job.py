"""The Dagster job that undoes a publication.

This module does not postpone annotations: Dagster compares the annotation of `context` with the class itself.
"""

import time

from dagster import Config, JobDefinition, MetadataValue, OpExecutionContext, job, op
from pydantic import Field

from branchlake_dagster.internals.dagster import find_repository
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster.undo.recomputation import report_stale_readers, request_recomputation
from branchlake_dagster.undo.report import report_undo
from branchlake_dagster.undo.result import Undo
from branchlake_dagster.undo.stale_readers import StaleReaders, find_stale_readers
from branchlake_dagster.undo.summary import (
    format_publications,
    format_reader_table,
    format_undo,
    format_undo_table,
)


class UndoConfig(Config):
    """The run configuration of the job: the publication to undo, and options."""

    publication: str = Field(description="Its run, or its commit on main, or the beginning of one of them.")
    with_followers: bool = Field(False, description="Also undo later publications that build on it.")
    keep_positions: bool = Field(
        False, description="Do not read again what it had read: records of topics, changes of other tables."
    )
    recompute: bool = Field(
        False,
        description="Also request backfills of assets that read the undone rows and are not recomputed by"
        " themselves.",
    )
    dry_run: bool = Field(False, description="Only say what would be undone.")


def undo_job(lakehouse_key: str = "lakehouse", prefix: str = "") -> JobDefinition:
    """Build the job `undo_publication`, which undoes a publication in all of its tables by one commit.

    The launchpad asks for the publication. The results are metadata of the job's output. `lakehouse_key` is
    the resource key of the lake. `prefix` comes before the job's name.
    """

    @op(
        name=f"{prefix}undo_publication_op",
        description="Undoes a publication and keeps later ones.",
        required_resource_keys={lakehouse_key},
    )
    def undo_publication_op(context: OpExecutionContext, config: UndoConfig) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        undoer = PublicationUndo.of_lake(lake)
        publication = find_publication(lake.nessie, config.publication)
        run_undo = undoer.plan if config.dry_run else undoer.undo
        undo: Undo = run_undo(
            publication, with_followers=config.with_followers, keep_positions=config.keep_positions
        )
        context.log.info(format_undo(undo, dry_run=config.dry_run))
        stale, backfills = StaleReaders(), dict[str, str]()
        repository = find_repository(context)
        repositories = [] if repository is None else [repository]
        if not config.dry_run:
            report_undo(context.instance, lake, undo)
        if undo.commit is not None or (config.dry_run and not undo.dependencies):
            stale = find_stale_readers(lake, undo, repositories, context.instance)
        if not config.dry_run:
            report_stale_readers(context.instance, undo, stale)
        if config.recompute and not config.dry_run:
            backfills = request_recomputation(
                context.instance, undo, stale, repositories, requested_at=time.time()
            )
        context.add_output_metadata(
            {
                "result": MetadataValue.text(format_undo(undo, dry_run=config.dry_run)),
                "tables": MetadataValue.md(format_undo_table(undo)),
                "publications": MetadataValue.md(format_publications(undo)),
                "computed_from_undone_rows": MetadataValue.md(format_reader_table(stale, backfills)),
            }
        )

    @job(name=f"{prefix}undo_publication", description="Undoes a publication, by one commit on main.")
    def undo_publication_job() -> None:
        undo_publication_op()

    return undo_publication_job
