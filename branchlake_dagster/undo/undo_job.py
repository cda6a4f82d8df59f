"""The Dagster job that undoes a publication.

This module does not postpone annotations: Dagster compares the annotation of `context` with the class itself.
"""

from dagster import Config, JobDefinition, MetadataValue, OpExecutionContext, job, op
from pydantic import Field

from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster.undo.report import report_undo
from branchlake_dagster.undo.result import Undo
from branchlake_dagster.undo.summary import format_publications, format_undo, format_undo_table


class UndoConfig(Config):
    """The run configuration of the job: the publication to undo, and options."""

    publication: str = Field(description="Its run, or its commit on main, or the beginning of one of them.")
    with_followers: bool = Field(False, description="Also undo later publications that build on it.")
    keep_positions: bool = Field(
        False, description="Do not read again what it had read: records of topics, changes of other tables."
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
        if not config.dry_run:
            report_undo(context.instance, lake, undo)
        context.add_output_metadata(
            {
                "result": MetadataValue.text(format_undo(undo, dry_run=config.dry_run)),
                "tables": MetadataValue.md(format_undo_table(undo)),
                "publications": MetadataValue.md(format_publications(undo)),
            }
        )

    @job(name=f"{prefix}undo_publication", description="Undoes a publication, by one commit on main.")
    def undo_publication_job() -> None:
        undo_publication_op()

    return undo_publication_job
