"""The Dagster jobs and schedules of the maintenance.

This module does not postpone annotations: Dagster compares the annotation of `context` with the class itself.
"""

from dagster import (
    Config,
    DefaultScheduleStatus,
    Failure,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    ScheduleDefinition,
    job,
    op,
)
from pydantic import Field

from branchlake_dagster.maintenance.maintenance_result import MaintenancePart
from branchlake_dagster.maintenance.maintenance_run import (
    MaintenanceOptions,
    plan_maintenance,
    run_maintenance,
)
from branchlake_dagster.maintenance.summary import Section, list_plan_sections, list_result_sections
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource

JOB_NAMES = {
    MaintenancePart.COMPACTION: "compact_tables",
    MaintenancePart.EXPIRY: "expire_snapshots",
    MaintenancePart.COLLECTION: "collect_files",
}
_DESCRIPTIONS = {
    MaintenancePart.COMPACTION: "Rewrites small files and delete files on Spark, beside running pipelines.",
    MaintenancePart.EXPIRY: "Removes old snapshots from the metadata of tables, and merges small"
    " manifests. Deletes no file.",
    MaintenancePart.COLLECTION: "Plans to delete files that nothing can read, and deletes those that an"
    " earlier run planned.",
}
SCHEDULE_TIMES = {
    MaintenancePart.COMPACTION: "0 1 * * *",
    MaintenancePart.EXPIRY: "0 3 * * *",
    MaintenancePart.COLLECTION: "0 4 * * *",
}
"""The default cron schedule of each part: at night, in the order of the parts."""


class MaintenanceConfig(Config):
    """Which tables a maintenance run is about, and its limits."""

    tables: list[str] = Field([], description="Dotted names of tables; empty for all tables of main.")
    minutes: float | None = Field(
        None,
        gt=0,
        description="Minutes after which a compaction begins no further work. The next run continues."
        " An expiry has no limit.",
    )
    dry_run: bool = Field(False, description="Report what would be done, and change nothing.")


class CollectionConfig(Config):
    """The limits of a collection, which is always about the whole lake."""

    minutes: float | None = Field(
        None,
        gt=0,
        description="Minutes after which a collection lists and deletes no further files. The next run"
        " continues. (default: BRANCHLAKE_COLLECTION_BUDGET_S)",
    )
    dry_run: bool = Field(False, description="Report what would be done, and change nothing.")


def maintenance_job(
    part: MaintenancePart,
    options: MaintenanceOptions | None = None,
    *,
    lakehouse_key: str = "lakehouse",
    prefix: str = "",
) -> JobDefinition:
    """Return the job of one part of the maintenance: `compact_tables`, `expire_snapshots` or `collect_files`.

    The launchpad shows tables, limits and `dry_run` as the job's configuration. The result is metadata of the
    job's output. If a table or a file fails, the run processes the others and then fails. `lakehouse_key` is
    the resource key of the lake. `prefix` is added before the job's name.
    """
    name = f"{prefix}{JOB_NAMES[part]}"
    base_options = options or MaintenanceOptions()

    def run_part(
        context: OpExecutionContext, tables: list[str], minutes: float | None, dry_run: bool
    ) -> None:
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        part_options = MaintenanceOptions(
            base_options.compaction,
            base_options.expiry,
            base_options.max_seconds if minutes is None else minutes * 60,
        )
        if dry_run:
            plan = plan_maintenance(
                lake, [part], tables=tables or None, options=part_options, progress=context.log.info
            )
            _report(context, list_plan_sections(plan))
            for error in plan.errors.values():
                raise error
            return
        result = run_maintenance(
            lake, [part], tables=tables or None, options=part_options, progress=context.log.info
        )
        sections = list_result_sections(result)
        _report(context, sections)
        for error in result.errors.values():
            raise error
        if result.has_failed:
            raise Failure(
                description=" ".join(section.sentence for section in sections),
                metadata={str(section.part): MetadataValue.md(section.to_markdown()) for section in sections},
                allow_retries=False,
            )

    if part is MaintenancePart.COLLECTION:

        @op(name=f"{name}_op", description=_DESCRIPTIONS[part], required_resource_keys={lakehouse_key})
        def part_op(context: OpExecutionContext, config: CollectionConfig) -> None:
            run_part(context, [], config.minutes, config.dry_run)

    else:

        @op(name=f"{name}_op", description=_DESCRIPTIONS[part], required_resource_keys={lakehouse_key})
        def part_op(context: OpExecutionContext, config: MaintenanceConfig) -> None:
            run_part(context, config.tables, config.minutes, config.dry_run)

    @job(name=name, description=_DESCRIPTIONS[part])
    def part_job() -> None:
        part_op()

    return part_job


def _report(context: OpExecutionContext, sections: list[Section]) -> None:
    for section in sections:
        context.log.info(section.sentence)
    context.add_output_metadata(
        {str(section.part): MetadataValue.md(section.to_markdown()) for section in sections}
    )


def maintenance_schedule(
    part_job: JobDefinition,
    *,
    cron_schedule: str,
    minutes: float,
    timezone: str = "UTC",
    status: DefaultScheduleStatus = DefaultScheduleStatus.STOPPED,
) -> ScheduleDefinition:
    """Return the schedule of a maintenance job.

    Its compactions and collections begin no further work after `minutes`; an expiry has no limit. Runs from
    the launchpad have the limit of the job's options instead: without one, compactions have no limit, and
    collections have `BRANCHLAKE_COLLECTION_BUDGET_S`.
    """
    return ScheduleDefinition(
        name=f"{part_job.name}_schedule",
        job=part_job,
        cron_schedule=cron_schedule,
        execution_timezone=timezone,
        default_status=status,
        run_config={"ops": {f"{part_job.name}_op": {"config": {"minutes": minutes}}}},
    )
